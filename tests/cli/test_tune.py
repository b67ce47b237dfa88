"""Check the command `tune`: its output, its files, and kills."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import streamkern
from streamkern.basics.optional import install_command
from streamkern.config.run_config import load_run_file
from streamkern.tuning.journal import JOURNAL_NAME
from tests.runs import Run, hide_package
from tests.searches import DONE, TRY_AGAIN, USAGE, write_run_file

WORDS = (
    "--bandwidths", "0.7,1.4", "--ridges", "0", "--epochs", 2, "--refine", 1, "--metric", "mse",
)  # fmt: skip


POOR_OPTIONS = ("--set", "model.bandwidth=0.05", "--set", "solver.ridge=0.0")
"""Settings that a search improves."""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Return run.toml next to train.zarr."""
    return write_run_file(tmp_path)


def test_tune_command_writes_best_run_file(run: Run, run_file: Path) -> None:
    pytest.importorskip("matplotlib")
    best_file = run_file.with_name("best.toml")
    code, out, err = run("tune", run_file, *WORDS, *POOR_OPTIONS, "--write", best_file)
    assert code == DONE, err
    lines = err.splitlines()
    assert lines[0] == (
        "streamkern: 5 trainings at most: 480 rows to fit, 120 held out, 60 centers, 2 passes; "
        "the run has 600 rows and 60 centers"
    )
    assert sum("laplace, bandwidth" in line for line in lines) == 5
    assert "4 left, about" in lines[1]
    header, _, first_row, *_ = out.splitlines()
    assert re.split(r"  +", header.strip()) == [
        "kernel", "bandwidth", "ridge", "as given", "held_out_mse", "se", "within 2 se",
        "held_out_accuracy", "seconds",
    ]  # fmt: skip
    folder = run_file.with_name("run-tune")
    result = json.loads((folder / "result.json").read_text())
    assert first_row.split()[:2] == ["laplace", f"{result['best']['bandwidth']:.4g}"]
    assert result["toml"] in out
    assert (folder / "tune.png").read_bytes().startswith(b"\x89PNG")
    written = load_run_file(best_file)
    assert written.model.bandwidth == result["best"]["bandwidth"]
    best_settings = {
        "model.bandwidth": written.model.bandwidth, "solver.ridge": result["best"]["ridge"],
        "model.metric": "none",
    }  # fmt: skip
    assert written == load_run_file(run_file).with_overrides(best_settings)


@pytest.fixture
def best_file(run: Run, run_file: Path) -> Path:
    """Return the run file that `tune` has written, in the folder of `run_file`."""
    path = run_file.with_name("best.toml")
    assert run("tune", run_file, *WORDS, *POOR_OPTIONS, "--write", path)[0] == DONE
    return path


def test_repeated_tune_command_trains_nothing(run: Run, run_file: Path, best_file: Path) -> None:
    code, out, err = run("tune", run_file, *WORDS, *POOR_OPTIONS, "--json")
    result = json.loads(run_file.with_name("run-tune").joinpath("result.json").read_text())
    printed = json.loads(out)
    assert (code, printed.pop("out")) == (DONE, str(run_file.with_name("run-tune")))
    assert printed == {name: result[name] for name in printed}
    assert printed.keys() == {"best", "table", "metric", "search", "toml"}
    assert "5 recorded already" in err
    assert "bandwidth" not in err.replace("best bandwidth", "")


def test_edited_run_file_is_not_replaced(run: Run, run_file: Path, best_file: Path) -> None:
    text = best_file.read_text()
    code, _, err = run("tune", run_file, *WORDS, *POOR_OPTIONS, "--write", best_file)
    assert (code, best_file.read_text()) == (DONE, text), err
    best_file.write_text(text + "# mine\n")
    code, _, err = run("tune", run_file, *WORDS, *POOR_OPTIONS, "--write", best_file)
    assert best_file.read_text() == text + "# mine\n"
    assert (code, err) == (
        USAGE,
        f"streamkern: --write '{best_file}' exists and was not written by this search, or "
        "was edited; name another file\n",
    )


def test_changed_tune_command_is_refused(run: Run, run_file: Path, best_file: Path) -> None:
    code, _, err = run("tune", run_file, *WORDS, *POOR_OPTIONS, "--set", "solver.damping=0.1")
    assert code == USAGE
    assert "solver.damping: was 'auto', now 0.1" in err


def test_written_file_has_a_separate_run_directory(run: Run, run_file: Path) -> None:
    """Check that both run files can be trained."""
    old_run, best_file = run_file.with_name("run"), run_file.with_name("best.toml")
    with run_file.open("a") as file:
        file.write(f"run_dir = {json.dumps(str(old_run))}\n")
    assert run("train", run_file)[0] == DONE
    code, _, err = run("tune", run_file, *WORDS, "--write", best_file)
    assert code == DONE
    assert f"wrote {best_file}, for a run in {old_run}-best" in err
    assert load_run_file(best_file).run.run_dir == f"{old_run}-best"
    code, _, err = run("train", best_file)
    assert code == DONE, err
    assert (old_run / "run.json").exists()


def test_bandwidth_is_written_with_six_digits(run: Run, run_file: Path) -> None:
    """Check median distances and given bandwidths, for which more digits do not matter."""
    best_file = run_file.with_name("best.toml")
    arguments = ("--bandwidths", "1.23456789", "--ridges", "0", "--epochs", 1, "--write", best_file)
    code, out, _ = run("tune", run_file, *arguments, *POOR_OPTIONS, "--refine", 0)
    assert code == DONE
    assert load_run_file(best_file).model.bandwidth == 1.23457
    assert "bandwidth = 1.23457\n" in out


def test_several_folds_give_standard_errors(run: Run, run_file: Path) -> None:
    code, out, _ = run("tune", run_file, *WORDS, "--folds", 2, "--kernels", "laplace, gaussian")
    assert code == DONE
    assert "within 2 se" in out
    assert " yes " in out


def test_missing_matplotlib_omits_the_plot(
    run: Run, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_package("matplotlib", monkeypatch)
    code, out, err = run("tune", run_file, *WORDS)
    assert code == DONE
    assert f"note: the plot needs matplotlib: {install_command('report')}" in err
    assert "[model]" in out
    names = {path.name for path in run_file.with_name("run-tune").iterdir()}
    assert "result.json" in names
    assert "tune.png" not in names


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--bandwidths", "wide", "--bandwidths 'wide' must be numbers with commas"),
        ("--kernels", "triangle", 'model.kernel="triangle" must be "auto", one of'),
        ("--folds", "0", "--folds 0 must be a whole number"),
        ("--metric", "r2", "--metric r2 is not defined for classes; take"),
        ("--write", "no/x.toml", "is in a folder that does not exist"),
    ],
)
def test_invalid_options_of_tune_command_give_one_sentence(
    option: str, value: str, sentence: str, run: Run, run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(run_file.parent)
    code, out, err = run("tune", run_file, option, value)
    assert (code, out, len(err.splitlines())) == (USAGE, "", 1)
    assert sentence in err
    assert not run_file.with_name("run-tune").exists()


def test_tune_command_needs_data(run: Run) -> None:
    assert run("tune")[0] == USAGE


LONG_RUN = ("--ridges", "0", "--epochs", "40")


SIGNALLED = """
import os, sys
from pathlib import Path
from streamkern.cli import main
from streamkern.train.loop.step_loop import StepLoop
left, number, take = int(sys.argv.pop(1)), int(sys.argv.pop(1)), StepLoop.take
def take_and_stop(*arguments):
    global left
    found = take(*arguments)
    journal = Path(sys.argv[-1]) / "journal.log"
    if journal.exists() and journal.read_text().count('"record"') == left:
        left = None
        os.kill(os.getpid(), number)
    return found
StepLoop.take = take_and_stop
sys.exit(main.run_command())
"""


def tune_until_signal(
    run_file: Path, folder: Path, records: int, number: signal.Signals
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that gets a signal in a step, after so many records."""
    arguments = ("tune", str(run_file), *LONG_RUN, "--out", str(folder))
    return subprocess.run(
        [sys.executable, "-c", SIGNALLED, str(records), str(int(number)), *arguments],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(streamkern.__file__).parent.parent)},
    )  # fmt: skip


@pytest.mark.slow
def test_search_survives_kill_and_stop(run: Run, run_file: Path, tmp_path: Path) -> None:
    """Kill the third and stop the fifth of 6 trainings and then 4."""
    folder, uninterrupted = tmp_path / "t", tmp_path / "whole"
    killed = tune_until_signal(run_file, folder, 2, signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    journal = folder / JOURNAL_NAME
    bits = journal.read_bytes()
    assert bits.count(b'"record"') == 2
    assert not (folder / "result.json").exists()

    stopped = tune_until_signal(run_file, folder, 4, signal.SIGTERM)
    assert stopped.returncode == TRY_AGAIN
    assert "stopped by SIGTERM with" in stopped.stderr.splitlines()[-1]
    trained = killed.stderr + stopped.stderr

    code, _, err = run("tune", run_file, *LONG_RUN, "--out", folder)
    assert code == DONE, err
    trained += err
    # A training is reported when it is recorded, so nothing was trained twice.
    assert journal.read_bytes().count(b'"record"') == 10
    assert sum(" laplace, bandwidth" in line for line in trained.splitlines()) == 10
    assert journal.read_bytes().startswith(bits)

    assert run("tune", run_file, *LONG_RUN, "--out", uninterrupted)[0] == DONE
    tables = [
        json.loads((location / "result.json").read_text())["table"]
        for location in (folder, uninterrupted)
    ]
    for table in tables:
        for row in table:
            del row["seconds"]
    assert tables[0] == tables[1]
