"""How often each word of a column was seen, and beside which targets, by folds of the rows.

Encoding a category by the mean of its targets lets a row see its own target, and a model then
trusts the column for more than it knows. Rows are therefore dealt to folds, and a row that is
trained on is encoded by the targets of the other folds (scikit-learn's `TargetEncoder`, and
Micci-Barreca, "A preprocessing scheme for high-cardinality categorical attributes", SIGKDD
Explorations 3, 2001). Which fold a row is in follows from the seed and its number alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.optional import on_demand
from streamkern.basics.randomness import words as random_words
from streamkern.ingest.tables.cells import MISSING

# Different words of a column that are kept, and characters of these; of more their hash is taken.
MAX_WORDS, MAX_CHARACTERS = 10_000, 1 << 20
N_FOLDS = 5
FOLD_STAGE = 1001  # apart from the order of the rows, and from the stages of a run


def folds_of(seed: int, start: int, n_rows: int) -> NDArray[np.int64]:
    """(n_rows,) the fold of each of the rows start, start + 1, ..."""
    rows = np.arange(start, start + n_rows, dtype=np.int64)
    drawn: NDArray[np.uint32] = random_words((seed, 0, FOLD_STAGE), rows, 1)[:, 0]
    return (drawn % N_FOLDS).astype(np.int64)


class Distinct:
    """About how many different texts there are, by the least of their hashes.

    Of n hashes that are uniform on (0, 1) the k-th least is k / n, as a rule: n is (k - 1) over it,
    to 1 / sqrt(k) of itself (Bar-Yossef et al., "Counting distinct elements in a data stream",
    RANDOM 2002). Whatever the order and the blocks that the texts come in.
    """

    KEPT = 1024

    def __init__(self) -> None:
        self._least = np.empty(0, np.uint32)

    def add(self, texts: Iterable[str]) -> None:
        """Take in texts, some of them perhaps again."""
        murmurhash3_32 = on_demand("sklearn.utils").murmurhash3_32
        hashes = np.array([murmurhash3_32(text, positive=True) for text in texts], np.uint32)
        self._least = np.unique(np.concatenate([self._least, hashes]))[: self.KEPT]

    def count(self) -> int:
        """Exact below `KEPT`, but for hashes that meet."""
        if len(self._least) < self.KEPT:
            return len(self._least)
        return round((self.KEPT - 1) * 2.0**32 / float(self._least[-1]))


class Words:
    """The words of a column in the order they came, with counts and sums of their targets.

    Parameters
    ----------
    n_targets : t, of each row; 0 where they are of no use

    Attributes
    ----------
    places : 1 + place of each word, 0 is what is missing; empty once there were too many words
    too_many : whether there were more than `MAX_WORDS`, or longer ones than are kept
    n_seen, n_missing : cells with a word, and without one
    marks : words that stand for a missing cell in a CSV, here words as others, also where too many
    """

    def __init__(self, n_targets: int) -> None:
        self.places: dict[str, int] = {}
        self.marks: set[str] = set()
        self.too_many = False
        self.n_seen = self.n_missing = 0
        self._characters = 0
        self._many = Distinct()
        # Of each place and fold: rows, sums of the targets, sums of their squares.
        self._sums = np.zeros((1, N_FOLDS, 1 + 2 * n_targets))

    def add(
        self,
        texts: list[str],
        codes: NDArray[np.int64],
        folds: NDArray[np.int64],
        T: NDArray[np.float64],
    ) -> None:
        """Take in cells as `as_words` gives them, with the fold (k,) and targets (k, t) of each."""
        self.n_missing += int((codes < 0).sum())
        self.n_seen += int((codes >= 0).sum())
        self.marks.update(text for text in texts if text in MISSING)
        if self.too_many:
            self._many.add(texts)
            return
        for text in texts:
            if text not in self.places:
                self.places[text] = len(self.places) + 1
                self._characters += len(text)
        if len(self.places) > MAX_WORDS or self._characters > MAX_CHARACTERS:
            self._many.add(self.places)
            self.too_many, self.places = True, {}
            self._sums = np.zeros((1, *self._sums.shape[1:]))
            return
        if self.n_words >= len(self._sums):
            more = max(self.n_words + 1, 2 * len(self._sums)) - len(self._sums)
            self._sums = np.concatenate([self._sums, np.zeros((more, *self._sums.shape[1:]))])
        place = word_places(self.places, texts, codes)
        with np.errstate(over="ignore"):  # whoever uses sums that overflow refuses them
            values = np.concatenate([np.ones((len(codes), 1)), T, T**2], axis=1)
        np.add.at(self._sums, (place, folds), values)  # one by one: however they come in blocks

    @property
    def n_words(self) -> int:
        """How many different words there are; to some percent where they are too many."""
        return self._many.count() if self.too_many else len(self.places)

    def sums(self) -> NDArray[np.float64]:
        """(1 + n_words, N_FOLDS, 1 + 2 t): rows, sums and sums of squares of the targets."""
        return self._sums[: self.n_words + 1]


def word_places(
    places: dict[str, int], texts: list[str], codes: NDArray[np.int64], unknown: int = -1
) -> NDArray[np.int64]:
    """(k,) place of the word of each cell: 0 where missing, `unknown` where it has none."""
    of_text = np.array([0, *[places.get(text, unknown) for text in texts]], np.int64)
    return of_text[codes + 1]


def shrunk_means(sums: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean target of each word, drawn towards that of all as far as it is uncertain: (n, t); and
    that of all, (t,).

    By empirical Bayes, as scikit-learn's `TargetEncoder(smooth="auto")` does: with n rows of a word
    whose targets have the mean m and the variance v, where those of all have M and V, it is
    (n V m + v M) / (n V + v); M where there are no rows.

    sums : (n, 1 + 2 t) of each word
    """
    t = (sums.shape[1] - 1) // 2
    rows, total = sums[:, :1], sums.sum(axis=0)
    n = max(total[0], 1.0)
    mean = total[1 : 1 + t] / n
    variance = np.maximum(total[1 + t :] / n - mean**2, 0)
    some = np.maximum(rows, 1)
    own = sums[:, 1 : 1 + t] / some
    spread = np.maximum(sums[:, 1 + t :] / some - own**2, 0)
    share = rows * variance
    trust = np.divide(share, share + spread, out=np.zeros_like(share), where=share + spread > 0)
    return trust * own + (1 - trust) * mean, mean
