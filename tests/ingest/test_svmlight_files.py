"""Check that svmlight files are read as by scikit-learn, in pieces, or refused by line."""

from __future__ import annotations

import gzip
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.datasets import dump_svmlight_file, load_svmlight_file, load_svmlight_files

import streamkern
from streamkern.basics.errors import ConfigError, DataError
from streamkern.cli.main import run_command
from streamkern.ingest.formats import FileForm
from tests.ingest.read_arrays import open_input, read_arrays

pytestmark = pytest.mark.filterwarnings("ignore:the rows of .* have a qid")
RNG = np.random.default_rng(0)
MATRIX = sp.random_array((200, 30), density=0.2, format="csr", rng=RNG)
LABELS = RNG.choice([-1, 1], 200)


@pytest.mark.parametrize("zero_based", [False, True])
@pytest.mark.parametrize("suffix", ["svm", "libsvm", "svmlight", "svm.gz"])
def test_svmlight_rows_equal_scikit_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, zero_based: bool
) -> None:
    monkeypatch.setattr("streamkern.ingest.svmlight_files._PIECE_BYTES", 700)
    path = tmp_path / "a.svm"
    dump_svmlight_file(
        MATRIX,
        LABELS,
        str(path),
        zero_based=zero_based,
        comment="text",
        query_id=np.arange(200),
    )
    truth, labels = load_svmlight_file(str(path), n_features=30, zero_based=zero_based)
    target = tmp_path / f"b.{suffix}"
    text = path.read_bytes()
    target.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    bytes_of_7_rows = 7 * 30 * 8
    for block_bytes in (bytes_of_7_rows, 1 << 20):
        X, y = read_arrays(target, block_bytes=block_bytes)
        np.testing.assert_array_equal(X, truth.toarray())
        np.testing.assert_array_equal(y, labels)
        assert y.dtype == np.int64  # and so they are classes
    np.testing.assert_array_equal(read_arrays(target, start=83)[0], truth.toarray()[83:])


def test_svmlight_lines_are_parsed(tmp_path: Path) -> None:
    text = "# a comment\n+1 qid:3 1:2 3:-4.5e-1 # end\n\n-1 2:1e3\r\n0.5\n"
    (tmp_path / "a.txt").write_text(text)
    with ExitStack() as files:
        reader = open_input(tmp_path / "a.txt", files, form=FileForm("libsvm").normalise())
        (block,) = reader.blocks(0, 1 << 20)
    np.testing.assert_array_equal(block.X, [[2, 0, -0.45], [0, 1000, 0], [0, 0, 0]])
    np.testing.assert_array_equal(block.y, [1, -1, 0.5])


def test_number_of_features_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_text("1 1:2 3:4\n2 2:1\n")
    assert read_arrays(tmp_path / "a.svm")[0].shape == (2, 3)
    assert read_arrays(tmp_path / "a.svm", x=8)[0].shape == (2, 8)
    with pytest.raises(DataError, match="but 2 features were requested"):
        read_arrays(tmp_path / "a.svm", x=2)
    for x in (0, "X"):
        with pytest.raises(ConfigError, match="features of svmlight files have no names"):
            read_arrays(tmp_path / "a.svm", x=x)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,2 1:3", "has the labels 1,2"),
        ("1 3:1 2:1", "sorted"),
        ("1 2:1 2:1", "sorted"),
        ("1 2:x", "not a row of an svmlight file"),
        ("a 2:1", "not a row of an svmlight file"),
        ("1 2", "not a row of an svmlight file"),
        ("1 -3:1", "not a row of an svmlight file"),
        ("1 99999999999999999999:1", "feature number 99999999999999999999, .* number the feat"),
        ("1 qid:3 2:1 2147483648:1", "feature number 2147483648, and at most 2147483647 is read"),
        ("1 2:9e999 -2147483649:1", "not a row of an svmlight file"),
    ],
)
def test_invalid_line_is_refused_by_number(
    tmp_path: Path, line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that comments and blank lines count, also at the end of a piece of the file."""
    (tmp_path / "a.svm").write_text("# a\n\n" + "1 1:1\n" * 40 + line + "\n" + "2 1:1\n" * 30)
    for piece in (7, 100, 4 << 20):
        monkeypatch.setattr("streamkern.ingest.svmlight_files._PIECE_BYTES", piece)
        with pytest.raises(DataError, match=f"a.svm, line 43, .*{message}"):
            read_arrays(tmp_path / "a.svm")


def test_query_ids_and_labels_may_be_large(tmp_path: Path) -> None:
    large = 2**53 - 1
    (tmp_path / "a.svm").write_text(f"{large} qid:{2**63} 1:1\n-{large} qid:{2**63} 1:1\n")
    with pytest.warns(UserWarning, match="have a qid"):
        assert read_arrays(tmp_path / "a.svm")[1].ravel().tolist() == [large, -large]


def test_several_svmlight_files_share_feature_numbering(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_text("1 0:1 2:3\n0 2:4\n")
    (tmp_path / "b.svm").write_text("0 1:5\n1 3:6\n")  # from 0 as well: it lacks feature 0
    paths_of_files = [tmp_path / "a.svm", tmp_path / "b.svm"]
    expected = load_svmlight_files([str(path) for path in paths_of_files])
    for paths, order in ((paths_of_files, (0, 2)), (paths_of_files[::-1], (2, 0))):
        X, _ = read_arrays(paths)
        np.testing.assert_array_equal(X, np.vstack([expected[k].toarray() for k in order]))
    X, _ = read_arrays(paths_of_files, x=6)
    np.testing.assert_array_equal(X[:, :4], np.vstack([expected[k].toarray() for k in (0, 2)]))
    with pytest.raises(DataError, match="counted from 0, but 3 features"):
        read_arrays(paths_of_files, x=3)


def test_query_ids_are_ignored_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "q.svm").write_text("1 qid:3 1:2\n0 qid:4 1:5\n")
    with pytest.warns(
        UserWarning, match="have a qid, the query that they belong to; it is ignored"
    ):
        assert len(read_arrays(tmp_path / "q.svm")[0]) == 2


def test_model_of_arrays_needs_unambiguous_feature_numbering(
    tmp_path: Path,
) -> None:
    """Check which files show by themselves whether their feature numbers begin at 0 or at 1.

    A file has the number 0 only if they begin at 0, and the number 4 only if they begin at 1.
    """
    rows = np.round(np.random.default_rng(1).normal(size=(40, 4)), 3)
    model = streamkern.KernelRegressor(n_centers=9, epochs=1, run_dir=tmp_path / "run")
    model.fit(rows, rows[:, 0])
    path, out = tmp_path / "a.svm", tmp_path / "out.npy"
    # Columns that are 0 -> whether the file is read if the numbers begin at 0, and if at 1.
    are_read = {(): (True, True), (0,): (False, True), (3,): (True, False), (0, 3): (False, False)}
    for left_out, expected in are_read.items():
        reduced = rows.copy()
        reduced[:, list(left_out)] = 0
        for zero_based, is_read in zip((True, False), expected, strict=True):
            dump_svmlight_file(reduced, rows[:, 0], str(path), zero_based=zero_based)
            out.unlink(missing_ok=True)
            code = run_command(["predict", str(tmp_path / "run"), str(path), str(out), "--x", "4"])
            assert (code == 0) == is_read, (left_out, zero_based)
            assert not out.exists() or np.allclose(np.load(out), model.predict(reduced))
