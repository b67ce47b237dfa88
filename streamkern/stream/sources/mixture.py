"""Several sources as one: one after another, or in chosen shares."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamkern.basics.errors import ConfigError, RowShapeError
from streamkern.basics.message import mention
from streamkern.basics.values import is_finite_number, is_whole_number, json_digest
from streamkern.filesystem.cache import Cache
from streamkern.filesystem.urls import local_path
from streamkern.ingest.columns import add_unused_columns, unused_columns
from streamkern.store.row_block import concatenate_blocks
from streamkern.store.sparse_rows import sparse_features
from streamkern.store.statistics import ColumnMoments
from streamkern.stream.sources.alignment import ReorderedSource, align_columns, pad_to_one_length
from streamkern.stream.sources.augmented import without_copies
from streamkern.stream.sources.base import BaseSource, Source
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import Moments, Transform, bind_transforms, transform_name
from streamkern.stream.sources.unit_edges import unit_sizes
from streamkern.stream.sources.user import as_source


class MixtureSource(BaseSource):
    """The rows of several sources with rows and targets of the same kind.

    Without weights an epoch has every row of every source once, in their units. The weights w_k are
    shares of the sources, not sample weights, which rows keep unchanged. With weights an epoch has
    about `n_rows` rows: source k provides the share w_k / sum(w) of them, rounded to whole units of
    that source, at least one.

    Source k is read in passes, one after the other without end, and an epoch continues where the
    previous epoch stopped. With U_k units of source k in an epoch,

        unit j of source k in epoch e = unit e U_k + j of the passes over source k,

    so no state is kept. The source receives the number of the pass as its `epoch`, so that its host
    transforms are drawn anew in every pass.

    With weights, all units of a source have the size of its largest unit. A shorter unit (usually
    the last one) is filled with rows of the same source, which are taken in turn over the passes.
    In each pass every row comes once, and as many rows as the short units lack come twice. After
    any number of passes, the uses of any two rows of a source differ by at most one.

    The plan spreads the units of each source evenly over an epoch (`strata`). The more units a
    shuffle block has, the closer are the shares in its batches to the given shares.

    Parameters
    ----------
    sources : one source or more, which agree in row shape, dtype, targets and classes
        Transforms of the sources that run when rows are read (host transforms) are kept.
    weights : numbers above 0, one for each source, or None
    n_rows : number of rows in an epoch, with `weights`; default: the sum over all sources
    transforms : transforms of the rows of the mixture
        The sources must leave a transform that runs after the upload, and all that follow it, to
        these.

    Raises
    ------
    ConfigError
        If the sources do not agree, or have feed transforms, or if an argument is not possible.
    DataError
        If columns, targets or encoders of the sources differ.
    """

    kind = "mixture"

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float] | None = None,
        *,
        n_rows: int | None = None,
        transforms: Sequence[Transform] = (),
    ) -> None:
        _check_counts(sources, weights, n_rows)
        # Sources of one kind: rows of one length, and columns in the order of the first source.
        parts = pad_to_one_length([as_source(source) for source in sources])
        self._copy_from(parts[0], *self._ROW_ATTRIBUTES)
        self.parts = tuple(
            align_columns(
                part, self.columns, f"source {k} of the mixture", self.target_columns, self.encoder
            )
            for k, part in enumerate(parts, start=1)
        )
        _check_same_kind(self.parts)
        unused = [name for part in self.parts for name in unused_columns(part.file_form)]
        roles = (*(self.columns or ()), *(self.target_columns or ()), self.weight_column)
        self.file_form = add_unused_columns(self.file_form, unused, roles)
        self.weights = None if weights is None else tuple(float(w) for w in weights)
        self.remote = any(part.remote for part in self.parts)
        self.level = max(part.level for part in self.parts) + 1
        # The units of an epoch, source after source.
        sizes = [unit_sizes(part) for part in self.parts]  # rows of each unit, by source
        self._passes: list[_Passes] = []
        if self.weights is not None:
            rows = sum(part.n_rows for part in self.parts) if n_rows is None else n_rows
            total = math.fsum(self.weights)
            for unit_rows, weight in zip(sizes, self.weights, strict=True):
                self._passes.append(_Passes(unit_rows, rows * weight / total))
            sizes = [np.full(p.n_units, p.unit_rows) for p in self._passes]
        unit_counts = [len(unit_rows) for unit_rows in sizes]
        self.strata = np.repeat(np.arange(len(unit_counts), dtype=np.uint16), unit_counts)
        self._first_units = np.cumsum([0, *unit_counts])
        self._edges = np.cumsum(np.concatenate([[0], *sizes]), dtype=np.int64)
        self.n_rows = int(self._edges[-1])
        # The facts about the rows of an epoch.
        if self.weights is None and all(part.files for part in self.parts):
            self.files = tuple(file for part in self.parts for file in part.files)
        self.shares = tuple(int(unit_rows.sum()) / self.n_rows for unit_rows in sizes)
        epoch_totals = [
            # Number of passes in an epoch, times the totals of a pass.
            self.n_rows * share / part.n_rows * part.totals
            for share, part in zip(self.shares, self.parts, strict=True)
            if part.totals is not None
        ]
        if len(epoch_totals) == len(self.parts):
            self.totals = np.sum(epoch_totals, axis=0)
        self.hides_copies = weights is not None or any(
            part.hides_copies or stored_rows(part) is not part for part in self.parts
        )
        self.host_transforms, self.feed_transforms = bind_transforms(transforms, self)

    @property
    def fingerprint(self) -> str:
        fingerprints = [part.fingerprint for part in self.parts]
        # Contents that were not read are identified by their metadata or by a name.
        has_unread = any(text.startswith(("meta:", "name:")) for text in fingerprints)
        return ("meta:" if has_unread else "") + json_digest(fingerprints)

    def statistics(self) -> Moments:
        """Return the moments of an epoch, see `mixed_moments`."""
        return mixed_moments([part.statistics() for part in self.parts], self.shares)

    def target_moments(self) -> ColumnMoments | None:
        """Return the moments of the targets, each source weighted by its rows in an epoch."""
        moments = ColumnMoments(self.n_outputs)
        for share, part in zip(self.shares, self.parts, strict=True):
            part_moments = part.target_moments()
            if part_moments is None:
                return None
            moments.merge(part_moments, self.n_rows * share / part.n_rows)
        return moments

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "weights": None if self.weights is None else list(self.weights),
            "shares": list(self.shares),
            "sources": [part.describe() for part in self.parts],
        }

    def source_rows(self, u: int) -> np.ndarray:
        """Return the row numbers, counted over all sources; with weights, positions in an epoch."""
        if self._passes:
            return super().source_rows(u)
        k, part_unit = self._locate(u)
        n_before = sum(part.n_rows for part in self.parts[:k])
        return self.parts[k].source_rows(part_unit) + np.uint64(n_before)

    def origins(self, u: int, epoch: int) -> np.ndarray:
        """Return the origins: origin o of source k of K becomes o K + k, which is unique."""
        k, part_unit = self._locate(u)
        part = self.parts[k]
        if self._passes:
            pieces = self._passes[k].pieces(part, part_unit, epoch)
            origins = np.concatenate(
                [part.origins(v, pass_number)[rows] for v, rows, pass_number in pieces]
            )
        else:
            origins = part.origins(part_unit, epoch)
        unique_origins: np.ndarray = origins * np.uint64(len(self.parts)) + np.uint64(k)
        return unique_origins

    def _read_targets(self, u: int, seed: int, epoch: int) -> np.ndarray:
        if self._passes:
            return super()._read_targets(u, seed, epoch)
        k, part_unit = self._locate(u)
        return self.parts[k].read_targets(part_unit, _source_seed(seed, k), epoch)

    def _locate(self, u: int) -> tuple[int, int]:
        """Return the index k of the source of unit u, and the unit in that source."""
        k = int(np.searchsorted(self._first_units, u, side="right")) - 1
        return k, u - int(self._first_units[k])

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        k, part_unit = self._locate(u)
        if self._passes:
            return self._passes[k].read(self.parts[k], part_unit, _source_seed(seed, k), epoch)
        return self.parts[k].read_unit(part_unit, _source_seed(seed, k), epoch).contents


def open_stores(
    urls: Sequence[str | os.PathLike[str]],
    weights: Sequence[float] | None = None,
    *,
    x: str = "X",
    y: str | None = "y",
    w: str | None = None,
    foreign: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    cache: Cache | None = None,
) -> BaseSource:
    """Return the rows of one store, or the mixture of several.

    urls : URLs of the stores
    weights : shares of the stores, see `MixtureSource`
    x, y : names of the arrays
    w : name of the sample weights in foreign stores
    foreign : as for `open_store`
    storage_options : options of the remote stores; ConfigError if no store is remote
    cache : cache for the chunks of remote stores
    """
    is_remote = [local_path(url) is None for url in urls]
    stores = [
        ZarrSource(
            url, x=x, y=y, w=w, foreign=foreign, cache=cache,
            # If no store is remote, `open_store` refuses the options.
            storage_options=storage_options if store_is_remote or not any(is_remote) else None,
        )
        for url, store_is_remote in zip(urls, is_remote, strict=True)
    ]  # fmt: skip
    return stores[0] if len(stores) == 1 and weights is None else MixtureSource(stores, weights)


def stored_rows(source: BaseSource) -> BaseSource:
    """Return the source of the rows that `source` is made from, each once, without copies."""
    source = without_copies(source)
    if isinstance(source, ReorderedSource):
        rows = stored_rows(source.base)
        return source if rows is source.base else source.with_base(rows)
    if source.passes_differ:
        return stored_rows(source.parts[0])
    if not isinstance(source, MixtureSource):
        return source
    parts = [stored_rows(part) for part in source.parts]
    unchanged = source.weights is None and all(
        a is b for a, b in zip(parts, source.parts, strict=True)
    )
    return source if unchanged else MixtureSource(parts)


class _Passes:
    """Endless passes over one source, cut into units of equal size.

    sizes : (n,) rows of the units of the source
    epoch_rows : rows of an epoch, before rounding to whole units
    unit_rows : rows of a unit, as many as the largest unit of the source
    n_units : units of an epoch
    """

    def __init__(self, sizes: np.ndarray, epoch_rows: float) -> None:
        self.unit_rows = int(sizes.max())
        self.n_units = max(1, math.floor(epoch_rows / self.unit_rows + 0.5))
        self._edges = np.concatenate(([0], np.cumsum(sizes)))
        # (n + 1,) rows that units 0 … u - 1 lack, in all, of `unit_rows` each.
        self._lacking_rows = np.concatenate(([0], np.cumsum(self.unit_rows - sizes)))

    def read(self, source: BaseSource, j: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        """Return X, y and w of unit j of an epoch."""
        (u, _, pass_number), *fillers = self.pieces(source, j, epoch)
        block = source.read_unit(u, seed, pass_number)
        if not fillers:
            return block.contents
        filler_blocks = [
            source.read_unit(v, seed, pass_number).take(rows) for v, rows, pass_number in fillers
        ]
        return concatenate_blocks([block, *filler_blocks]).contents

    def pieces(self, source: BaseSource, j: int, epoch: int) -> list[tuple[int, slice, int]]:
        """Return (unit of the source, its rows, number of the pass) for each part of unit j."""
        pass_number, u = divmod(epoch * self.n_units + j, source.n_units)
        pieces = [(u, slice(None), pass_number)]
        # Fill the unit with rows start, start + 1, …, modulo the rows of the source. `start` is the
        # number of rows that earlier units, of this pass and before, were filled with.
        n_lacking = int(self._lacking_rows[u + 1] - self._lacking_rows[u])
        start = pass_number * int(self._lacking_rows[-1]) + int(self._lacking_rows[u])
        while n_lacking:
            start %= source.n_rows
            v = int(np.searchsorted(self._edges, start, side="right")) - 1
            unit_start, unit_stop = self._edges[v : v + 2].tolist()
            rows = slice(start - unit_start, min(start + n_lacking, unit_stop) - unit_start)
            pieces.append((v, rows, pass_number))
            n_lacking -= rows.stop - rows.start
            start = unit_start + rows.stop
        return pieces


def _check_counts(
    sources: Sequence[Source], weights: Sequence[object] | None, n_rows: int | None
) -> None:
    """Raise ConfigError if weights or the number of rows do not fit the sources."""
    if not 1 <= len(sources) <= 65_535:
        raise ConfigError(
            f"a mixture cannot have {len(sources)} sources", "give from 1 to 65535 sources"
        )
    if weights is not None and (
        len(weights) != len(sources) or not all(is_finite_number(w) and w > 0 for w in weights)
    ):
        raise ConfigError(
            f"{mention(f'weights={list(weights)}')} do not fit {len(sources)} sources",
            "give one finite number above 0 for each source",
        )
    if n_rows is not None and (weights is None or not is_whole_number(n_rows) or n_rows < 1):
        raise ConfigError(
            f"n_rows={n_rows!r} of a mixture must be a whole number, at least 1, and needs weights",
            "give weights, or leave n_rows out: an epoch then has every row once",
        )


def _check_same_kind(sources: Sequence[BaseSource]) -> None:
    """Raise ConfigError if sources differ in shapes or dtypes, or have feed transforms.

    For other shapes of rows, it is a RowShapeError.
    """
    expected = _row_kind(sources[0])
    for number, source in enumerate(sources, start=1):
        for name, value in _row_kind(source).items():
            if value != expected[name]:
                error_class = RowShapeError if name == "row_shape" else ConfigError
                raise error_class(
                    f"source {number} of the mixture has {name} {value} and source 1 has "
                    f"{expected[name]}",
                    f"mix only sources with the same {name}",
                )
        if source.feed_transforms:
            raise ConfigError(
                f"source {number} of the mixture has the transform "
                f"{transform_name(source.feed_transforms[0])!r}, which runs after the upload",
                "give the transform to the mixture, in transforms=",
            )


def _row_kind(source: BaseSource) -> dict[str, Any]:
    """Return the properties in which the sources of a mixture must agree."""
    return {
        "row_shape": source.row_shape, "dtype": source.dtype, "n_outputs": source.n_outputs,
        "classes": source.classes, "y_dtype": source.y_dtype, "weighted": source.weighted,
        "sparse features": sparse_features(source.file_form),
    }  # fmt: skip


def _source_seed(seed: int, k: int) -> int:
    """Return the seed of source k; with one seed, rows i of all sources would get equal draws."""
    digest = hashlib.blake2b(f"mixture,{seed},{k}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def mixed_moments(moments: Sequence[Moments], shares: Sequence[float]) -> Moments:
    """Return the moments of a mixture; a mean and a scale are None if a source has none.

    With shares p, means m and variances v of the sources, the mean is sum(p m) and the variance
    sum(p (v + (m - mean)^2)).
    """

    def mixed(means: Sequence[Any], scales: Sequence[Any]) -> tuple[Any, Any]:
        if any(value is None for value in (*means, *scales)):
            return None, None
        m, s = np.array(means, np.float64), np.array(scales, np.float64)
        p = np.array(shares).reshape(-1, *(1,) * (m.ndim - 1))
        mean = (p * m).sum(axis=0)
        return mean, np.sqrt((p * (s**2 + (m - mean) ** 2)).sum(axis=0))

    global_means, global_scales, feature_means, feature_scales = zip(*moments, strict=True)
    mean, scale = mixed(global_means, global_scales)
    feature_mean, feature_scale = mixed(feature_means, feature_scales)
    if mean is not None:
        mean, scale = float(mean), float(scale)
    return mean, scale, feature_mean, feature_scale
