"""The meaning of every fact that `streamkern info` prints, in one phrase each.

``python tools/glossary.py`` writes `docs/glossary.md` from it, and a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from streamkern.config.run_config import FREE_AT_RESUME, RunConfig

RUN: Final = {
    "state": "whether the run is finished, whether a process works on it now, and which",
    "doing": "what the setup, which comes before the first step, is at",
    "step": "batches that were trained on: now, where a process works on it, else when last saved",
    "epoch": "passes over the training data that are done, of those that were asked for; of a run "
    "under way the pass that it is in",
    "samples": "training rows seen so far, of those in all epochs; a row counts once an epoch",
    "time_left": "until the last epoch ends, at the rate of the last ten seconds of training",
    "samples_per_s": "training rows a second, over the last ten seconds of training",
    "last_heard": "the age of the newest line of the run's log",
    "ranks": "the processes that train it, the least and the largest share of the time that one "
    "waits for the others and for data (stall), and samples a second where it waits for no other; "
    "of a run at rest those that trained it last, and what they shared out",
    "slowest_rank": "the rank that waits least for the others, which wait for it",
    "dashboard": "where the Dask cluster shows what it does",
    "ended": "why fewer epochs than were asked for are all it took",
    "changed": "what was not as before where the run was gone on with: from there on it is the "
    "same to rounding only",
    "logged_step": "the last step that the log tells of; those not saved are computed again",
    "checkpoints": "the steps at which the run was saved, of the checkpoints that are kept",
    "rows": "of the training data, copies included",
    "continues": "the run whose newest weights it started from, and what that one continued",
}
FIGURES: Final = {
    "train_mse": "mean squared error on training rows, in squares of the units of the targets, or "
    "of their logarithms, on a log scale (target_transform): of the last 32 steps, or of the last "
    "epoch of a saved model, of each row before the step that learns from it; with solvers direct "
    "and falkon of the finished model, on up to 512 rows",
    "test_mse": "mean squared error on the test data, over rows and outputs, in squares of the "
    "units of the targets",
    "test_r2": "1 minus the mean squared error over the variance of the test targets, mean over "
    "the outputs",
    "test_accuracy": "the share of the rows of the test data whose class is predicted",
    "validation_mse": "mean squared error on the rows set aside for early stopping",
    "validation_r2": "R2 on the rows set aside",
    "validation_accuracy": "the share of the rows set aside whose class is predicted",
    "validation_data": "the rows that the validation figures are of",
    "train_data": "the rows that train_mse is of",
    "test_data": "the rows that the test figures are of, and the step at which they were taken",
    **{
        f"{data}_{name}": text
        for data in ("test", "validation")
        for name, text in (
            ("log_loss", "mean of -log of the probability of the class of a row"),
            ("squared_hinge", "mean over rows of the squared hinge, summed over the classes"),
            ("mae", "mean absolute error, in the units of the targets"),
            ("huber_loss", "mean of Huber's loss, in squares of the units of the targets"),
            ("pinball_loss", "mean pinball loss of the quantile, in the units of the targets"),
            ("poisson_deviance", "mean Poisson deviance, in the units of the targets"),
            ("gamma_deviance", "mean deviance of the gamma distribution, without a unit"),
            ("expectile_loss", "mean of the asymmetric squares, in squares of these units"),
            ("loss", "mean of a loss of one's own whose class gives its figure no name"),
            ("brier", "mean squared error of the probabilities, of two classes half of it"),
            ("ece", "how far the probability of the likeliest class is from being right as often"),
            (
                "coverage",
                "the share of the targets in their 90 % intervals, or between the smallest and the "
                "largest of several quantiles, or of the classes in their sets",
            ),
            ("width", "mean width of these intervals, in the units of the targets"),
            ("set_size", "mean number of classes in these sets"),
            ("normalised_coverage", "`coverage` of intervals that are as wide as rows are hard"),
            ("normalised_width", "mean width of these intervals"),
        )
    },
}
SOLVER: Final = {
    "solver": "the method that was used, where `solver.name` leaves it open the one chosen",
    "scale": "what is done to every feature before the kernel sees it",
    "encoder": "how the columns of a table were made features, and every row to come will be",
    "kernel": "the kernel that was used, where `model.kernel` leaves it open the one chosen",
    "bandwidth": "the length in which the kernel counts distances, after scaling",
    "gamma": "the factor on the inner product in a polynomial kernel",
    "c0": "the constant beside the inner product in a polynomial kernel",
    "degree": "the power of a polynomial kernel",
    "depth": "hidden layers of the network that the kernel stands for",
    "of": "the kernel that the Fourier features stand for",
    "n_features": "random Fourier features",
    "block_size": "centers in a block of the preconditioner, at most",
    "keep": "whether a step holds all of K(batch, centers) in memory",
    "n_sums": "sets of sums that the direct solver takes: of all rows, and of parts held out",
    "level": "directions that EigenPro damps",
    "n_nystrom": "rows of the sample that EigenPro's directions are found on",
    "period": "steps from one projection to the next",
    "projection": "how what was learned is brought to the centers",
    "projection_epochs": "passes over the centers in a projection",
    "projection_nystrom": "centers of the sample of the projection's preconditioner",
    "projection_level": "directions that the projection's preconditioner damps",
    "projection_batch": "centers in a step of the projection",
    "leverage": "the largest influence that a row can have on a step, which bounds the step size",
    "lambda_1": "the top eigenvalue, after preconditioning, which bounds the step size",
    "mu": "the damping of the preconditioner",
    "jitter": "what was added to the diagonal of the kernel matrix so that it could be factored",
    "start_rows": "rows of the sample that the weights started from",
    "loss_age": "rows per center that the weights had been trained with by the loss at the start",
    "warm_slope": "factor by which weights of squares were made the start of another loss",
    "batch_size": "training rows of a step",
    "loss": "the loss that was minimised in place of squares, with what its setup found for it",
    "ridge": "the weight of the norm of f beside the error",
    "target_transform": "the log scale, log(1 + y / unit), on which squares of the targets are "
    "learned, and how much better it is on held-out rows",
    "learned_metric": "how the metric was found, and how much better it is on held-out rows",
    "metric": "the scales of the features, or the matrix, in which distances are taken",
    "categorical": "features whose values are compared for equality, and the squared distance that "
    "a difference adds",
    "metric_shares": "the features with the largest shares in the metric, which are those of the "
    "mean squared gradients; how much of the error a column takes away says info --importances",
    "spectrum": "the largest shares of directions in the metric",
    "direction": "the features that make up one of the main directions of the metric",
}
SETTING_MEANINGS: Final = {
    f"{section}.{name}": meaning.partition(". ")[0].rstrip(".")
    for section, table in RunConfig()
    for name, meaning in type(table).meanings().items()
    if f"{section}.{name}" not in {"data.train", *FREE_AT_RESUME}
}
"""The first sentence on each setting that a run is bound to."""
VERIFIED: Final = {
    "setup": "whether every byte of what is computed once matches its checksum",
    "checkpoints/": "whether every byte of this checkpoint matches its checksum",
}
STORE_MEANINGS: Final = {
    "unfinished": "what a command that was interrupted has written so far",
    "rows": "how many, of which shape and type, and what their targets are",
    "encoder": "how the columns of a table were made features, and every row to come will be",
    "left_out": "rows that had no target, and were left out as ingest was told to",
    "balance": "the smallest and the largest class, and their shares",
    "weights": "every row has a weight",
    "chunks": "what is read, checked and decompressed in one piece",
    "size": "in memory, and as it is stored",
    "fingerprint": "of all contents: stores with the same one are equal",
    "verified": "every byte was read and compared",
    "note": "what is worth knowing before training on it",
}
FACTS: Final = {**RUN, **FIGURES, **SOLVER, **SETTING_MEANINGS, **VERIFIED}
"""Meanings by the names of facts that `info` prints for a run."""


def with_meaning(name: str, line: str, meanings: Mapping[str, str]) -> str:
    """Return the line of a fact with its meaning below.

    "checkpoints/1" has the meaning of "checkpoints/", "direction 1" that of "direction".
    """
    kind = re.sub(r"(?<=/).*| \d+$", "", name)
    meaning = meanings.get(kind)
    return line if meaning is None else f"{line}\n      {meaning}"


_HEADS: Final = (
    ("Of a run", RUN),
    ("Figures, and what they are of", FIGURES),
    ("What the setup chose and measured", SOLVER),
    ("Settings", SETTING_MEANINGS),
    ("With `--verify`", VERIFIED),
    ("Of a store", STORE_MEANINGS),
)


def glossary_page() -> str:
    """Return the glossary as Markdown."""
    parts = [
        "# Glossary\n\nThe facts that `streamkern info` prints, and what each means; "
        "`streamkern info --explain` says it\nbeside them. Written by `python tools/glossary.py`.\n"
    ]
    for head, meanings in _HEADS:
        rows = "".join(f"| `{name}` | {text} |\n" for name, text in meanings.items())
        parts.append(f"## {head}\n\n| fact | meaning |\n|---|---|\n{rows}")
    return "\n".join(parts)
