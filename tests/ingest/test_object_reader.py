"""Check that stores of Hugging Face data sets hold the rows and classes of equal arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern import ResumeMismatchError, append_store, ingest_store, open_store
from streamkern.basics.errors import DataError
from streamkern.ingest import ingest as ingest_module
from tests import hub_datasets
from tests.traced_memory import traced_memory

pytestmark = pytest.mark.usefixtures("one_blas_thread")

datasets = hub_datasets.datasets


def ingest_and_read(
    location: Path, data: Any, **options: Any
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return the spec, the rows and the labels or values of a store of `data`, unshuffled."""
    spec = ingest_store(data, location, shuffle=False, **{"y": "label"} | options)
    rows, y = open_store(location).read_rows(np.arange(spec.n_rows))[:2]
    return spec, rows, y if spec.classes is None else np.array(spec.classes)[y]


KINDS = {
    "numbers": (hub_datasets.numbers, hub_datasets.X),
    "lists": (hub_datasets.embeddings, hub_datasets.X),
    "lists of a length": (
        lambda: hub_datasets.dataset(
            hub_datasets.features(emb=datasets.List(datasets.Value("float32"), length=4)),
            emb=hub_datasets.X.tolist(),
        ),
        hub_datasets.X,
    ),
    "arrays": (
        lambda: hub_datasets.dataset(
            hub_datasets.features(emb=datasets.Array2D((2, 2), "float32")),
            emb=hub_datasets.X.reshape(-1, 2, 2).tolist(),
        ),
        hub_datasets.X,
    ),
    "arrays of pixels": (
        lambda: hub_datasets.dataset(
            hub_datasets.features(image=datasets.Array3D((6, 5, 3), "uint8")),
            image=hub_datasets.PIXELS.tolist(),
        ),
        hub_datasets.PIXELS,
    ),
    "images": (hub_datasets.pictures, hub_datasets.PIXELS),
    "grey images": (
        lambda: hub_datasets.pictures(hub_datasets.PIXELS[..., 0]),
        hub_datasets.PIXELS[..., :1],
    ),
    "images, not decoded": (lambda: hub_datasets.pictures(decode=False), hub_datasets.PIXELS),
}


@pytest.mark.parametrize("streamed", [False, True], ids=["held", "streamed"])
@pytest.mark.parametrize("kind", KINDS)
def test_hub_rows_and_classes_equal_arrays(kind: str, streamed: bool, tmp_path: Path) -> None:
    make, rows = KINDS[kind]
    data = make()
    chosen = np.random.default_rng(1).permutation(hub_datasets.N)[:50]
    selected = data.select(chosen)
    spec, actual, labels = ingest_and_read(
        tmp_path / "a.zarr", selected.to_iterable_dataset() if streamed else selected
    )
    np.testing.assert_array_equal(actual, rows[chosen])
    assert actual.dtype == rows.dtype
    np.testing.assert_array_equal(labels, hub_datasets.WORDS[chosen])
    assert spec.target_columns == ("label",)


def test_filtered_mapped_and_shuffled_rows_are_kept(tmp_path: Path) -> None:
    data = hub_datasets.embeddings().filter(lambda row: row["label"] != 1).shuffle(seed=3)
    data = data.map(lambda row: {"emb": [2 * k for k in row["emb"]]})
    _, rows, labels = ingest_and_read(tmp_path / "a.zarr", data)
    np.testing.assert_array_equal(rows, np.array(data["emb"], np.float32))
    names = data.features["label"].int2str(list(data["label"]))
    np.testing.assert_array_equal(labels, names)


def test_stream_without_features_takes_types_of_first_rows(tmp_path: Path) -> None:
    stream = hub_datasets.numbers().to_iterable_dataset().map(lambda row: {"twice": 2 * row["f0"]})
    assert stream.features is None
    spec, rows, labels = ingest_and_read(tmp_path / "a.zarr", stream)
    assert spec.columns == ("f0", "f1", "f2", "f3", "twice")
    np.testing.assert_array_equal(rows[:, 4], 2 * hub_datasets.X[:, 0])
    np.testing.assert_array_equal(labels, hub_datasets.CODES.astype(str))  # no names are known

    def changing() -> Any:
        for k in range(3000):
            yield {"a": k if k < 2000 else "word", "label": k % 2}

    for memory in ("1 GiB", "1 MiB"):  # in one batch, and in two
        with pytest.raises(DataError, match="columns whose type changes"):
            ingest_and_read(
                tmp_path / "b.zarr", datasets.IterableDataset.from_generator(changing),
                memory=memory, chunk_mb=0.01,
            )  # fmt: skip


def test_hub_words_are_encoded_and_unknown_labels_missing(tmp_path: Path) -> None:
    kind = hub_datasets.features(
        a=datasets.Value("float32"), kind=datasets.ClassLabel(names=["u", "v"])
    )
    codes = np.where(np.arange(hub_datasets.N) < 2, -1, hub_datasets.CODES)
    data = hub_datasets.dataset(
        kind, codes, a=hub_datasets.X[:, 0], kind=np.arange(hub_datasets.N) % 2
    )
    with pytest.raises(DataError, match="the target of X, row 0 is missing"):
        ingest_and_read(tmp_path / "a.zarr", data)
    spec, rows, labels = ingest_and_read(tmp_path / "a.zarr", data, drop_missing_targets=True)
    assert spec.n_left_out == 2
    assert rows.shape == (hub_datasets.N - 2, 3)  # a number, and a feature for each of two words
    np.testing.assert_array_equal(labels, hub_datasets.WORDS[2:])


def test_hub_weights_and_targets_are_columns_or_arrays(tmp_path: Path) -> None:
    data = hub_datasets.embeddings()
    plain, rows, _ = ingest_and_read(
        tmp_path / "a.zarr",
        hub_datasets.X,
        y=hub_datasets.WORDS,
        sample_weight=hub_datasets.WEIGHTS,
    )
    weighted = data.add_column("w", hub_datasets.WEIGHTS)
    named, others, _ = ingest_and_read(tmp_path / "b.zarr", weighted, sample_weight="w")
    separate_arrays, equal_model, _ = ingest_and_read(
        tmp_path / "c.zarr",
        data.remove_columns("label"),
        y=hub_datasets.WORDS,
        sample_weight=hub_datasets.WEIGHTS,
    )
    np.testing.assert_array_equal(rows, others)
    np.testing.assert_array_equal(rows, equal_model)
    assert plain.weight_totals == named.weight_totals == separate_arrays.weight_totals
    assert named.weight_column == "w"
    _, rows, _ = ingest_and_read(tmp_path / "d.zarr", weighted, x="emb")  # and "w" is left out
    np.testing.assert_array_equal(rows, hub_datasets.X)
    _, rows, _ = ingest_and_read(tmp_path / "f.zarr", weighted, x=0, y=1, sample_weight=-1)
    np.testing.assert_array_equal(rows, hub_datasets.X)
    _, rows, _ = ingest_and_read(tmp_path / "e.zarr", weighted, drop="w")
    np.testing.assert_array_equal(rows, hub_datasets.X)


def test_hub_rows_are_appended_by_column_names(tmp_path: Path) -> None:
    for k, data in enumerate((hub_datasets.numbers(), hub_datasets.embeddings())):
        path = tmp_path / f"{k}.zarr"
        ingest_and_read(path, data.select(range(80)))
        assert append_store(data.select(range(80, hub_datasets.N)), path).n_rows == hub_datasets.N
        rows = open_store(path).read_rows(np.arange(80, hub_datasets.N))[0]
        np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(hub_datasets.X[80:], axis=0))
    for column in ("X", "emb"):
        more = hub_datasets.numbers().add_column(column, hub_datasets.X.tolist())
        with pytest.raises(DataError, match="holds whole rows"):
            append_store(more, tmp_path / "0.zarr")


def test_unfinished_hub_store_resumes_with_same_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, data = tmp_path / "a.zarr", hub_datasets.pictures()

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ingest_module, "fill_store", stop)
        with pytest.raises(KeyboardInterrupt):
            ingest_and_read(location, data)
    with pytest.raises(ResumeMismatchError):
        ingest_and_read(location, data.select(range(1, hub_datasets.N)))
    np.testing.assert_array_equal(
        ingest_and_read(location, hub_datasets.pictures())[1], hub_datasets.PIXELS
    )


@pytest.mark.slow
def test_images_are_decoded_batchwise(tmp_path: Path) -> None:
    """Check that 600 images, 23 MB as rows, take no more memory than the rows of an array file."""
    rows = np.zeros((600, 112, 112, 3), np.uint8)
    codes = np.arange(600) % 3
    data = hub_datasets.pictures(rows, codes)
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
