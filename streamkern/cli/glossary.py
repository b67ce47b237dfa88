"""The meaning of every fact that `streamkern info` prints, in one phrase each.

``python tools/glossary.py`` writes `docs/glossary.md` from this module; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from streamkern.config.run_config import FREE_AT_RESUME, RunConfig

RUN_MEANINGS: Final = {
    "state": "whether the run is finished, and which process works on it now",
    "doing": "what the setup (the work before the first step) is computing",
    "step": "number of batches trained so far; if no process works on the run, the number at the "
    "last save",
    "epoch": "number of finished epochs, of all requested ones; while "
    "a run trains, the current epoch",
    "samples": "number of training rows seen so far, of those in all epochs; a row counts once "
    "per epoch",
    "time_left": "time until the last epoch ends, at the rate of the last ten seconds of training",
    "samples_per_s": "training rows per second, over the last ten seconds of training",
    "last_heard": "age of the newest line of the run's log",
    "ranks": "(1) number of processes (ranks) that train the run together, or trained it last; (2) "
    "whether they divide rows or centers; (3) share of its time that a rank waits for the other "
    "ranks, smallest and largest of all ranks; (4) share of its time that a rank waits for data "
    "(stall), smallest and largest; (5) samples per second that a rank would train if it never "
    "waited for other ranks",
    "slowest_rank": "the rank that the others wait for",
    "dashboard": "address of the dashboard of the Dask cluster",
    "ended": "why the run ended before the last requested epoch",
    "changed": "what was different in the environment (versions, device) when the run was resumed; "
    "from that step on, results agree with an uninterrupted run only to rounding",
    "logged_step": "last step in the log; steps after the last checkpoint are computed again",
    "checkpoints": "steps of the checkpoints that are kept",
    "rows": "number of training rows, copies included",
    "continues": "the run from whose newest weights this run started, and the ancestors of that "
    "run",
}
_TEST_AND_VALIDATION_MEANINGS: Final = {
    "log_loss": "mean of -log of the predicted probability of the true class",
    "squared_hinge": "mean over the rows of the squared hinge loss, summed over the classes",
    "mae": "mean absolute error, in units of the targets",
    "huber_loss": "mean Huber loss, in squared units of the targets",
    "pinball_loss": "mean pinball loss of the quantile, in units of the targets",
    "poisson_deviance": "mean Poisson deviance, in units of the targets",
    "gamma_deviance": "mean deviance of the gamma distribution, without a unit",
    "expectile_loss": "mean asymmetric squared error, in squared units of the targets",
    "loss": "mean of a custom loss, if its class has no `figure`",
    "brier": "mean squared error of the probabilities; for two classes, half of it",
    "ece": "expected calibration error: mean difference between the probability of the most "
    "probable class and the share of rows in which this class is right",
    "coverage": "share of the targets inside their 90 % intervals, or between the smallest and "
    "the largest of several quantiles; for classes, share of the rows whose prediction set "
    "contains the true class",
    "width": "mean width of the intervals, in units of the targets",
    "set_size": "mean number of classes in the prediction sets",
    "normalised_coverage": "`coverage` of normalised intervals, which are wider where errors are "
    "larger",
    "normalised_width": "mean width of normalised intervals",
}
"""Meanings of the metrics that exist as test_NAME and as validation_NAME."""
METRIC_MEANINGS: Final = {
    "train_mse": "mean squared error on training rows, each predicted before the step that learns "
    "from it, over the last 32 steps or, for a saved model, the last epoch (for the solvers direct "
    "and falkon: of the finished model on up to 512 rows); its unit is that of the squared "
    "targets, or of their squared logarithms on a log scale (target_transform)",
    "test_mse": "mean squared error on the test data, over rows and outputs, in squared units of "
    "the targets",
    "test_r2": "R2 on the test data: 1 minus the mean squared error divided by the variance of "
    "the targets; mean over the outputs",
    "test_accuracy": "share of the test rows whose class is predicted correctly",
    "validation_mse": "mean squared error on the rows set aside for early stopping",
    "validation_r2": "R2 on the rows set aside for early stopping",
    "validation_accuracy": "share of the rows set aside for early stopping whose class is "
    "predicted correctly",
    "validation_data": "the rows on which the validation metrics are measured",
    "train_data": "the rows on which train_mse is measured",
    "test_data": "the rows on which the test metrics are measured, and the step of the measurement",
    **{
        f"{data}_{name}": text
        for data in ("test", "validation")
        for name, text in _TEST_AND_VALIDATION_MEANINGS.items()
    },
}
SETUP_MEANINGS: Final = {
    "solver": 'the solver in use; if `solver.name` is "auto", the one that was chosen',
    "scale": "how the features are scaled before kernel values are computed",
    "encoder": "how the columns of a table are encoded as features, in training and prediction",
    "kernel": 'the kernel in use; if `model.kernel` is "auto", the one that was chosen',
    "bandwidth": "length scale of the kernel, in units of the scaled features",
    "gamma": "factor of the inner product in a polynomial kernel",
    "c0": "constant added to the inner product in a polynomial kernel",
    "degree": "power of a polynomial kernel",
    "depth": "number of hidden layers of the network that the kernel represents",
    "of": "the kernel that the random Fourier features approximate",
    "n_features": "number of random Fourier features",
    "block_size": "largest number of centers in a block of the preconditioner",
    "half_factors": "whether the factors of the preconditioner are stored in half precision",
    "factor_scales": "powers of two by which the stored factors of the blocks are multiplied",
    "keep": "whether a step keeps the whole kernel matrix of its batch and the centers in memory",
    "n_sums": "number of sets of sums that the direct solver computes: one for all rows, and one "
    "for each held-out part",
    "level": "number of directions, the top eigenvectors of the kernel matrix, that EigenPro damps",
    "n_nystrom": "number of rows in the sample from which EigenPro computes these directions",
    "period": "number of steps between two projections",
    "projection": "how the model is projected onto the centers",
    "projection_epochs": "number of passes over the centers in a projection",
    "projection_nystrom": "number of centers in the sample for the preconditioner of the "
    "projection",
    "projection_level": "number of directions that the preconditioner of the projection damps",
    "projection_batch": "number of centers in a step of the projection",
    "leverage": "largest leverage of a row, which bounds the step size",
    "lambda_1": "largest eigenvalue after preconditioning, which bounds the step size",
    "mu": "penalty of the block preconditioner, or μ of FALKON's preconditioner",
    "jitter": "number added to the diagonal of the kernel matrix so that its Cholesky "
    "factorisation succeeds",
    "start_rows": "number of sampled rows from which the first weights were learned",
    "loss_age": "number of rows per center on which earlier runs have trained the weights with "
    "this loss",
    "warm_slope": "factor, in addition to the gain, by which least-squares weights of an earlier "
    "run were multiplied to start training with another loss",
    "batch_size": "number of training rows in a step",
    "loss": "the loss that is minimised in place of the squared error, with the parameters that "
    "the setup found",
    "ridge": "strength of the regularisation: the factor of the squared norm of f",
    "target_transform": "the log scale, log(1 + y / unit), on which the targets are learned, and "
    "how much it improves held-out predictions",
    "outliers": "share of the targets that the setup replaced as outliers, when it chose kernel "
    "and metric for a loss that bounds the influence of a row",
    "learned_metric": "how the metric was found, and how much it improves held-out predictions",
    "metric": "the scales of the features, or the matrix, by which distances are measured",
    "categorical": "features whose values are compared for equality, and the squared distance "
    "that two different values add",
    "trees": "number of decision trees whose leaves the kernel compares",
    "metric_shares": "the features with the largest shares of the metric, from mean squared "
    "gradients; info --importances measures how much a column lowers the error",
    "spectrum": "shares of the top eigenvectors in the metric",
    "direction": "the features with the largest weights in a top eigenvector of the metric",
}
SETTING_MEANINGS: Final = {
    f"{section}.{name}": meaning.partition(". ")[0].rstrip(".")
    for section, table in RunConfig()
    for name, meaning in type(table).meanings().items()
    if f"{section}.{name}" not in {"data.train", *FREE_AT_RESUME}
}
"""The first sentence on each setting that cannot be changed when a run is resumed."""
VERIFY_MEANINGS: Final = {
    "setup": "whether every byte of the setup matches its checksum",
    "checkpoints/": "whether every byte of this checkpoint matches its checksum",
}
STORE_MEANINGS: Final = {
    "unfinished": "the chunks that an interrupted command has written so far",
    "rows": "number, shape and dtype of the rows, and the kind of their targets",
    "encoder": "how the columns of a table are encoded as features, in training and prediction",
    "left_out": "number of rows without a target, which `ingest` left out because of its options",
    "balance": "the smallest and the largest class, and their shares of the rows",
    "weights": "the rows have sample weights",
    "chunks": "size of a chunk, the part that is read, verified and decompressed at once",
    "size": "size of the decoded arrays, and of the stored files",
    "fingerprint": "SHA-256 of the layout and of all digests; stores with the same fingerprint are "
    "equal",
    "verified": "every byte was read, and agrees with its checksum",
    "note": "a property of the store that matters for training, such as rows sorted by class",
}
FACT_MEANINGS: Final = {
    **RUN_MEANINGS,
    **METRIC_MEANINGS,
    **SETUP_MEANINGS,
    **SETTING_MEANINGS,
    **VERIFY_MEANINGS,
}
"""Meanings by the names of facts that `info` prints for a run."""


def with_meaning(name: str, line: str, meanings: Mapping[str, str]) -> str:
    """Return the line of a fact with its meaning below.

    "checkpoints/1" has the meaning of "checkpoints/", "direction 1" that of "direction".
    """
    kind = re.sub(r"(?<=/).*| \d+$", "", name)
    meaning = meanings.get(kind)
    return line if meaning is None else f"{line}\n      {meaning}"


_SECTIONS: Final = (
    ("A run", RUN_MEANINGS),
    ("Evaluation metrics", METRIC_MEANINGS),
    ("Choices and measurements of the setup", SETUP_MEANINGS),
    ("Settings", SETTING_MEANINGS),
    ("With `--verify`", VERIFY_MEANINGS),
    ("A store", STORE_MEANINGS),
)


def _is_shared(name: str) -> bool:
    """Return whether a metric exists with the same meaning as test_NAME and as validation_NAME."""
    return name.partition("_")[2] in _TEST_AND_VALIDATION_MEANINGS


def _names_of_row(name: str) -> str:
    """Return the names in a row of the page: test_NAME and validation_NAME share a row."""
    if name.startswith("test_") and _is_shared(name):
        return f"`{name}`, `validation_{name.removeprefix('test_')}`"
    return f"`{name}`"


def glossary_page() -> str:
    """Return the glossary as Markdown."""
    parts = [
        "# Glossary\n\nThis page explains the entries that `streamkern info` prints. "
        "`streamkern info --explain` prints the\nmeaning below each entry. "
        "`python tools/glossary.py` generates the page. In the explanations, f is the\nfitted "
        "function and p the number of centers; [terms](terms.md) defines all terms.\n"
        "[Precision](howto/precision.md) has the rule of `run.precision`.\n"
    ]
    for head, meanings in _SECTIONS:
        rows = "".join(
            f"| {_names_of_row(name)} | {text} |\n"
            for name, text in meanings.items()
            if not name.startswith("validation_") or not _is_shared(name)
        )
        parts.append(f"## {head}\n\n| entry | meaning |\n|---|---|\n{rows}")
    return "\n".join(parts)
