"""Stores of data sets of Hugging Face hold the rows, classes and weights of the same arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern import ResumeMismatchError, append_store, ingest_store, open_store
from streamkern.basics.errors import DataError
from streamkern.ingest import ingest as ingest_module
from tests import hub
from tests.traced_memory import traced_memory

pytestmark = pytest.mark.usefixtures("one_blas_thread")

datasets = hub.datasets


def stored(place: Path, data: Any, **options: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return the spec, the rows and the labels or values of a store of `data`, unshuffled."""
    spec = ingest_store(data, place, shuffle=False, **{"y": "label"} | options)
    rows, y = open_store(place).read_rows(np.arange(spec.n_rows))[:2]
    return spec, rows, y if spec.classes is None else np.array(spec.classes)[y]


KINDS = {
    "numbers": (hub.numbers, hub.X),
    "lists": (hub.embeddings, hub.X),
    "lists of a length": (
        lambda: hub.dataset(
            hub.features(emb=datasets.List(datasets.Value("float32"), length=4)), emb=hub.X.tolist()
        ),
        hub.X,
    ),
    "arrays": (
        lambda: hub.dataset(
            hub.features(emb=datasets.Array2D((2, 2), "float32")),
            emb=hub.X.reshape(-1, 2, 2).tolist(),
        ),
        hub.X,
    ),
    "arrays of pixels": (
        lambda: hub.dataset(
            hub.features(image=datasets.Array3D((6, 5, 3), "uint8")), image=hub.PIXELS.tolist()
        ),
        hub.PIXELS,
    ),
    "images": (hub.pictures, hub.PIXELS),
    "grey images": (lambda: hub.pictures(hub.PIXELS[..., 0]), hub.PIXELS[..., :1]),
    "images, not decoded": (lambda: hub.pictures(decode=False), hub.PIXELS),
}


@pytest.mark.parametrize("streamed", [False, True], ids=["held", "streamed"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_names_of_classes_are_those_of_the_arrays(
    kind: str, streamed: bool, tmp_path: Path
) -> None:
    make, rows = KINDS[kind]
    data = make()
    chosen = np.random.default_rng(1).permutation(hub.N)[:50]
    taken = data.select(chosen)
    spec, found, labels = stored(
        tmp_path / "a.zarr", taken.to_iterable_dataset() if streamed else taken
    )
    np.testing.assert_array_equal(found, rows[chosen])
    assert found.dtype == rows.dtype
    np.testing.assert_array_equal(labels, hub.WORDS[chosen])
    assert spec.target_columns == ("label",)


def test_filtered_mapped_and_shuffled_rows_come_as_chosen(tmp_path: Path) -> None:
    data = hub.embeddings().filter(lambda row: row["label"] != 1).shuffle(seed=3)
    data = data.map(lambda row: {"emb": [2 * k for k in row["emb"]]})
    _, rows, labels = stored(tmp_path / "a.zarr", data)
    np.testing.assert_array_equal(rows, np.array(data["emb"], np.float32))
    names = data.features["label"].int2str(list(data["label"]))
    np.testing.assert_array_equal(labels, names)


def test_a_stream_without_features_takes_the_types_of_its_first_rows(tmp_path: Path) -> None:
    stream = hub.numbers().to_iterable_dataset().map(lambda row: {"twice": 2 * row["f0"]})
    assert stream.features is None
    spec, rows, labels = stored(tmp_path / "a.zarr", stream)
    assert spec.columns == ("f0", "f1", "f2", "f3", "twice")
    np.testing.assert_array_equal(rows[:, 4], 2 * hub.X[:, 0])
    np.testing.assert_array_equal(labels, hub.CODES.astype(str))  # no names are known

    def changing() -> Any:
        for k in range(3000):
            yield {"a": k if k < 2000 else "word", "label": k % 2}

    for memory in ("1 GiB", "1 MiB"):  # in one batch, and in two
        with pytest.raises(DataError, match="columns whose type changes"):
            stored(
                tmp_path / "b.zarr", datasets.IterableDataset.from_generator(changing),
                memory=memory, chunk_mb=0.01,
            )  # fmt: skip


def test_words_are_encoded_and_unknown_labels_are_missing(tmp_path: Path) -> None:
    kind = hub.features(a=datasets.Value("float32"), kind=datasets.ClassLabel(names=["u", "v"]))
    codes = np.where(np.arange(hub.N) < 2, -1, hub.CODES)
    data = hub.dataset(kind, codes, a=hub.X[:, 0], kind=np.arange(hub.N) % 2)
    with pytest.raises(DataError, match="the target of X, row 0 is missing"):
        stored(tmp_path / "a.zarr", data)
    spec, rows, labels = stored(tmp_path / "a.zarr", data, drop_missing_targets=True)
    assert spec.n_left_out == 2
    assert rows.shape == (hub.N - 2, 3)  # a number, and a feature for each of two words
    np.testing.assert_array_equal(labels, hub.WORDS[2:])


def test_weights_and_targets_are_columns_or_stand_beside(tmp_path: Path) -> None:
    data = hub.embeddings()
    plain, rows, _ = stored(tmp_path / "a.zarr", hub.X, y=hub.WORDS, sample_weight=hub.WEIGHTS)
    weighted = data.add_column("w", hub.WEIGHTS)
    named, others, _ = stored(tmp_path / "b.zarr", weighted, sample_weight="w")
    beside, same, _ = stored(
        tmp_path / "c.zarr", data.remove_columns("label"), y=hub.WORDS, sample_weight=hub.WEIGHTS
    )
    np.testing.assert_array_equal(rows, others)
    np.testing.assert_array_equal(rows, same)
    assert plain.weight_totals == named.weight_totals == beside.weight_totals
    assert named.weight_column == "w"
    _, rows, _ = stored(tmp_path / "d.zarr", weighted, x="emb")  # and "w" is left out
    np.testing.assert_array_equal(rows, hub.X)
    _, rows, _ = stored(tmp_path / "f.zarr", weighted, x=0, y=1, sample_weight=-1)
    np.testing.assert_array_equal(rows, hub.X)
    _, rows, _ = stored(tmp_path / "e.zarr", weighted, drop="w")
    np.testing.assert_array_equal(rows, hub.X)


def test_rows_are_appended_by_the_names_of_the_store(tmp_path: Path) -> None:
    for k, data in enumerate((hub.numbers(), hub.embeddings())):
        place = tmp_path / f"{k}.zarr"
        stored(place, data.select(range(80)))
        assert append_store(data.select(range(80, hub.N)), place).n_rows == hub.N
        rows = open_store(place).read_rows(np.arange(80, hub.N))[0]
        np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(hub.X[80:], axis=0))
    for column in ("X", "emb"):
        more = hub.numbers().add_column(column, hub.X.tolist())
        with pytest.raises(DataError, match="holds whole rows"):
            append_store(more, tmp_path / "0.zarr")


def test_an_unfinished_store_resumes_with_the_same_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, data = tmp_path / "a.zarr", hub.pictures()

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ingest_module, "fill_store", stop)
        with pytest.raises(KeyboardInterrupt):
            stored(place, data)
    with pytest.raises(ResumeMismatchError):
        stored(place, data.select(range(1, hub.N)))
    np.testing.assert_array_equal(stored(place, hub.pictures())[1], hub.PIXELS)


@pytest.mark.slow
def test_images_are_decoded_a_batch_at_a_time(tmp_path: Path) -> None:
    """Check that 600 images, 23 MB as rows, take no more memory than the rows of an array file."""
    rows = np.zeros((600, 112, 112, 3), np.uint8)
    codes = np.arange(600) % 3
    data = hub.pictures(rows, codes)
    np.save(tmp_path / "x.npy", rows)
    np.save(tmp_path / "y.npy", codes)
    del rows

    def peak(name: str, inputs: Any, y: Any) -> int:
        with traced_memory() as traced:
            ingest_store(inputs, tmp_path / name, y=y, memory="16 MiB", chunk_mb=0.5)
        most = traced.peak
        return most

    # Imports take long where memory is traced.
    ingest_store(data.select(range(9)), tmp_path / "first.zarr", y="label")
    of_array = peak("array.zarr", tmp_path / "x.npy", tmp_path / "y.npy")
    assert peak("images.zarr", data, "label") < 1.1 * of_array
