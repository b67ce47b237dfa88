"""Describe a trained model by facts: JSON values, text for a terminal, and a table for a notebook.

`streamkern info` uses the same texts for a run directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from streamkern.basics.text import html_table_of, redact, singular
from streamkern.ingest.tables.encoder import column_notes
from streamkern.kernels.notation import categorical_text, kernel_text
from streamkern.losses.losses import SQUARES, fitted_loss_table, loss_text
from streamkern.planning.sizes import own_sizes
from streamkern.solver.precondition.step_rule import max_over_blocks
from streamkern.store.facts import names_after_colon, row_shape_text
from streamkern.store.sparse_rows import sparse_features
from streamkern.stream.target_scale import transform_text
from streamkern.train.resolve.training_data import targets

LINE = 100
"""Largest number of characters of a fact in a terminal."""
_IN_A_TERMINAL = {"epoch", "samples", "targets", "features", "kernel", "centers", "loss", "solver"}
FEATURES = 6
"""Number of features of a metric that are shown."""
_NOT_SHOWN = ("parts", "weights", "values")
"""Entries of a kernel that are not shown; its text contains the first two."""
_SETUP_FACTS = ("target_transform", "learned_metric", "metric", "categorical")


def solver_facts(meta: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices and measurements of the setup, as JSON values.

    meta : metadata of the setup, JSON
    state : scalars of the solver's state by name; "ridge" is read, if there is one
    """
    sizes, setup = meta["sizes"], meta["setup"]
    found = {"ridge": state["ridge"]} if state.get("ridge") else {}
    found |= {name: setup[name] for name in _SETUP_FACTS if name in setup}
    loss = fitted_loss_table(meta)
    found |= {} if loss is None else {"loss": loss}
    notes = column_notes(meta.get("encoder"), "the run")
    if notes:
        found["encoder"] = ", ".join(f"{n} {note.partition(':')[0]}" for n, note in notes.items())
    return {
        "solver": sizes["solver"],
        "scale": meta["scale"],
        **meta["kernel"],
        **own_sizes(sizes),
        **max_over_blocks(setup["rules"]),
        **found,
        **{k: v for k, v in setup.items() if isinstance(v, int | float)},
    }


def _fact(name: str, value: object) -> str:
    name = name.replace("_", " ")
    if isinstance(value, int):
        return f"{value} {name}"
    return f"{name} {value:.4g}" if isinstance(value, float) else str(value)


def facts_in_words(solver: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the facts of a solver with kernels, losses and metrics as text.

    solver : result of `solver_facts`; None for no facts
    """
    found = dict(solver or {})
    if "categorical" in found:
        found["categorical"] = categorical_text(found["categorical"])
    if "parts" in found:
        found["kernel"] = kernel_text({**found, "categorical": ()})
    if "loss" in found:
        found["loss"] = loss_text(found["loss"])
    if "target_transform" in found:
        found["target_transform"] = transform_text(found["target_transform"])
    if "learned_metric" in found:
        facts = found["learned_metric"]
        found["learned_metric"] = ", ".join(_fact(*each) for each in facts.items())
    if "metric" in found:
        found |= _metric_in_words(found.pop("metric"))
    return {key: value for key, value in found.items() if key not in _NOT_SHOWN}


def _metric_in_words(metric: Mapping[str, Any]) -> dict[str, str]:
    """Return the first few entries of a metric's description as text.

    metric : result of `describe_metric`, JSON
    """
    shares = ", ".join(f"{name} {share:.1%}" for name, share in metric["importances"][:FEATURES])
    size = f"{metric['features']} features"
    if metric["kind"] == "scales":
        return {"metric": f"scales of {size}", "metric_shares": shares}
    found = {
        "metric": f"matrix of {size}, {metric['directions']} directions",
        "metric_shares": shares,
        "spectrum": ", ".join(f"{share:.1%}" for share in metric["spectrum"][:FEATURES]),
    }
    for k, terms in enumerate(metric["first"], 1):
        found[f"direction {k}"] = ", ".join(f"{x:+.2f} {name}" for name, x in terms)
    return found


def model_facts(model: Any) -> dict[str, Any]:
    """Return the facts of a `KernelModel`: its run, targets, features, kernel, size and loss."""
    sparse = sparse_features(model.file_form)
    return {
        **model.origin,
        "targets": targets(model.classes, model.n_outputs),
        "features": row_shape_text(model.row_shape, sparse)
        + names_after_colon(model.columns or ()),
        "kernel": repr(model.op.kernel),
        "centers": f"{len(model.weights):,}",
        "loss": loss_text(model.loss or SQUARES),
    }


def result_facts(result: Any) -> dict[str, Any]:
    """Return the facts of a `Result`, with the texts of `streamkern info`."""
    found: dict[str, Any] = {"epoch": result.epochs}
    found |= {"ended": result.ended} if result.ended else {}
    found |= {"samples": f"{result.samples:,}", **result.metrics}
    chosen = facts_in_words(solver_facts(result.meta, {"ridge": result.ridge}))
    return {**found, **model_facts(result.model), **chosen}


class ShownFacts:
    """Base class of records with arrays, which are displayed by their facts."""

    def facts(self) -> dict[str, Any]:
        """Return the facts by name."""
        raise NotImplementedError

    def __repr__(self) -> str:
        shown = {
            name: shorten(singular(value_text(value)), LINE, placeholder=" ...")
            for name, value in self.facts().items()
            if name in _IN_A_TERMINAL or name.startswith(("test_", "validation_"))
        }
        width = max(map(len, shown), default=0)
        lines = (f"  {name:<{width}}  {text}" for name, text in shown.items())
        return "\n".join([type(self).__name__, *lines])

    def _repr_html_(self) -> str:
        shown = self.facts().items()
        return html_table_of((name, value_text(value)) for name, value in shown)


def value_text(value: Any) -> str:
    """Return the value of a fact as text, without secrets."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return redact(str(value))
