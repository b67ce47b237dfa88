"""Check the journal of a search: it resumes, refuses other searches, and survives damage."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
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


def test_finished_search_trains_nothing_again(tmp_path: Path) -> None:
    trials: list[dict[str, Any]] = []
    options: dict[str, Any] = {
        **QUICK, "source": array_source(), "out": tmp_path, "report": record_trials(trials),
    }  # fmt: skip
    result = search_settings(config(), **options)
    assert [trial["left"] for trial in trials] == [2, 1, 0]
    assert json.loads((tmp_path / "result.json").read_text())["table"] == result.table
    trials.clear()
    assert (search_settings(config(), **options), trials) == (result, [])


def test_extended_search_trains_only_new_trials(tmp_path: Path) -> None:
    """Check that the journal of the first search is continued, not rewritten."""
    trials: list[dict[str, Any]] = []
    options: dict[str, Any] = {
        **QUICK, "source": array_source(), "out": tmp_path, "report": record_trials(trials),
    }  # fmt: skip
    search_settings(config(), **options)
    journal_before = (tmp_path / JOURNAL_NAME).read_bytes()
    trials.clear()
    extended: dict[str, Any] = {
        "bandwidths": [3.0, 27.0], "ridges": [0, 1e-4], "folds": 2,
        "kernels": ["laplace", "cauchy"],
    }  # fmt: skip
    search_settings(config(), **options | extended)
    # The first search trained bandwidth 3, ridge 0 and kernel "laplace" on the first fold.
    assert len(trials) == 2 * 2 * 2 * 2 - 1
    assert (tmp_path / JOURNAL_NAME).read_bytes().startswith(journal_before)


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
    ("changes", "options", "message"),
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
    changes: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    first: dict[str, Any] = {**QUICK, "source": array_source(), "out": tmp_path}
    search_settings(config(), **first)
    files_before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ResumeMismatchError) as caught:
        search_settings(config(**changes), **first | options)
    assert message in str(caught.value)
    assert str(caught.value).endswith("restore the settings and data, or give another folder")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files_before


def test_metric_file_is_identified_by_content(tmp_path: Path) -> None:
    """Check that a search with other contents of the same file is refused."""
    np.save(tmp_path / "a.npy", np.ones(D))
    run = config(**{"model.metric": str(tmp_path / "a.npy")})
    options: dict[str, Any] = {**QUICK, "source": array_source(), "out": tmp_path / "t"}
    search_settings(run, **options)
    search_settings(run, **options)
    np.save(tmp_path / "a.npy", np.full(D, 2.0))
    with pytest.raises(ResumeMismatchError, match=r"metric: other contents"):
        search_settings(run, **options)


def test_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(RunError, match=r"holds 'thesis.tex' but no search of streamkern"):
        search_settings(config(), **QUICK, source=array_source(), out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_study_of_optuna_is_unchanged(tmp_path: Path) -> None:
    """Check a journal that another process is writing: its last line is incomplete."""
    optuna = pytest.importorskip("optuna")
    journal = tmp_path / JOURNAL_NAME
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    optuna.create_study(study_name="mine", storage=optuna.storages.JournalStorage(backend))
    with open(journal, "a") as file:
        file.write('{"op_code": 4, "wor')
    assert_refused_and_unchanged(journal, "is a study of Optuna")


def test_search_of_version_0_1_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "search.json").write_text("{}")
    assert_refused_and_unchanged(tmp_path / "search.json", "a search of streamkern 0.1.0")


def assert_refused_and_unchanged(journal: Path, message: str) -> None:
    """Assert that a search in the folder of `journal` raises an error and keeps the file."""
    content_before = journal.read_bytes()
    with pytest.raises(RunError, match=message):
        search_settings(config(), **QUICK, source=array_source(), out=journal.parent)
    assert journal.read_bytes() == content_before


def test_concurrent_search_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {**QUICK, "source": array_source(), "out": tmp_path}

    def second(event: str, fields: dict[str, Any]) -> None:
        with pytest.raises(RunLockedError, match="another process runs the search in"):
            search_settings(config(), **options)

    search_settings(config(), **options, report=second)
    search_settings(config(), **options)


@pytest.fixture
def search(tmp_path: Path) -> Callable[[], tuple[Any, int]]:
    """Return a function that searches in `tmp_path`: the result without times, and the number of
    trials that were trained."""

    def run() -> tuple[Any, int]:
        trials: list[dict[str, Any]] = []
        result = search_settings(
            config(), **QUICK, source=array_source(), out=tmp_path, report=record_trials(trials)
        )
        return without_times(result), len(trials)

    return run


@pytest.mark.parametrize(
    ("damage", "message", "n_repeated"),
    [
        (lambda lines: [*lines[:-2], lines[-2][:-20] + b"\n", lines[-1]], "from line 4 on", 2),
        (lambda lines: [*lines[:-1], re.sub(rb'"fold": ?0', b'"fold":1', lines[-1])], "trial 2", 1),
    ],
    ids=["line cut short", "record of another fold"],
)
def test_damaged_records_are_trained_again(
    damage: Any, message: str, n_repeated: int, search: Any, tmp_path: Path
) -> None:
    result, n_trials = search()
    assert n_trials == 3
    journal = tmp_path / JOURNAL_NAME
    journal.write_bytes(b"".join(damage(journal.read_bytes().splitlines(keepends=True))))
    with pytest.warns(UserWarning, match=rf"is damaged .*{message}.* repeated"):
        assert search() == (result, n_repeated)


def test_incomplete_last_line_is_no_damage(search: Any, tmp_path: Path) -> None:
    """Check a line that a killed process did not finish: a warning would be an error here."""
    result, _ = search()
    journal = tmp_path / JOURNAL_NAME
    *lines, last_line = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines) + last_line[:50])
    assert search() == (result, 1)


def test_journal_with_unknown_operations_is_refused(search: Any, tmp_path: Path) -> None:
    search()
    journal = tmp_path / JOURNAL_NAME
    journal.write_bytes(journal.read_bytes().replace(b'"op_code":4', b'"op_code":9'))
    with pytest.raises(RunError, match=r"journal.log is damaged .*; restore it from a copy"):
        search()


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
