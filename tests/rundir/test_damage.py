"""A bit flipped anywhere in a run directory: the same result, an error, or a word about it.

Never another result in silence, of load_model, `info`, a resumed run, or a search that goes on.
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

from streamkern.basics.errors import StreamkernError
from streamkern.cli.described import run_overview
from streamkern.filesystem.urls import open_objects
from streamkern.rundir.lease import Lease, current_holder
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.model import load_model
from streamkern.tuning.records import Trials
from tests.runs import array_source, finished, settings, stopped, stream

Flip = tuple[str, int, int]  # file, byte, bit


def flips(root: Path, n: int, seed: int) -> list[Flip]:
    """Half of them by file, half by byte: small files are where damage is subtle."""
    rng = np.random.default_rng(seed)
    files = [p for p in sorted(root.rglob("*")) if p.is_file() and p.stat().st_size]
    sizes = np.array([p.stat().st_size for p in files], float)
    found = []
    for k in range(n):
        path = files[rng.choice(len(files), p=None if k % 2 else sizes / sizes.sum())]
        byte, bit = int(rng.integers(path.stat().st_size)), int(rng.integers(8))
        found.append((path.relative_to(root).as_posix(), byte, bit))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after 8 of 14 steps, with checkpoints of 4, 6 and 8."""
    path = tmp_path_factory.mktemp("damage") / "run"
    stopped(config(path), 8, source=stream())
    assert RunDirectory(path, writable=False).steps() == [4, 6, 8]
    return path


def config(path: Path) -> Any:
    return settings(path, **{"run.checkpoint_every": 2, "run.evaluate_every": 3})


@pytest.fixture(autouse=True)
def in_one_place(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every copy is looked at in the same place, which results and messages name."""
    with tempfile.TemporaryDirectory(dir=run.parent) as folder:
        monkeypatch.chdir(folder)
        yield


Look = Callable[[Path], Any]


def loaded(path: Path) -> Any:
    model = load_model(path, device="cpu", threads=1)
    with model.backend:
        values = model.values(np.linspace(-1, 1, 50, dtype=np.float32).reshape(10, 5))
    return values.tobytes()


def shown(path: Path) -> Any:
    return run_overview(path)


def resumed(path: Path) -> Any:
    result = finished(config(path), source=stream(), test=array_source(10, 5))
    return np.asarray(result.model.weights).tobytes(), result.history, result.metrics


def says(found: Any) -> bool:
    """Whether an overview tells of damage itself."""
    return isinstance(found, dict) and bool(found["warnings"] or "damaged" in found["state"])


def outcome(run: Path, flip: Flip | None, look: Look, expected: Any) -> str:
    path = Path("run")
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(run, path)
    if flip is not None:
        name, byte, bit = flip
        data = bytearray((path / name).read_bytes())
        data[byte] ^= 1 << bit
        (path / name).write_bytes(data)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = look(path)
        except StreamkernError:
            return "an error"
    if found == expected:
        return "the same, with a warning" if said or says(found) else "the same"
    return "another, with a warning" if said or says(found) else "SILENT"


def survey(run: Path, look: Look, n: int, seed: int) -> Counter[str]:
    expected = look(Path(shutil.copytree(run, "run")))
    assert outcome(run, None, look, expected) == "the same"
    count: Counter[str] = Counter()
    silent = []
    for flip in flips(run, n, seed):
        how = outcome(run, flip, look, expected)
        count[how] += 1
        if how == "SILENT":
            silent.append(flip)
    print(f"{look.__name__}: {dict(count)}")
    assert not silent
    return count


@pytest.mark.parametrize(("look", "n"), [(loaded, 150), (shown, 150), (resumed, 25)])
def test_no_flipped_bit_changes_a_result_in_silence(look: Look, n: int, run: Path) -> None:
    """W3, W7, and the table of bit flips."""
    count = survey(run, look, n, 1)
    assert count["an error"] + count["another, with a warning"] + count["the same, with a warning"]


@pytest.mark.full
@pytest.mark.parametrize(("look", "n"), [(loaded, 10_000), (shown, 10_000), (resumed, 1_000)])
def test_nor_does_one_of_many(look: Look, n: int, run: Path) -> None:
    survey(run, look, n, 2)


# -- a search --------------------------------------------------------------------------------------


def searched(path: Path) -> Any:
    with Trials(path, {"settings": {"a": 1}}) as trials:
        return sorted(json.dumps(record) for record in trials.records())


def survey_search(n: int) -> None:
    with Trials("search", {"settings": {"a": 1}}) as trials:
        for number in range(4):
            trials.add(("kernel", number), {"mse": 0.1 * number, "fold": number})
        trials.finish({"best": {"mse": 0.0}})
    (Path("search") / "search.lock").unlink(missing_ok=True)
    assert len(searched(Path("search"))) == 4
    (Path("search") / "search.lock").unlink(missing_ok=True)
    survey(Path("search"), searched, n, 3)


def test_no_flipped_bit_changes_a_search_in_silence() -> None:
    survey_search(300)


@pytest.mark.full
def test_nor_a_search_with_many() -> None:
    survey_search(10_000)


# -- anything at all in the place of a small file --------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FILES = ["run.json", "setup.json", "writer.json", "log.jsonl", f"checkpoints/{8:012d}.json"]


def mutated(document: Any, draw: Any) -> Any:
    """With one entry, at any depth, lost, added, or of another value."""
    if isinstance(document, dict) and document and draw(st.integers(0, 3)):
        name = draw(st.sampled_from(sorted(document)))
        return document | {name: mutated(document[name], draw)}
    if isinstance(document, list) and document and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(document) - 1))
        return [*document[:at], mutated(document[at], draw), *document[at + 1 :]]
    if isinstance(document, dict):
        how = draw(st.sampled_from(["lose", "add", "replace"]))
        if how == "lose" and document:
            gone = draw(st.sampled_from(sorted(document)))
            return {name: value for name, value in document.items() if name != gone}
        if how == "add":
            return document | {draw(st.text(max_size=8)): draw(VALUES)}
    return draw(VALUES)


@given(data=st.data())
def test_any_small_file_is_a_sentence_or_the_same(run: Path, data: st.DataObject) -> None:
    """Edited by hand, or bytes that are no JSON: never an exception of another kind."""
    name = data.draw(st.sampled_from(FILES))
    whole = (run / name).read_bytes()
    if data.draw(st.booleans()):
        lines = whole.splitlines() if name == "log.jsonl" else [whole]
        document = mutated(json.loads(lines[0]), data.draw)
        text = json.dumps(document).encode() + b"\n" + b"\n".join(lines[1:])
    else:
        at = data.draw(st.integers(0, len(whole)))
        text = whole[:at] + data.draw(st.binary(max_size=40)) + whole[at:]
    with tempfile.TemporaryDirectory(dir=run.parent) as folder:
        path = Path(shutil.copytree(run, Path(folder, "run")))
        (path / name).write_bytes(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for look in (shown, loaded):
                with contextlib.suppress(StreamkernError):
                    look(path)


@given(data=st.data(), counter=st.integers(0, 10**9))
def test_any_lease_is_waited_for_or_understood(data: st.DataObject, counter: int) -> None:
    """Nobody's note makes a second writer, or an exception."""
    objects = open_objects(f"memory://damage/{counter}")
    objects.delete([key for key, _ in objects.list()])
    held = Lease(objects)
    held.acquire()
    note = json.loads(bytes(objects.get("lease/000000000001.json")))
    text = json.dumps(mutated(note, data.draw)).encode()
    if data.draw(st.booleans()):
        text = data.draw(st.binary(max_size=60))
    objects.put("lease/000000000001.json", text)
    now = iter(range(0, 10**6, 7))
    second = Lease(objects, clock=lambda: float(next(now)), wait=lambda _: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        current_holder(objects)
        second.acquire()
    assert second.number == 2
    second.release()
    held.release()
