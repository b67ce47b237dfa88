"""Compare the renderings of EigenPro 4 and FALKON with closed forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from benchmarks import public_codes
from benchmarks.renderings import EigenPro4, Falkon, Matrices, precondition


def kernel(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-cdist(A, B) / 3))


@pytest.fixture(scope="module")
def points() -> tuple[np.ndarray, np.ndarray]:
    """Return rows, and the first of them as centers."""
    X = np.random.default_rng(0).standard_normal((600, 3))
    return X, X[:80]


def test_falkon_reaches_ridge_solution(points: tuple[np.ndarray, np.ndarray]) -> None:
    X, Z = points
    Y = np.random.default_rng(1).standard_normal((len(X), 2))
    K, penalty = kernel(X, Z), 1e-3
    A = K.T @ K / len(X) + penalty * kernel(Z, Z)
    expected = np.linalg.solve(A, K.T @ Y / len(X))
    falkon = Falkon(Matrices.of(kernel, X, Z, jitter=0), Y, penalty)
    assert not falkon.weights().any()
    for _ in range(60):
        falkon.iterate()
    np.testing.assert_allclose(falkon.weights(), expected, rtol=1e-8, atol=1e-10)


def test_falkon_keeps_an_output_without_residual(
    points: tuple[np.ndarray, np.ndarray],
) -> None:
    X, Z = points
    Y = np.stack([X[:, 0], np.zeros(len(X))], axis=1)
    falkon = Falkon(Matrices.of(kernel, X, Z), Y, 1e-6)
    for _ in range(3):
        falkon.iterate()
    assert falkon.weights()[:, 0].any()
    assert not falkon.weights()[:, 1].any()


def test_preconditioner_flattens_top_of_spectrum(
    points: tuple[np.ndarray, np.ndarray],
) -> None:
    """Check that (I - K E D E^T) K / s has l_{q+1} in place of larger eigenvalues."""
    rows = points[0][:200]
    K, level = kernel(rows, rows), 20
    P = precondition(K, rows, level)
    spectrum_before = np.sort(np.linalg.eigvalsh(K / len(K)))[::-1]
    levelled = (K - K @ P.correction(K, np.eye(len(K)))) / len(K)
    spectrum_after = np.sort(np.linalg.eigvals(levelled).real)[::-1]
    expected = np.minimum(spectrum_before, spectrum_before[level])
    np.testing.assert_allclose(spectrum_after, expected, rtol=1e-6, atol=1e-10)
    assert P.critical_batch == int(1 / spectrum_before[level])
    assert P.step(P.critical_batch) == 1
    assert P.step(2 * P.critical_batch) < 1.01


@pytest.mark.parametrize("period", [1, 3])
def test_eigenpro4_recovers_function_in_span_of_centers(
    points: tuple[np.ndarray, np.ndarray], period: int
) -> None:
    X, Z = points
    Y = kernel(X, Z) @ np.random.default_rng(2).standard_normal((len(Z), 2))
    solver = EigenPro4(kernel, X, Y, Z, level=20, sample=300, batch=40, period=period)
    errors = [1.0]
    for _ in range(3):
        for _ in range(60):
            solver.epoch()
        f = kernel(X, Z) @ solver.alpha
        errors.append(float(np.linalg.norm(f - Y) / np.linalg.norm(Y)))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3, errors
    assert not solver.delta
    assert not solver.gamma.any()


@pytest.mark.parametrize(("batch", "period"), [(20, 4), (30, 2), (200, 1)])
def test_eigenpro4_period_has_as_many_rows_as_centers(
    batch: int,
    period: int,
    points: tuple[np.ndarray, np.ndarray],
) -> None:
    X, Z = points
    Y = X[:, :1]
    assert EigenPro4(kernel, X, Y, Z, level=20, sample=300, batch=batch).period == period


# ------------------------------------------------------------------------------- the comparison


def test_run_writes_every_line_of_every_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "public.json"
    arguments = ["--names", "diabetes", "--centers", "60", "--seeds", "1", "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["public_codes", *arguments])
    assert public_codes.main() == 0
    output = json.loads(path.read_text())
    records = output["tables"]["diabetes"]
    assert {(r["method"], r["epochs"]) for r in records} == {
        (method, epochs) for method in public_codes.METHODS for epochs in public_codes.EPOCHS
    }
    by = {(r["method"], r["epochs"]): r["error"] for r in records}
    for epochs in public_codes.EPOCHS:
        assert by["falkon, best", epochs] <= by["falkon, e", epochs]
    assert by["falkon, e - 1", 2] == by["falkon, e", 1]
    monkeypatch.setattr("sys.argv", ["public_codes", *arguments, "--go-on"])
    assert public_codes.main() == 0
    assert json.loads(path.read_text())["tables"] == output["tables"]
    assert len(output["summary"]) == len(public_codes.METHODS)
    assert all(line in capsys.readouterr().out for line in output["verdicts"][-1:])


def test_ahead_uses_most_favourable_figure_and_reports_divergence() -> None:
    def record(method: str, epochs: int, ratio: float | None, seconds: float) -> dict[str, Any]:
        return {"method": method, "epochs": epochs, "ratio": ratio, "seconds": seconds, "seed": 0,
                "diverged": ratio is None}  # fmt: skip

    records = []
    for epochs in public_codes.EPOCHS:
        records.append(record("auto", epochs, 1.1, 2.0))
        records.append(record("eigenpro4", epochs, None, 3.0))
        # After one epoch better, after that worse; always slower.
        records.append(record("eigenpro4, q=40", epochs, 1.05 if epochs == 1 else 1.2, 4.0))
        records += [record(m, epochs, 1.3, 1.0) for m in public_codes.FAMILIES["falkon"]]
    tables = {"bike": records}
    assert public_codes.verdict(tables, "eigenpro4") == (
        "auto is ahead of eigenpro4 in error at 2, in seconds at 3 of 3 points, in both at 2, "
        "in neither at 0; not in error: bike after 1; diverged: bike (eigenpro4, seed 0)"
    )
    assert public_codes.verdict(tables, "falkon") == (
        "auto is ahead of falkon in error at 3, in seconds at 0 of 3 points, in both at 0, "
        "in neither at 0"
    )
    assert "diverged" in public_codes.of_one("bike", records)
    row = public_codes.summary(tables)[1]
    assert row["method"] == "eigenpro4"
    assert row["after 1: median"] == "diverged"
