"""Count the words of a column and sum their targets, by folds of the rows.

Encoding a category by the mean of its targets lets a row see its own target, and a model then
trusts the column too much. Rows are therefore assigned to folds, and a training row is encoded by
the targets of the other folds (scikit-learn's `TargetEncoder`, and Micci-Barreca, "A preprocessing
scheme for high-cardinality categorical attributes", SIGKDD Explorations 3, 2001). The fold of a row
follows from the seed and the row number alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.optional import on_demand
from streamkern.basics.randomness import words as random_words
from streamkern.ingest.tables.cells import MISSING

# Limits on the distinct words of a column and on their characters; a column with more is hashed.
MAX_WORDS, MAX_CHARACTERS = 10_000, 1 << 20
N_FOLDS = 5
FOLD_STAGE = 1001  # distinct from the random streams of the row order and of the stages of a run


def row_folds(seed: int, start: int, n_rows: int) -> NDArray[np.int64]:
    """Return the fold (n_rows,) of each of the rows start, start + 1, ..."""
    rows = np.arange(start, start + n_rows, dtype=np.int64)
    random_numbers: NDArray[np.uint32] = random_words((seed, 0, FOLD_STAGE), rows, 1)[:, 0]
    return (random_numbers % N_FOLDS).astype(np.int64)


class DistinctCounter:
    """Estimate of the number of distinct texts from the smallest of their hashes.

    Of n hashes uniform on (0, 1), the k-th smallest, h_k, is about k / n; so n is estimated as
    (k - 1) / h_k, with relative error 1 / sqrt(k) (Bar-Yossef et al., "Counting distinct elements
    in a data stream", RANDOM 2002). Neither the order of the texts nor the block size matters.
    """

    N_HASHES = 1024

    def __init__(self) -> None:
        self._smallest_hashes = np.empty(0, np.uint32)

    def add(self, texts: Iterable[str]) -> None:
        """Add texts, which may repeat."""
        murmurhash3_32 = on_demand("sklearn.utils").murmurhash3_32
        hashes = np.array([murmurhash3_32(text, positive=True) for text in texts], np.uint32)
        self._smallest_hashes = np.unique(np.concatenate([self._smallest_hashes, hashes]))[
            : self.N_HASHES
        ]

    def count(self) -> int:
        """Return the estimate; exact below `N_HASHES`, except for hash collisions."""
        if len(self._smallest_hashes) < self.N_HASHES:
            return len(self._smallest_hashes)
        return round((self.N_HASHES - 1) * 2.0**32 / float(self._smallest_hashes[-1]))


class Words:
    """Words of a column in order of appearance, with counts and sums of their targets.

    Parameters
    ----------
    n_targets : t, the number of targets of each row; 0 if they are not needed

    Attributes
    ----------
    index_of : row of each word in `sums`, from 1 on; row 0 is for missing cells. Empty if there
        are too many words
    too_many : whether there are more than `MAX_WORDS` words or `MAX_CHARACTERS` characters
    n_seen, n_missing : number of cells with a word, and without one
    marker_words : words that mark a missing cell in a CSV, but are words here; collected even if
        there are too many words
    """

    def __init__(self, n_targets: int) -> None:
        self.index_of: dict[str, int] = {}
        self.marker_words: set[str] = set()
        self.too_many = False
        self.n_seen = self.n_missing = 0
        self._characters = 0
        self._distinct = DistinctCounter()
        # For each word and fold: rows, sums of the targets, sums of their squares.
        self._sums = np.zeros((1, N_FOLDS, 1 + 2 * n_targets))

    def add(
        self,
        texts: list[str],
        codes: NDArray[np.int64],
        folds: NDArray[np.int64],
        T: NDArray[np.float64],
    ) -> None:
        """Add cells as `as_words` returns them, with the fold (k,) and targets (k, t) of each."""
        self.n_missing += int((codes < 0).sum())
        self.n_seen += int((codes >= 0).sum())
        self.marker_words.update(text for text in texts if text in MISSING)
        if self.too_many:
            self._distinct.add(texts)
            return
        for text in texts:
            if text not in self.index_of:
                self.index_of[text] = len(self.index_of) + 1
                self._characters += len(text)
        if len(self.index_of) > MAX_WORDS or self._characters > MAX_CHARACTERS:
            self._distinct.add(self.index_of)
            self.too_many, self.index_of = True, {}
            self._sums = np.zeros((1, *self._sums.shape[1:]))
            return
        if self.n_words >= len(self._sums):
            n_new = max(self.n_words + 1, 2 * len(self._sums)) - len(self._sums)
            self._sums = np.concatenate([self._sums, np.zeros((n_new, *self._sums.shape[1:]))])
        index = word_indices(self.index_of, texts, codes)
        with np.errstate(over="ignore"):  # sums that overflow are refused where they are used
            values = np.concatenate([np.ones((len(codes), 1)), T, T**2], axis=1)
        np.add.at(self._sums, (index, folds), values)  # one by one: independent of blocks

    @property
    def n_words(self) -> int:
        """Number of distinct words; to a few per cent if there are too many."""
        return self._distinct.count() if self.too_many else len(self.index_of)

    def sums(self) -> NDArray[np.float64]:
        """Return (1 + n_words, N_FOLDS, 1 + 2 t): rows, sums and sums of squares of the targets."""
        return self._sums[: self.n_words + 1]


def word_indices(
    index_of: dict[str, int], texts: list[str], codes: NDArray[np.int64], unknown: int = -1
) -> NDArray[np.int64]:
    """Return the index (k,) of each cell's word: 0 if missing, `unknown` if it has no index."""
    index_of_text = np.array([0, *[index_of.get(text, unknown) for text in texts]], np.int64)
    return index_of_text[codes + 1]


def shrunk_means(sums: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the shrunken mean target of each word, (n, t), and the mean of all, (t,).

    Empirical Bayes, as in scikit-learn's `TargetEncoder(smooth="auto")`: for a word with n rows
    whose targets have mean m and variance v, where all targets have M and V, the mean is
    (n V m + v M) / (n V + v); M if there are no rows.

    sums : (n, 1 + 2 t), for each word its number of rows, and the sums and the sums of squares of
        its t targets
    """
    t = (sums.shape[1] - 1) // 2
    rows, total = sums[:, :1], sums.sum(axis=0)
    n = max(total[0], 1.0)
    mean = total[1 : 1 + t] / n
    variance = np.maximum(total[1 + t :] / n - mean**2, 0)
    counts = np.maximum(rows, 1)
    means = sums[:, 1 : 1 + t] / counts
    spread = np.maximum(sums[:, 1 + t :] / counts - means**2, 0)
    weighted_variance = rows * variance
    own_share = np.divide(
        weighted_variance,
        weighted_variance + spread,
        out=np.zeros_like(weighted_variance),
        where=weighted_variance + spread > 0,
    )
    return own_share * means + (1 - own_share) * mean, mean
