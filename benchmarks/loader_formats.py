"""The loaders of `benchmarks.loader_peers`: the formats they read, and how they are opened."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr

import streamkern as sk

BATCH, BUCKET, AHEAD = 256, "bucket", 8
# Clients of S3 want some region, key and secret.
S3 = {"AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}


class Data(NamedTuple):
    """Rows in the formats of all loaders, in folders of `folder`.

    n_rows : of x.npy and the formats
    endpoint : of the S3 server that serves the folder, "" to read the files
    workers : processes (threads, for `Loader`) of the next loader that is opened
    stateful : use the DataLoader of torchdata in place of PyTorch's
    """

    folder: Path
    n_rows: int
    chunk_rows: int
    endpoint: str = ""
    workers: int = 0
    stateful: bool = False

    @property
    def X(self) -> np.ndarray:
        """The rows, memory-mapped."""
        return np.load(self.folder / "x.npy", mmap_mode="r")[: self.n_rows]

    def url(self, name: str) -> str:
        """Return the location of one format."""
        inside = self.folder / name
        return f"s3://{BUCKET}/{self.folder.name}/{name}" if self.endpoint else str(inside)

    def dataloader(self, dataset: Any, **options: Any) -> Any:
        """Return PyTorch's DataLoader, with workers that stay alive for the next epoch."""
        from torch.utils.data import DataLoader

        if self.stateful:
            from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader
        options |= {"num_workers": self.workers, "persistent_workers": self.workers > 0}
        return DataLoader(dataset, **options)


# ---------------------------------------------------------------------- readers of the Zarr store


def _loader(data: Data) -> sk.Loader:
    options = {"endpoint_url": data.endpoint, "key": "any", "secret": "any"}
    return sk.Loader(
        data.url("zarr"), BATCH, threads=data.workers or "auto",
        storage_options=options if data.endpoint else None,
    )  # fmt: skip


def _to_torch(data: Data) -> Any:
    return data.dataloader(_loader(data._replace(workers=0)).to_torch(), batch_size=None)


class Chunks:
    """A hand-written loop: chunks in random order, rows shuffled within a chunk, no state."""

    def __init__(self, data: Data, read: Callable[[int, int], tuple], ahead: int) -> None:
        self.data, self.read, self.ahead, self.rng = data, read, ahead, np.random.default_rng(0)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rows, size = self.data.n_rows, self.data.chunk_rows
        waiting: deque = deque()
        rest: list = []
        for start in [*self.rng.permutation(np.arange(0, rows, size)), *[None] * self.ahead]:
            if start is not None:
                waiting.append(self.read(start, min(start + size, rows)))
            if start is None or len(waiting) > self.ahead:
                rest = yield from self._batches(waiting, rest)
        if rest:
            yield rest[0], rest[1]

    def _batches(self, waiting: deque, rest: list) -> Iterator[Any]:
        if not waiting:
            return rest
        parts = [a.result() if hasattr(a, "result") else a for a in waiting.popleft()]
        order = self.rng.permutation(len(parts[0]))
        parts = [a[order] for a in parts]
        at = 0
        if rest:
            at = BATCH - len(rest[0])
            yield tuple(np.concatenate([a, b[:at]]) for a, b in zip(rest, parts, strict=True))
        while at + BATCH <= len(order):
            yield tuple(a[at : at + BATCH] for a in parts)
            at += BATCH
        return [a[at:] for a in parts] if at < len(order) else []


def _zarr_arrays(data: Data) -> tuple[Any, Any]:
    store: Any = data.url("zarr")
    if data.endpoint:  # the fastest of zarr's stores: zarr.readthedocs.io/en/stable/user-guide
        from obstore.store import S3Store
        from zarr.storage import ObjectStore

        more = {"endpoint": data.endpoint, "client_options": {"allow_http": True}}
        store = ObjectStore(S3Store.from_url(store, **S3, **more), read_only=True)
    group: Any = zarr.open_group(store, mode="r")
    return group["X"], group["y"]


def _zarr(data: Data) -> Chunks:
    arrays = _zarr_arrays(data)
    return Chunks(data, lambda start, stop: tuple(a[start:stop] for a in arrays), 0)


def _tensorstore(data: Data) -> Chunks:
    """Reads are futures: google.github.io/tensorstore/python/tutorial.html."""
    import tensorstore

    def opened(name: str) -> Any:
        path = f"{data.folder}/zarr/{name}/"
        place: dict[str, Any] = {"driver": "file", "path": path}
        if data.endpoint:
            place = {
                "driver": "s3", "bucket": BUCKET, "path": f"{data.folder.name}/zarr/{name}/",
                "endpoint": data.endpoint, "aws_region": S3["AWS_REGION"],
                "aws_credentials": {"type": "anonymous"},
            }  # fmt: skip
        return tensorstore.open({"driver": "zarr3", "kvstore": place}, read=True).result()

    arrays = [opened(name) for name in ("X", "y")]
    return Chunks(data, lambda start, stop: tuple(a[start:stop].read() for a in arrays), AHEAD)


def _annbatch(data: Data) -> Any:
    """Return the loader of annbatch; zarrs reads local files only (annbatch.readthedocs.io)."""
    import annbatch
    import pandas as pd

    X, y = _zarr_arrays(data)
    loader = annbatch.Loader(
        batch_size=BATCH, chunk_size=data.chunk_rows, preload_nchunks=AHEAD, shuffle=True,
        preload_to_gpu=False, to="torch", rng=np.random.default_rng(0),
    )  # fmt: skip
    return loader.add_dataset(X, obs=pd.DataFrame({"y": y[:, 0]}))


# ------------------------------------------------------------------------ formats of their own


def _fresh(data: Data, name: str) -> str:
    """Create an empty cache for one epoch of remote shards."""
    return tempfile.mkdtemp(dir=data.folder.parent.parent, prefix=name)


def _litdata(data: Data) -> Any:
    """Return the loader of LitData (github.com/Lightning-AI/litdata, "Optimize the data")."""
    import litdata

    dataset = litdata.StreamingDataset(data.url("litdata"), shuffle=True, seed=0)
    return litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=data.workers)


def _write_litdata(data: Data) -> None:
    from litdata.streaming.cache import Cache

    X = data.X
    chunk_bytes = data.chunk_rows * X[0].nbytes
    cache = Cache(str(data.folder / "litdata"), chunk_bytes=chunk_bytes)
    for i, x in enumerate(X):
        cache[i] = (x, i)
    cache.done()
    cache.merge()


def _mosaic(data: Data) -> Any:
    """Return the loader of MosaicML Streaming; both classes get `batch_size`
    (docs.mosaicml.com/projects/streaming, "Quick Start")."""
    import streaming

    place = {"local": data.url("mds")}
    if data.endpoint:
        place = {"remote": data.url("mds"), "local": _fresh(data, "mds")}
    dataset = streaming.StreamingDataset(**place, shuffle=True, batch_size=BATCH)
    return streaming.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=data.workers)


def _write_mosaic(data: Data) -> None:
    import streaming

    X = data.X
    columns = {"X": f"ndarray:{X.dtype.name}:{X.shape[1]}", "y": "int"}
    size = data.chunk_rows * X[0].nbytes
    with streaming.MDSWriter(out=str(data.folder / "mds"), columns=columns, size_limit=size) as out:
        for i, x in enumerate(X):
            out.write({"X": x, "y": i})


def _webdataset(data: Data) -> Any:
    """Return the loader of WebDataset, whose workers make the batches
    (webdataset.github.io/webdataset, "WebLoader")."""
    import webdataset

    shards: list[str] = sorted(map(str, (data.folder / "tar").iterdir()))
    if data.endpoint:
        prefix = f"{data.endpoint}/{BUCKET}/{data.folder.name}/tar"
        shards = [f"pipe:curl -s {prefix}/{Path(shard).name}" for shard in shards]
    rows = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False, seed=0)
    rows = rows.shuffle(1000).decode().to_tuple("npy", "cls").batched(BATCH)
    options = {"num_workers": data.workers, "persistent_workers": data.workers > 0}
    return webdataset.WebLoader(rows, batch_size=None, **options)


def _write_webdataset(data: Data) -> None:
    import webdataset

    X = data.X
    size = data.chunk_rows * X[0].nbytes
    (data.folder / "tar").mkdir()
    pattern = str(data.folder / "tar" / "%05d.tar")
    with webdataset.ShardWriter(pattern, maxsize=size, maxcount=1 << 30, verbose=0) as out:
        for i, x in enumerate(X):
            out.write({"__key__": f"{i:09d}", "npy": x, "cls": i})


class Mapped:
    """Rows of a memory-mapped file, a batch at a time: pytorch.org/docs/stable/data.html, "Disable
    automatic batching"."""

    def __init__(self, path: Path) -> None:
        self.X = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, rows: list[int]) -> tuple[Any, Any]:
        import torch

        return torch.from_numpy(self.X[rows]), torch.tensor(rows)


def _mapped(data: Data) -> Any:
    import torch
    from torch.utils.data import BatchSampler, RandomSampler

    dataset = Mapped(data.folder / "x.npy")
    order = RandomSampler(dataset, generator=torch.Generator().manual_seed(0))
    sampler = BatchSampler(order, BATCH, drop_last=False)
    return data.dataloader(dataset, sampler=sampler, batch_size=None)


class Peer(NamedTuple):
    """A loader, and how it is measured.

    package : module that it needs
    write : writes its format
    workers, remote : numbers of workers from disk and from S3, of which the better one is reported
    by_row : reads row by row, and is given fewer rows, since that takes long
    caches : remote epochs begin with a new loader, whose cache is empty
    """

    open: Callable[[Data], Any]
    package: str = "zarr"
    write: Callable[[Data], None] | None = None
    workers: tuple[int, ...] = (0,)
    remote: tuple[int, ...] = (0,)
    by_row: bool = False
    caches: bool = False


OURS = ("streamkern", "streamkern, to_torch")
CEILING = "torch, memory-mapped"
# From a server without TLS LitData reads nothing ("BadScheme"), and with two workers MosaicML
# Streaming ended in errors or gave wrong rows here; the cause was not looked for.
PEERS = {
    OURS[0]: Peer(_loader),
    OURS[1]: Peer(_to_torch, "torch"),
    "zarr, plain loop": Peer(_zarr),
    "tensorstore, plain loop": Peer(_tensorstore, "tensorstore"),
    "annbatch": Peer(_annbatch, "annbatch"),
    "LitData": Peer(_litdata, "litdata", _write_litdata, (0, 2), (), True),
    "MosaicML Streaming": Peer(_mosaic, "streaming", _write_mosaic, (0, 2), (0,), True, True),
    "WebDataset": Peer(_webdataset, "webdataset", _write_webdataset, (0, 2), (0, 2), True),
    CEILING: Peer(_mapped, "torch", None, (0, 2), ()),
}
