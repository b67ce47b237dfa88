"""Mutated input files, read in this process: python -m tests.fuzz_readers KIND FIRST COUNT FOLDER.

Prints one JSON line: how many inputs were read, how many refused, and what must not be: an error
that is none of streamkern's, rows other than those an independent reader finds, no end within
`SECONDS`. The number of the input at work lies in FOLDER/at, for a library that kills the process.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import random
import resource
import signal
import sys
import tomllib
import warnings
import zipfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from streamkern.basics.errors import StreamkernError
from streamkern.config.run_config import load_run_file
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.conform import FeatureConverter
from streamkern.ingest.input_files import FileOpener
from streamkern.ingest.readers import open_reader
from streamkern.ingest.targets import TargetConverter
from tests.raw_files import npy

SECONDS = 20
BLOCK_BYTES = 1 << 16
N, D = 24, 3
X = np.round(np.random.default_rng(0).standard_normal((N, D)), 3)
Y = np.arange(N) % 3
TOKENS = [
    b"", b"\n", b"\r\n", b"\r", b'"', b'""', b",", b";", b"\0", b"\xff", b"\xe9", b"nan", b"1e999",
    b"1_0", b" ", b"\xef\xbb\xbf", b"(", b"[", b"{", b"'", b"=", b".", b"-1", b"9" * 30,
    b"1,2,3,0\n",
]  # fmt: skip
INTEGERS = [0, 1, 0x7F, 0x80, 0xFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, 10**9]


# ---------------------------------------------------------------------------------------- seeds


def npz() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, X=X, y=Y)
    return file.getvalue()


def idx() -> bytes:
    return b"\0\0\x0e\x02" + np.array([N, D], ">u4").tobytes() + X.astype(">f8").tobytes()


def csv_text() -> bytes:
    labels = [f'"c{t}"' if t == 1 else f"c{t}" for t in Y]
    rows = [",".join([*map(repr, x), t]) for x, t in zip(X.tolist(), labels, strict=True)]
    return "\n".join(["a,b,c,y", *rows, ""]).encode()


def parquet() -> bytes:
    table = pa.table({"a": X[:, 0], "X": X.tolist(), "y": [f"c{t}" for t in Y]})
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=10)
    return file.getvalue()


def hdf5() -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as h5:
        h5.create_dataset("X", data=X, chunks=(10, D), compression="gzip", fletcher32=True)
        h5.create_dataset("y", data=Y)
    return file.getvalue()


def toml() -> bytes:
    return (
        b'[data]\ntrain = "s.zarr"\nepochs = 3\ntransforms = [{kind = "noise", sigma = 0.5}]\n'
        b'[model]\nkernel = "laplace"\nbandwidth = 2.5\nn_centers = 100\n[run]\nmemory = "1 GiB"\n'
    )


SEEDS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "csv": ("t.csv", csv_text),
    "csv.gz": ("t.csv.gz", lambda: gzip.compress(csv_text(), mtime=0)),
    "npy": ("X.npy", lambda: npy(X)),
    "npy.gz": ("X.npy.gz", lambda: gzip.compress(npy(X), mtime=0)),
    "npy.xz": ("X.npy.xz", lambda: lzma.compress(npy(X))),
    "npz": ("t.npz", npz),
    "idx": ("X.idx", idx),
    "idx.gz": ("X.idx.gz", lambda: gzip.compress(idx(), mtime=0)),
    "parquet": ("t.parquet", parquet),
    "hdf5": ("t.h5", hdf5),
    "toml": ("run.toml", toml),
}


def mutated(data: bytes, number: int) -> bytes:
    """Return the input with this number: the seed after one to four changes."""
    rng = random.Random(number)
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, end = sorted((rng.randrange(len(out) + 1), rng.randrange(len(out) + 1)))
        end = min(end, at + rng.choice((1, 4, 16, 1000)))
        match rng.randrange(8):
            case 0 | 1 if out:
                at = rng.randrange(len(out))
                out[at] ^= 1 << rng.randrange(8)
            case 2 if out:
                out[rng.randrange(len(out))] = rng.randrange(256)
            case 3:
                del out[at:end]
            case 4:
                out[at:at] = out[at:end]
            case 5:
                out[at:at] = rng.choice(TOKENS)
            case 6:
                size = rng.choice((1, 2, 4, 8))
                value = rng.choice(INTEGERS) % 256**size
                out[at : at + size] = value.to_bytes(size, rng.choice(("little", "big")))
            case _:
                del out[at if rng.random() < 0.5 else max(len(out) - rng.randrange(12), 0) :]
    return bytes(out)


# ------------------------------------------------------------------------------ independent truth


def rows_of(kind: str, data: bytes, path: Path) -> Any:
    """Return X and the labels, or None, as the usual reader of the format reads them."""
    name, _, packed = kind.partition(".")
    if packed:
        data = gzip.decompress(data) if packed == "gz" else lzma.decompress(data)
    match name:
        case "csv":
            text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
            found_rows = csv.reader(io.StringIO(text), delimiter=",", strict=True)
            rows = [row for row in found_rows if len(row) > 1 or "".join(row).strip(" ")]
            return np.array([[float(k) for k in r[:-1]] for r in rows[1:]]), [
                r[-1].strip() for r in rows[1:]
            ]
        case "npy":
            return np.load(io.BytesIO(data), allow_pickle=False), None
        case "npz":
            archive = zipfile.ZipFile(io.BytesIO(data))
            found = [io.BytesIO(archive.read(f"{k}.npy")) for k in ("X", "y")]
            return np.load(found[0]), np.load(found[1]).tolist()
        case "idx":
            kinds = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
            shape = np.frombuffer(data, ">u4", data[3], 4)
            return np.frombuffer(data, kinds[data[2]], offset=4 + 4 * data[3]).reshape(shape), None
        case "parquet":
            table = pq.read_table(io.BytesIO(data), columns=["X", "y"])
            return np.array(table.column("X").to_pylist()), table.column("y").to_pylist()
        case _:
            with h5py.File(path, "r") as file:
                return file["X"][:], file["y"][:].tolist()


# ---------------------------------------------------------------------------------- one input


def read(path: Path, kind: str) -> tuple[Any, Any]:
    """Return X and the labels of the file as streamkern reads it, converted as for a store."""
    y = Y if kind.partition(".")[0] in ("npy", "idx") else "y"
    with ExitStack() as files:
        reader = open_reader(path, ReadRequest(y=y), FileOpener({}, files))
        blocks = list(reader.blocks(0, BLOCK_BYTES))
    for block in blocks:
        FeatureConverter(block, input_dtype=reader.natural_dtype).convert(block)
        TargetConverter(block).convert(block)
    if not blocks:
        return np.empty((0, D)), []
    return np.concatenate([k.X for k in blocks]), np.concatenate([k.y for k in blocks]).tolist()


def outcome(kind: str, path: Path, data: bytes) -> str:
    """Return "read", "refused", or a description of the fault."""
    path.write_bytes(data)
    try:
        if kind == "toml":
            load_run_file(path)
            tomllib.loads(data.decode())
            return "read"
        got, labels = read(path, kind)
    except StreamkernError as error:
        text = str(error)
        return "refused" if text and "bug" not in text else f"says {text!r}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    try:
        expected, names = rows_of(kind, data, path)
    except Exception as error:
        full = SEEDS[kind][1]()  # equal, if the damaged bytes are not needed
        path.write_bytes(full)
        expected, names = rows_of(kind, full, path)
        found = f"read, where the usual reader finds {type(error).__name__}: {str(error)[:200]}"
        same = np.array_equal(got, expected) and (names is None or list(labels) == list(names))
        return "read" if same else found
    same = np.array_equal(got, expected, equal_nan=True) or (len(got) == 0 == len(expected))
    if names is not None and [str(k) for k in labels] != [str(k) for k in names]:
        same = False
    return "read" if same else "other rows than the usual reader"


class Hang(BaseException):
    pass


def _hang(*_: Any) -> None:
    raise Hang


def main(kind: str, first: int, count: int, folder: Path) -> dict[str, Any]:
    name, seed = SEEDS[kind]
    data, path = seed(), folder / name
    assert outcome(kind, path, data) == "read"
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, resource.RLIM_INFINITY))
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found: dict[str, Any] = {"read": 0, "refused": 0, "wrong": []}
    signal.signal(signal.SIGALRM, _hang)
    for number in range(first, first + count):
        (folder / "at").write_text(str(number))
        signal.alarm(SECONDS)
        try:
            result = outcome(kind, path, mutated(data, number))
        except Hang:
            result = f"no end within {SECONDS} s"
        signal.alarm(0)
        if result in found:
            found[result] += 1
        else:
            found["wrong"].append([number, result])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**found, "grown_bytes": 1024 * (peak - base), "crc": zlib.crc32(data)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    kind_, first_, count_, folder_ = sys.argv[1:]
    sys.stdout.write(json.dumps(main(kind_, int(first_), int(count_), Path(folder_))) + "\n")
