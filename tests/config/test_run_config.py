"""Test settings: valid values, error messages, secrets, and which of them a resume may change."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dask.utils import parse_bytes as dask_parse_bytes
from hypothesis import given
from hypothesis import strategies as st

import streamkern
from streamkern.basics.errors import ConfigError, StreamkernError
from streamkern.basics.values import parse_bytes, parse_seconds
from streamkern.config import run_config as config_module
from streamkern.config.data import DataConfig
from streamkern.config.model import ModelConfig
from streamkern.config.names import OTHER_PARAMETERS, PARAMETER_SETTINGS
from streamkern.config.rules import FOREIGN_WORDS
from streamkern.config.run_config import (
    FREE_AT_RESUME,
    NEUTRAL_VALUES,
    ExecutionConfig,
    RunConfig,
    load_run_file,
)
from streamkern.config.solver import SOLVER_OPTIONS, SolverConfig, solver_options
from streamkern.config.toml import toml
from streamkern.filesystem.engines import _refuse_unknown
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.run_identity import record_differences

SECRET = "hunter2/and+more"


def config(**tables: dict[str, Any]) -> RunConfig:
    return RunConfig.from_tables({"data": {"train": "a.zarr"}, **tables})


def error_message(**tables: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_tables({"data": {"train": "a.zarr"}, **tables})
    return str(caught.value)


# -- sizes and times ------------------------------------------------------------------------------


@given(
    number=st.integers(1, 10**6) | st.floats(1, 1e6, allow_nan=False),
    space=st.sampled_from(["", " "]),
    unit=st.sampled_from(["B", "kB", "KiB", "MB", "MiB", "GB", "GiB", "TB", "TiB", "M", "gib"]),
)
def test_parse_bytes_equals_dask(number: float, space: str, unit: str) -> None:
    text = f"{number:f}{space}{unit}"
    assert parse_bytes(text) == dask_parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("512 MiB", 512 * 2**20),
        ("1GB", 10**9),
        ("1.5 GiB", 3 * 2**29),
        (" 7 ", 7),
        (4096, 4096),
        (1e9, 10**9),
        ("1e9", 10**9),
    ],
)
def test_parse_bytes_accepts_units(text: str | float, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1 GiB", "1 GiBs", "1 2", "1e", "0", "0.2 B", 0, -5, 0.5, True, None]
)
def test_parse_bytes_refuses_invalid_sizes(text: object) -> None:
    with pytest.raises(ConfigError, match=r"size=.*write for example"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30 s", 30), ("5 min", 300), ("5min", 300), ("1.5 h", 5400), ("2 Hours", 7200)],
)
def test_parse_seconds_accepts_units(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "5 m", "0 s", "-5 s", "five min", "5 min 3 s"])
def test_parse_seconds_refuses_invalid_times(text: str) -> None:
    with pytest.raises(ConfigError, match=r"time=.*write for example"):
        parse_seconds(text)


# -- accepted settings ----------------------------------------------------------------------------


def test_config_requires_only_training_set() -> None:
    run_config = config()
    assert run_config == RunConfig(data=DataConfig(train="a.zarr"))
    assert run_config.data.batch_size == run_config.solver.name == run_config.run.memory == "auto"
    assert run_config.run.checkpoint_cadence == (None, None)


def test_every_setting_belongs_to_a_solver() -> None:
    all_options = {name for options in SOLVER_OPTIONS.values() for name in options}
    assert all_options == set(SolverConfig.model_fields) - {"name"}


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


def test_positional_tables_suggest_from_tables() -> None:
    for tables in ({"model": {"n_centers": 5}}, "run.toml"):
        with pytest.raises(ConfigError, match=r"from_tables\(tables\), or load_run_file\(path\)"):
            RunConfig(tables)
    with pytest.raises(ConfigError, match=r"give ModelConfig\(\*\*settings\)"):
        ModelConfig({"n_centers": 5})


def test_errors_never_suggest_the_refused_word() -> None:
    """Check settings and their values, parameters, commands, options, and options of s3fs."""
    messages: list[tuple[str, str]] = []

    def record_message(word: str, request: Callable[[], Any]) -> None:
        try:
            request()
        except (StreamkernError, TypeError, ValueError, AttributeError) as error:
            messages.append((word, str(error)))

    words = {*PARAMETER_SETTINGS, *OTHER_PARAMETERS, *FOREIGN_WORDS}
    words |= {*streamkern.__all__, *streamkern._FOREIGN_NAMES}
    words |= {"sum", "product", "auto", "region", "engine", "deadline_s", "solver.", "data.train"}
    for table in (DataConfig, ModelConfig, SolverConfig, ExecutionConfig):
        words |= {word for name in table.model_fields for word in (name, f"{table.table}.{name}")}
        for name in table.model_fields:
            for word in ("sum", "product", "size", "auto", "kind", "all"):
                record_message(word, lambda t=table, n=name, w=word: t(**{n: w}))
    for word in sorted(words):
        record_message(word, lambda w=word: RunConfig().with_overrides({w: 1}))
        record_message(
            f"model.{word}", lambda w=word: RunConfig().with_overrides({f"model.{w}": 1})
        )
        record_message(word, lambda w=word: streamkern.KernelRegressor(**{w: 1}))
        record_message(word, lambda w=word: streamkern.KernelRegressor().set_params(**{w: 1}))
        record_message(word, lambda w=word: streamkern.KernelRegressor().fit([[1]], **{w: 1}))
        record_message(word, lambda w=word: getattr(streamkern, w.upper()))
        for case in ("storage option", "key of client_kwargs"):
            record_message(
                word, lambda w=word, k=case: _refuse_unknown(k, {w: 1}, {"anon", "region_name"})
            )
    assert len(messages) > 500
    for word, message in messages:
        for suggestion in re.findall(r"did you mean ['\"]?([\w.]+?)['\"]?\?", message):
            assert suggestion != word, message


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config().data.epochs = 3


# -- error messages -------------------------------------------------------------------------------


@pytest.mark.parametrize(("section", "key", "value"), [
    ("data", "batch_size", 0), ("data", "batch_size", 1.5), ("data", "batch_size", "many"),
    ("data", "epochs", 0), ("data", "epochs", True), ("data", "copies", "3"), ("data", "x", ""),
    ("data", "train", 3), ("data", "train", []), ("data", "train", ["a", ""]),
    ("data", "train", ["a", 3]), ("data", "weights", 2), ("data", "cache", "s3://bucket/cache"),
    ("data", "cache", ""), ("data", "cache_size", "some"), ("data", "weights", [1, 0]),
    ("data", "weights", [1, True]), ("data", "weights", [float("inf")]), ("data", "transforms", 3),
    ("model", "kernel", "laplacian"), ("model", "bandwidth", 0),
    ("model", "bandwidth", float("nan")), ("model", "bandwidth", float("inf")),
    ("model", "n_centers", -1), ("model", "centers", 5), ("solver", "name", "adam"),
    ("model", "features", "wavelet"), ("solver", "ridge", -1e-9), ("solver", "step_scale", 0.0),
    ("solver", "step_scale", 1.01), ("solver", "average", 1), ("solver", "projection", None),
    ("run", "precision", "fp32"), ("run", "device", "gpu:one"), ("run", "device", "cpu\n"),
    ("run", "memory", "8 parsecs"), ("run", "memory", -1), ("run", "threads", 0),
    ("run", "random_state", -1), ("run", "random_state", None), ("run", "checkpoint_every", "5"),
    ("run", "checkpoint_every", 0), ("run", "evaluate_every", -1), ("run", "evaluate_at", [100, 0]),
    ("run", "run_dir", ""),
])  # fmt: skip
def test_invalid_value_gives_one_sentence(section: str, key: str, value: object) -> None:
    data = {"train": "a.zarr"}
    message = error_message(
        **{"data": data, section: {**(data if section == "data" else {}), key: value}}
    )
    assert message.startswith(f"{section}.{key}={value!r} must be ")
    assert re.search("; (correct it|did you mean )", message)
    assert "\n" not in message


def test_weights_belong_to_list_of_stores() -> None:
    run_config = config(data={"train": ["a", Path("b")], "weights": [1, 2]})
    assert run_config.data.train == ("a", "b")
    assert run_config.identity()["data"]["weights"] == [1.0, 2.0]
    assert config().data.train_urls == ("a.zarr",)


def test_every_invalid_setting_is_reported_at_once() -> None:
    message = error_message(
        data={"train": "a", "epochs": 0, "epocs": 1}, run={"memory": "x"}
    ).split("\n")
    named = [line.split("=")[0].split(" ")[0] for line in message]
    assert named == ["data.epochs", "data.epocs", "run.memory"]


@pytest.mark.parametrize("tables", [{}, {"data": {"test": "b.zarr"}}])
def test_run_without_training_set_is_refused(tables: dict[str, dict[str, str]]) -> None:
    """Check that only opening the run fails, because rows may be given besides the settings."""
    with pytest.raises(ConfigError, match=r"^data\.train is missing: it must be a path or URL"):
        open_run(RunConfig.from_tables(tables))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"solver": {"levl": 3}}, "solver.levl is not a setting; did you mean solver.level?"),
        ({"data": {"train": "a", "Epochs": 3}}, "did you mean data.epochs?"),
        ({"solver": {"bandwidth": 3}}, "did you mean model.bandwidth?"),
        ({"sovler": {}}, "sovler is not a setting; did you mean solver?"),
        ({"model": {"kernel": "sum"}}, "; correct it or leave it out"),
        ({"model": {"kernel": "Gausian"}}, '; did you mean "gaussian"?'),
        ({"model": {"kernel": "xx"}}, '; correct it or leave it out for the default "auto"'),
        ({"solver": {"name": "krr"}}, '; did you mean "direct"?'),
        ({"run": {"device": "cuda"}}, '; did you mean "gpu"?'),
        ({"run": {"precision": "float16"}}, "; correct it or leave it out"),
        ({"zzz": {}}, "the settings are data, model, solver, run"),
        ({"model": {"zzz": 1}}, "the settings of model are kernel, bandwidth"),
        ({"model": 3}, "model must be a table of settings; write them under [model]"),
    ],
)
def test_unknown_key_suggests_known_key(tables: dict[str, Any], message: str) -> None:
    assert message in error_message(**tables)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            {"kind": "noise", "sigma": -1},
            "data.transforms[1].sigma=-1 must be a number, 0 or above; correct it",
        ),
        ({"kind": "crop", "pading": 1}, "did you mean data.transforms[1].padding?"),
        ({"kind": "scale", "mode": "row"}, 'must be one of "global", "feature", "none"'),
        ({"kind": "blur"}, 'must be a table with kind = one of "scale", "noise", "mixup", "crop"'),
        ({"sigma": 1}, "data.transforms[1]={'sigma': 1} must be a table with kind"),
        ("noise", "data.transforms[1]='noise' must be a table with kind"),
    ],
)
def test_invalid_transform_is_named_by_position(transform: object, message: str) -> None:
    assert message in error_message(
        data={"train": "a", "transforms": [{"kind": "flip"}, transform]}
    )


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"solver": {"period": 2}}, "period=2 is not defined for solver 'auto'"),
        ({"solver": {"name": "block", "level": 2}}, "level=2 is not .* solver.name=.eigenpro1"),
        (
            {"solver": {"name": "direct", "period": 2}},
            "period=2 is .*name=.eigenpro3. or .*name=.eigenpro4.$",
        ),
        (
            {"solver": {"name": "falkon", "average": False}},
            "average=false is not defined for solver",
        ),
        ({"solver": {"name": "eigenpro2", "warm_start": "s3://a"}}, "warm_start is not defined"),
        (
            {"solver": {"name": "eigenpro4", "projection": "exact", "projection_level": 2}},
            "projection_level=2 is not .* give solver.projection='resident' or",
        ),
        (
            {"solver": {"name": "eigenpro3", "projection": "exact", "projection_batch": 8}},
            "projection_batch=8 is not defined for solver.projection='exact'",
        ),
    ],
)
def test_contradictory_settings_are_refused(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**tables)


@pytest.mark.parametrize(
    "solver",
    [
        {"name": "eigenpro2", "level": 49, "n_nystrom": 50},
        {"name": "eigenpro2", "level": 900},
        {"name": "eigenpro3", "period": 1},
    ],
)
def test_compatible_settings_are_accepted(solver: dict[str, Any]) -> None:
    assert config(solver=solver).solver == SolverConfig(**solver)


def test_section_built_directly_names_same_key() -> None:
    with pytest.raises(ConfigError, match=r"^run\.threads=0 must be"):
        ExecutionConfig(threads=0)
    with pytest.raises(ConfigError, match=r"^model\.kernel='rbv' must be \"auto\", one of"):
        ModelConfig(kernel="rbv")  # type: ignore[arg-type]


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


# -- secrets --------------------------------------------------------------------------------------


def test_storage_options_are_never_shown() -> None:
    run_config = config(data={"train": "a", "storage_options": {"secret": SECRET}})
    shown = [
        repr(run_config),
        str(run_config),
        repr(run_config.data),
        run_config.model_dump_json(),
        str(run_config.identity()),
    ]
    assert not [text for text in shown if SECRET in text]
    assert run_config.with_overrides({"data.epochs": 2}).data.storage_options == {"secret": SECRET}


def test_config_errors_never_show_secrets() -> None:
    with pytest.raises(ConfigError) as caught:
        DataConfig(train="a", storage_options=SECRET, secret=SECRET, epochs=0)  # type: ignore[arg-type,call-arg]
    error: BaseException = caught.value
    assert str(error).count("\n") == 2
    assert SECRET not in str(error)
    assert error.__cause__ is None
    assert error.__context__ is None


@pytest.mark.parametrize(
    ("section", "key"),
    [("data", "train"), ("data", "test"), ("model", "centers"), ("run", "run_dir")],
)
def test_url_with_password_is_refused_and_redacted(section: str, key: str) -> None:
    tables: dict[str, dict[str, Any]] = {"data": {"train": "a"}}
    tables.setdefault(section, {})[key] = f"s3://AKIA:{SECRET}@bucket/a.zarr"
    message = error_message(**tables)
    assert message.startswith(f"{section}.{key}='s3://***@bucket/a.zarr' must be ")
    assert "without a password" in message


def test_list_of_urls_with_password_is_refused_and_redacted() -> None:
    urls = ["s3://bucket/a", f"s3://AKIA:{SECRET}@bucket/train.zarr"]
    message = error_message(data={"train": urls})
    assert SECRET not in message
    assert "AKIA" not in message
    assert "without a password" in message


@pytest.mark.parametrize(
    "url", ["http://host:9000/a@b", "sftp://me@host/a.zarr", "s3://bucket/a:b", "C:/a@b", "a:b@c"]
)
def test_url_without_password_is_accepted(url: str) -> None:
    assert config(data={"train": url}).data.train == url


# -- overrides, identity and differences ----------------------------------------------------------


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


def test_added_or_removed_setting_is_a_difference() -> None:
    old, new = {"solver": {"a": 1, "b": None}}, {"solver": {"b": None, "c": 2}}
    assert record_differences(old, new) == [
        "solver.a: was 1, now not set",
        "solver.c: was not set, now 2",
    ]


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
