"""Check the scaling of features by their means and standard deviations, and who keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.array
import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine, make_friedman1
from sklearn.preprocessing import StandardScaler

import streamkern as sk
from streamkern.basics.errors import ConfigError
from streamkern.cli.overview import plan_overview
from streamkern.cli.plan_text import plan_text
from streamkern.cli.run_info import run_overview, run_text
from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import GaussianNoise, Scale, deterministic
from streamkern.stream.sources.user import GeneratorSource
from streamkern.train.resolve.find_scaling import find_scale
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.resolve.training_data import open_data
from streamkern.train.saved_model import load_model
from streamkern.tuning.candidates import Candidates
from streamkern.tuning.holdout import draw_sample
from tests.runs import finished, settings

AUTO = {"data.scale": "auto"}
rng = np.random.default_rng(5)
X = rng.standard_normal((400, 4)) * [1, 20, 0.01, 3] + [0, 5, 7, -100]
Y = np.sin(X[:, :1]) + (X[:, 1:2] - 5) / 20


def regressor(**more: Any) -> sk.KernelRegressor:
    """Return a regressor with the Laplace kernel."""
    return sk.KernelRegressor(
        kernel="laplace", n_centers=80, bandwidth=2.0, epochs=3, threads=1, **more
    )


def scale_of(source: Any) -> Scale:
    """Return the scale of a run with scale "auto"."""
    actual, _ = find_scale(source, "auto", 0)
    assert actual is not None
    return actual


# -- means and standard deviations ----------------------------------------------------------------


def test_tables_are_standardised_by_feature() -> None:
    """Compare with scikit-learn's scaler, and with the sum over centers in float64."""
    scaler = StandardScaler().fit(X)
    model = regressor().fit(X, Y)
    rows = {tuple(row) for row in scaler.transform(X).astype(np.float32).round(4)}
    assert {tuple(row) for row in model.centers_.round(4)} <= rows
    new = rng.standard_normal((50, 4)) * [1, 20, 0.01, 3] + [0, 5, 7, -100]
    K = np.exp(-cdist(scaler.transform(new), np.float64(model.centers_)) / 2.0)
    F = K @ model.dual_coef_ + model.intercept_
    np.testing.assert_allclose(model.predict(new), F, atol=1e-4)


def test_unit_of_a_feature_has_no_effect() -> None:
    """Check a feature multiplied by 1e4: without scaling, R^2 would fall from 0.98 to 0.13."""
    plain = regressor().fit(X, Y)
    for factor in (1e4, 2.0**-20):
        units = np.array([1, factor, 1, 1])
        model = regressor().fit(X * units, Y)
        np.testing.assert_allclose(model.predict(X * units), plain.predict(X), atol=1e-4)


def test_large_offset_loses_no_digits(tmp_path: Path) -> None:
    """Check time stamps in float64, from memory and from a store, in training and prediction."""
    plain = regressor().fit(X, Y)
    late = X + 2.0**30  # which float64 holds to 2e-7, and float32 to 64
    model = regressor().fit(late, Y)
    np.testing.assert_allclose(model.predict(late), plain.predict(X), atol=1e-3)
    ingest(late, tmp_path / "late.zarr", y=Y, shuffle=False)
    stored = regressor().fit(tmp_path / "late.zarr")
    np.testing.assert_allclose(stored.predict(late), plain.predict(X)[:, 0], atol=1e-3)


def test_mean_of_narrow_rows_is_subtracted_exactly() -> None:
    """Check a mean that float32 does not represent: the differences to it are exact."""
    rows = (2.0**24 + np.arange(0, 64, 2)).astype(np.float32)[:, None]
    model = sk.KernelRegressor(bandwidth=1.0, centers="all", epochs=1, threads=1)
    model.fit(rows, np.float64(rows))
    expected = StandardScaler().fit_transform(np.float64(rows))
    np.testing.assert_allclose(np.sort(model.centers_, axis=0), expected, atol=1e-6)


def test_constant_features_are_only_centred() -> None:
    constant = np.column_stack([X, np.full(400, 0.1), 1e9 + np.zeros(400), np.zeros(400)])
    constant[::2, 5] = np.nextafter(1e9, 2e9)  # constant to rounding
    scale = scale_of(ArraySource(constant, Y))
    np.testing.assert_array_equal(scale.scale[4:], 1)
    np.testing.assert_allclose(scale.scale[:4], X.std(axis=0), rtol=1e-12)
    # Not at centers, where rounding errors are largest.
    midpoints = (constant + np.roll(constant, 1, axis=0)) / 2
    np.testing.assert_allclose(
        regressor().fit(constant, Y).predict(midpoints),
        regressor().fit(X, Y).predict(midpoints[:, :4]),
        atol=1e-4,
    )


def test_small_deviation_far_from_zero_is_not_constant() -> None:
    shifted = np.column_stack([X[:, 0], 1e9 + 1e-3 * rng.standard_normal(400)])
    np.testing.assert_allclose(
        scale_of(ArraySource(shifted, Y)).scale, shifted.std(axis=0, dtype=np.longdouble), rtol=1e-6
    )


def test_images_and_uint8_rows_have_one_scale() -> None:
    pixels = rng.integers(0, 200, (60, 4, 4, 1), np.uint8)
    for rows in (pixels, pixels.reshape(60, 16), pixels.astype(np.float32)):
        scale = scale_of(ArraySource(rows, np.zeros((60, 1))))
        assert scale.mode == "global"
        np.testing.assert_allclose([scale.mean, scale.scale], [pixels.mean(), pixels.std()])
    assert scale_of(ArraySource(pixels.reshape(60, 16).astype(np.float32), None)).mode == "feature"


def test_flat_float_images_are_detected() -> None:
    """Check images of digits in three units, and tables: only their columns have own scales."""
    digits = load_digits().data
    for factor in (1.0, 1 / 16, 1000.0):
        assert scale_of(ArraySource(digits * factor, None)).mode == "global"
    tables = [load_wine().data, load_breast_cancer().data, load_iris().data, make_friedman1(200)[0]]
    tables += [np.abs(X) * [1, 1e-4, 1, 1], np.abs(X) * [1, 1e4, 1, 1], np.abs(X), X]
    shares = np.random.default_rng(0).gamma([20, 20, 10, 0.2, 0.05], [2, 0.4, 4, 2, 2], (500, 5))
    tables += [shares]  # such as shares of carbon, hydrogen, oxygen, nitrogen and sulfur
    for table in tables:
        assert scale_of(ArraySource(table, None)).mode == "feature"


def test_mixture_statistics_follow_its_shares() -> None:
    parts = [ArraySource(X[:300], Y[:300], unit_rows=50), ArraySource(X[300:] * 2, Y[300:])]
    plain = scale_of(MixtureSource(parts))
    joined = np.concatenate([X[:300], X[300:] * 2])
    np.testing.assert_allclose(plain.scale, joined.std(axis=0), rtol=1e-10)
    weighted = MixtureSource(parts, [1, 1])
    copies = np.concatenate([X[:300], *[X[300:] * 2] * 3])  # 300 rows of each
    assert weighted.shares == (0.5, 0.5)
    np.testing.assert_allclose(scale_of(weighted).scale, copies.std(axis=0), rtol=1e-10)


def test_sources_without_statistics_are_sampled(make_zarr: Any) -> None:
    """Check foreign stores, generators and lazy arrays: the sample is bounded, and the same in
    every call."""
    many_rows = rng.standard_normal((60_000, 2)) * [1, 1000] + [3, 4]

    def generate(seed: int, epoch: int, start: int, stop: int) -> tuple[Any, Any]:
        return many_rows[start:stop], np.ones((stop - start, 1))

    y = np.ones((60_000, 1))
    foreign = make_zarr({"X": many_rows, "y": y}, 1000)
    for source in (
        ZarrSource(foreign),
        GeneratorSource(generate, 60_000, (2,), np.float64, 1, name="made"),
        ArraySource(dask.array.from_array(many_rows, (1000, 2)), y),  # type: ignore[no-untyped-call]
    ):
        scale, message = find_scale(source, "auto", 0)
        assert scale is not None
        assert "from a sample of 20,000 rows" in message
        np.testing.assert_allclose(scale.scale, many_rows.std(axis=0), rtol=0.02)
        assert scale.describe() == scale_of(source).describe()
    result = finished(settings(**AUTO, **{"data.batch_size": 4096}), source=ZarrSource(foreign))
    result.model.backend.close()


# -- place among the transforms -------------------------------------------------------------------


def test_transforms_receive_unscaled_rows() -> None:
    """Check that the input of transforms does not depend on `scale`, and that the scale is computed
    from their results."""
    read_rows = []

    @deterministic
    def logarithm(X: Any, Y: Any, rng: Any) -> Any:
        read_rows.append(X.min())
        return rng.xp.log(X), Y

    positive = np.exp(X / X.std(axis=0) / 3)
    model = regressor(transforms=[logarithm]).fit(positive, Y)
    assert min(read_rows) > 0
    expected = StandardScaler().fit_transform(np.log(positive))
    np.testing.assert_allclose(
        model._state.fixed[-1].scale, np.log(positive).std(axis=0), rtol=1e-6
    )
    plain = regressor(scale="none").fit(expected, Y)
    np.testing.assert_allclose(model.predict(positive), plain.predict(expected), atol=1e-3)


def test_explicit_scale_transform_replaces_setting() -> None:
    source = AugmentedSource(ArraySource(X, Y), 1, [Scale("global"), GaussianNoise(0.1)])
    assert find_scale(source, "auto", 0)[0] is None
    assert find_scale(source, "global", 0)[0] is None
    for mode in ("feature", "none"):
        with pytest.raises(ConfigError, match=rf"data\.scale='{mode}' contradicts the scale in"):
            find_scale(source, mode, 0)
    with pytest.raises(ConfigError, match=r"^scale='none' contradicts the scale in transforms"):
        regressor(scale="none", transforms=[{"kind": "scale"}]).fit(X, Y)


def test_scale_none_keeps_rows() -> None:
    assert find_scale(ArraySource(X, Y), "none", 0) == (None, "features are not scaled")
    model = regressor(scale="none").fit(X, Y)
    stored = {tuple(row) for row in X.astype(np.float32)}
    assert {tuple(row) for row in model.centers_} <= stored


def test_given_centers_are_scaled_like_rows(tmp_path: Path) -> None:
    model = sk.KernelRegressor(centers=X[:30], epochs=1, threads=1).fit(X, Y)
    expected = StandardScaler().fit(X).transform(X[:30])
    np.testing.assert_allclose(model.centers_, expected, atol=1e-5)
    np.save(tmp_path / "Z.npy", X[:30])
    named = sk.KernelRegressor(centers=tmp_path / "Z.npy", epochs=1, threads=1).fit(X, Y)
    np.testing.assert_array_equal(named.centers_, model.centers_)


def test_scaling_keeps_integer_distances() -> None:
    """Check that one scale for all entries keeps the grid of uint8; separate scales would not."""
    pixels = rng.integers(0, 256, (60, 16), np.uint8)
    source = ArraySource(pixels, np.arange(60) % 3)
    run = open_run(
        settings(**AUTO, **{"run.precision": "integer", "model.n_centers": 60}), RunInputs(source)
    )
    run.backend.close()
    assert run.grid is not None
    scaled = (pixels - pixels.mean()) / pixels.std()
    np.testing.assert_allclose(run.grid.offset + run.grid.step * pixels, scaled, atol=1e-12)
    with pytest.raises(ConfigError, match=r"run\.precision='integer' needs rows of uint8"):
        open_run(
            settings(**{"run.precision": "integer", "data.scale": "feature"}), RunInputs(source)
        )


# -- records and continued models -----------------------------------------------------------------


def test_run_records_its_scale(tmp_path: Path) -> None:
    """Check the plan, `info`, and the loaded model."""
    ingest(X, tmp_path / "train.zarr", y=Y)
    config = settings(tmp_path / "run", **AUTO, **{"data.train": str(tmp_path / "train.zarr")})
    run = open_run(config)
    run.backend.close()
    phrase = "every feature by its own mean and standard deviation"
    assert plan_overview(run)["scale"] == phrase
    assert f"scale: {phrase}\n" in plan_text(plan_overview(run))
    result = finished(config)
    assert phrase in run_text(run_overview(tmp_path / "run"))
    model = load_model(tmp_path / "run")
    with model.backend:
        np.testing.assert_array_equal(model.values(X), result.model.values(X))
    np.testing.assert_allclose(model.fixed_transforms[0].scale, X.std(axis=0), rtol=1e-10)


def test_partial_fit_keeps_scale_of_first_block() -> None:
    model = regressor().partial_fit(X[:200], Y[:200])
    first = model._state.fixed[-1]
    model.partial_fit(X[200:] * 100, Y[200:])
    assert len(model._state.fixed) == 1
    np.testing.assert_array_equal(model._state.fixed[-1].scale, first.scale)
    np.testing.assert_allclose(first.scale, X[:200].std(axis=0), rtol=1e-10)


def test_warm_start_keeps_scale_of_its_weights() -> None:
    model = regressor(centers=X[:50], warm_start=True, solver="eigenpro4").set_params(
        n_centers="auto"
    )
    centers = model.fit(X, Y).centers_
    np.testing.assert_array_equal(model.fit(X[:200], Y[:200]).centers_, centers)
    np.testing.assert_array_equal(model.fit(X[:300], Y[:300]).centers_, centers)


@pytest.mark.parametrize("scale", ["auto", "none"])
def test_warm_fit_after_partial_fit_keeps_scale(scale: str) -> None:
    model = regressor(centers=X[:50], solver="eigenpro4", scale=scale).set_params(n_centers="auto")
    model.partial_fit(X[:200], Y[:200]).partial_fit(X[200:] * 3, Y[200:])
    centers, fixed = model.centers_, model._state.fixed
    warm_model = model.set_params(warm_start=True, step_scale=1e-9)
    before = model.predict(X)
    np.testing.assert_array_equal(warm_model.fit(X, Y).centers_, centers)
    assert len(warm_model._state.fixed) == len(fixed) == (scale == "auto")
    for mine, first in zip(warm_model._state.fixed, fixed, strict=True):
        np.testing.assert_array_equal(mine.scale, first.scale)
    np.testing.assert_allclose(warm_model.predict(X), before, atol=1e-3 * np.ptp(before))


def test_search_uses_scale_of_all_rows_in_every_split() -> None:
    config = settings(**AUTO, **{"model.n_centers": "auto", "run.memory": "1 GiB"})
    data = open_data(config, ArraySource(X, Y))
    fit, _ = Candidates(config, data, 1, rows=100).split(0)
    (scale,) = fit.feed_transforms
    np.testing.assert_allclose(scale.scale, X.std(axis=0), rtol=1e-10)  # type: ignore[attr-defined]
    assert find_scale(fit, "auto", 0)[0] is None
    assert draw_sample(data, 50, 0).source is data.source


def test_unknown_scale_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'data\.scale=.*one of "auto", "feature", "quantiles"'):
        RunConfig.from_tables({"data": {"train": "a", "scale": "minmax"}})
