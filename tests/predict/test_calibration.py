"""The figures of probabilities and intervals are those of scikit-learn, and of the definition."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss, log_loss

from streamkern.basics.errors import ConfigError
from streamkern.predict.calibration import CalibratedFigures, Calibration

rng = np.random.default_rng(1)


def classes(m: int, c: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    F = rng.normal(0.3, 0.4, (m, c)).astype(np.float32)
    labels = (F + rng.normal(0, 0.3, (m, c))).argmax(axis=1)
    return F, labels, rng.uniform(0, 2, m)


@pytest.mark.parametrize("c", [2, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_of_classes(c: int, weighted: bool) -> None:
    F, labels, w = classes(600, c)
    made = Calibration.of_classes(F[:300], labels[:300], w[:300] if weighted else None)
    assert made.probabilities is not None
    figures = CalibratedFigures(made)
    for part in (slice(300, 450), slice(450, 600)):
        figures.add(F[part], np.eye(c)[labels[part]], w[part] if weighted else None)
    found, z, v = figures.result(), labels[300:], w[300:] if weighted else np.ones(300)
    p = made.probabilities(F[300:])
    assert found["log_loss"] == pytest.approx(log_loss(z, p, sample_weight=v, labels=range(c)))
    squares = ((p - np.eye(c)[z]) ** 2).sum(axis=1)
    wanted = float(np.average(squares, weights=v))
    if c == 2:
        wanted = brier_score_loss(z, p[:, 1], sample_weight=v)
    assert found["brier"] == pytest.approx(wanted)
    sure, right = p.max(axis=1), p.argmax(axis=1) == z
    bins = [(sure >= k / 15) & (sure < (k + 1) / 15 + (k == 14)) for k in range(15)]
    ece = sum(abs((v * (sure - right))[inside].sum()) for inside in bins) / v.sum()
    assert found["ece"] == pytest.approx(ece)
    sets = made.intervals.sets(F[300:], 0.9)
    assert found["set_size"] == pytest.approx(np.average(sets.sum(axis=1), weights=v))
    assert 0.8 < found["coverage"] <= 1


def test_of_values() -> None:
    F = rng.normal(size=(4000, 2))
    Y = F + rng.normal(size=(4000, 2)) * [1, 3]
    made = Calibration.of_values(F[:2000], Y[:2000], None)
    figures = CalibratedFigures(made)
    figures.add(F[2000:], Y[2000:], None)
    found = figures.result()
    assert found["coverage"] == pytest.approx(0.9, abs=0.02)
    assert found["width"] == pytest.approx(2 * 1.645 * 2, rel=0.05)  # of normal noise
    again = Calibration.kept(made.arrays() | {"alpha": np.ones(3)})
    assert again is not None
    np.testing.assert_array_equal(again.intervals.reach(0.5), made.intervals.reach(0.5))
    assert Calibration.kept({"alpha": np.ones(3)}) is None
    few = CalibratedFigures(Calibration.of_values(F[:5], Y[:5], None))
    few.add(F, Y, None)
    assert few.result() == {}  # five rows tell nothing of 90 %


def test_values_of_one_origin_count_as_one_in_intervals() -> None:
    rng = np.random.default_rng(0)
    F, Y = rng.normal(size=(30, 2)), rng.normal(size=(30, 2))
    places = rng.permutation(np.repeat(np.arange(30), 16))
    found = Calibration.of_values(F[places], Y[places], None, places)
    missed = np.sort(np.abs(F - Y), axis=0)
    np.testing.assert_array_equal(found.intervals.reach(0.9), missed[27])  # ceil(31 * 0.9) - 1
    few = places[places < 6]
    of_few = Calibration.of_values(F[few], Y[few], None, few)
    with pytest.raises(ConfigError, match="more than the 6 rows"):
        of_few.intervals.reach(0.9)


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_of_one_origin_count_as_one(weighted: bool) -> None:
    """The first stands for all of its label, with their weight."""
    rng = np.random.default_rng(0)
    F, labels = rng.normal(size=(120, 3)), rng.integers(0, 3, 120)
    times = rng.integers(1, 12, 120)
    places = rng.permutation(np.repeat(np.arange(120), times))
    w = rng.random(len(places)) if weighted else None
    found = Calibration.of_classes(F[places], labels[places], w, places)
    weights = np.bincount(places, w, 120)
    once = Calibration.of_classes(F, labels, weights)
    assert found.probabilities is not None
    assert once.probabilities is not None
    assert found.describe()["rows"] == once.describe()["rows"] == 120
    np.testing.assert_allclose(found.intervals.reach(0.8), once.intervals.reach(0.8))
    assert found.probabilities.way == once.probabilities.way
    np.testing.assert_allclose(found.probabilities(F), once.probabilities(F), rtol=1e-9)
    alone = Calibration.of_classes(F, labels, None, np.arange(120)[::-1])
    plain = Calibration.of_classes(F, labels, None)
    assert alone.probabilities is not None
    assert plain.probabilities is not None
    np.testing.assert_array_equal(alone.probabilities(F), plain.probabilities(F))
