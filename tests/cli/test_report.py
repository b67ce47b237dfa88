"""Check that the report is valid, complete, free of secrets and readable by a browser."""

from __future__ import annotations

import json
import re
import shutil
import signal
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import html5lib
import numpy as np
import pytest
import zarr
from matplotlib.image import imread
from sklearn.calibration import calibration_curve

import streamkern
from streamkern.cli import main
from streamkern.cli.page.facts import read_facts
from streamkern.cli.page.html import NO_VALUE
from streamkern.cli.page.page import REPORT_MARK
from streamkern.cli.page.setup_sections import _noise_chart
from streamkern.cli.report import _test_predictions
from streamkern.filesystem.urls import open_objects
from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.loop import progress
from tests.browser import COMMAND, ask_pages, needed_widths, open_page
from tests.runs import Run
from tests.s3_server import SECRET, S3Server
from tests.store_damage import flip_bit, tree

pytestmark = pytest.mark.usefixtures("one_blas_thread")

DONE, USAGE, STOPPED = 0, 2, 75
COLUMNS = ["<b>width</b>", "height & depth", "a \"quoted\" 'name'", "plain"]
SETTINGS = ("model.n_centers=60", "data.batch_size=50", "run.threads=1", "run.device=cpu")

rng = np.random.default_rng(0)
X = rng.normal(size=(600, 4)).astype(np.float32)
Y = np.where(X[:, 0] + X[:, 1] ** 2 > 0.5, "<i>yes</i>", "no & never")


def train_arguments(folder: Path, run_dir: object, *more: str) -> list[str]:
    """Return the arguments of a training in `run_dir`, with more settings."""
    settings = [w for s in (*SETTINGS, *more) for w in ("--set", s)]
    return ["--train", f"{folder}/train.zarr", "--test", f"{folder}/test.zarr", "--run-dir",
            f"{run_dir}", "--epochs", "20", *settings]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two stores and the runs `one` and `two`."""
    folder = tmp_path_factory.mktemp("reports")
    ingest(X[:500], folder / "train.zarr", y=Y[:500])
    ingest(X[500:], folder / "test.zarr", y=Y[500:])
    often = ("run.evaluate_every=50", "run.calibrate=false", "solver.name='block'")
    metric = ("model.metric='learn-diagonal'", "model.kernel='auto'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "MIN_LOG_INTERVAL_S", 0.0)  # these runs take no second
        assert main.run_command(["train", *train_arguments(folder, folder / "one", *often)]) == DONE
        assert (
            main.run_command(["train", *train_arguments(folder, folder / "two", *often, *metric)])
            == DONE
        )
    return folder


@pytest.fixture(scope="module")
def page_of_one(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page on the run `one`, which tests only read."""
    out = tmp_path_factory.mktemp("page") / "page.html"
    assert main.run_command(["report", str(folder / "one"), "--out", str(out)]) == DONE
    return out.read_text()


@pytest.fixture(scope="module")
def page_of_both(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a page on both runs."""
    out = tmp_path_factory.mktemp("page") / "page.html"
    places = [str(folder / "one"), str(folder / "two")]
    assert main.run_command(["report", *places, "--out", str(out)]) == DONE
    return out


def parse_page(text: str) -> Any:
    """Return the tree of a page. Raises ParseError if the HTML or an SVG is not valid."""
    assert text.startswith(REPORT_MARK)
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(svg)
    return html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(text)


def table_rows(page: Any, title: str) -> dict[str, list[str]]:
    """Return the rows of the first table in a section, by their first cells."""
    for section in page.iter("section"):
        if "".join(section.find("h2").itertext()) == title:
            rows = next(section.iter("tbody"))
            texts = [["".join(cell.itertext()) for cell in row] for row in rows]
            return {name: cells for name, *cells in texts}
    raise AssertionError(f"no section {title}")


@pytest.mark.slow
def test_report_shows_facts_of_runs(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    files = tree(folder)
    assert run("report", folder / "one", folder / "two", "--out", out) == (
        DONE, "", f"streamkern: wrote {out}\n",
    )  # fmt: skip
    assert tree(folder) == files
    page = parse_page(out.read_text())
    code, text, _ = run("info", folder / "one", "--json")
    info = json.loads(text)
    assert code == DONE
    full = "".join(page.itertext())
    assert f"{info['metrics']['test_accuracy']:.4g}" in full
    arguments = train_arguments(folder, folder / "new", "solver.name='block'")
    planned = json.loads(run("plan", *arguments, "--json")[1])
    measured = table_rows(page, "Planned and measured")
    assert measured["samples"][:2] == ["10,000", f"{info['samples']:,}"]
    assert measured["steps"][:2] == [f"{planned['batches']:,}", f"{info['step']:,}"]
    assert measured["rows in a batch"][:2] == ["50", "50"]
    mib = planned["memory"]["peak_bytes"] / 2**20
    assert measured["peak memory"][0] == f"{mib:.3g} MiB"
    assert table_rows(page, "Data")["fingerprint"][0] == info["data"]["fingerprint"][:16]
    assert table_rows(page, "Machine and versions")["streamkern"][0] == streamkern.__version__


@pytest.mark.slow
def test_report_lists_only_differing_settings(
    run: Run, folder: Path, page_of_both: Path, tmp_path: Path
) -> None:
    differing = table_rows(parse_page(page_of_both.read_text()), "Settings that differ")
    assert differing["model.metric"] == ["auto", "learn-diagonal"]
    assert "model.n_centers" not in differing
    out = Path(shutil.copy(page_of_both, tmp_path))
    assert run("report", folder / "two", "--out", out)[0] == DONE  # in the place of the other
    differing = table_rows(parse_page(out.read_text()), "Settings that differ")
    assert differing["model.n_centers"] == ["auto", "60"]
    assert "model.centers" not in differing


def test_report_curves_equal_log(folder: Path, page_of_one: str) -> None:
    page = parse_page(page_of_one)
    lines = (folder / "one" / "log.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    evaluated = [r for r in records if r["event"] == "evaluation"]
    (drawing,) = (s for s in page.iter() if s.get("aria-label") == "Test mse")
    reported = [title.text for title in drawing.iter() if str(title.tag).endswith("title")]
    assert len(reported) == len(evaluated) == 4
    for text, evaluation in zip(reported, evaluated, strict=True):
        value, samples = re.fullmatch(r"one: (\S+) at (\S+)", text).groups()  # type: ignore[union-attr]
        assert float(value) == pytest.approx(evaluation["test_mse"], rel=1e-3)
        assert float(samples.replace("k", "e3")) == evaluation["samples"]


def test_report_is_self_contained(page_of_one: str) -> None:
    page = parse_page(page_of_one)
    assert [e.tag for e in page.iter("script")] == []
    links = {v for e in page.iter() for k, v in e.items() if k in ("href", "src", "action")}
    assert {link for link in links if not link.startswith("#")} == {"data:,"}
    assert not re.search(r"url\(|@import|https?://|\bon\w+=", page_of_one)
    (policy,) = (m.get("content") for m in page.iter("meta") if m.get("http-equiv"))
    assert policy.startswith("default-src 'none';")


def test_report_escapes_foreign_names(run: Run, tmp_path: Path) -> None:
    """Check that names of columns, classes and folders are escaped."""
    table = "\n".join(
        [",".join('"' + name.replace('"', '""') + '"' for name in [*COLUMNS, "y"])]
        + [",".join(map(str, row)) + f",{label}" for row, label in zip(X, Y, strict=True)]
    )
    (tmp_path / "t.csv").write_text(table)
    assert run("ingest", tmp_path / "t.csv", tmp_path / "t.zarr", "--y", "y")[0] == DONE
    path = tmp_path / "<u>run & 'co'"
    settings = [w for s in (*SETTINGS, "model.metric='learn'") for w in ("--set", s)]
    code, _, message = run("train", "--train", tmp_path / "t.zarr", "--run-dir", path, *settings)
    assert code == DONE, message
    assert run("report", path, "--out", tmp_path / "page.html")[0] == DONE
    page = parse_page((tmp_path / "page.html").read_text())
    full = "".join(page.itertext())
    assert page.find("body/h1").text == path.name
    assert all(name in full for name in (*COLUMNS, *set(Y)))
    assert [list(page.iter(tag)) for tag in ("b", "u")] == [[], []]


@pytest.mark.slow
def test_report_names_damage_and_shows_remaining_sections(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "run"
    shutil.copytree(folder / "one", target)
    lines = (target / "log.jsonl").read_bytes().splitlines(keepends=True)
    lines[-3] = lines[-3].replace(b'"samples"', b'"Samples"')
    (target / "log.jsonl").write_bytes(b"".join(lines))
    newest = sorted(path.name for path in (target / "checkpoints").glob("*.json"))[-1]
    flip_bit(target, f"checkpoints/{newest}")
    flip_bit(target, "run.json", 40)
    assert run("report", target, "--out", tmp_path / "page.html")[0] == DONE
    full = "".join(parse_page((tmp_path / "page.html").read_text()).itertext())
    for message in (
        "1 damaged line(s) of the run log",
        f"{newest} is damaged",
        "run.json is damaged",
    ):
        assert message in full
    assert "Training loss" in full


def test_report_shows_running_run_and_saved_model(run: Run, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(folder / "one", path)
    streamkern.KernelClassifier(kernel="laplace", bandwidth=2.0).fit(X, Y).save(tmp_path / "saved")
    with RunDirectory(path):
        assert run("report", path, tmp_path / "saved", "--out", tmp_path / "p.html")[0] == DONE
    full = "".join(parse_page((tmp_path / "p.html").read_text()).itertext())
    assert "run is being written by process" in full
    assert "1 damaged" not in full


def test_report_distinguishes_runs_with_equal_names(run: Run, folder: Path, tmp_path: Path) -> None:
    for parent in ("a", "b"):
        shutil.copytree(folder / "one", tmp_path / parent / "run")
    places = (tmp_path / "a" / "run", tmp_path / "b" / "run")
    assert run("report", *places, places[0], "--out", tmp_path / "p.html")[0] == DONE
    page = parse_page((tmp_path / "p.html").read_text())
    assert "".join(page.find("body/h1").itertext()) == "2 runs"
    names = ["".join(cell.itertext()) for cell in next(page.iter("tbody")).iter("th")]
    assert names == ["a/run", "b/run"]


def test_report_never_replaces_foreign_file(run: Run, folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("<!DOCTYPE html>\n<html></html>")
    one = folder / "one"
    for out, message in (
        (mine, "was not made by streamkern report; name another file"),
        (tmp_path, "cannot be replaced (Is a directory); name another file"),
        (tmp_path / "none" / "p.html", "create it first"),
    ):
        code, _, err = run("report", one, "--out", out)
        assert (code, err.count("\n")) == (USAGE, 1)
        assert err.endswith(f"{message}\n")
    assert mine.read_text() == "<!DOCTYPE html>\n<html></html>"
    code, _, err = run("report", one, folder / "train.zarr", "--out", tmp_path / "new.html")
    assert (code, err.count("\n")) == (USAGE, 1)
    assert "there is no run in" in err
    assert not (tmp_path / "new.html").exists()


def test_report_on_s3_run_hides_secrets(
    run: Run, folder: Path, s3: S3Server, bucket: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    options = s3.words(monkeypatch)
    objects = open_objects(f"s3://{bucket}/runs/one", storage_options=s3.options())
    for key, data in tree(folder / "one").items():
        objects.put(key, data)
    url = f"s3://KEYNAME:{SECRET}@{bucket}/runs/one?sig=Zq7Xk{SECRET}"
    assert run("report", f"s3://{bucket}/runs/one", "--out", tmp_path / "p.html", *options)[0] == (
        DONE
    )
    code, _, err = run("report", url, "--out", tmp_path / "q.html", *options)
    assert (code, "holds credentials" in err, SECRET in err) == (USAGE, True, False)
    for text in (path.read_text() for path in tmp_path.glob("*.html")):
        assert SECRET not in text
        assert table_rows(parse_page(text), "Planned and measured")["samples"] == [
            "10,000",
            "10,000",
        ]
    code, out, _ = run("runs", f"s3://{bucket}/runs", *options)
    assert code == DONE
    assert re.search(r"^one +finished +block +60 +10000 ", out, re.MULTILINE)


def test_report_hides_secrets_of_environment(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ZqSECRET7Xk<&>"
    shutil.copytree(folder / "one", path)
    monkeypatch.setenv("SOME_SECRET", path.name)
    assert run("report", path, "--out", tmp_path / "p.html")[0] == DONE
    text = (tmp_path / "p.html").read_text()
    parse_page(text)
    assert "ZqSECRET7Xk" not in text


# ---------------------------------------------------------------------------------- a browser

needs_chromium = pytest.mark.skipif(COMMAND is None, reason="needs chromium")


@needs_chromium
@pytest.mark.slow
def test_browser_opens_report_without_errors(page_of_both: Path, tmp_path: Path) -> None:
    backgrounds = []
    for dark in (False, True):
        picture = tmp_path / f"{dark}.png"
        assert open_page(page_of_both, picture, dark=dark) == []
        pixels = imread(picture)[:, :, :3]
        assert pixels.shape[:2] == (2400, 1280)
        assert len(np.unique(pixels[::4, ::4].reshape(-1, 3), axis=0)) > 20  # curves and text
        backgrounds.append(pixels[0, 0].mean())
    assert backgrounds[0] > 0.9
    assert backgrounds[1] < 0.2


@needs_chromium
@pytest.mark.slow
def test_report_fits_narrow_and_wide_windows(page_of_both: Path, tmp_path: Path) -> None:
    """Check that wide tables scroll in their own boxes."""
    out = page_of_both
    assert needed_widths(tmp_path, [(out, 400), (out, 1280)]) == [400, 1280]
    script = """(page) => [...page.document.querySelectorAll(".wide")].map(
        (box) => box.scrollWidth > box.clientWidth)"""
    narrow, wide = ask_pages(tmp_path, [(out, 400), (out, 1280)], script)
    assert any(narrow)
    assert not any(wide)


@needs_chromium
@pytest.mark.slow
def test_report_with_long_run_name_fits_a_narrow_window(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    long = tmp_path / ("long_name_of_a_run_" * 5)
    shutil.copytree(folder / "one", long)
    single_page, joint_page = tmp_path / "alone.html", tmp_path / "both.html"
    assert run("report", long, "--out", single_page)[0] == DONE
    assert run("report", long, folder / "two", "--out", joint_page)[0] == DONE
    assert needed_widths(tmp_path, [(single_page, 400), (joint_page, 400)]) == [400, 400]


@needs_chromium
@pytest.mark.slow
def test_calibration_and_timeline_labels_are_legible(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    """Check that at both widths labels are at least as large as in the other charts."""
    out, path = tmp_path / "page.html", tmp_path / "calibrated"
    more = ("run.calibrate=true", "run.evaluate_every=50", "solver.name=block")
    training = ["train", *train_arguments(folder, path, *more)]
    with pytest.MonkeyPatch.context() as patch:  # a stop, so that there is a pause
        patch.setattr(
            "streamkern.cli.runs.show_evaluation", lambda _: signal.raise_signal(signal.SIGTERM)
        )
        assert main.run_command(training) == STOPPED
    assert main.run_command(training) == DONE
    assert run("report", path, folder / "one", "--out", out)[0] == DONE
    script = """(page) => [
        [...page.document.querySelectorAll(".wide:not(.time)")].map(
            (box) => box.scrollWidth > box.clientWidth),
        [...page.document.querySelectorAll(".time svg text")].map(
            (text) => text.getBoundingClientRect().height)]"""
    (_, narrow), (scrolls, wide) = ask_pages(tmp_path, [(out, 400), (out, 1280)], script)
    assert needed_widths(tmp_path, [(out, 400), (out, 1280)]) == [400, 1280]
    assert len(table_rows(parse_page(out.read_text()), "Predictions on test rows")) == 2
    assert not any(scrolls)
    assert len(narrow) == len(wide) == 1
    assert min(*narrow, *wide) > 10


@needs_chromium
@pytest.mark.slow
def test_browser_helper_reports_errors_of_a_page(tmp_path: Path) -> None:
    other_page = tmp_path / "wrong.html"
    other_page.write_text("<!DOCTYPE html><title>t</title><img src='https://example.org/x.png'>"
                     "<script>undefined_name()</script>")  # fmt: skip
    message = "\n".join(open_page(other_page, tmp_path / "p.png"))
    assert "undefined_name is not defined" in message


def test_report_shows_ridge_in_use() -> None:
    """Check that the page shows the ridge of the fresh rows, if they show more noise."""
    candidates = [(1e-4, 0.3), (1e-2, 0.2), (1.0, 0.4)]
    record = {"event": "noise", "tried": candidates, "ridge": 4e-8}
    second = {"event": "fresh noise", "tried": candidates, "ridge": 7e-6}
    assert "ridge 4e-08" in str(_noise_chart([record], 0))
    assert "ridge 7e-06" in str(_noise_chart([record, second], 0))
    assert "ridge 4e-08" not in str(_noise_chart([record, second], 0))


def section_text(page: Any, title: str) -> str:
    for section in page.iter("section"):
        if "".join(section.find("h2").itertext()) == title:
            return " ".join(section.itertext())
    return ""


@pytest.mark.slow
def test_report_shows_test_predictions(
    run: Run, folder: Path, page_of_one: str, tmp_path: Path
) -> None:
    """Check that the section exists if the test data does, and is left out otherwise."""
    out, page = tmp_path / "page.html", parse_page(page_of_one)
    lines = table_rows(page, "Predictions on test rows")
    counts = np.array([[int(cell) for cell in cells] for cells in lines.values()])
    accuracy = json.loads(run("info", folder / "one", "--json")[1])["metrics"]["test_accuracy"]
    assert counts.sum() == len(X) - 500
    assert counts.trace() / counts.sum() == pytest.approx(accuracy)
    for name, rows in (("train", slice(0, 200)), ("test", slice(200, 260))):
        ingest(X[rows], tmp_path / f"{name}.zarr", y=X[rows, 0] + 1)
    assert main.run_command(["train", *train_arguments(tmp_path, tmp_path / "values")]) == DONE
    assert run("report", tmp_path / "values", "--out", out)[0] == DONE
    page = parse_page(out.read_text())
    for title in ("Predicted against true", "Residuals"):
        (drawing,) = (s for s in page.iter() if s.get("aria-label") == title)
        assert sum(str(part.tag).endswith("title") for part in drawing.iter()) == 60
    shutil.rmtree(tmp_path / "test.zarr")
    assert run("report", tmp_path / "values", "--out", out)[0] == DONE
    assert section_text(parse_page(out.read_text()), "Predictions on test rows") == ""


def test_report_draws_calibration_curve(run: Run, folder: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "page.html", tmp_path / "calibrated"
    assert main.run_command(["train", *train_arguments(folder, path, "run.calibrate=true")]) == DONE
    predictions = _test_predictions(read_facts(path), str(path), {})
    assert predictions is not None
    assert predictions.reliability is not None
    model = streamkern.load(path)
    p = model.predict_proba(X[500:])
    is_right = model.classes_[p.argmax(axis=1)] == Y[500:]
    shares, means = calibration_curve(is_right, p.max(axis=1), n_bins=15)
    np.testing.assert_allclose(
        predictions.reliability, np.stack([means, shares], axis=1), atol=1e-6
    )
    assert run("report", path, "--out", out)[0] == DONE
    page = parse_page(out.read_text())
    (drawing,) = (s for s in page.iter() if s.get("aria-label", "").startswith("Reliability"))
    assert sum(str(part.tag).endswith("title") for part in drawing.iter()) == len(means)


def test_report_names_the_drawn_output(run: Run, tmp_path: Path) -> None:
    for name, rows in (("train", slice(0, 200)), ("test", slice(200, 260))):
        ingest(X[rows], tmp_path / f"{name}.zarr", y=X[rows, :2])
    location, out = tmp_path / "two", tmp_path / "page.html"
    assert main.run_command(["train", *train_arguments(tmp_path, location)]) == DONE
    assert run("report", location, "--out", out)[0] == DONE
    text = section_text(parse_page(out.read_text()), "Predictions on test rows")
    assert "The charts show the first of 2 outputs." in text


def test_report_reads_test_rows_like_the_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the rows come from the arrays that the settings name; without memory for them, the
    page has the other sections."""
    for name, rows in (("train", slice(0, 200)), ("test", slice(200, 260))):
        group = zarr.open_group(tmp_path / f"{name}.zarr", mode="w")
        t = X[rows, 0].astype(np.float64)
        for array, data in {"feat": X[rows], "t": t, "X": -X[rows], "y": t + 1000}.items():
            group.create_array(array, data=data)
    settings = ("data.x=feat", "data.y=t")
    assert (
        main.run_command(["train", *train_arguments(tmp_path, tmp_path / "run", *settings)]) == DONE
    )
    predictions = _test_predictions(read_facts(tmp_path / "run"), str(tmp_path / "run"), {})
    assert predictions is not None
    true, predicted = predictions.pairs.T
    np.testing.assert_allclose(np.sort(true), np.sort(X[200:260, 0]))
    assert np.corrcoef(true, predicted)[0, 1] > 0.9

    def raise_memory_error(*_args: Any, device: str, **_options: Any) -> Any:
        assert device == "cpu"
        raise MemoryError

    monkeypatch.setattr("streamkern.cli.model.load_model", raise_memory_error)
    out = tmp_path / "page.html"
    assert run("report", tmp_path / "run", "--out", out)[0] == DONE
    assert section_text(parse_page(out.read_text()), "Predictions on test rows") == ""


def test_resolved_auto_value_is_not_a_differing_setting(run: Run, tmp_path: Path) -> None:
    """Check also that no planned value is empty."""
    streamkern.KernelRegressor(run_dir=tmp_path / "run", threads=1, n_centers=20).fit(X, X[:, 0])
    out = tmp_path / "page.html"
    assert run("report", tmp_path / "run", "--out", out)[0] == DONE
    page = parse_page(out.read_text())
    assert list(table_rows(page, "Settings that differ")) == ["model.n_centers"]
    planned = [cells[0] for cells in table_rows(page, "Planned and measured").values()]
    assert NO_VALUE not in planned
