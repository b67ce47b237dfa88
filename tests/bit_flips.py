"""Flip bits in all files of a folder, and check that results are unchanged or errors.

For stores and run directories alike. A case is (file, byte, bit), drawn from a seed, so that each
failure is repeated by its number. The file is put back as it was afterwards.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr

from streamkern.basics.errors import StreamkernError
from streamkern.store.layout import row_arrays
from streamkern.store.zarr_json import mark_with_stored_digests
from tests.traced_memory import traced_memory


class Flip(NamedTuple):
    """One bit of one file."""

    path: Path
    byte: int
    bit: int


def flips(root: Path, n: int, seed: int) -> list[Flip]:
    """Yield n bit flips in the files below `root`: half of them with equal chances for each file,
    half for each byte.

    Small files of metadata are where damage is subtle, and most bytes are in chunks.
    """
    rng = np.random.default_rng(seed)
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.stat().st_size]
    sizes = np.array([path.stat().st_size for path in files], float)
    cases = []
    for k in range(n):
        shares = None if k % 2 else sizes / sizes.sum()
        path = files[rng.choice(len(files), p=shares)]
        cases.append(Flip(path, int(rng.integers(path.stat().st_size)), int(rng.integers(8))))
    return cases


@contextmanager
def flipped(flip: Flip) -> Iterator[None]:
    """Flip one bit of a file in the folder for a `with` block."""
    full = flip.path.read_bytes()
    damaged = bytearray(full)
    damaged[flip.byte] ^= 1 << flip.bit
    with replaced(flip.path, bytes(damaged)):
        yield


@contextmanager
def replaced(path: Path, data: bytes) -> Iterator[None]:
    """Replace the content of a file for a `with` block."""
    full = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(full)


# -- JSON ------------------------------------------------------------------------------------------

_VALUES: list[Any] = [
    None, True, -1, 0, 1, 7, 2**70, 1e308, float("nan"), "", "X", "\x1b[31m", [], {}, [[]],
    [0], [-3, 6], ["a"], {"name": "blosc2"}, {"name": "bytes"}, "float32", "int128", "zstd",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Yield the paths of all entries of a JSON value."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    return [path, *(p for key, item in items for p in places(item, (*path, key)))]


def edited(document: Any, rng: np.random.Generator) -> Any:
    """Return a JSON document with one to three values replaced, removed, doubled or nested."""
    document = json.loads(json.dumps(document))
    known = places(document)[1:]
    for _ in range(int(rng.integers(1, 4))):
        *above, last = known[rng.integers(len(known))]
        try:
            holder = document
            for key in above:
                holder = holder[key]
            how = rng.integers(4)
            if how == 0:
                del holder[last]
            elif how == 1:
                holder[last] = copy.deepcopy(_VALUES[rng.integers(len(_VALUES))])
            elif how == 2:
                holder[last] = [holder[last]]
            else:
                holder[str(_VALUES[rng.integers(len(_VALUES))])] = holder[last]
        except (KeyError, IndexError, TypeError):
            continue
    return document


# -- outcomes --------------------------------------------------------------------------------------


class Silent(AssertionError):
    """Something else came out, and nobody said so."""


def outcome(use: Callable[[], Any], truth: Any, context: object) -> str:
    """Return "same", or the name of the error that `use` raises. Raises Silent if the result
    differs from `truth`.

    Anything outside of the tree of errors.py goes through, which fails the test.
    """
    try:
        answer = use()
    except StreamkernError as error:
        if "\n" in str(error):
            raise AssertionError(f"{context}: not one sentence: {error}") from error
        return type(error).__name__
    if answer != truth:
        raise Silent(f"{context} changed the answer without a word")
    return "same"


def survey(
    root: Path, n: int, seed: int, use: Callable[[], Any], *, peak_bytes: int
) -> Counter[str]:
    """Return how often each `outcome` occurs in n flips; `use` allocates at most `peak_bytes` in
    each."""
    truth, counts = use(), Counter[str]()
    for flip in flips(root, n, seed):
        name = flip.path.relative_to(root).as_posix()
        with traced_memory() as traced, flipped(flip):
            counts[outcome(use, truth, f"{name}, byte {flip.byte}, bit {flip.bit}")] += 1
        peak = traced.peak
        assert peak <= peak_bytes, f"{name}, byte {flip.byte}, bit {flip.bit}: {peak} bytes"
    return counts


def reseal(root: Path) -> None:
    """Compute all checksums of a local store again, from its current chunks and metadata.

    As somebody would who means harm, or a fault of ours in the writing.
    """
    group = zarr.open_group(root, mode="r+", use_consolidated=False)
    mark: Any = dict(group.attrs["streamkern"])
    names = row_arrays(mark["weight_totals"] is not None)
    crcs = [
        [int.from_bytes(path.read_bytes()[-4:], "little") for path in _chunks(root / name)]
        for name in names
    ]
    table = np.array(crcs, np.uint32).T.copy()
    group["crc"][:] = table
    mark["crc"] = hashlib.sha256(table.astype("<u4").tobytes()).hexdigest()
    group.attrs["streamkern"] = mark_with_stored_digests(mark, group.store, "", str(root))


def _chunks(array: Path) -> list[Path]:
    found = [path for path in (array / "c").rglob("*") if path.is_file()]
    return sorted(found, key=lambda path: int(path.relative_to(array / "c").parts[0]))
