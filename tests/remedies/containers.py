"""Mistakes in HDF5 and NetCDF files, in Zarr groups, and in what stands for an array in them."""

from __future__ import annotations

import shutil
from functools import partial as Do
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
import xarray as xr
import zarr

import streamkern as sk
from tests.remedies import FRAME, Case, N, X, Y, ingested

COVERED = tuple(
    f"ingest/{name}.py" for name in ("hdf5_files", "netcdf_files", "zarr_groups", "group_arrays")
)
SPARSE = sp.csr_array(np.where(np.abs(X) > 0.5, X, 0))
PARTS: dict[str, Any] = {
    "data": SPARSE.data, "indices": SPARSE.indices, "indptr": SPARSE.indptr,
}  # fmt: skip
CSR = {"encoding-type": "csr_matrix", "shape": list(SPARSE.shape)}
CODES: dict[str, Any] = {
    "codes": (np.arange(N) % 2).astype("i1"), "categories": np.array([0, 1]),
}  # fmt: skip


def write(location: Any, name: str, held: Any, attributes: dict[str, Any] | None = None) -> Any:
    """Write an array, or a group of them, to a group of zarr or h5py."""
    if isinstance(held, dict):
        new_node = location.create_group(name)
        for key, array in held.items():
            write(new_node, key, array)
    elif isinstance(location, zarr.Group):
        new_node = location.create_array(
            name, data=np.asarray(held), config={"write_empty_chunks": True}
        )  # fmt: skip
    else:
        new_node = location.create_dataset(name, data=held)
    new_node.attrs.update(attributes or {})
    return new_node


def group(x: Any = X, y: Any = Y, of_x: Any = None, of_y: Any = None) -> Any:
    """Ingest a Zarr group with these arrays or groups, and attributes of them."""
    new_group = zarr.open_group("group.zarr", mode="w")
    write(new_group, "X", x, of_x)
    write(new_group, "y", y, of_y)
    return ingested("group.zarr", targets="auto")


def file(x: Any = X, y: Any = Y, of_x: Any = None, **given: Any) -> Any:
    """Ingest an HDF5 file with these."""
    with h5py.File("file.h5", "w") as hdf5_file:
        write(hdf5_file, "X", x, of_x)
        write(hdf5_file, "y", y)
    return ingested("file.h5", **given)


def hdf5_cases() -> list[Case]:
    """Return mistakes in HDF5 files."""
    table = np.zeros(N, [("a", "f8"), ("deep", "f8", (2,)), ("y", "f8")])
    plain = np.zeros(N, [("a", "f8"), ("b", "f8"), ("y", "f8")])
    names = h5py.enum_dtype({"red": 1, "blue": 2})
    colours = np.arange(N) % 2 + 1
    with h5py.File("rows.h5", "w") as hdf5_file:
        write(hdf5_file, "X", X)
        write(hdf5_file, "y", Y)
        write(hdf5_file, "group", {"inner": X})
        write(hdf5_file, "nothing", h5py.Empty("f8"))
        write(hdf5_file, "matlab", X, {"MATLAB_class": np.bytes_("double")})
        write(hdf5_file, "sparse", {"data": X[0]}, {"MATLAB_sparse": 3})
        hdf5_file.create_dataset("table", data=table)
        hdf5_file.create_dataset("plain", data=plain)
        hdf5_file.create_dataset("unwritten", X.shape, "f8", chunks=(6, 3))
        hdf5_file["other"] = h5py.ExternalLink("linked.h5", "X")
        hdf5_file.create_dataset(
            "beside", X.shape, "f8", external=[("raw.bin", 0, h5py.h5f.UNLIMITED)]
        )
        short = hdf5_file.create_dataset("short", data=X, chunks=(30, 3))
        short.id.write_direct_chunk((0, 0), b"short")
        hdf5_file.create_dataset("enumerated", data=colours[:, None].repeat(2, 1), dtype=names)
        hdf5_file.create_dataset("colour", data=colours, dtype=names)
        hdf5_file.create_dataset("wrong", data=colours + 1, dtype=names)
        before = "X"
        for k in range(10):
            layout = h5py.VirtualLayout(X.shape, "f8")
            layout[:] = h5py.VirtualSource(".", before, X.shape)
            before = f"virtual{k}"
            hdf5_file.create_virtual_dataset(before, layout)
        half = h5py.VirtualLayout(X.shape, "f8", maxshape=X.shape)
        half[:9] = h5py.VirtualSource(".", "X", X.shape)[:9]
        hdf5_file.create_virtual_dataset("half", half)
    with h5py.File("linked.h5", "w") as hdf5_file:
        write(hdf5_file, "X", X)
    Path("raw.bin").write_bytes(X.tobytes())
    Path("cut.h5").write_bytes(Path("rows.h5").read_bytes()[:2000])

    def given(x: str, **more: Any) -> Any:
        return Do(ingested, "rows.h5", x=x, **more)

    full = Do(ingested, "rows.h5")
    with h5py.File("rows.h5") as hdf5_file:
        turned = hdf5_file["matlab"][:]
    return [
        ("copy it again from its source.*or write it again", Do(ingested, "cut.h5"), full, file),
        ("'group' of rows.h5 is a group and not an array; it has group/inner", given("group"),
         given("group/inner")),
        ("has no array 'Z'; it has .*name them with x= and y=", given("Z"), given("X")),
        ("is an empty dataset; write rows.*or name another one with x= and y=", given("nothing"),
         file, given("X")),
        (r"X=file.'X'.*y=file.'y'", given("matlab"),
         lambda: (np.savez("turned.npz", X=turned, y=Y), ingested("turned.npz"))),
        ("was written by MATLAB", given("sparse"),
         lambda: (np.savez("turned.npz", X=turned, y=Y), ingested("turned.npz"))),
        ("holds arrays; save each array as a dataset", given("table"), file,
         given("plain", y="y")),
        ("give missing='fill'", given("unwritten"), given("unwritten", missing="fill")),
        ("parts without a source; give missing='fill'", given("half"),
         given("half", missing="fill")),
        ("link to another file; give external=True", given("other"), given("other", external=True)),
        ("stored in other files; give external=True", given("beside"),
         given("beside", external=True)),
        ("copy the file again from its source", given("short"), full),
        ("write the rows to one dataset", given("virtual9"), file),
        ("if numbers are meant, write the array without these names", given("enumerated"),
         Do(file, colours[:, None].repeat(2, 1))),
        ("which is not the code of a name; correct it", given("X", y="wrong"),
         given("X", y="colour")),
    ]  # fmt: skip


def netcdf_cases() -> list[Case]:
    """Return mistakes in NetCDF files."""
    data = xr.Dataset({"X": (("row", "column"), X), "y": ("row", Y)})
    data.to_netcdf("classic.nc", engine="scipy")
    written = Path("classic.nc").read_bytes()
    Path("new.nc").write_bytes(b"CDF\x05" + written[4:])
    Path("cut.nc").write_bytes(written[:40])
    long = np.ones((20000, 3))
    large = xr.Dataset({"X": (("row", "column"), long), "y": ("row", long[:, 0])})
    large.to_netcdf("large.nc", engine="scipy")

    def converted(held: xr.Dataset) -> Any:
        held.to_netcdf("converted.nc", engine="h5netcdf")
        return ingested("converted.nc", memory="600 kB", chunk_mb=0.02)

    return [
        ("convert it to version 4", Do(ingested, "new.nc"), Do(converted, data)),
        ("raise memory=.*or convert it to version 4",
         Do(ingested, "large.nc", memory="600 kB", chunk_mb=0.02),
         Do(ingested, "large.nc", memory="6 MB", chunk_mb=0.02), Do(converted, large)),
        ("copy it again from its source", Do(ingested, "cut.nc"), Do(ingested, "classic.nc")),
        ("name them with x= and y=", Do(ingested, "classic.nc", y="target"),
         Do(ingested, "classic.nc", y="y")),
    ]  # fmt: skip


def store_cases() -> list[Case]:
    """Return mistakes in Zarr groups, and in stores of streamkern among them."""
    table = FRAME.assign(fare=Y)
    other = table.assign(w=["u", "v"] * (N // 2))
    sk.ingest_store(table, "encoded.zarr", y="fare")
    sk.ingest_store(other, "words.zarr", y="fare")
    both = ["encoded.zarr", "words.zarr"]
    stored_group = zarr.open_group(zarr.storage.MemoryStore(), mode="w")
    stored_group.create_array("X", data=X)
    stored_group.create_array("t", data=Y)
    shutil.copytree("data.zarr", "marked.zarr")
    open_group = zarr.open_group(
        zarr.storage.FsspecStore.from_url(Path("data.zarr").absolute().as_uri()), mode="r"
    )
    return [
        ("is a store that streamkern wrote; give its URL", Do(ingested, open_group),
         Do(ingested, Path("data.zarr").absolute().as_uri())),
        ("there is no zarr group at .*check the path", Do(ingested, "none.zarr"),
         Do(ingested, "data.zarr")),
        ("name them with x= and y=", Do(ingested, stored_group),
         Do(ingested, stored_group, x="X", y="t")),
        ("leave x= out.*or ingest the table again with only the requested columns",
         Do(ingested, "encoded.zarr", x=["a", "b"]), Do(ingested, "encoded.zarr"),
         Do(ingested, table, x=["a", "b"], y="fare")),
        ("ingest both tables together", Do(ingested, both),
         Do(ingested, pd.concat([table, other]), y="fare")),
        ("or ingest this table with like= and the other store", Do(ingested, both),
         lambda: (sk.ingest_store(other, "again.zarr", like="encoded.zarr"),
                  ingested(["encoded.zarr", "again.zarr"]))),
    ]  # fmt: skip


def group_cases() -> list[Case]:
    """Return mistakes in groups that stand for an array, as AnnData writes them."""
    valid = Do(group, PARTS, of_x=CSR)
    twice = PARTS | {"indices": np.zeros_like(PARTS["indices"])}
    square = sp.csr_array(SPARSE[:3])
    squares = {"data": square.data, "indices": square.indices, "indptr": square.indptr}
    turned = sp.csc_array(SPARSE)
    columns = {"data": turned.data, "indices": turned.indices, "indptr": turned.indptr}
    csc = CSR | {"encoding-type": "csc_matrix"}
    wide = sp.csc_array(np.ones((5000, 3)))
    much = {"data": wide.data, "indices": wide.indices, "indptr": wide.indptr}
    nullable = {"values": Y, "mask": np.arange(N) == 3}
    filled = {"values": Y, "mask": np.zeros(N, bool)}
    kind = {"encoding-type": "nullable-integer"}

    def of_memory(memory: str, x: Any, **attributes: Any) -> Any:
        return file(x, np.ones(5000), CSR | {"shape": [5000, 3]} | attributes,
                    memory=memory, chunk_mb=0.02)  # fmt: skip

    def of_square(**attributes: Any) -> Any:
        return group(squares, Y[:3], of_x={"shape": [3, 3]} | attributes)

    def left_out() -> Any:
        group(y=filled, of_y=kind)
        return ingested("missing.zarr", drop_missing_targets=True)

    def with_missing(name: str = "missing.zarr") -> Any:
        new_group = zarr.open_group(name, mode="w")
        write(new_group, "X", X)
        write(new_group, "y", nullable, kind)
        return ingested(name)

    packed = zarr.open_group("packed.zarr", mode="w")
    write(packed, "X", PARTS, CSR)
    packed["X/data"].attrs["scale_factor"] = 0.5
    write(packed, "y", Y)
    csr = wide.tocsr()
    rows = {"data": csr.data, "indices": csr.indices, "indptr": csr.indptr}
    return [
        ("write numbers", Do(group, PARTS | {"data": PARTS["data"].astype(str)}, of_x=CSR), valid),
        ("is not a valid CSR matrix: .*write it again",
         Do(group, PARTS | {"indptr": PARTS["indptr"][::-1]}, of_x=CSR), valid),
        (r"sum_duplicates.. of SciPy", Do(group, twice, of_x=CSR), valid),
        ("write one integer for each row",
         Do(group, y=CODES | {"codes": Y}, of_y={"encoding-type": "categorical"}),
         Do(group, y=CODES, of_y={"encoding-type": "categorical"})),
        ("read the file with anndata and write it again",
         Do(group, y=CODES["codes"], of_y={"categories": "y_categories"}),
         Do(group, y=CODES, of_y={"encoding-type": "categorical"})),
        ("write unpacked numbers", Do(ingested, "packed.zarr"), valid),
        ("write it with one dimension",
         Do(group, PARTS | {"data": PARTS["data"][:, None]}, of_x=CSR), valid),
        (r"raise memory=.*write it as CSR .tocsr.. of SciPy.",
         Do(of_memory, "400 kB", much, **{"encoding-type": "csc_matrix"}),
         Do(of_memory, "4 MB", much, **{"encoding-type": "csc_matrix"}),
         Do(of_memory, "400 kB", rows)),
        ("is not a sparse matrix: .*write it again",
         Do(group, columns | {"indices": columns["indices"] + 99}, of_x=csc),
         Do(group, columns, of_x=csc)),
        ("set the attribute encoding-type of the group to csr_matrix", of_square,
         Do(of_square, **{"encoding-type": "csr_matrix"})),
        ("set the attribute shape of the group to its numbers of rows and columns",
         Do(group, PARTS, of_x=CSR | {"shape": [N]}), valid),
        ("fill it in.*skip rows without a target with drop_missing_targets=True", with_missing,
         Do(group, y=filled, of_y=kind), left_out),
        ("has no array 'y/codes'; write the group again",
         Do(group, y={"categories": CODES["categories"]}, of_y={"encoding-type": "categorical"}),
         Do(group, y=CODES, of_y={"encoding-type": "categorical"})),
    ]  # fmt: skip


TABLES = (hdf5_cases, netcdf_cases, store_cases, group_cases)
