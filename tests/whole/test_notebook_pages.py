"""Tables that a notebook shows, in a browser: within the window, and not blank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

import streamkern as sk
from tests.browser import COMMAND, needed_widths, open_page

N = 300
PAGE = "<!DOCTYPE html><meta charset='utf-8'><title>notebook</title><body>{}</body>"


@pytest.mark.skipif(COMMAND is None, reason="needs chromium")
@pytest.mark.slow
def test_tables_are_legible_at_both_widths(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.standard_normal((N, 12)), columns=[f"column {k}" for k in range(12)])
    table["word"] = rng.choice(["red", "green", "blue"], N)
    y = table["column 0"] ** 2
    sk.ingest_store(table, tmp_path / "s.zarr", y=y)
    store = sk.open_store(tmp_path / "s.zarr")
    run = {"run_dir": str(tmp_path / "run")}
    model = {"n_centers": 40, "metric": "none"}
    result = sk.train_model(
        {"data": {"train": str(tmp_path / "s.zarr")}, "model": model, "run": run}
    )
    shown = {"store": store, "result": result, "model": result.model}
    pages = []
    for name, each in shown.items():
        (tmp_path / f"{name}.html").write_text(PAGE.format(each._repr_html_()))
        pages.append(tmp_path / f"{name}.html")
    result.model.backend.close()
    for width in (400, 1280):
        assert needed_widths(tmp_path, [(page, width) for page in pages]) == [width] * len(pages)
    for page in pages:
        assert open_page(page, tmp_path / "picture.png", width=400) == []
        pixels = imread(tmp_path / "picture.png")[:, :, :3]
        assert len(np.unique(pixels[::2, ::2].reshape(-1, 3), axis=0)) > 10  # text, smoothed
