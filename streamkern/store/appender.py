"""Append rows to a finished store on a disk, published by replacing one file.

    last old chunk, now full, and new chunks -> tables under new names -> the group's zarr.json
    -> the zarr.json of each array, for programs that open one array alone

Until the group's zarr.json is replaced, readers see the old store, and a reader that opened the old
store never reads beyond its rows. The only old chunk that changes is the last one, if it is not
full. It still begins with the old rows, so that such a reader can verify them by their digest
(`StoredChunks`), and the new content is durable before it replaces the old. The next append removes
the tables of the old store.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import zarr

from streamkern.basics.errors import DataError
from streamkern.basics.text import redact
from streamkern.filesystem.durable import LocalFiles, disk_full_hint, sync_files
from streamkern.filesystem.ownership import (
    ATTRIBUTE,
    STORE,
    remove_arrays,
    remove_leftover_files,
)
from streamkern.filesystem.urls import zarr_store
from streamkern.store import layout
from streamkern.store.chunk_output import ChunkOutput, Journal, create_array
from streamkern.store.fast_chunks import chunk_key
from streamkern.store.layout import StoreSpec
from streamkern.store.row_block import RowBlock
from streamkern.store.statistics import RunningStatistics, Statistics
from streamkern.store.store import open_store
from streamkern.store.writer import statistics_json
from streamkern.store.zarr_json import (
    mark_with_digests,
    read_documents,
    root_metadata,
    store_documents,
    store_mark,
)

_PLAN_ATTRIBUTE = "plan"


class StoreAppender(ChunkOutput):
    """Writer of the chunks that hold appended rows, which are published all at once.

    The caller ensures that no other process appends to the store. An appender with the same `plan`
    and the same rows resumes the work of a killed one.

    Parameters
    ----------
    url : URL of a finished store on a disk
    n_rows : number of rows to append
    files : name of each file that they come from, and its number of rows
    plan : key of everything that determines the rows and their order; recorded in the store
    n_left_out : number of rows of these files that were left out because they have no target

    Attributes
    ----------
    spec : StoreSpec
        Spec of the store after the append.
    head : RowBlock or None
        The old rows of the last old chunk, if it is not full.

    Raises the errors of `open_store`, and OSError if the disk is full.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        n_rows: int,
        files: Sequence[tuple[str, int]],
        plan: str,
        n_left_out: int = 0,
    ) -> None:
        self._plan = plan
        self._old_store = open_store(url)
        old_spec = self._old_store.spec
        self._mark = self._old_store.stored_chunks.contents.mark
        store = zarr_store(url, read_only=False)
        assert isinstance(store, LocalFiles)
        self._store = store
        # The spec of the new store; rows that came from no file get the name "memory".
        old_files = old_spec.files or [("memory", old_spec.n_rows)]
        new_files = files or [("memory", n_rows)]
        spec = replace(
            old_spec, n_rows=old_spec.n_rows + n_rows, files=(*old_files, *new_files),
            fingerprint="", n_left_out=old_spec.n_left_out + n_left_out,
        )  # fmt: skip
        # The chunks and tables to write.
        self._first_chunk = old_spec.n_rows // old_spec.chunk_rows  # the first with appended rows
        self.head = self._read_head()
        self._group: Any = zarr.open_group(store, mode="r+", use_consolidated=False)
        self._array_names = layout.row_arrays(old_spec.weight_totals is not None)
        self._appends = int(self._mark.get("appends", 0)) + 1  # including this one
        self._digest_table, self._crc_table = layout.table_names(self._appends)
        with disk_full_hint(str(url)):
            journal = self._begin(spec)
        arrays = [self._group[name] for name in self._array_names]
        replaced_chunk = None if self.head is None else self._first_chunk
        super().__init__(str(url), spec, arrays, journal, replaced_chunk)

    def statistics(self) -> RunningStatistics:
        """Return the statistics of the old rows."""
        return RunningStatistics.from_spec(self._old_store.spec)

    def finish(self, stats: Statistics) -> StoreSpec:
        """Publish the new store in place of the old one, in one step; return its spec.

        stats : statistics of all rows, the old ones included

        Raises DataError if a chunk is damaged or was not written, or the old store was replaced.
        """
        self._check_unchanged()  # before chunks are read from a store that was replaced
        damaged = self._first_damaged_chunk(self._first_chunk)
        if damaged is not None:
            raise DataError(
                f"chunk {damaged} of {redact(self.url)} is damaged or was not written",
                "append the same rows again",
            )
        with disk_full_hint(self.url):
            old_crcs = self._old_store.stored_chunks.read_crcs()[: self._first_chunk]
            crc = self._write_crcs(self._group, self._crc_table, old_crcs)
            arrays = self._documents()
            mark = mark_with_digests({**self._attributes(stats), "crc": crc}, arrays)
            root = root_metadata(mark, arrays, self._other_attributes())
            self._sync_new_files()
            self._check_unchanged()  # again, because the sync may take long
            self._store.write("zarr.json", root)
            _update_arrays(self._store, self.url)
        return open_store(self.url).spec

    def _begin(self, spec: StoreSpec) -> Journal:
        """Return the journal of a killed call, or a new one with the full old chunks."""
        plan = [self._plan, self._old_store.spec.fingerprint, spec.n_rows]
        digests = self._old_store.stored_chunks.read_digests()[: self._first_chunk]
        self._remove_table(self._crc_table)
        if self._digest_table in self._group:
            table = self._group[self._digest_table]
            if table.attrs.get(_PLAN_ATTRIBUTE) == plan:
                journal = Journal(table)
                if not np.array_equal(journal.digests[: self._first_chunk], digests):
                    journal.record_first(digests)  # the call was killed while it wrote them
                return journal
            self._remove_table(self._digest_table)
        shape = (spec.n_chunks, len(self._array_names) * layout.DIGEST_BYTES)
        table = create_array(
            self._group, self._digest_table, shape, layout.DIGEST_CHUNK_ROWS, np.dtype(np.uint8),
            ("chunk", "byte"), self._table_compression(),
        )  # fmt: skip
        journal = Journal(table)
        journal.record_first(digests)
        table.attrs[_PLAN_ATTRIBUTE] = plan
        return journal

    def _remove_table(self, name: str) -> None:
        """Remove a table, if it exists."""
        if (self._store.root / name).is_dir():
            remove_arrays(self._store, STORE, (name,))

    def _table_compression(self) -> str:
        """Return the compression of the old tables, which the new tables use as well."""
        compressors = self._old_store.stored_chunks.contents.digests.compressors
        return "zstd" if len(compressors) > 1 else "none"

    def _read_head(self) -> RowBlock | None:
        """Return the rows of the last chunk if it has room for more, else None."""
        chunks, spec = self._old_store.stored_chunks, self._old_store.spec
        if spec.n_rows % spec.chunk_rows == 0:
            return None
        row_ids = self._old_store.source_rows(self._first_chunk)
        return RowBlock.from_arrays([*chunks.read(self._first_chunk), row_ids])

    def _documents(self) -> dict[str, Mapping[str, Any]]:
        """Return the metadata of the arrays of the new store, with the new number of rows."""
        documents = store_documents(self._store, "", self.url)
        assert documents is not None
        arrays: dict[str, Mapping[str, Any]] = {}
        for name in self._array_names:
            document = documents.arrays[name]
            arrays[name] = {**document, "shape": [self.spec.n_rows, *document["shape"][1:]]}
        tables = (self._digest_table, self._crc_table)
        return arrays | read_documents(self._store, "", self.url, tables)

    def _attributes(self, stats: Statistics) -> dict[str, Any]:
        """Return the attributes of streamkern in the new store."""
        old_spec = self._old_store.spec
        old_states = [*self._mark.get("before", []), [old_spec.n_rows, old_spec.fingerprint]]
        return {
            # `mark_with_digests` adds the digests of the new metadata.
            **{k: v for k, v in self._mark.items() if k not in ("metadata", "metadata_digest")},
            "made_from": None,  # no single call could reproduce the store
            "appends": self._appends,
            "before": old_states,
            "appended": self._plan,
            "files": self.spec.files,
            **({"n_left_out": self.spec.n_left_out} if self.spec.n_left_out else {}),
            "fingerprint": layout.content_fingerprint(self.spec, self.journal.digests),
            **statistics_json(stats),
        }

    def _other_attributes(self) -> dict[str, Any]:
        """Return the attributes of the group that other programs wrote; the append keeps them."""
        attributes = json.loads((self._store.root / "zarr.json").read_bytes())["attributes"]
        return {name: value for name, value in attributes.items() if name != ATTRIBUTE}

    def _sync_new_files(self) -> None:
        """Make the new chunks and tables durable."""
        root = self._store.root
        chunks = range(self._first_chunk, self.spec.n_chunks)
        files = [
            root / chunk_key(self._group[name], i) for name in self._array_names for i in chunks
        ]
        tables = (root / name for name in (self._digest_table, self._crc_table))
        files += [path for table in tables for path in table.rglob("*") if path.is_file()]
        sync_files(root, files)

    def _check_unchanged(self) -> None:
        """Raise DataError unless the URL still holds the old store."""
        current_mark = store_mark(self._store, "", self.url) or {}
        if current_mark.get("fingerprint") != self._old_store.spec.fingerprint:
            raise DataError(
                f"rows cannot be appended to {redact(self.url)}: it was replaced while they were "
                "written",
                "let only one call write to the store at a time, and append the rows again",
            )


def complete_append(url: str | os.PathLike[str]) -> None:
    """Finish the work of a killed append.

    Removes temporary files. If the rows of the append are published, also updates the zarr.json of
    each array, and removes all tables that neither this store nor the one before the append uses.
    """
    store = zarr_store(url, read_only=False)
    assert isinstance(store, LocalFiles)
    remove_leftover_files(store, STORE)
    _update_arrays(store, str(url))


def _update_arrays(store: LocalFiles, url: str) -> None:
    """Copy the group's metadata to the zarr.json of each array, and remove unused tables."""
    documents = store_documents(store, "", url)
    if documents is None or not documents.mark.get("appends"):
        return
    names = tuple(documents.arrays)
    for name, current in read_documents(store, "", url, names).items():
        document = {**documents.arrays[name], "attributes": current.get("attributes", {})}
        if current != document:
            store.write(f"{name}/zarr.json", json.dumps(document, indent=2).encode())
    # The tables of this store and of the one before the append stay: readers may use both.
    n_appends = documents.mark["appends"]
    old_tables = [name for k in range(n_appends - 1) for name in layout.table_names(k)]
    unused_tables = [name for name in old_tables if (store.root / name).is_dir()]
    if unused_tables:
        remove_arrays(store, STORE, unused_tables)
