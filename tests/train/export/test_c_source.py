"""Test models exported to C, compiled and called row by row, against `predict`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_digits

import streamkern as sk
from benchmarks.exports import COMPILER, CompiledModel
from streamkern.basics.errors import ConfigError
from streamkern.cli.main import run_command
from streamkern.train.export.c_source import identifier, literal
from tests.export_models import (
    CHANGES,
    NEW,
    QUICK,
    SPREAD,
    VALUES,
    X,
    compiled,
    in_float64,
    rows_of,
    with_tails,
)

ROOT = Path(__file__).resolve().parents[3]

RNG = np.random.default_rng(0)
FEW = NEW[:40]


@compiled
@pytest.mark.parametrize(
    "changes",
    [
        *CHANGES,
        *({"kernel": k} for k in ("gaussian", "laplace", "laplace_l1", "polynomial", "relu_ntk")),
    ],
    ids=str,
)
def test_c_predictions_equal_model(changes: dict[str, Any], tmp_path: Path) -> None:
    model, new = in_float64(changes), with_tails(FEW)
    model.to_c(tmp_path / "m.c")
    actual = rows_of(CompiledModel(tmp_path / "m.c", "-O2"), "predictions", new)
    expected = model.predict(new)
    np.testing.assert_allclose(
        actual.reshape(expected.shape), expected, atol=1e-9 * SPREAD, rtol=1e-9
    )


@compiled
@pytest.mark.parametrize("labels", [["b", "a", "c?"], [3, 1, 2]], ids=str)
def test_c_classifier_returns_labels_probabilities_and_scores(
    labels: list[Any], tmp_path: Path
) -> None:
    y = np.array(labels)[np.digitize(X[:, 0], [-0.5, 0.5])]
    model = sk.KernelClassifier(**QUICK, loss="log_loss", precision="float64").fit(X, y)
    model.to_c(tmp_path / "m.c")
    function, expected = CompiledModel(tmp_path / "m.c", "-O2"), model.predict_proba(FEW)
    for row, p, label in zip(FEW, expected, model.predict(FEW), strict=True):
        actual = function(row)
        assert np.allclose(actual["probabilities"], p, atol=1e-8)
        text = actual["labels"][0]
        assert (text.decode() if isinstance(text, bytes) else text) == label


@compiled
def test_float32_export_is_as_accurate_as_model(tmp_path: Path) -> None:
    """Compare both with the sum in float64 of the same weights."""
    model = sk.KernelRegressor(**QUICK, precision="exact").fit(X, VALUES)
    rows = FEW.astype(np.float32)
    actual = {}
    for dtype, kind in (("float32", "float"), ("float64", "double")):
        model.to_c(tmp_path / f"{kind}s.c", dtype=dtype)
        function = CompiledModel(tmp_path / f"{kind}s.c", "-O2")
        assert function.parameters[0][1:] == (kind, "X", "3")
        actual[dtype] = rows_of(function, "predictions", rows)[:, 0]
    rounding, truth = np.abs(model.predict(rows) - actual["float64"]).max(), actual["float64"]
    assert 0 < np.abs(actual["float32"] - truth).max() < max(2 * rounding, 1e-4 * SPREAD)


@compiled
def test_table_columns_become_arguments(tmp_path: Path) -> None:
    """Check numbers with gaps, dates, text, and names that C does not allow."""
    n = 200
    table = pd.DataFrame({
        "a number": RNG.normal(size=n), "town": RNG.choice(["x", "y", 'z"\\ü'], n),
        "day": pd.date_range("2020-01-01", periods=n), "1st": RNG.integers(0, 9, n) / 2,
    })  # fmt: skip
    table.loc[::9, "a number"] = np.nan
    table.loc[::7, "town"] = None
    y = table["1st"] + (table["town"] == "x")
    model = sk.KernelRegressor(**QUICK, precision="float64").fit(table, y)
    model.to_c(tmp_path / "m.c")
    function = CompiledModel(tmp_path / "m.c", "-O2")
    names = [name for _, _, name, *_ in function.parameters]
    assert names[:4] == ["in0_a_number", "in1_town", "in2_day", "in3_1st"]
    days = (table["day"] - pd.Timestamp("1970-01-01")).dt.total_seconds() / 86400
    towns = [town.encode() if isinstance(town, str) else b"" for town in table["town"]]
    columns = zip(table["a number"], towns, days, table["1st"], strict=True)
    actual = [function(*([cell] for cell in row))["predictions"][0] for row in columns]
    np.testing.assert_allclose(actual, model.predict(table), atol=1e-6)


@compiled
def test_export_command_writes_c(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = QUICK | {"precision": "float64"}
    model = sk.KernelRegressor(run_dir=tmp_path / "run", **options).fit(X, VALUES)
    out = tmp_path / "deep" / "my model.c"
    assert run_command(["export", str(tmp_path / "run"), str(out)]) == 0
    assert "void my_model_predict(" in out.read_text()
    plain = out.rename(out.with_name("my_model.c"))
    actual = rows_of(CompiledModel(plain, "-O2"), "predictions", FEW)
    np.testing.assert_allclose(actual[:, 0], model.predict(FEW), rtol=1e-9)
    assert run_command(["export", str(tmp_path / "run"), str(plain)]) == 2
    assert "exists already" in capsys.readouterr().err


@compiled
def test_documented_c_example_compiles_and_predicts(tmp_path: Path) -> None:
    """Compile the C code of docs/howto/export.md with the model of that page."""
    page = (ROOT / "docs" / "howto" / "export.md").read_text()
    (example,) = re.findall(r"^```c\n(.*?)^```", page, re.M | re.S)
    *above, call = example.strip().splitlines()
    X, y = load_digits(return_X_y=True)
    model = sk.KernelClassifier(random_state=0).fit(X[:1400], y[:1400])
    model.to_c(tmp_path / "digits.c")
    pixels = ", ".join(map(str, X[1400]))
    set_pixels = f"const float row[64] = {{{pixels}}}; memcpy(pixels, row, sizeof row);"
    show = 'printf("%d %.9g", (int)label[0], probabilities[0]);'
    text = ["#include <stdio.h>", *above, "int main(void) {", set_pixels, call, show, "}"]
    (tmp_path / "main.c").write_text("\n".join(text))
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-Wall", "-Werror", "-O1", "-o", "main", "main.c", "-lm"],
        cwd=tmp_path,
        check=True,
    )
    label, p = subprocess.run(
        [tmp_path / "main"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(label) == model.predict(X[1400:1401])[0]
    assert float(p) == pytest.approx(model.predict_proba(X[1400:1401])[0, 0], abs=1e-4)


def test_too_large_c_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sk.KernelRegressor(**QUICK).fit(X, VALUES)
    monkeypatch.setattr("streamkern.train.export.c_source.MAX_C_FILE_BYTES", 100)
    with pytest.raises(ConfigError, match="export to ONNX, or train with fewer centers"):
        model.to_c(tmp_path / "m.c")
    assert not list(tmp_path.iterdir())


def test_numbers_and_strings_are_written_exactly() -> None:
    for value in (0.1, -1e-300, 3.0, 1e22, np.pi):
        assert float(literal(value, "f8")) == value
    single = np.float32(0.1)
    assert literal(single, "f4") == "0.1f"
    assert np.float32(literal(np.float32(1 / 3), "f4")[:-1]) == np.float32(1 / 3)
    assert [literal(v, "f8") for v in (np.inf, -np.inf, np.nan)] == ["INFINITY", "-INFINITY", "NAN"]
    assert literal('a"\\é?', "U") == r'"a\042\134\303\251\077"'


def test_identifiers_are_valid_c() -> None:
    identifiers = [identifier(name) for name in ("a number", "1st", "", "ü")]
    assert identifiers == ["a_number", "1st", "", "_"]
