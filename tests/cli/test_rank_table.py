"""`plan --profile`: a row for each number of ranks, and what is to be said of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from streamkern.cli import main
from streamkern.cli.rank_table import over_ranks_text
from streamkern.ingest.ingest import ingest

DONE, USAGE = 0, 2
rng = np.random.default_rng(0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stores") / "s.zarr"
    X = rng.standard_normal((600, 4)).astype(np.float32)
    ingest(X, place, y=X[:, 0])
    return place


def plan(capsys: pytest.CaptureFixture[str], store: Path, *words: object) -> tuple[int, str, str]:
    fixed = ["plan", "--train", store, "--set", "model.bandwidth=1.0", *words]
    code = main.main([str(word) for word in fixed])
    return code, *capsys.readouterr()


BLOCK = ("--solver", "block", "--set", "solver.block_size=150")


def test_the_table_has_a_row_for_each_number_of_ranks(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*BLOCK, "--ranks", 64, "--profile", "h100-ib", "--no-measure")
    code, out, err = plan(capsys, store, *words)
    assert (code, err) == (DONE, "")
    assert "by a model, not measured. Each rank is\nan H100 (52.5 TFLOP/s" in out
    table = out[out.index("efficiency") :].splitlines()[2:9]
    assert [int(line.split()[0]) for line in table] == [1, 2, 4, 8, 16, 32, 64]
    shown = json.loads(plan(capsys, store, *words, "--json")[1])["over_ranks"]
    assert shown["profile"] == "h100-ib"
    assert [row["ranks"] for row in shown["rows"]] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(("solver", "columns", "who"), [
    ("block", 1, "all make the setup"),
    ("block", 2, "all make the setup"),
    ("falkon", 1, "one of them makes the setup"),
    ("eigenpro4", 2, "rank 0 makes the setup"),
])  # fmt: skip
def test_who_makes_the_setup_is_said(
    store: Path, capsys: pytest.CaptureFixture[str], solver: str, columns: int, who: str
) -> None:
    """Who needs memory for it."""
    words = ("--solver", solver, "--ranks", 2, "--center-ranks", columns, "--no-measure")
    out = " ".join(plan(capsys, store, *words)[1].split())
    assert f"holds what is said of train; {who}" in out


def test_without_ranks_there_is_one_row(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*BLOCK, "--profile", "cpu-10gbe", "--no-measure", "--json")
    code, out, _ = plan(capsys, store, *words)
    assert code == DONE
    (row,) = json.loads(out)["over_ranks"]["rows"]
    assert (row["ranks"], row["efficiency"]) == (1, 1)


def test_without_a_profile_there_is_none(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, store, *BLOCK, "--ranks", 2, "--no-measure", "--json")
    assert code == DONE
    assert "over_ranks" not in json.loads(out)


def test_other_solvers_are_not_modelled(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--solver", "falkon", "--ranks", 2, "--profile", "h100-ib", "--no-measure")
    code, out, _ = plan(capsys, store, *words)
    assert code == DONE
    assert "note: what several ranks would take is modelled for the solver block only" in out
    assert json.loads(plan(capsys, store, *words, "--json")[1])["over_ranks"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--profile", "h100"), "must be one of cpu-10gbe"),
        (("--profile", "this", "--no-measure"), "leave --no-measure out"),
    ],
)
def test_mistakes_are_one_sentence(
    store: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code, out, err = plan(capsys, store, *BLOCK, *words)
    assert (code, out) == (USAGE, "")
    assert said in err
    assert "--profile" in err
    assert err.count("\n") == 1


def test_what_does_not_fit_is_marked_and_said() -> None:
    parts = ("kernel", "factors", "latency", "transfer", "each", "waiting")
    row = {
        "ranks": 1, "step_s": 0.5, "epoch_s": 90.0, "efficiency": 1.0,
        "shares": dict.fromkeys(parts, 1 / 6), "bottleneck": "transfer",
        "memory_bytes": 3 << 30, "fits": False, "best_block_size": None,
    }  # fmt: skip
    found = {"about": "a box", "rank_bytes": 1 << 30, "setup_bytes": 2 << 30, "rows": [row]}
    said = over_ranks_text(found, "block")
    assert "500 ms  1:30 min  1.00" in said
    assert "3 GiB*  transfer of sums  none fits" in said
    assert "* more than the 1 GiB of a rank" in said
    assert "the setup takes 2 GiB on each of 1 ranks, and a rank has 1 GiB" in said
    fitting = found | {"setup_bytes": 0, "rows": [row | {"fits": True}]}
    assert "*" not in over_ranks_text(fitting, "block")
