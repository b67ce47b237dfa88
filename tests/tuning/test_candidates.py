"""Check the sizes and settings of the candidates of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import ConfigError
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.resolve.training_data import open_data
from streamkern.train.train import train
from streamkern.tuning.candidates import Candidates, copies_and_epochs
from streamkern.tuning.search import search_settings
from tests.runs import array_source
from tests.searches import OPEN_SETTINGS, config


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((7, 1, 1), (1, 7)),
        ((7, 50, 1), (7, 1)),
        ((7, 3, 1), (3, 3)),
        ((7, 50, 20), (1, 7)),
        ((7, 50, 2), (4, 2)),
        ((1, 5, 5), (1, 1)),
    ],
)
def test_trials_use_copies_or_epochs_of_the_run(
    arguments: tuple[int, int, int], expected: tuple[int, int]
) -> None:
    assert copies_and_epochs(*arguments) == expected


def test_large_sample_stays_within_memory(tmp_path: Path) -> None:
    X = np.zeros((2000, 20_000), np.uint8)  # 40 MB
    source = ArraySource(X, np.arange(2000) % 2)
    run = config(**{"run.memory": 100 * 2**20})
    candidates = Candidates(run, open_data(run, source), folds=1)
    assert len(candidates.sample.X) == 25 * 2**20 // 20_008
    assert candidates.trial.run.memory == 100 * 2**20 - 2 * candidates.sample.X.nbytes
    with pytest.raises(ConfigError, match=r"rows=1500 of 19.5 KiB need .* give at most 1310 rows"):
        search_settings(run, source=source, rows=1500)


@pytest.mark.parametrize("method", ["balanced", "kmeans", "rpcholesky"])
def test_centers_are_chosen_like_in_the_run(method: str) -> None:
    source = array_source()
    run = config(
        **{
            "model.centers": method, "model.n_centers": 30, "model.bandwidth": 2.0,
            "solver.ridge": 1e-4,
        }
    )  # fmt: skip
    tuned = search_settings(run, source=source, bandwidths=[2.0], ridges=[1e-4], epochs=1)
    candidates = Candidates(run, open_data(run, source), folds=1, epochs=1)
    assert (candidates.trial.model.centers, candidates.trial.model.n_centers) == (method, 30)
    errors = []
    for choice in (method, "random"):
        one = candidates.config("laplace", 2.0, 1e-4).with_overrides({"model.centers": choice})
        result = train(one, source=candidates.split(0)[0], test=candidates.split(0)[1])
        result.model.backend.close()
        errors.append(result.metrics["test_mse"])
    assert tuned.best["held_out_mse"] == errors[0] != errors[1]


@pytest.mark.parametrize(
    ("settings", "rows", "n_centers"),
    [
        ({"model.n_centers": 100}, None, 100),  # the sample is the whole data: 108 rows to fit
        ({"model.n_centers": 135}, None, 108),
        ({"model.n_centers": 100}, 100, 50),
        ({"model.n_centers": "auto"}, None, 50),
        ({"model.features": "fourier", "model.n_features": 90, "model.kernel": "gaussian",
          "model.n_centers": "auto"}, None, 90),
    ],
)  # fmt: skip
def test_trial_sizes_equal_those_of_the_run_if_possible(
    settings: dict[str, Any], rows: int | None, n_centers: int
) -> None:
    source, run = array_source(), config(**OPEN_SETTINGS, **settings)
    candidates = Candidates(run, open_data(run, source), folds=1, rows=rows, epochs=1)
    sizes = candidates.sizes()
    requested = settings.get("model.n_features", settings["model.n_centers"])
    assert sizes["centers"] == n_centers
    assert (sizes["run_centers"], sizes["run_rows"]) == (requested, 135)


FOURIER: dict[str, Any] = {
    "model.features": "fourier", "model.n_centers": "auto", "model.kernel": "gaussian",
    **OPEN_SETTINGS,
}  # fmt: skip


@pytest.mark.parametrize(
    ("n_features", "requested", "expected"), [("auto", None, 50), (20, None, 20), ("auto", 64, 64)]
)
def test_fourier_features_are_reduced_like_centers(
    n_features: int | str, requested: int | None, expected: int
) -> None:
    run = config(**FOURIER, **{"model.n_features": n_features})
    tuned = search_settings(
        run, source=array_source(), centers=requested, ridges=[1e-4], refine=0, epochs=1
    )
    assert tuned.search["centers"] == expected
    assert len(tuned.table) == 6
    assert tuned.config.model.n_features == n_features


def test_odd_number_of_fourier_features_is_refused() -> None:
    with pytest.raises(ConfigError, match="n_features=7 must be even"):
        search_settings(config(**FOURIER), source=array_source(), centers=7)


def test_search_ignores_warm_start(tmp_path: Path) -> None:
    run = config(**{"solver.name": "falkon", "solver.warm_start": str(tmp_path / "none")})
    tuned = search_settings(run, source=array_source(), bandwidths=[2.0], ridges=[1e-4])
    assert tuned.search["epochs"] == 20
    assert tuned.config.solver.warm_start == str(tmp_path / "none")
