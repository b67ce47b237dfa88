"""Labels are the same values and types by whatever door they come, and doors agree on them."""

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
WHICH = np.arange(N) % 3
A = np.random.default_rng(0).normal(size=N) + 9 * WHICH
FAST: dict[str, Any] = {
    "n_centers": 9, "metric": "none", "kernel": "gaussian", "bandwidth": 2.0, "ridge": 1e-3,
    "epochs": 1, "threads": 1, "solver": "direct",
}  # fmt: skip
# Kind -> the three labels, and what a CSV, which has no types, makes of them.
LABELS: dict[str, tuple[list[Any], list[Any]]] = {
    "integers": ([0, 1, 2], [0, 1, 2]),
    "integers that sort otherwise as text": ([-3, 7, 10], [-3, 7, 10]),
    "truth": ([False, True, True], [False, True, True]),
    "words": (["ann", "bob", "10"], ["ann", "bob", "10"]),
    "text of numbers": (["7", "10", "3"], [7, 10, 3]),
    "text of truth": (["true", "false", "true"], [True, False, True]),
}


def table(labels: list[Any], rows: slice = slice(None)) -> pd.DataFrame:
    return pd.DataFrame({"a": A[rows], "y": [labels[k] for k in WHICH[rows]]})


def doors(frame: pd.DataFrame, place: Path) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Return calls that give the rows and targets of a table by each door."""
    csv, parquet = place / "t.csv", place / "t.parquet"
    frame.to_csv(csv, index=False)
    frame.to_parquet(parquet, index=False)

    def store(given: Any, y: Any) -> Any:
        sk.ingest_store(given, place / "s.zarr", y=y, targets="classes", overwrite=True)
        return place / "s.zarr", None

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
def test_labels_have_one_value_and_type_by_every_door(tmp_path: Path, kind: str) -> None:
    typed, untyped = LABELS[kind]
    frame = table(typed)
    given = doors(frame, tmp_path)
    models = {}
    for name, door in given.items():
        model = sk.KernelClassifier(**FAST).fit(*door())
        wanted = untyped if "csv" in name else typed
        assert model.classes_.tolist() == sorted(set(wanted)), name
        assert [type(k) for k in model.classes_.tolist()] == [type(wanted[0])] * len(set(wanted))
        assert model.predict(frame[["a"]]).tolist() == [wanted[k] for k in WHICH], name
        models[name] = model
    for name in ("frame", "csv", "store of csv"):
        model = models[name]
        model.save(tmp_path / name)
        loaded = sk.load(tmp_path / name)
        assert loaded.classes_.tolist() == model.classes_.tolist()
        for other, door in given.items():
            X, y = door()
            assert model.score(X, y) == 1.0, (name, other)
            assert sk.evaluate(loaded, X, y)["accuracy"] == 1.0, (name, other)


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("kind", LABELS)
def test_rows_of_some_classes_are_enough_to_judge_and_to_go_on(tmp_path: Path, kind: str) -> None:
    typed, _ = LABELS[kind]
    whole, some = tmp_path / "whole", tmp_path / "some"
    whole.mkdir(), some.mkdir()
    frame = table(typed)
    left = frame[frame["y"] == typed[1]]
    all_of_them, few = doors(frame, whole), doors(left, some)
    for name in ("arrays", "parquet", "csv", "store of csv"):
        model = sk.KernelClassifier(**FAST).fit(*all_of_them["frame"](), test=few[name]())
        assert model.report_["test_accuracy"] == 1.0, name
        assert model.score(*few[name]()) == 1.0, name
        if name != "arrays":  # which have no names
            online = sk.KernelClassifier(**FAST | {"solver": "block"})
            online.partial_fit(*all_of_them["csv"]())
            online.partial_fit(*few[name]())
            assert online.classes_.tolist() == sorted(set(LABELS[kind][1]))
        place, _ = all_of_them["store of a frame"]()
        sk.append_store(few[name]()[0], place, y="y" if "store" not in name else None) if (
            name != "arrays"
        ) else sk.append_store(left[["a"]], place, y=left["y"])
        group = zarr.open_group(place, mode="r")
        ids = group["y"][:][N:]
        classes = sk.open_store(place).spec.classes or ()
        assert {classes[k].lower() for k in ids} == {str(typed[1]).lower()}, name


def test_unknown_classes_are_refused_with_what_to_do(tmp_path: Path) -> None:
    model = sk.KernelClassifier(**FAST).fit(table(["a", "b", "c"]), "y")
    other, places = table(["a", "b", "d"]), (tmp_path / "whole", tmp_path / "left")
    for place in places:
        place.mkdir()
    left = doors(other[other["y"] != "d"], places[1])
    for name, door in doors(other, places[0]).items():
        with pytest.raises(sk.DataError, match="leave such rows out, or"):
            sk.evaluate(model, *door())
        assert sk.evaluate(model, *left[name]())["accuracy"] == 1.0, name


def test_answers_in_files_are_the_labels(tmp_path: Path) -> None:
    for kind, (typed, _) in LABELS.items():
        frame = table(typed)
        model = sk.KernelClassifier(**FAST).fit(frame, "y")
        wanted = model.predict(frame).tolist()
        for ending in (".npy", ".parquet", ".zarr"):
            out = tmp_path / f"{kind}{ending}".replace(" ", "")
            model.predict(frame, out=out)
            found: Any = np.load(out) if ending == ".npy" else None
            if ending == ".parquet":
                found = pd.read_parquet(out)["y"]
            if ending == ".zarr":
                found = zarr.open_group(out, mode="r")["labels"][:]
            assert found.tolist() == wanted, (kind, ending)


def test_names_without_types_are_integers_or_text_and_found_all_the_same() -> None:
    """Check stores and runs of earlier versions without types, in which booleans are 0 and 1."""
    assert labels_from_names(("0", "1", "10")).tolist() == [0, 1, 10]
    assert labels_from_names(("0", "1", "x")).tolist() == ["0", "1", "x"]
    for label, place in ((True, 1), (1, 1), (1.0, 1), ("1", 1), ("true", 1), ("01", 1), (2, None)):
        assert KnownClasses(("0", "1")).find(label) == place, label
