"""Check the messages of `evaluate` and `predict` about the given rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from streamkern.cli.main import run_command


def test_training_store_with_other_target_means_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that predict and evaluate say so once, and only for this store."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    arguments, a = rng.integers(0, 80, 400), rng.normal(size=400)
    frame = pd.DataFrame(
        {"a": a, "street": [f"s{k}" for k in arguments], "y": np.sin(arguments) + a}
    )
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
            message = " ".join(capsys.readouterr().err.split())
            assert message.count("mean targets of other rows") == (rows == "t.zarr"), message
            assert ("'street'" in message) == (rows == "t.zarr")
