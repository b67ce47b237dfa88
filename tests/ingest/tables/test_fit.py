"""Compare the fitted encoder with scikit-learn, for blocks of any size, and check refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.compose import make_column_transformer
from sklearn.feature_extraction import FeatureHasher
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler, TargetEncoder

from streamkern.basics.errors import DataError
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.tables import words as words_module
from streamkern.ingest.tables.encoder import Encoder, FittedEncoder, UnknownWords
from streamkern.ingest.tables.fit import fit
from streamkern.ingest.tables.scan import ColumnDeclarations
from streamkern.ingest.tables.words import N_FOLDS, row_folds
from streamkern.ingest.targets import TargetConverter

N = 400
NOTHING = ColumnDeclarations()


def example_table(seed: int = 0) -> pd.DataFrame:
    """Return N rows of numbers, words, dates and booleans; some cells are missing."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.integers(18, 90, N).astype(float),
            "city": rng.choice(["Rome", "Oslo", "New York, NY"], N),
            "shop": [f"s{k}" for k in rng.integers(0, 60, N)],
            "since": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, N), "D"),
            "member": rng.random(N) < 0.3,
        }
    )
    frame.loc[rng.random(N) < 0.1, "age"] = np.nan
    frame.loc[rng.random(N) < 0.1, "city"] = None
    frame.loc[rng.random(N) < 0.1, "since"] = pd.NaT
    return frame


def random_targets(seed: int = 0) -> np.ndarray:
    """Return N standard normal targets."""
    return np.random.default_rng(seed + 1).normal(size=N)


def fit_table(
    frame: Any, y: Any, step: int = N, declared: ColumnDeclarations = NOTHING, targets: str = "auto"
) -> FittedEncoder:
    """Return the encoder fitted to a table that is read in blocks of `step` rows."""
    arrow = frame if isinstance(frame, pa.Table) else pa.table(frame)
    y = y[: len(arrow)]

    def blocks(start: int, _block_bytes: int) -> Iterator[RawBlock]:
        for at in range(start, len(arrow), step):
            yield RawBlock(arrow[at : at + step], y[at : at + step], "t.csv", at)

    reader = SimpleNamespace(blocks=blocks, n_rows=len(arrow), has_types=False)
    return fit(reader, lambda first: TargetConverter(first, targets), declared, ("",), 5, 1)


def encode(encoder: Encoder, frame: Any) -> np.ndarray:
    """Return the features of a table as float32."""
    return encoder.encode(frame if isinstance(frame, pa.Table) else pa.table(frame), "t.csv", 0)


def test_encoded_numbers_and_words_equal_scikit_learn() -> None:
    frame = example_table()[["age", "city"]]
    encoder = fit_table(frame, random_targets()).encoder
    numbers = make_pipeline(SimpleImputer(add_indicator=True))
    words = OneHotEncoder(sparse_output=False)
    transformer = make_column_transformer((numbers, ["age"]), (words, ["city"]))
    expected = transformer.fit_transform(frame)
    present_values = frame["age"].dropna()
    expected[:, 0] = (expected[:, 0] - present_values.mean()) / present_values.std(ddof=0)
    actual = encode(encoder, frame)
    assert encoder.features == (
        "age", "age is missing", "city=New York, NY", "city=Oslo", "city=Rome", "city is missing",
    )  # fmt: skip
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_date_is_encoded_as_days_and_cycles() -> None:
    frame = example_table()[["since"]]
    encoder = fit_table(frame, random_targets()).encoder
    days = (frame["since"] - pd.Timestamp(0)) / pd.Timedelta(days=1)
    expected = [((days - days.mean()) / days.std(ddof=0)).fillna(0)]
    for length in (365.2425, 7):
        expected += [np.sin(2 * np.pi * days / length), np.cos(2 * np.pi * days / length)]
    expected += [frame["since"].isna()]
    actual = encode(encoder, frame)
    np.testing.assert_allclose(
        actual, np.nan_to_num(np.stack(expected, axis=1).astype(float)), atol=1e-5
    )
    assert encoder.features[1:3] == ("since year sin", "since year cos")


def test_cycles_need_two_periods() -> None:
    def features(*texts: str) -> tuple[str, ...]:
        return fit_table(pa.table({"t": list(texts)}), np.arange(len(texts)) / 3).encoder.features

    assert features("2024-01-01", "2024-01-10") == ("t",)
    assert features("2024-01-01", "2024-01-16")[1:] == ("t week sin", "t week cos")
    hours = features("2024-01-01 01:00", "2024-01-04 02:00")
    assert hours[1:] == ("t day sin", "t day cos")


def test_equal_times_of_day_have_equal_features() -> None:
    times = pd.Timestamp("2013-01-01") + pd.to_timedelta(np.arange(8 * 365) * 3, "h")
    frame = pd.DataFrame({"t": times.tz_localize("UTC")})
    sine, cosine = encode(fit_table(frame, np.arange(len(frame)) / 3).encoder, frame)[:, -2:].T
    assert set(sine) == {-1, -np.float32(np.sqrt(0.5)), 0, np.float32(np.sqrt(0.5)), 1}
    assert set(cosine) == set(sine)


@pytest.mark.parametrize("classes", [None, 2, 3])
def test_target_encoding_equals_scikit_learn(classes: int | None) -> None:
    frame = example_table()[["shop"]]
    y = random_targets() if classes is None else np.arange(N) * 7919 % 101 % classes
    actual = fit_table(frame, y)
    other = TargetEncoder(smooth="auto").fit(frame, y)
    full = StandardScaler().fit(other.transform(frame))
    np.testing.assert_allclose(
        encode(actual.encoder, frame), full.transform(other.transform(frame)), atol=2e-6
    )
    # Rows that are trained on: by the others of the folds alone.
    trained = actual.encode(pa.table(frame), "t.csv", 0, 0)
    folds = row_folds(5, 0, N)
    for fold in range(N_FOLDS):
        mine = folds == fold
        apart = TargetEncoder(smooth="auto").fit(frame[~mine], y[~mine])
        np.testing.assert_allclose(
            trained[mine], full.transform(apart.transform(frame[mine])), atol=2e-6
        )


def test_target_encoding_excludes_own_target() -> None:
    frame, y = example_table()[["shop"]], random_targets()
    before = fit_table(frame, y).encode(pa.table(frame), "t.csv", 0, 0)
    y = y.copy()
    y[17] += 5
    after = fit_table(frame, y)
    code = after.encoder.codes[0]
    raw = before[17] * 1.0
    scaled = after.encode(pa.table(frame), "t.csv", 0, 0)[17]
    # In the units of the targets: the standardisation is computed from all rows, and changes.
    own = fit_table(frame, random_targets()).encoder.codes[0]
    np.testing.assert_allclose(scaled * code.std + code.mean, raw * own.std + own.mean, atol=1e-6)  # type: ignore[attr-defined]


def test_feature_hashing_equals_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_module, "MAX_WORDS", 50)
    frame = example_table()[["shop"]]
    encoder = fit_table(frame, random_targets()).encoder
    other = FeatureHasher(32, input_type="string").transform([[k] for k in frame["shop"]])
    np.testing.assert_array_equal(encode(encoder, frame), other.toarray())
    assert "hashed" in encoder.lines()[0]


@settings(max_examples=15)
@given(step=st.integers(1, N))
def test_encoding_does_not_depend_on_blocks(step: int) -> None:
    frame, y = example_table(), random_targets()
    actual, full = fit_table(frame, y, step), fit_table(frame, y)
    assert actual.encoder.digest == full.encoder.digest
    arrow = pa.table(frame)
    parts = [actual.encode(arrow[k : k + step], "t", k, k) for k in range(0, N, step)]
    np.testing.assert_array_equal(np.concatenate(parts), full.encode(arrow, "t", 0, 0))


def test_encoder_roundtrips_through_json() -> None:
    encoder = fit_table(example_table(), random_targets()).encoder
    restored = Encoder.from_json(json.loads(json.dumps(encoder.json())), "here")
    assert restored.digest == encoder.digest
    np.testing.assert_array_equal(
        encode(restored, example_table(3)), encode(encoder, example_table(3))
    )
    with pytest.raises(DataError, match="version 2"):
        Encoder.from_json(encoder.json() | {"version": 2}, "here")


def test_text_and_typed_cells_are_encoded_equally() -> None:
    frame = example_table()
    text = frame.assign(since=frame["since"].dt.strftime("%Y-%m-%d")).astype(object)
    text = text.where(frame.notna(), None)
    cells = {name: [None if k is None else str(k) for k in text[name]] for name in frame}
    declared = ColumnDeclarations(numeric=("age",))
    typed, read = (
        fit_table(frame, random_targets(), declared=declared),
        fit_table(pa.table(cells), random_targets(), declared=declared),
    )
    assert typed.encoder.digest == read.encoder.digest
    np.testing.assert_array_equal(
        encode(typed.encoder, frame), encode(read.encoder, pa.table(cells))
    )


def test_unseen_and_missing_cells_are_encoded() -> None:
    frame = example_table().assign(member=True)
    frame["city"], frame["age"] = frame["city"].fillna("Rome"), frame["age"].fillna(30.0)
    encoder = fit_table(frame, random_targets()).encoder
    new = frame.head(2).copy()
    new["shop"], new["city"], new["age"] = ["nowhere", None], ["Bergen", None], [np.nan, np.nan]
    actual = dict(zip(encoder.features, encode(encoder, new).T.tolist(), strict=True))
    assert [actual[f"city={k}"] for k in ("New York, NY", "Oslo", "Rome")] == [[0, 0]] * 3
    assert actual["age"] == [0, 0]
    shops = fit_table(frame, random_targets()).encoder.codes[2]
    mean = (random_targets().mean() - random_targets()[0] - shops.mean[0]) / shops.std[0]  # type: ignore[attr-defined]
    np.testing.assert_allclose(actual["shop by target"], mean, rtol=1e-5)


def test_feature_names_are_unique() -> None:
    arrow = pa.table({"a": ["x", "y", None], "a=x": [1.0, 2.0, 4.0]})
    assert fit_table(arrow, random_targets()).encoder.features == (
        "a=x",
        "a=y",
        "a is missing",
        "a=x_",
    )


def test_infinite_constant_and_empty_columns_are_encoded() -> None:
    arrow = pa.table({"a": [1.0, 1.0], "b": [None, None], "c": [1, 2]})
    encoder = fit_table(arrow, random_targets()).encoder
    assert (encoder.columns, encoder.dropped) == (("a", "c"), ("b",))
    assert encode(encoder, arrow)[:, 0].tolist() == [0, 0]
    for cells in ([1.0, np.inf], ["1", "1e999"]):
        with pytest.raises(DataError, match=r"t\.csv, row 1, column 'a' is 'inf', which is inf"):
            fit_table(pa.table({"a": cells}), random_targets())


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["1", "2", "3+"], r"'a' mixes numbers \(1 in row 0\) and words \('3\+' in row 2\)"),
        (["1/2/2024", "3/2/2024"], r"dates like '1/2/2024'.*\(a=%d/%m/%Y, for example\)"),
        (["n/a", "?", "1", "2"], r"'a' mixes numbers \(1 in row 2\) and words \('n/a' in row 0\)"),
        (["5", "1,000", "1,200"], r"mixes numbers .*'1,000' in row 1, a number or date with"),
        (["5", "2024-01-31", "2023-01-31"], r"mixes numbers \(5 in row 0\) and words"),
        (
            ["1,5", "20,25"],
            "numbers like '1,5', .* decimal comma.*: write them with",
        ),
        (
            ["1,000", "€ 3", "4 %"],
            "numbers like '1,000', .*: write them with a point",
        ),
        (
            ["2024-02-28", "unknown"] * 9,
            r"mixes dates \(2024-02-28 in row 0\) and words \('unknown'",
        ),
        (["2024-02-28", "2024-02-30"], "holds dates, of which '2024-02-30' in row 1 is none"),
        ([[1], [2]], "list<.*>, which is not a cell of a table"),
    ],
)
def test_ambiguous_column_is_refused_with_remedy(cells: list[Any], message: str) -> None:
    arrow = pa.table({"a": cells, "b": list(range(len(cells)))})
    with pytest.raises(DataError, match=r"it is not clear what to do with a column of t\.csv: .*"):
        fit_table(arrow, random_targets())
    for step in (1, 2, N):  # in whatever blocks
        with pytest.raises(DataError, match=message):
            fit_table(arrow, random_targets(), step)
    if isinstance(cells[0], str):
        declared = ColumnDeclarations(categorical=("a",))
        assert len(fit_table(arrow, random_targets(), declared=declared).encoder.codes) == 2


def test_all_ambiguous_columns_are_reported_at_once() -> None:
    arrow = pa.table({"a": ["1", "x"], "b": ["2", "3"], "c": ["1/2/2024", "3/4/2024"]})
    with pytest.raises(DataError, match=r"2 columns of t\.csv: 'a' mixes .*; 'c' holds dates"):
        fit_table(arrow, random_targets())
    declared = ColumnDeclarations(categorical=("a",), dates={"c": "%d/%m/%Y"})
    codes = fit_table(arrow, random_targets(), declared=declared).encoder.codes
    assert [code.kind for code in codes] == ["one-hot", "number", "date"]


def test_of_many_ambiguous_columns_the_last_are_named_only() -> None:
    arrow = pa.table({f"a{k}": ["1", "?"] for k in range(40)} | {"b": [1, 2]})
    with pytest.raises(DataError, match=r"40 columns of t\.csv: 'a0' mixes") as caught:
        fit_table(arrow, random_targets())
    message = str(caught.value)
    assert message.count("mixes") == 6
    assert "; and 34 more: 'a6', 'a7', " in message
    assert len(message) < 1200


@pytest.mark.parametrize("step", [1, 2, N])
def test_numbers_among_more_different_words_are_words(step: int) -> None:
    cells = ["f", "4", "r", "4", None, "f", "4", "4"]
    arrow = pa.table({"drive": cells, "b": list(range(8))})
    with pytest.warns(UserWarning, match=r"'drive' has numbers \(4\) and words \('f'\), and all"):
        fitted = fit_table(arrow, random_targets(), step)
    desired = [[cell == word for word in ("4", "f", "r")] for cell in cells]
    features = encode(fitted.encoder, arrow)
    assert fitted.encoder.features[:4] == ("drive=4", "drive=f", "drive=r", "drive is missing")
    np.testing.assert_array_equal(features[:, :3] > 0, desired)
    declared = ColumnDeclarations(categorical=("drive",))
    as_declared = fit_table(arrow, random_targets(), step, declared=declared)
    assert fitted.encoder.digest == as_declared.encoder.digest


TICKETS = [f"{k % 70 + 100}" if k % 3 else f"{'A/5' if k % 2 else 'PC'} {k % 40}" for k in range(N)]


@pytest.mark.parametrize(
    ("change", "is_text"),
    [
        (lambda cell: cell, True),
        (lambda cell: cell.replace("A/5", "PC"), False),  # one prefix, as a unit is
        (lambda cell: "unknown" if " " in cell else cell, False),
        (lambda cell: cell if " " in cell else cell + ".5", False),
    ],
    ids=["codes", "one prefix", "words", "fractions"],
)
def test_integers_among_codes_are_words(change: Any, is_text: bool) -> None:
    arrow = pa.table({"ticket": list(map(change, TICKETS)), "b": list(range(N))})
    if is_text:
        with pytest.warns(UserWarning, match="all are taken as words"):
            assert fit_table(arrow, random_targets()).encoder.codes[0].kind == "target means"
        return
    with pytest.raises(DataError, match="'ticket' mixes numbers"):
        fit_table(arrow, random_targets())


NUMBERS_WITH_WORDS = {
    "marker": ["unknown" if k % 5 < 3 else f"{k}.5" for k in range(2000)],
    "grouped digits": [f"{k}" if k < 1000 else f"{k:,}" for k in range(3000)],
    "errors": [
        f"{'Error' if k % 3 else 'E'} {k % 8}" if k % 20 == 0 else str(k) for k in range(2000)
    ],
    "units": [str(k % 20) if k < 60 else f"{k} kg" for k in range(90)],
}


@pytest.mark.parametrize("case", NUMBERS_WITH_WORDS)
def test_words_that_are_no_categories_are_refused(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words_module, "MAX_WORDS", 500)
    cells = NUMBERS_WITH_WORDS[case]
    arrow = pa.table({"a": cells, "b": list(range(len(cells)))})
    y = np.random.default_rng(0).normal(size=len(cells))
    for step in (100, len(cells)):
        with pytest.raises(DataError, match="'a' mixes numbers"):
            fit_table(arrow, y, step)


def test_missing_cells_of_column_left_out_have_a_feature() -> None:
    remarks = [f"remark {k}" if k % 3 == 0 else None for k in range(N)]
    arrow = pa.table({"remark": remarks, "b": list(range(N))})
    with pytest.warns(UserWarning, match="134 different words in 134 rows.* words are left out"):
        fitted = fit_table(arrow, random_targets())
    assert fitted.encoder.features == ("remark is missing", "b")
    assert fitted.encoder.dropped == ()
    mark = encode(fitted.encoder, arrow)[:, 0]
    np.testing.assert_array_equal(mark == mark[0], [remark is not None for remark in remarks])
    new = pa.table({"remark": ["another", None], "b": [1, 2]})
    np.testing.assert_array_equal(encode(fitted.encoder, new)[:, 0], [mark[0], mark[1]])


@pytest.mark.parametrize("step", [7, N])
@pytest.mark.parametrize(
    ("cells", "y", "use"),
    [
        ([f"name {k}" for k in range(N)], random_targets(), "left out"),
        ([str(k) if k % 9 == 0 else f"title {k}" for k in range(N)], random_targets(), "left out"),
        ([f"name {k % 250}" for k in range(N)], random_targets(), "by the mean target"),
        ([f"name {k % 250}" for k in range(N)], np.eye(11)[np.arange(N) % 11], "left out"),
    ],
    ids=["names", "names and numbers", "repeated names", "many outputs"],
)
def test_words_that_hardly_repeat_give_warning(
    cells: list[str], y: np.ndarray, use: str, step: int
) -> None:
    arrow = pa.table({"key": cells, "b": list(range(N))})
    with pytest.warns(UserWarning, match=rf"column 'key' has .* different words.* {use}"):
        encoder = fit_table(arrow, y, step).encoder
    assert encoder.dropped == (("key",) if use == "left out" else ())
    fit_table(arrow, y, step, declared=ColumnDeclarations(categorical=("key",)))  # no warning


def test_table_of_names_alone_is_refused() -> None:
    names = pa.table({"key": [f"name {k}" for k in range(N)]})
    with (
        pytest.warns(UserWarning, match="it is left out"),
        pytest.raises(DataError, match="no column is left as a feature"),
    ):
        fit_table(names, random_targets())


@pytest.mark.parametrize(("words", "kind"), [(256, "one-hot"), (257, "hashed")])
def test_words_with_many_outputs_use_their_own_features(words: int, kind: str) -> None:
    column = pa.table({"shop": [f"s{k % words}" for k in range(600)]})
    y = np.random.default_rng(0).normal(size=(600, 11))
    assert fit_table(column, y).encoder.codes[0].kind == kind
    labels = np.array([f"c{k % 11}" for k in range(600)])
    assert fit_table(column, labels).encoder.codes[0].kind == kind


@pytest.mark.parametrize(("n_new", "warns"), [(80, False), (100, True)])
def test_new_names_are_reported_only_if_nearly_all_are_new(
    n_new: int, warns: bool, recwarn: pytest.WarningsRecorder
) -> None:
    names = [f"name {k % 50}" for k in range(N)]
    encoder = fit_table(pa.table({"name": names}), random_targets()).encoder
    assert encoder.codes[0].kind == "target means"
    unknown = UnknownWords(encoder)
    unknown.add(pa.table({"name": [f"other {k}" for k in range(n_new)] + names[: 100 - n_new]}))
    unknown.warn_if_many("X")
    messages = [str(warning.message) for warning in recwarn]
    assert any("did not occur in training" in text for text in messages) == warns
