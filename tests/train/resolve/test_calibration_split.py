"""Test which runs set rows aside for calibration, and the messages of the other runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import log_loss

from streamkern import KernelClassifier, KernelRegressor, load
from streamkern.basics.errors import ConfigError, DataError, MemoryBudgetError, ResumeMismatchError
from streamkern.config.run_config import RunConfig
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.user import GeneratorSource
from streamkern.train.resolve.calibration_split import calibration_split
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from tests.runs import finished, settings, stopped

QUICK: dict[str, Any] = {
    "threads": 1, "accelerator": "none", "n_centers": 40, "kernel": "laplace", "bandwidth": 2.0,
    "solver": "direct", "ridge": 1e-3, "metric": "none",
}  # fmt: skip
X = np.random.default_rng(0).normal(size=(5500, 2)).astype(np.float32)
y = (X[:, 0] > 0).astype(int)
NAMES = tuple("abcdefghijklmnopqrst")


def n_set_aside(
    n: int, requested: Any, *, classes: bool = True, copies: int = 1, **settings: Any
) -> int:
    """Return how many of n rows are set aside if run.calibrate is `requested`."""
    targets = (y[:n], ("a", "b")) if classes else (X[:n, 0], None)
    source = ArraySource(X[:n], targets[0], classes=targets[1])
    config = RunConfig().with_overrides({"run.calibrate": requested} | settings)
    training, calibration, why, *_ = calibration_split(
        config, AugmentedSource(source, copies) if copies > 1 else source
    )
    rows = 0 if calibration is None else calibration.n_rows
    assert (why is None) == (calibration is not None)
    assert training.n_rows == copies * (n - rows)
    return rows


def test_auto_sets_aside_a_fiftieth_and_true_a_tenth() -> None:
    assert n_set_aside(5500, RunConfig().run.calibrate) == 110
    assert n_set_aside(5500, "auto", copies=3) == 110
    assert (
        n_set_aside(4999, "auto")
        == n_set_aside(5500, "auto", classes=False)
        == n_set_aside(5500, False)
        == 0
    )
    assert (n_set_aside(5500, True), n_set_aside(300, True)) == (550, 30)
    with pytest.raises(DataError, match="calibrate=True sets 1 of 10 rows aside"):
        n_set_aside(10, True)


@pytest.mark.parametrize("requested", ["auto", True])
def test_at_most_2000_rows_are_set_aside(requested: Any) -> None:
    rows, labels = np.zeros((200_000, 1), np.float32), np.arange(200_000) % 2
    config = RunConfig().with_overrides({"run.calibrate": requested})
    split = calibration_split(config, ArraySource(rows, labels, classes=("a", "b")))
    assert split.calibration_rows is not None
    assert split.calibration_rows.n_rows == 2000


@pytest.mark.parametrize(("n_distinct", "n_expected"), [(5500, 110), (2750, 110), (550, 550)])
def test_few_distinct_rows_set_aside_a_tenth(n_distinct: int, n_expected: int) -> None:
    places = np.random.default_rng(0).permutation(5500) % n_distinct
    source = ArraySource(X[places], y[places], classes=("a", "b"))
    training, calibration, *_ = calibration_split(RunConfig(), source)
    assert calibration is not None
    assert abs(calibration.n_rows - n_expected) <= 5500 / n_distinct
    training_rows, calibration_rows = (
        {row.tobytes() for row in part.read_unit(0, 0, 0).X} for part in (training, calibration)
    )
    assert not training_rows & calibration_rows
    assert training.n_rows + calibration.n_rows == 5500


def why_none(labels: Any) -> str:
    """Return why no rows of these classes are set aside; "None" if some are."""
    rows, names = np.zeros((len(labels), 1), np.float32), NAMES[: max(labels) + 1]
    return str(calibration_split(RunConfig(), ArraySource(rows, labels, classes=names)).why_none)


@pytest.mark.parametrize(
    ("n", "n_classes", "expected"),
    [
        (5500, 11, "None"), (10_000, 20, "None"),
        (5500, 12, "fewer than 500 rows per class"), (5500, 20, "fewer than 500 rows per class"),
    ],
)  # fmt: skip
def test_auto_needs_500_rows_per_class(n: int, n_classes: int, expected: str) -> None:
    assert expected in why_none(np.arange(n) % n_classes)


@pytest.mark.parametrize(
    ("n_rarest", "expected"),
    [(49, "a class, here 'c', has fewer than 50 rows"), (50, "None")],
)
def test_auto_needs_50_rows_of_the_rarest_class(n_rarest: int, expected: str) -> None:
    assert expected in why_none(np.repeat((0, 1, 2), (3500 - n_rarest, 2000, n_rarest)))


def test_classes_without_rows_do_not_matter() -> None:
    source = ArraySource(np.zeros((5500, 1), np.float32), y, classes=NAMES[:3])
    assert calibration_split(RunConfig(), source).why_none is None


def test_every_class_keeps_training_rows() -> None:
    labels = np.repeat((0, 1, 2), (4000, 1450, 50))
    source = ArraySource(X, labels, classes=NAMES[:3])
    training = calibration_split(RunConfig(), source).training_rows
    assert training.totals is not None
    np.testing.assert_array_equal(training.totals, (3920, 1421, 49))


def test_copies_are_not_used_for_leave_one_out() -> None:
    """Check that equal copies are left out together, and that different copies give no
    probabilities."""
    assert calibration_split(
        RunConfig(), ArraySource(X[:300], y[:300], classes=("a", "b"))
    ).allows_leave_one_out
    source = AugmentedSource(ArraySource(X[:300], y[:300], classes=("a", "b")), 3)
    actual = calibration_split(RunConfig(), source)
    assert not actual.allows_leave_one_out
    assert "rows without copies; train with calibrate=True" in str(actual.why_none)
    rng = np.random.default_rng(0)
    rows, labels = rng.normal(size=(150, 3)), rng.integers(0, 2, 150)
    new_rows, new_labels = rng.normal(size=(900, 3)), rng.integers(0, 2, 900)
    model = KernelClassifier(threads=1, accelerator="none", n_centers="all").fit(
        np.repeat(rows, 2, axis=0), np.repeat(labels, 2)
    )
    assert log_loss(new_labels, model.predict_proba(new_rows)) < 0.75


@pytest.mark.parametrize("name", ["model.n_centers", "solver.n_nystrom", "data.batch_size"])
def test_settings_that_need_all_rows_get_them(name: str) -> None:
    """Check that "auto" sets no rows aside for a setting that only all rows satisfy."""
    solver = {"solver.name": "eigenpro3"}
    assert n_set_aside(5500, "auto", **solver, **{name: 5390}) == 110
    assert n_set_aside(5500, "auto", **solver, **{name: 5500}) == 0
    assert n_set_aside(5500, True, **solver, **{name: 5500}) == 550


def test_indistinguishable_rows_are_not_set_aside() -> None:
    def unread(*_: int) -> Any:
        raise NotImplementedError

    source = GeneratorSource(unread, 5000, (2,), "float32", 2, classes=("a", "b"))
    actual = calibration_split(RunConfig(), source)
    assert actual.calibration_rows is None
    assert "rows that your own function" in str(actual.why_none)
    with pytest.raises(ConfigError, match="calibrate cannot be used with rows that your own"):
        calibration_split(RunConfig().with_overrides({"run.calibrate": True}), source)


def test_missing_probabilities_are_explained() -> None:
    """Check that the error of predict_proba names the reason and the remedy."""
    model = KernelClassifier(**QUICK | {"solver": "block"}, warm_start=True, epochs=1).fit(X, y)
    assert model.predict_proba(X[:3]).shape == (3, 2)  # as after any first fit
    several = np.stack((y, 1 - y), axis=1)
    block, eigenpro3 = QUICK | {"solver": "block"}, QUICK | {"solver": "eigenpro3", "ridge": "auto"}
    for fitted, message in (
        (model.fit(X, y), "with initial weights, which the rows set aside may have trained"),
        (KernelClassifier(**block).partial_fit(X[:200], y[:200]), "partial_"),
        (KernelClassifier(**eigenpro3).fit(X[:900], y[:900]), "fewer than 5,000 rows; train with"),
        (KernelClassifier(**QUICK, calibrate=False).fit(X, y), "calibrate=False asks for; train"),
        (KernelClassifier(**QUICK).fit(X[:200], several[:200]), "several labels for a row; use"),
    ):
        assert not hasattr(fitted, "predict_proba")
        with pytest.raises(AttributeError) as caught:
            fitted.predict_proba(X)  # type: ignore[operator]
        assert message in f"{caught.value} {caught.value.__cause__}"


def test_missing_intervals_are_explained() -> None:
    model = KernelRegressor(**QUICK).fit(X[:200], X[:200, 0])
    with pytest.raises(ConfigError, match=r"'auto' sets none aside for numeric targets; train"):
        model.predict(X, interval=0.9)


def test_calibrate_is_refused_with_initial_weights() -> None:
    parameters = QUICK | {"solver": "block", "warm_start": True, "epochs": 1, "calibrate": True}
    model = KernelClassifier(**parameters).fit(X, y)
    with pytest.raises(ConfigError, match="calibrate cannot be used with initial weights"):
        model.fit(X, y)


def test_calibrate_is_refused_with_partial_fit() -> None:
    with pytest.raises(ConfigError, match="calibrate cannot be used with partial_fit"):
        KernelClassifier(**QUICK, calibrate=True).partial_fit(X, y)


def test_same_settings_continue_from_a_fit(tmp_path: Path) -> None:
    """Check that over the same centers the rows set aside are left out again."""
    parameters = QUICK | {"solver": "block", "epochs": 1}
    first = KernelClassifier(**parameters, run_dir=tmp_path / "a").fit(X, y)
    resumed = parameters | {"warm_start": tmp_path / "a", "run_dir": tmp_path / "b"}
    second = KernelClassifier(**resumed).fit(X, y)
    third = KernelClassifier(**resumed).fit(X, y)  # loads the finished run
    np.testing.assert_array_equal(np.sort(first.centers_, 0), np.sort(second.centers_, 0))
    np.testing.assert_array_equal(second.dual_coef_, third.dual_coef_)
    assert not hasattr(second, "predict_proba")
    actual = calibration_split(RunConfig(), ArraySource(X, y), "why", keeps_calibration_rows="auto")
    assert actual._replace(training_rows=None) == (None, None, "why", True, False)


def test_insufficient_memory_disables_auto_calibration() -> None:
    """Check that "auto" then sets no rows aside, and that True is refused."""
    source = ArraySource(np.zeros((5500, 300), np.float32), y, classes=("a", "b"))
    smallest = {}
    for requested in (False, "auto", True):
        settings = {"run.calibrate": requested, "run.threads": 1, "model.n_centers": 200}
        config = RunConfig().with_overrides(settings | {"run.accelerator": "none"})
        for mib in range(90, 250, 4):
            with contextlib.suppress(MemoryBudgetError):
                run = open_run(
                    config.with_overrides({"run.memory": mib << 20}), RunInputs(source=source)
                )
                run.backend.close()
                smallest[requested] = mib, run.data.split.calibration_rows is not None
                break
    assert smallest[False] == smallest["auto"]
    assert smallest[True] > smallest["auto"]
    assert smallest[True][1]


def test_too_few_weighted_rows_are_not_set_aside() -> None:
    w = np.where(np.arange(len(y)) < 30, 1.0, 0.0).astype(np.float32)
    actual = calibration_split(RunConfig(), ArraySource(X, y, classes=("0", "1"), sample_weight=w))
    assert actual.calibration_rows is None
    assert "sample weights" in str(actual.why_none)


def test_later_rows_remove_probabilities(tmp_path: Path) -> None:
    """Check that later blocks of rows remove the probabilities, which were calibrated before."""
    parameters = QUICK | {"solver": "block", "bandwidth": "auto", "metric": "none"}
    KernelClassifier(**parameters, epochs=1, run_dir=tmp_path / "a").fit(X, y)
    model = load(tmp_path / "a")
    assert model.predict_proba(X[:3]).shape == (3, 2)
    model.partial_fit(X[:200], y[:200])
    with pytest.raises(AttributeError) as caught:
        model.predict_proba(X)
    assert "with partial_fit" in f"{caught.value} {caught.value.__cause__}"


def test_resumed_run_keeps_its_choice(tmp_path: Path) -> None:
    """Check that the choice of "auto" is recorded, and that a run without rows aside is as
    before."""
    first_model = KernelClassifier(**QUICK, run_dir=tmp_path / "a").fit(X, y)
    resumed = KernelClassifier(**QUICK, run_dir=tmp_path / "a").fit(X, y)
    np.testing.assert_array_equal(resumed.predict_proba(X[:5]), first_model.predict_proba(X[:5]))
    assert load(tmp_path / "a").calibrate == "auto"
    for requested in (True, False):  # a tenth, or none
        with pytest.raises(ResumeMismatchError, match="calibrate"):
            KernelClassifier(**QUICK, run_dir=tmp_path / "a", calibrate=requested).fit(X, y)
    uncalibrated = KernelClassifier(**QUICK, run_dir=tmp_path / "b", calibrate=False).fit(X, y)
    auto = KernelClassifier(**QUICK, run_dir=tmp_path / "b").fit(X, y)
    np.testing.assert_array_equal(auto.dual_coef_, uncalibrated.dual_coef_)
    assert not hasattr(auto, "predict_proba")
    assert load(tmp_path / "b").calibrate is False
    values = KernelRegressor(**QUICK).fit(X[:500], X[:500, 0])
    other = KernelRegressor(**QUICK, calibrate=False).fit(X[:500], X[:500, 0])
    np.testing.assert_array_equal(values.dual_coef_, other.dual_coef_)


@pytest.mark.parametrize(("recorded_setting", "rows"), [(None, 0), (True, 550)])
def test_runs_older_than_the_default_resume(
    recorded_setting: bool | None, rows: int, tmp_path: Path
) -> None:
    """Check runs whose record lacks the setting: all rows were trained on, or "auto" had set a
    tenth aside."""
    source = ArraySource(X, y, classes=("a", "b"))
    options = {"model.n_centers": 40, "model.bandwidth": 2.0, "data.batch_size": 500}

    def config(folder: str, calibrate: Any) -> RunConfig:
        return settings(tmp_path / folder, **options, **{"run.calibrate": calibrate})

    uninterrupted = finished(config("whole", recorded_setting is True), source=source)
    stopped(config("begun", recorded_setting is True), 5, source=source, test=source)
    with RunDirectory(tmp_path / "begun", writable=False) as directory:
        actual = directory.read_record()
    assert actual is not None
    assert actual["identity"]["settings"]["run"].get("calibrate") is recorded_setting
    resumed = finished(config("begun", "auto"), source=source)
    np.testing.assert_array_equal(resumed.model.weights, uninterrupted.model.weights)
    assert resumed.samples == uninterrupted.samples == 2 * (5500 - rows)


def test_auto_skips_parts_with_too_few_rows() -> None:
    """Check that a fit with defaults is not refused."""
    X = np.random.default_rng(0).normal(size=(6040, 2))
    y = (X[:, 0] > 0).astype(int)
    parts = [ArraySource(X[:6000], y[:6000]), ArraySource(X[6000:], y[6000:])]
    actual = calibration_split(RunConfig(), MixtureSource(parts))
    assert actual.calibration_rows is None
    assert actual.why_none is not None
    assert "too few different rows" in actual.why_none
