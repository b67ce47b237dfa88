"""Check the commands: their help, and results that equal the results of the library."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

import streamkern
from streamkern.basics.progress import ProgressLine
from streamkern.cli import main
from streamkern.ingest.ingest import ingest
from streamkern.store.writer import StoreWriter
from streamkern.stream.sources.stores import ZarrSource
from streamkern.train.saved_model import load_model
from tests.commands import BY_STEPS, DONE, FAILED, FAST, USAGE, X, Y, error_line
from tests.runs import Run
from tests.store_damage import flip_bit

pytestmark = pytest.mark.usefixtures("one_blas_thread")


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
    # On a busy machine, this run may take longer than short work, and would be summarised.
    monkeypatch.setattr(ProgressLine, "SHORT_WORK_S", 1000.0)
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
