"""Compare counts of words by fold with scikit-learn's encoder."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from streamkern import KernelRegressor
from streamkern.ingest.tables import words as words_module
from streamkern.ingest.tables.arrow import plain_cells
from streamkern.ingest.tables.cells import as_words
from streamkern.ingest.tables.columns import OneHot
from streamkern.ingest.tables.words import N_FOLDS, DistinctCounter, Words, row_folds

N = 600


def count_words(texts: list[str | None], T: np.ndarray, step: int) -> Words:
    """Return the words of texts that are added `step` at a time, with targets T (n, t)."""
    words, folds = Words(T.shape[1]), row_folds(3, 0, len(texts))
    for at in range(0, len(texts), step):
        rows = slice(at, at + step)
        words.add(*as_words(pa.array(texts[rows], pa.string())), folds[rows], T[rows])
    return words


def random_words(seed: int = 0, kinds: int = 40) -> tuple[list[str | None], np.ndarray]:
    """Return N random words, some of them missing, and two targets of each."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, kinds, N)
    texts = [None if code == 0 else f"w{code}" for code in codes.tolist()]
    return texts, rng.normal(size=(N, 2)) + np.stack([codes % 3, codes % 5], axis=1)


@pytest.mark.parametrize("step", [1, 7, 50, N])
def test_too_many_words_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.setattr(words_module, "MAX_WORDS", 20)
    texts, T = random_words()
    words = count_words(texts, T, step)
    words_present = [text for text in texts if text is not None]
    assert (words.too_many, words.n_words, words.index_of) == (True, len(set(words_present)), {})
    assert (words.n_seen, words.n_missing) == (len(words_present), N - len(words_present))


def test_long_words_exceed_the_character_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_module, "MAX_CHARACTERS", 10)
    words = count_words(["long word", "b", "another"], np.zeros((3, 1)), 2)
    assert (words.too_many, words.n_words, words.index_of) == (True, 3, {})


@pytest.mark.parametrize("n", [900, 5_000, 200_000])
def test_distinct_words_are_counted_to_some_percent(n: int) -> None:
    """Check within five standard deviations of the estimate; every word occurs twice."""
    texts = [f"word {k}" for k in range(n)]
    counter, step = DistinctCounter(), 7001  # a step that divides no n
    for start in range(0, n, step):
        counter.add(texts[start : start + step])
    counter.add(reversed(texts))
    is_exact = n < DistinctCounter.N_HASHES
    tolerance = 0 if is_exact else 5 / DistinctCounter.N_HASHES**0.5
    assert counter.count() == pytest.approx(n, rel=tolerance)


def test_folds_depend_on_row_number_and_are_equal_in_size() -> None:
    folds = row_folds(0, 0, 10_000)
    np.testing.assert_array_equal(row_folds(0, 4321, 100), folds[4321:4421])
    assert (row_folds(1, 0, 100) != folds[:100]).any()
    # Six standard deviations of a binomial count.
    assert np.abs(np.bincount(folds, minlength=N_FOLDS) - 2000).max() < 6 * 40


def test_words_with_line_breaks_are_equal_in_frames_and_files(tmp_path: Path) -> None:
    """Check that a frame whose cells have CR LF gets the predictions of the same cells in a CSV."""
    words = ["a\r\nb", "a\nb", "a\rb", "c\r\nd", "plain"]
    table = pd.DataFrame({"x": np.arange(200) % 7 / 3, "word": words * 40})
    y = table["x"] + table["word"].str.contains("a")
    table.assign(y=y).to_csv(tmp_path / "rows.csv", index=False, quoting=csv.QUOTE_NONNUMERIC)
    by_file = KernelRegressor(n_centers=50, random_state=0).fit(tmp_path / "rows.csv", "y")
    np.testing.assert_array_equal(by_file.predict(table), by_file.predict(tmp_path / "rows.csv"))
    by_frame = KernelRegressor(n_centers=50, random_state=0).fit(table, y)
    np.testing.assert_array_equal(by_frame.predict(table), by_frame.predict(tmp_path / "rows.csv"))


def test_models_of_words_with_carriage_returns_still_know_them() -> None:
    """Check a code of an earlier version, which kept CR LF in the words of data frames."""
    code = OneHot("word", 0, ("a\r\nb", "plain"))
    column = plain_cells(pa.array(["plain", "a\r\nb", "a\nb", "other"]))
    np.testing.assert_array_equal(code.encode(column), [[0, 1], [1, 0], [1, 0], [0, 0]])
