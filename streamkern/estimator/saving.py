"""Write fitted models to disk: as a run directory, an ONNX file, or a C file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from streamkern.estimator.fitted import FittedModel, Schema
from streamkern.estimator.mistakes import hide_traceback
from streamkern.estimator.model_card import ModelCard
from streamkern.estimator.parameter_values import transform_tables
from streamkern.estimator.parameters import Parameters, use_parameter_names
from streamkern.estimator.predicting import PredictionMixin
from streamkern.train.export.onnx_model import ExportedOutputs, write_c, write_onnx
from streamkern.train.online import Online
from streamkern.train.saved_model import model_state, save_model


class SavingMixin(PredictionMixin):
    """Mixin of estimators: methods that write the fitted model."""

    @hide_traceback
    def save(
        self, place: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None,
        card: bool = False,
    ) -> None:  # fmt: skip
        """Write the fitted model to a new directory, from which `streamkern.load` restores it.

        The directory has the layout of a run directory, which `streamkern predict`, `evaluate` and
        `info` read as well, and holds no code. After `partial_fit` it includes the state of the
        solver, so that training can continue; after `fit` it does not: use `run_dir` for a run that
        can be resumed. The state of a loaded model is not copied.

        Parameters
        ----------
        place : path or URL of a directory in which nothing else was trained or saved.
        storage_options : for a remote place, as fsspec takes them.
        card : whether to write a model card as well, README.md, for a repository on the Hugging
            Face Hub: the kernel, the columns and classes of the data, and the figures of held-out
            rows.

        Raises
        ------
        ConfigError
            The model has a function or a kernel of the user, which are not stored on disk; or
            `card` is True and `place` is remote.
        RunError
            The place holds another model or run, files of another program under the same names, or
            with `card` a README.md that is not this card.
        """
        snapshot = self._snapshot()
        fitted = snapshot._state
        model_card = ModelCard(snapshot, place) if card else None
        with use_parameter_names():
            snapshot._save(fitted, place, storage_options)
        if model_card is not None:
            model_card.write()

    @hide_traceback
    def to_onnx(
        self, path: str | os.PathLike[str], *, dtype: str = "auto", overwrite: bool = False
    ) -> None:
        """Write the fitted model to an ONNX file, which onnxruntime evaluates without streamkern.

        The file computes the predictions from unprocessed rows: it has the encoder, scaling,
        metric, kernel, centers, weights, and calibration of probabilities. See
        docs/howto/export.md for its inputs and outputs. It holds the kernel values of all centers
        for all rows of a call in memory, so rows should be passed in batches.

        Parameters
        ----------
        path : path of the file, which ends in .onnx; missing folders are created.
        dtype : dtype of numeric inputs, of the kernel and of the outputs, "float32" or "float64";
            "auto" is the one in which `predict` sums over the centers.
        overwrite : whether a file at `path` is replaced.

        Raises
        ------
        ConfigError
            `path` has another ending, the file exists already, its folder cannot be written, or the
            model has a part that ONNX cannot express: a transform of the user, hashed words, more
            than 2 GB of centers.
        MissingDependencyError
            onnx is not installed.
        """
        self._export(write_onnx, path, dtype, overwrite)

    @hide_traceback
    def to_c(
        self, path: str | os.PathLike[str], *, dtype: str = "auto", overwrite: bool = False
    ) -> None:
        """Write the fitted model to a C file, which needs no library.

        Its function predicts one row per call, in a workspace that the caller provides. It is named
        after the file: `digits_predict` in digits.c. See docs/howto/export.md.

        Parameters
        ----------
        path : path of the file, which ends in .c; missing folders are created.
        dtype, overwrite : as in `to_onnx`.

        Raises
        ------
        ConfigError
            As in `to_onnx`, or the text would exceed 250 MB.
        MissingDependencyError
            onnx is not installed; the C code is translated from the graph of `to_onnx`.
        """
        self._export(write_c, path, dtype, overwrite)

    def _export(self, write: Callable[..., None], path: Any, dtype: str, overwrite: bool) -> None:
        """Write the fitted model. write : `write_onnx` or `write_c`"""
        snapshot = self._snapshot()
        fitted = snapshot._state
        labels = fitted.schema.labels
        outputs = ExportedOutputs(flat=fitted.flat)
        if labels is not None:
            has_several = labels.indicator is not None
            classes = None if has_several else labels.classes
            outputs = ExportedOutputs(classes, labels.order, has_several)
        with snapshot._model() as model:
            write(model, fitted.centers, outputs, path, dtype=dtype, overwrite=overwrite)

    def _save(self, fitted: FittedModel, place: Any, storage_options: Any) -> None:
        """Write the fitted model, and after `partial_fit` the state of the solver."""
        attributes = fitted.attributes
        report = attributes["report_"]
        prefixes = ("test_", "validation_")
        metrics = {name: report[name] for name in report if name.startswith(prefixes)}
        facts = fitted.meta.get("facts", {}) | self._facts(fitted.schema)
        online = None if fitted.online is None else fitted.online[0]
        if isinstance(online, Online) and online.setup is not None and online.kept is not None:
            setup, (arrays, meta) = online.setup, online.kept
            # Marked as done, because it has no data with which a command could resume it.
            state = arrays, meta | {"position": meta["position"] | {"done": True}}
        else:
            with self._model() as model:
                setup, state = model_state(
                    model, fitted.centers, fitted.order, fitted.meta,
                    epochs=attributes["n_iter_"], samples=report["samples"],
                    ridge=report.get("ridge", 0.0), ridges=report.get("ridges"),
                )  # fmt: skip
        setup = setup[0], setup[1] | {"facts": facts}
        save_model(
            place, storage_options, setup, state, settings=fitted.settings, metrics=metrics,
            history=attributes["history_"], losses=attributes["loss_curve_"],
            ended=report.get("ended"), validation_scores=attributes["validation_scores_"] or (),
        )  # fmt: skip

    def _facts(self, schema: Schema) -> dict[str, Any]:
        """Return the facts that a run records of this estimator, as JSON, for `load`."""
        tables, not_kept = transform_tables(self.transforms)
        defaults = [f.name for f in fields(Parameters) if getattr(self, f.name) is f.default]
        return schema.facts() | {"transforms": tables, "not_kept": not_kept, "defaults": defaults}
