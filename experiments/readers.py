"""Files that `--data` accepts, and how they are read.

    FOLDER with train-images-idx3-ubyte[.gz], ...   MNIST, FashionMNIST and the like (IDX)
    FOLDER with data_batch_1.bin, ..., test_batch.bin   CIFAR-10, its binary version
    FOLDER with SUSY.csv or HIGGS.csv [.gz]         label first; the last 500 000 rows: testing
    FOLDER with YearPredictionMSD.txt               year first; the last 51 630 rows: testing
    FOLDER with train.X and test.X                  X: npz, h5, csv, parquet, svm, libsvm or zarr
    FOLDER with X_train.npy, y_train.npy, X_test.npy, y_test.npy
    a Zarr store                                    a quarter for testing without `--test`

npz and h5 files hold the arrays `X` and `y`; csv and parquet files have a column `y`. All files are
written to Zarr stores in the folder of the results, once for each state of the files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

import streamkern as sk
from experiments.data import MIN_ROWS, TEST_ROWS, Data
from experiments.results import Array
from streamkern.basics.optional import import_optional

Part = tuple[Any, Any]
CIFAR_SHAPE = (3, 32, 32)
LAST_TESTED = {"SUSY.csv": 500_000, "HIGGS.csv": 500_000, "YearPredictionMSD.txt": 51_630}
MOST_UNEVEN = 10.0
"""Chi-square per degree of freedom above which rows count as not mixed; mixed rows have about 1."""
KINDS = ("npz", "h5", "csv", "parquet", "svm", "libsvm")


def read_data(path: str, test: str | None, rows: int, folder: Path) -> Data:
    """Return at most `rows` training rows, and test rows, of a folder or of stores."""
    train: str | Path
    held_out: str | Path | None
    if path.rstrip("/").endswith(".zarr") or test is not None:
        train, held_out = path, test
    else:
        train, held_out = as_stores(Path(path), folder)
    name = path.rstrip("/").rpartition("/")[2]
    X, y, classes = first_rows(train, rows + (TEST_ROWS if held_out is None else 0))
    if len(X) < MIN_ROWS:
        raise sk.DataError(f"{path}: {len(X)} rows are too few; give {MIN_ROWS} or more")
    if held_out is None:
        return Data(name, X, y, classes, None, own=True)
    X_test, y_test, others = first_rows(held_out, TEST_ROWS)
    if others != classes:
        y_test = as_classes(y_test, others, classes, f"{held_out} has other classes than {train}")
    return Data(name, X, y, classes, (X_test, y_test), own=True)


def first_rows(path: str | Path, n: int) -> tuple[Array, Array, tuple[str, ...] | None]:
    """Return at most n rows of a store, their targets and its classes.

    Rows of a store are in random order, so the first rows are a sample. Raises DataError if they
    were ingested in another order and their shares of the classes differ from those of all rows.
    """
    store = sk.open_store(path)
    spec = store.spec
    X, y = store.read_rows(np.arange(min(n, spec.n_rows)))
    if spec.classes is not None and spec.class_counts is not None and len(y) < spec.n_rows:
        counts = np.asarray(spec.class_counts, np.float64)
        expected = counts[counts > 0] * len(y) / counts.sum()
        found = np.bincount(y, minlength=len(counts))[counts > 0]
        if ((found - expected) ** 2 / expected).sum() > MOST_UNEVEN * max(len(expected) - 1, 1):
            raise sk.DataError(
                f"the first {len(y)} rows of {path} are not a sample of its classes, as rows were "
                "not mixed; ingest them with shuffle, or use more --rows"
            )
    return X, y, spec.classes


def as_classes(
    y: Array, names: tuple[str, ...] | None, classes: tuple[str, ...] | None, wrong: str
) -> Array:
    """Convert class ids of some names to ids of `classes`; a test set may lack some classes."""
    if names is None or classes is None or not set(names) <= set(classes):
        raise sk.DataError(f"{wrong}; use data with the same")
    return np.asarray(np.array([classes.index(name) for name in names], y.dtype)[y])


def as_stores(path: Path, folder: Path) -> tuple[Path, Path]:
    """Write the files of a folder to a training and a test store, unless they are written."""
    if not path.is_dir():
        raise sk.DataError(f"{path} is neither a folder nor a Zarr store; see --help for --data")
    target = folder / "stores" / f"{path.name}-{state_of(path):08x}"
    stores = target / "train.zarr", target / "test.zarr"
    found: tuple[tuple[Part, Part], str] | None = None
    for k, store in enumerate(stores):
        try:
            sk.open_store(store)
            continue
        except sk.DataError:  # missing or unfinished: `ingest_store` goes on with it
            store.parent.mkdir(parents=True, exist_ok=True)
        found = found or parts_of(path)
        parts, targets = found
        X, y = parts[k]
        spec = sk.ingest_store(X, store, y=y, targets=targets)
        print(f"{store}: {spec.n_rows:,} rows of shape {spec.row_shape}, {spec.x_dtype}")
    return stores


def state_of(path: Path) -> int:
    """Return a checksum of a folder's place, and of the sizes and times of its files."""
    files = [(p.name, s.st_size, s.st_mtime_ns) for p in sorted(path.iterdir()) for s in [p.stat()]]
    return crc32(repr((str(path.resolve()), files)).encode())


def parts_of(path: Path) -> tuple[tuple[Part, Part], str]:
    """Return X and y of the training and the test part, and the kind of targets."""
    readers: tuple[Callable[[Path], tuple[tuple[Part, Part], str] | None], ...] = (
        idx, cifar, one_table, arrays, named_parts,
    )  # fmt: skip
    for read in readers:
        if (found := read(path)) is not None:
            return found
    raise sk.DataError(f"{path} holds none of the files that --data takes; see --help for them")


def idx(path: Path) -> tuple[tuple[Part, Part], str] | None:
    """Read files in the format of MNIST."""
    if not any(path.glob("train-images*")):
        return None

    def file(name: str) -> Path:
        found = [p for ending in ("", ".gz") for p in path.glob(name + ending)]
        if not found:
            name = name.replace("?", "-")
            raise sk.DataError(f"there is no {name} or {name}.gz in {path}, which --data needs")
        return found[0]

    train, test = (
        (file(f"{part}-images?idx3-ubyte"), file(f"{part}-labels?idx1-ubyte"))
        for part in ("train", "t10k")
    )
    return (train, test), "classes"


def cifar(path: Path) -> tuple[tuple[Part, Part], str] | None:
    """Read the binary version of CIFAR-10: a byte for the class, 3072 for the image, by channel."""
    batches = sorted(path.glob("data_batch_*.bin"))
    if not batches:
        if any(path.glob("data_batch_*")):
            raise sk.DataError(
                f"{path} holds the pickled version of CIFAR-10, which is not read because a "
                "pickle can run code; use the binary version (cifar-10-binary.tar.gz)"
            )
        return None

    def images(files: list[Path]) -> Part:
        rows = np.concatenate([records(f) for f in files])
        pictures = rows[:, 1:].reshape(-1, *CIFAR_SHAPE).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(pictures), rows[:, 0]

    test = needed(path, "test_batch.bin")
    return (images(batches), images([test])), "classes"


def records(file: Path) -> Array:
    """Return the (n, 3073) bytes of a file of CIFAR-10: class and pixels of each image."""
    found = np.fromfile(file, np.uint8)
    if found.size % 3073 or not found.size or found[::3073].max() > 9:
        raise sk.DataError(
            f"{file} is cut, or holds no images of CIFAR-10: these have 3073 bytes each, of which "
            "the first is a class of 0 to 9; get the file again"
        )
    return found.reshape(-1, 3073)


def needed(path: Path, name: str) -> Path:
    """Return a file of a folder, and raise DataError if it is not there."""
    if not (path / name).exists():
        raise sk.DataError(f"there is no {name} in {path}, which --data needs")
    return path / name


def one_table(path: Path) -> tuple[tuple[Part, Part], str] | None:
    """Read SUSY, HIGGS or YearPredictionMSD: the target first, the last rows for the test."""
    for name, tested in LAST_TESTED.items():
        for ending in ("", ".gz"):
            if (file := path / (name + ending)).exists():
                table = numbers_of(file)
                X, y = table[:, 1:], table[:, 0]
                few = min(tested, len(X) // 5)
                kind = "values" if name.startswith("Year") else "classes"
                if kind == "classes":
                    if not np.isin(y, (0, 1)).all():
                        raise sk.DataError(
                            f"{file}: the first column must be the class, 0 or 1; row "
                            f"{int(np.flatnonzero(~np.isin(y, (0, 1)))[0])} has another number"
                        )
                    y = y.astype(np.int64)
                return ((X[:-few], y[:-few]), (X[-few:], y[-few:])), kind
    return None


def numbers_of(file: Path) -> Array:
    """Return the (n, d) float32 numbers of a CSV file without a header."""
    pandas = import_optional("pandas", f"reading {file.name}", "frames")
    try:
        table = pandas.read_csv(file, header=None, dtype=np.float32).to_numpy()
    except (ValueError, OSError, EOFError) as error:
        raise sk.DataError(f"{file} is not a table of numbers: {error}") from error
    return np.asarray(table)


def arrays(path: Path) -> tuple[tuple[Part, Part], str] | None:
    """Open features of a network or of speech as NumPy files, without reading them whole."""
    if not (path / "X_train.npy").exists():
        return None
    loaded = {}
    for name in ("X_train", "y_train", "X_test", "y_test"):
        file = needed(path, f"{name}.npy")
        try:
            loaded[name] = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise sk.DataError(f"{file} is not an array of numbers or text: {error}") from error
    train, test = ((loaded[f"X_{part}"], loaded[f"y_{part}"]) for part in ("train", "test"))
    return (train, test), kind_of(train[1])


def named_parts(path: Path) -> tuple[tuple[Part, Part], str] | None:
    """Name train.X and test.X in a form that `ingest_store` reads."""
    for kind in KINDS:
        train, test = (path / f"{part}.{kind}" for part in ("train", "test"))
        if train.exists():
            if not test.exists():
                raise sk.DataError(f"{train} has no {test.name} beside it, which --data needs")
            y = None if kind in ("svm", "libsvm") else "y"  # those hold their targets
            return ((str(train), y), (str(test), y)), "auto"
    return None


def kind_of(y: Array) -> str:
    """Return "classes" for whole numbers and text, "values" for others."""
    return "values" if y.dtype.kind == "f" else "classes"
