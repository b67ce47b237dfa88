"""Test when quantile scores are added to the features, and that runs keep this choice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import streamkern as sk
from streamkern.basics.errors import ConfigError
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.quantile_scores import scores_among
from streamkern.train.resolve import sampled_features
from tests.runs import assert_same_bits, final, finished, settings, stopped

N = 1200
RNG = np.random.default_rng(3)
HEAVY = np.exp(2 * RNG.standard_normal((2 * N, 3)))
"""Log-normal features, most of them within a small part of their standard deviation."""
WAVES = np.sin(np.log(HEAVY)).sum(axis=1) + 0.1 * RNG.standard_normal(2 * N)
SMALL = {"n_centers": 200, "metric": "none", "random_state": 0}


def error(model: sk.KernelRegressor) -> float:
    """Return the mean squared error on the second half of the rows."""
    return float(np.mean((model.predict(HEAVY[N:]) - WAVES[N:]) ** 2))


def fit(scale: str, X: np.ndarray, y: np.ndarray) -> sk.KernelRegressor:
    """Return a regressor with a value of data.scale."""
    return sk.KernelRegressor(scale=scale, **SMALL).fit(X, y)


def test_scores_are_used_if_they_reduce_loo_error() -> None:
    auto, plain = (fit(scale, HEAVY[:N], WAVES[:N]) for scale in ("auto", "feature"))
    assert error(auto) < 0.5 * error(plain)
    assert len(auto.get_feature_names_out()) == 6
    assert len(plain.get_feature_names_out()) == 3


@pytest.mark.parametrize("kind", ["normal", "noise", "linear"])
def test_scores_are_not_used_without_a_gain(kind: str) -> None:
    X, y = HEAVY[:N], RNG.standard_normal(N)
    if kind == "normal":
        X = np.log(X)
        y = np.sin(X).sum(axis=1)
    elif kind == "linear":
        y = X @ [1.0, -1.0, 1.0]
    assert len(fit("auto", X, y).get_feature_names_out()) == 3


def test_skewed_targets_are_compared_on_log_scale() -> None:
    """Check that a gain is seen on a log scale; on the scale of the targets a few large squares
    hide it."""
    noise = np.random.default_rng(3).standard_normal(len(HEAVY))
    y = np.exp(5 * WAVES + 0.3 * noise)
    auto = fit("auto", HEAVY[:N], y[:N])
    assert len(auto.get_feature_names_out()) == 6
    plain = sk.KernelRegressor(target_transform="none", **SMALL).fit(HEAVY[:N], y[:N])
    assert len(plain.get_feature_names_out()) == 3


def test_given_kernel_or_bandwidth_keeps_features() -> None:
    for setting in ({"bandwidth": 2.0}, {"kernel": "gaussian"}, {"kernel": sk.Laplace(2.0)}):
        model = sk.KernelRegressor(**SMALL, **setting).fit(HEAVY[:N], WAVES[:N])
        assert len(model.get_feature_names_out()) == 3


@pytest.mark.slow
def test_numeric_table_columns_have_scores() -> None:
    frame = pd.DataFrame(HEAVY, columns=["a", "b", "c"]).assign(word=["x", "y"] * N)
    model = sk.KernelRegressor(**SMALL).fit(frame[:N], WAVES[:N])
    assert list(model.get_feature_names_out())[-3:] == [f"quantile of {name}" for name in "abc"]
    assert np.mean((model.predict(frame[N:]) - WAVES[N:]) ** 2) < 0.5 * error(
        fit("feature", HEAVY[:N], WAVES[:N])
    )


@pytest.mark.slow
def test_importances_are_summed_by_column(tmp_path: Path) -> None:
    y = np.sin(np.log(HEAVY[:, 1]))
    model = sk.KernelRegressor(n_centers=200, metric="learn", random_state=0).fit(HEAVY[:N], y[:N])
    model.save(tmp_path / "model.zarr")
    for fitted_model in (model, sk.load(tmp_path / "model.zarr")):
        assert fitted_model.metric_importances_.shape == (6,)
        assert fitted_model.feature_importances_.argmax() == 1
        np.testing.assert_allclose(fitted_model.feature_importances_.sum(), 1)
        np.testing.assert_array_equal(fitted_model.predict(HEAVY[N:]), model.predict(HEAVY[N:]))


@pytest.mark.slow
def test_stopped_run_resumes_with_same_bits(tmp_path: Path) -> None:
    def source() -> BaseSource:
        return sk.ArraySource(HEAVY[:N].astype(np.float32), WAVES[:N], unit_rows=100)

    overrides = {"data.scale": "quantiles", "model.bandwidth": "auto", "model.n_centers": 64}
    uninterrupted, killed = (settings(tmp_path / name, **overrides) for name in ("whole", "killed"))
    result = finished(uninterrupted, source=source(), test=source())
    assert scores_among(result.model.fixed_transforms) is not None
    stopped(killed, 3, source=source(), test=source())
    finished(killed, source=source(), test=source())
    assert_same_bits(final(tmp_path / "killed"), final(tmp_path / "whole"))
    loaded = sk.load(tmp_path / "whole")
    heavy_rows = HEAVY[N:].astype(np.float32)
    np.testing.assert_array_equal(loaded.predict(heavy_rows), result.model.values(heavy_rows)[:, 0])


@pytest.mark.parametrize("uses_scores", [True, False])
def test_resumed_run_keeps_its_choice(
    uses_scores: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a resume keeps the choice, also if this machine would choose differently."""
    source = sk.ArraySource(HEAVY[:N].astype(np.float32), WAVES[:N], unit_rows=100)
    auto = {"data.scale": "auto", "model.kernel": "auto", "model.bandwidth": "auto"}
    config = settings(tmp_path / "run", **auto, **{"model.metric": "none"})
    monkeypatch.setattr(sampled_features, "_are_better", lambda *_: uses_scores)
    stopped(config, 3, source=source, test=source)
    monkeypatch.setattr(sampled_features, "_are_better", lambda *_: not uses_scores)
    result = finished(config, source=source, test=source)
    assert (scores_among(result.model.fixed_transforms) is not None) == uses_scores


@pytest.mark.slow
def test_warm_start_and_partial_fit_keep_features(tmp_path: Path) -> None:
    model = sk.KernelRegressor(warm_start=True, epochs=2, **SMALL).fit(HEAVY[:N], WAVES[:N])
    before = model.get_feature_names_out().tolist()
    model.fit(HEAVY[:N], WAVES[:N])
    assert model.get_feature_names_out().tolist() == before
    first = sk.KernelRegressor(**SMALL)
    for _ in range(2):  # the first block may differ from later ones
        first.partial_fit(HEAVY[:N], WAVES[:N])
        assert len(first.get_feature_names_out()) == 3
    parameters = {"epochs": 2, "solver": "block", "run_dir": str(tmp_path / "run")}
    sk.KernelRegressor(**SMALL, **parameters).fit(HEAVY[:N], WAVES[:N])
    loaded = sk.load(tmp_path / "run").partial_fit(HEAVY[N:], WAVES[N:])
    assert loaded.get_feature_names_out().tolist() == before


def test_images_have_no_scores() -> None:
    X = np.zeros((300, 4, 4, 1), np.float32)
    with pytest.raises(ConfigError, match="are vectors"):
        finished(settings(**{"data.scale": "quantiles"}), source=sk.ArraySource(X, X[:, 0, 0, 0]))


@pytest.mark.slow
def test_tuned_kernel_keeps_its_features() -> None:
    actual = sk.tune(
        HEAVY[:500], WAVES[:500], estimator=sk.KernelRegressor(**SMALL), kernels=["laplace"],
        refine=0, progress=False,
    )  # fmt: skip
    model = actual.estimator.fit(HEAVY[:N], WAVES[:N])
    assert len(model.get_feature_names_out()) == 6
    assert error(model) < 0.5 * error(fit("feature", HEAVY[:N], WAVES[:N]))
    assert 'scale = "quantiles"' in actual.toml


def test_given_metric_keeps_its_features() -> None:
    model = sk.KernelRegressor(n_centers=50, metric=np.ones(3)).fit(HEAVY[:N], WAVES[:N])
    assert len(model.get_feature_names_out()) == 3


def test_scores_are_computed_after_transforms() -> None:
    @sk.deterministic
    def tenfold(X: np.ndarray, Y: np.ndarray, rng: sk.RowRandom) -> tuple[np.ndarray, np.ndarray]:
        return X * 10.0, Y

    plain, rescaled = (
        sk.KernelRegressor(scale="quantiles", transforms=transforms, **SMALL).fit(
            HEAVY[:N], WAVES[:N]
        )
        for transforms in ((), (tenfold,))
    )
    assert error(rescaled) == pytest.approx(error(plain), rel=1e-3)


def test_zero_weight_rows_do_not_affect_scores(tmp_path: Path) -> None:
    w = np.ones(N)
    w[::3] = 0
    wild = HEAVY[:N].copy()
    wild[::3] = -1e15 * RNG.random((N // 3, 3))
    models = []
    for name, X in (("plain", HEAVY[:N]), ("wild", wild)):
        sk.ingest_store(X, tmp_path / name, y=WAVES[:N], sample_weight=w)
        model = sk.KernelRegressor(scale="quantiles", **SMALL).fit(tmp_path / name)
        models.append(error(model))
    assert models[1] == pytest.approx(models[0], rel=0.05)
