"""The check of a GPU, tried without one: on NumPy, and on a virtual GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern import planning
from streamkern.backend.base import Backend
from streamkern.backend.devices import gpu_count, gpu_problem
from tests.virtual_gpu import VirtualBackend
from tools import gpu_check, gpu_clock, gpu_parts, gpu_ranks, gpu_solver, gpu_speed

SHAPE = (40, 70, 6, 3)
SIZES: dict[str, Any] = {"shapes": [SHAPE], "eigh": (30,), "copy_bytes": 1 << 12}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_clock, "SECONDS", 0.0)


def test_checked_step_equals_that_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that rows are weighted by estimated leverages, in blocks whose factors fit."""
    solvers = list[Any]()
    monkeypatch.setattr(
        gpu_solver.BlockSolver, "_row_weights", lambda self, *of: solvers.append(self)
    )
    for size, n_blocks in ((10**9, 1), (4 * 70 * 20, 4)):
        monkeypatch.setattr(gpu_solver, "FACTOR_BYTES", size)
        gpu_speed.measure(Backend(1), 100, **SIZES)
        assert len(solvers[-1].preconditioner.blocks) == n_blocks
        assert solvers[-1].sketch == 16


@pytest.mark.parametrize("backend", [Backend(1), VirtualBackend(0)], ids=["numpy", "virtual"])
def test_speed_report_is_complete(backend: Any) -> None:
    report = gpu_speed.measure(backend, 100, **SIZES)
    assert report["copy"]["gb_per_s"] > 0
    assert min(report["upload"].values()) > 0
    assert report["upload"].keys() == {"pinned_gb_per_s", "pageable_gb_per_s"}
    assert report["eigh"][30]["seconds"] > 0
    (entry,) = report["shapes"]
    assert entry["shape"] == [40, 70, 6, 3]
    assert entry["modes"].keys() == set(gpu_speed.MODES)
    for mode, figures in entry["modes"].items():
        assert "error" not in figures, figures
        assert figures["largest_error"] < (2e-3 if mode == "fast" else 2e-6)
        assert figures["gemm_tflops"] > 0
        assert figures["products_fraction_of_floor"] > 0
        assert 0 <= figures["step"]["stall"] < 1
        assert 0 < figures["step"]["busy"] <= 1
        assert figures["step"]["samples_per_s"] > 0
        assert 0 < figures["step"]["enqueued_ms"] <= figures["step"]["ms"]
        assert figures["step"]["calls"]["assign"] >= 3
    json.dumps(report)


def test_all_work_runs_on_the_stream_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that no work is on another stream, where it would race with its results."""
    active_streams, used_streams = list[int](), list[int]()

    class Recording(Backend):
        @contextmanager
        def active(self) -> Iterator[None]:
            active_streams.append(1)
            yield
            active_streams.pop()

    def run(parts: Any, report: Any, out: Any) -> dict[str, Any]:
        used_streams.append(len(active_streams))
        return {"passed": True}

    monkeypatch.setattr("streamkern.backend.devices.gpu_problem", lambda: None)
    monkeypatch.setattr("streamkern.backend.devices.get_backend", lambda device: Recording(1))
    monkeypatch.setattr(gpu_check, "run", run)
    assert gpu_check.main(["--skip-tests"]) == 0
    assert used_streams == [1]


def test_measurements_without_time_are_listed() -> None:
    report = gpu_speed.measure(Backend(1), -1, **SIZES)
    left_out = [*report["shapes"][0]["modes"].values(), *report["eigh"].values()]
    assert left_out == [{"left_out": "the time was over"}] * (len(gpu_speed.MODES) + 1)


def test_failing_part_is_reported_and_others_run(tmp_path: Path) -> None:
    def fails() -> dict[str, Any]:
        raise MemoryError("no room")

    out = tmp_path / "results" / "gpu.json"
    parts = {"one": fails, "two": lambda: {"x": np.float32(2)}}
    report = gpu_check.run(parts, {"device": {"name": "none"}}, out)
    assert report["one"] == {"passed": False, "error": "MemoryError: no room"}
    assert not report["passed"]
    assert json.loads(out.read_text())["two"] == {"x": 2.0}
    assert gpu_check.run({"two": parts["two"]}, {}, None)["passed"]


@pytest.mark.slow
def test_two_backends_agree() -> None:
    """Run the checks with NumPy on both sides and tiles in two orders."""
    other_backend = Backend(1)
    other_backend.tile_rows, other_backend.tile_cols, other_backend.norms_in_columns = (
        100,
        100,
        False,
    )
    for name, check in gpu_check.agreement(Backend(1), other_backend).items():
        report = check()
        assert report["passed"], (name, report)


def test_large_triangles_are_compared_exactly() -> None:
    """Check also that a wrong triangle is found."""
    report = gpu_parts.large(Backend(1), 300)
    assert report["passed"], report

    class Wrong(Backend):
        def add_gram(self, C: Any, W: Any, scale: float, *, lower: bool = False) -> None:
            super().add_gram(C, W, 1.5 * scale, lower=lower)

    report = gpu_parts.large(Wrong(1), 300)
    assert [name for name, is_right in report["right"].items() if not is_right] == [
        "gram of a triangle"
    ]


def test_parts_of_a_step_are_timed() -> None:
    (part_times,) = gpu_parts.step_parts(Backend(1), [SHAPE], "exact").values()
    assert list(part_times)[-2:] == ["H g", "H.T (H g)"]
    assert all(ms > 0 for ms in part_times.values())


def test_measured_costs_have_names_of_assumed_costs() -> None:
    report = gpu_parts.costs(Backend(1), SHAPE)
    for name in ("FLOPS", "FAST", "ENTRY", "COLUMN", "APPLY", "HALF_APPLY"):
        assert report[f"DEVICE_{name}"] > 0 or name == "COLUMN"  # which rounding of times may hide
        assert hasattr(planning.problem, f"DEVICE_{name}")
    assert report["DEVICE_POINTS"].keys() == planning.problem.DEVICE_POINTS.keys()
    assert report["DEVICE_POINTS"]["exact"] == 1
    json.dumps(report)


def test_backends_and_ranks_may_share_a_device() -> None:
    assert gpu_parts.two_backends("cpu")["passed"]
    report = gpu_ranks.shared("cpu", 2000, 200)
    assert report["passed"], report
    assert report["seconds of 1"] > 0
    assert report["seconds of 2"] > 0


@pytest.mark.slow
def test_ranks_may_have_separate_devices() -> None:
    """Run two processes as two devices on a CPU; their sums go through the host."""
    report = gpu_ranks.on_two_devices("cpu", 2000, 200)
    assert report["passed"], report
    sums = report["sums"]
    assert sums["passed"]
    assert sums["by"] == "Collective"
    assert 0 < sums["sum_of_2400000_bytes_us"] < sums["sum_of_40000000_bytes_us"]


@pytest.mark.skipif(gpu_count() > 1, reason="needs a machine with one GPU or none")
def test_second_device_is_required() -> None:
    assert gpu_ranks.on_two_devices() == {"left_out": "needs two GPUs"}


@pytest.mark.skipif(gpu_problem() is None, reason="needs a machine without a GPU")
def test_gpu_check_without_gpu_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err == f"gpu_check: {gpu_problem()}\n"
