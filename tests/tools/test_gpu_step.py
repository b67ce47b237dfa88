"""Run all parts of the measurement of a step at a tiny size, on a CPU and on the stand-in for
CuPy."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamkern.backend.base import Backend
from streamkern.backend.devices import gpu_problem
from tests import fake_cupy
from tests.host_cuda import COMPILER
from tools import gpu_step
from tools.gpu_clock import Clock, Place, Spans, limited, replaced
from tools.gpu_step import Part

CHILDREN = ("start", "resume")
HERE = [name for name in gpu_step.PARTS if name not in (*CHILDREN, "example")]
"""Parts in this process; the example makes 70 000 images before it begins."""


def run(out: Path, device: str, *parts: str) -> dict[str, Any]:
    """Return the entries of parts, as the command writes them.

    They may take ten times their usual time, so that a busy machine ends none of them.
    """
    arguments = ["--out", str(out), "--device", device, "--size", "toy", "--parts", *parts]
    arguments += ["--seconds", str(10 * gpu_step.TOTAL_S)]
    assert gpu_step.main(arguments) == 0
    entries: dict[str, Any] = json.loads(out.read_text())["parts"]
    assert entries.keys() == {"ceilings", *parts}
    return entries


def walk(figures: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all figures and their places."""
    for key, value in figures.items():
        if isinstance(value, dict):
            yield from walk(value, (*path, key))
        else:
            yield (*path, key), value


def check(entries: dict[str, Any]) -> None:
    """Check that all parts came to their end, and that times and floors are some."""
    for path, value in walk(entries):
        assert path[-1] != "error", (path, value)
        if path[-1] in ("ms", "floor_ms", "share_of_floor", "tb_per_s", "samples_per_s"):
            assert value > 0, path
        if path[-1] == "passed":
            assert value, path


def test_device_parts_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = run(tmp_path / "step.json", "cpu", *HERE)
    check(entries)
    table = capsys.readouterr().out
    assert "share of floor" in table
    assert all(name in table for name in HERE)
    step = entries["steps"]["4 x 15"]["m=32"]
    assert {"ms", "gpu_ms", "enqueued_ms", "floor_ms", "points_ms", "residual_ms", "block 3_ms",
            "rest_ms", "calls"} <= step.keys()  # fmt: skip
    assert entries["steps"]["4 x 15"]["m=16"].keys() == {"enqueued_ms", "calls"}
    plain, parts = entries["setup"]["float32"], entries["setup"]["float16 parts, sums of 16 terms"]
    for phases in (plain, parts):
        assert phases["trials of the noise"]["calls"] == 1
        assert phases["sweeps"]["ms"] > 0
    assert parts["W W^T"]["calls"] == plain["add_gram"]["calls"] == parts["W"]["calls"] > 0
    assert abs(parts["lambda_1_over_float32"] - 1) < 0.003
    assert abs(entries["halves"]["lambda_1_of_float16_over_float32"] - 1) < 0.01
    assert entries["million"]["with a ridge"]["blocks_of_the_ridge_per_step"] > 0
    for name in ("rendering", "eigenpro4", "block"):
        assert entries["eigenpro4"][name]["test_mse"] < 1


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_device_parts_use_cupy_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that they read events and pools, and count launches of cuBLAS and products of
    halves."""
    fake_cupy.install(monkeypatch)
    entries = run(tmp_path / "step.json", "gpu", *HERE)
    check(entries)
    assert entries["steps"]["1 x 60"]["m=32"]["cublas_launches"] >= 5
    assert entries["steps"]["1 x 60"]["m=32"]["counted_launches"] >= 10
    thin = entries["thin"]["b=50"]
    assert "half, 3 columns, diagonal blocks 8" in thin
    for kind in ("float32", "half"):
        for own in (f"{kind}, 3 columns, own kernels", f"{kind}, 3 columns, own kernels, packed"):
            assert all(thin[own][name]["largest_difference"] < 1e-5 for name in ("H_g", "Ht_g"))
    assert entries["million"]["setup"]["peak_bytes"] == 1 << 20
    assert entries["epilogue"]["K @ W, 3 columns"]["largest_difference"] < 1e-5


@pytest.mark.slow
def test_processes_are_timed_killed_and_resumed(tmp_path: Path) -> None:
    entries = run(tmp_path / "step.json", "cpu", *CHILDREN)
    check(entries)
    assert entries["start"]["CUPY_NVRTC_USE_PCH=1"]["first_s"] > 0
    resumed = entries["resume"]["CUBLAS_WORKSPACE_CONFIG unset"]
    assert resumed["equal_bits"]
    assert resumed["killed_at_step"] > 0
    assert resumed["step_ms"] > 0


def test_failing_or_slow_part_does_not_stop_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(bench: Any, entry: dict[str, Any]) -> None:
        entry["before"] = 1
        raise MemoryError("no room")

    def sleeps(bench: Any, entry: dict[str, Any]) -> None:
        entry["began"] = True
        for _ in range(1000):
            time.sleep(0.01)

    parts = {"fails": Part(fails, 540, {}, {}), "sleeps": Part(sleeps, 100, {}, {}),
             "late": Part(fails, 540, {}, {})}  # fmt: skip
    monkeypatch.setattr(gpu_step, "PARTS", {"ceilings": gpu_step.PARTS["ceilings"], **parts})
    out = tmp_path / "results" / "step.json"
    arguments = ["--out", str(out), "--device", "cpu", "--size", "toy", "--seconds", "1"]
    start_time = time.perf_counter()
    assert gpu_step.main([*arguments, "--parts", "fails", "sleeps"]) == 0
    assert time.perf_counter() - start_time < 5
    found = json.loads(out.read_text())["parts"]
    assert found["fails"]["before"] == 1
    assert found["fails"]["error"] == "MemoryError: no room"
    assert found["sleeps"]["began"]
    assert found["sleeps"]["error"].startswith("TimeoutError: the time of this part")
    assert gpu_step.main(["--out", str(out), "--device", "cpu", "--size", "toy", "--seconds", "0",
                          "--parts", "late"]) == 0  # fmt: skip
    assert json.loads(out.read_text())["parts"]["late"]["left_out"] == "the time was over"


def test_call_times_exclude_nested_calls() -> None:
    class Work:
        def outer(self) -> None:
            time.sleep(0.02)
            self.inner(3)

        def inner(self, n: int) -> None:
            time.sleep(0.05)

    work, spans = Work(), Spans(Clock(Backend(1)))
    inner = Place(work, "inner", lambda n: f"inner {n}", lambda n: 10.0 * n)
    with spans.around([Place(work, "outer", "outer"), inner]):
        work.outer()
    work.outer()  # is not timed
    times = spans.times()
    assert {name: each["calls"] for name, each in times.items()} == {"outer": 1, "inner 3": 1}
    assert times["inner 3"]["flops"] == 30
    assert times["outer"]["ms"] >= 70
    assert times["outer"]["own_ms"] == pytest.approx(
        times["outer"]["ms"] - times["inner 3"]["ms"], abs=1e-6
    )
    assert "outer" not in vars(work)


def test_replaced_attributes_are_restored() -> None:
    class Owner:
        mine = 1

    owner = Owner()
    with replaced(owner, "mine", 2), replaced(Owner, "mine", 3):
        assert (owner.mine, Owner.mine) == (2, 3)
    assert (owner.mine, Owner.mine, vars(owner)) == (1, 1, {})


def test_limited_block_is_interrupted_once() -> None:
    with pytest.raises(TimeoutError), limited(0.05):
        time.sleep(5)
    with limited(0.05):
        pass
    time.sleep(0.1)  # and nothing comes later


@pytest.mark.skipif(gpu_problem() is None, reason="needs a machine without a GPU")
def test_gpu_step_without_gpu_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_step.main([]) == 2
    assert capsys.readouterr().err.startswith("gpu_step: ")
