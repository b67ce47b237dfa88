"""Predictions written to a place: all of them in their order, or something that says it is not.

    source --units--> model --answers--> spool (orders) --slabs--> output

What is computed goes to scratch files first, and from there to the output in one sweep. A killed
call goes on from the last save when it is made again; then, and when the disk was full, the answers
are those of a call that was not interrupted. A file appears under its name when it is whole and
durable; a Zarr group says from its first file on whose it is and whether it is finished.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zarr
from numpy.typing import NDArray

from streamkern.basics.digest import json_digest
from streamkern.basics.errors import ConfigError, CorruptChunkError, StorageError, StreamkernError
from streamkern.basics.optional import need
from streamkern.basics.progress import Progress
from streamkern.basics.text import redact
from streamkern.filesystem.durable import disk_full_hint, sync_file, sync_folder
from streamkern.filesystem.file_mark import is_marked, mark_file
from streamkern.filesystem.ownership import PREDICTIONS, begin, check_kind, mark_at, publish_group
from streamkern.filesystem.place_kind import refuse_within
from streamkern.filesystem.scratch import Scratch, scratch_folder
from streamkern.filesystem.urls import local_path, zarr_store
from streamkern.predict.beside import beside
from streamkern.predict.prediction_buffer import PredictionBuffer
from streamkern.predict.prediction_table import (
    FILES,
    PredictionTable,
    Slabs,
    parquet_record,
    write_zarr,
)
from streamkern.store.fill import refuse_same_place
from streamkern.stream.sources.base import UNIT_BYTES

ORDERS = ("source", "store")
_COMPUTED, _PUBLISHING, _DONE = "computed", "publishing", "done"  # stages, after computing


@dataclass(frozen=True)
class PredictionJob:
    """What is predicted.

    answers : as far as they are known. n_rows : of the data, where that is known. compute : gives
    (place in the order of reading, numbers of the rows (k,), values (k, c)) from a place on.
    """

    answers: PredictionTable
    n_rows: int | None
    compute: Callable[[int], Iterator[tuple[int, NDArray[Any], NDArray[Any]]]]


class _Place(Protocol):
    """Where predictions go."""

    def check_free(self) -> None:
        """Raise unless they may go there."""

    def rows_done(self, spool: PredictionBuffer) -> int | None:
        """How many are there, of a call that was killed after that; None if they are not."""

    def write(self, answers: PredictionTable, slabs: Slabs, publishing: Callable[[], None]) -> None:
        """Raise, as `check_free`, also for what came there while the answers were computed."""


def write_predictions(
    question: PredictionJob,
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
    _check_beside(question.answers, url, ending)
    if question.answers.escapes_formulas and ending != ".csv":
        raise ConfigError(
            f"escape_formulas=True is for .csv, and not for {redact(os.fspath(url))}; leave it out"
        )
    answers = _kept(question.answers, ending, order, values)
    folder = scratch_folder(url, ending=".predict")
    place: _Place = (
        _Group(url, storage_options, answers.record, overwrite)
        if ending == ".zarr"
        else _File(url, folder, ending, overwrite)
    )
    with disk_full_hint(os.fspath(url)), Scratch(folder) as scratch:
        spool = PredictionBuffer(
            scratch, answers.record, answers.dtype, answers.width,
            numbered=answers.numbered, chunk_rows=answers.chunk_rows,
        )  # fmt: skip
        n_rows = place.rows_done(spool)
        if n_rows is None:
            try:
                place.check_free()
            except StreamkernError:
                if not spool.n_rows:  # the last that a finished call left
                    scratch.discard()
                raise
            if spool.stage == _DONE:  # and what was there is gone
                spool.restart()
            with _discarded_if_bad(scratch):
                if not spool.stage:
                    _compute(spool, question, answers, progress)
            answers = replace(answers, n_rows=spool.n_rows)
            place.write(answers, _slabs(spool, scratch, answers), lambda: spool.save(_PUBLISHING))
            spool.finish(_DONE)
            n_rows = spool.n_rows
        scratch.discard()
    return n_rows


@contextmanager
def _discarded_if_bad(scratch: Scratch) -> Iterator[None]:
    """Deletes the scratch where an error says that it is of no use to a later call."""
    try:
        yield
    except (StorageError, CorruptChunkError):
        raise  # what was computed is good, or deleted: the same call goes on
    except StreamkernError:
        scratch.discard()
        raise


def _slabs(spool: PredictionBuffer, scratch: Scratch, answers: PredictionTable) -> Slabs:
    """The answers in their order. Whatever else fails in writing them, they stay in the scratch."""
    with _discarded_if_bad(scratch):
        if answers.beside is None:
            yield from spool.slabs()
        else:  # in the pieces in which they were read to be predicted
            yield from beside(answers.beside.blocks(UNIT_BYTES), spool.slabs())


def _ending(url: str | os.PathLike[str], order: str) -> str:
    """How the output ends; ConfigError where nothing can be written to it as asked."""
    ending = os.path.splitext(os.fspath(url).rstrip("/"))[1].lower()
    refuse_within(url, "predictions")
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
    if ending == ".parquet":  # before hours of computing, not after them
        need("pyarrow.parquet", "writing Parquet")
    if (ending, order) == (".npy", "store"):
        raise ConfigError(
            'order="store" needs the number of each row beside its answer, and a .npy file has '
            "room for one array; write .zarr, .csv or .parquet, or use the order of the source"
        )
    return ending


def _check_beside(answers: PredictionTable, url: str | os.PathLike[str], ending: str) -> None:
    """ConfigError where the columns of the input can not go to the output."""
    if answers.beside is None:
        return
    if ending not in (".csv", ".parquet"):
        raise ConfigError(
            f"{redact(os.fspath(url))} can not hold the columns of the input (with_input=True); "
            "write .csv or .parquet"
        )
    refuse_same_place(answers.beside.urls, url)
    if ending == ".csv":
        answers.beside.check_texts()


def _kept(answers: PredictionTable, ending: str, order: str, values: bool) -> PredictionTable:
    """The answers as far as the output takes them."""
    only_ids = ending == ".npy" and answers.classes is not None and not values
    if only_ids:
        answers = replace(answers, dtype=np.dtype(np.int32), width=1)
    record = {**answers.record, "kind": PREDICTIONS, "order": order, "ids": only_ids}
    if answers.beside is not None:
        record["with_input"] = True
    record["identity"] = json_digest(record)
    return replace(answers, only_ids=only_ids, numbered=order == "store", record=record)


def _compute(
    spool: PredictionBuffer,
    question: PredictionJob,
    answers: PredictionTable,
    progress: Progress | None,
) -> None:
    """All answers into the spool."""
    for first, rows, values in question.compute(spool.n_rows):
        places = np.arange(first, first + len(rows)) if answers.numbered else rows
        kept = values.argmax(axis=1)[:, None] if answers.only_ids else values
        spool.add(places, rows, kept)
        if progress is not None:
            progress("predicted", spool.n_rows, question.n_rows)
    spool.save(_COMPUTED)


# ------------------------------------------------------------------------------------- the places


class _Group:
    """A Zarr group."""

    def __init__(
        self, url: str | os.PathLike[str], options: Any, record: dict[str, Any], overwrite: bool
    ) -> None:
        self._url, self._overwrite = os.fspath(url), overwrite
        self._writing = {**record, "status": "writing"}
        self._complete = {**record, "status": "complete"}
        self._store = zarr_store(url, storage_options=options, read_only=False)

    def rows_done(self, spool: PredictionBuffer) -> int | None:
        # Without a folder of ours beside it, it is another call's.
        if not spool.begun or mark_at(self._store, self._url) != self._complete:
            return None
        values: Any = zarr.open_group(self._store, mode="r")["values"]
        return int(values.shape[0])

    def check_free(self) -> None:
        mark = mark_at(self._store, self._url)
        if mark is None:
            return
        check_kind(mark, PREDICTIONS, self._url)
        if mark.get("status") == "complete" and not self._overwrite:
            raise _exists(self._url)

    def write(self, answers: PredictionTable, slabs: Slabs, publishing: Callable[[], None]) -> None:
        self.check_free()
        publishing()
        group = begin(self._store, self._url, self._writing)
        if answers.classes is not None:
            group.attrs["classes"] = answers.classes.tolist()
        write_zarr(group, answers, slabs)
        publish_group(group, self._complete)


class _File:
    """A local file: written in the scratch folder beside it, and renamed when it is durable."""

    def __init__(
        self, url: str | os.PathLike[str], folder: Path, ending: str, overwrite: bool
    ) -> None:
        path = local_path(url)
        assert path is not None
        self._path, self._ending = path.resolve(), ending  # beside the folder
        self._overwrite = overwrite
        # By the name of a temporary file of ours, and the same one in every call.
        self._aside = folder / f".answers{ending}.{0:032x}.streamkern"

    def rows_done(self, spool: PredictionBuffer) -> int | None:
        if spool.stage not in (_PUBLISHING, _DONE) or not self._path.exists():
            return None
        # Killed between the two steps of a new name, it has both.
        renamed = not self._aside.exists() or self._aside.samefile(self._path)
        return spool.n_rows if renamed else None

    def check_free(self) -> None:
        if not os.path.lexists(self._path):
            return
        if not self._overwrite:
            raise self._exists()
        if not self._is_own():
            raise ConfigError(
                f"nothing in {self._path} says that streamkern wrote it, and that it was not "
                "changed since, so it is not overwritten; delete it, or give another output"
            )

    def _is_own(self) -> bool:
        """Return whether the file that is there says that it holds predictions."""
        if self._ending != ".parquet" or not self._path.is_file():
            return is_marked(self._path, PREDICTIONS)
        record = parquet_record(self._path)
        return isinstance(record, dict) and record.get("kind") == PREDICTIONS

    def write(self, answers: PredictionTable, slabs: Slabs, publishing: Callable[[], None]) -> None:
        FILES[self._ending](self._aside, answers, slabs)
        mark_file(self._aside, PREDICTIONS)
        sync_file(self._aside)
        self.check_free()
        publishing()
        if self._overwrite:
            self._aside.replace(self._path)
        else:
            self._link()
        sync_folder(self._path.parent)

    def _exists(self) -> ConfigError:
        return _exists(str(self._path), *(() if self._is_own() else ("delete it",)))

    def _link(self) -> None:
        """Rename, but never over a file that came just now."""
        try:
            os.link(self._aside, self._path)
        except FileExistsError:
            raise self._exists() from None
        except OSError:  # a file system without links, where looking a moment ago must do
            self._aside.replace(self._path)
        else:
            sync_folder(self._path.parent)  # the new name is durable before the old one goes
            self._aside.unlink()


def _exists(url: str, remedy: str = "pass overwrite=True") -> ConfigError:
    return ConfigError(f"{redact(url)} exists already; give another output, or {remedy}")
