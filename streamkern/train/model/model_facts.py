"""Describe a trained model by facts: JSON values, text for a terminal, and a table for a notebook.

`streamkern info` uses the same texts for a run directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from streamkern.basics.text import facts_html_table, redact, use_singular
from streamkern.ingest.tables.encoder import column_notes
from streamkern.kernels.notation import categorical_text, kernel_text
from streamkern.losses.losses import SQUARES, fitted_loss_table, loss_text
from streamkern.planning.sizes import method_sizes
from streamkern.solver.precondition.step_rule import max_over_blocks
from streamkern.store.facts import names_after_colon, row_shape_text
from streamkern.store.sparse_rows import sparse_features
from streamkern.stream.target_scale import transform_text
from streamkern.train.resolve.training_data import targets_text

MAX_FACT_CHARACTERS = 100
"""Largest length of the text of a fact in a terminal."""
_TERMINAL_FACTS = {"epoch", "samples", "targets", "features", "kernel", "centers", "loss", "solver"}
SHOWN_METRIC_ENTRIES = 6
"""Number of features, and of eigenvalues, of a metric that are shown."""
_HIDDEN_KERNEL_ENTRIES = ("parts", "weights", "values")
"""Entries of a kernel that are not shown; its text contains the first two."""
_SETUP_FACTS = ("target_transform", "learned_metric", "metric", "categorical")


def solver_facts(meta: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices and measurements of the setup, as JSON values.

    meta : metadata of the setup, JSON
    state : scalars of the solver's state by name; "ridge" is read, if there is one
    """
    sizes, setup = meta["sizes"], meta["setup"]
    facts = {"ridge": state["ridge"]} if state.get("ridge") else {}
    facts |= {name: setup[name] for name in _SETUP_FACTS if name in setup}
    loss = fitted_loss_table(meta)
    facts |= {} if loss is None else {"loss": loss}
    notes = column_notes(meta.get("encoder"), "the run")
    if notes:
        facts["encoder"] = ", ".join(f"{n} {note.partition(':')[0]}" for n, note in notes.items())
    # A ridge of the setup is only the first one if the solver has estimated it again.
    numbers = {k: v for k, v in setup.items() if isinstance(v, int | float) and k not in facts}
    return {
        "solver": sizes["solver"],
        "scale": meta["scale"],
        **meta["kernel"],
        **method_sizes(sizes),
        **max_over_blocks(setup["rules"]),
        **facts,
        **numbers,
    }


def _fact_text(name: str, value: object) -> str:
    """Return a fact as text; a text stands for itself, without its name."""
    name = name.replace("_", " ")
    if isinstance(value, int):
        return f"{value} {name}"
    return f"{name} {value:.4g}" if isinstance(value, float) else str(value)


def facts_as_text(solver: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the facts of a solver with kernels, losses and metrics as text.

    solver : result of `solver_facts`; None for no facts
    """
    facts = dict(solver or {})
    if "categorical" in facts:
        facts["categorical"] = categorical_text(facts["categorical"])
    if "parts" in facts:
        facts["kernel"] = kernel_text({**facts, "categorical": ()})
    if "loss" in facts:
        facts["loss"] = loss_text(facts["loss"])
    if "target_transform" in facts:
        facts["target_transform"] = transform_text(facts["target_transform"])
    if "learned_metric" in facts:
        metric_facts = facts["learned_metric"].items()
        facts["learned_metric"] = ", ".join(_fact_text(name, x) for name, x in metric_facts)
    if "metric" in facts:
        facts |= _metric_as_text(facts.pop("metric"))
    return {key: value for key, value in facts.items() if key not in _HIDDEN_KERNEL_ENTRIES}


def _metric_as_text(metric: Mapping[str, Any]) -> dict[str, str]:
    """Return the first few entries of a metric's description as text.

    metric : result of `describe_metric`, JSON
    """
    shares = ", ".join(
        f"{name} {share:.1%}" for name, share in metric["importances"][:SHOWN_METRIC_ENTRIES]
    )
    size = f"{metric['features']} features"
    if metric["kind"] == "scales":
        return {"metric": f"scales of {size}", "metric_shares": shares}
    texts = {
        "metric": f"matrix of {size}, {metric['directions']} directions",
        "metric_shares": shares,
        "spectrum": ", ".join(
            f"{share:.1%}" for share in metric["spectrum"][:SHOWN_METRIC_ENTRIES]
        ),
    }
    for k, terms in enumerate(metric["first"], 1):
        texts[f"direction {k}"] = ", ".join(f"{x:+.2f} {name}" for name, x in terms)
    return texts


def model_facts(model: Any) -> dict[str, Any]:
    """Return the facts of a `KernelModel`: its run, targets, features, kernel, size and loss."""
    sparse = sparse_features(model.file_form)
    return {
        **model.origin,
        "targets": targets_text(model.classes, model.n_outputs),
        "features": row_shape_text(model.row_shape, sparse)
        + names_after_colon(model.columns or ()),
        "kernel": repr(model.op.kernel),
        "centers": f"{len(model.weights):,}",
        "loss": loss_text(model.loss or SQUARES),
    }


def result_facts(result: Any) -> dict[str, Any]:
    """Return the facts of a `Result`, with the texts of `streamkern info`."""
    facts: dict[str, Any] = {"epoch": result.epochs}
    facts |= {"ended": result.ended} if result.ended else {}
    facts |= {"samples": f"{result.samples:,}", **result.metrics}
    setup_texts = facts_as_text(solver_facts(result.meta, {"ridge": result.ridge}))
    return {**facts, **model_facts(result.model), **setup_texts}


class ShownFacts:
    """Base class of records with arrays, which are displayed by their facts."""

    def facts(self) -> dict[str, Any]:
        """Return the facts by name."""
        raise NotImplementedError

    def __repr__(self) -> str:
        texts = {
            name: shorten(use_singular(value_text(value)), MAX_FACT_CHARACTERS, placeholder=" ...")
            for name, value in self.facts().items()
            if name in _TERMINAL_FACTS or name.startswith(("test_", "validation_"))
        }
        width = max(map(len, texts), default=0)
        lines = (f"  {name:<{width}}  {text}" for name, text in texts.items())
        return "\n".join([type(self).__name__, *lines])

    def _repr_html_(self) -> str:
        facts = self.facts().items()
        return facts_html_table((name, value_text(value)) for name, value in facts)


def value_text(value: Any) -> str:
    """Return the value of a fact as text, without secrets."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return redact(str(value))
