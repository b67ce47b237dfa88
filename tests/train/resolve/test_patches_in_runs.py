"""Patch features as a part of a model: in runs, resumed and continued ones, and predictions."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.basics.errors import ConfigError, ResumeMismatchError
from streamkern.basics.randomness import RowRandom
from streamkern.basics.stop import StopRequest
from streamkern.cli.main import run_command
from streamkern.config.run_config import RunConfig
from streamkern.stream.sources import patch_features
from streamkern.stream.sources.patch_features import PatchFeatures, patches_among
from streamkern.train import rank_work
from streamkern.train.resolve import sampled_features
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.resolve.target_moments import changes_targets
from streamkern.train.restart.run_snapshot import RunSnapshot
from streamkern.train.setup.planned import planned_flops
from tests.rank_runs import alpha
from tests.rank_threads import on_threads
from tests.reference import laplace
from tests.runs import assert_same_bits, final, finished, settings, stopped

N, SIDE = 130, 9
FILTERS = {"model.patch_features": 6, "data.scale": "auto"}
SMALL: dict[str, Any] = {
    "n_centers": 40, "kernel": "laplace", "bandwidth": 8.0, "ridge": 1e-3, "random_state": 0,
    "patch_features": 6, "device": "cpu",
}  # fmt: skip


def images(n: int = N, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return images (n, 9, 9, 1) uint8 with a bright bar, horizontal (1) or vertical (0), at a
    random position."""
    rng = np.random.default_rng(seed)
    X, y = rng.integers(0, 60, (n, SIDE, SIDE, 1)), rng.integers(0, 2, n)
    for image, label in zip(X, y, strict=True):
        i, j = rng.integers(0, 5, 2)
        h, w = (2, 5) if label else (5, 2)
        image[i : i + h, j : j + w] += 150
    return X.astype(np.uint8), y


X, Y = images()
NEW, LABELS = images(80, 1)


def source(*transforms: Any) -> sk.AugmentedSource:
    """Return the training images with transforms."""
    base = sk.ArraySource(X, Y, classes=("upright", "across"), unit_rows=16)
    return sk.AugmentedSource(base, 1, transforms)


def unseen_images() -> sk.ArraySource:
    """Return images that are not trained on."""
    return sk.ArraySource(NEW, LABELS, classes=("upright", "across"))


def fail_if_drawn(*arguments: Any) -> Any:
    """Fail in place of the function that draws patches."""
    raise AssertionError("patches are drawn again")


def features_of(fixed: tuple[Any, ...], rows: np.ndarray) -> np.ndarray:
    """Return stored rows after the transforms of a model, in float64."""
    features: Any = rows.astype(np.float64)
    for transform in fixed:
        rng = RowRandom(np, 0, 0, 0, np.arange(len(rows)), np.float64)
        features, _ = transform(features, np.zeros(len(rows)), rng)
    return np.asarray(features)


def test_predictions_use_patch_features() -> None:
    model = sk.KernelClassifier(**SMALL).fit(X, Y)
    kinds = [type(transform) for transform in model._fitted_.fixed]
    assert kinds == [sk.Scale, PatchFeatures]
    features = features_of(model._fitted_.fixed, NEW)
    assert features.shape == (80, 48) == (80, len(model.get_feature_names_out()))
    K = laplace(features, np.float64(model.centers_), model.bandwidth_)
    expected = K @ np.float64(model.dual_coef_) + model.intercept_
    np.testing.assert_allclose(
        model.decision_function(NEW), expected[:, 1] - expected[:, 0], atol=2e-4
    )
    assert model.score(NEW, LABELS) > 0.9


def test_regression_and_float_images_use_patch_features() -> None:
    model = sk.KernelRegressor(**SMALL | {"n_centers": 60}).fit(X / 7.0, Y.astype(float))
    assert model.score(NEW / 7.0, LABELS) > 0.5
    with pytest.raises(AttributeError, match="no metric"):
        _ = model.feature_importances_


def test_metric_importances_belong_to_patch_features() -> None:
    scales = np.ones(48)
    model = sk.KernelRegressor(metric=scales, **SMALL).fit(X, Y.astype(float))
    assert model.metric_importances_.shape == (48,)
    with pytest.raises(AttributeError, match="of patch features"):
        _ = model.feature_importances_


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("precision", ["exact", "float64"])
def test_stopped_run_resumes_with_same_bits(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a resumed run reads its filters, which another LAPACK would round differently."""
    overrides = {"run.precision": precision, **FILTERS}
    uninterrupted, killed = (settings(tmp_path / name, **overrides) for name in ("whole", "killed"))
    result = finished(uninterrupted, source=source(sk.RandomFlip()), test=unseen_images())
    stopped(killed, 3, source=source(sk.RandomFlip()), test=unseen_images())
    monkeypatch.setattr(PatchFeatures, "of_sample", fail_if_drawn)
    finished(killed, source=source(sk.RandomFlip()), test=unseen_images())
    assert_same_bits(final(tmp_path / "killed"), final(tmp_path / "whole"))
    loaded = sk.load(tmp_path / "whole")
    assert loaded.get_params()["patch_features"] == 6
    names = np.array(result.model.classes)
    np.testing.assert_array_equal(
        loaded.predict(NEW), names[result.model.values(NEW).argmax(axis=1)]
    )


def test_changed_patch_settings_are_another_run(tmp_path: Path) -> None:
    stopped(settings(tmp_path / "run", **FILTERS), 3, source=source(), test=unseen_images())
    for change in ({"model.patch_features": 8}, {"model.patch_size": 4}, {"model.patch_grid": 1}):
        changed = settings(tmp_path / "run", **FILTERS | change)
        with pytest.raises(ResumeMismatchError, match=next(iter(change))):
            finished(changed, source=source(), test=unseen_images())
    plain_settings = settings(tmp_path / "run", **{"data.scale": "auto"})
    with pytest.raises(ResumeMismatchError, match="patch_features"):
        finished(plain_settings, source=source(), test=unseen_images())


def test_record_without_patches_is_unchanged(tmp_path: Path) -> None:
    finished(settings(tmp_path / "run"), source=source())
    text = (tmp_path / "run" / "run.json").read_text()
    assert "patch" not in text
    assert json.loads(text)


@pytest.mark.slow
def test_continued_run_keeps_patch_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = finished(settings(tmp_path / "first", **FILTERS), source=source())
    before = patches_among(first.model.fixed_transforms)
    assert before is not None
    monkeypatch.setattr(PatchFeatures, "of_sample", fail_if_drawn)
    for options in ({}, FILTERS):
        path = tmp_path / f"second{len(options)}"
        config = settings(path, **options | {"data.scale": "auto"})
        second = finished(config, source=source(), continues=tmp_path / "first")
        after = patches_among(second.model.fixed_transforms)
        assert after is not None
        assert after.describe() == before.describe()
    other = settings(tmp_path / "third", **FILTERS | {"model.patch_features": 8})
    with pytest.raises(ConfigError, match="patch_features"):
        finished(other, source=source(), continues=tmp_path / "first")


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["auto", "global"])
def test_warm_start_and_partial_fit_keep_patch_features(
    scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = SMALL | {"scale": scale, "solver": "block", "epochs": 2}
    model = sk.KernelClassifier(warm_start=True, run_dir=None, **parameters).fit(X, Y)
    sk.KernelClassifier(run_dir=str(tmp_path / "run"), **parameters).fit(X, Y)
    online = sk.KernelClassifier(**parameters).partial_fit(X, Y, classes=[0, 1])
    monkeypatch.setattr(PatchFeatures, "of_sample", fail_if_drawn)
    assert model.fit(X, Y).score(NEW, LABELS) > 0.9
    other = sk.KernelClassifier(warm_start=str(tmp_path / "run"), **parameters).fit(X, Y)
    assert other.score(NEW, LABELS) > 0.9
    assert online.partial_fit(NEW, LABELS).score(X, Y) > 0.9
    loaded = sk.load(tmp_path / "run")
    assert loaded.partial_fit(NEW, LABELS).score(X, Y) > 0.9
    model.save(tmp_path / "model.zarr")
    reloaded = sk.load(tmp_path / "model.zarr")
    np.testing.assert_array_equal(reloaded.decision_function(NEW), model.decision_function(NEW))


@pytest.mark.parametrize("other", [{"patch_features": 7}, {"patch_features": 0}, {"patch_grid": 3}])
def test_warm_start_with_other_patches_is_refused(other: dict[str, Any]) -> None:
    model = sk.KernelClassifier(warm_start=True, solver="block", epochs=2, **SMALL).fit(X, Y)
    with pytest.raises(ConfigError, match=r"starts from, which has PatchFeatures\(n_filters=6"):
        model.set_params(**other).fit(X, Y)
    model.set_params(warm_start=False).fit(X, Y)
    assert model.centers_.shape[1] == {7: 56, 0: 81, 6: 108}[model.patch_features]


def test_augmentation_precedes_patch_features() -> None:
    """Check that noise is added to pixels, and not to features."""
    shapes = []

    def record_shape(
        X: np.ndarray, Y: np.ndarray, rng: sk.RowRandom
    ) -> tuple[np.ndarray, np.ndarray]:
        shapes.append(X.shape[1:])
        return X, Y

    result = finished(settings(**FILTERS), source=source(record_shape))
    assert set(shapes) == {(SIDE, SIDE, 1)}
    assert result.Z.shape[1] == 48


@pytest.mark.slow
def test_ranks_share_filters_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sk.ingest_store(X, tmp_path / "bars.zarr", y=Y)
    shared = FILTERS | {
        "data.train": str(tmp_path / "bars.zarr"), "run.ranks": 2, "run.threads": 1,
        "run.precision": "float64", "run.accelerator": "none", "solver.block_size": 20,
        "solver.ridge": 1e-5,
    }  # fmt: skip
    of_sample, calls = PatchFeatures.of_sample, []

    def draw_differently(*arguments: Any) -> PatchFeatures:
        """Return different filters in each call, as from machines that round differently."""
        calls.append(arguments)
        actual = of_sample(*arguments)
        return replace(actual, filters=actual.filters * (1 + 0.1 * len(calls)))

    config, quiet = settings(tmp_path / "ranks", **shared), partial(StopRequest, install=False)
    monkeypatch.setattr(PatchFeatures, "of_sample", draw_differently)
    rank_work.prepare_run(config)  # checks the memory, and leaves the setup to the ranks
    on_threads(2, lambda ranks: rank_work.train_rank(config, ranks, quiet(), RunInputs()))
    assert len(calls) == 2
    saved_features = patches_among(RunSnapshot.open(tmp_path / "ranks").fixed_transforms)
    monkeypatch.setattr(PatchFeatures, "of_sample", lambda *arguments: saved_features)
    one_rank = {"run.ranks": 1, "run.run_dir": str(tmp_path / "alone")}
    finished(config.with_overrides(one_rank))
    np.testing.assert_allclose(
        alpha(tmp_path / "ranks"), alpha(tmp_path / "alone"), rtol=1e-7, atol=1e-9
    )


def open_closed_run(config: RunConfig) -> Any:
    """Resolve a run of `source`, and close its backend."""
    run = open_run(config, RunInputs(source()))
    run.backend.close()
    return run


def test_plan_counts_bytes_and_flops_of_patches() -> None:
    plain, run = (
        open_closed_run(settings(**{"data.scale": "auto", **more})) for more in ({}, FILTERS)
    )
    assert (plain.problem.d, run.problem.d) == (81, 48)
    positions, columns = 7 * 7, 3 * 3 + 4
    row_flops = 2 * positions * 6 * columns
    before = run.method.op_counts(run.problem, run.sizes)[1].flops(run.problem)
    assert planned_flops(run)["training"] - before == row_flops * 2 * N
    assert planned_flops(run)["setup"] > row_flops * 60
    assert run.problem.scratch_bytes >= patch_features.TILE_BYTES
    # Cast and scaled pixels, and features: 81 + 81 + 48 numbers.
    assert (run.problem.feed_arrays - 1) * 48 >= 81 + 48
    assert run.problem.transform_itemsize * 48 >= 4 * 81


def test_outlier_warning_names_pixels_but_not_patches() -> None:
    """Check that a warning names a pixel whose scale one value determines, unless patches replace
    it."""
    bright = X.astype(np.float32)
    bright[3, 0, 0] = 1e6
    pixels = SMALL | {"patch_features": 0}
    with pytest.warns(UserWarning, match="nine tenths of the values of feature 0 "):
        sk.KernelClassifier(scale="feature", **pixels).fit(bright, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sk.KernelClassifier(scale="feature", **SMALL).fit(bright, Y)


def test_targets_are_not_read_again() -> None:
    """Check that patch features are known to keep the targets, unlike functions of the user."""
    run = open_closed_run(settings(**FILTERS))
    assert isinstance(run.data.fixed_transforms[-1], PatchFeatures)
    assert not changes_targets(run.data.source)


def test_filter_sample_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sample_sizes: list[int] = []
    of_sample = PatchFeatures.of_sample

    def record_size(X: np.ndarray, *arguments: Any) -> PatchFeatures:
        sample_sizes.append(len(X))
        return of_sample(X, *arguments)

    monkeypatch.setattr(PatchFeatures, "of_sample", record_size)
    monkeypatch.setattr(sampled_features, "MAX_SAMPLE_ENTRIES", 70 * SIDE**2)
    open_closed_run(settings(**FILTERS))
    monkeypatch.setattr(sampled_features, "MAX_SAMPLE_ENTRIES", 3)
    open_closed_run(settings(**FILTERS))
    assert sample_sizes == [70, sampled_features.MIN_SAMPLE_IMAGES]


def assert_refused(match: str, call: Callable[[], Any]) -> None:
    """Check that a call raises ConfigError with this text."""
    with pytest.raises(ConfigError, match=match):
        call()


def test_rows_other_than_images_are_refused() -> None:
    flat = X.reshape(N, -1)
    assert_refused("needs images", lambda: sk.KernelClassifier(**SMALL).fit(flat, Y))
    large = sk.KernelClassifier(patch_size=SIDE + 1, **SMALL)
    assert_refused("larger than the images of 9 x 9 pixels", lambda: large.fit(X, Y))


def test_export_of_patch_features_is_refused(tmp_path: Path) -> None:
    model = sk.KernelClassifier(**SMALL).fit(X, Y)
    assert_refused(
        "patch_features=6 cannot be exported", lambda: model.to_onnx(tmp_path / "model.onnx")
    )


@pytest.mark.slow
def test_tuned_models_have_patch_features() -> None:
    estimator = sk.KernelClassifier(**SMALL | {"bandwidth": "auto"})
    actual = sk.tune(X, Y, estimator=estimator, refine=0, progress=False)
    assert len(actual.estimator.fit(X, Y).get_feature_names_out()) == 48


def test_commands_train_predict_and_show_patch_features(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rows, labels in (("train", X, Y), ("test", NEW, LABELS)):
        sk.ingest_store(rows, tmp_path / name, y=labels)
    run, data, test = (str(tmp_path / name) for name in ("run", "train", "test"))
    requested = ["--train", data, "--patch-features", "6", "--set", "model.n_centers=40"]
    assert not run_command(["plan", *requested])
    assert "48 features by 6 patches of 3 pixels" in " ".join(capsys.readouterr().out.split())
    assert not run_command(["train", *requested, "--run-dir", run])
    assert not run_command(["info", run])
    assert "48 features by 6 patches of 3 pixels" in " ".join(capsys.readouterr().out.split())
    assert not run_command(["evaluate", run, test, "--json"])
    assert json.loads(capsys.readouterr().out)["accuracy"] > 0.9
