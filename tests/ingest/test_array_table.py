"""Check that arrays of every format, dtype, attribute and role are read as intended, or refused.

Each case is a file written by another library, with the expected result: numbers computed here in
plain NumPy, or a DataError. Cases are made in loops; a test lists all that fail.
"""

from __future__ import annotations

import base64
import random
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.storage import MemoryStore

from streamkern.basics.errors import DataError
from streamkern.ingest.conform import FeatureConverter, RawBlock
from streamkern.ingest.targets import TargetConverter
from tests.ingest.read_arrays import open_input
from tests.raw_files import write_hdf5, write_idx

pytestmark = [
    pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning"),
    pytest.mark.filterwarnings("ignore:Custom dtypes are saved as python objects"),
]
N, D = 12, 3
REFUSED = "refused"
RNG = np.random.default_rng(4)
W = np.arange(N) % 3 + 0.5
LABELS = np.arange(N) % 3


class Rows(NamedTuple):
    """The rows that are read: X as stored, y as labels (text) or values, and weights."""

    X: Any
    y: Any
    w: Any
    warnings: list[str]


def read(inputs: Any, y: Any = None, **options: Any) -> Rows:
    """Return all rows, converted as an ingest does."""
    with ExitStack() as files, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reader = open_input(inputs, files, y, **options)
        blocks = list(reader.blocks(0, 1 << 20))
        features = FeatureConverter(blocks[0], None, reader.natural_dtype)
        targets = TargetConverter(blocks[0])
        X = np.concatenate([features.convert(block) for block in blocks])
        codes = np.concatenate([targets.convert(block) for block in blocks])
        weights_of_blocks = [block.weights() for block in blocks]
    if targets.are_classes:
        names, ids_of_codes = targets.sorted_class_ids()
        codes = np.array(names)[ids_of_codes[codes]]
    has_weights = weights_of_blocks[0] is not None
    weights = np.concatenate(weights_of_blocks) if has_weights else None  # type: ignore[arg-type]
    return Rows(X, codes, weights, [str(warning.message) for warning in caught])


class Case(NamedTuple):
    """A file that is read as X, y and w.

    name : name of the case, for messages
    role : "X", "y" or "w", the array that is compared
    read : returns the rows, or raises DataError
    truth : the array that must be read, or `REFUSED`
    """

    name: str
    role: str
    read: Callable[[], Rows]
    truth: Any


def check(cases: Iterator[Case]) -> int:
    """Compare the rows of each case with its truth; return the number of cases."""
    wrong, n = [], 0
    for case in cases:
        n += 1
        try:
            rows = case.read()
        except DataError as error:
            if not isinstance(case.truth, str):
                wrong.append(f"{case.name}: {error}")
            elif str(error).count("\n") or len(str(error)) < 20:
                wrong.append(f"{case.name}: no sentence: {error}")
            continue
        except Exception as error:
            wrong.append(f"{case.name}: {type(error).__name__}: {error}")
            continue
        if isinstance(case.truth, str):
            wrong.append(f"{case.name}: read, and not refused")
        elif (why := difference(case, rows)) is not None:
            wrong.append(f"{case.name}: {why}")
    assert not wrong, f"{len(wrong)} of {n}:\n" + "\n".join(wrong[:60])
    return n


def difference(case: Case, rows: Rows) -> str | None:
    """Return the difference of the rows from the truth of a case; None if there is none."""
    truth = np.asarray(case.truth)
    actual = getattr(rows, case.role)
    if case.role == "X":
        actual = actual.reshape(truth.shape) if actual.size == truth.size else actual
    if case.role == "y" and actual.dtype.kind == "U":
        kind = truth.dtype.kind
        names = (truth.astype(int) if kind in "iuf" else truth).astype(str).tolist()
        return None if actual.tolist() == names else f"{actual.tolist()[:4]} for {names[:4]}"
    if case.role == "y":
        actual = actual[:, 0] if actual.ndim == 2 and truth.ndim == 1 else actual
    if actual.shape != truth.shape:
        return f"shape {actual.shape} for {truth.shape}"
    if case.role == "w":
        truth = truth.astype(np.float32)
    if not np.array_equal(actual, truth):
        return f"{actual.ravel()[:4]} for {truth.ravel()[:4]}"
    return None


# ------------------------------------------------------------------------------ dtypes and layouts


def numbers(dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return five numbers of a dtype, repeated; two integers are the ends of what is exact."""
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return (np.arange(np.prod(shape)) % 2 == 0).reshape(shape)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        ends = [max(info.min, -(2**53)), min(info.max, 2**53), 3, 7, 5]
        return np.resize(np.array(ends, kind), shape)
    return (np.resize([0.5, -2.25, 3.0, 1024.0, 0.125], shape)).astype(kind)


NUMBERS = [
    "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8",
    ">i2", ">u2", ">i4", ">i8", ">u8", ">f4", ">f8",
]  # fmt: skip
OTHERS: dict[str, Any] = {
    "c8": np.ones(N, "c8"),
    "c16": np.full(N, 1 + 2j),
    "M8[ns]": np.arange(N).astype("M8[ns]"),
    "m8[s]": np.arange(N).astype("m8[s]"),
    "struct": np.zeros(N, [("a", "f4"), ("b", "i4")]),
    "void": np.zeros(N, "V3"),
}
WORDS = np.array(["ann", "bob", "cyd", "dora"])[np.arange(N) % 4]


def matrix(column: Any) -> Any:
    """Return a column as D equal columns."""
    return np.stack([column] * D, axis=1)


Write = Callable[[Path, dict[str, Any]], Callable[[str, str, str], Rows]]
"""Write named arrays, and return how to read three of them as X, y and w."""


def npz_writer(order: str, packed: bool) -> Write:
    """Return a function that writes arrays as .npz, and returns how to read three of them."""

    def write(path: Path, arrays: dict[str, Any]) -> Callable[[str, str, str], Rows]:
        location = path.with_suffix(".npz")
        save = np.savez_compressed if packed else np.savez
        save(location, **{k: np.asarray(a, order=order) for k, a in arrays.items()})
        return lambda x, y, w: read(location, y, x=x, sample_weight=w)

    return write


def npy_writer(order: str) -> Write:
    """Return a function that writes each array as .npy, and returns how to read three of them."""

    def write(path: Path, arrays: dict[str, Any]) -> Callable[[str, str, str], Rows]:
        places = {k: path.with_name(f"{path.name}-{i}.npy") for i, k in enumerate(arrays)}
        for k, a in arrays.items():
            np.save(places[k], np.asarray(a, order=order))
        return lambda x, y, w: read(places[x], places[y], sample_weight=places[w])

    return write


def hdf5_writer(**options: Any) -> Write:
    """Return a function that writes arrays to HDF5, and returns how to read three of them."""

    def write(path: Path, arrays: dict[str, Any]) -> Callable[[str, str, str], Rows]:
        location = path.with_suffix(".h5")
        with h5py.File(location, "w") as file:
            for k, a in arrays.items():
                if a.dtype.kind not in "MmUT":  # of which h5py writes none
                    filtered = a.dtype.kind != "O" or "compression" not in options
                    file.create_dataset(k, data=a, **(options if filtered else {}))
        return lambda x, y, w: read(location, y, x=x, sample_weight=w)

    return write


def zarr_writer(version: int, **options: Any) -> Write:
    """Return a function that writes arrays to Zarr, and returns how to read three of them."""

    def write(path: Path, arrays: dict[str, Any]) -> Callable[[str, str, str], Rows]:
        location = path.with_suffix(".zarr")
        group = zarr.create_group(location, zarr_format=version)
        for k, a in arrays.items():
            converted = {key: v(np.ndim(a)) if callable(v) else v for key, v in options.items()}
            if zarr_holds(a, sharded="shards" in options):
                group.create_array(k, data=a, **converted)
        return lambda x, y, w: read(location, y, x=x, sample_weight=w)

    return write


def zarr_holds(array: Any, *, sharded: bool = False) -> bool:
    """Return whether zarr can write an array; it writes no shards of records."""
    return array.dtype.kind not in ("OV" if sharded else "O") and array.dtype != np.longdouble


def keep_in_memory(path: Path, arrays: dict[str, Any]) -> Callable[[str, str, str], Rows]:
    """Return how to read three arrays in memory."""
    return lambda x, y, w: read(arrays[x], arrays[y], sample_weight=arrays[w])


def write_zarr_in_memory(path: Path, arrays: dict[str, Any]) -> Callable[[str, str, str], Rows]:
    """Write a Zarr group in memory; return how to read three of its arrays."""
    group: Any = zarr.create_group(MemoryStore())
    for k, a in arrays.items():
        if zarr_holds(a):
            group.create_array(k, data=a, chunks=(5, D)[: np.ndim(a)])
    return lambda x, y, w: read(group[x], group[y], sample_weight=group[w])


def pieces(ndim: int) -> tuple[int, ...]:
    """Return the shape of the chunks of an array with `ndim` dimensions."""
    return (5, 2)[:ndim]


LAYOUTS: dict[str, Write] = {
    "npz C": npz_writer("C", packed=False),
    "npz F": npz_writer("F", packed=False),
    "npz C packed": npz_writer("C", packed=True),
    "npz F packed": npz_writer("F", packed=True),
    "npy C": npy_writer("C"),
    "npy F": npy_writer("F"),
    "hdf5": hdf5_writer(),
    "hdf5 chunked": hdf5_writer(chunks=True),
    "hdf5 packed": hdf5_writer(chunks=True, compression="gzip", shuffle=True, fletcher32=True),
    "zarr 2": zarr_writer(2),
    "zarr 2 chunked F": zarr_writer(2, chunks=pieces, order="F"),
    "zarr 3": zarr_writer(3),
    "zarr 3 chunked": zarr_writer(3, chunks=pieces, compressors=None),
    "zarr 3 sharded": zarr_writer(3, chunks=pieces, shards=lambda n: (10, 4)[:n]),
    "memory": keep_in_memory,
    "zarr array": write_zarr_in_memory,
}


def dtype_cases(path: Path) -> Iterator[Case]:
    """Yield arrays of all dtypes as X, y and w in each layout."""
    for layout, write in LAYOUTS.items():
        arrays, truths = plain(), {}
        for role in ("X", "y", "w"):
            for dtype in [*NUMBERS, "g"]:
                array = numbers(dtype, (N, D) if role == "X" else (N,))
                if role == "w":
                    is_float = np.dtype(dtype).kind == "f"
                    array = abs(array) if is_float else LABELS.astype(dtype)
                arrays[f"{role}{dtype}"] = array
                truths[f"{role}{dtype}"] = array
            for kind, column in OTHERS.items():
                arrays[f"{role}{kind}"] = matrix(column) if role == "X" else column
                if not (kind == "struct" and role == "X" and "hdf5" in layout):  # a table
                    truths[f"{role}{kind}"] = REFUSED
        reads = write(path / layout.replace(" ", "-"), arrays)
        for name, truth in truths.items():
            kind = arrays[name].dtype.kind
            sharded = "sharded" in layout
            written = (
                kind not in "Mm" if "hdf5" in layout else zarr_holds(arrays[name], sharded=sharded)
            )
            if written or layout.startswith(("np", "memory")):
                names = {"X": "X", "y": "y", "w": "w"} | {name[0]: name}
                yield Case(f"{layout}, {name}", name[0], partial(reads, *names.values()), truth)


def plain() -> dict[str, Any]:
    """Return X, y and w that every format can hold."""
    return {"X": RNG.normal(size=(N, D)), "y": LABELS, "w": W}


# ------------------------------------------------------------------------------ attributes


class AttributeCase(NamedTuple):
    """Attributes, the numbers that they make of stored ones, and the kinds of dtypes to test."""

    attributes: dict[str, Any]
    decode: Callable[[Any], Any]
    kinds: str = "iuf"


def unchanged(stored: Any) -> Any:
    """Return the stored numbers, which mean themselves."""
    return stored


def refused(stored: Any) -> Any:
    """Return `REFUSED`, whatever is stored."""
    return REFUSED


def base64_of_double(number: float) -> str:
    """Return a float as xarray writes it to Zarr v3."""
    return base64.b64encode(struct.pack("<d", number)).decode()


HELD, NOT_HELD = 7, 9  # a number that is in the arrays, and one that is not
ATTRIBUTES: dict[str, AttributeCase] = {
    "none": AttributeCase({}, unchanged),
    "words": AttributeCase(
        {"long_name": "rain", "units": "m s-1", "flag_meanings": "a b"}, unchanged
    ),
    "scale": AttributeCase({"scale_factor": 0.01}, lambda a: a.astype("f8") * 0.01),
    "offset": AttributeCase({"add_offset": 273.15}, lambda a: a.astype("f8") + 273.15),
    "both": AttributeCase(
        {"scale_factor": 2.5, "add_offset": 1.0}, lambda a: a.astype("f8") * 2.5 + 1
    ),
    "whole": AttributeCase(
        {"scale_factor": 10, "add_offset": 1}, lambda a: a.astype("f8") * 10 + 1
    ),
    "list of one": AttributeCase({"scale_factor": [0.5]}, lambda a: a.astype("f8") * 0.5),
    "text": AttributeCase({"scale_factor": "0.5"}, lambda a: a.astype("f8") * 0.5),
    "identity": AttributeCase({"scale_factor": 1.0, "add_offset": 0.0}, unchanged),
    "scale of words": AttributeCase({"scale_factor": "deci"}, refused),
    "scale of two": AttributeCase({"scale_factor": [0.1, 0.2]}, refused),
    "scale of none": AttributeCase({"scale_factor": 0.0}, refused),
    "no gap": AttributeCase({"_FillValue": NOT_HELD}, unchanged),
    "gap": AttributeCase({"_FillValue": HELD}, refused),
    "gap of one": AttributeCase({"_FillValue": [HELD]}, refused),
    "missing": AttributeCase({"missing_value": [NOT_HELD, HELD]}, refused),
    "no missing": AttributeCase({"missing_value": [NOT_HELD]}, unchanged),
    "gap beyond": AttributeCase({"_FillValue": 1e20}, unchanged),
    "gap and scale": AttributeCase({"_FillValue": HELD, "scale_factor": 0.1}, refused),
    "scale, no gap": AttributeCase(
        {"_FillValue": NOT_HELD, "scale_factor": 0.1}, lambda a: a.astype("f8") * 0.1
    ),
    "gap of words": AttributeCase({"_FillValue": "none of them"}, refused),
    "valid": AttributeCase({"valid_range": [-100, 100]}, unchanged),
    "invalid": AttributeCase({"valid_range": [0, 6]}, refused),
    "valid ends": AttributeCase({"valid_min": -100, "valid_max": 100}, unchanged),
    "below": AttributeCase({"valid_min": 3}, refused),
    "above": AttributeCase({"valid_max": 6}, refused),
    "one end": AttributeCase({"valid_range": [3]}, refused),
    "dates": AttributeCase({"units": "days since 2000-01-01", "calendar": "standard"}, refused),
    "durations": AttributeCase({"units": "days", "dtype": "timedelta64[ns]"}, refused),
    "unsigned": AttributeCase({"_Unsigned": "true"}, lambda a: a.view(f"u{a.itemsize}"), "i"),
    "signed": AttributeCase({"_Unsigned": "false"}, lambda a: a.view(f"i{a.itemsize}"), "u"),
    "unsigned gap": AttributeCase({"_Unsigned": "true", "_FillValue": -1}, refused, "i"),
    "unsigned what": AttributeCase({"_Unsigned": "perhaps"}, refused, "iu"),
    "other scale": AttributeCase({"ScaleFactor": 0.1}, refused),
    "other slope": AttributeCase({"Slope": 0.1, "Intercept": 2.0}, refused),
    "other identity": AttributeCase({"scale": 1, "offset": 0}, unchanged),
    "other gap": AttributeCase({"MissingValue": HELD}, refused),
    "other no gap": AttributeCase({"NODATA": NOT_HELD}, unchanged),
    "gap NaN": AttributeCase({"_FillValue": float("nan")}, unchanged, "f"),
    "gap NaN of xarray": AttributeCase(
        {"_FillValue": base64_of_double(float("nan"))}, unchanged, "f"
    ),
    "gap of xarray": AttributeCase({"_FillValue": base64_of_double(HELD)}, refused, "f"),
}


def packed_numbers(dtype: str, shape: tuple[int, ...]) -> Any:
    """Return small numbers, the last of them -1 or the largest, some of them 7."""
    values = np.resize(np.array([1, 2, HELD, 4, 5], dtype), shape)
    if np.dtype(dtype).kind == "i":
        values.ravel()[-1] = -1
    return values


def attribute_cases(path: Path) -> Iterator[Case]:
    """Yield packed numbers with each set of attributes as X, y and w."""
    for format_ in ("hdf5", "zarr 2", "zarr 3", "arrays"):
        for dtype in ("i2", "f8") if "zarr" in format_ else ("i1", "u1", "i2", "f4", "f8"):
            for role in ("X", "y", "w"):
                if role == "w" and dtype[0] == "i":
                    continue  # among which is -1
                stored = packed_numbers(dtype, (N, D) if role == "X" else (N,))
                location = path / f"{format_}-{dtype}-{role}"
                file = FileWithAttributes(location, format_, plain() | {role: stored}, role)
                for case_name, (attributes, decode, kinds) in ATTRIBUTES.items():
                    if dtype[0] in kinds and not (role == "w" and case_name == "signed"):
                        read_file = partial(file.read, attributes)
                        name = f"{format_}, {case_name}, {dtype} as {role}"
                        yield Case(name, role, read_file, decode(stored))


class FileWithAttributes:
    """A file of arrays; the array of `role` gets other attributes before each reading."""

    def __init__(self, path: Path, format_: str, arrays: dict[str, Any], role: str) -> None:
        self.format, self.role = format_, role
        self.path = path.with_suffix(".h5" if format_ == "hdf5" else ".zarr")
        if format_ == "hdf5":
            write_hdf5(self.path, **arrays)
            return
        version = 2 if format_.endswith("2") else 3
        store = MemoryStore() if format_ == "arrays" else self.path
        self.group = zarr.create_group(store, zarr_format=version)
        for k, a in arrays.items():
            self.group.create_array(k, data=a)

    def read(self, attributes: dict[str, Any]) -> Rows:
        if self.format == "hdf5":
            with h5py.File(self.path, "a") as file:
                attrs = file[self.role].attrs
                for name in list(attrs):
                    del attrs[name]
                for name, attribute in attributes.items():
                    attrs[name] = attribute
            return read(self.path, sample_weight="w")
        array: Any = self.group[self.role]
        array.attrs.put(attributes)
        if self.format == "arrays":
            arrays: Any = {k: self.group[k] for k in "Xyw"}
            return read(arrays["X"], arrays["y"], sample_weight=arrays["w"])
        return read(self.path, sample_weight="w")


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("part", range(3))
def test_packing_attributes_are_applied(part: int, tmp_path: Path) -> None:
    """Check the attributes for packed numbers in random cases, in three parts."""
    draw = random.Random(0)
    assert check(c for c in attribute_cases(tmp_path) if draw.randrange(3) == part) > 330


def test_decoded_attributes_are_reported(tmp_path: Path) -> None:
    for format_ in ("hdf5", "zarr 2", "zarr 3", "arrays"):
        file = FileWithAttributes(tmp_path / format_, format_, plain(), "X")
        assert file.read({}).warnings == []
        (message,) = file.read({"scale_factor": 0.1}).warnings
        assert "X" in message
        assert "scale_factor=0.1" in message


# ------------------------------------------------------------------------------ text and xarray


def text_cases(path: Path) -> Iterator[Case]:
    """Yield text of each dtype as X, y and w in each layout that holds it."""
    kinds = {"U": WORDS, "S": WORDS.astype("S5"), "O": WORDS.astype(object)}
    kinds["T"] = WORDS.astype(np.dtypes.StringDType())
    held = {"np": "USOT", "hdf5": "SO", "zarr": "UST", "memory": "USOT"}
    for layout, write in LAYOUTS.items():
        arrays = plain()
        for kind, words in kinds.items():
            arrays |= {f"X{kind}": matrix(words), f"y{kind}": words, f"w{kind}": words}
        reads = write(path / layout.replace(" ", "-"), arrays)
        for kind in next(held[k] for k in held if layout.startswith(k)):
            for role in ("X", "y", "w"):
                names = {"X": "X", "y": "y", "w": "w"} | {role: f"{role}{kind}"}
                unpickled = layout.startswith("np") and kind in "OT"
                truth = WORDS if role == "y" and not unpickled else REFUSED
                case = partial(reads, *names.values())
                yield Case(f"{layout}, {kind} as {role}", role, case, truth)


def missing_label_cases(path: Path) -> Iterator[Case]:
    """Yield labels some of which are missing."""
    missing = np.dtypes.StringDType(na_object=None)
    arrays = plain() | {
        "empty": np.where(WORDS == "bob", "", WORDS),
        "None": np.where(WORDS == "bob", None, WORDS),
        "NaN": np.where(WORDS == "bob", np.nan, WORDS.astype(object)),
        "missing": np.where(WORDS == "bob", None, WORDS).astype(missing),
    }
    for name in ("empty", "None", "NaN", "missing"):
        case = partial(keep_in_memory(path, arrays), "X", name, "w")
        yield Case(f"memory, {name}", "y", case, REFUSED)
    empty = plain() | {"y": arrays["empty"].astype(np.dtypes.StringDType())}
    for version in (2, 3):
        reads = zarr_writer(version)(path / str(version), empty)
        yield Case(f"zarr {version}, empty", "y", partial(reads, "X", "y", "w"), REFUSED)


def test_missing_labels_are_refused_with_row(tmp_path: Path) -> None:
    check(missing_label_cases(tmp_path))
    for case in missing_label_cases(tmp_path / "again"):
        with pytest.raises(DataError, match="row 1"):
            case.read()


def write_dataset(data: xr.Dataset, location: Path, encoding: dict[str, Any]) -> None:
    """Write an xarray.Dataset in the format of the ending."""
    if location.suffix == ".zarr":
        version: Any = int(location.stem[-1])
        data.to_zarr(location, zarr_format=version, consolidated=version == 2, encoding=encoding)
    elif location.suffix == ".nc":
        data.to_netcdf(location, engine="h5netcdf", encoding=encoding)
    else:
        data.to_netcdf(location, engine="scipy", format="NETCDF3_CLASSIC", encoding=encoding)


def xarray_cases(path: Path) -> Iterator[Case]:
    """Yield files that xarray writes, and the values that it reads from them."""
    data = xr.Dataset(
        {"X": (("row", "column"), RNG.normal(size=(N, D))), "y": ("row", LABELS), "w": ("row", W)},
        coords={"row": np.arange(N), "column": list("abc")},
    )
    data["X"].attrs["units"] = "m"
    encodings: dict[str, dict[str, Any]] = {
        "plain": {},
        "f4": {"dtype": "f4"},
        "packed": {"dtype": "i2", "scale_factor": 0.01, "add_offset": 1.0, "_FillValue": -9999},
        "packed f4": {"dtype": "i2", "scale_factor": np.float32(0.5), "_FillValue": -9999},
        "bytes": {"dtype": "u1", "scale_factor": 0.05, "add_offset": -4.0, "_FillValue": 255},
        "unsigned": {"dtype": "i1", "_Unsigned": "true", "scale_factor": 0.05, "add_offset": -4.0,
                     "_FillValue": -1},
        "far fill": {"_FillValue": 1e20},
    }  # fmt: skip
    for name, encoding in encodings.items():
        for gap in (False, True):
            dataset = data.copy(deep=True)
            if gap:
                dataset["X"][4, 1] = np.nan
            for suffix in ("2.zarr", "3.zarr", ".nc", ".cdf"):
                location = path / f"{name}{gap}{suffix}"
                if encoding.get("dtype") == "u1" and location.suffix == ".cdf":
                    continue  # the classic format has no unsigned bytes
                write_dataset(dataset, location, {"X": encoding})
                engine = {".zarr": "zarr", ".nc": "h5netcdf", ".cdf": "scipy"}[location.suffix]
                options = {"consolidated": False} if engine == "zarr" else {}
                with xr.open_dataset(location, engine=engine, **options) as reopened:
                    truth = reopened["X"].values  # xarray is the independent truth
                yield Case(
                    f"{location.name}", "X",
                    lambda location=location: read(location, sample_weight="w"),
                    REFUSED if gap else truth,
                )  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_xarray_files_are_read_like_xarray(tmp_path: Path) -> None:
    n = 0
    for case in xarray_cases(tmp_path):
        n += 1
        if isinstance(case.truth, str):
            with pytest.raises(DataError, match="row 4"):
                case.read()
            continue
        actual = case.read().X
        np.testing.assert_allclose(actual, case.truth, rtol=3e-7, atol=1e-6, err_msg=case.name)
        if "packed" not in case.name and "bytes" not in case.name and "unsign" not in case.name:
            np.testing.assert_array_equal(actual, case.truth)
    assert n > 40


# ------------------------------------------------------------------------------ other containers


def idx_cases(path: Path) -> Iterator[Case]:
    """Yield IDX files of all dtypes as X, y and w."""
    for dtype in ("u1", "i1", ">i2", ">i4", ">f4", ">f8"):
        for role in ("X", "y", "w"):
            array = numbers(dtype, (N, D) if role == "X" else (N,))
            array = np.abs(packed_numbers(dtype, (N,))) if role == "w" else array
            places = {k: path / f"{dtype[-2:]}{role}{k}.idx" for k in ("X", "y", "w")}
            converted = {
                "X": numbers("u1", (N, D)),
                "y": LABELS.astype("u1"),
                "w": LABELS.astype("u1"),
            }
            for k, a in (converted | {role: array}).items():
                write_idx(places[k], a)
            yield Case(
                f"idx, {dtype} as {role}", role,
                lambda p=places: read(p["X"], p["y"], sample_weight=p["w"]), array,
            )  # fmt: skip


def hdf5_type_cases(path: Path) -> Iterator[Case]:
    """Yield types that only HDF5 has."""
    colours = h5py.enum_dtype({"red": 1, "green": 2, "blue": 5}, basetype="i1")
    codes = np.array([1, 2, 5])[LABELS]
    names = np.array(["red", "green", "blue"])[LABELS]
    blanks = h5py.h5t.C_S1.copy()
    blanks.set_size(6)
    blanks.set_strpad(h5py.h5t.STR_SPACEPAD)
    ragged = np.array([np.arange(k + 1.0) for k in range(N)], object)
    shapes = {"X": (N, D), "y": (N,), "w": (N,)}
    for role, shape in shapes.items():
        big = (np.resize(codes, shape), colours)
        made: dict[str, tuple[Any, Any, Any]] = {
            "enum": (*big, names if role == "y" else REFUSED),
            "bool": (np.resize([True, False], shape), None, np.resize([True, False], shape)),
            "reference": (None, h5py.ref_dtype, REFUSED),
            "opaque": (np.zeros(shape, "V5"), None, REFUSED),
            "vlen": (ragged if len(shape) == 1 else None, h5py.vlen_dtype("f8"), REFUSED),
            "half": (numbers("f2", shape), None, numbers("f2", shape)),
            "bytes": (
                np.resize(WORDS.astype("S6"), shape),
                None,
                WORDS if role == "y" else REFUSED,
            ),
        }
        if role == "w":
            made["half"] = (np.abs(made["half"][0]), None, np.abs(made["half"][2]))
        for name, (data, dtype, truth) in made.items():
            location = path / f"{name}{role}.h5"
            with h5py.File(location, "w") as file:
                for k, a in plain().items():
                    if k != role:
                        file[k] = a
                if data is None:
                    file.create_dataset(role, shape, dtype)
                    if name == "reference":
                        file[role][...] = np.full(shape, file.ref, dtype=h5py.ref_dtype)
                else:
                    file.create_dataset(role, data=data, dtype=dtype)
            yield Case(
                f"hdf5 {name} as {role}", role, lambda p=location: read(p, sample_weight="w"), truth
            )
    location = path / "blanks.h5"
    with h5py.File(location, "w") as file:
        for k, a in plain().items():
            if k != "y":
                file[k] = a
        made_space = h5py.h5s.create_simple((N,))
        dataset = h5py.h5d.create(file.id, b"y", blanks, made_space)
        padded = np.array([w.ljust(6).encode() for w in WORDS], "S6")
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, padded, mtype=blanks)
    yield Case("hdf5 blanks", "y", lambda: read(location, sample_weight="w"), WORDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "n_cases"),
    [(dtype_cases, 900), (text_cases, 120), (idx_cases, 18), (hdf5_type_cases, 22)],
)
def test_each_type_of_each_format_is_read_exactly_or_refused(
    cases: Callable[[Path], Iterator[Case]], n_cases: int, tmp_path: Path
) -> None:
    assert check(cases(tmp_path)) >= n_cases


def test_rounded_numbers_give_warning() -> None:
    """Check integers beyond 2^53 and long doubles, which are stored as float64."""
    wide = np.array([2**53, 2**53 + 1, 5])
    for converted in (wide, -wide, wide.astype("u8"), np.full(3, 1 / np.longdouble(3))):
        block = RawBlock(np.ones((3, 1)), converted, "here", 0)
        with pytest.warns(UserWarning, match="rounded to 16 digits"):
            TargetConverter(block, "values").convert(block)
        if converted.dtype.kind != "f":
            texts = read(np.stack([converted] * 2, axis=1), np.arange(3.0)).warnings
            assert any("rounded to 16 digits" in text for text in texts)
