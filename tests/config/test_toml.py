"""Check the text of run files, and that malicious ones are refused quickly with little memory."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.basics.errors import ConfigError
from streamkern.cli.options import parse_transform
from streamkern.cli.run_options import parse_setting
from streamkern.config.run_config import load_run_file
from streamkern.config.toml import parse_toml, run_file_text, toml
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from tests.searches import config
from tests.traced_memory import traced_memory


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = " + "[" * 100_000, "nested too deeply"),
        ("x = " + "{a = " * 50_000, "nested too deeply"),
        ("[data]\n" + ".".join(["a"] * 100_000) + " = 1", "line 2 has a key of more than 32 parts"),
        (".".join(['"a b"', "'c'"] * 50_000) + " = 1", "line 1 has a key of more than 32 parts"),
        ("[" + ".".join(["a"] * 100_000) + "]", "line 1 has a key of more than 32 parts"),
        ("x = 1 # " + "x" * (1 << 24), "characters, 16777216 are allowed"),
    ],
)
def test_malicious_run_file_is_refused_in_bounded_memory(
    tmp_path: Path, text: str, message: str
) -> None:
    """Check that they are refused before they are parsed: a long key would take 27 s, 3.7 GB."""
    (tmp_path / "run.toml").write_text(text)
    with (
        traced_memory() as traced,
        pytest.raises(ConfigError, match=rf"run\.toml' is not valid TOML \(.*{message}"),
    ):
        load_run_file(tmp_path / "run.toml")
    assert traced.peak < 200e6


def test_malicious_command_line_value_is_refused() -> None:
    assert parse_setting("model.kernel=" + "[" * 100_000)[1].startswith("[[")
    with pytest.raises(ConfigError, match="must be a table"):
        parse_transform("{a = " * 50_000)


def test_numbers_and_dates_are_not_long_keys() -> None:
    numbers = ", ".join(["0.25", "1.5e-3", "-2.0"] * 1000)
    text = f'a.b.c.d = [{numbers}]\nx = 1979-05-27T07:32:00.999\ny = "{"a/b." * 30}"'
    assert len(parse_toml(text)["a"]["b"]["c"]["d"]) == 3000


@pytest.mark.slow
def test_long_words_are_parsed_in_linear_time() -> None:
    for word in ("a" * 10**7, "a." * 20 + "a" * 10**7, "\"' " * 10**6):
        assert len(parse_toml(f"y = 1 # {word}")) == 1


def test_excessive_number_of_copies_is_refused() -> None:
    """Check that 10^18 copies are refused at once; planning them would take 20 s and 3.5 GB."""
    source = ArraySource(np.ones((400, 4), np.float32), np.ones((400, 1)))
    with pytest.raises(ConfigError, match=r"copies=1000000000000000000 gives \d+ units"):
        AugmentedSource(source, 10**18)
    assert AugmentedSource(source, 10**7).n_rows == 4 * 10**9


TEXT = st.text(st.characters(codec="utf-8"))


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["a", "b-1"]), st.dictionaries(TEXT, VALUES, max_size=3)))
def test_toml_roundtrips(tables: dict[str, Any]) -> None:
    assert tomllib.loads(toml(tables)) == tables


def test_run_file_describes_the_settings(tmp_path: Path) -> None:
    run = config(
        **{
            "data.train": ["a.zarr", 's3://b/"c"'], "data.weights": [1, 2.5], "data.copies": 3,
            "data.transforms": [{"kind": "scale"}, {"kind": "noise", "sigma": 0.1}],
            "data.storage_options": {"secret": "hush"}, "run.checkpoint_every": "5 min",
            "run.evaluate_at": [10, 100], "solver.average": False, "solver.ridge": 1e-6,
        }
    )  # fmt: skip
    text = run_file_text(run)
    assert "hush" not in text
    assert "storage_options" not in text
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    assert load_run_file(tmp_path / "run.toml") == run.with_overrides({"data.storage_options": {}})


@pytest.mark.parametrize(
    ("size", "text"),
    [("1 GiB", "1 GiB"), ("1.5 GiB", "1536 MiB"), ("2 TiB", "2 TiB"), (2**20 + 1, 2**20 + 1)],
)
def test_run_file_memory_is_readable(size: str | int, text: str | int) -> None:
    run = config(**{"run.memory": size})
    assert f"memory = {json.dumps(text)}\n" in run_file_text(run)
