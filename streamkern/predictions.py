"""Predictions written to a place: all of them in their order, or something that says it is not.

    source --units--> model --answers--> spool (orders) --slabs--> output

What is computed goes to scratch files first, and from there to the output in one sweep. A killed
call goes on from the last save when it is made again; then, and when the disk was full, the answers
are those of a call that was not interrupted. A file appears under its name when it is whole and
durable; a Zarr group says from its first file on whose it is and whether it is finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streamkern.answerfiles import FILES, Answers, Slabs, parquet_record, write_zarr
from streamkern.answerspool import AnswerSpool
from streamkern.durable import sync_file, sync_folder
from streamkern.errors import ConfigError, CorruptChunkError, StorageError, StreamkernError
from streamkern.ownership import PREDICTIONS, begin, check_kind, mark_at, publish
from streamkern.storage import local_path, redact, zarr_store
from streamkern.unfinished import disk_full_hint

ORDERS = ("source", "store")
_COMPLETE, _WRITING = "complete", "writing"
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Question:
    """What is predicted.

    answers : as far as they are known. n_rows : of the data, where that is known. compute : gives
    (place in the order of reading, numbers of the rows (k,), values (k, c)) from a place on.
    """

    answers: Answers
    n_rows: int | None
    compute: Callable[[int], Iterator[tuple[int, NDArray[Any], NDArray[Any]]]]


class _Place(Protocol):
    """Where predictions go."""

    def check_free(self, overwrite: bool) -> None:
        """Raise unless they may go there."""

    def is_done(self) -> bool:
        """Whether they are there, of a call that was killed after that."""

    def write(self, answers: Answers, slabs: Slabs, publishing: Callable[[], None]) -> None: ...


def write_predictions(
    question: Question,
    url: str | os.PathLike[str],
    *,
    order: str = "source",
    values: bool = False,
    overwrite: bool = False,
    storage_options: Any = None,
    progress: Progress | None = None,
) -> int:
    """The number of rows predicted into `url`; see `KernelModel.predict_to`."""
    ending = _ending(url, order)
    answers = _kept(question.answers, ending, order, values)
    folder = _scratch(url)
    place: _Place = (
        _Group(url, storage_options, answers.record)
        if ending == ".zarr"
        else _File(url, folder, ending)
    )
    spool = AnswerSpool(
        folder, answers.record, answers.dtype, answers.width,
        numbered=answers.numbered, chunk_rows=answers.chunk_rows,
    )  # fmt: skip
    if spool.state == "publishing" and place.is_done():
        spool.discard()
        return spool.n_rows
    place.check_free(overwrite)
    with disk_full_hint(os.fspath(url)), spool.claimed():
        try:
            if not spool.state:
                _compute(spool, question, answers, progress)
            answers = replace(answers, n_rows=spool.n_rows)
            place.write(answers, spool.slabs(), lambda: spool.save("publishing"))
        except (StorageError, CorruptChunkError):
            raise  # what was computed is good, and the same call goes on from it
        except StreamkernError:
            spool.discard()  # the data itself is wrong: there is nothing to go on from
            raise
    spool.discard()
    return spool.n_rows


def _ending(url: str | os.PathLike[str], order: str) -> str:
    """How the output ends; ConfigError where nothing can be written to it as asked."""
    ending = os.path.splitext(os.fspath(url).rstrip("/"))[1].lower()
    if order not in ORDERS:
        raise ConfigError(f'order="{order}" is unknown; use "source" or "store"')
    if ending not in FILES:
        if ending not in ("", ".zarr"):
            raise ConfigError(
                f"can not write predictions to {redact(os.fspath(url))}; its ending must be "
                f".zarr, {' or '.join(FILES)}"
            )
        return ".zarr"
    if local_path(url) is None:
        raise ConfigError(
            f"{redact(os.fspath(url))} is remote, where predictions can only go to .zarr; give "
            "that, or a local file"
        )
    if (ending, order) == (".npy", "store"):
        raise ConfigError(
            'order="store" needs the number of each row beside its answer, and a .npy file has '
            "room for one array; write .zarr, .csv or .parquet, or use the order of the source"
        )
    return ending


def _kept(answers: Answers, ending: str, order: str, values: bool) -> Answers:
    """The answers as far as the output takes them."""
    only_ids = ending == ".npy" and answers.classes is not None and not values
    if only_ids:
        answers = replace(answers, dtype=np.dtype(np.int32), width=1)
    record = {**answers.record, "kind": PREDICTIONS, "order": order, "ids": only_ids}
    text = json.dumps(record, sort_keys=True)
    record["identity"] = hashlib.sha256(text.encode()).hexdigest()
    return replace(answers, only_ids=only_ids, numbered=order == "store", record=record)


def _scratch(url: str | os.PathLike[str]) -> Path:
    path = local_path(url)
    if path is not None:
        path = path.absolute()
        return path.with_name(path.name + ".predict")
    # The same place on the next call, so that it goes on.
    name = hashlib.sha256(os.fspath(url).encode()).hexdigest()[:16]
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"streamkern-{user}" / f"{name}.predict"


def _compute(
    spool: AnswerSpool, question: Question, answers: Answers, progress: Progress | None
) -> None:
    """All answers into the spool."""
    for first, rows, values in question.compute(spool.n_rows):
        places = np.arange(first, first + len(rows)) if answers.numbered else rows
        kept = values.argmax(axis=1)[:, None] if answers.only_ids else values
        spool.add(places, rows, kept)
        if progress is not None:
            progress("predicted", spool.n_rows, question.n_rows)
    spool.save("computed")


# ------------------------------------------------------------------------------------- the places


class _Group:
    """A Zarr group."""

    def __init__(self, url: str | os.PathLike[str], options: Any, record: dict[str, Any]) -> None:
        self._url, self._record = os.fspath(url), record
        self._store = zarr_store(url, storage_options=options, read_only=False)

    def is_done(self) -> bool:
        mark = mark_at(self._store, self._url)
        return mark == {**self._record, "status": _COMPLETE}

    def check_free(self, overwrite: bool) -> None:
        mark = mark_at(self._store, self._url)
        if mark is None:
            return
        check_kind(mark, PREDICTIONS, self._url)
        if mark.get("status") == _COMPLETE and not overwrite:
            raise _exists(self._url)

    def write(self, answers: Answers, slabs: Slabs, publishing: Callable[[], None]) -> None:
        publishing()
        group = begin(self._store, self._url, {**self._record, "status": _WRITING})
        if answers.classes is not None:
            group.attrs["classes"] = answers.classes.tolist()
        write_zarr(group, answers, slabs)
        publish(group, {**self._record, "status": _COMPLETE})


class _File:
    """A local file: written in the scratch folder beside it, and renamed when it is durable."""

    def __init__(self, url: str | os.PathLike[str], folder: Path, ending: str) -> None:
        path = local_path(url)
        assert path is not None
        self._path, self._ending = path.absolute(), ending
        self._aside = folder / f"answers{ending}"

    def is_done(self) -> bool:
        return not self._aside.exists() and self._path.exists()

    def check_free(self, overwrite: bool) -> None:
        if not os.path.lexists(self._path):
            return
        if not overwrite:
            raise _exists(str(self._path))
        record = None
        if self._ending == ".parquet" and self._path.is_file():
            record = parquet_record(self._path)
        if not isinstance(record, dict) or record.get("kind") != PREDICTIONS:
            raise ConfigError(
                f"nothing in {self._path} says that streamkern wrote it, so it is not "
                "overwritten; delete it, or give another output"
            )

    def write(self, answers: Answers, slabs: Slabs, publishing: Callable[[], None]) -> None:
        FILES[self._ending](self._aside, answers, slabs)
        sync_file(self._aside)
        publishing()
        self._aside.replace(self._path)
        sync_folder(self._path.parent)


def _exists(url: str) -> ConfigError:
    return ConfigError(f"{redact(url)} exists already; give another output or overwrite it")
