"""Test the choice of a log scale of the targets, by leave-one-out errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.setup import choose_transform
from streamkern.train.setup.choose_transform import (
    FoundTransform,
    find_transform,
    left_out_residuals,
    smearing_factor,
)
from tests.log_scale import OPEN, skewed_data
from tests.runs import CLASSES, settings

KINDS = ("exponential", "additive", "noise", "counts")


def find_log_scale(
    X: np.ndarray, y: np.ndarray, w: np.ndarray | None = None, complete: bool = True,
    classes: tuple[str, ...] | None = None, transforms: Any = (), **changes: Any,
) -> FoundTransform | None:  # fmt: skip
    """Return the log scale that a run on these rows chooses; None if it chooses none."""
    source = ArraySource(X, y, transforms, sample_weight=w, classes=classes, unit_rows=100)
    run = open_run(settings(**OPEN | changes), RunInputs(source), complete=complete)
    with run.backend as backend, backend.active():
        return find_transform(run, np.dtype(np.float32), lambda event, fields: None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_log_scale_is_chosen_if_better(kind: str, seed: int) -> None:
    choice = find_log_scale(*skewed_data(kind, 600, seed))
    assert (choice is not None) == (kind == "exponential")
    if choice is not None:
        targets, facts = choice
        assert facts["error_ratio"] < 0.9
        assert facts["unit"] == targets.unit.tolist()
        assert 0.95 < targets.gain[0] < 1.1


def test_choice_does_not_depend_on_unit() -> None:
    """Check that targets in cents are treated as those in millions."""
    X, y = skewed_data("exponential", 600)
    one, other = find_log_scale(X, y), find_log_scale(X, y * 2.0**40)
    assert one is not None
    assert other is not None
    np.testing.assert_array_equal(other.targets.unit, one.targets.unit * 2.0**40)
    np.testing.assert_array_equal(other.targets.gain, one.targets.gain)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.target_transform": "none"}, {"model.kernel": "laplace"},
        {"model.bandwidth": 2.0}, {"model.bandwidth": "median"}, {"model.fit_intercept": False},
        {"model.loss": "huber"},
    ],
)  # fmt: skip
def test_unsuitable_settings_disable_log_scale(changes: dict[str, Any]) -> None:
    assert find_log_scale(*skewed_data("exponential", 600), **changes) is None


def test_unsuitable_targets_disable_log_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = skewed_data("exponential", 600)
    negative_y = y.copy()
    negative_y[::9] *= -1
    monkeypatch.setattr(choose_transform, "left_out_residuals", None)  # is never called
    assert find_log_scale(X, negative_y) is None
    assert find_log_scale(X, y + 10 * y.std()) is None  # varies little
    assert find_log_scale(X, -np.log(y) + 9) is None  # symmetric
    assert find_log_scale(X[:200], y[:200]) is None
    assert find_log_scale(X, np.column_stack([y, y])) is None
    assert find_log_scale(X, (y > np.quantile(y, 0.9)).astype(float)) is None  # two values
    assert find_log_scale(X, np.arange(600) % 3, classes=CLASSES) is None
    assert find_log_scale(X, y, complete=False) is None
    assert find_log_scale(X, y, transforms=[lambda X, Y, rng: (X, -Y)]) is None


def test_requested_log_scale_is_used() -> None:
    options = {"model.target_transform": "log", "model.kernel": "laplace"}
    choice = find_log_scale(*skewed_data("additive", 600), **options)
    assert choice is not None
    X, y = skewed_data("exponential", 600)
    several = find_log_scale(X, np.column_stack([y, 50 * y**2, 0 * y]), **options)
    assert several is not None
    unit, gain = several.targets.unit, several.targets.gain
    assert np.isfinite([unit, gain, several.targets.mean, several.targets.scale]).all()
    assert unit[1] != unit[0]
    few = find_log_scale(X[:3], y[:3], **options | {"model.n_centers": 2, "data.batch_size": 2})
    assert few is not None
    assert few.targets.gain.tolist() == [1.0]
    assert "error_ratio" not in few.facts


def test_weights_equal_repeated_rows() -> None:
    """Check that copies of rows count as weights do, and that rows of weight 0 do not count."""
    X, y = skewed_data("exponential", 300)
    w = np.ones(300)
    w[:40] = 2
    weighted = find_log_scale(X, y, w)
    copied = find_log_scale(np.concatenate([X, X[:40]]), np.concatenate([y, y[:40]]))
    unweighted = find_log_scale(
        np.concatenate([X, X[:40] + 1]), np.concatenate([y, 1e6 * y[:40]]),
        np.concatenate([w, np.zeros(40)]),
    )  # fmt: skip
    assert weighted is not None
    assert copied is not None
    assert unweighted is not None
    for other in (copied, unweighted):
        assert other.facts["gain"] == pytest.approx(weighted.facts["gain"], rel=1e-2)
        assert other.facts["error_ratio"] == pytest.approx(weighted.facts["error_ratio"], rel=0.2)


@pytest.mark.parametrize("constant", [0.0, 0.1])
def test_rare_large_targets_disable_log_scale(constant: float) -> None:
    """Check a sample that lacks the large targets, so that its targets are constant."""
    X, y = skewed_data("exponential", 5000)[0], np.full(5000, constant)
    y[7] = 1e3
    assert find_log_scale(X, y) is None
    y[7:] *= 1 + 1e-9 * np.arange(4993)
    assert find_log_scale(X, y) is None


def test_noise_free_targets_need_no_factor() -> None:
    """Check that targets without noise need no factor, even if a few rows predict each other
    badly."""
    X = np.random.default_rng(0).uniform(-1.5, 1.5, (6000, 5)).astype(np.float32)
    y = np.exp(0.7 * np.sin(4 * X.astype(float)).sum(axis=1))
    options: dict[str, Any] = {"model.target_transform": "log"}
    few, many = (
        find_log_scale(X[:n], y[:n], **options | {"model.n_centers": n}) for n in (500, 6000)
    )
    assert few is not None
    assert many is not None
    assert few.targets.gain[0] > 1.2
    assert many.targets.gain[0] < 1.05
    same_centers = find_log_scale(X, y, **options | {"model.n_centers": 500})
    assert same_centers is not None
    assert same_centers.targets.gain[0] > 1.1  # with few centers a factor is needed


def test_left_out_residuals_equal_refits() -> None:
    rng = np.random.default_rng(0)
    X, Y, w = rng.standard_normal((20, 2)), rng.standard_normal((20, 3)), rng.random(20) + 0.5
    K = np.exp(-np.linalg.norm(X[:, None] - X[None], axis=2))
    root = np.sqrt(w)
    every = list(left_out_residuals(K * np.outer(root, root), Y, root))
    kappas = np.array(choose_transform.TRIED_NOISES) * float((w * K.diagonal()).mean())
    for kappa, (found, share) in zip(kappas, every, strict=True):
        for i in range(20):
            others = np.arange(20) != i
            inverse = np.linalg.inv(K[np.ix_(others, others)] + np.diag(kappa / w[others]))
            expected = root[i] * (Y[i] - K[i, others] @ inverse @ Y[others])
            np.testing.assert_allclose(found[i], expected, rtol=1e-6, atol=1e-9)
            variance = K[i, i] - K[i, others] @ inverse @ K[others, i]
            noise = kappa / w[i]
            assert share[i] == pytest.approx(noise / (variance + noise), rel=1e-6)


def test_smearing_factor_turns_medians_into_means() -> None:
    rng = np.random.default_rng(0)
    medians = np.exp(rng.standard_normal(200_000))
    y = medians * np.exp(0.5 * rng.standard_normal(200_000))
    factor = smearing_factor(medians, y, np.ones(200_000))
    assert factor == pytest.approx(np.exp(0.125), rel=0.01)
    assert smearing_factor(-medians, y, np.ones(200_000)) == 1.0
    assert smearing_factor(np.zeros(2), y[:2], np.ones(2)) == 1.0
