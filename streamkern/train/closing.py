"""The last line of a run: model, time, losses and figures."""

from __future__ import annotations

import math

from streamkern.basics.text import time_text
from streamkern.predict.evaluation import format_metrics
from streamkern.train.step_loop import Result


def closing_line(result: Result, seconds: float) -> str:
    """Return the closing line of a run.

    seconds : time that this process has worked on the run
    """
    model, solver = result.model, result.meta["sizes"]["solver"]
    units = "features" if model.op.kernel.explicit else "centers"
    ridge = f", ridge {result.ridge:.3g}" if result.ridge else ""
    took = f"{seconds:.1f} s" if seconds < 10 else time_text(seconds)
    parts = [
        f"trained {model.op.kernel!r} with {len(model.weights):,} {units}, solver {solver}{ridge}",
        f"{result.epochs} epoch{'s'[: result.epochs != 1]} in {took}",
        *(f"train mse {loss:.4g}" for loss in result.losses[-1:] if math.isfinite(loss)),
    ]
    return "  ".join([*parts, format_metrics(result.metrics)] if result.metrics else parts)
