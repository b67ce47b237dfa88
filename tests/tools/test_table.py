"""`python -m tools.rank_times`: a row for each number of ranks, and notes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from streamkern.ingest.ingest import ingest
from tools.rank_times.__main__ import main
from tools.rank_times.table import over_ranks_text

rng = np.random.default_rng(0)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("ranks")
    X = rng.standard_normal((600, 4)).astype(np.float32)
    ingest(X, folder / "s.zarr", y=X[:, 0])
    text = f"""data.train = {str(folder / "s.zarr")!r}
    model.bandwidth = 1.0
    solver.name = "block"
    solver.block_size = 150
    """
    (folder / "run.toml").write_text(text)
    return str(folder / "run.toml")


def test_table_has_a_row_for_each_number_of_ranks(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [run_file, "--set", "run.ranks=64", "--profile", "h100-ib"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "by a model, not measured. Each rank is\nan H100 (52.5 TFLOP/s" in out
    table = out[out.index("efficiency") :].splitlines()[2:9]
    assert [int(line.split()[0]) for line in table] == [1, 2, 4, 8, 16, 32, 64]
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["profile"] == "h100-ib"
    assert [row["ranks"] for row in shown["rows"]] == [1, 2, 4, 8, 16, 32, 64]


def test_without_ranks_table_has_one_row(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([run_file, "--profile", "cpu-10gbe", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["ranks"], row["efficiency"]) == (1, 1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("solver.name=falkon", "only the solver 'block' is modelled"),
        ("run.ranks=many", "run.ranks"),
    ],
)
def test_invalid_settings_give_one_sentence(
    run_file: str, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    arguments = ["--set", setting, "--set", "solver.block_size=auto", "--profile", "h100-ib"]
    assert main([run_file, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_plan_beyond_memory_is_marked() -> None:
    parts = ("kernel", "factors", "latency", "transfer", "each", "waiting")
    row = {
        "ranks": 1, "step_s": 0.5, "epoch_s": 90.0, "efficiency": 1.0,
        "shares": dict.fromkeys(parts, 1 / 6), "bottleneck": "transfer",
        "memory_bytes": 3 << 30, "fits": False, "best_block_size": None,
    }  # fmt: skip
    found = {"about": "a box", "rank_bytes": 1 << 30, "setup_bytes": 2 << 30, "rows": [row]}
    message = over_ranks_text(found)
    assert "500 ms  1:30 min  1.00" in message
    assert "3 GiB*  transfer of sums  none fits" in message
    assert "* more than the 1 GiB of a rank" in message
    assert "the setup takes 2 GiB on each of 1 ranks, and a rank has 1 GiB" in message
    fitting = found | {"setup_bytes": 0, "rows": [row | {"fits": True}]}
    assert "*" not in over_ranks_text(fitting)
