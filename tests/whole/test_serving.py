"""Check that the server of docs/howto/serve.md returns the predictions of the model."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

import streamkern as sk
from benchmarks.serving import COMPILER, _compiled

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "serve_fastapi.py"
X, Y = load_digits(return_X_y=True)
START_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[sk.KernelClassifier, Path]:
    """Return a small fitted model, and its folder."""
    folder = tmp_path_factory.mktemp("serving") / "digits-model"
    fitted = sk.KernelClassifier(n_centers=200, epochs=1, random_state=0).fit(X[:600], Y[:600])
    fitted.save(folder)
    return fitted, folder


@pytest.fixture(scope="module")
def client(model: tuple[Any, Path]) -> Iterator[Any]:
    """Return an HTTP client of the running server."""
    for name in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(name, reason="needs fastapi, uvicorn and httpx")
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "serve_fastapi:app", "--port", str(port)],
        cwd=EXAMPLE.parent, env={**os.environ, "PYTHONPATH": str(ROOT), "MODEL": str(model[1])},
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as connection:
            wait_for(connection, process)
            yield connection
    finally:
        process.terminate()
        process.wait(30)


def wait_for(connection: Any, process: subprocess.Popen[bytes]) -> None:
    """Return once the server answers."""
    import httpx

    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            connection.get("/openapi.json")
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"the server did not start; exit code {process.poll()}")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 50])
def test_served_predictions_equal_model(client: Any, model: Any, rows: int) -> None:
    new_rows = X[1000 : 1000 + rows]
    answer = client.post("/predict", json={"rows": new_rows.tolist()})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"predictions": model[0].predict(new_rows).tolist()}


@pytest.mark.slow
def test_invalid_rows_are_refused_in_one_sentence(client: Any) -> None:
    def sentence(rows: Any, **how: Any) -> str:
        how = how or {"json": {"rows": rows}}
        answer = client.post("/predict", **how)
        assert answer.status_code == 422, answer.text
        detail = answer.json()["detail"]
        return str(detail if isinstance(detail, str) else detail[0]["msg"])

    assert "X has 3 features, but KernelClassifier is expecting 64" in sentence([[1, 2, 3]])
    assert "X" in sentence([[1] * 64, [1]])
    assert sentence([]) == "0 rows; send 1 to 10000"
    assert sentence([[0]] * 10_001) == "10001 rows; send 1 to 10000"
    assert "valid number" in sentence([["word"] * 64])
    full = '{"rows": [[' + ", ".join(["NaN"] * 64) + "]]}"
    assert "NaN in row 0" in sentence(
        None, content=full, headers={"Content-Type": "application/json"}
    )
    valid_answer = client.post("/predict", json={"rows": np.zeros((2, 64)).tolist()})
    assert valid_answer.status_code == 200


def test_documentation_quotes_the_example() -> None:
    page = (ROOT / "docs" / "howto" / "serve.md").read_text(encoding="utf-8")
    code = EXAMPLE.read_text(encoding="utf-8").partition('"""\n\n')[2]
    quoted = re.findall(r"```python\n(.*?)```", page, re.S)
    assert code in quoted


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_fast_c_of_benchmark_keeps_subnormal_numbers(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    model = sk.KernelRegressor(n_centers=20, precision="exact").fit(rows, rows[:, 0])
    model.to_c(tmp_path / "model.c")
    outputs = _compiled(tmp_path, "fast", ["-ffast-math"])(rows)()
    np.testing.assert_allclose(outputs, model.predict(rows), atol=1e-3)
    assert np.nextafter(0.0, 1.0) * np.float64(1.0) > 0
