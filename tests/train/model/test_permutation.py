"""Compare importances of columns with scikit-learn, and check where they are shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.inspection import permutation_importance
from sklearn.metrics import d2_pinball_score

import streamkern as sk
from streamkern.cli.main import run_command
from streamkern.train.model.permutation import column_groups

N = 600
RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {"a": RNG.normal(size=N), "w": RNG.choice(list("xyz"), N), "b": RNG.normal(size=N),
     "nothing": RNG.normal(size=N)}
)  # fmt: skip
Y = 2 * FRAME.a + 3 * (FRAME.w == "x") + 0.5 * FRAME.b
QUICK = {"n_centers": 150, "kernel": "gaussian", "bandwidth": 3.0, "ridge": 1e-4, "metric": "none"}


@pytest.fixture(scope="module")
def model() -> sk.KernelRegressor:
    """Return a regressor of the first 400 rows."""
    return sk.KernelRegressor(**QUICK).fit(FRAME[:400], Y[:400])


def test_column_importances_equal_scikit_learn(model: sk.KernelRegressor) -> None:
    ours = model.permutation_importances(FRAME[400:], Y[400:], n_repeats=20)
    theirs = permutation_importance(model, FRAME[400:], Y[400:], n_repeats=20, random_state=1)
    assert list(ours.feature_names) == list(model.feature_names_in_) == list(FRAME)
    # Both are means of 20 shuffles, whose standard deviations are known.
    spread = (theirs.importances_std + ours.importances_std) / np.sqrt(20)
    assert (np.abs(ours.importances_mean - theirs.importances_mean) < 5 * spread + 1e-3).all()
    assert ours.score == pytest.approx(model.score(FRAME[400:], Y[400:]))
    assert ours.importances_mean[3] < 0.01 < ours.importances_mean[2]


def test_quantile_importances_equal_scikit_learn_pinball_score() -> None:
    levels = [0.1, 0.5, 0.9]
    model = sk.KernelRegressor(**QUICK, loss="quantile", quantile=levels, random_state=0)
    model.fit(FRAME[:400], Y[:400])
    actual = model.permutation_importances(FRAME[400:], Y[400:])
    predictions = model.predict(FRAME[400:])
    expected = np.mean(
        [d2_pinball_score(Y[400:], predictions[:, j], alpha=a) for j, a in enumerate(levels)]
    )
    assert actual.score == pytest.approx(expected, rel=1e-6)
    assert (
        actual.importances_mean[3] < 0.05 < actual.importances_mean[2] < actual.importances_mean[0]
    )


def test_class_importances_are_decreases_of_accuracy(tmp_path: Path) -> None:
    X, labels = FRAME[["a", "b"]].to_numpy(), np.where(FRAME.a > 0, "up", "down")
    model = sk.KernelClassifier(**QUICK).fit(X[:400], labels[:400])
    actual = model.permutation_importances(X[400:], labels[400:])
    assert actual.score == pytest.approx(model.score(X[400:], labels[400:]))
    assert actual.importances_mean[0] > 0.3 > 0.05 > actual.importances_mean[1]
    assert list(actual.feature_names) == ["x0", "x1"]
    sk.ingest_store(X, tmp_path / "s.zarr", y=labels)
    from_store = model.permutation_importances(str(tmp_path / "s.zarr"), n_rows=200)
    assert from_store.importances_mean[0] > 0.3


def test_metric_importances_are_shares_by_column() -> None:
    scales = np.array([2.0, 1.0, 1.0, 1.0, 3.0, 0.5])  # a, w=x, w=y, w=z, b, nothing
    model = sk.KernelRegressor(**QUICK | {"metric": scales}).fit(FRAME[:400], Y[:400])
    squares = scales**2 / (scales**2).sum()
    np.testing.assert_allclose(model.metric_importances_, squares)
    column_shares = [squares[0], squares[1:4].sum(), squares[4], squares[5]]
    np.testing.assert_allclose(model.feature_importances_, column_shares)
    assert len(pd.Series(model.feature_importances_, model.feature_names_in_)) == 4
    features = ["a", "w=x", "w=y", "w=z", "b", "nothing"]
    assert model.get_feature_names_out().tolist() == features
    assert model.encoded_features_.tolist() == features
    names = [name for name, _ in column_groups(model._state.schema.encoder, None, 6)]
    assert names == list(FRAME)


def test_model_without_metric_suggests_permutation_importances(model: sk.KernelRegressor) -> None:
    for name in ("feature_importances_", "metric_importances_"):
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match="use permutation_importances") as caught:
            getattr(model, name)
        assert caught.value.__cause__ is None


def test_info_and_report_measure_importances(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, page = tmp_path / "rows.csv", tmp_path / "page.html"
    FRAME[400:].assign(y=Y[400:]).to_csv(data, index=False)
    arguments = ["--importances", str(data)]
    store = tmp_path / "train.zarr"
    text = FRAME[:400].assign(y=Y[:400]).to_csv(index=False)
    (tmp_path / "train.csv").write_text(text)
    sk.ingest_store(tmp_path / "train.csv", store, y="y")
    sk.KernelRegressor(**QUICK, run_dir=tmp_path / "named").fit(str(store))
    assert run_command(["info", str(tmp_path / "named"), *arguments, "--json"]) == 0
    actual = json.load(io.StringIO(capsys.readouterr().out))["permutation_importances"]
    assert [name for name, _, _ in actual["columns"]][:2] == ["a", "w"]
    assert (actual["figure"], actual["rows"]) == ("r2", 200)
    assert run_command(["info", str(tmp_path / "named"), *arguments]) == 0
    assert "by how much r2 falls where a column is shuffled" in capsys.readouterr().out
    assert run_command(["report", str(tmp_path / "named"), *arguments, "--out", str(page)]) == 0
    assert "Permutation importance" in page.read_text()
    assert run_command(["info", str(store), *arguments]) == 2
    assert "needs the model of a run" in capsys.readouterr().err


def test_zero_weights_are_refused(model: sk.KernelRegressor) -> None:
    weights = np.zeros(50)
    with pytest.raises(sk.DataError, match="all sample weights are zero"):
        model.permutation_importances(FRAME[:50], Y[:50], sample_weight=weights)
    weights[3] = 1
    with pytest.raises(sk.DataError, match="weight above 0, but only 1"):
        model.permutation_importances(FRAME[:50], Y[:50], sample_weight=weights)
    weights[4] = 1
    actual = model.permutation_importances(FRAME[:50], Y[:50], sample_weight=weights)
    assert np.isfinite([*actual.importances_mean, actual.score]).all()
