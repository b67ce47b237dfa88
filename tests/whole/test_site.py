"""Check the built pages in a real browser: their width, and the search."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.browser import COMMAND, ask_pages, needed_widths

DOCS = Path(__file__).resolve().parents[2] / "docs"
MISSING = [name for name in ("sphinx", "furo", "myst_parser") if not importlib.util.find_spec(name)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMMAND is None, reason="needs chromium"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

LONG_PAGES = (
    "tutorial-table", "gallery", "howto/tables", "explanation/losses", "reference/python",
    "reference/settings",
)  # fmt: skip
FIRST = {
    "imbalance": "howto/probabilities", "confusion": "howto/probabilities",
    "deploy": "howto/predict", "hyperparameter": "howto/tune", "overfit": "howto/callbacks",
    "Jupyter": "tutorial", "GPU": "install", "multi-GPU": "howto/ranks",
    "memory": "explanation/memory", "S3": "howto/s3", "quantile": "howto/loss",
    "missing values": "howto/tables", "resume": "howto/resume", "checkpoint": "howto/resume",
    "embedding": "howto/embeddings",
}  # fmt: skip
"""Word -> the page that newcomers who search for it should see first."""
SEARCH = """(page) => page.eval(`(words) => words.map((word) =>
    Search._performSearch(...Search._parseQuery(word)).at(-1)[0])`)(WORDS)"""


@pytest.fixture(scope="module")
def site() -> Path:
    """Build the pages as `tools/docs` does, in the same folder, so that only changed pages are
    built."""
    built = DOCS / "_build"
    built.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        "html",
        "-q",
        "-W",
        "--keep-going",
        DOCS,
        built,
    ]
    with FileLock(built / ".lock"):  # workers of pytest-xdist share it
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return built


def test_long_pages_fit_the_window_without_errors(site: Path, tmp_path: Path) -> None:
    pages = [(site / f"{name}.html", width) for name in LONG_PAGES for width in (400, 1280)]
    assert needed_widths(tmp_path, pages) == [width for _, width in pages]


def test_search_finds_the_page_first(site: Path, tmp_path: Path) -> None:
    script = SEARCH.replace("WORDS", json.dumps(list(FIRST)))
    ((*found,),) = ask_pages(tmp_path, [(site / "search.html", 1280)], script)
    assert dict(zip(FIRST, found, strict=True)) == FIRST


def test_too_wide_page_is_detected(tmp_path: Path) -> None:
    wide = tmp_path / "wide.html"
    wide.write_text("<!DOCTYPE html><title>t</title><div style='width: 500px'>x</div>")
    assert needed_widths(tmp_path, [(wide, 400), (wide, 1280)]) == [508, 1280]
