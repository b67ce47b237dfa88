"""Check that a mistake is named as in Python, in a run file, or on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.basics.message import mention, render_message
from streamkern.cli import main
from streamkern.cli.vocabulary import SETTING_OPTIONS, CommandVocabulary
from streamkern.config.names import PARAMETER_SETTINGS, parameter_vocabulary
from streamkern.config.run_config import RunConfig

rng = np.random.default_rng(0)
X = rng.standard_normal((80, 3)).astype(np.float32)
USAGE = 2

# (parameters of an estimator, options of a command, tables of a run file, the three messages)
MISTAKES: tuple[tuple[dict[str, Any], tuple[str, ...], str, tuple[str, str, str]], ...] = (
    (
        {"epochs": -1}, ("--epochs", "-1"), "[data]\nepochs = -1",
        ("epochs=-1 must be", "--epochs -1 must be", "data.epochs=-1 must be"),
    ),
    (
        {"solver": "block", "block_size": 900}, ("--solver", "block", "--set",
        "solver.block_size=900"), '[solver]\nname = "block"\nblock_size = 900',
        (
            "block_size=900 must lie between 1 and n_centers=80",
            "--set solver.block_size=900 must lie between 1 and --set model.n_centers=80",
            "solver.block_size=900 must lie between 1 and model.n_centers=80",
        ),
    ),
    (
        {"solver": "falkon", "epochs": 1}, ("--solver", "falkon", "--epochs", "1"),
        '[solver]\nname = "falkon"\n[data]\nepochs = 1',
        (
            "epochs=1 must be at least 2", "--epochs 1 must be at least 2",
            "data.epochs=1 must be at least 2",
        ),
    ),
    (
        {"solver": "sgd", "n_centers": 5}, ("--solver", "sgd", "--set", "model.n_centers=5"),
        '[solver]\nname = "sgd"\n[model]\nn_centers = 5',
        (
            "n_centers=5: solver='sgd' takes all 80 training rows",
            "--set model.n_centers=5: --solver sgd takes all 80 training rows",
            'model.n_centers=5: solver.name="sgd" takes all 80 training rows',
        ),
    ),
    (
        {"memory": "1 MiB"}, ("--memory", "1 MiB"), '[run]\nmemory = "1 MiB"',
        ("memory=1 MiB is not enough", "--memory 1 MiB is not enough", 'run.memory="1 MiB" is not'),
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wording") / "train.zarr"
    sk.ingest_store(X, path, y=X[:, 0])
    return path


@pytest.mark.parametrize(("parameters", "options", "table", "messages"), MISTAKES)
def test_mistake_is_worded_for_python_and_command_line(
    parameters: dict[str, Any],
    options: tuple[str, ...],
    table: str,
    messages: tuple[str, str, str],
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match=r"must|takes|enough") as caught:
        sk.KernelRegressor(**parameters).fit(X, X[:, 0])
    assert str(caught.value).startswith(messages[0])
    assert main.run_command(["plan", "--train", str(store), *options]) == USAGE
    assert capsys.readouterr().err.startswith(f"streamkern: {messages[1]}")
    run_file, data = tmp_path / "run.toml", f'train = "{store}"'
    if "[data]" in table:
        table = table.replace("[data]", f"[data]\n{data}")
    else:
        table = f"[data]\n{data}\n{table}"
    run_file.write_text(table)
    assert main.run_command(["plan", str(run_file)]) == USAGE
    assert messages[2] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "marked_text", "message"),
    [
        ((), mention("accelerator", "none"), "--set run.accelerator=none"),
        (("a.toml",), mention("accelerator", "none"), 'run.accelerator="none"'),
        (("a.toml", "--set", "solver.ridge=3"), mention("ridge", 3), "--set solver.ridge=3"),
        (("a.toml", "--set", "solver.ridge=3"), mention("level", 5), "solver.level=5"),
        (("a.toml", "--set", "data.test=c"), mention("data.test", "c"), "--set data.test=c"),
        (("--set", "data.test=c"), mention("data.test", "c"), "--set data.test=c"),
        (("a.toml", "--epochs=3"), mention("data.epochs", 3), "--epochs 3"),
        (("a.toml", "--epochs=3"), mention("solver.level"), "solver.level"),
        ((), mention("foreign", True), "--set data.foreign=true"),
        (("a.toml",), mention("run.memory=1 MiB"), 'run.memory="1 MiB"'),
        ((), mention("memory=1 MiB"), "--memory 1 MiB"),
        ((), mention("model.patch_features", 9), "--patch-features 9"),
        ((), mention("rows", 3), "rows=3"),
    ],
)
def test_setting_is_rendered_as_command_line_option(
    words: tuple[str, ...], marked_text: str, message: str
) -> None:
    assert (
        render_message(marked_text, CommandVocabulary(main._options_of(["train"]), words))
        == message
    )


@pytest.mark.parametrize(
    ("marked_text", "message"),
    [
        (mention("x", ["a", "b c"]), "--x 'a,b c'"),
        (mention("y="), "--y"),
        (mention("missing", "fill"), "--missing fill"),
        (mention("overwrite", True), "--overwrite"),
        (mention("foreign", True), "--foreign"),
        (mention("sample_weight", 2), "--sample-weight 2"),
        (mention("device", "gpu:9"), "--device gpu:9"),
        (mention("like="), "--like"),
        (mention("calibrate", True), "--set run.calibrate=true"),
        (mention("n_centers", 5), "--set model.n_centers=5"),
    ],
)
def test_library_parameter_is_rendered_as_command_option(marked_text: Any, message: str) -> None:
    arguments = CommandVocabulary(main._options_of(["predict", "run", "ingest"]))
    assert render_message(marked_text, arguments) == message
    assert render_message(
        marked_text, CommandVocabulary(main._options_of(["--version"]))
    ) == render_message(marked_text)


def test_setting_is_rendered_as_estimator_parameter() -> None:
    for name, path in PARAMETER_SETTINGS.items():
        assert (
            render_message(f"{mention(path)}, {mention(path, 3)}", parameter_vocabulary)
            == f"{name}, {name}=3"
        )
    assert render_message(mention("data.train"), parameter_vocabulary) == "data.train"


def test_false_flag_is_rendered_as_command_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("a", "b"):
        rows = rng.integers(0, 9, (60, 3))
        rows[0] = range(3)
        np.savetxt(folder / f"{name}.csv", rows, delimiter=",", fmt="%d")
    command = ["ingest", str(folder), str(tmp_path / "s.zarr"), "--y", "2"]
    assert main.run_command(command) != 0
    assert "--no-header if it is a row" in capsys.readouterr().err
    assert main.run_command([*command, "--no-header"]) == 0
    assert sk.open_store(tmp_path / "s.zarr").spec.n_rows == 120


def test_setting_options_and_settings_exist() -> None:
    options = set(main._options_of(["train"]).values())
    assert options.issuperset(SETTING_OPTIONS.values())
    for path in SETTING_OPTIONS:
        section, _, name = path.partition(".")
        assert hasattr(getattr(RunConfig(), section), name)
