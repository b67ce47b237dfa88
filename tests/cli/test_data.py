"""Check that options of `ingest` take columns by their names."""

from __future__ import annotations

from pathlib import Path

from streamkern.store.store import open_store
from tests.runs import Printed, Run


def test_numbers_in_lists_of_columns_are_names(tmp_path: Path, printed: Printed) -> None:
    """Check that "007" is the name of a column, and not the number 7."""
    rows = "".join(f"{k},{k % 3},{-k},{k}\n" for k in range(20))
    (tmp_path / "rows.csv").write_text(f"a,007,1_0,y\n{rows}")
    options = (
        "--header",
        "--drop",
        "1_0",
        "--categorical",
        "007",
        "--y",
        "y",
        "--targets",
        "values",
    )
    printed("ingest", tmp_path / "rows.csv", tmp_path / "s.zarr", *options)
    encoder = open_store(tmp_path / "s.zarr").spec.encoder
    assert encoder is not None
    kinds = {column["name"]: column["kind"] for column in encoder["columns"]}
    assert [*kinds] == ["a", "007"]
    assert kinds["a"] == "number" != kinds["007"]


def test_error_of_empty_list_names_its_option(tmp_path: Path, run: Run) -> None:
    (tmp_path / "rows.csv").write_text("a,y\n1,2\n3,4\n")
    code, _, err = run("ingest", tmp_path / "rows.csv", tmp_path / "s.zarr", "--drop", "")
    assert code == 2
    assert "--drop is empty; name columns" in err
