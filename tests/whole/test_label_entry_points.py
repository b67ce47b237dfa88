"""Check that labels keep value and type at every entry point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import zarr

import streamkern as sk
from streamkern.store.class_labels import KnownClasses, labels_from_names

pytestmark = [
    pytest.mark.filterwarnings("ignore:X does not have valid feature names"),
    pytest.mark.filterwarnings("ignore:X has feature names"),
]
N = 36
CLASS_IDS = np.arange(N) % 3
A = np.random.default_rng(0).normal(size=N) + 9 * CLASS_IDS
FAST: dict[str, Any] = {
    "n_centers": 9, "metric": "none", "kernel": "gaussian", "bandwidth": 2.0, "ridge": 1e-3,
    "epochs": 1, "threads": 1, "solver": "direct",
}  # fmt: skip
# Kind -> the three labels, and the labels as read from a CSV, which has no types.
LABELS: dict[str, tuple[list[Any], list[Any]]] = {
    "integers": ([0, 1, 2], [0, 1, 2]),
    "integers that sort otherwise as text": ([-3, 7, 10], [-3, 7, 10]),
    "truth": ([False, True, True], [False, True, True]),
    "words": (["ann", "bob", "10"], ["ann", "bob", "10"]),
    "text of numbers": (["7", "10", "3"], [7, 10, 3]),
    "text of truth": (["true", "false", "true"], [True, False, True]),
}


def labelled_table(labels: list[Any], rows: slice = slice(None)) -> pd.DataFrame:
    """Return rows of column a with the names of their classes."""
    return pd.DataFrame({"a": A[rows], "y": [labels[k] for k in CLASS_IDS[rows]]})


def entry_points_of(
    frame: pd.DataFrame, location: Path
) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Return calls that give the rows and targets of a table by each door."""
    csv, parquet = location / "t.csv", location / "t.parquet"
    frame.to_csv(csv, index=False)
    frame.to_parquet(parquet, index=False)

    def store(labels: Any, y: Any) -> Any:
        sk.ingest_store(labels, location / "s.zarr", y=y, targets="classes", overwrite=True)
        return location / "s.zarr", None

    return {
        "arrays": lambda: (frame[["a"]].to_numpy(), frame["y"].to_numpy()),
        "frame": lambda: (frame, "y"),
        "frame and series": lambda: (frame[["a"]], frame["y"]),
        "polars": lambda: (pl.from_pandas(frame), "y"),
        "parquet": lambda: (parquet, "y"),
        "csv": lambda: (csv, "y"),
        "store of arrays": lambda: store(frame[["a"]].to_numpy(), frame["y"].to_numpy()),
        "store of a frame": lambda: store(frame, "y"),
        "store of parquet": lambda: store(parquet, "y"),
        "store of csv": lambda: store(csv, "y"),
    }


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("kind", LABELS)
def test_labels_keep_value_and_type_at_every_entry_point(tmp_path: Path, kind: str) -> None:
    typed, untyped = LABELS[kind]
    frame = labelled_table(typed)
    entry_points = entry_points_of(frame, tmp_path)
    models = {}
    for name, entry_point in entry_points.items():
        model = sk.KernelClassifier(**FAST).fit(*entry_point())
        expected = untyped if "csv" in name else typed
        assert model.classes_.tolist() == sorted(set(expected)), name
        assert [type(k) for k in model.classes_.tolist()] == [type(expected[0])] * len(
            set(expected)
        )
        assert model.predict(frame[["a"]]).tolist() == [expected[k] for k in CLASS_IDS], name
        models[name] = model
    for name in ("frame", "csv", "store of csv"):
        model = models[name]
        model.save(tmp_path / name)
        loaded = sk.load(tmp_path / name)
        assert loaded.classes_.tolist() == model.classes_.tolist()
        for entry_name, entry_point in entry_points.items():
            X, y = entry_point()
            assert model.score(X, y) == 1.0, (name, entry_name)
            assert sk.evaluate(loaded, X, y)["accuracy"] == 1.0, (name, entry_name)


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("kind", LABELS)
def test_subset_of_classes_can_be_evaluated_and_continued(tmp_path: Path, kind: str) -> None:
    typed, _ = LABELS[kind]
    uninterrupted, some = tmp_path / "whole", tmp_path / "some"
    uninterrupted.mkdir(), some.mkdir()
    frame = labelled_table(typed)
    subset = frame[frame["y"] == typed[1]]
    all_of_them, few = entry_points_of(frame, uninterrupted), entry_points_of(subset, some)
    for name in ("arrays", "parquet", "csv", "store of csv"):
        model = sk.KernelClassifier(**FAST).fit(*all_of_them["frame"](), test=few[name]())
        assert model.report_["test_accuracy"] == 1.0, name
        assert model.score(*few[name]()) == 1.0, name
        if name != "arrays":  # which have no names
            online = sk.KernelClassifier(**FAST | {"solver": "block"})
            online.partial_fit(*all_of_them["csv"]())
            online.partial_fit(*few[name]())
            assert online.classes_.tolist() == sorted(set(LABELS[kind][1]))
        location, _ = all_of_them["store of a frame"]()
        sk.append_store(few[name]()[0], location, y="y" if "store" not in name else None) if (
            name != "arrays"
        ) else sk.append_store(subset[["a"]], location, y=subset["y"])
        group = zarr.open_group(location, mode="r")
        ids = group["y"][:][N:]
        classes = sk.open_store(location).spec.classes or ()
        assert {classes[k].lower() for k in ids} == {str(typed[1]).lower()}, name


def test_unknown_classes_are_refused_with_remedy(tmp_path: Path) -> None:
    model = sk.KernelClassifier(**FAST).fit(labelled_table(["a", "b", "c"]), "y")
    with_unknown, places = labelled_table(["a", "b", "d"]), (tmp_path / "whole", tmp_path / "left")
    for location in places:
        location.mkdir()
    known_models = entry_points_of(with_unknown[with_unknown["y"] != "d"], places[1])
    for name, entry_point in entry_points_of(with_unknown, places[0]).items():
        with pytest.raises(sk.DataError, match="leave such rows out, or"):
            sk.evaluate(model, *entry_point())
        assert sk.evaluate(model, *known_models[name]())["accuracy"] == 1.0, name


def test_predictions_in_files_are_labels(tmp_path: Path) -> None:
    for kind, (typed, _) in LABELS.items():
        frame = labelled_table(typed)
        model = sk.KernelClassifier(**FAST).fit(frame, "y")
        expected = model.predict(frame).tolist()
        for suffix in (".npy", ".parquet", ".zarr"):
            out = tmp_path / f"{kind}{suffix}".replace(" ", "")
            model.predict(frame, out=out)
            labels: Any = np.load(out) if suffix == ".npy" else None
            if suffix == ".parquet":
                labels = pd.read_parquet(out)["y"]
            if suffix == ".zarr":
                labels = zarr.open_group(out, mode="r")["labels"][:]
            assert labels.tolist() == expected, (kind, suffix)


@pytest.mark.parametrize(
    ("label", "location"),
    [
        (True, 1),
        (1, 1),
        (1.0, 1),
        ("1", 1),
        ("true", 1),
        ("01", 1),
        (2, None),
    ],
)
def test_label_is_found_among_untyped_class_names(label: Any, location: int | None) -> None:
    """Check stores and runs of earlier versions without types, in which booleans are 0 and 1."""
    assert KnownClasses(("0", "1")).find(label) == location


def test_untyped_class_names_are_integers_or_text() -> None:
    assert labels_from_names(("0", "1", "10")).tolist() == [0, 1, 10]
    assert labels_from_names(("0", "1", "x")).tolist() == ["0", "1", "x"]
