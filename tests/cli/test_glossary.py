"""Check that the glossary explains all facts of `info`, and that its page is up to date."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamkern.cli.described_store import store_text
from streamkern.cli.glossary import (
    FACT_MEANINGS,
    SETTING_MEANINGS,
    STORE_MEANINGS,
    glossary_page,
    with_meaning,
)
from streamkern.cli.run_info import run_overview, run_text
from streamkern.config.run_config import FREE_AT_RESUME, RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.kernels.builtin import KERNELS, get_kernel
from streamkern.rundir.run_summary import verify_run
from streamkern.store.describe import describe_store
from streamkern.store.store import open_store
from tests.runs import METHODS, array_source, finished, settings, stream

pytestmark = pytest.mark.usefixtures("one_blas_thread")
PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"
SHOWN = (
    "block", "blocks, ridge", "eigenpro3", "eigenpro4", "direct", "falkon", "sgd", "eigenpro1",
    "block, nystrom", "fourier",
)  # fmt: skip


def lines_without_meaning(plain: str, with_meanings: str) -> list[str]:
    """Return the lines of facts that have no meaning in the glossary."""
    lines = with_meanings.splitlines()
    next_lines = dict(zip(lines, [*lines[1:], ""], strict=True))
    assert [line for line in lines if not line.startswith("      ")] == plain.splitlines()
    return [
        line
        for line in plain.splitlines()
        if line.startswith("  ") and not next_lines[line].startswith("      ")
    ]


def test_glossary_page_equals_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == glossary_page(), "run python tools/glossary.py"


def test_every_identity_setting_has_a_meaning() -> None:
    names = {
        f"{section}.{name}"
        for section, table in RunConfig.model_fields.items()
        for name in type(table.default).model_fields
    }
    # Other entries show the addresses of the data.
    assert set(SETTING_MEANINGS) == names - FREE_AT_RESUME - {"data.train"}


def test_every_kernel_parameter_has_a_meaning() -> None:
    for name in KERNELS:
        assert set(get_kernel(name, lambda geometry: 1.0).describe()) <= set(FACT_MEANINGS)


@pytest.mark.parametrize("method", SHOWN)
def test_every_fact_of_a_run_has_a_meaning(method: str, tmp_path: Path) -> None:
    config = settings(tmp_path / "run", **METHODS[method])
    finished(config, source=stream(method), test=array_source(20, 5))
    overview = run_overview(tmp_path / "run") | {"verified": verify_run(tmp_path / "run")}
    plain = run_text(overview)
    assert not lines_without_meaning(plain, run_text(overview, explain=True))
    assert "checkpoints/" in plain
    assert "test_accuracy" in plain


def test_every_fact_of_a_learned_metric_has_a_meaning(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(800, 6)).astype(np.float32)
    ingest(X, tmp_path / "s", y=np.sin(3 * X[:, 0] + X[:, 1]))
    config = settings(
        tmp_path / "run",
        **{"data.train": str(tmp_path / "s"), "model.metric": "learn", "data.epochs": 1},
    )
    finished(config)
    overview = run_overview(tmp_path / "run")
    plain = run_text(overview)
    assert {"learned_metric", "metric_shares", "direction 1"} <= set(map(str.strip, _names(plain)))
    assert not lines_without_meaning(plain, run_text(overview, explain=True))


def _names(text: str) -> list[str]:
    return [line.strip().split("  ")[0] for line in text.splitlines()]


@pytest.mark.parametrize("classes", [True, False])
def test_every_fact_of_a_store_has_a_meaning(classes: bool, tmp_path: Path) -> None:
    y = np.arange(40) % 2 if classes else np.linspace(0, 1, 40)
    ingest(np.eye(40, 3), tmp_path / "s", y=y, sample_weight=np.ones(40))
    description = describe_store(open_store(tmp_path / "s")) | {"verified": True}
    description["warnings"] = [*description["warnings"], "one more"]
    assert not lines_without_meaning(store_text(description), store_text(description, explain=True))


def test_every_fact_of_an_unfinished_store_has_a_meaning() -> None:
    descriptions = {
        "unfinished": True, "url": "s", "n_rows": 9, "n_chunks": 3, "chunks_written": 1,
    }  # fmt: skip
    assert not lines_without_meaning(
        store_text(descriptions), store_text(descriptions, explain=True)
    )


def test_meanings_are_single_phrases_and_unknown_facts_have_none() -> None:
    for meaning in [*FACT_MEANINGS.values(), *STORE_MEANINGS.values()]:
        assert "\n" not in meaning
        assert ". " not in meaning
        assert not meaning.endswith(".")
    assert with_meaning("nothing", "  nothing  1", FACT_MEANINGS) == "  nothing  1"
