"""Phases of a setup: the events "setup" of the log, and their descriptions."""

from __future__ import annotations

from typing import Final

from streamkern.solver.method import Report, Samples
from streamkern.solver.precondition.samples import SampleRows

PHASE_DESCRIPTIONS: Final = {
    "metric": "looking for a metric",
    "kernel": "looking for the kernel and its bandwidth",
    "centers": "choosing the centers",
    "sample": "reading a sample of the stream",
    "preconditioner": "computing the preconditioner",
}


def reported_phase(samples: Samples, report: Report) -> Samples:
    """Return `samples`, wrapped to report when reading begins and which phase follows."""

    def read() -> tuple[SampleRows, SampleRows]:
        report("setup", {"doing": "sample"})
        found = samples()
        report("setup", {"doing": "preconditioner"})
        return found

    return read
