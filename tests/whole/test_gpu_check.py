"""The check of a GPU, tried without one: on NumPy, and on the device of `virtual`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.backend.cupy_backend import gpu_problem
from tests.virtual import VirtualBackend
from tools import gpu_check, gpu_speed

SHAPE = (40, 70, 6, 3)
SIZES: dict[str, Any] = {"shapes": [SHAPE], "eigh": (30,), "copy_bytes": 1 << 12}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_speed, "SECONDS", 0.0)


@pytest.mark.parametrize("backend", [Backend(1), VirtualBackend(0)], ids=["numpy", "virtual"])
def test_speed_is_reported_in_full(backend: Any) -> None:
    report = gpu_speed.measure(backend, 100, **SIZES)
    assert report["copy"]["gb_per_s"] > 0
    assert report["upload"]["through_ring_gb_per_s"] > 0
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
    json.dumps(report)


def test_what_there_is_no_time_for_is_named() -> None:
    report = gpu_speed.measure(Backend(1), -1, **SIZES)
    left_out = [*report["shapes"][0]["modes"].values(), *report["eigh"].values()]
    assert left_out == [{"left_out": "the time was over"}] * (len(gpu_speed.MODES) + 1)


def test_a_part_that_fails_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    def fails() -> dict[str, Any]:
        raise MemoryError("no room")

    out = tmp_path / "results" / "gpu.json"
    parts = {"one": fails, "two": lambda: {"x": np.float32(2)}}
    report = gpu_check.run(parts, {"device": {"name": "none"}}, out)
    assert report["one"] == {"passed": False, "error": "MemoryError: no room"}
    assert not report["passed"]
    assert json.loads(out.read_text())["two"] == {"x": 2.0}
    assert gpu_check.run({"two": parts["two"]}, {}, None)["passed"]


def test_two_backends_agree() -> None:
    """The checks themselves, where both sides are NumPy and tiles are walked in two ways."""
    other = Backend(1)
    other.tile_rows, other.tile_cols, other.norms_in_columns = 100, 100, False
    for name, check in gpu_check.agreement(Backend(1), other).items():
        report = check()
        assert report["passed"], (name, report)


@pytest.mark.skipif(gpu_problem() is None, reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err == f"gpu_check: {gpu_problem()}\n"
