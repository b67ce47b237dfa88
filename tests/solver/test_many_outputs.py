"""Check many outputs: they are solved in panels, and limit the sizes of units and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern import ingest_store, open_store
from streamkern.estimator.estimators import KernelRegressor
from streamkern.planning.memory import EVALUATED_ROWS, MAX_PANEL_OUTPUTS, rows_at_once
from streamkern.solver import direct_step, equations
from streamkern.solver.direct_step import DirectSolver
from streamkern.solver.precondition import noise
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.stores import ZarrSource
from tests.plans import solver_settings
from tests.solver_problems import make_case, one_pass, operator, replace, rows
from tests.traced_memory import traced_memory

pytestmark = pytest.mark.usefixtures("one_blas_thread")

X = rows(0, 200, 3)
Y = np.sin(X @ rows(1, 3, 21)) + np.linspace(0.01, 1, 21) * rows(2, 200, 21)
PLAIN: dict[str, Any] = {
    "kernel": "laplace", "bandwidth": 3.0, "scale": "none", "solver": "direct", "threads": 1,
    "precision": "float64", "accelerator": "none", "posterior": True,
}  # fmt: skip


@pytest.mark.parametrize("p", [30, 200])
def test_panels_of_outputs_do_not_change_results(p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check equality up to the order in which a library sums."""
    model = KernelRegressor(n_centers=p, **PLAIN)
    full = model.fit(X, Y)
    weights, report = full.dual_coef_, full.report_
    for module in (direct_step, equations, noise):
        monkeypatch.setattr(module, "MAX_PANEL_OUTPUTS", 4)
    model.fit(X, Y)
    assert len(set(report["ridges"])) > 2
    np.testing.assert_allclose(model.report_["ridges"], report["ridges"])
    atol = 1e-7 * np.abs(weights).max()  # normal equations amplify rounding errors
    np.testing.assert_allclose(model.dual_coef_, weights, atol=atol)
    for name, values in report["posterior"].items():
        np.testing.assert_allclose(model.report_["posterior"][name], values, rtol=1e-6)


def test_solution_holds_one_panel_beside_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the search for a ridge and the solution, without an array of p x c in float64."""
    for module in (direct_step, equations):
        monkeypatch.setattr(module, "MAX_PANEL_OUTPUTS", 64)
    case = make_case(operator(precision="exact"), "direct", options=solver_settings(), n_sums=2)
    case = replace(case, Y=np.tile(case.Y, (1, 2000)).astype(np.float32))
    solver = case.solver()
    assert isinstance(solver, DirectSolver)
    state = solver.init()
    one_pass(case, solver, state, np.arange(200))
    state.averaged = 0
    with traced_memory() as traced:
        solver.weights(state)
    peak = traced.peak
    p, c = state.alpha.shape
    assert c == 4000
    assert peak < p * c * 8 / 3
    assert state.average.any()


def test_wide_targets_limit_unit_size(tmp_path: Path) -> None:
    """Check that the size of the targets limits the units, in stores, arrays and evaluations."""
    y = np.zeros((60, 20_000), np.float32)
    ingest_store(X[:60], tmp_path / "a.zarr", y=y, chunk_mb=1)
    store = open_store(tmp_path / "a.zarr")
    assert store.spec.chunk_rows == (1 << 20) // 80_000
    source = AugmentedSource(ZarrSource(store), 1)
    assert source.n_units == -(-60 // store.spec.chunk_rows)
    assert ArraySource(X[:60], y).n_units == 2  # a unit has at most 4 MiB
    assert [rows_at_once(c) for c in (1, MAX_PANEL_OUTPUTS, 2 * MAX_PANEL_OUTPUTS, 10**9)] == [
        EVALUATED_ROWS, EVALUATED_ROWS, EVALUATED_ROWS // 2, 16,
    ]  # fmt: skip
