"""Tables with few different rows and odd targets, for `newcomer`.

They have words, one-hot columns, booleans, repeated measurements, integer codes, heavy tails, a
constant target, or a word and numbers. For most of them, the mean target of equal rows is the best
answer (`truth`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

Array = npt.NDArray[Any]
MOST_ROWS = 3000


class Table(NamedTuple):
    """X : (n, d) array or data frame. y : (n,) values or labels. cells : (n,) the different row
    that each row is, if the mean target of these is the best answer; None else."""

    X: Any
    y: Array
    cells: Array | None = None


def words(rng: np.random.Generator, n: int) -> Table:
    """Return one to three columns of words; each combination has a target of its own."""
    sizes = rng.integers(2, [41, 9, 5])[: int(rng.integers(1, 4))]
    columns = [rng.integers(0, size, n) for size in sizes]
    frame = pd.DataFrame({f"c{i}": [f"w{k}" for k in c] for i, c in enumerate(columns)})
    return _by_cell(rng, frame, np.ravel_multi_index(columns, sizes))


def one_hot(rng: np.random.Generator, n: int) -> Table:
    """Return the one-hot matrix of one column."""
    at = rng.integers(0, size := int(rng.integers(2, 60)), n)
    return _by_cell(rng, np.eye(size)[at], at)


def truth_values(rng: np.random.Generator, n: int) -> Table:
    """Return one to six columns of 0 and 1, with interactions."""
    X = rng.integers(0, 2, (n, int(rng.integers(1, 7))))
    return _by_cell(rng, X.astype(float), X @ (1 << np.arange(X.shape[1])))


def measured_again(rng: np.random.Generator, n: int) -> Table:
    """Return rows of normal numbers, each of them about 20 times."""
    at = rng.integers(0, max(1, n // 20), n)
    return _by_cell(rng, rng.normal(size=(at.max() + 1, 4))[at], at)


def codes(rng: np.random.Generator, n: int) -> Table:
    """Return one column of integers that are names, such as those of places."""
    at = rng.integers(0, int(rng.integers(2, 300)), n)
    return _by_cell(rng, rng.permutation(10_000)[at][:, None].astype(float), at)


def heavy_tails(rng: np.random.Generator, n: int) -> Table:
    """Return targets with heavy tails, of columns with heavy tails and a constant one."""
    X = np.column_stack([rng.standard_t(1.5, (n, 4)), np.full(n, 3.0)])
    return Table(X, np.exp(np.tanh(X[:, 0]) + rng.normal(size=n)))


def constant_target(rng: np.random.Generator, n: int) -> Table:
    """Return targets that are all the same."""
    return Table(rng.normal(size=(n, 3)), np.full(n, float(rng.choice([0, 1, -2.5, 1e6]))))


def word_and_numbers(rng: np.random.Generator, n: int) -> Table:
    """Return a column of words with a number that determines the target, and one that does not."""
    at = rng.integers(0, int(rng.integers(2, 30)), n)
    frame = pd.DataFrame({"w": [f"w{k}" for k in at], "x": rng.normal(size=n)})
    frame["noise"] = rng.normal(size=n)
    y = rng.normal(size=at.max() + 1)[at] + np.sin(2 * frame["x"].to_numpy())
    return _maybe_classes(rng, Table(frame, y + 0.5 * rng.normal(size=n)))


TABLES = {
    f.__name__.replace("_", " "): f
    for f in (
        words, one_hot, truth_values, measured_again, codes, heavy_tails, constant_target,
        word_and_numbers,
    )
}  # fmt: skip


def draw(rng: np.random.Generator) -> tuple[str, Table]:
    """Return one of them, with 1 to `MOST_ROWS` rows."""
    name, n = str(rng.choice(list(TABLES))), int(np.exp(rng.uniform(0, np.log(MOST_ROWS))))
    return name, TABLES[name](rng, n)


def cell_means(cells: Array, y: Array, others: Array) -> Array:
    """Return the mean of y over the rows of each cell, at the cells of `others`; the mean of all
    for a cell that has no row."""
    n = int(max(cells.max(), others.max())) + 1
    counts, sums = np.bincount(cells, minlength=n), np.bincount(cells, y, minlength=n)
    means: Array = np.where(counts > 0, sums / np.maximum(counts, 1), y.mean())[others]
    return means


def _by_cell(rng: np.random.Generator, X: Any, cells: Array) -> Table:
    """Return targets that each cell has by itself, with noise or without."""
    scatter = float(rng.choice([0.0, 0.3, 1.0, 3.0]))
    signal = rng.normal(size=int(cells.max()) + 1)[cells]
    table = Table(X, 10 + signal + scatter * rng.normal(size=len(cells)), cells)
    return _maybe_classes(rng, table)


def _maybe_classes(rng: np.random.Generator, table: Table) -> Table:
    if rng.random() < 0.3:
        return table._replace(y=(table.y > np.median(table.y)).astype(int))
    return table
