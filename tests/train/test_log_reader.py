from __future__ import annotations

from typing import Any

from streamkern.basics.text import utc_now
from streamkern.train.log_reader import run_progress


def record(event: str, step: int = 0, **fields: Any) -> dict[str, Any]:
    place = {"time": utc_now(), "step": step, "epoch": 0, "samples": 10 * step}
    return place | {"event": event} | fields


def test_where_a_run_is_in_its_setup_in_its_steps_and_after_a_kill() -> None:
    assert run_progress([]) == {}
    records = [record("setup", doing="centers"), record("centers"), record("setup", doing="sample")]
    assert run_progress(records)["doing"] == "sample"
    found = run_progress([*records, record("block", block=2, blocks=8)])
    assert (found["blocks_done"], found["blocks"]) == (3, 8)
    records.append(record("start", epochs=2, of_samples=500, train=["a"], test=None))
    found = run_progress(records)
    assert "doing" not in found
    assert (found["epochs"], found["of_samples"], found["train"]) == (2, 500, ["a"])
    records.append(record("train", 20, train_mse=0.5, left_s=60.0, samples_per_s=5.0))
    found = run_progress(records)
    assert (found["step"], found["samples"], found["train_mse"]) == (20, 200, 0.5)
    assert found["left_s"] == 60.0
    assert found["time"] == records[-1]["time"]
    # What was left then is not left now; the loss is still the last one that is known.
    found = run_progress([*records, record("resume", 10, epochs=2, of_samples=500)])
    assert (found["step"], found["train_mse"], "left_s" in found) == (10, 0.5, False)
