"""Check the arithmetic and the files of the benchmarks, and that a wrong result is an error."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from benchmarks import __main__ as command
from benchmarks import harness, host_step, plain, product, public_curves, setup, solvers, step
from benchmarks.harness import Figure, WrongResult, compare, figure, in_turns
from benchmarks.public_curves import PUBLIC, PUBLIC_EXACT, verdict
from streamkern.backend.base import Backend
from streamkern.kernels.products import KernelOperator
from tests.numpy_cublas import Addressed

FIGURE_TYPES = {
    "subject": str, "case": str, "variant": str, "unit": str, "repeats": int,
    **dict.fromkeys(("median", "low", "high", "min", "max"), float),
}  # fmt: skip
OPTIONAL = ("floor", "fraction", "ratio")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "QUIET_S", 0)


# ---------------------------------------------------------------------------------- arithmetic


def test_figure_has_median_quartiles_and_range() -> None:
    measured = figure("case", "ours", "GFLOP/s", [5, 1, 3, 2, 4], floor=6.0, shape=[1])
    assert measured["median"] == 3
    assert (measured["low"], measured["high"]) == (2, 4)
    assert (measured["min"], measured["max"], measured["repeats"]) == (1, 5, 5)
    assert measured["fraction"] == 0.5
    assert measured["ratio"] is None
    assert measured["shape"] == [1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_results_roundtrip_through_file(record: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        for value in (record, {"environment": record, "records": [record] * 40}):
            harness.write_results(path, value)
            assert json.loads(path.read_text()) == value


def test_each_record_is_one_line(tmp_path: Path) -> None:
    records = [{"method": "block", "seed": k, "error": 0.25} for k in range(50)]
    harness.write_results(tmp_path / "a.json", {"records": records})
    assert len((tmp_path / "a.json").read_text().splitlines()) == 50 + 4


@pytest.mark.parametrize(
    ("unit", "fraction", "ratio"),
    [("GFLOP/s", 0.8, 2.0), ("samples/s", 0.8, 2.0), ("s", 1.25, 0.5), ("us/sample", 1.25, 0.5)],
)
def test_higher_rates_and_lower_times_are_better(unit: str, fraction: float, ratio: float) -> None:
    figures = [
        figure("case", "ours", unit, [4.0], floor=5.0),
        figure("case", "theirs", unit, [2.0], floor=5.0),
    ]
    assert figures[0]["fraction"] == fraction
    compare(figures, ["ours"])
    assert figures[0]["ratio"] == ratio
    assert figures[1]["ratio"] is None


def test_comparison_uses_the_best_other_variant() -> None:
    figures = [
        figure("case", name, "GFLOP/s", [value])
        for name, value in (("a", 6.0), ("b", 9.0), ("c", 12.0), ("d", 3.0))
    ]
    compare(figures, ["a", "b"])
    assert [f["ratio"] for f in figures] == [0.5, 0.75, None, None]


def test_ratio_requires_another_variant() -> None:
    figures = [figure("case", "ours", "s", [1.0])]
    compare(figures, ["ours"])
    assert figures[0]["ratio"] is None


@pytest.mark.parametrize(("warm_up", "calls"), [(True, 4), (False, 3)])
def test_variants_alternate(warm_up: bool, calls: int) -> None:
    order: list[str] = []
    durations = in_turns({n: lambda n=n: order.append(n) for n in "abc"}, 3, warm_up=warm_up)
    assert {name: len(times) for name, times in durations.items()} == {"a": 3, "b": 3, "c": 3}
    assert len(order) == 3 * calls
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds[-3:] == ["abc", "acb", "cab"]
    assert all(s >= 0 for times in durations.values() for s in times)


def test_sgemm_speed_is_the_median() -> None:
    assert harness.Sgemm(10).speed([1.0, 2.0, 4.0]) == 1000


# ------------------------------------------------------------------------------- all benchmarks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of every benchmark at a tiny size."""
    path = tmp_path_factory.mktemp("benchmarks") / "smoke.json"
    assert command.main(["smoke", "--repeats", "1", "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.slow
def test_every_subject_is_measured(results: dict[str, Any]) -> None:
    assert {f["subject"] for f in results["figures"]} == set(command.SUBJECTS)
    assert results["wrong"] == []
    assert results["small"] is True


def test_figures_follow_the_schema(results: dict[str, Any]) -> None:
    assert results["schema"] == harness.SCHEMA
    for f in results["figures"]:
        for key, kind in FIGURE_TYPES.items():
            assert isinstance(f[key], kind), (f, key)
        for key in OPTIONAL:
            assert f[key] is None or f[key] > 0, (f, key)
        assert 0 < f["min"] <= f["low"] <= f["median"] <= f["high"] <= f["max"] < math.inf
        assert (f["floor"] is None) == (f["fraction"] is None)


def test_environment_is_recorded(results: dict[str, Any]) -> None:
    assert results["versions"]["numpy"] == np.__version__
    assert results["versions"]["blas"]
    assert len(results["machine"]["load"]) == len(results["load_after"]) == 3
    assert results["machine"]["cpu"]
    assert results["machine"]["cores"] >= results["machine"]["cores_usable"] >= 1
    assert results["machine"]["memory_gib"] >= results["machine"]["memory_available_gib"] > 0
    assert set(results["revision"]) == {"commit", "dirty"}
    assert results["date"].endswith("+00:00")


def test_product_figures_compare_with_other_libraries(results: dict[str, Any]) -> None:
    ours = [f for f in results["figures"] if f["variant"] == "streamkern"]
    assert all(f["ratio"] for f in ours if f["subject"] in ("product", "step_products"))


# -------------------------------------------------------------------------------- wrong results


class _Subject(ModuleType):
    """A subject that is wrong, or not."""

    REPEATS, SMALL = 2, {"size": 1}

    def __init__(self, is_wrong: bool) -> None:
        super().__init__("subject", "A subject.")
        self.wrong = is_wrong

    def measure(self, repeats: int, size: int = 10) -> Sequence[Figure]:
        harness.check(not self.wrong, "the answer")
        return [figure("case", "ours", "s", [float(size)] * repeats)]


def test_wrong_result_exits_1_after_remaining_measurements(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subjects = {"product": _Subject(True), "step": _Subject(False)}
    monkeypatch.setattr(
        command.importlib, "import_module", lambda name: subjects[name.rpartition(".")[2]]
    )
    assert command.main(["product", "step", "--json", str(tmp_path / "out.json")]) == 1
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["wrong"] == ["product: the answer is wrong"]
    assert [(f["subject"], f["median"], f["repeats"]) for f in written["figures"]] == [
        ("step", 10.0, 2)
    ]
    assert "WRONG: the answer is wrong" in capsys.readouterr().out
    assert command.main(["step"]) == 0


def test_wrong_kernel_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    original = KernelOperator.product

    def slightly_off(self: KernelOperator, *sides: Any, out: Any = None, **more: Any) -> Any:
        result = original(self, *sides, out=out, **more)
        result *= 1.001
        return result

    monkeypatch.setattr(KernelOperator, "product", slightly_off)
    with pytest.raises(WrongResult, match="K @ W at d=5 by streamkern"):
        product.measure(1, m=40, p=30, dims=(5,), sgemm_size=8)


def test_wrong_step_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Backend.matmul

    def backwards(self: Backend, A: Any, B: Any, out: Any, **more: Any) -> Any:
        return np.negative(original(self, A, B, out, **more), out=out)

    monkeypatch.setattr(Backend, "matmul", backwards)
    with pytest.raises(WrongResult, match="the step at p=64"):
        step.measure(2, d=6, sizes=(64,), eigenpro=32, sgemm_size=8)


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["step", "--repeats", "0"]])
def test_invalid_arguments_exit_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2


# ----------------------------------------------------------------- reference implementations


def test_plain_implementations_compute_the_kernel() -> None:
    rng = np.random.default_rng(0)
    X, Z, W, r = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((700, 7), (1100, 7), (1100, 3), (700, 3))
    )
    K = np.exp(-cdist(X.astype(np.float64), Z.astype(np.float64)))
    f, g, stored = (np.empty(s, np.float32) for s in ((700, 3), (1100, 3), (700, 1100)))
    plain.NumpySlabs(X, Z).both(W, r, f, g, stored)
    for result, truth in ((f, K @ W), (g, K.T @ r), (stored, K)):
        np.testing.assert_allclose(result, truth, atol=2e-4)
    plain.NumpySlabs(X, Z).product(W, f)
    np.testing.assert_allclose(f, K @ W, atol=2e-4)


def test_numba_tiles_compute_the_kernel() -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(1)
    # From coinciding rows to distances at which the kernel underflows.
    X = rng.standard_normal((300, 4)).astype(np.float32) * np.geomspace(1e-3, 60, 300)[:, None]
    X, Z = X.astype(np.float32), X[::3].astype(np.float32)
    W = rng.standard_normal((len(Z), 3)).astype(np.float32)
    out = np.empty((300, 3), np.float32)
    tiles = plain.NumbaTiles(X, Z)
    tiles.product(W, out)
    tiles.close()
    truth = np.exp(-cdist(X.astype(np.float64), Z.astype(np.float64))) @ W
    # Rows that coincide are sqrt(eps) |x| apart in the Gram form.
    np.testing.assert_allclose(out, truth, atol=60 * 4 * np.sqrt(np.finfo(np.float32).eps))


def test_setup_floor_counts_kernel_and_factors() -> None:
    sizes = step.planned(2000, 784).sizes
    b, s, h = sizes.block_size, sizes.n_sample, sizes.n_probe
    flops = setup._block_flops(sizes, 2000, 784)
    assert b == 2000
    assert flops > 2 * (s + h) * b * 784 + s * b * b
    assert flops < 2 * (s + h + b) * b * 784 + 2 * (s + h) * b * b


def test_step_floor_is_one_kernel_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness.Sgemm, "speed", lambda self, seconds: 1e9)
    figures = step.measure(1, d=5, sizes=(64,), eigenpro=32, sgemm_size=8)
    assert figures[0]["floor"] == 1e9 / (2 * 64 * 5)


# ----------------------------------------------------------------------- curves of public codes


def test_method_is_ahead_only_if_nearer_to_exact_model() -> None:
    exact = {"accuracy": 0.98, "mse": 0.01}
    published = PUBLIC["eigenpro3"]

    def found(*gains: float, mse: float) -> list[dict[str, Any]]:
        """Return accuracies that are nearer to the exact model's than the published ones, by this
        factor."""
        curve = [
            {"at": at, "mse": 0.01 * mse,
             "accuracy": 0.98 + published.accuracy[at] - PUBLIC_EXACT.accuracy[1] + gain}
            for at, gain in zip((1, 5), gains, strict=True)
        ]  # fmt: skip
        return public_curves.points({"method": "eigenpro3", "seed": 0, "curve": curve}, exact)

    near_figures = found(0.001, 0.002, mse=1.05)
    assert [row["after"] for row in near_figures] == [1, 5]
    assert near_figures[1]["public mse/exact"] == pytest.approx(0.010204 / 0.009469)
    assert (
        verdict("eigenpro3", near_figures) == "eigenpro3: ahead at every published point (3 of 3)"
    )
    far_verdict = verdict("eigenpro3", [*near_figures, *found(-0.001, 0.0, mse=1.2)])
    assert far_verdict == (
        "eigenpro3: ahead at 3 of 6 published points; "
        "level in accuracy after 5 (EigenPro 3, defaults); "
        "BEHIND in accuracy after 1 (EigenPro 3, defaults), MSE after 5 (EigenPro 3, defaults)"
    )


def test_finished_method_keeps_its_last_figures() -> None:
    one = {"method": "direct", "seed": 0, "curve": [{"at": 1, "accuracy": 0.98, "mse": 0.01}]}
    rows = public_curves.points(one, {"accuracy": 0.98, "mse": 0.01})
    assert [(row["beside"], row["after"], row["mse/exact"]) for row in rows] == [
        (PUBLIC["eigenpro3"].code, 1, 1), (PUBLIC["eigenpro3"].code, 5, 1),
        (PUBLIC["eigenpro4"].code, 1, 1), (PUBLIC["eigenpro4"].code, 4, 1),
    ]  # fmt: skip


# --------------------------------------------------------------------------------- all solvers


@pytest.mark.parametrize("exact_centers", [1000, 50])
def test_losses_are_relative_to_exact_or_zero_model(
    exact_centers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Check the direct solver, which is the exact model after one epoch."""
    problem = solvers.PROBLEMS["rough"](1500, 60)
    loss, ridge = solvers.exact_loss(problem)
    K, K_test = (np.exp(cdist(X, problem.Z) / -6) for X in (problem.X, problem.X_test))
    residual = K_test @ np.linalg.lstsq(K, problem.Y)[0] - problem.Y_test
    unexplained = float((residual**2).mean() / (problem.Y_test.astype(np.float64) ** 2).mean())
    monkeypatch.setattr(solvers, "MIN_ROWS", 1500)
    monkeypatch.setattr(solvers, "EXACT_CENTERS", exact_centers)
    monkeypatch.setattr(solvers, "PROBLEMS", {"rough": solvers.PROBLEMS["rough"]})
    path = tmp_path / "solvers.json"
    arguments = ["solvers", "--centers", "60", "--solvers", "direct", "--epochs", "1", "--json"]
    monkeypatch.setattr("sys.argv", [*arguments, str(path)])
    assert solvers.main() == 0
    curve = json.loads(path.read_text())["results"][0]["curves"][0]
    assert curve["epochs"][-1] == 1
    expected = 1.0 if exact_centers == 1000 else unexplained
    assert curve["ratios"][-1] == pytest.approx(expected, rel=2e-3)
    shown = capsys.readouterr().out
    assert (f"exact {loss:.5g} (ridge {ridge:g})" in shown) == (exact_centers == 1000)
    assert ("s to 1.05" in shown) == (exact_centers == 1000)


@pytest.mark.parametrize(("n_blocks", "launches"), [(1, 19), (4, 43)])
def test_host_share_of_a_step_is_measured_without_launches(
    n_blocks: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check NumPy's arrays, with blocks so small that a triangle is multiplied with its zeros."""
    memory = SimpleNamespace(UnownedMemory=lambda *given: None, MemoryPointer=lambda *given: None)
    cupy = SimpleNamespace(ndarray=Addressed, cuda=SimpleNamespace(memory=memory))
    monkeypatch.setattr(host_step, "on_demand", lambda name: cupy)
    figures = host_step.measure(200, n_blocks, repeats=1)
    assert figures["launches"] == launches
    assert figures["host_us"] > 0
