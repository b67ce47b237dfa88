"""Check the rules of settings: one sentence for each mistake, suggestions, and secrets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import streamkern
from streamkern.basics.errors import ConfigError, StreamkernError
from streamkern.config.data import DataConfig
from streamkern.config.model import ModelConfig
from streamkern.config.names import OTHER_PARAMETERS, PARAMETER_SETTINGS
from streamkern.config.rules import FOREIGN_WORDS
from streamkern.config.run_config import ExecutionConfig, RunConfig
from streamkern.config.solver import SolverConfig
from streamkern.filesystem.engines import _refuse_unknown


def config(**tables: dict[str, Any]) -> RunConfig:
    """Return the settings of a run with a training set, from these tables."""
    return RunConfig.from_tables({"data": {"train": "a.zarr"}, **tables})


def error_message(**tables: Any) -> str:
    """Return the message about a mistake in these tables."""
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_tables({"data": {"train": "a.zarr"}, **tables})
    return str(caught.value)


SECRET = "hunter2/and+more"


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


def test_every_invalid_setting_is_reported_at_once() -> None:
    message = error_message(
        data={"train": "a", "epochs": 0, "epocs": 1}, run={"memory": "x"}
    ).split("\n")
    named = [line.split("=")[0].split(" ")[0] for line in message]
    assert named == ["data.epochs", "data.epocs", "run.memory"]


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


def test_section_built_directly_names_same_key() -> None:
    with pytest.raises(ConfigError, match=r"^run\.threads=0 must be"):
        ExecutionConfig(threads=0)
    with pytest.raises(ConfigError, match=r"^model\.kernel='rbv' must be \"auto\", one of"):
        ModelConfig(kernel="rbv")  # type: ignore[arg-type]


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
