"""Check the journal of a search: what resumes it, what is refused, and damage."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import (
    ResumeMismatchError,
    RunError,
    RunLockedError,
    TrainingInterrupted,
)
from streamkern.ingest.ingest import ingest
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.tuning.journal import JOURNAL_NAME
from streamkern.tuning.search import search_settings
from tests.runs import D, array_source, without_times
from tests.searches import QUICK, TRY_AGAIN, config, record_trials


def test_search_resumes_and_extends(tmp_path: Path) -> None:
    report: list[dict[str, Any]] = []
    options: dict[str, Any] = {
        **QUICK, "source": array_source(), "out": tmp_path / "t", "report": record_trials(report),
    }  # fmt: skip
    tuned = search_settings(config(), **options)
    assert len(report) == 3
    assert [r["left"] for r in report] == [2, 1, 0]
    files = {path.name: path.read_bytes() for path in (tmp_path / "t").iterdir()}
    assert json.loads(files["result.json"])["table"] == tuned.table
    report.clear()
    repeated = search_settings(config(), **options)
    assert (report, repeated) == ([], tuned)
    # More of everything that is searched: nothing is trained twice.
    more: dict[str, Any] = {
        "bandwidths": [3.0, 27.0], "ridges": [0, 1e-4], "folds": 2,
        "kernels": ["laplace", "cauchy"],
    }  # fmt: skip
    wide = search_settings(config(), **options | more)
    assert len(report) == 2 * 2 * 2 * 2 - 1
    row = next(r for r in tuned.table if r["bandwidth"] == 3)
    recorded_row = next(
        r for r in wide.table if (r["kernel"], r["bandwidth"], r["ridge"]) == ("laplace", 3, 0)
    )
    assert min(recorded_row["held_out_mse"], row["held_out_mse"]) > 0
    for name, content in files.items():
        if name != "result.json":
            assert (tmp_path / "t" / name).read_bytes().startswith(content)


def test_moved_data_resumes_search(tmp_path: Path) -> None:
    X = np.random.default_rng(0).standard_normal((60, 3)).astype(np.float32)
    ingest(X, tmp_path / "a.zarr", y=X[:, :1].astype(np.float64))
    run = config(**{"data.train": str(tmp_path / "a.zarr"), "model.n_centers": "auto"})
    report: list[dict[str, Any]] = []
    search_settings(run, **QUICK, out=tmp_path / "t", report=record_trials(report))
    (tmp_path / "a.zarr").rename(tmp_path / "b.zarr")
    run = run.with_overrides({"data.train": str(tmp_path / "b.zarr"), "data.prefetch_threads": 1})
    search_settings(run, **QUICK, out=tmp_path / "t", report=record_trials(report))
    assert len(report) == 3


@pytest.mark.parametrize(
    ("changes", "options", "named"),
    [
        ({"run.random_state": 1}, {}, "run.random_state: was 0, now 1"),
        ({"solver.damping": 0.1}, {}, "solver.damping: was 'auto', now 0.1"),
        ({}, {"epochs": 3}, "data.epochs: was 2, now 3"),
        ({}, {"centers": 10}, "model.n_centers: was 60, now 10"),
        ({}, {"rows": 100}, "sample.rows: was 135, now 100"),
        ({}, {"folds": 6}, "sample.parts: was 5, now 6"),
        ({}, {"source": array_source(seed=1)}, "data: other rows or targets"),
        ({}, {"source": AugmentedSource(array_source(), 2)}, "data.n_rows: was 135, now 270"),
    ],
)
def test_changed_search_is_refused(
    changes: dict[str, Any], options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    plain: dict[str, Any] = {**QUICK, "source": array_source(), "out": tmp_path}
    search_settings(config(), **plain)
    files_before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ResumeMismatchError) as caught:
        search_settings(config(**changes), **plain | options)
    assert named in str(caught.value)
    assert str(caught.value).endswith("restore the settings and data, or give another folder")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files_before


def test_metric_file_is_identified_by_content(tmp_path: Path) -> None:
    """Check that another file of the same name makes another search."""
    np.save(tmp_path / "a.npy", np.ones(D))
    named = {"model.metric": str(tmp_path / "a.npy")}
    plain: dict[str, Any] = {**QUICK, "source": array_source(), "out": tmp_path / "t"}
    search_settings(config(**named), **plain)
    search_settings(config(**named), **plain)
    np.save(tmp_path / "a.npy", np.full(D, 2.0))
    with pytest.raises(ResumeMismatchError, match=r"metric: other contents"):
        search_settings(config(**named), **plain)


def test_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(RunError, match=r"holds 'thesis.tex' but no search of streamkern"):
        search_settings(config(), **QUICK, source=array_source(), out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_foreign_study_is_unchanged(tmp_path: Path) -> None:
    """Check a journal of Optuna with an incomplete last line, and a search of version 0.1.0."""
    optuna = pytest.importorskip("optuna")
    journal, old_journal = tmp_path / "theirs" / JOURNAL_NAME, tmp_path / "old" / "search.json"
    for path in (journal, old_journal):
        path.parent.mkdir()
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    optuna.create_study(study_name="mine", storage=optuna.storages.JournalStorage(backend))
    with open(journal, "a") as file:
        file.write('{"op_code": 4, "wor')
    old_journal.write_text("{}")
    for path, message in (
        (journal, "is a study of Optuna"),
        (old_journal, "a search of streamkern 0.1.0"),
    ):
        content_before = path.read_bytes()
        with pytest.raises(RunError, match=message):
            search_settings(config(), **QUICK, source=array_source(), out=path.parent)
        assert path.read_bytes() == content_before


def test_concurrent_search_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {**QUICK, "source": array_source(), "out": tmp_path}

    def second(event: str, fields: dict[str, Any]) -> None:
        with pytest.raises(RunLockedError, match="another process runs the search in"):
            search_settings(config(), **options)

    search_settings(config(), **options, report=second)
    search_settings(config(), **options)


def test_damaged_record_is_trained_again(tmp_path: Path) -> None:
    report: list[dict[str, Any]] = []
    options: dict[str, Any] = {"source": array_source(), "out": tmp_path}
    options["report"] = record_trials(report)
    tuned = search_settings(config(), **QUICK, **options)
    journal = tmp_path / JOURNAL_NAME
    *_, damaged_line, last_line = intact = journal.read_bytes().splitlines(keepends=True)
    for damaged, redone in (
        (
            [
                *intact[:-1],
                last_line.replace(b'"fold": 0', b'"fold": 1').replace(b'"fold":0', b'"fold":1'),
            ],
            "trial 2",
        ),
        ([*intact[:-2], damaged_line[:-20] + b"\n", last_line], "from line 4 on"),
    ):
        journal.write_bytes(b"".join(damaged))
        with pytest.warns(UserWarning, match=rf"is damaged .*{redone}.* repeated"):
            repeated = search_settings(config(), **QUICK, **options)
        assert without_times(repeated) == without_times(tuned)
    assert len(report) == 3 + 1 + 2
    # An incomplete last line is left by a kill, and is not damage.
    journal.write_bytes(b"".join(intact[:-1]) + last_line[:50])
    assert without_times(search_settings(config(), **QUICK, **options)) == without_times(tuned)
    assert len(report) == 7
    journal.write_bytes(b"".join(intact).replace(b'"op_code":4', b'"op_code":9'))
    with pytest.raises(RunError, match=r"journal.log is damaged .*; restore it from a copy"):
        search_settings(config(), **QUICK, **options)


def test_search_runs_on_object_storage(bucket: str, s3: Any, tmp_path: Path) -> None:
    report: list[dict[str, Any]] = []
    run = config(**{"data.storage_options": s3.options()})
    location: dict[str, Any] = {
        "source": array_source(), "out": f"s3://{bucket}/search", "report": record_trials(report),
    }  # fmt: skip
    tuned = search_settings(run, **QUICK, **location)
    assert search_settings(run, **QUICK, **location) == tuned
    assert len(report) == 3
    with pytest.raises(ResumeMismatchError, match="random_state"):
        search_settings(run.with_overrides({"run.random_state": 1}), **QUICK, **location)


def test_signal_during_a_trial_ends_the_search(tmp_path: Path) -> None:
    report: list[dict[str, Any]] = []

    def stop_at_the_second(event: str, fields: dict[str, Any]) -> None:
        record_trials(report)(event, fields)
        if len(report) == 2:
            signal.raise_signal(signal.SIGTERM)

    options: dict[str, Any] = {**QUICK, "source": array_source(), "out": tmp_path}
    with pytest.raises(
        TrainingInterrupted, match=r"by SIGTERM with 2 of 3 .* run the same"
    ) as caught:
        search_settings(config(), **options, report=stop_at_the_second)
    assert caught.value.exit_code == TRY_AGAIN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    search_settings(config(), **options, report=record_trials(report))
    assert len(report) == 3
