"""Check that options of file formats mean the same in every command."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.runs import Printed, Run


def test_csv_options_work_in_every_command(tmp_path: Path, run: Run, printed: Printed) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    for name in ("train", "test"):
        # In the test rows, every tenth target is missing: 6 of 60.
        targets = [f"{a + b:.4f}" for a, b in X]
        if name == "test":
            targets[1::10] = [""] * 6
        lines = [f"{a:.4f};{b:.4f};{y}\n" for (a, b), y in zip(X, targets, strict=True)]
        (tmp_path / f"{name}.txt").write_bytes("".join(lines).replace(".", ",").encode("latin-1"))
    store, location, test = tmp_path / "s.zarr", tmp_path / "run", tmp_path / "test.txt"
    form = ("--names", "größe,b,y", "--decimal", ",", "--delimiter", ";", "--encoding", "latin-1")
    options = (*form, "--drop-missing-targets")

    printed("ingest", tmp_path / "train.txt", store, "--y", "y", *form)
    printed("train", "--train", store, "--run-dir", location, "--set", "model.n_centers=20")
    code, _, err = run("evaluate", location, test, *form)
    assert code == 2
    assert "row 1 is missing; --drop-missing-targets" in err
    text = printed("evaluate", location, test, *options)
    assert "left_out" in text
    assert "54" in text.split("\n")[2].split()
    printed("predict", location, test, tmp_path / "p.csv", *form)
    assert len((tmp_path / "p.csv").read_text().split("\n")) == 62
    text = printed("append", store, test, *options)
    assert "114 rows" in text
    assert "6 rows without a target were left out" in text
