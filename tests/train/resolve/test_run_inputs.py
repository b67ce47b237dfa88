"""Test arrays that replace settings, and the calibration rows that a run inherits."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import ConfigError
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.patch_features import PatchFeatures
from streamkern.train.resolve.run_inputs import NO_INPUTS, RunInputs, centers_from
from streamkern.train.restart.parent_run import ParentRun
from tests.runs import D, P, array_source, finished, settings

Z = np.zeros((P, D), np.float32)


def test_settings_without_given_arrays_are_unchanged() -> None:
    config = settings(**{"model.centers": "kmeans"})
    assert NO_INPUTS.settings(config) is config
    assert NO_INPUTS.recorded_settings(config) == config.identity()


@pytest.mark.parametrize(
    ("given", "replaced"),
    [
        (RunInputs(centers=Z), {"centers": "random"}),
        (RunInputs(metric=np.ones(D)), {"metric": "none"}),
        (RunInputs(centers=Z, metric=np.ones(D)), {"centers": "random", "metric": "none"}),
    ],
    ids=["centers", "metric", "both"],
)
def test_given_arrays_replace_their_settings(given: RunInputs, replaced: dict[str, str]) -> None:
    """Check that the record of the run omits the settings that an array replaces."""
    config = settings(**{"model.centers": "kmeans", "model.metric": "learn"})
    expected = config.identity()["model"]
    assert given.settings(config).identity()["model"] == expected | replaced
    recorded = given.recorded_settings(config)
    assert expected.keys() - recorded["model"].keys() == replaced.keys()
    assert recorded.keys() == config.identity().keys()


def test_given_arrays_that_contradict_settings_are_refused() -> None:
    """Check a number of centers that differs from the setting, and Fourier features, which have no
    centers and no metric."""
    with pytest.raises(
        ConfigError, match=rf"n_centers={P} differs from the {P + 1} rows in centers"
    ):
        RunInputs(centers=np.zeros((P + 1, D))).settings(settings())
    fourier = settings(**{"model.n_centers": "auto", "model.features": "fourier"})
    for given in (RunInputs(centers=Z), RunInputs(metric=np.ones(D))):
        with pytest.raises(ConfigError, match="fourier"):
            given.settings(fourier)


@pytest.mark.parametrize(
    ("setting", "kind"),
    [("random", "random"), ("kmeans", "kmeans"), ("all", "all"), ("centers.npy", "file")],
)
def test_kind_of_centers_is_recorded(setting: str, kind: str) -> None:
    config = settings(**{"model.centers": setting, "model.n_centers": "auto"})
    assert centers_from(config, NO_INPUTS) == kind
    assert centers_from(config, RunInputs(centers=Z)) == "given"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of two runs, "True" with `calibrate` and "False" without it."""
    folder = tmp_path_factory.mktemp("runs")
    for calibrate in (True, False):
        config = settings(folder / str(calibrate), **{"run.calibrate": calibrate})
        finished(config, source=array_source(400))
    return folder


def parent(location: Path) -> ParentRun:
    """Return the run at a location as a parent run."""
    return ParentRun.find(str(location), {}, load_centers=False, load_weights=False)


LOG_LOSS = {"model.loss": "log_loss"}


@pytest.mark.parametrize(
    ("parent_calibrates", "changes", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"run.calibrate": True}, "auto"),
        (True, LOG_LOSS, True),
        (False, LOG_LOSS, False),
    ],
    ids=["calibrated", "not calibrated", "run calibrates", "log loss", "log loss, not calibrated"],
)
def test_run_keeps_calibration_rows_of_named_parent_run(
    runs: Path, parent_calibrates: bool, changes: dict[str, Any], expected: bool | str
) -> None:
    """Check warm starts from a path: the loss of the parent run counts, a squared error.

    The result is the setting of the parent run, if the run leaves its own at "auto".
    """
    config = settings(**{"solver.warm_start": str(runs / str(parent_calibrates))}, **changes)
    assert NO_INPUTS.keeps_calibration_rows(config, complete=True) == expected


@pytest.mark.parametrize("changes", [{}, LOG_LOSS], ids=["squared error", "log loss"])
@pytest.mark.parametrize("calibrated", [True, False])
def test_run_keeps_calibration_rows_of_given_parent_run(
    runs: Path, calibrated: bool, changes: dict[str, Any]
) -> None:
    inputs = RunInputs(warm_start=parent(runs / str(calibrated)))
    assert inputs.keeps_calibration_rows(settings(**changes), complete=True)


@pytest.mark.parametrize("by_path", [True, False])
def test_incomplete_or_continued_run_keeps_no_calibration_rows(runs: Path, by_path: bool) -> None:
    calibrated = parent(runs / "True")
    config = settings(**({"solver.warm_start": str(runs / "True")} if by_path else {}))
    inputs = NO_INPUTS if by_path else RunInputs(warm_start=calibrated)
    assert not inputs.keeps_calibration_rows(config, complete=False)
    continued = replace(inputs, continued_run=calibrated)
    assert not continued.keeps_calibration_rows(config, complete=True)


def test_run_without_parent_run_keeps_no_calibration_rows() -> None:
    assert not NO_INPUTS.keeps_calibration_rows(settings(), complete=True)


def test_parent_run_with_log_loss_has_no_calibration_rows(tmp_path: Path) -> None:
    finished(settings(tmp_path, **{"model.loss": "log_loss"}), source=array_source(100))
    inputs = RunInputs(warm_start=parent(tmp_path))
    assert not inputs.keeps_calibration_rows(settings(), complete=True)


def test_patch_features_are_given_or_inherited(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (130, 9, 9, 1)).astype(np.uint8)
    filters = {"model.patch_features": 6, "data.scale": "auto"}
    first = settings(tmp_path / "run", **filters)
    drawn_patches = finished(
        first, source=ArraySource(images, np.arange(130) % 2)
    ).model.fixed_transforms[-1]
    assert isinstance(drawn_patches, PatchFeatures)
    without_patches, requested = settings(), settings(**filters)
    path = str(tmp_path / "run")
    for given, config in (
        (RunInputs(patches=drawn_patches), without_patches),
        (RunInputs(patches=drawn_patches), requested),
        (RunInputs(warm_start=parent(tmp_path / "run")), requested),
        (NO_INPUTS, requested.with_overrides({"solver.warm_start": path})),
    ):  # fmt: skip
        actual = given.known_patches(config)
        assert actual is not None
        assert actual.describe() == drawn_patches.describe()
    assert NO_INPUTS.known_patches(requested) is None
    assert RunInputs(warm_start=parent(tmp_path / "run")).known_patches(without_patches) is None


def test_pickle_without_newer_field_gets_its_default() -> None:
    """Check inputs as an earlier version pickled them, without `rank_addresses`."""
    inputs = RunInputs(facts={"columns": ["a"]})
    del inputs.__dict__["rank_addresses"]
    restored = replace(pickle.loads(pickle.dumps(inputs)), warm_start="run")
    assert (restored.rank_addresses, restored.facts) == ({}, {"columns": ["a"]})
