"""Check `plan`: sizes, expected seconds, the choice of the metric, and continued runs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import streamkern
from tests.commands import BY_STEPS, DONE, USAGE, error_line
from tests.runs import Run
from tests.searches import write_run_file

pytestmark = pytest.mark.usefixtures("one_blas_thread")


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


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ([], "laplace kernel, bandwidth auto: of 0.015625 to 16 times the median distance"),
        (["model.bandwidth=median"],
         "laplace kernel, bandwidth median: the median distance between 1,000 centers"),
        (["model.bandwidth=2.5"], "laplace kernel, bandwidth 2.5\n"),
        (["model.kernel=linear"], "linear kernel\n"),
        (["model.kernel={kind='polynomial', degree=2, c0=0.5}"],
         "polynomial(degree 2, c0 0.5) kernel\n"),
        (["model.kernel={kind='sum', parts=[{kind='laplace', bandwidth=8.0}, {kind='gaussian', "
          "bandwidth=4.0}], weights=[0.7, 0.3]}"],
         "0.7 laplace(bandwidth 8) + 0.3 gaussian(bandwidth 4) kernel\n"),
        (["model.kernel={kind='sum', parts=['laplace', {kind='gaussian', bandwidth=4}]}",
          "model.bandwidth=2"],
         "laplace + gaussian(bandwidth 4) kernel, other bandwidths 2\n"),
        (["model.kernel={kind='product', parts=['linear', {kind='sum', parts=['laplace', "
          "'gaussian'], weights=[1, 0.5]}]}"],
         "linear * (laplace + 0.5 gaussian) kernel, bandwidth auto: of 0.015625 to 16 times"),
    ],
)  # fmt: skip
def test_plan_describes_the_kernel(
    settings: list[str], line: str, run: Run, tmp_path: Path
) -> None:
    arguments = (word for text in settings for word in ("--set", text))
    code, out, _ = run("plan", write_run_file(tmp_path), *arguments)
    assert code == DONE
    assert f"\n{line}" in out
