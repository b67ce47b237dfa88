"""Write predictions to an output: complete and in order, or marked as incomplete.

    source --units--> model --answers--> spool (orders) --slabs--> output

Predictions go to scratch files first, and from there to the output in one sweep. A killed call
resumes from the last save when it is repeated; then, and after a full disk, the predictions are
those of an uninterrupted call. A file gets its name only when it is complete and durable; a Zarr
group records its writer and its completion from its first file on.
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

from streamkern.basics.errors import ConfigError, CorruptChunkError, StorageError, StreamkernError
from streamkern.basics.optional import import_optional
from streamkern.basics.progress import Progress
from streamkern.basics.text import redact
from streamkern.basics.values import json_digest
from streamkern.filesystem.durable import disk_full_hint, sync_file, sync_folder
from streamkern.filesystem.ownership import (
    PREDICTIONS,
    begin,
    check_kind,
    is_marked,
    mark_at,
    mark_file,
    publish_group,
    refuse_within,
)
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
    """Predictions to compute.

    answers : description of the table
    n_rows : number of rows of the data, if known
    compute : yields (index in reading order, numbers of the rows (k,), values (k, c)) from an index
        on
    """

    answers: PredictionTable
    n_rows: int | None
    compute: Callable[[int], Iterator[tuple[int, NDArray[Any], NDArray[Any]]]]


class _Place(Protocol):
    """Output of predictions."""

    def check_free(self) -> None:
        """Raise unless predictions may be written there."""

    def rows_done(self, spool: PredictionBuffer) -> int | None:
        """Return the number of rows if a call has written them and was then killed; else None."""

    def write(self, answers: PredictionTable, slabs: Slabs, publishing: Callable[[], None]) -> None:
        """Write all predictions; raise, as `check_free`, also for output that is new by then."""


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
    """Write the predictions of `question` to `url`; return the number of rows.

    See `KernelModel.predict_to`.
    """
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
                if not spool.n_rows:  # left by the last finished call
                    scratch.discard()
                raise
            if spool.stage == _DONE:  # and its output is gone
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
    """Delete the scratch on an error that makes it useless to a later call."""
    try:
        yield
    except (StorageError, CorruptChunkError):
        raise  # the computed predictions are good, or deleted: the same call resumes
    except StreamkernError:
        scratch.discard()
        raise


def _slabs(spool: PredictionBuffer, scratch: Scratch, answers: PredictionTable) -> Slabs:
    """Yield the predictions in order; if writing fails otherwise, they stay in the scratch."""
    with _discarded_if_bad(scratch):
        if answers.beside is None:
            yield from spool.slabs()
        else:  # in the blocks in which they were read for prediction
            yield from beside(answers.beside.blocks(UNIT_BYTES), spool.slabs())


def _ending(url: str | os.PathLike[str], order: str) -> str:
    """Return the ending of the output; raise ConfigError if it cannot be written as requested."""
    ending = os.path.splitext(os.fspath(url).rstrip("/"))[1].lower()
    refuse_within(url, "predictions")
    if order not in ORDERS:
        raise ConfigError(f'order="{order}" is unknown; use "source" or "store"')
    if ending not in FILES:
        if ending not in ("", ".zarr"):
            raise ConfigError(
                f"cannot write predictions to {redact(os.fspath(url))}; its ending must be "
                f".zarr, {' or '.join(FILES)}"
            )
        return ".zarr"
    if local_path(url) is None:
        raise ConfigError(
            f"{redact(os.fspath(url))} is remote, where predictions can only go to .zarr; give "
            "that, or a local file"
        )
    if ending == ".parquet":  # before hours of computing, not after
        import_optional("pyarrow.parquet", "writing Parquet")
    if (ending, order) == (".npy", "store"):
        raise ConfigError(
            'order="store" needs the number of each row beside its answer, and a .npy file has '
            "room for one array; write .zarr, .csv or .parquet, or use the order of the source"
        )
    return ending


def _check_beside(answers: PredictionTable, url: str | os.PathLike[str], ending: str) -> None:
    """Raise ConfigError if the columns of the input cannot be written to the output."""
    if answers.beside is None:
        return
    if ending not in (".csv", ".parquet"):
        raise ConfigError(
            f"{redact(os.fspath(url))} cannot hold the columns of the input (with_input=True); "
            "write .csv or .parquet"
        )
    refuse_same_place(answers.beside.urls, url)
    if ending == ".csv":
        answers.beside.check_texts()


def _kept(answers: PredictionTable, ending: str, order: str, values: bool) -> PredictionTable:
    """Return the table with the parts that the output holds."""
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
    """Compute all predictions into the buffer."""
    for first, rows, values in question.compute(spool.n_rows):
        places = np.arange(first, first + len(rows)) if answers.numbered else rows
        kept = values.argmax(axis=1)[:, None] if answers.only_ids else values
        spool.add(places, rows, kept)
        if progress is not None:
            progress("predicted", spool.n_rows, question.n_rows)
    spool.save(_COMPUTED)


# ------------------------------------------------------------------------------------ outputs


class _Group:
    """A Zarr group as output."""

    def __init__(
        self, url: str | os.PathLike[str], options: Any, record: dict[str, Any], overwrite: bool
    ) -> None:
        self._url, self._overwrite = os.fspath(url), overwrite
        self._writing = {**record, "status": "writing"}
        self._complete = {**record, "status": "complete"}
        self._store = zarr_store(url, storage_options=options, read_only=False)

    def rows_done(self, spool: PredictionBuffer) -> int | None:
        # without our scratch folder beside it, another call wrote it
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
    """A local file, written in the scratch folder beside it and renamed when it is durable."""

    def __init__(
        self, url: str | os.PathLike[str], folder: Path, ending: str, overwrite: bool
    ) -> None:
        path = local_path(url)
        assert path is not None
        self._path, self._ending = path.resolve(), ending  # beside the folder
        self._overwrite = overwrite
        # Named like our temporary files, and the same in every call.
        self._aside = folder / f".answers{ending}.{0:032x}.streamkern"

    def rows_done(self, spool: PredictionBuffer) -> int | None:
        if spool.stage not in (_PUBLISHING, _DONE) or not self._path.exists():
            return None
        # A call killed between the two steps of renaming leaves both names.
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
        """Return whether the existing file is marked as predictions."""
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
        """Rename, but never over a file that has just appeared."""
        try:
            os.link(self._aside, self._path)
        except FileExistsError:
            raise self._exists() from None
        except OSError:  # a file system without links; the check just made must do
            self._aside.replace(self._path)
        else:
            sync_folder(self._path.parent)  # the new name is durable before the old one goes
            self._aside.unlink()


def _exists(url: str, remedy: str = "pass overwrite=True") -> ConfigError:
    return ConfigError(f"{redact(url)} exists already; give another output, or {remedy}")
