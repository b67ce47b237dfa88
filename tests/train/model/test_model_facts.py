"""Test runs and models in a notebook: their facts, escaped text, no requests and no secrets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import streamkern
from streamkern.cli.run_info import run_overview, run_text
from streamkern.train.saved_model import load_model
from streamkern.train.train import train
from tests.fault_proxy import FaultProxy
from tests.notebooks import shown_cells
from tests.s3_server import SECRET, S3Server

pytestmark = pytest.mark.usefixtures("one_blas_thread")

rng = np.random.default_rng(0)
X = rng.normal(size=(300, 2)).astype(np.float32)
LABELS = np.where(X[:, 0] > 0, "<script>alert(1)</script>", "a&b")
FRAME = pd.DataFrame(X, columns=["<b>width</b>", "height"])


def settings(folder: Path | str, **model: Any) -> dict[str, Any]:
    """Return the tables of a run of the store in a folder."""
    return {
        "data": {"train": f"{folder}/s", "epochs": 2, "batch_size": 100},
        "model": {"n_centers": 40, **model},
        "solver": {"name": "block"},
        "run": {"threads": 1, "device": "cpu", "run_dir": f"{folder}/run"},
    }


@pytest.mark.parametrize("model", [{"metric": "learn"}, {"metric": "none", "loss": "log_loss"}])
def test_html_of_result_has_facts_and_escapes_text(tmp_path: Path, model: dict[str, Any]) -> None:
    streamkern.ingest_store(FRAME, tmp_path / "s", y=LABELS)
    source = streamkern.ZarrSource(tmp_path / "s")
    result = train(settings(tmp_path, **model), test=source)
    actual = shown_cells(result)
    reported = dict(re.findall(r"^  (\S+) +(.*)$", run_text(run_overview(tmp_path / "run")), re.M))
    expected_names = {"targets", "features", "centers"} | ({"loss"} - set(reported))
    assert actual.keys() - reported.keys() <= expected_names
    for name in actual.keys() & reported.keys() - {"epoch", "samples"}:
        assert actual[name] == reported[name], name
    assert (actual["epoch"], actual["samples"]) == ("2", "600")
    assert float(actual["test_accuracy"]) > 0.9
    assert actual["targets"] == "2 classes ('<script>alert(1)</script>', 'a&b')"
    assert actual["features"] == "2: <b>width</b>, height"
    assert "color" not in result._repr_html_()


def test_html_of_model_names_run_and_settings(tmp_path: Path) -> None:
    streamkern.ingest_store(FRAME, tmp_path / "s", y=X[:, :1] + 0.5)
    train(settings(tmp_path, kernel="gaussian", bandwidth=2.0, loss="huber"))
    model = load_model(tmp_path / "run")
    actual = shown_cells(model)
    model.backend.close()
    assert actual["run"] == str(tmp_path / "run")
    assert (actual["targets"], actual["centers"]) == ("1 value", "40")
    assert actual["kernel"] == repr(model.op.kernel)
    assert actual["loss"].startswith("huber(delta ")


def test_repr_is_short_and_has_no_arrays() -> None:
    source = streamkern.ArraySource(X, X[:, :1])
    tables = {"model": {"loss": "huber", "kernel": "gaussian", "n_centers": 40},
             "solver": {"name": "block"}, "data": {"epochs": 1}, "run": {"threads": 1}}  # fmt: skip
    result = train(tables, source=source, test=streamkern.ArraySource(X[:50], X[:50, :1]))
    for shown in (result, result.model):
        name, *lines = repr(shown).splitlines()
        actual = dict(line.split(maxsplit=1) for line in lines)
        assert name == type(shown).__name__
        assert (actual["features"], actual["targets"]) == (str(X.shape[1]), "1 value")
        assert (actual["centers"], actual["loss"].partition("(")[0]) == ("40", "huber")
        assert "aussian" in actual["kernel"]
        assert len(repr(shown)) < 1000
    actual = dict(line.split(maxsplit=1) for line in repr(result).splitlines()[1:])
    assert actual["solver"] == "block"
    assert float(actual["test_mse"]) == pytest.approx(result.metrics["test_mse"], rel=1e-3)
    result.model.columns = tuple("a" * 5000 for _ in range(3))
    assert len(repr(result.model)) < 1000


def test_user_kernel_points_are_not_shown() -> None:
    class Rational(streamkern.Kernel):
        def profile(self, sq: Any, xp: Any) -> Any:
            return 1 / (1 + sq)

    source = streamkern.ArraySource(X, X[:, :1])
    tables = {"model": {"kernel": Rational(1.0), "metric": "none"}, "run": {"threads": 1}}
    actual = shown_cells(train(tables, source=source))
    assert actual["kernel"].endswith("Rational")
    assert "values" not in actual


def test_html_hides_credentials(tmp_path: Path) -> None:
    streamkern.ingest_store(FRAME, tmp_path / "s", y=LABELS)
    model = train(settings(tmp_path)).model
    model.origin = {"run": f"https://me:{SECRET}@host/run?token={SECRET}", "step": 1}
    assert SECRET not in model._repr_html_()
    assert shown_cells(model)["run"].startswith("https://")


@pytest.mark.slow
def test_html_makes_no_request(s3: S3Server, bucket: str) -> None:
    url = f"s3://{bucket}"
    streamkern.ingest_store(FRAME, f"{url}/s", y=LABELS, storage_options=s3.options())
    with FaultProxy(upstream=s3.endpoint) as proxy:
        options = {"storage_options": s3.options(proxy.endpoint)}
        config = settings(url)
        result = train(config | {"data": config["data"] | options})
        model = load_model(f"{url}/run", **options)
        model.backend.close()
        assert proxy.log()
        assert shown_cells(result)["epoch"] == "2"
        assert shown_cells(model)["run"] == f"{url}/run"
        assert proxy.log() == []
