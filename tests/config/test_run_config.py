"""Check the settings of a run: run files, overrides, and what a resume may change."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import ConfigError
from streamkern.config import run_config as config_module
from streamkern.config.data import DataConfig
from streamkern.config.run_config import FREE_AT_RESUME, NEUTRAL_VALUES, RunConfig, load_run_file
from streamkern.config.solver import solver_options
from streamkern.config.toml import toml
from streamkern.train.differences import record_differences
from streamkern.train.resolve.resolved_run import open_run


def config(**tables: dict[str, Any]) -> RunConfig:
    """Return the settings of a run with a training set, from these tables."""
    return RunConfig.from_tables({"data": {"train": "a.zarr"}, **tables})


def test_config_requires_only_training_set() -> None:
    run_config = config()
    assert run_config == RunConfig(data=DataConfig(train="a.zarr"))
    assert run_config.data.batch_size == run_config.solver.name == run_config.run.memory == "auto"
    assert run_config.run.checkpoint_cadence == (None, None)


def test_documented_run_file_is_valid() -> None:
    doc = config_module.__doc__
    assert doc is not None
    block = doc.partition("::\n")[2].partition("\nA wrong setting")[0]
    run_config = RunConfig.from_tables(tomllib.loads(block))
    assert run_config.run.memory == 8 * 2**30


# A value of every setting; its numbers are exact in float32 and uint16.
ALL_SETTINGS: dict[str, dict[str, Any]] = {
    "data": {
        "train": ["a.zarr", "b.zarr"], "weights": [0.5, 2], "test": "c.zarr", "x": "X", "y": "y",
        "sample_weight": "w", "foreign": True, "class_weight": {"a": 0.5, "b": 2},
        "class_sampling": {"a": 0.5, "b": 2}, "copies": 2,
        "transforms": [{"kind": "noise", "sigma": 0.5}, {"kind": "crop", "padding": 2}],
        "scale": "none", "epochs": 3, "batch_size": 8, "prefetch_threads": 2,
        "dask": "tcp://host:8786", "cache": "cache", "cache_size": 512,
        "storage_options": {"deadline_s": 0.5, "keys": [1, 2]},
    },
    "model": {
        "kernel": {"kind": "sum", "parts": [{"kind": "laplace", "bandwidth": 0.5}, "linear"],
                   "weights": [0.5, 2]},
        "bandwidth": "auto", "metric": "m.npy", "n_centers": 20, "centers": "z.npy",
        "features": "kernel", "n_features": "auto", "fit_intercept": False, "loss": "squared_error",
        "quantile": None, "effort": "best", "target_transform": "none",
        "patch_features": 64, "patch_size": 5, "patch_grid": 3,
    },
    "solver": {
        "name": "block", "block_size": 10, "factor_dtype": "auto", "ridge": 0.5,
        "n_nystrom": "auto", "level": "auto",
        "period": "auto", "projection": "auto", "projection_epochs": 1,
        "projection_nystrom": "auto", "projection_level": "auto", "projection_batch": "auto",
        "average": False, "damping": 0.5, "step_scale": 0.5, "tolerance": None,
        "posterior": False, "warm_start": "runs/w",
    },
    "run": {
        "run_dir": "runs/a", "precision": "exact", "device": "cpu", "accelerator": "none",
        "memory": 4096, "device_memory": 4096, "threads": 2, "ranks": 2, "min_ranks": 2,
        "center_ranks": 2,
        "cluster": "tcp://h:1", "random_state": 3,
        "checkpoint_every": 5, "keep_checkpoints": 2, "evaluate_every": 0, "evaluate_at": [5, 7],
        "log": False, "tensorboard": "events", "mlflow": "mlruns", "early_stopping": True,
        "validation_fraction": 0.25, "n_iter_no_change": 3, "calibrate": True,
    },
}  # fmt: skip


PATH_SETTINGS = {
    *("train", "test", "cache", "metric", "centers", "warm_start", "run_dir"),
    *("tensorboard", "mlflow"),
}


SOLVERS: list[dict[str, Any]] = [
    {"name": "block", "block_size": 100, "factor_dtype": "float16", "ridge": 1e-6,
     "average": False, "damping": 1e-5, "step_scale": 0.5, "warm_start": "runs/b"},
    {"name": "eigenpro4", "n_nystrom": 500, "level": 50, "period": 10, "projection": "inexact",
     "projection_epochs": 3, "projection_nystrom": 400, "projection_level": 40,
     "projection_batch": 30, "average": False, "step_scale": 0.5, "warm_start": "runs/b"},
    {"name": "falkon", "ridge": 1e-6, "tolerance": 1e-3, "warm_start": "runs/b"},
]  # fmt: skip
"""All options of some solvers."""


@pytest.mark.parametrize("solver", SOLVERS)
def test_run_file_accepts_every_setting(solver: dict[str, Any], tmp_path: Path) -> None:
    tables = ALL_SETTINGS | {"solver": solver}
    tables["run"] = tables["run"] | {"memory": "1.5 GiB", "checkpoint_every": "5 min"}
    tables["model"] = {k: v for k, v in tables["model"].items() if v is not None}
    (tmp_path / "run.toml").write_text(toml(tables), encoding="utf-8")
    run_config = load_run_file(tmp_path / "run.toml")
    assert run_config == RunConfig.from_tables(tables)
    assert run_config.data.transform_tables == tables["data"]["transforms"]
    assert run_config.data.train_urls == ("a.zarr", "b.zarr")
    assert run_config.data.weights == (0.5, 2.0)
    assert run_config.data.class_weight == {"a": 0.5, "b": 2.0}
    assert run_config.run.memory == 3 * 2**29
    assert run_config.run.checkpoint_cadence == (None, 300.0)
    assert set(solver) == {"name", *solver_options(run_config.solver.name)}
    assert all(getattr(run_config.solver, key) == value for key, value in solver.items())


def as_numpy(value: Any, key: Any = None) -> Any:
    """Return a setting with its numbers as NumPy scalars, and its paths as Path."""
    if isinstance(value, dict):
        return {k: as_numpy(item, k) for k, item in value.items()}
    if isinstance(value, list):
        return [as_numpy(item, key) for item in value]
    if isinstance(value, str):
        return Path(value) if key in PATH_SETTINGS else np.str_(value)
    kind = np.bool_ if isinstance(value, bool) else np.uint16 if isinstance(value, int) else None
    return value if value is None else (kind or np.float32)(value)


def test_numpy_scalars_and_paths_equal_python_values() -> None:
    stages = {name: set(type(stage).model_fields) for name, stage in RunConfig()}
    assert stages == {name: set(table) for name, table in ALL_SETTINGS.items()}
    plain, from_numpy = (
        RunConfig.from_tables(ALL_SETTINGS),
        RunConfig.from_tables(as_numpy(ALL_SETTINGS)),
    )
    assert from_numpy == plain
    assert from_numpy.model_dump_json() == plain.model_dump_json()
    assert from_numpy.data.storage_options == plain.data.storage_options
    assert type(from_numpy.data.batch_size) is int
    assert plain.run.checkpoint_cadence == (5, None)
    assert config(run={"evaluate_at": np.array([5, 7])}).run.evaluate_at == (5, 7)
    overridden = plain.with_overrides({"run.threads": np.int64(3), "run.run_dir": Path("b")})
    assert (overridden.run.threads, overridden.run.run_dir) == (3, "b")


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config().data.epochs = 3


def test_weights_belong_to_list_of_stores() -> None:
    run_config = config(data={"train": ["a", Path("b")], "weights": [1, 2]})
    assert run_config.data.train == ("a", "b")
    assert run_config.identity()["data"]["weights"] == [1.0, 2.0]
    assert config().data.train_urls == ("a.zarr",)


@pytest.mark.parametrize("tables", [{}, {"data": {"test": "b.zarr"}}])
def test_run_without_training_set_is_refused(tables: dict[str, dict[str, str]]) -> None:
    """Check that only opening the run fails, because rows may be given besides the settings."""
    with pytest.raises(ConfigError, match=r"^data\.train is missing: it must be a path or URL"):
        open_run(RunConfig.from_tables(tables))


def test_run_file_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    with pytest.raises(ConfigError, match=r"run\.toml' cannot be read \(No such file"):
        load_run_file(path)
    path.write_text("[data\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.toml' is not valid TOML \(.*line 1"):
        load_run_file(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"run\.toml' is not valid TOML"):
        load_run_file(path)
    path.write_text('[data]\ntrain = "a"\nepochs = 0\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.toml': data\.epochs=0 must be"):
        load_run_file(path)


def test_overrides_are_validated() -> None:
    run_config = config(solver={"name": "eigenpro4", "level": 10})
    changed = run_config.with_overrides(
        {"solver.name": "eigenpro2", "data.epochs": 3, "run.run_dir": None}
    )
    assert (changed.solver.name, changed.solver.level, changed.data.epochs) == ("eigenpro2", 10, 3)
    assert run_config.solver.name == "eigenpro4"
    assert run_config.with_overrides({}) == run_config
    for overrides, message in [
        ({"solver.levl": 3}, r"did you mean solver\.level\?"),
        ({"solver.name": "auto"}, r"solver\.level=10 is not defined for solver 'auto'"),
        ({"solver.n_nystrom": 10}, r"solver\.level=10 must lie between 1 and"),
        ({"level": 3}, r"^level is not a setting; did you mean solver\.level\?"),
        ({"sovler.level": 3}, r"^sovler is not a setting; did you mean solver\?"),
    ]:
        with pytest.raises(ConfigError, match=message):
            run_config.with_overrides(overrides)


def test_unrounded_noise_keeps_its_old_serialisation() -> None:
    plain, rounded = (
        config(data={"transforms": [{"kind": "noise", "sigma": 1.0, "round": on}]})
        for on in (False, True)
    )
    tables = [{"kind": "noise", "sigma": 1.0}], [{"kind": "noise", "sigma": 1.0, "round": True}]
    for noise_config, table in zip((plain, rounded), tables, strict=True):
        assert noise_config.data.transform_tables == table
        assert noise_config.identity()["data"]["transforms"] == table
        assert config(data={"transforms": table}) == noise_config


def test_identity_is_json_without_settings_free_at_resume() -> None:
    run_config = config(data={"train": "a", "transforms": [{"kind": "noise", "sigma": 0.1}]})
    free = run_config.with_overrides(
        {
            "data.prefetch_threads": 7,
            "data.dask": "tcp://host:8786",
            "data.cache": "scratch",
            "data.cache_size": 10**9,
            "data.test": "b",
            "data.storage_options": {"a": 1},
            "run.run_dir": "r",
            "run.device": "cpu",
            "run.accelerator": "none",
            "run.memory": "1 GiB",
            "run.device_memory": "1 GiB",
            "run.threads": 2,
            "run.ranks": 3,
            "run.min_ranks": 2,
            "run.center_ranks": 2,
            "run.cluster": "tcp://host:8786",
            "run.checkpoint_every": "5 s",
            "run.keep_checkpoints": 9,
            "run.evaluate_every": 3,
            "run.evaluate_at": [5],
            "run.log": False,
        }
    )
    assert run_config.identity() == free.identity()
    for path in FREE_AT_RESUME:
        section, _, key = path.partition(".")
        assert hasattr(getattr(run_config, section), key)
        assert key not in free.identity()[section]
    recorded_identity = json.loads(json.dumps(run_config.identity()))
    assert record_differences(recorded_identity, run_config.identity()) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("solver.block_size", 200, "solver.block_size: was 'auto', now 200"),
        ("data.train", "b", "data.train: was 'a.zarr', now 'b'"),
        ("data.epochs", 2, "data.epochs: was 'auto', now 2"),
        ("run.random_state", 1, "run.random_state: was 0, now 1"),
        ("data.transforms", [{"kind": "flip"}], "data.transforms: was [], now [flip]"),
    ],
)
def test_changed_setting_is_named(key: str, value: object, message: str) -> None:
    run_config = config()
    assert record_differences(
        run_config.identity(), run_config.with_overrides({key: value}).identity()
    ) == [message]


def test_new_setting_keeps_identity_of_older_runs() -> None:
    """Check that a new setting is in NEUTRAL_VALUES, so that its neutral value is not recorded."""
    solver = "average block_size damping level n_nystrom name period projection ridge step_scale"
    assert {name: " ".join(sorted(table)) for name, table in config().identity().items()} == {
        "data": "batch_size copies epochs foreign scale train transforms x y",
        "model": "bandwidth centers features fit_intercept kernel metric n_centers n_features",
        "run": "calibrate precision random_state",
        "solver": solver,
    }
    for path, neutral in NEUTRAL_VALUES.items():
        section, _, key = path.partition(".")
        assert key not in config().with_overrides({path: neutral}).identity()[section]


def test_importing_config_loads_no_heavy_modules() -> None:
    code = (
        "import sys, streamkern.config.run_config\n"
        "print(*{m.partition('.')[0] for m in sys.modules})"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    # NumPy is loaded, because the kernels check their parameters.
    heavy = {"zarr", "dask", "sklearn", "scipy", "cupy"}
    assert not heavy & set(completed.stdout.split())
