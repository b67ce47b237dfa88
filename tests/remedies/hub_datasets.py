"""Mistakes in data sets of Hugging Face, and in targets beside a table."""

from __future__ import annotations

from functools import partial as Do
from typing import Any

import numpy as np
import pytest

from tests.remedies import FRAME, Case, X, Y, classifier, ingested

COVERED = ("ingest/hub_datasets.py",)
NOT_TRIED = {"ingest/hub_datasets.py:WideColumn._pixels:1": "needs a machine without Pillow"}


def fit(data: Any, y: Any = "label", **given: Any) -> Any:
    return classifier().fit(data, y, **given)


def hub_cases() -> list[Case]:
    """Return all remedies of this module."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    from tests import hub_datasets

    library = hub_datasets.datasets
    valid, table, pictures = (
        hub_datasets.embeddings(),
        hub_datasets.numbers(),
        hub_datasets.pictures(),
    )
    splits = library.DatasetDict(train=valid)
    lists = library.List(library.Value("float32"))

    def of_lists(rows: Any) -> Any:
        described = hub_datasets.features(emb=lists)
        return hub_datasets.dataset(described, np.arange(len(rows)) % 3, emb=rows)

    grey = np.r_[hub_datasets.PIXELS[:9], hub_datasets.PIXELS[:9]]
    mixed = hub_datasets.pictures(
        [*hub_datasets.PIXELS[:9], *hub_datasets.PIXELS[:9, ..., 0]], np.arange(18) % 3
    )
    sizes = hub_datasets.pictures([*grey[:9], *grey[9:, :5]], np.arange(18) % 3)
    deep = hub_datasets.pictures(grey[..., 0].astype(np.uint16), np.arange(18) % 3)
    pixels = library.Array3D((6, 5, 1), "uint16")
    invalid = hub_datasets.dataset(
        hub_datasets.features(image=library.Image()), [0, 1], image=[{"bytes": b"no"}] * 2
    )
    open_shape = library.Array2D((None, 2), "float32")
    halves = hub_datasets.X.reshape(-1, 2, 2).tolist()
    codes = table.cast_column("label", library.Value("int64")).map(lambda row: {"label": 3})
    wrong = library.Dataset(codes.data, info=library.DatasetInfo(features=table.features))

    def changing(last: Any) -> Any:
        def rows() -> Any:
            yield from ({"a": k, "label": k % 2} for k in range(2000))
            yield {"a": last, "label": 0}

        return library.IterableDataset.from_generator(rows)

    resized = sizes.map(lambda row: {"image": row["image"].resize((5, 5))})
    stream = valid.to_iterable_dataset()
    two = valid.add_column("age", X[:, 0].tolist() * 2)
    nothing = stream.filter(lambda row: False)
    lazy = table.with_transform(lambda rows: rows)
    rgb = library.Image(mode="RGB")
    return [
        (r'give one of them, X."train"', Do(fit, splits), Do(fit, splits["train"])),
        (r"apply the transform with X.map.*or remove it with X.with_format.None", Do(fit, lazy),
         Do(fit, table.map(lambda row: row)), Do(fit, lazy.with_format(None))),
        ("write a store, streamkern.ingest_store", Do(fit, stream),
         lambda: (ingested(stream, y="label"), classifier().fit("made.zarr"))),
        (r"leave out other columns, X.remove_columns...age", Do(fit, two),
         Do(fit, two.remove_columns(["age"]))),
        ("name targets with y=", Do(fit, valid, None), Do(fit, valid, "label")),
        ("several targets as columns", Do(fit, table.add_column("e", hub_datasets.X.tolist()), "e"),
         Do(fit, table, "label")),
        (r"cast_column.'label', ClassLabel", Do(fit, wrong),
         Do(ingested, codes.cast_column("label", library.ClassLabel(names=list("abcd"))),
            y="label")),
        ("give rows with values of one type in each column", Do(ingested, changing(1.5), y="label"),
         Do(ingested, changing(15), y="label")),
        ("without rows; give a data set with rows",
         Do(ingested, nothing.map(lambda row: row), y="label"),
         Do(ingested, stream, y="label")),
        ("X has no rows; give at least one row", Do(ingested, valid.select([]), y="label"),
         Do(ingested, valid, y="label")),
        ("X has no rows; give at least one row", Do(ingested, table.select([]), y="label"),
         Do(ingested, table, y="label")),
        (r"row 2: column 'emb' holds 1 values where others hold 2; correct such rows",
         Do(fit, of_lists([[1.0, 2.0]] * 2 + [[1.0]])), Do(fit, of_lists([[1.0, 2.0]] * 3))),
        ("holds a null; correct", Do(fit, of_lists([[1.0, 2.0]] * 2 + [[1.0, None]])),
         Do(fit, of_lists([[1.0, 2.0]] * 3))),
        ("column 'emb' is null", Do(fit, of_lists([[1.0, 2.0]] * 2 + [None])),
         Do(fit, of_lists([[1.0, 2.0]] * 3))),
        ("give it without None",
         Do(fit, hub_datasets.dataset(hub_datasets.features(e=open_shape), e=halves)),
         Do(fit, hub_datasets.dataset(
             hub_datasets.features(e=library.Array2D((2, 2), "float32")), e=halves))),
        ("cannot be read .Unidentified.*leave them out", Do(fit, invalid), Do(fit, pictures)),
        (r'convert all, X.cast_column.*mode="RGB"', Do(fit, mixed),
         Do(fit, mixed.cast_column("image", rgb))),
        ("give their pixels as a column of Array3D", Do(fit, deep),
         Do(fit, hub_datasets.dataset(hub_datasets.features(image=pixels), np.arange(18) % 3,
                             image=grey[..., :1].astype(np.uint16).tolist()))),
        ("give images of one size, as image.resize makes them in X.map", Do(fit, sizes),
         Do(fit, resized)),
        ("add a column, and give its name as y=",
         Do(ingested, stream.remove_columns("label"), y=hub_datasets.CODES),
         Do(ingested, stream, y="label")),
        ("give one target for each row", Do(ingested, FRAME, y=Y[:9]), Do(ingested, FRAME, y=Y)),
        ("give one weight for each row", Do(ingested, FRAME, y=Y, sample_weight=Y[:9] ** 2),
         Do(ingested, FRAME, y=Y, sample_weight=Y**2)),
    ]  # fmt: skip


TABLES = (hub_cases,)
