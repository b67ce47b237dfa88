"""Check the cache: no request in the second epoch, no wrong byte, and its size limit."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.basics.errors import ConfigError
from streamkern.filesystem.cache import Cache, EntryName
from streamkern.filesystem.cached_objects import CachedObjects
from streamkern.filesystem.objects import ErrorKind, Objects
from streamkern.ingest.ingest import ingest
from streamkern.store.row_block import RowBlock
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.sources.stores import ZarrSource
from tests.fault_proxy import FaultProxy
from tests.s3_server import S3Server
from tests.store_damage import tree
from tests.streams import assert_same, copies_of

ROOT = Path(__file__).parents[2]

BLOCK = 4096
STORE = "a" * 32


class CountingEngine:
    """An engine that makes each object from its key and `edition`, and counts the requests."""

    def __init__(self, edition: str = "1", n_bytes: int = 3 * BLOCK) -> None:
        self.edition, self.n_bytes = edition, n_bytes
        self.attempt_s = 60.0
        self.requests: Counter[str] = Counter()

    def bytes(self, key: str) -> bytes:
        return hashlib.shake_128(f"{self.edition}/{key}".encode()).digest(self.n_bytes)

    async def get(self, key: str, start: int, stop: int | None) -> bytes:
        self.requests[key] += 1
        return self.bytes(key)[start:stop]

    def error_kind(self, error: Exception) -> ErrorKind:
        return ErrorKind.OTHER


def open_cached(cache: Cache, engine: CountingEngine, url: str = "lib://shelf") -> CachedObjects:
    """Return the objects of `engine`, read through `cache`."""
    inner = Objects(url, engine)  # type: ignore[arg-type]
    return CachedObjects(inner, cache, f"print-{engine.edition}", lambda key, data: True)


def chunk_keys(n: int) -> list[str]:
    """Return the keys of the first n chunks."""
    return [f"X/c/{i}/0" for i in range(n)]


def check_reads(
    objects: CachedObjects, engine: CountingEngine, keys: Sequence[str], **options: Any
) -> None:
    """Read objects with these options of `get_many`, and compare every byte."""
    for key, data in zip(keys, objects.get_many(keys, **options), strict=True):
        assert bytes(data) == engine.bytes(key)


def finished_entries(folder: Path) -> list[Path]:
    """Return the finished entries in the folder of a cache."""
    return [p for p in folder.glob("*/*") if p.parent.name != "new" and p.name != "used"]


def bytes_held(folder: Path) -> int:
    """Return the bytes that all files of a cache occupy on the disk."""
    total = 0
    for path in folder.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):
            total += -(-path.stat().st_size // BLOCK) * BLOCK
    return total


ENTRY = 4 * BLOCK  # bytes on the disk of 3 blocks and a header


# -- one reader --------------------------------------------------------------------------------


def test_cache_fetches_an_object_once(tmp_path: Path) -> None:
    engine, cache = CountingEngine(), Cache(tmp_path, 1 << 30)
    objects = open_cached(cache, engine)
    for _ in range(3):
        check_reads(objects, engine, chunk_keys(5))
    assert engine.requests == dict.fromkeys(chunk_keys(5), 1)
    check_reads(objects, engine, ["X/c/5/0", *chunk_keys(2)])
    assert engine.requests == dict.fromkeys(chunk_keys(6), 1)
    assert cache.counts.counts() == {"hits": 12, "misses": 6, "dropped": 0}
    # Another cache object, as in another process, finds the entries.
    check_reads(open_cached(Cache(tmp_path, 1 << 30), engine), engine, chunk_keys(6))
    assert engine.requests == dict.fromkeys(chunk_keys(6), 1)


def test_refetch_replaces_cached_entry(tmp_path: Path) -> None:
    engine, altered = CountingEngine(), CountingEngine(n_bytes=3 * BLOCK - 7)
    cache = Cache(tmp_path, ENTRY)  # there is room for one alone
    check_reads(open_cached(cache, altered), altered, chunk_keys(1))
    check_reads(open_cached(cache, engine), engine, chunk_keys(1), refetch=True)
    assert engine.requests == {chunk_keys(1)[0]: 1}
    check_reads(open_cached(cache, engine), engine, chunk_keys(1))
    assert engine.requests == {chunk_keys(1)[0]: 1}


def test_entries_of_other_stores_and_urls_are_separate(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1 << 30)
    engines = [CountingEngine("1"), CountingEngine("2")]
    for engine in engines:
        for url in ("lib://shelf", "lib://other"):
            check_reads(open_cached(cache, engine, url), engine, chunk_keys(2))
            check_reads(open_cached(cache, engine, url), engine, chunk_keys(2))
        assert engine.requests == dict.fromkeys(chunk_keys(2), 2)
    # A URL that differs only in its secrets names the same entries.
    check_reads(
        open_cached(cache, engine, "lib://me:hunter2@shelf?sig=hunter2"), engine, chunk_keys(2)
    )
    assert engine.requests == dict.fromkeys(chunk_keys(2), 2)
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and b"hunter2" in p.read_bytes()]


def test_only_whole_chunk_reads_are_cached(tmp_path: Path) -> None:
    engine = CountingEngine()
    objects = open_cached(Cache(tmp_path, 1 << 30), engine)
    for _ in range(2):
        assert bytes(objects.get("zarr.json")) == engine.bytes("zarr.json")
        assert bytes(objects.get("X/c/0", 3, 9)) == engine.bytes("X/c/0")[3:9]
    assert engine.requests == {"zarr.json": 2, "X/c/0": 2}
    assert not finished_entries(tmp_path)


Damage = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 10**6), st.integers(0, 7)),
    st.tuples(st.just("cut"), st.integers(0, 10**6), st.just(0)),
    st.tuples(st.just("append"), st.integers(1, 100), st.just(0)),
    st.tuples(st.just("foreign"), st.just(0), st.just(0)),
    st.tuples(st.just("swap"), st.just(0), st.just(0)),
)


@given(n_bytes=st.integers(0, 9000), damage=Damage)
def test_damaged_entry_is_dropped_and_fetched_again(
    tmp_path_factory: pytest.TempPathFactory, n_bytes: int, damage: tuple[str, int, int]
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    engine, cache = CountingEngine(n_bytes=n_bytes), Cache(folder, 1 << 30)
    objects = open_cached(cache, engine)
    check_reads(objects, engine, chunk_keys(2))
    victim, intact_entry = sorted(finished_entries(folder))
    data, (kind, location, bit) = bytearray(victim.read_bytes()), damage
    if kind == "flip":
        data[location % len(data)] ^= 1 << bit
    elif kind == "cut":
        del data[location % len(data) :]
    elif kind == "append":
        data += bytes(location)
    elif kind == "foreign":
        data = bytearray(b"something that somebody else has put here" * 20)
    else:
        data = bytearray(intact_entry.read_bytes())
    victim.write_bytes(data)
    check_reads(objects, engine, chunk_keys(2))
    assert cache.counts.dropped == 1
    assert sum(engine.requests.values()) == 3
    check_reads(objects, engine, chunk_keys(2))
    assert sum(engine.requests.values()) == 3
    shutil.rmtree(folder)


def test_invalid_cache_size_is_refused(tmp_path: Path) -> None:
    for size in (-1, 1.5, "much"):
        with pytest.raises(ConfigError, match=r"cache_size=.* must be"):
            Cache(tmp_path, size)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["notes.txt", "total", "lock", "CACHEDIR.TAG", "new/0a1b"])
def test_foreign_folder_is_refused_as_cache(name: str, tmp_path: Path) -> None:
    """Check that no name alone makes a folder a cache."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("Signature: 8a477f597d28d172789f06886806bc55\n# of mine\n")
    files_before = tree(tmp_path)
    first_name = re.escape(name.partition("/")[0])
    with pytest.raises(ConfigError, match=f"holds '{first_name}' and is not a cache of streamkern"):
        Cache(tmp_path)
    assert tree(tmp_path) == files_before


def test_foreign_files_in_a_cache_are_never_evicted(tmp_path: Path) -> None:
    """Check that only files with the name of an entry are evicted, however full the cache is."""
    engine = CountingEngine()
    check_reads(open_cached(Cache(tmp_path, 1 << 30), engine), engine, chunk_keys(5))
    store = finished_entries(tmp_path)[0].parent
    for folder in (tmp_path, tmp_path / "new", tmp_path / "mine", store, tmp_path / ("b" * 32)):
        folder.mkdir(exist_ok=True)
        for name in ("notes.txt", "0a1b"):
            (folder / name).write_text("mine")
            os.utime(folder / name, (0, 0))
    files_before = {name: data for name, data in tree(tmp_path).items() if data == b"mine"}
    check_reads(open_cached(Cache(tmp_path, ENTRY, idle_s=0.0), engine), engine, chunk_keys(8))
    assert len([p for p in finished_entries(tmp_path) if len(p.name) == 64]) <= 1
    files_after = tree(tmp_path)
    assert {name: files_after.get(name) for name in files_before} == files_before


def test_foreign_folder_that_replaced_cache_is_unchanged(tmp_path: Path) -> None:
    engine, folder = CountingEngine(), tmp_path / "cache"
    objects = open_cached(Cache(folder, 1 << 30), engine)
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    (folder / "total").write_text("mine")
    with pytest.warns(UserWarning, match="moved, deleted or replaced"):
        check_reads(objects, engine, chunk_keys(2))
    assert tree(folder) == {"total": b"mine"}


# -- the limit ---------------------------------------------------------------------------------


def test_store_in_use_keeps_its_entries(tmp_path: Path) -> None:
    engine, cache = CountingEngine(), Cache(tmp_path, 5 * ENTRY)
    objects = open_cached(cache, engine)
    order = random.Random(0)
    for epoch in range(4):
        hits_before, expected = cache.counts.hits, order.sample(chunk_keys(10), 10)
        for key in expected:
            check_reads(objects, engine, [key])
        # Half of the store fits; in any order, half of the chunks are found.
        assert cache.counts.hits - hits_before == (5 if epoch else 0)
        assert len(finished_entries(tmp_path)) == 5
    assert bytes_held(tmp_path) <= 5 * ENTRY


def test_idle_stores_are_evicted_oldest_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10 * ENTRY)
    for edition, age in (("1", 9000), ("2", 8000), ("3", 60)):
        engine = CountingEngine(edition)
        check_reads(open_cached(cache, engine), engine, chunk_keys(3))
        marker = next(p for p in tmp_path.glob("*/used") if p.stat().st_mtime > time.time() - 60)
        os.utime(marker, (time.time() - age,) * 2)
    newest = CountingEngine("4")
    cache = Cache(tmp_path, 10 * ENTRY)
    check_reads(open_cached(cache, newest), newest, chunk_keys(2))
    # Ten entries fit; the next one evicts a tenth of the limit from the oldest store.
    for edition, n_kept in (("1", 1), ("2", 3), ("3", 3), ("4", 2)):
        engine = CountingEngine(edition)
        objects = open_cached(Cache(tmp_path, 1), engine)
        check_reads(objects, engine, chunk_keys(3 if edition < "4" else 2))
        assert sum(engine.requests.values()) == (3 if edition < "4" else 2) - n_kept


def test_lower_limit_applies_from_next_entry_on(tmp_path: Path) -> None:
    engine = CountingEngine()
    check_reads(open_cached(Cache(tmp_path, 1 << 30), engine), engine, chunk_keys(10))
    check_reads(open_cached(Cache(tmp_path, 4 * ENTRY), engine), engine, chunk_keys(11))
    assert bytes_held(tmp_path) <= 4 * ENTRY
    # An object above the limit is not kept, and evicts nothing.
    large = CountingEngine("large", n_bytes=4 * ENTRY)
    n_entries = len(finished_entries(tmp_path))
    check_reads(open_cached(Cache(tmp_path, 4 * ENTRY), large), large, chunk_keys(1))
    assert len(finished_entries(tmp_path)) == n_entries > 0


def test_auto_cache_size_is_half_of_the_disk(tmp_path: Path) -> None:
    engine, cache = CountingEngine(n_bytes=1 << 20), Cache(tmp_path)
    assert 0 < cache.limit <= shutil.disk_usage(tmp_path).total // 2
    check_reads(open_cached(cache, engine), engine, chunk_keys(3))
    (tmp_path / "total").write_text(str(1 << 40))
    assert Cache(tmp_path).limit >= 1 << 39


@pytest.mark.parametrize("text", ["", "many", "12\n34"])
def test_lost_total_is_counted_again(tmp_path: Path, text: str) -> None:
    engine, cache = CountingEngine(), Cache(tmp_path, 5 * ENTRY)
    objects = open_cached(cache, engine)
    check_reads(objects, engine, chunk_keys(3))
    (tmp_path / "total").write_text(text)
    check_reads(objects, engine, chunk_keys(9))
    assert bytes_held(tmp_path) <= 5 * ENTRY
    assert int((tmp_path / "total").read_text()) == bytes_held(tmp_path)


def test_entry_dropped_during_count_is_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cache = CountingEngine(), Cache(tmp_path, 3 * ENTRY)
    check_reads(open_cached(cache, engine), engine, chunk_keys(3))
    (victim, *_), make_room = finished_entries(tmp_path), cache._make_room
    dropping = threading.Thread(
        target=cache.drop, args=(EntryName(victim.parent.name, bytes.fromhex(victim.name)),)
    )

    def make_room_and_wait_for_drop(n_bytes: int) -> int:
        total = make_room(n_bytes)
        dropping.start()
        while victim.exists():
            time.sleep(0.001)
        time.sleep(0.05)  # `drop` waits for the lock, or has changed the counters already
        return total

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_make_room", make_room_and_wait_for_drop)
        check_reads(open_cached(cache, engine), engine, ["X/c/8/0"])
    dropping.join()
    check_reads(open_cached(cache, engine), engine, ["X/c/9/0"])
    assert len(finished_entries(tmp_path)) == 3
    assert int((tmp_path / "total").read_text()) == bytes_held(tmp_path) == 3 * ENTRY


# -- a folder that fails -----------------------------------------------------------------------


def text_of_only_warning(caught: list[warnings.WarningMessage]) -> str:
    """Return the text of the only warning."""
    (only,) = caught
    assert "chunks are read from the storage every time" in str(only.message)
    return str(only.message)


@pytest.mark.parametrize("when", ["before", "lost", "blocked"])
def test_reading_continues_without_cache_folder(tmp_path: Path, when: str) -> None:
    engine, folder = CountingEngine(), tmp_path / "cache"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if when == "before":
            (tmp_path / "file").write_text("")
            folder = tmp_path / "file" / "cache"
        objects = open_cached(Cache(folder, 1 << 30), engine)
        check_reads(objects, engine, chunk_keys(2))
        if when != "before":
            shutil.rmtree(folder)
        if when == "blocked":
            folder.write_text("no folder any more")
        for _ in range(3):
            check_reads(objects, engine, chunk_keys(4))
    assert str(folder) in text_of_only_warning(caught)
    assert engine.requests[chunk_keys(1)[0]] == 4


def read_on_full_disk(folder: str) -> None:
    """Read through a cache whose process may write only small files, as on a full disk."""
    engine, cache = CountingEngine(n_bytes=19_000), Cache(folder, 1 << 30)
    objects = open_cached(cache, engine)
    check_reads(objects, engine, chunk_keys(2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            check_reads(objects, engine, chunk_keys(5))
    assert os.strerror(errno.EFBIG) in text_of_only_warning(caught)
    assert engine.requests[chunk_keys(1)[0]] == 3
    assert len(finished_entries(Path(folder))) == 2
    assert not list(Path(folder).glob("new/*"))


def test_full_disk_ends_caching_but_not_reading(tmp_path: Path) -> None:
    run_process("read_on_full_disk", tmp_path)


# -- many processes ----------------------------------------------------------------------------


def run_process(*arguments: object) -> None:
    """Call a function of this module in another process, which must succeed."""
    process = subprocess.run(
        command_of(*arguments), capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")


def command_of(*arguments: object) -> list[str]:
    """Return the command that calls a function of this module with arguments."""
    return [sys.executable, "-m", "tests.filesystem.test_cache", *map(str, arguments)]


def read_and_damage(folder: str, seed: str, idle_s: str) -> None:
    """Read random objects, and compare every byte; damage an entry in every 20th turn."""
    draw, engine = random.Random(int(seed)), CountingEngine()
    objects = open_cached(Cache(folder, 12 * ENTRY, idle_s=float(idle_s)), engine)
    for turn in range(250):
        check_reads(objects, engine, draw.sample(chunk_keys(30), 2))
        if turn % 20 == 0:
            with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
                victim = draw.choice(finished_entries(Path(folder)))
                with victim.open("r+b") as file:
                    file.seek(draw.randrange(victim.stat().st_size))
                    file.write(draw.randbytes(3))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("idle_s", [0.0, 3600.0])
def test_processes_share_a_small_cache(tmp_path: Path, idle_s: float) -> None:
    n, max_bytes, n_samples = 4, 0, 0
    commands = [command_of("read_and_damage", tmp_path, seed, idle_s) for seed in range(n)]
    processes = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True, cwd=ROOT) for c in commands]
    while any(process.poll() is None for process in processes):
        max_bytes, n_samples = max(max_bytes, bytes_held(tmp_path)), n_samples + 1
    for process in processes:
        assert (process.communicate()[1], process.returncode) == ("", 0)
    assert n_samples > 10
    # An entry that is replaced while it is listed may be seen twice.
    assert max_bytes <= (12 + 2 * n) * ENTRY
    assert 0 < bytes_held(tmp_path) <= (12 + n) * ENTRY


def write_entries(folder: str) -> None:
    """Write large entries for ever."""
    engine = CountingEngine(n_bytes=1 << 20)
    cache = Cache(folder, 1 << 40)
    data = engine.bytes("a") * 16
    print("ready", flush=True)
    for i in range(10**6):
        cache.write(EntryName(STORE, hashlib.sha256(b"%d" % (i % 50)).digest()), data)


@pytest.mark.slow
def test_cache_survives_kill_while_writing(tmp_path: Path) -> None:
    for n_written, delay in ((0, 0.02), (1, 0.05), (4, 0.1)):
        process = subprocess.Popen(
            command_of("write_entries", tmp_path), stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        give_up = time.monotonic() + 60
        while len(finished_entries(tmp_path)) < n_written or not list(tmp_path.glob("new/*")):
            assert time.monotonic() < give_up
        time.sleep(delay)  # anywhere in the middle
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
    data, cache = CountingEngine(n_bytes=1 << 20).bytes("a") * 16, Cache(tmp_path, 1 << 40)
    written = [p for p in finished_entries(tmp_path) if p.suffix == ""]
    assert written
    for path in written:
        assert bytes(cache.read(EntryName(STORE, bytes.fromhex(path.name)))) == data  # type: ignore[arg-type]
    # Unfinished entries are deleted when room is made.
    leftover = tmp_path / "new" / ("0" * 32)
    leftover.write_bytes(bytes(BLOCK))
    for path in tmp_path.glob("new/*"):
        os.utime(path, (0, 0))
    engine = CountingEngine()
    small = Cache(tmp_path, 8 * ENTRY, idle_s=0.0)
    check_reads(open_cached(small, engine), engine, chunk_keys(3))
    assert not list(tmp_path.glob("new/*"))
    assert bytes_held(tmp_path) <= 8 * ENTRY


# -- a store on S3 -----------------------------------------------------------------------------


X = np.random.default_rng(0).integers(0, 256, size=(500, 6)).astype(np.uint8)
Y = np.arange(500) % 3


def batches(source: ZarrSource, epoch: int) -> list[RowBlock]:
    """Return the batches of an epoch."""
    with BatchReader(source, batch_size=60, seed=0, threads=3) as loader:
        return copies_of(loader.epoch(epoch))


@pytest.mark.slow
def test_second_epoch_makes_no_s3_requests(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    url = f"s3://{bucket}/train.zarr"
    ingest(X, url, y=Y, chunk_mb=50 * 6 / 2**20, storage_options=s3.options())
    plain = ZarrSource(url, storage_options=s3.options())
    with FaultProxy(upstream=s3.endpoint) as proxy:

        def source() -> ZarrSource:
            cache = Cache(tmp_path / "cache", 1 << 30)
            return ZarrSource(url, storage_options=s3.options(proxy.endpoint), cache=cache)

        first_source = source()
        proxy.log()
        assert_same(batches(first_source, 0), batches(plain, 0))
        # Without the table of checksums, by which chunks of this store are recognised.
        requested = [(method, path) for method, path, _ in proxy.log() if "/crc/" not in path]
        assert [method for method, _ in requested] == ["GET"] * 20
        assert all("/c/" in path for _, path in requested)
        for epoch in (1, 2):
            assert_same(batches(first_source, epoch), batches(plain, epoch))
            assert proxy.log() == []
        # Another process reads only metadata and checksums, so that it notices a changed store.
        unpickled: ZarrSource = pickle.loads(pickle.dumps(source()))
        assert_same(batches(unpickled, 1), batches(plain, 1))
        assert not [path for _, path, _ in proxy.log() if re.search("/[Xy]/c/", path)]
        # Another store at the same URL is fetched.
        ingest(
            X[::-1].copy(), url, y=Y, chunk_mb=50 * 6 / 2**20, overwrite=True,
            storage_options=s3.options(),
        )  # fmt: skip
        proxy.log()
        assert_same(batches(source(), 0), batches(ZarrSource(url, storage_options=s3.options()), 0))
        assert len([path for _, path, _ in proxy.log() if re.search("/[Xy]/c/", path)]) == 20


def test_store_without_digests_is_not_cached(
    s3: S3Server, bucket: str, tmp_path: Path, make_zarr: Any
) -> None:
    path = make_zarr({"X": X, "y": Y}, chunk_rows=100)
    client = s3.client()
    for file in (p for p in path.rglob("*") if p.is_file()):
        client.put_object(Bucket=bucket, Key=f"d/{file.relative_to(path)}", Body=file.read_bytes())
    cache = Cache(tmp_path / "cache", 1 << 30)
    with pytest.warns(UserWarning, match="is not cached: streamkern did not write it"):
        source = ZarrSource(f"s3://{bucket}/d", storage_options=s3.options(), cache=cache)
    assert len(batches(source, 0)) == 9
    assert not finished_entries(tmp_path / "cache")
    # A local store is not cached.
    assert len(batches(ZarrSource(path, cache=cache), 0)) == 9
    assert not finished_entries(tmp_path / "cache")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
