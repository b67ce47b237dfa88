"""Print the estimate for more and more ranks as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamkern.basics.text import size_text, text_table, time_text

_MOST = {
    "kernel": "kernel",
    "factors": "factors",
    "latency": "latency of sums",
    "transfer": "transfer of sums",
    "each": "what each rank does",
    "waiting": "waiting",
}
_COLUMNS = (
    "ranks", "step", "epoch", "efficiency", "kernel", "factors", "sums", "each", "waiting",
    "memory", "most", "best block",
)  # fmt: skip


def over_ranks_text(found: Mapping[str, Any]) -> str:
    """Return the table of an estimate with its notes."""
    rows = [_cells(row) for row in found["rows"]]
    return "\n".join([
        "expected of the steps of ranks, by a model, not measured. Each rank is",
        f"{found['about']}:",
        text_table(rows, _COLUMNS),
        *_notes(found),
    ])  # fmt: skip


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    shares = row["shares"]
    sums = shares["latency"] + shares["transfer"]
    parts = {name: shares[name] for name in ("kernel", "factors", "each", "waiting")}
    return {
        "ranks": row["ranks"],
        "step": _seconds(row["step_s"]),
        "epoch": _seconds(row["epoch_s"]),
        "efficiency": f"{row['efficiency']:.2f}" if row["efficiency"] >= 0.005 else "< .01",
        **{name: f"{share:.0%}" for name, share in (parts | {"sums": sums}).items()},
        "memory": size_text(row["memory_bytes"]) + "*" * (not row["fits"]),
        "most": _MOST[row["bottleneck"]],
        "best block": row["best_block_size"] or "none fits",
    }


def _notes(found: Mapping[str, Any]) -> Sequence[str]:
    has, setup = size_text(found["rank_bytes"]), size_text(found["setup_bytes"])
    notes = []
    if not all(row["fits"] for row in found["rows"]):
        notes.append(f"* more than the {has} of a rank")
    if found["setup_bytes"] > found["rank_bytes"]:
        notes.append(
            f"note: the setup takes {setup} on each of {found['rows'][-1]['ranks']} ranks, and a "
            f"rank has {has}; a smaller block_size takes less"
        )
    return notes


def _seconds(seconds: float) -> str:
    if seconds >= 60:
        return time_text(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
