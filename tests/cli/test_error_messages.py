"""Check that a command that fails prints one sentence, with its remedy, and writes nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from streamkern.cli import main
from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_directory import RunDirectory
from tests import bit_flips
from tests.commands import BY_STEPS, DONE, FAILED, FAST, USAGE, X, Y, error_line, train_run
from tests.runs import Run

pytestmark = pytest.mark.usefixtures("one_blas_thread")

BAD_TRAINING = {
    "wrong URL": (["--train", "nowhere.zarr"], "there is no zarr store at .*nowhere.zarr"),
    "no such array": (["--set", "data.x=Z"], "'Z', 'y' were requested; leave the names out"),
    "no such file": (["missing.toml"], "run file 'missing.toml' cannot be read"),
    "unknown scheme": (["--train", "what://x/y"], "what"),
    "batch above n": (["--set", "data.batch_size=501"], "batch_size=501 must lie between 1 and"),
    "block above p": (["--set", "solver.block_size=41"], "block_size=41 must lie between 1 and"),
    "bandwidth 0": (
        ["--set", "model.bandwidth=0"],
        'model.bandwidth=0 must be "auto", "median" or a number',
    ),
    "unknown key": (["--set", "model.bandwith=2"], "did you mean model.bandwidth?"),
    "no section": (["--set", "bandwidth=2"], "did you mean model.bandwidth?"),
    "no value": (["--set", "model.bandwidth"], "must be SECTION.KEY=VALUE"),
    "solver": (["--solver", "adam"], "--solver adam must be one of"),
    "memory": (["--memory", "much"], "--memory much must be"),
    "too little memory": (["--memory", "2 MiB"], "--memory 2 MiB is not enough"),
    "epochs": (["--epochs", "0"], "--epochs 0 must be"),
    "epochs as text": (["--epochs", "few"], '--epochs few must be "auto" or a whole number'),
    "option": (["--epoch", "3"], "No such option"),
    "no such device": (["--set", "run.device=gpu:99"], "gpu:99|CuPy|cupy|CUDA"),
    "test set": (["--test", "nowhere.zarr"], "there is no zarr store at .*nowhere.zarr"),
    "centers": (["--set", "model.centers=nowhere.npy"], "no array of centers at nowhere.npy"),
    "password": (["--train", "s3://me:secret@host/x"], "holds credentials, which other users"),
}


@pytest.mark.parametrize("case", BAD_TRAINING)
def test_invalid_usage_prints_one_sentence_and_writes_nothing(
    case: str, run: Run, stores: Path, tmp_path: Path
) -> None:
    arguments, pattern = BAD_TRAINING[case]
    location = ["--train", str(stores / "train.zarr"), "--run-dir", str(tmp_path / "run")]
    message = error_line(run("train", *location, *FAST, *arguments), USAGE)
    assert re.search(pattern, message), message
    assert "secret" not in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ingest t.csv o.zarr --y z", "name columns of the file with --x and --y"),
        ("ingest t.csv o.zarr --y d --memory 1MiB", "--memory '1 MiB' is less than 16 chunks"),
        ("ingest t.csv o.zarr --y d --targets labels", "--targets labels is unknown"),
        ("ingest t.npz o.zarr --x Z", "name them with --x and --y"),
        ("ingest t.csv STORE --y d", "pass --overwrite"),
        ("info STORE --x Z", "or pass --foreign to"),
        ("train", "give a run file, or --train URL"),
        ("trian", "No such command 'trian'"),
        ("train not.toml", "not valid TOML"),
        ("plan epoch.toml", "data.epoch is not a setting; did you mean data.epochs?"),
    ],
)
def test_remedies_name_command_line_options(
    words: str, message: str, run: Run, stores: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    rows = np.arange(40.0).reshape(10, 4)
    np.savez("t.npz", X=rows, y=rows[:, 0])
    np.savetxt("t.csv", rows, header="a,b,c,d", comments="", delimiter=",")
    Path("not.toml").write_text('[data]\ntrain = "x.zarr"\n[run')
    Path("epoch.toml").write_text('[data]\ntrain = "x.zarr"\nepoch = 3\n')
    arguments = words.replace("STORE", str(stores / "train.zarr")).split()
    assert message in error_line(run(*arguments), USAGE)


def test_run_file_without_training_set_is_named(run: Run, stores: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\nn_centers = 10\n")
    for command in ("train", "plan", "tune"):
        code, _, message = run(command, path)
        assert (code, message.count("\n")) == (USAGE, 1)
        assert f"run file '{path}': data.train is missing" in message
    assert run("plan", path, "--train", stores / "train.zarr")[0] == DONE


def test_invalid_stores_are_refused(run: Run, make_zarr: Any, tmp_path: Path) -> None:
    rows, labels = X[:100], np.arange(100) % 3
    location = ("--run-dir", tmp_path / "run", *FAST)
    short = make_zarr({"X": rows, "y": labels[:99]}, name="short.zarr")
    message = error_line(run("train", "--train", short, *location), USAGE)
    assert "has shape (99,); 100 rows of X need" in message
    negative = make_zarr({"X": rows, "y": labels - 1}, name="negative.zarr")
    assert "-1" in error_line(run("train", "--train", negative, *location), USAGE)
    lonely = make_zarr({"X": rows}, name="lonely.zarr")
    assert "has no array 'y'" in error_line(run("train", "--train", lonely, *location), USAGE)
    assert "no zarr store" in error_line(run("info", tmp_path), USAGE)
    assert not (tmp_path / "run").exists()


def test_label_outside_classes_is_refused(run: Run, store: Path, tmp_path: Path) -> None:
    zarr.open_group(store, mode="r+")["y"][170] = 7
    bit_flips.reseal(store)
    arguments = ("train", "--train", store, "--run-dir", tmp_path / "run", *FAST)
    assert "class id 7 in y/c/1, row 170" in error_line(run(*arguments), USAGE)
    zarr.open_group(store, mode="r+")["y"][170] = 2
    bit_flips.reseal(store)
    assert run(*arguments)[0] == DONE


def test_model_commands_refuse_unsuitable_paths(
    run: Run, stores: Path, tmp_path: Path, make_zarr: Any
) -> None:
    location = train_run(stores, tmp_path, run)
    narrow = tmp_path / "narrow.zarr"
    ingest(X[:50, :4], narrow, y=Y[:50])
    classes = make_zarr({"X": X[:50], "y": np.arange(50) % 4}, 50, "classes.zarr")
    out = tmp_path / "p.zarr"
    for command, expected in (
        (("evaluate", location, narrow), "rows of shape (4,), the model was trained on (5,)"),
        (("predict", location, narrow, out), "rows of shape (4,), the model was trained on (5,)"),
        (("evaluate", location, classes), "rows of the unknown classes '0', '1'"),
        (("evaluate", tmp_path / "none", stores / "test.zarr"), "there is no run in"),
        (
            ("predict", location, stores / "test.zarr", stores / "train.zarr"),
            "holds a group of kind 'store'",
        ),
    ):
        assert expected in error_line(run(*command), USAGE)
    assert not out.exists()


def test_run_directory_of_another_run_is_refused(run: Run, stores: Path, tmp_path: Path) -> None:
    location = train_run(stores, tmp_path, run)
    arguments = ("train", "--train", stores / "train.zarr", "--run-dir", location, *BY_STEPS)
    message = error_line(run(*arguments, "--epochs", 3, "--set", "solver.ridge=0.5"), USAGE)
    assert "solver.ridge: was 'auto', now 0.5" in message


@pytest.mark.parametrize("folder", ["file", "proc"])
def test_uncreatable_run_directory_is_refused(
    run: Run, stores: Path, tmp_path: Path, folder: str
) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "run" if folder == "file" else Path("/proc/nothing/run")
    message = error_line(
        run("train", "--train", stores / "train.zarr", "--run-dir", path, *FAST), USAGE
    )
    assert str(path) in message


def test_locked_run_directory_is_refused(run: Run, stores: Path, tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run"):
        arguments = ("--run-dir", tmp_path / "run", *FAST)
        message = error_line(run("train", "--train", stores / "train.zarr", *arguments), USAGE)
    assert f"is being written by process {os.getpid()} " in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--transform", "flip"], "--transform 'flip' must be a table as in a run file"),
        (["--transform", '{kind = "blur"}'], "must be a table with kind = one of"),
        (["--threads", "0"], "--threads 0 must be"),
        (["--dtype", "int3"], "--dtype int3 is not a dtype"),
        (["--memory", "none"], "--memory none must be"),
    ],
)
def test_invalid_augmentations_are_refused(
    run: Run, stores: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    answer = run("augment", stores / "train.zarr", tmp_path / "out.zarr", *arguments)
    assert message in error_line(answer, USAGE)
    assert not (tmp_path / "out.zarr").exists()


def plan_that_raises(error: BaseException, run: Run, stores: Path, *options: str) -> Any:
    """Return the answer of `plan` if an error occurs in it."""

    def raise_error(*args: object, **more: object) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamkern.cli.runs.resolve_run", raise_error)
        return run("plan", "--train", stores / "train.zarr", *options)


def test_internal_error_is_printed_in_one_line(run: Run, stores: Path) -> None:
    error = ZeroDivisionError("division by zero")
    message = error_line(plan_that_raises(error, run, stores), FAILED)
    assert message == "ZeroDivisionError: division by zero (this is a bug; --debug shows where)"
    code, _, err = plan_that_raises(error, run, stores, "--debug")
    assert code == FAILED
    assert "Traceback" in err


def test_interrupt_is_printed_in_one_line(run: Run, stores: Path) -> None:
    assert error_line(plan_that_raises(KeyboardInterrupt(), run, stores), 130) == "interrupted"


def test_storage_error_is_printed_in_one_line_without_secrets(run: Run, stores: Path) -> None:
    error = OSError("s3://me:secret@host/x?sig=1 did not answer")
    error.add_note("unit 3")
    message = error_line(plan_that_raises(error, run, stores), FAILED)
    assert message == "s3://host/x did not answer; unit 3"


BAD_HOST = "https://[::1/x"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ingest", "c.csv", "o.zarr", "--x", "", "--y", "label"], "--x is empty"),
        (["ingest", "c.csv", "o.zarr", "--x", "a\nb", "--y", "label"], "names of columns in one"),
        (["ingest", "c.csv", "o.zarr", "--y", "label", "--dtype", "foo"], "foo is not a dtype"),
        (["ingest", "c.csv", "o.zarr", "--y", "label", "--dtype", "int8"], "--dtype int8 cannot"),
        *(
            ([*command, "o.zarr", "--chunk-mb", size], f"--chunk-mb {size}")
            for command in (["ingest", "c.csv", "--y", "label"], ["augment", "STORE"])
            for size in ("nan", "inf", "1e+308", "0", "-1")
        ),
        (["info", BAD_HOST], "the host of"),
        (["ingest", "c.csv", BAD_HOST, "--y", "label"], "the host of"),
        (["ingest", BAD_HOST, "o.zarr"], "the host of"),
        (["augment", BAD_HOST, "o.zarr"], "the host of"),
        (["predict", BAD_HOST, "c.csv", "o.npy"], "the host of"),
        (["evaluate", BAD_HOST, "c.csv"], "the host of"),
        (["bench-read", BAD_HOST], "the host of"),
        (["plan", "--train", BAD_HOST], "the host of"),
        (["train", "--train", BAD_HOST, "--run-dir", "r"], "the host of"),
    ],
)  # fmt: skip
def test_unusual_options_and_urls_are_refused_in_one_sentence(
    tmp_path: Path,
    stores: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.csv").write_text("a,b,label\n1,2,0\n2,3,1\n")
    arguments = [str(stores / "train.zarr") if word == "STORE" else word for word in arguments]
    assert main.run_command(arguments) == USAGE
    text = capsys.readouterr().err
    assert message in text
    assert "bug" not in text
    assert sorted(os.listdir()) == ["c.csv"]
