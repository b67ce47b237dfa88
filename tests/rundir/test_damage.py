"""Check that a flipped bit in a run directory never changes a result without a message.

For load_model, `info`, a resumed run and a continued search, the result is the same, or there is an
error or a warning.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.basics.errors import RunLockedError, StreamkernError
from streamkern.cli.run_info import run_overview, run_text
from streamkern.filesystem.urls import open_objects
from streamkern.rundir import checksums
from streamkern.rundir.checkpoint_format import checkpoint_errors
from streamkern.rundir.lease import Lease, current_holder
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_log import _sealed_line
from streamkern.train.restart.run_snapshot import recorded_run
from streamkern.train.saved_model import load_model
from streamkern.tuning.journal import TrialJournal
from tests import bit_flips
from tests.runs import array_source, finished, settings, stopped, stream


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was stopped after 8 of 14 steps, with checkpoints of steps 4, 6 and 8."""
    path = tmp_path_factory.mktemp("damage") / "run"
    stopped(config(path), 8, source=stream())
    assert RunDirectory(path, writable=False).steps() == [4, 6, 8]
    return path


def config(path: Path) -> Any:
    return settings(path, **{"run.checkpoint_every": 2, "run.evaluate_every": 3})


@pytest.fixture(autouse=True)
def working_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change to a new folder, so that every copy has the same path, which results contain."""
    with tempfile.TemporaryDirectory(dir=run.parent) as folder:
        monkeypatch.chdir(folder)
        yield


ReadRun = Callable[[Path], Any]


def load_model_outputs(path: Path) -> Any:
    """Return the outputs of the model on ten fixed rows."""
    model = load_model(path, device="cpu", threads=1)
    with model.backend:
        values = model.values(np.linspace(-1, 1, 50, dtype=np.float32).reshape(10, 5))
    return values.tobytes()


def load_overview(path: Path) -> Any:
    """Return the values of `streamkern info`."""
    overview = run_overview(path)
    with checkpoint_errors(str(path)):  # as `info` does
        run_text(overview)
    return overview


def finish_run(path: Path) -> Any:
    """Resume the run, and return its weights, history and metrics."""
    result = finished(config(path), source=stream(), test=array_source(10, 5))
    return np.asarray(result.model.weights).tobytes(), result.history, result.metrics


def reports_damage(overview: Any) -> bool:
    """Return whether an overview reports the damage itself."""
    return isinstance(overview, dict) and bool(
        overview["warnings"] or "damaged" in overview["state"]
    )


def describe_read(run: Path, flip: bit_flips.Flip | None, read_run: ReadRun, expected: Any) -> str:
    """Copy the run, flip a bit, and return how the result of `read_run` differs from `expected`."""
    path = Path("run")
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(run, path)
    if flip is not None:
        file = path / flip.path.relative_to(run)
        data = bytearray(file.read_bytes())
        data[flip.byte] ^= 1 << flip.bit
        file.write_bytes(data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = read_run(path)
        except StreamkernError:
            return "an error"
    is_reported = bool(caught) or reports_damage(result)
    if result == expected:
        return "the same, with a warning" if is_reported else "the same"
    return "another, with a warning" if is_reported else "another, without a warning"


def check_flips(run: Path, read_run: ReadRun, n: int, seed: int) -> None:
    """Check that no flipped bit changes the result of `read_run` without an error or a warning."""
    expected = read_run(Path(shutil.copytree(run, "run")))
    assert describe_read(run, None, read_run, expected) == "the same"
    counts: Counter[str] = Counter()
    unreported_flips = []
    for flip in bit_flips.flips(run, n, seed):
        outcome = describe_read(run, flip, read_run, expected)
        counts[outcome] += 1
        if outcome == "another, without a warning":
            unreported_flips.append(flip)
    print(f"{read_run.__name__}: {dict(counts)}")
    assert not unreported_flips
    assert counts.total() == n > counts["the same"]  # some flips have an effect


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize(
    ("read_run", "n"), [(load_model_outputs, 25), (load_overview, 50), (finish_run, 5)]
)
def test_flipped_bit_never_changes_a_result_silently(read_run: ReadRun, n: int, run: Path) -> None:
    check_flips(run, read_run, n, 1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("read_run", "n"), [(load_model_outputs, 10_000), (load_overview, 10_000), (finish_run, 1_000)]
)
def test_many_flipped_bits_never_change_a_result_silently(
    read_run: ReadRun, n: int, run: Path
) -> None:
    check_flips(run, read_run, n, 2)


# -- folder of a search ----------------------------------------------------------------------------


def resume_search(path: Path) -> Any:
    """Return the records of the search in a folder, in a fixed order."""
    with TrialJournal(path, {"settings": {"a": 1}}) as trials:
        return sorted(json.dumps(record) for record in trials.records())


def check_search_flips(n: int) -> None:
    """Check flipped bits in the folder of a finished search."""
    with TrialJournal("search", {"settings": {"a": 1}}) as trials:
        for number in range(4):
            trials.add(
                {
                    "kernel": "laplace", "bandwidth": 2.0, "ridge": 0.0, "fold": number,
                    "settings": ["laplace", 2.0, 0.0], "held_out_mse": 0.1 * number,
                }
            )  # fmt: skip
        trials.finish({"best": {"mse": 0.0}})
    (Path("search") / "search.lock").unlink(missing_ok=True)
    assert len(resume_search(Path("search"))) == 4
    (Path("search") / "search.lock").unlink(missing_ok=True)
    check_flips(Path("search"), resume_search, n, 3)


def test_flipped_bit_never_changes_a_search_silently() -> None:
    check_search_flips(300)


@pytest.mark.full
def test_many_flipped_bits_never_change_a_search_silently() -> None:
    check_search_flips(10_000)


# -- altered JSON files ----------------------------------------------------------------------------

KINDS = {
    "run.json": "run",
    "setup.json": "checkpoint",
    "writer.json": "writer",
    f"checkpoints/{8:012d}.json": "checkpoint",
    "log.jsonl": "",
}


def alter(full: bytes, kind: str, rng: np.random.Generator) -> bytes:
    """Return bytes that are not JSON, or a document with edits, which mostly is sealed again."""
    change = rng.integers(6)  # 0: random bytes are inserted; 1: edited; others: sealed again
    if change == 0:
        position = int(rng.integers(len(full) + 1))
        return full[:position] + rng.bytes(int(rng.integers(40))) + full[position:]
    first_line, *others = full.splitlines(keepends=True) if not kind else [full]
    document = bit_flips.edited(json.loads(first_line), rng)
    text = json.dumps(document).encode() + b"\n"
    if change > 1:
        seal_keys = ("format", "version", "sha256", "crc32c")
        body = {name: value for name, value in json.loads(text).items() if name not in seal_keys}
        with contextlib.suppress(ValueError):  # NaN
            text = checksums.seal(kind, body) if kind else seal_line(body)
    return text + b"".join(others)


def seal_line(record: dict[str, Any]) -> bytes:
    """Return a line of a log with its checksum."""
    return _sealed_line(json.dumps(record, allow_nan=False).encode()) if record else b"{}\n"


def read(path: Path) -> None:
    """Read everything in a run directory."""
    with RunDirectory(path, writable=False) as run:
        run.load_setup()
        run.load_latest()


def acquire_and_release(path: Path) -> None:
    """Open the run as a writer, which repairs damage if possible."""
    with RunDirectory(path) as run, run.open_log() as log:
        recorded_run(run)
        log.write(step=9, epoch=0, samples=9)


@pytest.mark.parametrize(
    "n", [pytest.param(30, id="some"), pytest.param(100_000, id="many", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", KINDS)
def test_small_file_with_any_content_is_handled_or_refused(name: str, n: int, run: Path) -> None:
    """Check that errors are exceptions of streamkern with a message of one line."""
    path, started_run = Path(shutil.copytree(run, "run")), Path("begun")
    started_run.mkdir()  # the directory of a run that has no setup yet
    for small in ("run.json", "writer.json", "log.jsonl"):
        shutil.copy(run / small, started_run)
    readers: list[Callable[[], Any]] = [lambda: load_overview(started_run)]
    if KINDS[name] == "checkpoint":
        readers = [lambda: read(path)]
    slow: list[Callable[[], Any]] = [
        lambda: load_overview(path),
        lambda: load_model_outputs(path),
        lambda: acquire_and_release(started_run),
        lambda: finish_run(Path(shutil.copytree(path, "other", dirs_exist_ok=True))),
    ]
    with RunDirectory(path):  # so that writer.json names a process
        full, messages = (path / name).read_bytes(), list[str]()
    for k in range(n):
        text = alter(full, KINDS[name], np.random.default_rng([k, len(name)]))
        for location in (path, started_run):
            if (location / name).exists():
                (location / name).write_bytes(text)
        for read_run in readers if k % (20 if n < 1000 else 200) else readers + slow:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                try:
                    read_run()
                except StreamkernError as error:
                    messages.append(str(error))
                except Exception as error:
                    raise AssertionError(f"input {k}: {text[:2000]!r}") from error
        shutil.rmtree("other", ignore_errors=True)
    assert not [text for text in messages if "\n" in text]
    assert messages or name == "writer.json"  # which only a writer reads


@pytest.mark.parametrize("value", [1e308, 1e-308, 0.0, -1.0])
def test_edited_figures_are_handled_or_refused(value: float, run: Path) -> None:
    path = Path(shutil.copytree(run, "run"))
    body = checksums.unseal("checkpoint", (path / "setup.json").read_bytes())
    for rule in body["meta"]["setup"]["rules"]:
        rule["lambda_1"] = value
    (path / "setup.json").write_bytes(checksums.seal("checkpoint", body))
    message = ""
    try:
        weights, _, metrics = finish_run(path)
    except StreamkernError as error:
        message = str(error)
    if message:
        assert "\n" not in message
        assert "is a bug" not in message
    else:
        assert np.isfinite(np.frombuffer(weights, np.float32)).all()
        assert all(np.isfinite(value) for value in metrics.values())


@given(data=st.data(), counter=st.integers(0, 10**9))
def test_lease_with_any_content_is_handled(data: st.DataObject, counter: int) -> None:
    """Check that no content of a lease admits a second writer, or raises an unexpected error."""
    objects = open_objects(f"memory://damage/{counter}")
    objects.delete([key for key, _ in objects.list()])
    held = Lease(objects)
    held.acquire()
    note = bytes(objects.get("lease/000000000001.json"))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    objects.put("lease/000000000001.json", alter(note, "writer", rng))
    now = iter(range(0, 10**6, 7))
    second = Lease(objects, clock=lambda: float(next(now)), wait=lambda _: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        current_holder(objects)
        with contextlib.suppress(RunLockedError):  # it says that a process at work here has it
            second.acquire()
    assert second.number in (0, 2)
    second.release()
    held.release()
