"""Check data frames: a saved index is omitted, and a column without a type is named."""

from __future__ import annotations

import enum
import math
import re

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from streamkern.basics.errors import DataError
from streamkern.ingest.frames import arrow_table, as_frame

WITH_INDEX = pd.DataFrame({"Unnamed: 0": range(5), "a": range(5)})


@pytest.mark.parametrize("make", [pd.DataFrame, pl.from_pandas, pa.Table.from_pandas])
def test_saved_index_is_dropped_from_features_only(make: type) -> None:
    with pytest.warns(UserWarning, match="'Unnamed: 0' of X holds whole numbers, as an index"):
        assert as_frame(make(WITH_INDEX), "X").columns == ["a"]
    assert as_frame(make(WITH_INDEX), "y").columns == ["Unnamed: 0", "a"]


@pytest.mark.parametrize("values", [[True, "x"], [b"x", 1.5], [object(), None]])
def test_untyped_column_is_named_with_reason_of_arrow(values: list[object]) -> None:
    with pytest.raises((pa.ArrowException, TypeError)) as reason:
        pa.Array.from_pandas(pd.Series(values, dtype=object))
    frame = as_frame(pd.DataFrame({"a": [1, 2], "odd": pd.Series(values, dtype=object)}), "X")
    message = (
        "X has a column, 'odd', that does not hold only numbers, only words or only dates "
        f"({reason.value})"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        arrow_table(frame, "X")


def test_numbers_beside_text_are_text() -> None:
    cells = [7, np.int64(8), 1.5, np.float32(0.1), "x", np.str_("y"), None, math.nan, pd.NA]
    frame = as_frame(pd.DataFrame({"a": pd.Series(cells, dtype=object)}), "X")
    texts = ["7", "8", "1.5", "0.1", "x", "y", None, None, None]
    assert arrow_table(frame, "X").column("a").to_pylist() == texts


def test_members_of_enums_of_text_have_the_same_words_beside_numbers() -> None:
    class Deck(str, enum.Enum):  # noqa: UP042 - the text of a StrEnum is its value anyway
        upper = "u"

    for cells in ([Deck.upper], [Deck.upper, 3]):
        frame = as_frame(pd.DataFrame({"a": pd.Series(cells, dtype=object)}), "X")
        assert arrow_table(frame, "X").column("a").to_pylist()[0] == "u"
