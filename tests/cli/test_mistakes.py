"""Check that wrong words on the command line are answered with the correct ones."""

from __future__ import annotations

import os
import shlex
import socket
from pathlib import Path

import numpy as np
import pytest

import streamkern as sk
from streamkern.cli.main import COMMANDS, _load_named_command, run_command
from streamkern.cli.mistakes import _OPTION_ALIASES, _SETTING_ALIASES
from streamkern.cli.vocabulary import INGEST_COMMAND_OPTIONS
from streamkern.config.run_config import RunConfig
from streamkern.filesystem import objects

DONE, USAGE = 0, 2
X = np.random.default_rng(0).normal(size=(400, 3))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with rides.csv and its store rides.zarr."""
    monkeypatch.chdir(tmp_path)
    rows = "\n".join(f"{a},{b},{c}" for a, b, c in X)
    Path("rides.csv").write_text(f"x,w,fare\n{rows}\n")
    sk.ingest_store("rides.csv", "rides.zarr", y="fare")
    return tmp_path


def error_of(line: str, capsys: pytest.CaptureFixture[str], code: int = USAGE) -> str:
    """Return the error of a command line that ends with `code`."""
    capsys.readouterr()
    assert run_command(shlex.split(line)) == code, line
    return capsys.readouterr().err.strip()


# Command line -> a part of the error message.
MISTAKES = {
    "ingest rides.csv": "OUT is missing",
    "ingest": "INPUT and OUT are missing",
    "predict runs/a rides.csv": "OUT is missing",
    "predict runs/a": "INPUT and OUT are missing",
    "evaluate runs/a": "INPUT is missing",
    "append rides.zarr": "INPUT is missing",
    "report": "RUN_DIR is missing",
    "train a.toml b.toml": "usage: streamkern train [RUN.toml]",
    "ingest rides.csv o.zarr --target fare": "did you mean --y?",
    "train --train rides.zarr --target fare": "--y fare",
    "train --train rides.zarr --n-centers 5": "--set model.n_centers=5",
    "train --train rides.zarr --n-centers=5": "--set model.n_centers=5",
    "train --train rides.zarr --seed 3": "--set run.random_state=3",
    "train --train rides.zarr --keep-checkpoints 3": "--set run.keep_checkpoints=3",
    "predict runs/a rides.csv o.csv --ridge 1": "to streamkern train as --set solver.ridge=1",
    "train --train rides.zarr --set solver=block": "did you mean --solver?",
    "train --train rides.zarr --set kernel=laplace": "did you mean model.kernel?",
    "train --train rides.zarr --set model.solver=block": "did you mean --solver?",
    "train --train rides.zarr --set solver.nme=block": "did you mean --solver?",
    "train --train rides.zarr --set run=3": "run is a section of settings; name one",
    "train rides.csv": "streamkern ingest rides.csv rides.zarr --y NAME",
    "tune rides.csv": "--train rides.zarr",
    "plan rides.zarr": "give it as --train rides.zarr",
    "info nothing": "there is nothing at nothing",
    "fit x": "did you mean streamkern train?",
    "help": "did you mean streamkern --help?",
    "help train": "did you mean streamkern train --help?",
    "-v": "did you mean --version?",
    "train -v": "streamkern train --help lists the options",
    "trian": "did you mean streamkern train?",
    "ingest rides.csv o.zarr --y": "--y needs a value; streamkern ingest --help",
    "info runs/a --importances": "--importances needs a value; streamkern info --help",
    "train --train rides.zarr --epochs abc": '--epochs abc must be "auto" or a whole number',
    "ingest rides.csv o.zarr --seed x": "--seed x must be a whole number; correct it, or leave",
    "predict runs/a rides.csv o.csv --interval=x": "--interval x must be a number; correct it",
}


def test_mistakes_are_answered_with_correct_option(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {line: error_of(line, capsys) for line in MISTAKES}
    assert {line: error for line, error in errors.items() if MISTAKES[line] not in error} == {}


def test_answer_to_unknown_option_works_unchanged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = "plan --train rides.zarr --no-measure"
    for mistake, suggestion in (
        ("--n-centers 5", "--set model.n_centers=5"), ("--ridge 1e-3", "--set solver.ridge=1e-3"),
        ("--seed 3", "--set run.random_state=3"),
    ):  # fmt: skip
        assert error_of(f"{plan} {mistake}", capsys).endswith(suggestion)
        assert run_command(shlex.split(f"{plan} {suggestion}")) == DONE
    assert (
        run_command(shlex.split(f"{plan} --epochs auto")) == DONE
    )  # a value that an error proposes
    assert "--train rides.zarr" in error_of("plan rides.zarr", capsys)
    assert run_command(shlex.split(plan)) == DONE


def test_file_as_test_store_suggests_ingest_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path("rides.csv").read_text().splitlines()
    for k, has_words in enumerate((False, True)):
        rows = [f"{line},{w}" for line, w in zip(text[1:], "uv" * 200, strict=True)]
        table = [f"{text[0]},c", *rows] if has_words else text
        Path(f"r{k}.csv").write_text("\n".join(table))
        assert run_command(shlex.split(f"ingest r{k}.csv r{k}.zarr --y fare")) == DONE
        Path(f"later{k}.csv").write_text("\n".join(table[:50]))
        plan = f"plan --train r{k}.zarr --no-measure --test "
        answer = error_of(f"{plan} later{k}.csv", capsys)
        assert ("--like" in answer) == has_words, answer
        _, _, command = answer.partition("with streamkern ")
        assert run_command(shlex.split(command)) == DONE, command
        assert run_command(shlex.split(f"{plan} later{k}.zarr")) == DONE


@pytest.mark.parametrize(
    ("mistake", "suggestion"),
    [
        ("train = rides.zarr", 'train = "rides.zarr"'),
        ("x = X # rows", 'x = "X"'),
        ("cache_size = 2 GiB", 'cache_size = "2 GiB"'),
        ("foreign = False", "foreign = false"),
        ("copies: 2", "copies = 2"),
        ('scale: "auto"', 'scale = "auto"'),
    ],
)
def test_unquoted_text_in_run_file_is_answered_with_correct_line(
    mistake: str, suggestion: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_line = "" if mistake.startswith("train") else 'train = "rides.zarr"\n'
    Path("run.toml").write_text(f"[data]\n{train_line}{mistake}\n")
    assert f", as {suggestion}" in error_of("plan run.toml --no-measure", capsys)
    Path("run.toml").write_text(f"[data]\n{train_line}{suggestion}\n")
    assert run_command(shlex.split("plan run.toml --no-measure")) == DONE, suggestion


def test_folder_of_runs_is_answered_with_working_commands(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = sk.KernelRegressor(n_centers=9, epochs=1, metric="none", bandwidth=2.0, ridge=1e-3)
    model.fit(X, X[:, 0]).save("runs/first")
    text = error_of("info runs", capsys)
    lists, describes = (part for part in text.replace(", or", "").split("streamkern ")[1:])
    for command in (lists.partition(" describe")[0], describes):
        assert run_command(shlex.split(command)) == DONE, command


def test_suggested_settings_and_options_exist() -> None:
    settings = {
        f"{section}.{name}"
        for section, field in RunConfig.model_fields.items()
        for name in field.annotation.model_fields  # type: ignore[union-attr]
    }
    assert set(_SETTING_ALIASES.values()) <= settings
    options = {
        word for name in COMMANDS for p in _load_named_command(name).params for word in p.opts
    }
    assert set(_OPTION_ALIASES.values()) <= options | {"--version"}
    of_ingest = {param.name: param.opts[0] for param in _load_named_command("ingest").params}
    assert INGEST_COMMAND_OPTIONS.items() <= of_ingest.items()


@pytest.fixture
def no_connection_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a port that refuses connections fail at once, without several seconds of retries."""
    assert objects._REFUSED_RETRY_S < 10 < objects.DEADLINE_S
    monkeypatch.setattr(objects, "_REFUSED_RETRY_S", 0.0)


@pytest.mark.usefixtures("no_connection_retries")
def test_storage_options_accept_json_and_toml(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "ab")
    for value in ('{"endpoint_url": "http://127.0.0.1:1"}', '{endpoint_url="http://127.0.0.1:1"}'):
        line = "info s3://b/a.zarr --storage-option engine=s3fs"
        text = error_of(f"{line} --storage-option 'client_kwargs={value}'", capsys, code=3)
        assert "nothing listens at this address (connection refused, tries: 1)" in text, text
    text = error_of("info s3://b/a.zarr --storage-option 'client_kwargs={a:unshown}'", capsys)
    assert "neither JSON nor TOML" in text
    assert "unshown" not in text  # no message shows the given value


@pytest.mark.usefixtures("no_connection_retries")
def test_refused_connection_is_reported_quickly(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        text = error_of(f"info {url}/x", capsys, code=3)
        assert "nothing listens at this address (connection refused, tries: 1)" in text, text
        text = error_of(f"ingest {url}/x.csv o.zarr --y 0", capsys, code=3)
        assert "nothing listens at this address (connection refused)" in text, text


def test_predict_errors_name_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sk.KernelRegressor(
        n_centers=9, epochs=1, metric="none", bandwidth=2.0, ridge=1e-3, run_dir="runs/a"
    ).fit("rides.zarr")
    text = error_of("predict runs/a rides.csv o.csv --interval 0.9", capsys)
    assert text.endswith("train with --set run.calibrate=true"), text
    assert not os.path.exists("o.csv")
    quick = "--epochs 1 --set model.n_centers=9 --set model.metric=none"
    options_text = text.partition("train with ")[2]
    assert (
        run_command(
            shlex.split(f"train --train rides.zarr --run-dir runs/b {quick} {options_text}")
        )
        == DONE
    )
    assert run_command(shlex.split("predict runs/b rides.csv o.csv --interval 0.9")) == DONE


def test_formulas_are_escaped_on_request(folder: Path) -> None:
    labels = np.array(["=1+2", "@x", "-5", "-a", "plain"])[np.arange(400) % 5]
    sk.ingest_store(X, "words.zarr", y=labels, targets="classes")
    sk.KernelClassifier(
        n_centers=9, epochs=1, metric="none", bandwidth=2.0, ridge=1e-3, run_dir="runs/c"
    ).fit("words.zarr")
    for option, escaped in (("", False), (" --escape-formulas", True)):
        out = f"out{int(escaped)}.csv"
        assert run_command(shlex.split(f"predict runs/c words.zarr {out}{option}")) == DONE
        cells = [line.split(",")[1] for line in Path(out).read_text().splitlines()[1:]]
        assert any(cell.endswith("=1+2") for cell in cells)
        for cell in cells:
            assert cell[0] not in "=@-" or not escaped or cell == "-5", cell
            assert cell.removeprefix("'") in labels
    assert (
        run_command(shlex.split("predict runs/c words.zarr out.parquet --escape-formulas")) == USAGE
    )


def test_append_error_gives_argument_order(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "d.csv").write_text("a,y\n1,2.5\n")
    assert "append d.zarr d.csv" in error_of("append d.csv d.zarr", capsys)
