"""Check the documentation pages: every block runs, and every link resolves."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pytest

import streamkern
from streamkern.cli.main import run_command
from streamkern.config.run_config import RunConfig, load_run_file
from tests.page_names import unknown_names
from tests.s3_server import KEY, SECRET, S3Server

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)]
BLOCK = re.compile(
    r"^(<!-- not run: (\w[^\n]+) -->\n)?```(python|toml|sh)\n(.*?)^```$"
    r"(?:\n\n<!-- output -->\n```text\n(.*?)^```$)?",
    re.M | re.S,
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
ON_S3 = "<!-- runs on: s3 -->"
NEEDS = re.compile(r"^<!-- needs: ([\w, ]+) -->$", re.M)
MOST_LINES_OF_README = 150
MOST_NOT_RUN = 10


class Block(NamedTuple):
    """A fenced block.

    kind : python, toml or sh
    why_not : the reason why it is not run, or ""
    output : the lines that the page says it prints, or ""
    """

    kind: str
    text: str
    why_not: str
    output: str


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page that can be run, in order."""
    matches = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [Block(kind, text, why, output) for _, why, kind, text, output in matches]


WITH_BLOCKS = [page for page in PAGES if any(not block.why_not for block in blocks(page))]


def run_toml(text: str) -> None:
    """Write a run file, called as its first line says, and have it checked."""
    name = re.match(r"# (\S+\.toml)\n", text)
    path = Path(name[1] if name else "unnamed.toml")
    path.write_text(text, encoding="utf-8")
    load_run_file(path)


def run_line(line: str) -> str | None:
    """Run a line of a shell block in this process; return its error, or None."""
    words = shlex.split(line, comments=True)
    match words:
        case ["streamkern", *rest]:
            code = run_command(rest)
            return None if code == 0 else f"exit code {code}"
        case ["python", "-m", "pip", *_] | ["pip", *_] | []:
            return None
        case ["python", "-m", module, *_]:
            path = ROOT / module.replace(".", "/")
            return None if path.is_dir() or path.with_suffix(".py").is_file() else "no such module"
        case [program, *rest]:
            script = rest[0] if program == "python" else program
            return None if (ROOT / script).is_file() else "no such program"
    return None


def run_by_shell(text: str, folder: Path) -> str | None:
    """Run a block by a shell; return its error, or None."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    program = programs / "streamkern"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m streamkern "$@"\n')
    program.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    completed = subprocess.run(
        ["sh", "-e", "-c", text], env=environment, capture_output=True, text=True, check=False
    )
    return None if completed.returncode == 0 else completed.stderr


def run_sh(text: str, folder: Path) -> None:
    """Run a block line by line in this process, or by a shell if it needs one."""
    if re.search(r"[&;$>|]", re.sub(r"'[^']*'|#.*", "", text)):
        problem = run_by_shell(text, folder)
        assert problem is None, f"{text}\n{problem}"
        return
    for line in text.replace("\\\n", "").splitlines():
        problem = run_line(line)
        assert problem is None, f"{line}: {problem}"


NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def assert_same_output(printed: str, shown: str) -> None:
    """Compare the words, and numbers to a tenth or .05.

    Another BLAS rounds otherwise, and of two kernels that are as good the other may be chosen.
    """
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
    assert all(isclose(float(a), float(b), rel_tol=0.1, abs_tol=0.05) for a, b in pairs), printed


LONG_PAGES = (
    "ranks", "probabilities", "resume", "solver", "centers", "report", "tune", "tutorial-table",
    "embeddings", "inputs", "loss", "losses", "callbacks", "augmentation", "predict",
    "determinism",
)  # fmt: skip
"""Pages whose blocks take longest; other tests cover the functions that they show."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.full] if page.stem in LONG_PAGES else [])
        for page in WITH_BLOCKS
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_block_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for packages in NEEDS.findall(page.read_text(encoding="utf-8")):
        for package in packages.split(", "):
            pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as the folder of a script
    if ON_S3 in page.read_text(encoding="utf-8"):
        server: S3Server = request.getfixturevalue("s3")
        server.client().create_bucket(Bucket="bucket")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        if block.why_not:
            continue
        if block.kind == "python":
            text = block.text.replace("Prometheus(9464", "Prometheus(0")  # another run may serve it
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(text, str(page), "exec"), names)
            if block.output:
                assert_same_output(printed.getvalue(), block.output)
        elif block.kind == "toml":
            run_toml(block.text)
        else:
            run_sh(block.text, tmp_path)


def test_tutorial_figures_match_its_blocks() -> None:
    page = DOCS / "tutorial-table.md"
    text = page.read_text(encoding="utf-8")
    saved_figures = re.findall(r'savefig\("(.+?)"', text)
    assert re.findall(r"]\(tutorial-table/(.+?)\)", text) == saved_figures
    pictures = sorted(page.with_suffix("").iterdir())
    assert [picture.name for picture in pictures] == sorted(saved_figures)
    assert all(picture.stat().st_size < 60_000 for picture in pictures)


def test_few_blocks_are_not_run() -> None:
    not_run = [block for page in PAGES for block in blocks(page) if block.why_not]
    assert len(not_run) <= MOST_NOT_RUN


def test_every_fenced_block_is_found() -> None:
    """Check for fences that the pattern above misses: indented ones, and those with further
    words."""
    fence = re.compile(r"^ *```+ *(python|toml|sh)\b.*$", re.M)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(fence.findall(text)) == len(blocks(page)), page


# ------------------------------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    """Return the anchors of its headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in LINK.findall(text):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https", link
            assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), link
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        assert target.exists(), link
        if parts.fragment and "<!-- generated" not in target.read_text(encoding="utf-8"):
            assert parts.fragment in anchors(target), link


def test_names_in_backticks_exist() -> None:
    pages = [*PAGES, ROOT / "CONTRIBUTING.md"]
    unknown = {str(p): [*unknown_names(p.read_text(encoding="utf-8"))] for p in pages}
    assert {page: names for page, names in unknown.items() if names} == {}


def test_unknown_names_in_backticks_are_found() -> None:
    known = "`streamkern.load`, `solver/block.py`, `--run-dir`, `data.train`, `test_mse`, `a_b`"
    code = "```python\na_b = 1\n```\n"
    wrong = ["streamkern.lode", "solver/blocks.py", "--run-folder", "data.trains", "_more_damping"]
    assert list(unknown_names(code + known)) == []
    assert list(unknown_names(" ".join(f"`{name}`" for name in wrong))) == wrong


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_README


def test_every_extra_is_documented() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (DOCS / "install.md").read_text(encoding="utf-8")
    missing = [name for name in project["optional-dependencies"] if f"`{name}`" not in text]
    assert missing == []


# ---------------------------------------------------------------------- the generated parts


def test_every_setting_is_documented() -> None:
    """Check the docstring of its model, from which the page of settings is made."""
    for _, section in RunConfig():
        kind = type(section)
        message = re.findall(r"^(\w+) : ", inspect.getdoc(kind) or "", re.M)
        assert sorted(message) == sorted(kind.model_fields), kind.__name__


# ---------------------------------------------------------------------------- OpenTelemetry


def opentelemetry(provider: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an instance of the class that the page defines."""
    from opentelemetry import metrics

    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    (text,) = (b.text for b in blocks(DOCS / "howto/callbacks.md") if "get_meter" in b.text)
    names: dict[str, Any] = {"streamkern": streamkern}
    exec(re.split(r"\n\n\nstreamkern\.", text)[0], names)
    return names["OpenTelemetry"]()


def test_opentelemetry_callback_sends_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk.metrics", reason="needs opentelemetry-sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    sent = opentelemetry(MeterProvider([reader]), monkeypatch)
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(300, 3)), rng.normal(size=300)
    model = streamkern.KernelRegressor(
        "laplace", bandwidth=2.0, n_centers=50, solver="block", epochs=2, callbacks=[sent]
    ).fit(X, y, test=(X, y))
    data = reader.get_metrics_data()
    shown = {
        metric.name: point.value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert shown["streamkern.epoch"] == 2
    assert shown["streamkern.test_mse"] == pytest.approx(model.report_["test_mse"])


def numbers_of_record(name: str) -> set[int]:
    """Return the figures of a record of `benchmarks/results`, rounded to whole numbers."""
    record = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    names = ("median", "low", "high", "min", "max")
    return {round(figure[name]) for figure in record["figures"] for name in names}


@pytest.mark.parametrize(
    ("section", "record"),
    [("### Products and steps", "cpu"), ("## Storage", "object_storage")],
)
def test_quoted_training_speeds_equal_records(section: str, record: str) -> None:
    """Check that the page quotes only speeds of training that the record of its section holds."""
    page = (DOCS / "explanation" / "measured.md").read_text(encoding="utf-8")
    text = page.partition(f"\n{section}\n")[2].partition("\n##")[0]
    items = [item for item in re.split(r"\n(?=[-|]|\n)", text) if "samples/s" in item]
    # A size, such as "p = 2000" or "10 000 centers", is not a speed.
    speeds = [
        int(number.replace(" ", ""))
        for item in items
        for number in re.findall(r"(?<!\d)(?<!p = )\d{1,3} ?\d{3}\b(?! centers)",
                                 item.replace("\n ", ""))
    ]  # fmt: skip
    assert len(speeds) >= 2
    assert not set(speeds) - numbers_of_record(record)
