"""Check how a notebook shows a store: its figures, foreign text as text, no request, no secret."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from streamkern.ingest.ingest import ingest
from streamkern.store.store import open_store
from tests.fault_proxy import FaultProxy
from tests.notebooks import shown_cells as cells
from tests.s3_server import S3Server

rng = np.random.default_rng(0)
X = rng.normal(size=(300, 2)).astype(np.float32)
LABELS = np.repeat(["<script>alert(1)</script>", "a&b\n", "plain"], [50, 100, 150])


def test_html_table_shows_store_figures_and_escapes_text(tmp_path: Path) -> None:
    frame = pd.DataFrame(X, columns=["<b>width</b>", "height"])
    ingest(frame, tmp_path / "s", y=LABELS, chunk_mb=800 / 2**20)
    store = open_store(tmp_path / "s")
    spec = store.spec
    assert cells(store) == {
        "store": str(tmp_path / "s"),
        "rows": "300",
        "features": "2 float32: <b>width</b>, height",
        "classes": (
            "3: <script>alert(1)</script> 50 (16.7%), a&b\\n 100 (33.3%), plain 150 (50.0%)"
        ),
        "weights": "none",
        "chunks": f"3 chunks of {spec.chunk_rows} rows, {100 * 8} bytes, codecs "
        + ", ".join(store.codec_names()),
        "size": f"{300 * (8 + spec.y_dtype.itemsize) / 1024:.3g} KiB decoded",  # type: ignore[union-attr]
    }
    assert "color" not in store._repr_html_()


def test_values_weights_and_many_columns_are_shown(tmp_path: Path) -> None:
    wide = rng.normal(size=(40, 30))
    frame = pd.DataFrame(wide, columns=[f"f{k}" for k in range(30)])
    ingest(frame, tmp_path / "s", y=wide[:, :2], sample_weight=np.ones(40))
    table_cells = cells(open_store(tmp_path / "s"))
    assert table_cells["features"].endswith(": " + ", ".join(f"f{k}" for k in range(12)) + ", ...")
    assert table_cells["targets"].startswith("2 values float")
    assert table_cells["weights"] == "sample weights"
    assert cells(open_store(tmp_path / "s", y=None))["targets"] == "none"


def test_dropped_rows_and_many_classes_are_shown(tmp_path: Path) -> None:
    y = np.arange(300.0)
    y[:4] = np.nan
    ingest(X, tmp_path / "gaps", y=y, drop_missing_targets=True)
    assert cells(open_store(tmp_path / "gaps"))["rows"] == "296; 4 without a target were left out"
    ingest(X, tmp_path / "many", y=np.arange(300) % 20)
    classes = cells(open_store(tmp_path / "many"))["classes"]
    assert classes.startswith("20: 0 15 (5.0%), ")
    assert classes.endswith(" 15 (5.0%), ...")
    assert classes.count("%") == 12


@pytest.mark.parametrize(
    "url",
    ["https://me:hidden@host/s", "s3://b/s?X-Amz-Signature=hidden", "https://b/s?token=hidden"],
)
def test_html_table_hides_credentials(tmp_path: Path, url: str) -> None:
    ingest(X, tmp_path / "s", y=LABELS)
    shown = open_store(tmp_path / "s")
    # `open_store` refuses most of these URLs, so that there is no store to show.
    shown.stored_chunks.url = url
    assert "hidden" not in shown._repr_html_()
    assert cells(shown)["store"].startswith(url.partition(":")[0])


@pytest.mark.slow
def test_html_table_makes_no_request(s3: S3Server, bucket: str) -> None:
    url = f"s3://{bucket}/s.zarr"
    ingest(X, url, y=LABELS, storage_options=s3.options())
    with FaultProxy(upstream=s3.endpoint) as proxy:
        store = open_store(url, storage_options=s3.options(proxy.endpoint))
        assert proxy.log()
        table_cells = cells(store)
        assert proxy.log() == []
    assert (table_cells["store"], table_cells["rows"]) == (url, "300")


@pytest.mark.slow
def test_notebook_shows_html_table(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel")
    client = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    ingest(X, tmp_path / "s", y=LABELS)
    source = "import streamkern\nstreamkern.open_store('s')"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    client.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    (output,) = [
        cell_output
        for cell_output in notebook.cells[0].outputs
        if cell_output.get("name") != "stderr"
    ]
    assert output["data"]["text/html"] == open_store(tmp_path / "s")._repr_html_()
    assert output["data"]["text/plain"].startswith("Store(")
