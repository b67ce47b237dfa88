"""Check that a materialised store equals an epoch, also after interruptions."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from threadpoolctl import threadpool_info

from streamkern import KernelRegressor
from streamkern.basics.errors import ConfigError, DataError, NonFiniteError, ResumeMismatchError
from streamkern.basics.randomness import RowRandom, Stage
from streamkern.ingest.ingest import ingest
from streamkern.store.statistics import RunningStatistics
from streamkern.store.store import Store, open_store
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.materialise import augment_store, materialise
from streamkern.stream.order import EpochPlan
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import (
    GaussianNoise,
    MixUp,
    RandomFlip,
    Scale,
    apply_transforms,
    from_config,
    host_transform,
)
from streamkern.stream.sources.unit_edges import unit_sizes
from tests.images import CHUNK_MB, IMAGES, LABELS, NOISY, N, augmented, base
from tests.interruptions import Stop
from tests.store_damage import flip_bit, tree
from tests.streams import epoch_rows, everything


def contents(store: Store) -> tuple[np.ndarray, np.ndarray]:
    """Return X and y of all rows of a store."""
    parts = [store.read_chunk(i) for i in range(store.n_chunks)]
    return np.concatenate([X for X, _ in parts]), np.concatenate([y for _, y in parts])


def expected_order(source: Source, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Return the virtual rows of each batch of an epoch, from the plan alone."""
    with BatchReader(source, batch_size=batch_size, seed=seed) as loader:
        mix_units = loader.mix_units
    sizes = unit_sizes(source)
    plan = EpochPlan(
        sizes, seed=seed, epoch=epoch, batch_size=batch_size, mix_units=mix_units,
        strata=getattr(source, "strata", None),
    )  # fmt: skip
    return epoch_rows(plan, sizes)


def one_hot(y: np.ndarray) -> np.ndarray:
    return np.eye(3, dtype=np.float32)[y]


# ------------------------------------------------------------------------------------- the rows


@pytest.mark.parametrize("threads", ["auto", 1])
@pytest.mark.parametrize(
    "source",
    [augmented(*NOISY), base(transforms=NOISY), MixtureSource([base(), base()], transforms=NOISY)],
    ids=["one unit", "units", "mixture"],
)
def test_materialised_rows_equal_an_epoch(
    tmp_path: Path, source: Source, threads: int | str
) -> None:
    """Compare with rows in the order of the plan, transformed all at once."""
    seed, epoch = 5, 2
    progress_calls: list[tuple[str, int, int | None]] = []
    spec = materialise(
        source, tmp_path / "a.zarr", seed=seed, epoch=epoch, chunk_mb=CHUNK_MB, threads=threads,
        progress=lambda *state: progress_calls.append(state),
    )  # fmt: skip
    assert (spec.n_rows, spec.chunk_rows, spec.x_dtype) == (source.n_rows, 31, np.float32)
    assert (spec.classes, spec.row_shape) == (("a", "b", "c"), (3, 4, 1))
    X, y = everything(source, seed, epoch)  # the flips are in it
    X, *_ = apply_transforms(
        source.feed_transforms, X.astype(np.float32), one_hot(y), epoch=epoch,
        random=lambda number: RowRandom(
            np, seed, epoch, (Stage.FEED_TRANSFORM, number), np.arange(len(X))
        ),
    )  # fmt: skip
    rows = np.concatenate(expected_order(source, 31, seed, epoch))
    assert not np.array_equal(rows, np.arange(len(rows)))
    store_rows = contents(open_store(tmp_path / "a.zarr"))
    np.testing.assert_array_equal(store_rows[0], X[rows])
    np.testing.assert_array_equal(store_rows[1], y[rows])
    assert [rows for _, rows, _ in progress_calls] == [*range(31, source.n_rows, 31), source.n_rows]
    np.testing.assert_allclose(
        [spec.global_mean, spec.global_scale], [X.mean(), X.std()], rtol=1e-5
    )
    np.testing.assert_allclose(spec.mean, X.reshape(len(X), -1).mean(0), atol=1e-6)
    assert spec.class_counts == tuple(np.bincount(y).tolist())


def test_dtype_is_kept_without_feed_transforms(tmp_path: Path) -> None:
    source = augmented(RandomFlip())
    spec = materialise(source, tmp_path / "a.zarr", chunk_mb=CHUNK_MB, shuffle=False)
    assert (spec.x_dtype, spec.chunk_rows) == (np.uint8, 124)
    for store_rows, expected in zip(
        contents(open_store(tmp_path / "a.zarr")), everything(source), strict=True
    ):
        np.testing.assert_array_equal(store_rows, expected)


def test_mixed_targets_become_values(tmp_path: Path) -> None:
    """Check that partners are drawn within a chunk, as they are within a batch in training."""
    mixup = MixUp(0.7)
    source = augmented(Scale("global"), mixup)
    spec = materialise(source, tmp_path / "a.zarr", seed=3, chunk_mb=CHUNK_MB)
    assert (spec.classes, spec.n_outputs, spec.y_dtype) == (None, 3, np.float32)
    X, y = everything(source, 3)
    store_rows = contents(open_store(tmp_path / "a.zarr"))
    start = 0
    for rows in expected_order(source, 31, 3, 0):
        part = slice(start, start + len(rows))
        (scale, _) = source.feed_transforms
        scaled, Y = scale(
            X[rows].astype(np.float32), one_hot(y[rows]), RowRandom(np, 3, 0, 1, rows)
        )
        stage = (Stage.FEED_TRANSFORM, 1)
        mixed = mixup(scaled, Y, RowRandom(np, 3, 0, stage, rows))
        np.testing.assert_array_equal(store_rows[0][part], mixed[0])
        np.testing.assert_array_equal(store_rows[1][part], mixed[1])
        start += len(rows)


def test_regression_targets_are_unchanged(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(50, 2))
    source = ArraySource(rng.normal(size=(50, 4)).astype(np.float32), values, [GaussianNoise(1.0)])
    spec = materialise(source, tmp_path / "a.zarr", shuffle=False)
    assert spec.y_dtype == np.float64
    np.testing.assert_array_equal(contents(open_store(tmp_path / "a.zarr"))[1], values)


def test_column_names_are_kept(tmp_path: Path) -> None:
    """Check names of features, and of targets that no transform changes."""
    (tmp_path / "t.csv").write_text("b,u,a,v\n" + "1,2,3,4\n5,6,7,9\n" * 5)
    ingest(tmp_path / "t.csv", tmp_path / "in", y=["v", "u"], targets="values")
    tables: tuple[dict[str, Any], ...] = ({"kind": "noise", "sigma": 0.5}, {"kind": "mixup"})
    for table, targets in zip(tables, (("v", "u"), None), strict=True):
        out = tmp_path / str(table["kind"])
        augment_store(tmp_path / "in", out, copies=2, transforms=[table])
        spec = open_store(out).spec
        assert (spec.columns, spec.target_columns) == (("b", "a"), targets)


@pytest.mark.parametrize("prefix", ["name:", "meta:"])
def test_source_without_digest_is_not_resumed(tmp_path: Path, prefix: str) -> None:
    class Named(ArraySource):
        kind = "mine"

        @property
        def fingerprint(self) -> str:
            return prefix + "data"

    materialise(Named(np.zeros((9, 2)), np.zeros(9)), tmp_path / "out")
    with pytest.raises(DataError, match="already holds a store"):
        materialise(Named(np.ones((9, 2)), np.zeros(9)), tmp_path / "out")


def test_mixture_of_stores_is_materialised(tmp_path: Path) -> None:
    for k, n in enumerate((60, 90)):
        ingest(IMAGES[:n], tmp_path / f"{k}.zarr", y=LABELS[:n], chunk_mb=0.0005, seed=k)
    urls = [tmp_path / f"{k}.zarr" for k in range(2)]
    tables = [{"kind": "flip"}, {"kind": "noise", "sigma": 0.5}]
    spec = augment_store(
        urls, tmp_path / "out.zarr", copies=3, transforms=tables, weights=[1, 2], seed=4,
        chunk_mb=CHUNK_MB,
    )  # fmt: skip
    mixture = MixtureSource([ZarrSource(url) for url in urls], [1, 2])
    source = AugmentedSource(mixture, 3, from_config(tables))
    expected = materialise(source, tmp_path / "again.zarr", seed=4, chunk_mb=CHUNK_MB)
    assert spec.fingerprint == expected.fingerprint
    by_objects = augment_store(
        urls, tmp_path / "objects.zarr", copies=3, transforms=from_config(tables), weights=[1, 2],
        seed=4, chunk_mb=CHUNK_MB,
    )  # fmt: skip
    assert by_objects.fingerprint == expected.fingerprint


def test_single_store_is_shuffled_without_changes(tmp_path: Path) -> None:
    """Check a store without copies and transforms: the same rows in another order."""
    ingest(IMAGES, tmp_path / "in.zarr", y=LABELS, chunk_mb=0.0005)
    augment_store(str(tmp_path / "in.zarr"), tmp_path / "out.zarr", seed=1, chunk_mb=0.001)
    input_rows, output_rows = (contents(open_store(tmp_path / f"{k}.zarr")) for k in ("in", "out"))
    assert not np.array_equal(input_rows[0], output_rows[0])
    pairs = [
        sorted(zip(X.reshape(N, -1).tolist(), y.tolist(), strict=True))
        for X, y in (input_rows, output_rows)
    ]
    assert pairs[0] == pairs[1]


# --------------------------------------------------------------------------- numbers of the rows


def numbers_of(store: Store) -> np.ndarray:
    """Return the row numbers of a store."""
    return np.concatenate([store.source_rows(i) for i in range(store.n_chunks)]).astype(np.int64)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Return two files, and the shuffled stores that were made from them."""
    for k, part in enumerate((slice(100), slice(100, N))):
        np.savez(tmp_path / f"{k}.npz", X=IMAGES[part], y=LABELS[part])
        ingest(tmp_path / f"{k}.npz", tmp_path / f"{k}.zarr", chunk_mb=0.0005)
    return [tmp_path / "0.zarr", tmp_path / "1.zarr"]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("copies", [1, 3])
def test_augmented_rows_keep_file_row_numbers(
    files: list[Path], tmp_path: Path, copies: int, shuffle: bool
) -> None:
    """Check that replica r of row k is row r n + k, also after a second augmentation."""
    noise = [{"kind": "noise", "sigma": 1e-6}]
    for location, is_first in ((files[0], True), (tmp_path / "a.zarr", False)):
        out = tmp_path / ("a.zarr" if is_first else "b.zarr")
        spec = augment_store(
            str(location), out, copies=copies, transforms=noise, chunk_mb=0.0005, shuffle=shuffle
        )
        store, replicas = open_store(out), copies if is_first else copies**2
        rows, (X, y) = numbers_of(store), contents(store)
        np.testing.assert_array_equal(np.sort(rows), np.arange(100 * replicas))
        np.testing.assert_allclose(X, IMAGES[rows % 100], atol=1e-3)
        np.testing.assert_array_equal(y, LABELS[rows % 100])
        assert [Path(name).name for name, _ in spec.files] == ["0.npz"] * replicas
        assert sum(n for _, n in spec.files) == spec.n_rows


def test_joined_stores_number_rows_consecutively(files: list[Path], tmp_path: Path) -> None:
    augment_store(list(map(str, files)), tmp_path / "out.zarr", chunk_mb=0.0005)
    store = open_store(tmp_path / "out.zarr")
    X, y = contents(store)
    np.testing.assert_array_equal(X, IMAGES[numbers_of(store)])
    np.testing.assert_array_equal(y, LABELS[numbers_of(store)])
    assert [(Path(name).name, n) for name, n in store.spec.files] == [("0.npz", 100), ("1.npz", 70)]


def test_predictions_of_augmented_rows_follow_file_order(files: list[Path], tmp_path: Path) -> None:
    out, noise = tmp_path / "out.zarr", [{"kind": "noise", "sigma": 1e-6}]
    augment_store(str(files[0]), out, copies=2, transforms=noise, chunk_mb=0.0005)
    model = KernelRegressor(solver="direct", kernel="gaussian", ridge=1e-4, random_state=0)
    model.fit(IMAGES[:100], LABELS[:100].astype(float))
    expected = np.tile(model.predict(IMAGES[:100]), 2)
    np.testing.assert_allclose(model.predict(ZarrSource(out, y=None)), expected, atol=1e-2)
    assert np.ptp(expected) > 1


# ------------------------------------------------------------------------------------- resuming

CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from streamkern.stream.materialise import materialise
from tests.images import CHUNK_MB, NOISY, augmented

def show(stage, done, total):
    print(done, flush=True)
    if done > {stop}:
        sys.stdin.read()  # for ever: the other threads go on until the kill

materialise(augmented(*NOISY), Path({out!r}), seed=5, chunk_mb=CHUNK_MB, progress=show)
"""


@pytest.fixture(scope="module")
def complete_store(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return every byte of a store that was written without interruption."""
    out = tmp_path_factory.mktemp("whole") / "out.zarr"
    materialise(augmented(*NOISY), out, seed=5, chunk_mb=CHUNK_MB)
    return tree(out)


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [0, 31, 300])
def test_killed_materialisation_resumes(
    tmp_path: Path, complete_store: dict[str, bytes], kill_at: int
) -> None:
    out = tmp_path / "out.zarr"
    root = str(Path(__file__).parents[2])
    code = CHILD.format(root=root, out=str(out), stop=kill_at + 100)
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        while int(child.stdout.readline()) <= kill_at:
            pass
        child.kill()
        assert child.wait() == -signal.SIGKILL
    with pytest.raises(DataError, match="unfinished"):
        open_store(out)
    assert 0 < zarr.open_array(out / "digests", mode="r")[:].any(axis=1).sum() < 22
    materialise(augmented(*NOISY), out, seed=5, chunk_mb=CHUNK_MB)
    assert tree(out) == complete_store


def interrupt(out: Path, n_rows: int = 400, source: Source | None = None) -> None:
    """Start to write a store, and raise an exception in the progress callback."""

    def stop(stage: str, n_done: int, total: int | None) -> None:
        if n_done > n_rows:
            raise Stop

    with pytest.raises(Stop):
        materialise(source or augmented(*NOISY), out, seed=5, chunk_mb=CHUNK_MB, progress=stop)


def test_holes_and_damage_are_repaired(tmp_path: Path, complete_store: dict[str, bytes]) -> None:
    out = tmp_path / "out.zarr"
    interrupt(out)
    journal: Any = zarr.open_array(out / "digests", mode="r+")
    journal[2] = 0  # a hole before the end
    (out / f"X/c/9/0/0/.0.{0:032x}.streamkern").write_bytes(b"what a kill left")
    flip_bit(out, "X/c/5/0/0/0")
    (out / "y/c/7").unlink()
    time_before = (out / "X/c/4/0/0/0").stat().st_mtime_ns
    materialise(augmented(*NOISY), out, seed=5, chunk_mb=CHUNK_MB)
    assert tree(out) == complete_store
    assert (out / "X/c/4/0/0/0").stat().st_mtime_ns == time_before


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"seed": 6}, "seed"),
        ({"epoch": 1}, "epoch"),
        ({"shuffle": False}, "shuffle"),
        ({"chunk_mb": 2 * CHUNK_MB}, "batch_size"),
        ({"compress": "zstd"}, "compress"),
        ({"dtype": "float64"}, "x_dtype"),
    ],
)
def test_changed_settings_are_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], difference: str
) -> None:
    out = tmp_path / "out.zarr"
    interrupt(out, n_rows=0)
    settings = {"seed": 5, "chunk_mb": CHUNK_MB, **changed}
    with pytest.raises(ResumeMismatchError, match=rf"\(.*{difference}.* differ\)"):
        materialise(augmented(*NOISY), out, **settings)
    with pytest.raises(ResumeMismatchError, match="source"):
        materialise(augmented(*NOISY[:2]), out, seed=5, chunk_mb=CHUNK_MB)


def test_memory_that_changes_the_order_is_refused(tmp_path: Path) -> None:
    """Resume with memory for a shuffle block of 8 units instead of 9."""
    out, source = tmp_path / "out.zarr", base(transforms=NOISY)
    interrupt(out, n_rows=0, source=source)
    with pytest.raises(ResumeMismatchError, match=r"\(memory differ\)"):
        materialise(source, out, seed=5, chunk_mb=CHUNK_MB, memory=32 * int(CHUNK_MB * 2**20))
    materialise(source, out, seed=5, chunk_mb=CHUNK_MB, memory=1 << 29)


def test_blas_threads_are_limited_once_for_all_threads(tmp_path: Path) -> None:
    """Check that the limit is restored; threads that each set it would restore each other's."""

    def limits() -> list[int]:
        return [lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"]

    limits_before, limits_seen = limits(), []
    materialise(
        augmented(*NOISY), tmp_path / "a.zarr", chunk_mb=CHUNK_MB,
        progress=lambda *state: limits_seen.extend(limits()),
    )  # fmt: skip
    assert set(limits_seen) == {1}
    assert limits() == limits_before


def test_remote_store_is_materialised(complete_store: dict[str, bytes]) -> None:
    materialise(augmented(*NOISY), "memory://materialise/out.zarr", seed=5, chunk_mb=CHUNK_MB)
    store = open_store("memory://materialise/out.zarr")
    attributes = json.loads(complete_store["zarr.json"])["attributes"]
    assert store.spec.fingerprint == attributes["streamkern"]["fingerprint"]


def test_overwrite_replaces_store(tmp_path: Path, complete_store: dict[str, bytes]) -> None:
    out = tmp_path / "out.zarr"
    materialise(augmented(*NOISY), out, seed=1, chunk_mb=CHUNK_MB)
    with pytest.raises(DataError, match="already holds a store"):
        materialise(augmented(*NOISY), out, seed=5, chunk_mb=CHUNK_MB)
    materialise(augmented(*NOISY), out, seed=5, chunk_mb=CHUNK_MB, overwrite=True)
    assert tree(out) == complete_store


# --------------------------------------------------------------------------------------- memory

MEASURED = """
import sys
from pathlib import Path
import dask.local, numpy as np  # all imports come before the baseline
from streamkern import ArraySource, AugmentedSource, GaussianNoise, RandomFlip, materialise_store

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

X = np.random.default_rng(0).integers(0, 256, (20_000, 14, 14, 1), np.uint8)
base = ArraySource(X, np.arange(20_000) % 10)
source = AugmentedSource(base, 12, [RandomFlip(), GaussianNoise(1)])
source.fingerprint
Path("/proc/self/clear_refs").write_text("5")
baseline = status("VmRSS")
materialise_store(source, sys.argv[1], memory=int(sys.argv[2]), chunk_mb=1)
print(status("VmHWM") - baseline)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/status")
def test_materialisation_stays_within_memory(tmp_path: Path) -> None:
    """Check 188 MB of float32 rows that are written within 96 MiB."""
    out = tmp_path / "out.zarr"
    command = [sys.executable, "-c", MEASURED, str(out), str(96 << 20)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert open_store(out).spec.n_rows == 240_000
    assert int(process.stdout) <= 96 << 20


# ------------------------------------------------------------------------------------- refusals


def test_dtypes_that_would_lose_values_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    wide = ArraySource(IMAGES.astype(np.uint16), LABELS)
    for source, dtype in (
        (augmented(*NOISY), "uint8"),
        (wide, "uint8"),
        (wide, "float16"),
    ):
        with pytest.raises(ConfigError, match=f"dtype='{dtype}' would lose values"):
            materialise(source, out, dtype=dtype)
    assert not out.exists()


@pytest.mark.parametrize(
    ("source", "dtype", "expected"),
    [
        (augmented(*NOISY), None, "float32"),
        (augmented(*NOISY), "float16", "float16"),
        (augmented(*NOISY), "float64", "float64"),
        (augmented(RandomFlip()), "float32", "float32"),
        (augmented(RandomFlip()), "uint16", "uint16"),
        (augmented(GaussianNoise(9.0, round=True), RandomFlip()), None, "uint8"),
        (augmented(GaussianNoise(9.0, round=True), Scale("global")), None, "float32"),
        (ArraySource(IMAGES.astype(np.float64), LABELS, [GaussianNoise(1.0)]), None, "float64"),
    ],
)
def test_dtypes_that_hold_all_values_are_accepted(
    tmp_path: Path, source: Source, dtype: Any, expected: str
) -> None:
    spec = materialise(source, tmp_path / "out.zarr", dtype=dtype, compress="none")
    assert spec.x_dtype == expected


def test_rounded_noise_is_stored_as_integers(tmp_path: Path) -> None:
    source = augmented(GaussianNoise(9.0, round=True), RandomFlip())
    store_rows = [
        materialise(source, tmp_path / str(dtype), dtype=dtype) for dtype in (None, "float32")
    ]
    narrow, wide = (open_store(tmp_path / str(dtype)) for dtype in (None, "float32"))
    assert [spec.n_rows for spec in store_rows] == [source.n_rows] * 2
    rows = np.arange(source.n_rows)
    np.testing.assert_array_equal(narrow.read_rows(rows)[0], wide.read_rows(rows)[0])


def test_overflowing_values_are_refused(tmp_path: Path) -> None:
    source = ArraySource(np.full((5, 2), 1e6, np.float32), np.zeros(5))
    with pytest.raises(NonFiniteError, match="inf in X of chunk 0"):
        materialise(source, tmp_path / "out.zarr", dtype="float16")


@host_transform
def raise_error(X: Any, Y: Any, rng: RowRandom) -> tuple[Any, Any]:
    raise ValueError("no such luck")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda out: materialise(augmented(raise_error), out), "no such luck"),
        (lambda out: materialise(base(), out, chunk_mb=0), "chunk_mb=0"),
        (lambda out: materialise(base(), out, seed=-1), "seed=-1"),
        (lambda out: materialise(base(), out, epoch=-1), "epoch=-1"),
        (lambda out: augment_store(out.parent / "no.zarr", out), "no.zarr"),
    ],
)
def test_invalid_calls_are_refused(
    tmp_path: Path, call: Callable[[Path], Any], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        call(tmp_path / "out.zarr")


def test_output_must_differ_from_input(tmp_path: Path) -> None:
    ingest(IMAGES, tmp_path / "in.zarr", y=LABELS)
    files_before = tree(tmp_path)
    for location in (tmp_path / "in.zarr", f"{tmp_path}/../{tmp_path.name}/in.zarr/"):
        with pytest.raises(ConfigError, match="input and output at the same time"):
            augment_store(tmp_path / "in.zarr", location, copies=2, overwrite=True)
    assert tree(tmp_path) == files_before


def test_materialised_store_has_attributes_of_an_ingest(tmp_path: Path) -> None:
    """Check that its attributes equal those of an ingest of the same rows."""
    materialise(augmented(*NOISY), tmp_path / "a.zarr", chunk_mb=CHUNK_MB)
    X, y = contents(open_store(tmp_path / "a.zarr"))
    running = RunningStatistics(12, 3)
    for start in range(0, len(X), 31):
        chunk = running.empty()  # the chunks are counted apart, and added in their order
        chunk.add(X[start : start + 31], y[start : start + 31])
        running.merge(chunk)
    attributes = json.loads((tmp_path / "a.zarr" / "zarr.json").read_text())["attributes"]
    assert attributes["streamkern"]["mean"] == running.result().mean.tolist()
    assert "plan" not in attributes["streamkern"]
