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


def test_arrays_replace_their_settings() -> None:
    config = settings(**{"model.centers": "kmeans"})
    assert NO_INPUTS.settings(config) is config
    assert NO_INPUTS.recorded_settings(config) == config.identity()
    for given, changed, removed in (
        (RunInputs(centers=Z), {"centers": "random"}, {"centers"}),
        (RunInputs(metric=np.ones(D)), {"metric": "none"}, {"metric"}),
        (
            RunInputs(centers=Z, metric=np.ones(D)),
            {"centers": "random", "metric": "none"}, {"centers", "metric"},
        ),
    ):  # fmt: skip
        learned = config.with_overrides({"model.metric": "learn"})
        actual = given.settings(learned).identity()["model"]
        assert actual == learned.identity()["model"] | changed
        recorded_tables = given.recorded_settings(learned)
        assert learned.identity()["model"].keys() - recorded_tables["model"].keys() == removed
        assert recorded_tables.keys() == config.identity().keys()


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


@pytest.mark.parametrize("calibrated", [True, False])
def test_run_keeps_calibration_rows_of_its_initial_weights(runs: Path, calibrated: bool) -> None:
    location = runs / str(calibrated)

    def keeps(given: RunInputs = NO_INPUTS, complete: bool = True, **changes: Any) -> bool:
        return given.keeps_calibration_rows(settings(**changes), complete=complete)

    by_path = {"solver.warm_start": str(location)}
    assert not keeps()
    assert keeps(**by_path) is calibrated
    assert keeps(**by_path, **{"run.calibrate": True})
    assert keeps(RunInputs(warm_start=parent(location)))
    for given in (NO_INPUTS, RunInputs(warm_start=parent(location))):
        assert not keeps(given, complete=False, **by_path)
        assert not keeps(replace(given, continued_run=parent(location)), **by_path)
    # The loss of the new run does not matter: the parent run has the squared error.
    log_loss = {"model.loss": "log_loss"}
    assert keeps(**by_path, **log_loss) is calibrated
    assert keeps(RunInputs(warm_start=parent(location)), **log_loss)


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
    plain, requested = settings(), settings(**filters)
    path = str(tmp_path / "run")
    for given, config in (
        (RunInputs(patches=drawn_patches), plain), (RunInputs(patches=drawn_patches), requested),
        (RunInputs(warm_start=parent(tmp_path / "run")), requested),
        (NO_INPUTS, requested.with_overrides({"solver.warm_start": path})),
    ):  # fmt: skip
        actual = given.known_patches(config)
        assert actual is not None
        assert actual.describe() == drawn_patches.describe()
    assert NO_INPUTS.known_patches(requested) is None
    assert RunInputs(warm_start=parent(tmp_path / "run")).known_patches(plain) is None


def test_pickle_without_newer_field_gets_its_default() -> None:
    """Check inputs from a pickled estimator of an earlier version."""
    inputs = RunInputs(facts={"columns": ["a"]})
    del inputs.__dict__["rank_addresses"]
    restored = replace(pickle.loads(pickle.dumps(inputs)), warm_start="run")
    assert (restored.rank_addresses, restored.facts) == ({}, {"columns": ["a"]})
