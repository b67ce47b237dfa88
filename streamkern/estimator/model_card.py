"""The model card of a saved model: a README.md in the format of the Hugging Face Hub."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from streamkern.basics.errors import ConfigError, RunError
from streamkern.basics.message import mention
from streamkern.basics.optional import on_demand
from streamkern.basics.text import redact
from streamkern.basics.version import __version__
from streamkern.filesystem.durable import write_durably
from streamkern.filesystem.urls import local_path

_HELD_OUT_ROWS = {
    "test_": "test rows",
    "validation_": "validation rows, which were set aside for early stopping",
}
"""Prefix of figures in `report_` -> the rows on which they were measured."""
_MAX_NAMES = 20
"""Number of columns or classes that are listed."""

_TEMPLATE = """\
---
{front}---

# {name}

A kernel {task} model, trained by streamkern.

| | |
|---|---|
{rows}

```python
import streamkern
from huggingface_hub import snapshot_download

model = streamkern.load(snapshot_download("OWNER/NAME"))  # the name of this repository
predictions = model.predict(X)
```

The files hold numbers and settings, and no code.
"""


class ModelCard:
    """The model card of a fitted estimator in a folder.

    Raises ConfigError if the folder is not local, and RunError if it has a README.md that is not
    this card, before anything is written.
    """

    def __init__(self, model: Any, location: str | os.PathLike[str]) -> None:
        folder = local_path(location)
        if folder is None:
            raise ConfigError(
                f"{mention('card', True)} writes a README.md to a local folder only, not to "
                f"{redact(location)}",
                "save to a local folder, and copy that",
            )
        self._path = Path(folder) / "README.md"
        name = Path(folder).resolve().name.encode(errors="replace").decode()
        self._text = card_text(model, name)
        if os.path.lexists(self._path):
            self._check()

    def write(self) -> None:
        """Write the card unless the folder, which must exist, has it already."""
        try:
            write_durably(self._path, self._text.encode(), exclusive=True)
        except FileExistsError:
            self._check()

    def _check(self) -> None:
        """Raise RunError if the README.md in the folder is not this card."""
        if not self._path.is_file() or self._path.read_bytes() != self._text.encode():
            raise RunError(
                f"{self._path} exists already, but is not the card of this model",
                f"leave {mention('card', True)} out to keep it, or move it away",
            )


def card_text(model: Any, name: str) -> str:
    """Return the text of the model card of a fitted estimator. name : name of the model"""
    classes = getattr(model, "classes_", None)
    task = "regression" if classes is None else "classification"
    figures = list(_held_out_figures(model))
    # The keys of the front matter are defined by the Hub: huggingface.co/docs/hub/model-cards.
    front_matter: dict[str, Any] = {
        "library_name": "streamkern",
        "tags": ["streamkern", "kernel-methods", task],
    }
    if figures:
        kind = "image" if len(model._state.schema.row_shape) == 3 else "tabular"
        results = [
            {
                "task": {"type": f"{kind}-{task}"},
                "dataset": {"name": data, "type": "held-out"},
                "metrics": [
                    {"type": metric, "value": value, "name": metric}
                    for figure_rows, metric, value in figures
                    if figure_rows == data
                ],
            }
            for data in dict.fromkeys(rows for rows, _, _ in figures)
        ]
        front_matter["model-index"] = [{"name": name, "results": results}]
    rows = "\n".join(f"| {fact} | {_escape(text)} |" for fact, text in _table_rows(model, figures))
    front_text = on_demand("yaml").safe_dump(front_matter, sort_keys=False, allow_unicode=True)
    return _TEMPLATE.format(front=front_text, name=_escape(name), task=task, rows=rows)


def _held_out_figures(model: Any) -> Iterator[tuple[str, str, float]]:
    """Yield (description of the rows, metric, value) of the finite figures of held-out rows.

    The squared error and R2 of losses whose minimum is no mean are left out.
    """
    is_no_mean = model.loss in ("quantile", "expectile", "absolute_error")
    misleading_metrics = ("mse", "r2") if is_no_mean else ()
    for prefix, rows in _HELD_OUT_ROWS.items():
        for key, value in model.report_.items():
            metric = key.removeprefix(prefix)
            is_listed = key.startswith(prefix) and metric not in misleading_metrics
            if is_listed and isinstance(value, int | float) and math.isfinite(value):
                yield rows, metric, float(value)


def _table_rows(model: Any, figures: Iterable[tuple[str, str, float]]) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the rows of the card's table."""
    kernel, schema = model.kernel_, model._state.schema
    scalars = {k: v for k, v in kernel.describe().items() if isinstance(v, str | int | float)}
    kernel_name = str(scalars.pop("kernel", type(kernel).__name__))
    parameters = [f"{name} {_format_number(value)}" for name, value in scalars.items()]
    yield "kernel", ", ".join([kernel_name, *parameters])
    if model.n_centers_:
        yield "centers", str(model.n_centers_)
    yield "solver", str(model.solver_)
    if "samples" in model.report_:
        yield "samples trained on, over all epochs", str(model.report_["samples"])
    if schema.given_columns is not None:
        yield "columns", _join_names(schema.given_columns)
    else:
        yield "shape of a row", " x ".join(map(str, schema.row_shape))
    if (classes := getattr(model, "classes_", None)) is not None:
        yield "classes", _join_names(classes)
    for rows, metric, value in figures:
        yield f"{metric} on {rows}", _format_number(value)
    yield "written by", f"streamkern {__version__}"


def _format_number(value: Any) -> str:
    """Return a float to six digits, and other values unchanged, as text."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _join_names(names: Iterable[Any]) -> str:
    """Return the first names with commas between them, and the number of others."""
    texts = list(map(str, names))
    more = f" and {len(texts) - _MAX_NAMES} more" if len(texts) > _MAX_NAMES else ""
    return ", ".join(texts[:_MAX_NAMES]) + more


def _escape(text: str) -> str:
    """Return a text as one line, with the characters escaped that Markdown would interpret."""
    return re.sub(r"([\\`*_{}\[\]<>()#|~!&$])", r"\\\1", " ".join(text.split()))
