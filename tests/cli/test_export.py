"""Check the command `export` with onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import streamkern as sk
from streamkern.cli.main import run_command
from streamkern.train.model.wide_sum import MAX_RELATIVE_ROUNDING

X = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)


def test_export_command_writes_onnx_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = np.where(X[:, 0] > 0, "b", "a")
    options = {"n_centers": 50, "epochs": 2, "random_state": 0, "loss": "log_loss"}
    model = sk.KernelClassifier(run_dir=tmp_path / "run", **options).fit(X, labels)
    out = tmp_path / "new" / "model.onnx"
    assert run_command(["export", str(tmp_path / "run"), str(out), "--dtype", "float64"]) == 0
    assert capsys.readouterr().out == f"the model is in {out}\n"
    session = onnxruntime.InferenceSession(out)
    names = [output.name for output in session.get_outputs()]
    outputs = dict(zip(names, session.run(None, {"X": X.astype(float)}), strict=True))
    assert names == ["labels", "probabilities", "scores"]
    np.testing.assert_array_equal(outputs["labels"], model.predict(X))
    # The model computes in float32, see `train.model.wide_sum`.
    rounding = MAX_RELATIVE_ROUNDING * outputs["scores"].std()
    np.testing.assert_allclose(outputs["probabilities"], model.predict_proba(X), atol=rounding)
    for arguments, error in (
        ([str(out)], "exists already; give another path, or --overwrite"),
        ([str(tmp_path / "model")], "does not end in .onnx or .c; give "),
    ):
        assert run_command(["export", str(tmp_path / "run"), *arguments]) == 2
        assert error in capsys.readouterr().err
    assert run_command(["export", str(tmp_path / "run"), str(out), "--overwrite"]) == 0
    assert run_command(["export", str(tmp_path / "no run"), str(tmp_path / "b.onnx")]) == 2
    assert not (tmp_path / "b.onnx").exists()
