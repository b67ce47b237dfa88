"""The docstrings of the estimators, from the text that both share."""

from __future__ import annotations

PARAMETERS = """\
kernel : "auto": of "laplace", "matern32", "matern52" and "gaussian" the one with which 512
    rows predict each other best (for "sgd" and EigenPro "laplace"). Or "laplace", "laplace_l1",
    "gaussian", "cauchy", "matern32", "matern52", "dispersal", "linear", "polynomial",
    "relu_ntk", a table with parameters, {"kind": "polynomial", "degree": 2}, or a `Kernel`
    object, such as `0.5 * Laplace(3) + Polynomial(2)`.
bandwidth : number above 0, in units of the features after scaling; "median": the median
    distance, in the norm of the kernel, between centers, or between the rows that "kmeans" and
    "rpcholesky" begin with (with `kernel="auto"`, between 512 rows); "auto", the default: that of
    a 64th to 16 times the median distance with which 512 rows predict each other best. Of
    parts that do not say theirs.
metric : "learn": distances are taken in a metric in which the targets are simpler, if one is
    surely better on held-out rows: a scale for each feature, or a matrix; kernel and bandwidth
    that are left open are those that suit it. "learn-diagonal", "learn-full": only scales, or
    only a matrix. "none": as the features are. "auto", the default: "learn" on tables (2 to 256
    features, not taken for pixels) of 2000 rows and more, where `bandwidth` is left open and
    `kernel` is, too, or one of the four above by name; else "none". Or a metric of your own:
    scales (d,), or a matrix A (d, r), for distances |(x - z) A| of features after scaling; or the
    path or URL of such an array (.npy or zarr).
n_centers : number of centers p; "auto", the default: all rows, at most 10 000. Of fewer rows all
    are taken, with a warning.
centers : "random", the default: rows of the data; "balanced": random rows with equally many of
    each class; "kmeans": means of a stream of rows, for p far below n; "rpcholesky": rows that
    span the kernel matrix well, from at most 8 p random ones; "all" rows; a (p, d) array in the
    units of X; or the path or URL of one (.npy or zarr) or of a store.
features : "kernel", the default: f is a sum of kernels. "nystrom" and "fourier" make a linear
    model of explicit features, for the solvers "block", "sgd", "eigenpro1" and "direct".
    "nystrom": L^-1 k(centers, x), the same functions as with "kernel". "fourier": `n_features`
    random cosines and sines, without centers; for the kernels of a distance, built in.
n_features : of "fourier", an even number; "auto", the default: 10 000.
fit_intercept : True, the default: the weighted mean of the targets is taken from them before and
    added to f after; False, as in papers on kernel machines: f is kernels and nothing else. It is
    the mean over the rows of `fit`, of the first block in `partial_fit` (f learns what later ones
    differ by), of the run that `warm_start` goes on from, and of a sample of the rows where a
    function makes or changes the targets. Mix-up keeps it.
solver : "auto", the default: "block", or "direct" where that is expected to be done sooner. Or
    "block", "sgd", "eigenpro1", "eigenpro2", "eigenpro3", "eigenpro4", "direct" or "falkon".
    "sgd", "eigenpro1" and "eigenpro2" take all rows as centers, unless features are explicit. The
    following are its sizes; "auto" fits them to the problem and the memory.
block_size : centers of a block ("block"); "auto", the default.
ridge : weight of the squared RKHS norm, with Fourier features of |w|^2, 0 or above ("block",
    "sgd", "direct", "falkon", and "eigenpro1" with features); 0: none; "auto", the default: found
    from the data, `report_["ridge"]`, by "direct" on rows held out, by the others from the noise
    of the targets that some rows show. "direct" finds one for each of several outputs with
    values, `report_["ridges"]`.
n_nystrom : rows of the sample behind the preconditioner ("eigenpro1" to "eigenpro4"); "auto", the
    default.
level : directions that are damped ("eigenpro1" to "eigenpro4"); "auto", the default.
period : steps from one projection to the next ("eigenpro4"); "auto", the default.
projection : "exact", "resident" (K(Z, Z) is kept) or "inexact" ("eigenpro3", "eigenpro4"); "auto",
    the default.
damping : mu over the top eigenvalue of the covariance ("block"), or the factor tau in (0, 1]
    ("eigenpro1"); "auto", the default.
average : whether the model has the running average of the weights; True, the default.
step_scale : factor in (0, 1] on the step that was measured to be safe; 1.0, the default.
tolerance : relative residual, between 0 and 1, at which "falkon" stops; None, the default: 1e-4.
epochs : passes over the data; "auto", the default: enough for 100 000 rows, copies included,
    between 1 and 20; at most 20 with "falkon", which stops when it has converged, and with
    `early_stopping`. "direct" stops
    after the first, unless transforms make every pass another one. In `partial_fit`, passes over
    each block; "auto": one.
batch_size : rows of a step; "auto", the default.
transforms : of the training rows, in order: tables as in a run file,
    {"kind": "noise", "sigma": 0.5}, or functions (X, Y, rng) -> (X, Y). Random ones are
    augmentation. They see rows in the units of X, unless {"kind": "scale"} is first. None by
    default.
scale : of the features, behind the transforms: "feature", every feature by its own mean and
    standard deviation; "global", all of them by one; "none"; "auto", the default: "global" for
    images, rows of uint8, and features that vary little because they are nearly always 0, which
    are pixels as a rule; "feature" for all others. The numbers are those of a store or of arrays
    in memory, else of a sample of the rows. Scaling is part of the model: every row it sees, and
    `centers`, are given in the units of X. A constant feature is only centred. A scale in
    `transforms` takes its place.
precision : of distances and products: "exact" (float32), "float64", "high", "integer" or "fast"
    (for GPUs); "auto", the default: the fastest that is as good as float32.
device : "cpu", "gpu" or "gpu:N"; "auto", the default: a GPU if one can be used, else the CPU.
accelerator : of the CPU: "numba", "none", or "auto", the default, which is Numba where it is
    installed and there is enough to compute for what it compiles to pay.
memory : bytes to stay within, or text such as "8 GiB"; "auto", the default: four fifths of what is
    free. Of a GPU its own memory as well.
threads : of the computation; "auto", the default: one for each processor.
ranks : processes that share every step of `fit`, each with a part of its rows; 1, the default, or
    "gpus", one for each GPU of this machine. They need the extra `ranks`, a `run_dir`, and a solver
    that can be shared; see the page on ranks.
random_state : whole number, which fixes every draw, 0 by default; or None or a RandomState, as in
    scikit-learn.
warm_start : True: `fit` starts from the weights of the fit before, over the same centers, which
    the same rows and random_state give, or `centers` that are handed over; other ones are a
    `ConfigError`. Or the run_dir of another fit, with its centers. For "block", "eigenpro3",
    "eigenpro4" and "falkon". False, the default: from nothing.
run_dir : a directory, path or URL, for checkpoints and the log; makes `fit` resumable. None, the
    default: nothing is written.
checkpoint_every : steps, or a time such as "5 min"; "auto", the default: a minute, or 20 times what
    training stood still for the last one.
early_stopping : True: a share of the rows is set aside, the model is scored on it after every pass,
    by accuracy or R2, and `fit` ends once the score has not got better for `n_iter_no_change`
    passes. The weights kept are those of the best pass. Rows set aside are never trained on, nor
    are copies of them. Not for "direct", `partial_fit`, `warm_start`, and rows that a function
    makes. False, the default: all rows are trained on.
validation_fraction : the share that is set aside, between 0 and 1; 0.1, the default. Of arrays in
    memory it is the same share of each class.
n_iter_no_change : passes in a row without a better score that end `fit`; 5, the default.
calibrate : True: a tenth of the rows, at most 2000, is set aside and never trained on; by them the
    finished model says probabilities of classes (`predict_proba`), and intervals or sets that hold
    the truth as often as asked (`predict(X, interval=0.9)`). Not for `partial_fit`, `warm_start`,
    and rows that a function makes. False: all rows are trained on. "auto", the default: a fiftieth,
    at most 2000, of 5000 rows or more that have one class each, 500 for each class in the mean,
    where rows can be set aside; of values, of weighted and of fewer rows none. Where none are and
    the solver is "direct" with every row a center, as it is for small data, probabilities of
    classes come from the values of each row by the model of all others. A `warm_start` leaves the
    same rows out as the fit before, and has no probabilities.
callbacks : objects of subclasses of `streamkern.Callback`, such as `streamkern.TensorBoard` and
    `streamkern.MLflow`, that are told of `fit` and may end it; none, the default. Those of
    scikit-learn 1.9 and newer are for `set_callbacks`.
verbose : 0: silent. 1: `fit` and `partial_fit` say on stderr what the setup is doing, how far
    the steps are, the training loss, and the time left: in a line that is drawn anew on a
    terminal and in a notebook, in a new line every 30 s into a pipe. "auto", the default:
    likewise, of what takes more than 3 s.
"""

VALUES_PARAMETER = """\
posterior : True: the model keeps what `predict(X, return_std=True)` is made of, p^2 numbers, and
    `report_["posterior"]` has the standard deviation of the noise. With the solver "direct", which
    "auto" then stands for, and rows that are each there once. False, the default.
"""

CLASSES_PARAMETER = """\
class_weight : weights of the classes, on top of `sample_weight` in `fit`: "balanced", which is
    n / (classes * rows of the class), or a dict {label: weight}, 1 for labels it leaves out; None,
    the default: 1 for all. Not for `partial_fit`.
class_sampling : in which shares rows of the classes come, in place of weights or with them:
    "balanced", every class as often as any other, or a dict {label: share} of all classes. A pass
    has as many rows as the data; those of rare classes come again and those of frequent ones
    seldom, all alike often over the passes. Scaling, rows set aside and evaluations are of the data
    as it is. None, the default: every row once in a pass. Not for `partial_fit`.
"""

ATTRIBUTES = """\
centers_ : (p, d) the centers, in the order given or drawn, in the units the kernel sees: those
    of X after scaling. With Fourier features (p, d + 1), their frequencies and phases.
dual_coef_ : (p, c) their weights: f(X) = K(scaled X, centers_) @ dual_coef_ + intercept_.
    float64, but for classes in the precision of the training.
intercept_ : (c,) float64; zeros without `fit_intercept`.
feature_importances_ : (n_features_in_,) of a model with a metric: the share of each column in it,
    which is that of the mean squared gradients; they sum to 1. For how much of the error a column
    takes away see `permutation_importances`.
metric_importances_ : (d,) the same of the features that columns were encoded as.
kernel_ : the kernel with its bandwidth, a `Kernel`.
ridge_ : the ridge, given or found; 0.0 without one; (c,) where several targets have their own.
solver_ : the name of the solver, given or chosen.
n_centers_ : p, the number of centers; 0 with Fourier features.
bandwidth_ : of the kernel: 1 if it has none, and the largest of a sum or product of kernels of
    distances.
n_features_in_ : d, or the columns of the table that was encoded.
feature_names_in_ : names of the columns, where a DataFrame or a store had them: those of the d
    features, or of the table that they were encoded from.
encoded_features_ : (d,) names of the features, of a table with words, dates or gaps.
report_ : what was chosen and measured: solver, sizes, leverage, step size, samples, metrics;
    why it took fewer epochs than were allowed (`ended`); of sparse rows how full they are.
n_iter_ : epochs that were passed to the end; in `partial_fit` over all blocks so far.
loss_curve_ : (n_iter_,) the training loss of each epoch, oldest first: the mean squared error
    over its rows and outputs, in squares of the units of y, of each row before the step that
    learned from it. The solvers "direct" and "falkon" change the model at the end of an epoch:
    theirs is the loss of that model, after the last epoch on up to 512 rows. NaN where it is not
    known, of a run that an older version began. It covers all processes that worked on `run_dir`.
history_ : the evaluations on `test`, oldest first: `test_mse` in squares of the units of y,
    its mean over rows and outputs, and `test_r2` or, of classes, `test_accuracy`; with
    `early_stopping` also `validation_mse` and so on, of the rows set aside. The last of them, of
    the weights that are kept, are in report_ as well. Of several labels for a row they are those
    of values.
validation_scores_ : with `early_stopping` the score of every pass on the rows set aside, accuracy
    or R2, oldest first; else None.
"""

CLASSES_ATTRIBUTE = """\
classes_ : (c,) sorted labels. Of a store they are its class names, as whole numbers where all
    of them are; of several labels for a row the numbers of their columns. Answers have their
    columns in this order, `dual_coef_` and `intercept_` in that of the store's classes.
"""

RAISES = """\
ConfigError
    A parameter is wrong: `fit` and `partial_fit` say which, the rule and the remedy.
    `MemoryBudgetError`, one of them, where the sizes asked for do not fit `memory`.
DataError
    The data is not what it has to be: NaN or infinity, rows of another shape, a damaged store.
ResumeMismatchError
    `run_dir` holds a run of other data or settings.
TrainingInterrupted
    A signal stopped `fit` with a `run_dir`; the same call goes on.
"""


def docstring(what: str, example: str, *, classes: bool = False) -> str:
    """Return the docstring of an estimator.

    what : its first paragraphs
    classes : whether it is the classifier's
    """
    parts = (
        ("Parameters", PARAMETERS + (CLASSES_PARAMETER if classes else VALUES_PARAMETER)),
        ("Attributes", (CLASSES_ATTRIBUTE if classes else "") + ATTRIBUTES),
        ("Raises", RAISES),
        ("Examples", example),
    )
    sections = (f"{title}\n{'-' * len(title)}\n{text}" for title, text in parts)
    return "\n".join((what, *sections))
