"""Check the command line: results, error messages, exit codes, and stopped and killed runs."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import streamkern
from streamkern.basics.progress import ProgressLine
from streamkern.cli import main
from streamkern.cli.options import options_for, parse_options
from streamkern.ingest.ingest import ingest
from streamkern.rundir import checksums
from streamkern.rundir.run_directory import RunDirectory
from streamkern.store.writer import StoreWriter
from streamkern.stream.sources.stores import ZarrSource
from streamkern.train.saved_model import load_model
from tests import bit_flips
from tests.clusters import Cluster
from tests.runs import Run, assert_same_bits, newest
from tests.s3_server import SECRET, S3Server
from tests.store_damage import flip_bit, remove, tree

pytestmark = pytest.mark.usefixtures("one_blas_thread")

DONE, USAGE, FAILED, TRY_AGAIN = 0, 2, 3, 75
SETTINGS = ("model.n_centers=40", "data.batch_size=50", "run.threads=1", "run.device=cpu")
FAST = [word for setting in SETTINGS for word in ("--set", setting)]
BY_STEPS = [*FAST, "--solver", "block"]

rng = np.random.default_rng(0)
X = rng.normal(size=(600, 5)).astype(np.float32)
Y = np.array(["a", "b", "c"])[np.digitize(X[:, 0] + X[:, 1], [-0.6, 0.6])]


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with train.zarr, which has 5 chunks of 100 rows, and test.zarr."""
    folder = tmp_path_factory.mktemp("stores")
    ingest(X[:500], folder / "train.zarr", y=Y[:500], chunk_mb=2000 / 2**20)
    ingest(X[500:], folder / "test.zarr", y=Y[500:])
    return folder


@pytest.fixture
def store(stores: Path, tmp_path: Path) -> Path:
    """Return a copy of train.zarr that a test may damage."""
    for key, data in tree(stores / "train.zarr").items():
        path = tmp_path / "train.zarr" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "train.zarr"


# Lines that may precede an error.
_NOTE_OR_PROGRESS = re.compile(r"^streamkern: note: \S| samples  ")


def error_line(answer: tuple[int, str, str], code: int) -> str:
    """Return the single line on stderr of a command that ended with `code`."""
    assert answer[0] == code, answer
    *notes, line = answer[2].splitlines()
    assert [note for note in notes if not _NOTE_OR_PROGRESS.search(note)] == []
    assert line.startswith("streamkern: ")
    return line.removeprefix("streamkern: ")


def train_run(stores: Path, folder: Path, run: Run, *more: object) -> Path:
    """Train a run in `folder` with more arguments, and return its directory."""
    arguments = ("--test", stores / "test.zarr", "--run-dir", folder / "run", "--epochs", 3)
    assert run("train", "--train", stores / "train.zarr", *arguments, *BY_STEPS, *more)[0] == DONE
    return folder / "run"


# ------------------------------------------------------------------------------------- commands


def test_version_and_help_options(run: Run) -> None:
    assert run("--version") == (DONE, f"streamkern {streamkern.__version__}\n", "")
    assert run("-h") == run("--help")
    assert run("train", "-h")[1] == run("train", "--help")[1]
    code, out, _ = run("train", "--help")
    assert code == DONE
    assert "--set SECTION.KEY=VALUE" in out
    code, out, err = run()
    assert (code, out) == (USAGE, "")
    assert "Commands:" in err


@pytest.mark.parametrize(
    ("words", "completion"), [("streamkern tr", "train"), ("streamkern train --ep", "--epochs")]
)
def test_shell_completion_lists_commands_and_options(words: str, completion: str) -> None:
    options = {"_STREAMKERN_COMPLETE": "complete_bash", "COMP_WORDS": words}
    process = subprocess.run(
        [Path(sys.executable).with_name("streamkern")],
        env={**os.environ, **options, "COMP_CWORD": str(len(words.split()) - 1)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert process.stdout.split() == [completion]


def output_words(code: str) -> set[str]:
    """Return the words that a Python program prints, the last of which are the loaded modules."""
    process = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(process.stdout.split())


def test_help_lists_commands_without_importing_them() -> None:
    words = output_words("from streamkern.cli.main import run_command; run_command(['--help'])")
    packages = {word.partition(".")[0] for word in words}
    assert not packages & {"numpy", "zarr", "dask", "pydantic", "scipy"}
    assert set(main.COMMANDS) <= words


def test_every_command_has_a_loaded_name() -> None:
    names = {f"{name.replace('-', '_')}_command" for name in main.COMMANDS}
    assert names == set(main._LOADED_NAMES)


def test_commands_import_no_slow_modules() -> None:
    """Check that commands do not load slow modules, because every rank and worker starts this
    way."""
    loaded = output_words(
        "from streamkern.cli import main as m; [m._load_command(name) for name in m._LOADED_NAMES]"
    )
    assert "streamkern.train.train" in loaded
    assert not loaded & {"sklearn", "scipy.stats", "pandas", "pyarrow", "numba", "distributed"}


def test_ingest_and_info_commands_equal_library(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "y.npy", Y)
    arguments = ("ingest", tmp_path / "X.npy", tmp_path / "s.zarr", "--y", tmp_path / "y.npy")
    code, out, err = run(*arguments, "--seed", 3)
    assert (code, err) == (DONE, "")
    assert "600 rows of 5 float32, 3 classes: a, b, c" in out
    ingest(X, tmp_path / "same.zarr", y=Y, seed=3)
    code, out, _ = run("info", tmp_path / "s.zarr", "--json")
    assert json.loads(out)["fingerprint"] == (
        streamkern.open_store(tmp_path / "same.zarr").spec.fingerprint
    )
    code, _, err = run(*arguments, "--seed", 3)
    assert code == DONE
    assert "is already complete, from the same command" in err
    assert "already holds a store" in error_line(run(*arguments), USAGE)
    assert run(*arguments, "--overwrite")[0] == DONE


def test_ingest_selects_columns_of_table(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("u,v,w,label\n1,2,3,x\n4,5,6,y\n7,8,9,x\n")
    assert run("ingest", tmp_path / "t.csv", tmp_path / "a.zarr", "--y", "-1")[0] == DONE
    arguments = ("ingest", tmp_path / "t.csv", tmp_path / "b.zarr", "--y", "u", "--y", "v")
    code, out, _ = run("ingest", tmp_path / "t.csv", tmp_path / "t2.csv", tmp_path / "c.zarr")
    assert code == USAGE
    (tmp_path / "t.csv").write_text("u,v,w\n1,2,3\n4,5,6\n7,8,9\n")
    code, out, _ = run(*arguments, "--targets", "values", "--no-shuffle")
    assert code == DONE
    assert "2 values" in out
    chunk = streamkern.open_store(tmp_path / "b.zarr").read_chunk(0)
    np.testing.assert_array_equal(chunk[1], [[1, 2], [4, 5], [7, 8]])


def test_plan_prints_sizes_of_run(run: Run, stores: Path) -> None:
    arguments = ("--train", stores / "train.zarr", "--memory", "1 GiB", "--epochs", 2, *BY_STEPS)
    code, out, err = run("plan", *arguments, "--json")
    assert (code, err) == (DONE, "")
    plan = json.loads(out)
    assert plan["problem"] == {
        "rows_per_epoch": 500, "rows_set_aside": 0, "rows_to_calibrate_by": 0, "epochs": 2,
        "features": 5, "outputs": 3, "centers": 40,
    }  # fmt: skip
    assert plan["batches"] == 20
    memory = plan["memory"]
    assert memory["budget_bytes"] == 2**30
    assert memory["peak_bytes"] == max(memory["phases"].values())
    always = sum(b["bytes"] for b in memory["buffers"] if b["phase"] == "always")
    for phase, size in memory["phases"].items():
        phase_bytes = sum(b["bytes"] for b in memory["buffers"] if b["phase"] == phase)
        assert size == always + phase_bytes
    # One block evaluates K(X, Z) once: 2 n p (d + 2 c), and of the preconditioner the factor twice,
    # 2 p b c a step. That of the ridge is read seldom.
    assert plan["flops"]["training"] == 2 * 1000 * 40 * (5 + 6) + 20 * 2 * 40 * 40 * 3
    assert plan["stores"][0]["n_chunks"] == 5
    seconds = plan["seconds"]
    assert min(seconds["setup"], seconds["epoch"]) > 0 == seconds["evaluation"]
    assert seconds["whole"] == pytest.approx(seconds["setup"] + 2 * seconds["epoch"])


def test_plan_fits_a_screen_and_verbose_lists_everything(run: Run, stores: Path) -> None:
    arguments = ("plan", "--train", stores / "train.zarr", *BY_STEPS, "--no-measure")
    code, out, _ = run(*arguments)
    assert code == DONE
    assert "predicted peak" in out
    assert len(out.splitlines()) < 36
    assert "weights, their average" not in out
    assert "expected on this machine" not in out
    code, out, _ = run(*arguments, "--all")
    assert code == DONE
    assert "weights, their average" in out
    assert "5 chunks of 100 rows" in out
    assert json.loads(run(*arguments, "--json")[1])["seconds"] is None


def test_plan_explains_metric_choice(run: Run, tmp_path: Path) -> None:
    X = np.random.default_rng(0).standard_normal((2000, 3), dtype=np.float32)
    streamkern.ingest_store(X, tmp_path / "table.zarr", y=X[:, 0])

    def output_of(*arguments: object) -> tuple[str, bool]:
        """Return the choice of the metric with its reason, and whether the metric is learned."""
        arguments = ("plan", "--train", tmp_path / "table.zarr", "--no-measure", *arguments)
        plan = json.loads(run(*arguments, "--json")[1])
        assert (
            f"metric {plan['metric']['metric']}: {plan['metric']['reason']}" in run(*arguments)[1]
        )
        assert ("metric" in plan["memory"]["phases"]) == ("metric" in plan["flops"])
        return " ".join(plan["metric"].values()), "metric" in plan["flops"]

    text, is_learned = output_of()
    assert text.startswith("learn chosen, as the rows are those of a table")
    assert text.endswith('model.metric="none" leaves it out')
    assert is_learned
    assert output_of("--set", "model.metric=none") == ("none as set", False)
    text, is_learned = output_of("--set", "model.bandwidth=2")
    assert text.startswith("none chosen, as the bandwidth is set")
    assert not is_learned
    np.save(tmp_path / "scales.npy", [1.0, 2.0, 3.0])
    assert output_of("--set", f"model.metric={tmp_path / 'scales.npy'}") == ("given as set", False)


def test_plan_estimates_duration_if_rows_are_readable(
    run: Run, stores: Path, tmp_path: Path
) -> None:
    arguments = ("--test", stores / "test.zarr", *BY_STEPS)
    _, out, _ = run("plan", "--train", stores / "train.zarr", *arguments)
    line = next(line for line in out.splitlines() if "expected on this machine" in line)
    assert re.search(r": [\d.e-]+ s \(setup .* s, an epoch .* s, an evaluation .* s\)", line)
    shutil.copytree(stores / "train.zarr", tmp_path / "bad.zarr")
    for chunk in filter(Path.is_file, (tmp_path / "bad.zarr" / "X" / "c").rglob("*")):
        chunk.write_bytes(b"x")
    code, out, err = run("plan", "--train", tmp_path / "bad.zarr", *BY_STEPS)
    assert code == DONE
    assert "expected on this machine" not in out
    assert "the time is unknown" in err


def test_plan_shows_continued_run(run: Run, stores: Path, tmp_path: Path) -> None:
    arguments = ("--train", stores / "train.zarr", *BY_STEPS)
    first_dir, second_dir = tmp_path / "first", tmp_path / "second"
    assert run("train", *arguments, "--run-dir", first_dir, "--epochs", 1)[0] == DONE
    onward = ("plan", "--train", stores / "train.zarr", "--no-measure", "--continue", first_dir)
    code, out, _ = run(*onward, "--run-dir", second_dir, "--epochs", 3, *BY_STEPS, "--json")
    assert code == DONE
    plan = json.loads(out)
    assert plan["problem"]["centers"] == 40
    assert plan["batches"] == 30
    facts = json.loads(run("info", first_dir, "--json")[1])
    assert plan["kernel"]["bandwidth"] == plan["kernel"]["kernel"]["bandwidth"]
    assert plan["kernel"]["bandwidth"] == facts["solver"]["bandwidth"]
    assert plan["kernels"] is None  # the kernel is given
    assert not second_dir.exists()
    message = error_line(run(*onward, "--run-dir", first_dir), USAGE)
    assert "--run-dir" in message
    assert "is the run that is continued" in message


@pytest.mark.parametrize("solver", ["sgd", "eigenpro1", "eigenpro2", "eigenpro3", "eigenpro4"])
def test_plan_accepts_every_solver(run: Run, stores: Path, solver: str) -> None:
    code, out, _ = run(
        "plan", "--train", stores / "train.zarr", "--solver", solver, "--json", "--no-measure"
    )
    assert code == DONE
    plan = json.loads(out)
    assert plan["sizes"]["solver"] == solver
    assert "block_size" not in plan["sizes"]
    assert min(plan["flops"].values()) > 0


def test_train_evaluate_predict_and_info_work_together(
    run: Run, stores: Path, tmp_path: Path
) -> None:
    data = ("--train", stores / "train.zarr", "--test", stores / "test.zarr")
    train = ("train", *data, "--run-dir", tmp_path / "run", "--epochs", 3, *BY_STEPS)
    code, out, err = run(*train)
    assert code == DONE
    assert "accuracy" in out
    assert [line for line in err.splitlines() if "1,500 samples" in line]
    code, out, _ = run(*train, "--json")
    assert code == DONE
    first_result = json.loads(out)
    assert first_result["samples"] == 1500
    assert [r["samples"] for r in first_result["history"]] == [500, 1000, 1500]
    model = load_model(tmp_path / "run", device="cpu")
    with model.backend:
        expected = model.evaluate(ZarrSource(stores / "test.zarr"))
        values = model.values(X[500:])  # in the order of the ingested rows
    code, out, _ = run("evaluate", tmp_path / "run", stores / "test.zarr", "--json")
    named = {"data": str(stores / "test.zarr"), "rows": 100, **expected}
    assert (code, json.loads(out)) == (DONE, named)
    assert first_result["test_accuracy"] == expected["accuracy"] > 0.8
    code, out, err = run("predict", tmp_path / "run", stores / "test.zarr", tmp_path / "p.zarr")
    assert (code, err) == (DONE, "")
    written = zarr.open_group(tmp_path / "p.zarr", mode="r")
    np.testing.assert_allclose(written["values"][:], values, atol=1e-5)
    labels = np.array(model.classes)[values.argmax(axis=1)]
    np.testing.assert_array_equal(written["labels"][:], labels)
    code, out, _ = run("info", tmp_path / "run", "--json")
    assert code == DONE
    info = json.loads(out)
    assert (info["state"], info["step"], info["samples"]) == ("finished", 30, 1500)
    assert info["metrics"] == {f"test_{name}": value for name, value in expected.items()}
    assert info["settings"]["model"]["n_centers"] == 40
    code, out, _ = run("info", tmp_path / "run")
    assert code == DONE
    assert "finished" in out


def test_train_and_info_print_progress(
    run: Run, stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a line is written to a pipe from time to time, and none in the first 30 s."""
    train = ("train", "--train", stores / "train.zarr", "--epochs", 4, *BY_STEPS)
    train += ("--set", "data.batch_size=10", "--run-dir")
    code, _, err = run(*train, tmp_path / "run")
    assert (code, err) == (DONE, "")
    monkeypatch.setattr(ProgressLine, "PERIODS_S", dict.fromkeys(ProgressLine.PERIODS_S, 0.0))
    code, _, err = run(*train, tmp_path / "again", "--set", "run.calibrate=false")
    lines = err.splitlines()
    assert code == DONE
    assert all(line.startswith("streamkern: ") for line in lines)
    assert re.search(r"epoch [1-4] of 4  ", lines[-2])  # which epoch it is depends on the machine
    assert re.search(r"trained Laplace\(.* solver block.*  4 epochs in .*  train mse", lines[-1])
    assert any(line.startswith("streamkern: setup: ") for line in lines)
    code, out, err = run("info", tmp_path / "run", "--explain")
    assert (code, err) == (DONE, "")
    assert "  step         200\n      number of batches trained" in out
    assert "train_data  " + str(stores / "train.zarr") in out
    code, out, _ = run("info", tmp_path / "run", "--explain", "--json")
    assert json.loads(out)["meanings"]["step"].startswith("number of batches trained")
    assert json.loads(out)["live"]["of_samples"] == 2000
    code, out, _ = run("info", stores / "train.zarr", "--explain")
    assert (
        "\n      size of a chunk, the part that is read, verified and decompressed at once" in out
    )


@pytest.mark.slow
def test_options_override_run_file(run: Run, stores: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"""
        [data]
        train = {json.dumps(str(stores / "train.zarr"))}
        transforms = [{{kind = "scale"}}, {{kind = "noise", sigma = 0.1}}]
        [model]
        n_centers = 7
        [run]
        memory = "2 GiB"
    """)
    settings = ("--set", "model.kernel=gaussian", "--set", "model.bandwidth = 3.5")
    code, out, _ = run("plan", tmp_path / "run.toml", *settings, "--epochs", 4, "--json")
    assert code == DONE
    plan = json.loads(out)
    assert (plan["problem"]["centers"], plan["problem"]["epochs"]) == (7, 4)
    assert plan["memory"]["budget_bytes"] == 2 << 30
    arguments = ("train", tmp_path / "run.toml", *settings, *FAST[2:])
    code, out, err = run(*arguments)
    assert code == DONE
    assert "note: without --run-dir the model is not saved" in err
    assert "samples" in out


def test_different_libraries_are_reported_in_one_line(
    run: Run, stores: Path, tmp_path: Path
) -> None:
    location = train_run(stores, tmp_path, run, "--set", "run.checkpoint_every=10")
    for manifest in location.glob("checkpoints/*30.json"):
        manifest.unlink()
    for checkpoint in location.glob("checkpoints/*.json"):
        saved = checksums.unseal("checkpoint", checkpoint.read_bytes())
        saved["meta"]["versions"]["numpy"] = "1.0"
        checkpoint.write_bytes(checksums.seal("checkpoint", saved))
    arguments = ("--run-dir", location, "--epochs", 3, *BY_STEPS, "--test", stores / "test.zarr")
    code, _, err = run("train", "--train", stores / "train.zarr", *arguments)
    assert code == DONE
    warned = [line for line in err.splitlines() if "warning" in line]
    assert len(warned) == 1
    assert "resumed with other libraries: " in warned[0]
    assert "numpy" in warned[0]


def test_older_checkpoint_is_never_used_silently(run: Run, stores: Path, tmp_path: Path) -> None:
    """Check that the commands say if they use an older checkpoint."""
    location = train_run(stores, tmp_path, run, "--set", "run.checkpoint_every=10")
    manifest = max(location.glob("checkpoints/*.json"))
    flip_bit(location, f"checkpoints/{manifest.name}", -30)
    code, out, err = run("evaluate", location, stores / "test.zarr", "--json")
    assert code == DONE
    (message,) = json.loads(out)["skipped"]
    assert f"{manifest.name} is damaged" in message
    assert f"warning: {message}" in err
    code, _, err = run("predict", location, stores / "test.zarr", tmp_path / "out.npy")
    assert code == DONE
    assert f"warning: {message}" in err
    code, out, _ = run("info", location)
    assert f"note: {message}" in out
    arguments = ("--run-dir", location, "--epochs", 3, *BY_STEPS, "--test", stores / "test.zarr")
    code, out, err = run("train", "--train", stores / "train.zarr", *arguments, "--json")
    assert code == DONE
    assert json.loads(out)["skipped"] == [message]
    assert f"warning: {message}" in err
    code, out, err = run("evaluate", location, stores / "test.zarr", "--json")
    assert "skipped" not in json.loads(out)
    assert err == ""


def test_run_with_missing_run_json_is_recovered(run: Run, stores: Path, tmp_path: Path) -> None:
    """Check that other data is still refused, and that `info` still recognises the run."""
    location = train_run(stores, tmp_path, run, "--set", "run.checkpoint_every=10")
    (location / "run.json").unlink()
    arguments = ("--run-dir", location, "--epochs", 3, *BY_STEPS)
    code, _, err = run("train", "--train", stores / "test.zarr", *arguments)
    assert code == USAGE
    assert "holds a run that differs: data" in err
    code, out, _ = run("info", location)
    assert code == DONE
    assert "run.json is missing" in out


# ----------------------------------------------------------------------------------- usage errors


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


# ------------------------------------------------------------------------------ failures of a run


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


@pytest.mark.parametrize("damage", [flip_bit, remove])
def test_chunk_lost_during_run_can_be_restored(
    run: Run, stores: Path, store: Path, tmp_path: Path, monkeypatch: Any, damage: Any
) -> None:
    arguments = ("--epochs", 4, *BY_STEPS, "--set", "run.checkpoint_every=10")
    tested = ("--test", stores / "test.zarr")
    chunk_bytes = (store / "X/c/2/0").read_bytes()

    def damage_chunk(record: dict[str, Any]) -> None:
        if record["step"] == 10:
            damage(store, "X/c/2/0")

    monkeypatch.setattr("streamkern.cli.runs.show_evaluation", damage_chunk)
    location = ("--run-dir", tmp_path / "run")
    message = error_line(run("train", "--train", store, *tested, *location, *arguments), FAILED)
    assert "X/c/2/0" in message
    assert str(store) in message
    saved = RunDirectory(tmp_path / "run", writable=False).load_latest()
    assert saved is not None
    assert saved.step >= 10
    assert json.loads(run("info", tmp_path / "run", "--json")[1])["state"].startswith("stopped")
    monkeypatch.undo()
    (store / "X/c/2/0").write_bytes(chunk_bytes)
    assert run("train", "--train", store, *tested, *location, *arguments)[0] == DONE
    full = ("--run-dir", tmp_path / "whole")
    assert run("train", "--train", store, *tested, *full, *arguments)[0] == DONE
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


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


# --------------------------------------------------------------------------- local and remote data


def test_augment_command_equals_library_function(run: Run, stores: Path, tmp_path: Path) -> None:
    arguments = ("--copies", 3, "--transform", '{kind = "noise", sigma = 0.5}', "--seed", 7)
    code, out, err = run("augment", stores / "train.zarr", tmp_path / "a.zarr", *arguments)
    assert (code, err) == (DONE, "")
    assert "1,500 rows of 5 float32, 3 classes: a, b, c" in out
    spec = streamkern.augment_store(
        stores / "train.zarr", tmp_path / "b.zarr", copies=3, seed=7,
        transforms=[{"kind": "noise", "sigma": 0.5}],
    )  # fmt: skip
    assert streamkern.open_store(tmp_path / "a.zarr").spec.fingerprint == spec.fingerprint
    store_paths = (stores / "train.zarr", stores / "test.zarr")
    assert (
        run("augment", *store_paths, tmp_path / "m.zarr", "--weights", "3,1", "--no-shuffle")[0]
        == DONE
    )
    spec = streamkern.augment_store(store_paths, tmp_path / "n.zarr", weights=[3, 1], shuffle=False)
    assert streamkern.open_store(tmp_path / "m.zarr").spec.fingerprint == spec.fingerprint
    code, _, err = run("augment", stores / "train.zarr", tmp_path / "a.zarr", *arguments)
    assert code == DONE
    assert "is already complete, from the same command" in err
    arguments = (*arguments, "--no-shuffle")
    message = error_line(
        run("augment", stores / "train.zarr", tmp_path / "a.zarr", *arguments), USAGE
    )
    assert "already holds a store" in message


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


def test_info_describes_unfinished_and_verified_store(
    run: Run, store: Path, tmp_path: Path
) -> None:
    writer = StoreWriter(
        tmp_path / "u.zarr", row_shape=(5,), x_dtype=np.float32, n_outputs=3, classes="abc",
        chunk_rows=100, n_rows=500,
    )  # fmt: skip
    writer.write_chunk(0, X[:100], np.zeros(100, np.int64))
    code, out, _ = run("info", tmp_path / "u.zarr")
    assert code == DONE
    assert "unfinished: 1 of 5 chunks are written, 20%" in out
    assert json.loads(run("info", tmp_path / "u.zarr", "--json")[1])["unfinished"]
    message = error_line(run("train", "--train", tmp_path / "u.zarr"), USAGE)
    assert "is an unfinished store" in message
    code, out, _ = run("info", store, "--verify")
    assert (code, "every chunk matches its digest" in out) == (DONE, True)
    flip_bit(store, "X/c/2/0")
    assert "X/c/2/0" in error_line(run("info", store, "--verify"), FAILED)


def test_info_verifies_every_checkpoint(run: Run, stores: Path, tmp_path: Path) -> None:
    """Check that `--verify` reads all checkpoints, where `info` alone reads the newest."""
    arguments = ("--run-dir", tmp_path / "run", *FAST, "--set", "run.checkpoint_every=1")
    assert run("train", "--train", stores / "train.zarr", *arguments)[0] == DONE
    code, out, _ = run("info", tmp_path / "run", "--verify", "--json")
    checked = json.loads(out)["verified"]
    setup, *saves = checked
    assert (code, setup, len(saves)) == (DONE, "setup", 3)
    assert set(checked.values()) == {"whole"}
    flip_bit(tmp_path / "run", f"{saves[0]}/alpha/c/0/0")
    code, out, _ = run("info", tmp_path / "run")
    assert (code, "damaged" in out) == (DONE, False)
    answer = run("info", tmp_path / "run", "--verify")
    assert f"1 of the 4 groups in {tmp_path / 'run'} are damaged" in error_line(answer, FAILED)
    lines = [line.split(maxsplit=1) for line in answer[1].splitlines()]
    assert [name for name, _ in lines] == [setup, *saves]
    assert [how == "whole" for _, how in lines] == [True, False, True, True]
    assert "does not match its checksum" in lines[1][1]


def test_bench_read_prints_table_and_conclusion(run: Run, stores: Path) -> None:
    code, out, err = run("bench-read", stores / "train.zarr", "--seconds", 0.02)
    assert (code, err) == (DONE, "")
    rows = [line for line in out.splitlines() if re.match("objects|chunks|batches", line)]
    assert len(rows) == 13
    assert "does not wait for this store." in out
    code, out, _ = run("bench-read", stores / "train.zarr", "--seconds", 0.02, "--json")
    assert len(json.loads(out)["rows"]) == 13
    assert "--seconds 0 must be" in error_line(
        run("bench-read", stores / "train.zarr", "--seconds", 0), USAGE
    )


@pytest.mark.slow
def test_every_command_works_on_s3(
    run: Run, s3: S3Server, bucket: str, stores: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "y.npy", Y)
    options = s3.words(monkeypatch)
    url = f"s3://{bucket}"
    arguments = (tmp_path / "X.npy", f"{url}/s.zarr", "--y", tmp_path / "y.npy")
    answers = [run("ingest", *arguments, "--chunk-mb", 0.002, *options)]
    answers.append(run("augment", f"{url}/s.zarr", f"{url}/a.zarr", "--copies", 2, *options))
    answers.append(run("info", f"{url}/a.zarr", "--verify", *options))
    assert "1,200 rows" in answers[-1][1]
    data = ("--train", f"{url}/a.zarr", "--test", f"{url}/s.zarr", "--run-dir", f"{url}/run")
    cache = ("--cache", tmp_path / "cache", "--cache-size", "1 GiB")
    answers.append(run("plan", *data, *cache, *FAST, *options))
    answers.append(run("train", *data, *cache, *FAST, *options, "--epochs", 2))
    assert list((tmp_path / "cache").glob("*/*"))
    answers.append(run("info", f"{url}/run", *options, "--json"))
    assert json.loads(answers[-1][1])["state"] == "finished"
    answers.append(run("evaluate", f"{url}/run", f"{url}/s.zarr", *options, "--json"))
    metrics = json.loads(answers[-1][1])
    assert metrics["rows"] == 600
    answers.append(run("predict", f"{url}/run", f"{url}/s.zarr", f"{url}/p.zarr", *options))
    # Predictions in a local store are the same.
    local = tmp_path / "p.zarr"
    answers.append(run("predict", f"{url}/run", f"{url}/s.zarr", local, *options))
    remote = zarr.open_group(f"{url}/p.zarr", mode="r", storage_options=s3.options())
    np.testing.assert_array_equal(
        remote["labels"][:], zarr.open_group(local, mode="r")["labels"][:]
    )
    answers.append(run("bench-read", f"{url}/s.zarr", "--seconds", 0.02, *options))
    # One run may use local and remote stores.
    mixed = ("--train", f"{url}/a.zarr", "--test", stores / "test.zarr")
    answers.append(run("train", *mixed, "--run-dir", tmp_path / "run", *FAST, *options))
    data_options = ("--train", stores / "train.zarr", "--test", stores / "test.zarr")
    answers.append(run("train", *data_options, "--run-dir", f"{url}/near", *FAST, *options))
    assert [answer[0] for answer in answers] == [DONE] * len(answers), answers
    message = error_line(run("train", *data_options, *FAST, *options), USAGE)
    assert "storage_options were given for the local path" in message
    assert not [answer for answer in answers if SECRET in answer[1] + answer[2]]


@pytest.mark.parametrize(
    "pattern",
    [
        ["info", "s3://{}/none.zarr"],
        ["bench-read", "s3://{}/none.zarr"],
        ["train", "--train", "s3://{}/none.zarr"],
        ["evaluate", "s3://{}/run", "s3://{}/none.zarr"],
        ["ingest", "{}.npy", "s3://none-{}/s.zarr"],
    ],
)
def test_missing_objects_on_s3_are_reported(
    run: Run, s3: S3Server, pattern: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "X.npy", X)
    options = s3.words(monkeypatch)
    words = [word.replace("{}.npy", str(tmp_path / "X.npy")) for word in pattern]
    answer = run(*[word.format(s3.bucket) for word in words], *options)
    message = error_line(answer, USAGE)
    assert "s3://" in message
    assert SECRET not in message


def test_storage_options_are_routed_to_their_library() -> None:
    options = parse_options(["anon=true", "deadline_s=30", "key=0123", "secret=12", "region=eu-1"])
    assert options == {
        "anon": True, "deadline_s": 30, "key": "0123", "secret": "12", "region": "eu-1",
    }  # fmt: skip
    assert options_for(options, "s3://b/x") == options
    assert options_for(options, "/data/x", "memory://x") == options
    assert options_for(options, "/data/x") is None


@pytest.mark.slow
def test_run_on_cluster_prints_dashboard_address(run: Run, stores: Path, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    with Cluster(tmp_path) as cluster:
        cluster.worker()
        arguments = ("--train", stores / "train.zarr", "--run-dir", tmp_path / "run", *FAST)
        code, _, err = run("train", *arguments, "--dask", cluster.address)
    assert code == DONE, err
    assert f"note: reading on the cluster at {cluster.address}, dashboard http://127.0.0.1" in err
    message = error_line(run("train", *arguments, "--dask", "somewhere"), USAGE)
    assert "--dask somewhere must be the address of a Dask scheduler" in message


# ------------------------------------------------------------------------------- ends of processes

LONG = [
    *("--epochs", "40", *BY_STEPS),
    *("--set", "run.checkpoint_every=100", "--set", "data.batch_size=10"),
    *("--set", "model.kernel=laplace", "--set", "model.bandwidth=3", "--set", "solver.ridge=1e-3"),
]
STEPS = 40 * 50


def start(store: Path, location: Path, *more: str) -> subprocess.Popen[str]:
    """Start the run in a process of its own."""
    arguments = [sys.executable, "-m", "streamkern", "train", "--train", str(store)]
    return subprocess.Popen(
        [*arguments, "--run-dir", str(location), *LONG, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )


def wait_for_step(process: subprocess.Popen[str], location: Path, step: int) -> None:
    """Wait until a checkpoint of at least `step` is published."""
    directory = RunDirectory(location, writable=False)
    give_up = time.monotonic() + 60
    while max(directory.steps(), default=-1) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up
        time.sleep(0.002)


def assert_same_weights(a: Path, b: Path) -> None:
    """Check that the newest checkpoints of two runs have the same arrays and position."""
    first, second = newest(a), newest(b)
    assert first.step == second.step
    assert first.meta["position"] == second.meta["position"]
    assert_same_bits(first.arrays, second.arrays)


def wait_for_exit(process: subprocess.Popen[str], code: int) -> str:
    """Return the stderr of a process that ends with `code`."""
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return err


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit, as Linux has it")
def test_run_survives_kill_stop_and_full_disk(run: Run, stores: Path, tmp_path: Path) -> None:
    store, location = stores / "train.zarr", tmp_path / "run"
    process = start(store, location)
    wait_for_step(process, location, 100)
    process.kill()
    assert wait_for_exit(process, -signal.SIGKILL) == ""

    process = start(store, location)
    wait_for_step(process, location, 600)
    process.send_signal(signal.SIGTERM)
    err = wait_for_exit(process, TRY_AGAIN)
    assert re.fullmatch(
        "streamkern: stopped by SIGTERM after [0-9]+ samples and saved; run the same command "
        "again to continue\n",
        err,
    )
    stopped = newest(location).step
    assert 600 <= stopped < STEPS

    process = start(store, location)
    wait_for_step(process, location, stopped + 200)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100, 100))
    err = wait_for_exit(process, FAILED)
    assert err.count("\n") == 1
    # Either the log or the checkpoint fails first, or both fail.
    log = f"run log {location / 'log.jsonl'}: {os.strerror(errno.EFBIG)}"
    checkpoint = (
        rf"the checkpoint of step \d+ could not be written to {re.escape(str(location))}\b.*"
    )
    both_errors = f"{re.escape(log)}; and the last checkpoint failed: {checkpoint}"
    assert re.fullmatch(rf"streamkern: ({re.escape(log)}|{checkpoint}|{both_errors})\n", err)
    assert stopped + 200 <= newest(location).step < STEPS

    # More reading threads do not change the order of the samples.
    wait_for_exit(start(store, location, "--set", "data.prefetch_threads=3"), DONE)
    uninterrupted = ("--run-dir", tmp_path / "whole", *LONG)
    assert run("train", "--train", store, *uninterrupted)[0] == DONE
    assert newest(location).step == STEPS
    assert_same_weights(location, tmp_path / "whole")


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
