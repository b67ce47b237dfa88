"""Check the messages of `evaluate` and `predict` about the given rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from streamkern.cli.main import run_command


def test_the_store_trained_on_is_said_to_have_other_target_means_than_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that predict and evaluate say so once, and only for this store."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    words, a = rng.integers(0, 80, 400), rng.normal(size=400)
    frame = pd.DataFrame({"a": a, "street": [f"s{k}" for k in words], "y": np.sin(words) + a})
    frame.to_csv("t.csv", index=False)
    assert run_command(["ingest", "t.csv", "t.zarr", "--y", "y"]) == 0
    assert run_command(["ingest", "t.csv", "like.zarr", "--y", "y", "--like", "t.zarr"]) == 0
    fast = ["--set", "model.metric=none", "--set", "model.kernel=laplace"]
    assert run_command(["train", "--train", "t.zarr", "--run-dir", "run", *fast]) == 0
    for command in ("evaluate", "predict"):
        for rows in ("t.zarr", "t.csv", "like.zarr"):
            capsys.readouterr()
            more = [f"answers of {rows}.csv"] if command == "predict" else []
            assert run_command([command, "run", rows, *more]) == 0
            said = " ".join(capsys.readouterr().err.split())
            assert said.count("mean targets of other rows") == (rows == "t.zarr"), said
            assert ("'street'" in said) == (rows == "t.zarr")
