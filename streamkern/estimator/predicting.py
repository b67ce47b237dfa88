"""What a fitted estimator says of new rows: at once, into a file, or lazily for a Dask array."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.utils.validation import check_is_fitted

from streamkern.backend.devices import get_backend
from streamkern.basics.errors import ConfigError
from streamkern.basics.optional import need
from streamkern.basics.text import some
from streamkern.estimator import inputs, lazy
from streamkern.estimator.foreign import arrived, is_dask_table
from streamkern.estimator.parameters import Parameters, own_names
from streamkern.estimator.tables import encoded_rows
from streamkern.ingest.tables.encoder import Encoder
from streamkern.kernels.base import Kernel
from streamkern.kernels.importances import importances
from streamkern.kernels.points import Grid
from streamkern.kernels.products import KernelOperator
from streamkern.predict.calibration import Calibration, lacking
from streamkern.predict.forms import NO_POSTERIOR, normalised_of
from streamkern.predict.intervals import Intervals, check_level
from streamkern.solver.posterior import Posterior
from streamkern.stream.sources.arrays import ArraySource, is_sparse
from streamkern.stream.sources.row_shapes import check_row_shape
from streamkern.stream.sources.transforms import Transform
from streamkern.stream.target_scale import TargetScale
from streamkern.train.model import KernelModel, accelerator_of

OUTPUTS = ("default", "pandas")
ENDS = ("lower", "upper")


class Predicting(Parameters):
    """The fitted attributes as a model, for the time of a call."""

    centers_: npt.NDArray[Any]
    dual_coef_: npt.NDArray[Any]
    intercept_: npt.NDArray[np.float64]
    kernel_: Kernel
    feature_names_in_: npt.NDArray[Any]
    _meta: Mapping[str, Any]
    _calibration: Calibration | None = None
    _posterior: Posterior | None = None
    _precision: str
    _grid: Grid | None
    _fixed: tuple[Transform, ...]
    _targets: TargetScale
    _row_shape: tuple[int, ...]
    _target_columns: tuple[str, ...] | None
    _encoder: Mapping[str, Any] | None = None  # of a table, as in `StoreSpec`
    _named_by_store = False
    _flat = True

    @property
    def feature_importances_(self) -> npt.NDArray[np.float64]:
        """(d,), the share of each feature, after scaling, in the trace of the kernel's metric."""
        check_is_fitted(self)
        metric = self.kernel_.metric
        if metric is None:
            raise AttributeError(
                "feature_importances_ are those of a metric, and this model has no metric; fit "
                'with metric="learn", which may find that none is better'
            )
        return importances(metric)

    @property
    def encoded_features_(self) -> npt.NDArray[Any]:
        """(d,) names of the features that the columns of a table with words, dates or gaps became,
        in the order of `centers_` and `feature_importances_`."""
        check_is_fitted(self)
        if self._encoder is None:
            raise AttributeError(
                "encoded_features_ are those of a table with words, dates or gaps, and this model "
                "was trained on numbers as they are"
            )
        return np.array(Encoder.of(self._encoder, "the model").features, dtype=object)

    @contextlib.contextmanager
    def _model(self) -> Iterator[KernelModel]:
        """The fitted model on its device, for the time of a call."""
        check_is_fitted(self)
        threads, Z = None if isinstance(self.threads, str) else self.threads, self.centers_
        auto = self.accelerator == "auto"
        accelerator = accelerator_of(self._meta) if auto else self.accelerator
        with own_names(), get_backend(self.device, threads, accelerator) as backend:
            shift = Z.mean(axis=0, dtype=np.float64).astype(Z.dtype)
            op = KernelOperator(self.kernel_, backend, self._precision, shift, self._grid)
            with backend.active():
                points = op.points(backend.asarray(Z), right=True)
            weights = backend.asarray(self.dual_coef_ / self._targets.scale, op.dtype)
            yield KernelModel(
                op, points, weights, self._names(), self._row_shape, self._fixed, self._targets,
                columns=self._columns(), target_columns=self._target_columns,
                encoder=self._encoder, calibration=self._calibration, posterior=self._posterior,
                lacking=self._lacking,
            )  # fmt: skip

    def _names(self) -> tuple[str, ...] | None:
        return None

    @property
    def _lacking(self) -> str:
        """What probabilities and intervals need, of a model without, and why it has none."""
        return lacking(self._meta)

    def set_output(self, *, predict: str | None = None, transform: Any = None) -> Self:
        """Say what predictions and scores are given in.

        Parameters
        ----------
        predict : "pandas": a Series or DataFrame with the index of X, and the names of the
            targets or classes; of rows that have no index, numbered ones; of a Dask data frame
            another one; of a Dask array, which has no index, a Dask array. "default": an array.
            None: as it was.
        transform : is for transformers, and refused but for None and "default".

        Returns
        -------
        self : the estimator; clones and copies of it have the same.
        """
        if transform not in (None, "default"):
            raise ConfigError(
                f"transform={transform!r} is for transformers, and {type(self).__name__} has no "
                'transform; give predict="pandas" for predictions with the index of X'
            )
        if predict not in (None, *OUTPUTS):
            raise ConfigError(f"predict={predict!r} must be one of {some(OUTPUTS)}")
        if predict is not None:
            self._sklearn_output_config = {"predict": predict}  # which `clone` copies
        return self

    _sklearn_output_config: Mapping[str, str] = {}
    _output_names: tuple[Any, ...] | None = None

    def _answer(self, X: Any, method: str) -> Any:
        """The answer that `method` makes of f(X), in the form that suits X; see `set_output`."""
        check_is_fitted(self)
        X = arrived(X, "X")
        framed = self._sklearn_output_config.get("predict") == "pandas"
        if lazy.is_lazy(X):
            framed = framed and is_dask_table(X)
            like = self._empty_answer(X, method, framed=framed)
            return (lazy.framed_answers if framed else lazy.answers)(self, X, method, like)
        return self._formed(getattr(self, method)(self._values(X)), X, method)

    def _answer_of_block(self, X: Any, method: str) -> Any:
        """The same for a block of lazy rows, which may have none: a filter has left none there."""
        framed = self._sklearn_output_config.get("predict") == "pandas"
        return self._answer(X, method) if len(X) else self._empty_answer(X, method, framed=framed)

    def _empty_answer(self, X: Any, method: str, *, framed: bool) -> Any:
        answer = getattr(self, method)(np.zeros((0, len(self.intercept_)), self._dtype))
        return self._framed(answer, X, method) if framed else answer

    def _formed(self, answer: npt.NDArray[Any], X: Any, method: str) -> Any:
        """As `set_output` has it."""
        framed = self._sklearn_output_config.get("predict") == "pandas"
        return self._framed(answer, X, method) if framed else answer

    def _framed(self, answer: npt.NDArray[Any], X: Any, method: str) -> Any:
        """With the index of X, if it has one; intervals have two columns for each output."""
        pandas = need("pandas", 'set_output(predict="pandas")', "frames")
        index = getattr(X, "index", None) if isinstance(X, pandas.DataFrame) else None
        names = self._names_of(method)
        if method == "_ends":
            columns: Any = list(ENDS)
            if answer.ndim == 3:
                columns = pandas.MultiIndex.from_product([names or range(answer.shape[1]), ENDS])
            return pandas.DataFrame(answer.reshape(len(answer), -1), index, columns)
        if answer.ndim == 1:
            return pandas.Series(answer, index, name=None if names is None else names[0])
        return pandas.DataFrame(answer, index, names)

    def _names_of(self, _method: str) -> Sequence[Any] | None:
        """Of the columns of an answer."""
        return self._output_names or self._target_columns

    @property
    def _dtype(self) -> np.dtype[Any]:
        """Of f(X)."""
        values = self._names() is None
        return np.dtype(np.float64) if values else np.dtype(self.dual_coef_.dtype)

    def _values(self, X: Any, **behind: bool) -> npt.NDArray[Any]:
        """f(X), (n, c), in slabs. behind : what comes behind it, as `KernelModel.values` has it."""
        if not inputs.is_stream(X):
            rows = self._rows(X)
            with self._model() as model:
                return model.values(self._shaped(rows), **behind)
        source = inputs.open_stream(X, targets=False)
        with self._model() as model:
            return model.predict(source, **behind)

    def _between(
        self, X: Any, interval: float, normalised: bool
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """f(X) (n, c) at once, and its intervals, (n, c, 2)."""
        if not normalised:
            F, intervals = self._judged(X, interval)
            return F, intervals.around(F, interval)
        X = self._judgeable(X, interval)
        assert self._calibration is not None
        reach = normalised_of(self._calibration).intervals.reach(interval)
        both, c = self._values(X, spread=True), len(reach)
        F, reach = both[:, :c], reach * both[:, c:]
        return F, np.stack((F - reach, F + reach), axis=2)

    def _judged(self, X: Any, interval: float) -> tuple[npt.NDArray[Any], Intervals]:
        """f(X) at once, and what makes intervals or sets of it."""
        X = self._judgeable(X, interval)
        assert self._calibration is not None
        intervals = self._calibration.intervals
        intervals.reach(interval)  # which may be refused, before hours of computing
        return self._values(X), intervals

    def _judgeable(self, X: Any, interval: float) -> Any:
        """X, which is here, where there is a calibration."""
        check_is_fitted(self)
        check_level(interval)
        X = self._at_once(X, f"interval={interval!r}")
        if self._calibration is None:
            raise ConfigError(f"interval={interval!r} needs {self._lacking}")
        return X

    def _as_targets(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return F[:, 0] if self._flat else F

    def _with_ends(self, X: Any, interval: float, normalised: bool) -> tuple[Any, Any]:
        """Values at once, and the ends of their intervals."""
        F, ends = self._between(X, interval, normalised)
        shown = self._formed(ends[:, 0] if self._flat else ends, X, "_ends")
        return self._formed(self._as_targets(F), X, "_as_targets"), shown

    def _with_std(self, X: Any) -> tuple[Any, Any]:
        """Values at once, and their standard deviations."""
        check_is_fitted(self)
        X = self._at_once(X, "return_std=True")
        if self._posterior is None:
            raise ConfigError(f"return_std=True needs {NO_POSTERIOR}")
        both = self._values(X, std=True)
        c = len(self.intercept_)
        F, std = map(self._as_targets, (both[:, :c], both[:, c:]))
        return self._formed(F, X, "_as_targets"), self._formed(std, X, "_as_targets")

    @staticmethod
    def _at_once(X: Any, asked: str) -> Any:
        X = arrived(X, "X")
        if lazy.is_lazy(X):
            raise ConfigError(
                f"{asked} is not known of Dask arrays, whose answers are lazy; give X as an array, "
                "a store or a source"
            )
        return X

    def _write(self, X: Any, out: Any, overwrite: bool, order: str, **what: Any) -> None:
        check_is_fitted(self)
        X = arrived(X, "X")
        if inputs.is_stream(X):
            source = inputs.open_stream(X, targets=False)
        else:
            source = ArraySource(self._rows(X))
            source.encoder = self._encoder
        with self._model() as model:
            model.predict_to(source, out, overwrite=overwrite, order=order, **what)

    def _rows(self, X: Any) -> Any:
        """Checked rows in memory, of a data frame encoded as those that were trained on."""
        if self._encoder is not None:
            return encoded_rows(X, Encoder.of(self._encoder, "the model"))
        return inputs.checked_rows(self, X, reset=False, nameless=self._named_by_store)

    def _shaped(self, rows: Any) -> Any:
        """Rows as they were trained on, which may be given flat; sparse ones stay as they are."""
        check_row_shape("X has", rows.shape[1:], "the model was trained on", self._row_shape)
        return rows if is_sparse(rows) else rows.reshape(len(rows), *self._row_shape)

    def _columns(self) -> tuple[str, ...] | None:
        """Names of the features that were trained on, those an encoder made where there is one."""
        if self._encoder is not None:
            return Encoder.of(self._encoder, "the model").features
        names = getattr(self, "feature_names_in_", None)
        return None if names is None else tuple(map(str, names))
