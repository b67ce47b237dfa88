"""Kernel regression and classification behind scikit-learn's interface.

Data are arrays, or anything streamed: a store, its URL, a source, zarr and Dask arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.text import some
from streamkern.estimator import inputs
from streamkern.estimator.base import KernelEstimator
from streamkern.estimator.facts import label_dtype
from streamkern.estimator.mistakes import brief, suggesting
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.base import BaseSource

__all__ = ["KernelClassifier", "KernelRegressor"]


@suggesting
class KernelRegressor(RegressorMixin, KernelEstimator):  # type: ignore[misc]
    """Least-squares regression with f(x) = mean(y) + sum_j alpha_j k(x, z_j), trained by streaming.

    Features are scaled, see `scale`.

    Parameters
    ----------
    kernel : "auto": of "laplace", "matern32", "matern52" and "gaussian" the one with which 512
        rows predict each other best (for "sgd" and EigenPro "laplace"). Or "laplace", "laplace_l1",
        "gaussian", "cauchy", "matern32", "matern52", "dispersal", "linear", "polynomial",
        "relu_ntk", a table with parameters, {"kind": "polynomial", "degree": 2}, or a `Kernel`
        object, such as `0.5 * Laplace(3) + Polynomial(2)`.
    bandwidth : number above 0; "median": the median distance, in the norm of the kernel, between
        centers, or between the rows that "kmeans" and "rpcholesky" begin with (with
        `kernel="auto"`, between 512 rows); "auto": that of an eighth to 16 times the median
        distance with which 512 rows predict each other best. Of parts that do not say
        theirs.
    metric : "learn": distances are taken in a metric in which the targets are simpler, if one is
        surely better on held-out rows: a scale for each feature, or a matrix; kernel and bandwidth
        that are left open are those that suit it. "learn-diagonal", "learn-full": only scales, or
        only a matrix. "none": as the features are. Or a metric of your own: scales (d,), or a
        matrix A (d, r), for distances |(x - z) A| of features after scaling; or the path or URL of
        such an array (.npy or zarr).
    n_centers : p; "auto": all rows, at most 10 000.
    centers : "random" rows of the data; "balanced", random rows with equally many of each class;
        "kmeans", means of a stream of rows, for p far below n; "rpcholesky", rows that span the
        kernel matrix well, from at most 8 p random ones; "all" rows; a (p, d) array in the units
        of X; or the path or URL of one (.npy or zarr) or of a store.
    features : "kernel"; "nystrom" and "fourier" make a linear model of explicit features, for the
        solvers "block", "sgd", "eigenpro1" and "direct". "nystrom": L^-1 k(centers, x), the same
        functions as with "kernel". "fourier": `n_features` random cosines and sines, without
        centers; for the kernels of a distance, built in. n_features : an even number; "auto":
        10 000.
    fit_intercept : whether the weighted mean of the targets is taken from them before and added to
        f after; False, as in papers on kernel machines: f is kernels and nothing else. It is the
        mean over the rows of `fit`, of the first block in `partial_fit` (f learns what later ones
        differ by), of the run that `warm_start` goes on from, and of a sample of the rows where a
        function makes or changes the targets. Mix-up keeps it.
    solver : "auto", "block", "sgd", "eigenpro1", "eigenpro2", "eigenpro3", "eigenpro4", "direct" or
        "falkon". The following are its sizes; "auto" fits them to the problem and the memory.
        "sgd", "eigenpro1" and "eigenpro2" take all rows as centers, unless features are explicit.
    block_size : centers per block ("block"). ridge : weight of the RKHS norm, with Fourier
        features of |w|^2 ("block", "sgd", "direct", "falkon", and "eigenpro1" with features); 0:
        none; "auto": found from the data, `report_["ridge"]`, by "direct" on rows held out, by the
        others from the noise of the targets that some rows show.
    n_nystrom, level, period : sample, damped directions, steps per projection ("eigenpro*").
    projection : "exact", "resident" (K(Z, Z) is kept) or "inexact" ("eigenpro3", "eigenpro4").
    damping : mu over the top eigenvalue of the covariance ("block"), or the factor tau in (0, 1]
        ("eigenpro1"). average : whether the model has the running average of the weights.
        step_scale : factor in (0, 1] on the step that was measured to be safe.
    tolerance : relative residual at which "falkon" stops; None: 1e-4.
    epochs : passes over the data; "auto": enough for 100 000 rows, copies included, between 1 and
        20; at most 20 with "falkon", which stops when it has converged. "direct" stops after the
        first, unless transforms make every pass another one. In `partial_fit`, passes over each
        block; "auto": one.
    batch_size : rows per step.
    transforms : of the training rows, in order: tables as in a run file,
        {"kind": "noise", "sigma": 0.5}, or functions (X, Y, rng) -> (X, Y). Random ones are
        augmentation. They see rows in the units of X, unless {"kind": "scale"} is first.
    scale : of the features, behind the transforms: "feature", every feature by its own mean and
        standard deviation; "global", all of them by one; "none"; "auto": "global" for images, rows
        of uint8, and features that vary little because they are nearly always 0, which are pixels
        as a rule; "feature" for all others. The numbers are those of a store or of arrays in
        memory, else of a sample of the rows. Scaling is part of the model: every row it sees, and
        `centers`, are given in the units of X. A constant feature is only centred. A scale in
        `transforms` takes its place.
    precision : "exact" (float32), "float64", "high", "integer" or "fast" (for GPUs); "auto": the
        fastest that is as good as float32.
    device : "auto", "cpu", "gpu" or "gpu:N".
    accelerator : of the CPU: "numba", "none", or "auto", which is Numba where it is installed.
    memory : bytes to stay within, or "8 GiB"; "auto": four fifths of what is free.
    threads : of the computation; "auto": one for each processor.
    random_state : whole number, which fixes every draw; or None or a RandomState, as in
        scikit-learn.
    warm_start : True: `fit` starts from the weights of the fit before, over the same centers, which
        the same rows and random_state give, or `centers` that are handed over; other ones are a
        `ConfigError`. Or the run_dir of another fit, with its centers. For "block", "eigenpro3",
        "eigenpro4" and "falkon".
    run_dir : a directory for checkpoints and the log; makes `fit` resumable.
    checkpoint_every : steps, or a time such as "5 min".
    verbose : 0: silent. 1: `fit` and `partial_fit` say on stderr what the setup is doing, how far
        the steps are, the training loss, and the time left: in a line that is drawn anew on a
        terminal and in a notebook, in a new line every 30 s into a pipe. "auto": likewise, of what
        takes more than 3 s.

    Attributes
    ----------
    centers_ : (p, d) the centers, in the order given or drawn, in the units the kernel sees: those
        of X after scaling. With Fourier features (p, d + 1), their frequencies and phases.
    dual_coef_ : (p, c) their weights: f(X) = K(scaled X, centers_) @ dual_coef_ + intercept_.
        float64, but for classes in the precision of the training.
    intercept_ : (c,) float64; zeros without `fit_intercept`.
    feature_importances_ : (d,) of a model with a metric: shares of the features, which sum to 1.
    kernel_, bandwidth_ : the kernel with its bandwidth: 1 if it has none, and the largest of a sum
        or product of kernels of distances.
    n_features_in_ : d.
    report_ : what was chosen and measured: solver, sizes, leverage, step size, samples, metrics;
        why it took fewer epochs than were allowed (`ended`).
    history_ : the evaluations on `test`, oldest first: `test_mse` in squares of the units of y,
        its mean over rows and outputs, and `test_r2` or, of classes, `test_accuracy`. The last of
        them are in report_ as well.
    n_iter_ : epochs that were passed to the end; in `partial_fit` over all blocks so far.
    loss_curve_ : the training loss, oldest first: means over 32 steps, each of rows before the step
        that learned from them, in squares of the units of y; the last one of the steps that were
        left. It covers what other processes did for the same `run_dir`, whose log keeps it.
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    @brief
    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Train on one more block of rows.

        The first call chooses centers, bandwidth, scaling, intercept and preconditioner from its
        block, so it should be large and like the rest. Every call makes `epochs` ("auto": one)
        passes over its block with the same solver state and running average. Sample weights that a
        block brings are divided by their mean in it. A `fit` before is discarded, and `fit` starts
        anew. A ridge that is left open, "auto", is none here: nobody knows how many rows there
        will be.
        `run_dir` is not used: pickle the estimator to keep its state.
        """
        return self._partial_fit(X, y)

    @brief
    def predict(
        self, X: Any, *, out: Any = None, overwrite: bool = False, order: str = "source"
    ) -> Any:
        """Predicted values, float64, (n,) where y was (n,), else (n, c).

        X : as in `fit`. Of a store, row k of the answer is that of row k of the files or arrays
        that were ingested. out, overwrite, order : as in `KernelModel.predict_to`, which writes
        instead of returning them; nothing of the size of the data is then held in memory.
        """
        if out is not None:
            return self._write(X, out, overwrite, order)
        F = self._values(X)
        return F[:, 0] if self._flat else F

    @brief
    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """R2, the plain mean over the outputs; y is None where X brings it along."""
        if not inputs.is_stream(X):
            return float(super().score(X, y, sample_weight))
        _no_weights(sample_weight)
        check_is_fitted(self)
        source = self._stream(X, y)
        _same_outputs(source.n_outputs, self.dual_coef_.shape[1])
        with self._model() as model:
            return model.evaluate(source)["r2"]

    def _stream(self, X: Any, y: Any, sample_weight: Any = None) -> BaseSource:
        source = inputs.open_stream(X, inputs.floating(y), sample_weight)
        if source.classes is not None:
            raise DataError(
                f"the data has {source.n_outputs} classes; use KernelClassifier, or ingest it "
                "with targets='values'"
            )
        if hasattr(self, "_online"):
            _same_outputs(source.n_outputs, self.dual_coef_.shape[1])
        return source

    def _array_source(self, X: npt.NDArray[Any], y: Any, w: Any, first: bool) -> ArraySource:
        y = inputs.checked_values(y, len(X))
        if first:
            self._flat = y.ndim == 1
        elif hasattr(self, "_online"):  # what fit holds out is compared with what it trains on
            _same_outputs(1 if y.ndim == 1 else y.shape[1], self.dual_coef_.shape[1])
        return ArraySource(X, y, sample_weight=w)


@suggesting
@dataclass(kw_only=True, eq=False, repr=False)
class KernelClassifier(ClassifierMixin, KernelEstimator):  # type: ignore[misc]
    """Least-squares classification: regression on one-hot targets, prediction by the largest.

    Parameters and attributes are those of `KernelRegressor`, and these.

    Parameters
    ----------
    class_weight : weights of the classes, on top of `sample_weight` in `fit`: "balanced", which is
        n / (classes * rows of the class), or a dict {label: weight}, 1 for labels it leaves out.

    Attributes
    ----------
    classes_ : (c,) sorted labels. Of a store they are its class names, as whole numbers where all
        of them are.
    """

    class_weight: Any = None

    @brief
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, *, test: Any = None) -> Self:
        """See `KernelRegressor.fit`. y : (n,) labels."""
        self._forget_classes()
        super().fit(X, y, sample_weight, test=test)
        return self

    @brief
    def partial_fit(self, X: Any, y: Any = None, classes: Any = None) -> Self:
        """See `KernelRegressor.partial_fit`.

        classes : all labels there will be; needed in the first call unless its block has all.
        """
        if self.class_weight is not None:
            raise ConfigError(
                "class_weight can not be used with partial_fit, which does not know how many rows "
                "of each class there will be; use fit"
            )
        if not hasattr(self, "_online"):
            self._forget_classes()
            if classes is not None:
                self.classes_ = inputs.sorted_classes(classes)
        elif classes is not None and not np.array_equal(
            inputs.sorted_classes(classes), self.classes_
        ):
            raise ConfigError(
                f"classes={classes!r} differ from those of the first call, {self.classes_!r}; "
                "name all of them there"
            )
        return self._partial_fit(X, y)

    @brief
    def predict(
        self, X: Any, *, out: Any = None, overwrite: bool = False, order: str = "source"
    ) -> Any:
        """Predicted labels (n,); see `KernelRegressor.predict`."""
        if out is not None:
            return self._write(X, out, overwrite, order)
        best = self.predict_values(X).argmax(axis=1)
        return self.classes_[best]

    @brief
    def predict_values(self, X: Any) -> npt.NDArray[Any]:
        """f(X), (n, c): about 1 for the class of a row and 0 for the others."""
        return self._values(X)

    @brief
    def decision_function(self, X: Any) -> npt.NDArray[Any]:
        """f(X), (n, c); with two classes the difference of their values, (n,)."""
        F = self._values(X)
        return F[:, 1] - F[:, 0] if F.shape[1] == 2 else F

    @brief
    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Accuracy; y is None where X brings it along."""
        if not inputs.is_stream(X):
            return float(super().score(X, y, sample_weight))
        _no_weights(sample_weight)
        check_is_fitted(self)
        source = self._stream(X, y)
        with self._model() as model:
            return model.evaluate(source)["accuracy"]

    def _forget_classes(self) -> None:
        if hasattr(self, "classes_"):
            del self.classes_

    def _names(self) -> tuple[str, ...]:
        return inputs.names_of(self.classes_)

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), "labels": label_dtype(self.classes_)}

    def _stream(self, X: Any, y: Any, sample_weight: Any = None) -> BaseSource:
        known = hasattr(self, "classes_")
        if y is not None and known:
            ids = inputs.streamed_ids(y, self.classes_)
            return inputs.open_stream(X, ids, sample_weight, classes=self._names())
        source = inputs.open_stream(X, y, sample_weight)
        if source.classes is None:
            raise DataError(
                "the data has values as targets, not classes; use KernelRegressor, or ingest it "
                "with targets='classes'"
            )
        if not known:
            self.classes_ = inputs.labels_of(source.classes, None if y is None else y.dtype)
        elif self._names() != source.classes:
            raise DataError(
                f"the data has the classes {some(source.classes)}, the model was trained on "
                f"{some(self._names())}; use data with the same classes"
            )
        return source

    def _array_source(self, X: npt.NDArray[Any], y: Any, w: Any, first: bool) -> ArraySource:
        y = inputs.checked_labels(y, len(X))
        if not hasattr(self, "classes_"):
            self.classes_ = inputs.sorted_classes(y)
        ids = inputs.label_ids(y, self.classes_)
        return ArraySource(X, ids, classes=self._names(), sample_weight=w)


def _same_outputs(given: int, wanted: int) -> None:
    if given != wanted:
        raise DataError(f"y has {given} outputs, the model was trained on {wanted}; give as many")


def _no_weights(sample_weight: Any) -> None:
    if sample_weight is not None:
        raise ConfigError("sample_weight is only known to score on arrays; leave it out")
