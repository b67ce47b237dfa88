"""Check which files a folder or a pattern stands for, and in which order."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamkern.basics.errors import ConfigError, DataError, ResumeMismatchError, StoreNotFoundError
from streamkern.cli import main
from streamkern.ingest.append import append
from streamkern.ingest.ingest import ingest
from streamkern.ingest.path_patterns import expand_paths
from tests.ingest.ingested import read_in_order
from tests.s3_server import S3Server

N = 130
TABLE = pd.DataFrame(np.random.default_rng(2).standard_normal((N, 3)), columns=["a", "b", "c"])
TABLE["y"] = TABLE["a"] - TABLE["b"]


def write(folder: Path, *names: str, content: str = "a,y\n1,2\n") -> None:
    """Write files of these names, with their folders."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


# -- folders ---------------------------------------------------------------------------------------


def test_spark_folder_is_read_in_natural_order(tmp_path: Path) -> None:
    parts = [
        TABLE[k : k + 10] for k in range(0, N, 10)
    ]  # 13, because part-10 follows part-9 in natural order only
    (tmp_path / "data").mkdir()
    for k, part in enumerate(parts):
        part.to_csv(tmp_path / "data" / f"part-{k}.csv", index=False)
        (tmp_path / "data" / f".part-{k}.csv.crc").write_bytes(b"crc")
    write(tmp_path / "data", "_SUCCESS", "_temporary/0/part-0.csv", content="")
    (tmp_path / "data" / "out.csv-0123456789ab.predict").mkdir()  # left by a killed `predict`
    spec = ingest(tmp_path / "data", tmp_path / "s.zarr", y="y", dtype="float64")
    assert [name.rpartition("/")[2] for name, _ in spec.files] == [
        f"part-{k}.csv" for k in range(len(parts))
    ]
    np.testing.assert_array_equal(np.hstack(read_in_order(tmp_path / "s.zarr")), TABLE.to_numpy())


@pytest.mark.parametrize("suffix", ["parquet", "folder.parquet"])
def test_dask_parquet_folder_is_a_table(tmp_path: Path, suffix: str) -> None:
    """Check a folder named as a file, and a folder with another name."""
    path = tmp_path / suffix
    dd.from_pandas(TABLE, npartitions=11).to_parquet(
        path, write_metadata_file=True, write_index=False
    )
    assert (path / "_metadata").exists()
    for inputs in (path, f"{path}/", f"file://{path}", path / "*"):
        assert len(expand_paths(inputs)) == 11
    ingest(path, tmp_path / "s.zarr", y="y")
    np.testing.assert_array_equal(np.hstack(read_in_order(tmp_path / "s.zarr")), TABLE.to_numpy())


def test_changed_folder_is_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that an interrupted `ingest` does not resume after a file was added."""
    for k in range(3):
        TABLE.to_csv(tmp_path / f"{k}.csv", index=False)
    out = tmp_path / "out" / "s.zarr"

    def interrupt(phase: str, done: int, _of: int | None) -> None:
        if phase == "write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest(tmp_path / "[0-9].csv", out, y="y", progress=interrupt)
    TABLE.to_csv(tmp_path / "3.csv", index=False)
    with pytest.raises(ResumeMismatchError, match="inputs differ"):
        ingest(tmp_path / "[0-9].csv", out, y="y")
    (tmp_path / "3.csv").unlink()
    assert ingest(tmp_path / "[0-9].csv", out, y="y").n_rows == 3 * N


def test_zarr_group_is_not_a_folder_of_files(tmp_path: Path) -> None:
    for version in (2, 3):
        path = tmp_path / f"v{version}"
        zarr.create_group(str(path), zarr_format=version)
        assert expand_paths(path) == path
        assert expand_paths(str(tmp_path / f"?{version}")) == str(path)
    for name in ("one.zarr", "two.zarr"):
        ingest(TABLE, tmp_path / "stores" / name, y="y")
    stores = [str(tmp_path / "stores" / name) for name in ("one.zarr", "two.zarr")]
    assert expand_paths(tmp_path / "stores") == expand_paths(tmp_path / "stores/*.zarr") == stores


def test_hive_partitions_are_refused(tmp_path: Path) -> None:
    """Check folders such as year=2024: the column "year" is in no file.

    The files of a single partition are accepted, as a table without this column.
    """
    table = pa.table({"year": [2023, 2024], "a": [1.0, 2.0], "y": [0.0, 1.0]})
    partitioning = ds.partitioning(pa.schema([("year", pa.int64())]), flavor="hive")
    ds.write_dataset(table, tmp_path / "d", format="parquet", partitioning=partitioning)
    for pattern in ("", "*", "year=*/*", "**/*.parquet", "*/part-0.parquet"):
        with pytest.raises(DataError, match="a column that the files lack"):
            expand_paths(f"{tmp_path}/d/{pattern}")
    file_of_2024 = expand_paths(tmp_path / "d" / "year=2024" / "*.parquet")
    assert pq.ParquetFile(file_of_2024).read()["a"].to_pylist() == [2.0]


# -- patterns --------------------------------------------------------------------------------------

NAMES = st.lists(
    st.lists(st.sampled_from(["a", "b2", "b10", "x.csv", ".h", "[1]"]), min_size=1, max_size=3),
    min_size=1, max_size=8,
)  # fmt: skip
PATTERNS = st.lists(
    st.sampled_from(["*", "**", "a", "b*", "?", "[ab]*", "x.csv", ".*", "[!a]*"]),
    min_size=1, max_size=4,
)  # fmt: skip


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NAMES, PATTERNS)
def test_patterns_match_like_glob(
    tmp_path_factory: pytest.TempPathFactory, names: list[list[str]], parts: list[str]
) -> None:
    root = tmp_path_factory.mktemp("tree")
    for name in names:
        path = root.joinpath(*name[:-1], name[-1] + "-f.csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    pattern = f"{root}/{'/'.join(parts)}-f.csv"
    expected = {k for k in glob.glob(pattern, recursive=True) if os.path.isfile(k)}
    if not expected:
        if glob.has_magic(pattern):
            with pytest.raises(StoreNotFoundError, match="no file matches"):
                expand_paths(pattern)
        return
    files = expand_paths(pattern)
    files = [files] if isinstance(files, str) else files
    assert set(files) == expected
    assert len(files) == len(expected)


def test_pattern_files_are_in_natural_order(tmp_path: Path) -> None:
    """Check also that files that begin with _ match, and files in such folders do not."""
    names = ["a/p1.csv", "a/p2.csv", "a/p010.csv", "a/p10.csv", "a2/p1.csv", "a10/_p.csv", "b.csv"]
    write(tmp_path, *reversed(names), "a/_SUCCESS", "_temporary/c.csv")
    expected = [str(tmp_path / name) for name in names]
    assert expand_paths(tmp_path / "**" / "*.csv") == expected
    (tmp_path / "again").symlink_to(tmp_path)
    assert expand_paths(tmp_path / "**" / "*.csv") == expected


def test_pattern_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match=r"no file matches .*\*\.parquet"):
        expand_paths(tmp_path / "*.parquet")


def test_pattern_in_delta_table_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "t.parquet", "_delta_log/0.json")
    with pytest.raises(DataError, match="is a Delta table"):
        expand_paths(tmp_path / "*.parquet")


def test_existing_file_takes_precedence_over_pattern(tmp_path: Path) -> None:
    write(tmp_path, "x[1].csv", "x1.csv", "*.csv")
    for name in ("x[1].csv", "*.csv"):
        assert expand_paths(str(tmp_path / name)) == str(tmp_path / name)
    write(tmp_path / "d[1]", "p.csv")
    assert expand_paths(tmp_path / "d[1]") == str(tmp_path / "d[1]" / "p.csv")
    frame = TABLE.head(3)
    for other in (frame, frame.to_numpy(), [1, 2], [frame], iter([])):
        assert expand_paths(other) is other


def test_patterns_of_arrays_and_targets_are_paired(tmp_path: Path) -> None:
    X, y = TABLE[["a", "b", "c"]].to_numpy(), TABLE["y"].to_numpy()
    for k in range(13):
        np.save(tmp_path / f"X-{k}.npy", X[10 * k : 10 * k + 10])
        np.save(tmp_path / f"y-{k}.npy", y[10 * k : 10 * k + 10])
    ingest(tmp_path / "X-*.npy", tmp_path / "s", y=tmp_path / "y-*.npy")
    np.testing.assert_array_equal(np.hstack(read_in_order(tmp_path / "s")), TABLE.to_numpy())
    with pytest.raises(ConfigError, match="X has 13 files, but y has 3"):
        ingest(tmp_path / "X-*.npy", tmp_path / "t", y=tmp_path / "y-1?.npy")


# -- commands and object storage -------------------------------------------------------------------


def test_commands_accept_folders_and_patterns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table"
    path.mkdir()
    for k in range(13):
        TABLE[10 * k : 10 * k + 10].to_csv(path / f"{k}.csv", index=False)

    def run(*arguments: object) -> str:
        capsys.readouterr()
        code = main.run_command([str(word) for word in arguments])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    store, model = tmp_path / "s.zarr", tmp_path / "run"
    run("ingest", path, store, "--y", "y")
    arguments = ["--memory", "1 GiB", "--epochs", 1, "--set", "model.n_centers=20"]
    run("train", "--train", store, "--run-dir", model, *arguments)
    TABLE.to_csv(tmp_path / "all.csv", index=False)
    outputs = []
    for k, inputs in enumerate((path, path / "*.csv", tmp_path / "all.csv")):
        out = tmp_path / f"out-{k}.csv"
        run("predict", model, inputs, out, "--with-input")
        outputs.append(
            (out.read_bytes(), run("evaluate", model, inputs).split("\n")[-2].split()[1:])
        )
    assert outputs[0] == outputs[1] == outputs[2]
    append(path / "?.csv", store)
    appended = np.hstack(read_in_order(store))[N:]
    np.testing.assert_allclose(appended, TABLE.to_numpy()[:100], rtol=2e-7)  # float32


@pytest.mark.parametrize(
    ("inputs", "out", "refused"),
    [
        ("d", "d/out.csv", True),
        ("d", "d/out.zarr", True),
        ("d", "d/_out.csv", False),
        ("d", "e/out.csv", False),
        ("d/0.csv", "d/out.csv", False),
        ("d/*.csv", "d/out.csv", True),
        ("d/*.csv", "d/out.parquet", False),
        ("d/*.csv", "d/e/out.csv", False),
        ("**/*.csv", "d/e/out.csv", True),
    ],
)
def test_output_among_input_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: str, out: str, refused: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("d", "e"):
        (tmp_path / name).mkdir()
    TABLE.to_csv(tmp_path / "d" / "0.csv", index=False)
    if not refused:
        expand_paths(inputs, out_url=out)
        return
    for where in (inputs, [inputs], str(tmp_path / inputs)):
        with pytest.raises(ConfigError, match="lies among the files of"):
            expand_paths(where, out_url=out)


def test_s3_folders_and_patterns_equal_local_ones(
    s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    """Check the same names on S3 and on a disk; S3 also has an object for the folder "table/"."""
    names = ["table/part-2.csv", "table/part-10.csv", "table/_SUCCESS", "table/.crc", "x[1].csv"]
    names += ["d.parquet/part.0.parquet", "d.parquet/part.1.parquet", "g/zarr.json", "g/X/c/0"]
    names += ["deep/er/a.csv", "deep/er/b.csv", "mixed/a.csv", "mixed/b.parquet", "y/k=1/a.csv"]
    client = s3.client()
    for name in [*names, "table/"]:
        client.put_object(Bucket=bucket, Key=name, Body=b"a,y\n1,2\n" * (name[-1] != "/"))
        write(tmp_path, *([name] if name[-1] != "/" else []))
    options = s3.options()

    def found(name: str, root: str, options: Any = None) -> Any:
        try:
            answer = expand_paths(f"{root}/{name}", options)
        except (DataError, StoreNotFoundError) as error:
            return type(error)
        listed = answer if isinstance(answer, list) else [answer]
        return [file.removeprefix(f"{root}/") for file in listed]

    requested = [
        "table/",
        "d.parquet",
        "table/part-1*.csv",
        "x[1].csv",
        "table",
        "g",
        "**/[ab].csv",
    ]
    requested += ["deep/*/*.csv", "mixed", "y", "none*.csv", "*", ""]
    for name in requested:
        assert found(name, f"s3://{bucket}", options) == found(name, str(tmp_path)), name
    assert found("nothing.csv", f"s3://{bucket}", options) == [
        "nothing.csv"
    ]  # the reader of the file raises the error
    pattern = f"s3://{bucket}/table/part-*.csv"
    spec = ingest(pattern, tmp_path / "out", y="y", targets="values", input_options=options)
    assert [name for name, _ in spec.files] == [f"s3://{bucket}/{name}" for name in names[:2]]
