"""Fitted models on disk: as a run directory, an ONNX file, or a C file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from streamkern.estimator.fitted import FittedModel, Schema
from streamkern.estimator.mistakes import hide_traceback
from streamkern.estimator.model_card import ModelCard
from streamkern.estimator.parameter_values import transform_tables
from streamkern.estimator.parameters import Parameters, own_names
from streamkern.estimator.predicting import Predicting
from streamkern.train.export.onnx_model import ModelAnswers, write_c, write_onnx
from streamkern.train.online import Online
from streamkern.train.saved_model import save_model, without_solver


class Saving(Predicting):
    """Methods of an estimator that write its fitted model."""

    @hide_traceback
    def save(
        self, place: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None,
        card: bool = False,
    ) -> None:  # fmt: skip
        """Write the fitted model to a new directory, from which `streamkern.load` restores it.

        It is laid out like a run directory, so that `streamkern predict`, `evaluate` and `info`
        read it as well, and holds no code. After `partial_fit` it includes the state of the solver,
        so that training can continue; after `fit` it does not: use `run_dir` for a run that can be
        resumed. The state of a loaded model stays where it was loaded from.

        Parameters
        ----------
        place : path or URL of a directory in which nothing else was trained or saved.
        storage_options : for a remote place, as fsspec takes them.
        card : also write a model card, README.md, for a repository of Hugging Face's Hub: the
            kernel, the data's columns and classes, and the figures of held-out rows. A README.md
            that is there stays, and is refused unless it is this card.

        Raises
        ------
        ConfigError
            The model has a function or a kernel of the user, which are not stored on disk; or a
            card is asked for at a remote place.
        RunError
            The place holds another model or run, or files of another program under the same names.
        """
        now = self._snapshot()
        fitted = now._state
        written = ModelCard(now, place) if card else None
        with own_names():
            now._save(fitted, place, storage_options)
        if written is not None:
            written.write()

    @hide_traceback
    def to_onnx(
        self, path: str | os.PathLike[str], *, dtype: str = "auto", overwrite: bool = False
    ) -> None:
        """Write the fitted model to an ONNX file, which onnxruntime evaluates without streamkern.

        The file holds everything from a row to the answer: encoder, scaling, metric, kernel,
        centers, weights, calibration of probabilities. See docs/howto/export.md for its inputs and
        outputs. It evaluates all centers for all rows of a call at once: give it rows in batches.

        Parameters
        ----------
        path : of the file, which ends in .onnx; missing folders are made.
        dtype : "float32" or "float64", of the input of numbers, of the kernel and of the outputs;
            "auto" is that in which `predict` sums over the centers.
        overwrite : replace a file at `path`.

        Raises
        ------
        ConfigError
            `path` is not such a path, there is a file, its folder cannot be written, or the model
            has a part that ONNX cannot express: a transform of the user, hashed words, more than 2
            GB of centers.
        MissingDependencyError
            onnx is not installed.
        """
        self._export(write_onnx, path, dtype, overwrite)

    @hide_traceback
    def to_c(
        self, path: str | os.PathLike[str], *, dtype: str = "auto", overwrite: bool = False
    ) -> None:
        """Write the fitted model to a C file, which any C compiler takes, without a library.

        Its function computes the answer for one row a call, in a workspace that the caller gives;
        it is named after the file: `digits_predict` in digits.c. See docs/howto/export.md.

        Parameters
        ----------
        path : of the file, which ends in .c; missing folders are made.
        dtype : as of `to_onnx`.
        overwrite : replace a file at `path`.

        Raises
        ------
        ConfigError
            As `to_onnx`, or the text would be above 250 MB.
        MissingDependencyError
            onnx is not installed, by whose graph the code is written.
        """
        self._export(write_c, path, dtype, overwrite)

    def _export(self, write: Callable[..., None], path: Any, dtype: str, overwrite: bool) -> None:
        """Write the fitted model by `write_onnx` or `write_c`."""
        now = self._snapshot()
        fitted = now._state
        labels = fitted.schema.labels
        answers = ModelAnswers(flat=fitted.flat)
        if labels is not None:
            several = labels.indicator is not None
            answers = ModelAnswers(None if several else labels.classes, labels.order, several)
        with now._model() as model:
            write(model, fitted.centers, answers, path, dtype=dtype, overwrite=overwrite)

    def _save(self, fitted: FittedModel, place: Any, storage_options: Any) -> None:
        fit = fitted.attributes
        report = fit["report_"]
        of_data = ("test_", "validation_")
        metrics = {name: report[name] for name in report if name.startswith(of_data)}
        facts = fitted.meta.get("facts", {}) | self._facts(fitted.schema)
        online = None if fitted.online is None else fitted.online[0]
        if isinstance(online, Online) and online.setup is not None and online.kept is not None:
            setup, (arrays, meta) = online.setup, online.kept
            # No command resumes it: it has no data.
            state = arrays, meta | {"position": meta["position"] | {"done": True}}
        else:
            with self._model() as model:
                setup, state = without_solver(
                    model, fitted.centers, fitted.order, fitted.meta, epochs=fit["n_iter_"],
                    samples=report["samples"], ridge=report.get("ridge", 0.0),
                    ridges=report.get("ridges"),
                )  # fmt: skip
        setup = setup[0], setup[1] | {"facts": facts}
        save_model(
            place, storage_options, setup, state, settings=fitted.settings, metrics=metrics,
            history=fit["history_"], losses=fit["loss_curve_"], ended=report.get("ended"),
            validation_scores=fit["validation_scores_"] or (),
        )  # fmt: skip

    def _facts(self, schema: Schema) -> dict[str, Any]:
        """Return the facts that a run keeps of this estimator; see `facts`."""
        tables, not_kept = transform_tables(self.transforms)
        defaults = [f.name for f in fields(Parameters) if getattr(self, f.name) is f.default]
        return schema.facts() | {"transforms": tables, "not_kept": not_kept, "defaults": defaults}
