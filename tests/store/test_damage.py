"""Check that a store returns the rows that were written or is refused, after any damage."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import google_crc32c
import numpy as np
import pytest
import zarr
from numcodecs.zstd import Zstd
from zarr.storage import MemoryStore

from streamkern.basics.errors import ConfigError, CorruptChunkError, DataError
from streamkern.cli.described_store import store_text
from streamkern.filesystem.cache import Cache
from streamkern.ingest.append import append
from streamkern.ingest.ingest import ingest
from streamkern.store.describe import describe_store, describe_unfinished
from streamkern.store.store import Store, open_store
from streamkern.store.zarr_json import mark_with_stored_digests
from tests import bit_flips
from tests.raw_files import memory_url
from tests.traced_memory import traced_memory

N = 300


def rows(dtype: str, seed: int = 0) -> Any:
    """Return N random rows of six features."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 250, (N, 6)).astype(dtype)


def float32_store(location: Any, seed: int = 0) -> Any:
    """Write six chunks of float rows with classes, weights and column names; open them."""
    X = rows("float32", seed)
    y = np.array(["Oslo", "Rome", "Lima"])[np.arange(N) % 3]
    ingest(X, location, y=y, sample_weight=X[:, 0], chunk_mb=1200 / 2**20)
    return location


def uint8_store(location: Any, seed: int = 0) -> Any:
    """Return a store of compressed integer rows, and values."""
    ingest(rows("uint8", seed), location, y=rows("float32", 7)[:, :2] * 1.5, chunk_mb=300 / 2**20)
    return location


def appended_store(location: Any) -> Any:
    """Return the rows of `float32_store`, with as many appended rows."""
    X = rows("float32", 1)
    y = np.array(["Oslo", "Rome", "Lima"])[np.arange(N) % 3]
    append(X, float32_store(location), y=y, sample_weight=X[:, 0])
    return location


def digest_of_store(location: Any, **how: Any) -> str:
    """Return a hash of everything that a reader learns from a store."""
    store = open_store(location, **how)
    spec = store.spec
    digest = hashlib.sha256(repr(vars(spec)).encode())
    for values in (spec.mean, spec.scale, spec.target_mean, spec.target_scale):
        digest.update(b"" if values is None else values.tobytes())
    for i in range(store.n_chunks):
        for part in (*store.read_weighted_chunk(i), store.source_rows(i)):
            digest.update(b"" if part is None else part.tobytes())
        digest.update(store.read_targets(i).tobytes())
    return digest.hexdigest()


STORES = [float32_store, uint8_store]


# -------------------------------------------------------------------------------------- bit flips


@pytest.mark.slow
@pytest.mark.parametrize("make", STORES)
@pytest.mark.parametrize(
    "n", [pytest.param(100, id="some"), pytest.param(5000, id="many", marks=pytest.mark.full)]
)
def test_flipped_bit_raises_or_is_harmless(
    tmp_path: Path, make: Callable[[Path], Path], n: int
) -> None:
    """Flip bits of all files of a store, in both kinds of arrays."""
    root = make(tmp_path / "s")
    use = partial(digest_of_store, root)
    counts = bit_flips.survey(root, n, seed=1, use=use, peak_bytes=16 << 20)
    print(dict(counts))
    assert counts["CorruptChunkError"] > n // 2
    assert set(counts) <= {"same", "CorruptChunkError", "DataError", "StoreNotFoundError"}


@pytest.mark.slow
def test_flipped_bit_of_appended_store_raises_or_is_harmless(tmp_path: Path) -> None:
    """Flip bits of all files; some are read only by other programs, or by stores opened before."""
    root = appended_store(tmp_path / "s")
    counts = bit_flips.survey(
        root, 100, seed=2, use=partial(digest_of_store, root), peak_bytes=16 << 20
    )
    assert counts["CorruptChunkError"] > 40
    assert set(counts) <= {"same", "CorruptChunkError", "DataError", "StoreNotFoundError"}


@pytest.mark.slow
def test_every_bit_of_metadata_may_flip(tmp_path: Path) -> None:
    """Flip each bit of zarr.json of the group and of one array."""
    root = float32_store(tmp_path / "s")
    truth, counts = digest_of_store(root), Counter[str]()
    for name in ("zarr.json", "X/zarr.json"):
        for byte in range(0, (root / name).stat().st_size, 3):
            flip = bit_flips.Flip(root / name, byte, byte % 7)
            with bit_flips.flipped(flip):
                counts[bit_flips.outcome(partial(digest_of_store, root), truth, flip)] += 1
    assert counts["CorruptChunkError"] > 0.9 * counts.total()
    assert counts.keys() <= {"same", "CorruptChunkError", "DataError", "StoreNotFoundError"}


# ------------------------------------------------------------------------- chunks and their place


def swap_chunks(root: Path, a: str, b: str) -> None:
    """Exchange the files of two chunks."""
    chunk, other_chunk = (root / a).read_bytes(), (root / b).read_bytes()
    (root / a).write_bytes(other_chunk)
    (root / b).write_bytes(chunk)


@pytest.mark.parametrize("make", STORES)
@pytest.mark.parametrize("array", ["X", "y", "row"])
def test_swapped_chunks_are_refused(
    tmp_path: Path, make: Callable[[Path], Path], array: str
) -> None:
    """Swap whole chunks of equal size, which have correct checksums."""
    root = make(tmp_path / "s")
    tail = "" if array == "row" or (array == "y" and make is float32_store) else "/0"
    swap_chunks(root, f"{array}/c/0{tail}", f"{array}/c/1{tail}")
    store = open_store(root)
    read_rows = store.source_rows if array == "row" else store.read_chunk
    with pytest.raises(CorruptChunkError, match=rf"chunk {array}/c/1{tail} of .*s .*not the chunk"):
        read_rows(1)
    if array == "y":
        with pytest.raises(CorruptChunkError, match="not the chunk that was written there"):
            store.read_targets(0)


def test_swapped_remote_chunks_are_refused_and_not_cached(tmp_path: Path) -> None:
    """Check that every read is verified, and that no wrong chunk is cached."""
    url, cache = float32_store(memory_url()), Cache(tmp_path / "cache", 64 << 20)
    memory, root = fsspec.filesystem("memory"), url.removeprefix("memory:/")
    chunk, other_chunk = memory.cat(f"{root}/X/c/0/0"), memory.cat(f"{root}/X/c/1/0")
    memory.pipe(f"{root}/X/c/0/0", other_chunk)
    for options in ({}, {"cache": cache}):
        with pytest.raises(CorruptChunkError, match="not the chunk that was written there"):
            open_store(url, **options).read_chunk(0)
    memory.pipe(f"{root}/X/c/0/0", chunk)
    store = open_store(url, cache=cache)
    assert np.array_equal(store.read_chunk(0)[0], open_store(url).read_chunk(0)[0])


def test_swapped_chunks_of_any_zarr_store_are_refused(tmp_path: Path) -> None:
    """Check chunks that are neither files nor objects."""
    root, memory_store = float32_store(tmp_path / "s"), MemoryStore()
    for path in root.rglob("*"):
        if path.is_file():
            key = path.relative_to(root).as_posix()
            memory_store._store_dict[key] = zarr.buffer.cpu.Buffer.from_bytes(path.read_bytes())
    group = zarr.open_group(memory_store, mode="r")
    assert digest_of_store(group) == digest_of_store(group)
    memory_store._store_dict["X/c/0/0"] = memory_store._store_dict["X/c/1/0"]
    with pytest.raises(CorruptChunkError, match=r"chunk X/c/0/0 .*not the chunk"):
        open_store(group).read_chunk(0)


# ---------------------------------------------------------------- stores of streamkern or foreign


def rename_attribute(text: str) -> str:
    """Return the text of a zarr.json with another name of the attribute."""
    return text.replace('"streamkern": {', '"strdamkern": {', 1)


def drop_attributes(text: str) -> str:
    """Return the text of a zarr.json without attributes."""
    return json.dumps({**json.loads(text), "attributes": {}})


@pytest.mark.filterwarnings("ignore:the array 'w' of")
@pytest.mark.parametrize("alter", [rename_attribute, drop_attributes])
def test_store_with_damaged_attribute_is_not_foreign(
    tmp_path: Path, alter: Callable[[str], str]
) -> None:
    """Check that it is refused, with the way to read it in spite of the damage."""
    root = float32_store(tmp_path / "s")
    (root / "zarr.json").write_text(alter((root / "zarr.json").read_text()))
    with pytest.raises(CorruptChunkError, match=r"looks like a store .*s .*foreign=True to read"):
        open_store(root)
    store = open_store(root, foreign=True)
    assert (store.spec.foreign, store.spec.classes) == (True, ("0", "1", "2"))


@pytest.mark.parametrize("x", ["X/", "../X", ".", "", "X//", "a/../X"])
def test_array_names_with_path_parts_are_refused(tmp_path: Path, x: str) -> None:
    """Check names such as "X/", "../X" and ".", which zarr resolves to other paths."""
    with pytest.raises(ConfigError, match="is not the name of an array"):
        open_store(float32_store(tmp_path / "s"), x=x)


def test_other_arrays_of_own_store_need_foreign_option(tmp_path: Path) -> None:
    """Check that arrays of other names are not read without classes and weights."""
    root = float32_store(tmp_path / "s")
    with pytest.raises(
        DataError, match=r"rows in 'X' and targets in 'y', but 'X', 'w' were requested"
    ):
        open_store(root, y="w")
    assert open_store(root, y="w", foreign=True).spec.n_outputs == 1


def test_older_schema_is_refused_with_remedy(tmp_path: Path) -> None:
    root = float32_store(tmp_path / "s")
    group: Any = zarr.open_group(root, mode="r+")
    group.attrs["streamkern"] = {"kind": "store", "schema": 1, "status": "complete"}
    with pytest.raises(DataError, match="schema 1, but this version reads only 3; ingest the data"):
        open_store(root)


def test_ingest_and_centers_verify_stores(tmp_path: Path) -> None:
    """Check a store that is the input of another command."""
    root = float32_store(tmp_path / "s")
    swap_chunks(root, "X/c/0/0", "X/c/1/0")
    with pytest.raises(CorruptChunkError, match="not the chunk that was written there"):
        ingest(root, tmp_path / "o")
    with pytest.raises(CorruptChunkError, match="not the chunk that was written there"):
        np.asarray(open_store(root, y=None).rows["X"])
    (root / "zarr.json").write_text(drop_attributes((root / "zarr.json").read_text()))
    with pytest.raises(CorruptChunkError, match="looks like a store"):
        ingest(root, tmp_path / "o")


def test_slices_of_a_store_equal_its_rows(tmp_path: Path) -> None:
    root = float32_store(tmp_path / "s")
    plain: Any = zarr.open_group(root, mode="r")["X"]
    stored_rows = open_store(root).rows["X"]
    for rows in (
        slice(None), slice(3, 7), slice(40, 160), slice(299, 400), slice(5, 5), slice(7, 3),
        slice(2, 290, 3), slice(None, None, -1), slice(-10, 40, -60),
    ):  # fmt: skip
        np.testing.assert_array_equal(stored_rows[rows], plain[:][rows])


def test_class_names_are_escaped_in_terminal(tmp_path: Path) -> None:
    """Check that control characters in a class name are escaped by info and ingest."""
    X = rows("float32")
    ingest(X, tmp_path / "s", y=np.array(["a", "\x1b[31mred", "b\n"])[np.arange(N) % 3])
    text = store_text(describe_store(open_store(tmp_path / "s")))
    assert "\x1b" not in text
    assert r"\x1b[31mred" in text


# ------------------------------------------------------------------------------ hostile contents


def replace_chunk(root: Path, data: bytes) -> Store:
    """Return the uint8 store with other bytes in a chunk, and right checksums."""
    crc = int(google_crc32c.value(data)).to_bytes(4, "little")
    (root / "X/c/1/0").write_bytes(data + crc)
    bit_flips.reseal(root)
    return open_store(root)


def frame(size: int) -> bytes:
    """Return a zstd frame that declares `size` bytes."""
    return b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + bytes(40)


@pytest.mark.parametrize(
    "data",
    [
        Zstd(level=3).encode(np.zeros(256 << 20, np.uint8)),
        Zstd(level=3).encode(np.zeros(299, np.uint8)),
        frame(2**62),
        frame(300),
        b"\x28\xb5\x2f\xfd\x00\x58" + bytes(30),  # which does not say
        b"\x28\xb5\x2f\xfd",
        bytes(64 << 20),
        b"",
    ],
)
def test_chunk_needs_no_more_memory_than_its_rows(tmp_path: Path, data: bytes) -> None:
    """Check that the declared size of a frame counts only up to the size of the chunk."""
    root = uint8_store(tmp_path / "s")
    store = replace_chunk(root, data)
    store.read_chunk(0)
    with (
        traced_memory() as traced,
        pytest.raises(CorruptChunkError, match=r"chunk X/c/1/0 of .*s does not decode"),
    ):
        store.read_chunk(1)
    peak = traced.peak
    assert peak < 1 << 20


# ------------------------------------------------------------------------------ fuzz of zarr.json


def mutate(document: Any, rng: np.random.Generator) -> bytes:
    """Return a JSON document with other entries, truncated, or nested deeply."""
    text = json.dumps(bit_flips.edited(document, rng)).encode()
    if rng.integers(8) == 0:
        text = text[: rng.integers(len(text))]
    if rng.integers(50) == 0:
        text = b'{"attributes":' + b"[" * 100_000
    return text


def equals_zarr_reading(root: Path) -> bool:
    """Check the arrays of a foreign store, whose metadata may declare anything, against zarr."""
    store = open_store(root, foreign=True)
    chunks = [store.read_chunk(i) for i in range(store.n_chunks)]
    group: Any = zarr.open_group(root, mode="r")
    return all(
        np.array_equal(np.concatenate(parts), group[name][...], equal_nan=True)
        for name, parts in zip(("X", "y"), zip(*chunks, strict=True), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize(
    "n", [pytest.param(150, id="some"), pytest.param(50_000, id="many", marks=pytest.mark.full)]
)
def test_zarr_json_with_any_content_opens_or_is_refused(
    tmp_path: Path, foreign: bool, n: int
) -> None:
    """Check that any content of zarr.json raises only the exceptions of errors.py."""
    root = uint8_store(tmp_path / "s")
    truth = digest_of_store(root)
    rng = np.random.default_rng(5)
    names = ["zarr.json", "X/zarr.json", "y/zarr.json", "row/zarr.json", "crc/zarr.json"]
    documents = {name: json.loads((root / name).read_text()) for name in names}
    counts = Counter[str]()
    for _ in range(n):
        name = names[rng.integers(3 if foreign else len(names))]
        text = mutate(documents[name], rng)
        with bit_flips.replaced(root / name, text):
            if foreign:
                how = bit_flips.outcome(partial(equals_zarr_reading, root), True, text[:3000])
            else:
                how = bit_flips.outcome(partial(digest_of_store, root), truth, text[:3000])
                describe_unfinished(root)
        counts[how] += 1
    assert counts["same"] < n // 2 < counts["DataError" if foreign else "CorruptChunkError"]


def test_foreign_attributes_other_than_objects_are_reported(tmp_path: Path) -> None:
    root = uint8_store(tmp_path / "s")
    document = json.loads((root / "X/zarr.json").read_text())
    for attributes in ([{"streamkern": "store"}], [1], "text", 3):
        (root / "X/zarr.json").write_text(json.dumps({**document, "attributes": attributes}))
        with pytest.raises(DataError, match=r"the metadata of 'X' of .*s cannot be read"):
            open_store(root, foreign=True)


def test_invalid_metadata_with_valid_digests_are_reported(tmp_path: Path) -> None:
    """Check wrong metadata with right digests."""
    root = uint8_store(tmp_path / "s")
    document = json.loads((root / "X/zarr.json").read_text())
    for name, value in [("shape", [-3, 6]), ("shape", "text"), ("codecs", [{"name": "nobody"}])]:
        (root / "X/zarr.json").write_text(json.dumps({**document, name: value}))
        mark: Any = json.loads((root / "zarr.json").read_text())
        attribute = mark["attributes"]["streamkern"]
        store = zarr.storage.LocalStore(root)
        mark["attributes"]["streamkern"] = mark_with_stored_digests(attribute, store, "", str(root))
        (root / "zarr.json").write_text(json.dumps(mark))
        with pytest.raises(
            DataError, match=r"the metadata of .*s are unaltered, but cannot be read"
        ):
            open_store(root)
