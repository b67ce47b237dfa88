"""Classify how a reader handles a case: exact, converted with a warning, or refused."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from streamkern.basics.errors import StreamkernError
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.conform import FeatureConverter
from streamkern.ingest.convert_data import convert_for_store
from streamkern.ingest.encoding_options import EncodingOptions
from streamkern.ingest.input_files import FileOpener
from streamkern.ingest.readers import open_reader
from streamkern.ingest.tables.columns import Date, Number, OneHot
from streamkern.ingest.targets import TargetConverter

EXACT, WARNED, REFUSED = "exact", "converted, and said", "refused, with the remedy"
GOOD = (EXACT, WARNED, REFUSED)
TEXTS = {
    "integers": ["1", "2", "3", "4", "5", "6"],
    "fractions": ["1.5", "2.5", "3.5", "4.5", "5.5", "6.5"],
    "decimal commas": ["1,5", "2,5", "3,5", "4,5", "5,5", "6,5"],
    "one of three": ["1.5", "2.5", "3,5", "4.5", "5.5", "6,5"],
    "thousands": ["1,000", "2,000", "3,000", "4,000", "5,000", "6,000"],
    "dollars": ["$1.50", "$2.50", "$3.50", "$4.50", "$5.50", "$6.50"],
    "euros": ["1 €", "2 €", "3 €", "4 €", "5 €", "6 €"],
    "percent": ["1%", "2%", "3%", "4%", "5%", "6%"],
    "kg": ["1.5 kg", "2.5 kg", "3.5 kg", "4.5 kg", "5.5 kg", "6.5 kg"],
    "brackets": ["(1.5)", "(2.5)", "(3.5)", "(4.5)", "(5.5)", "(6.5)"],
    "underscores": ["1_000", "2_000", "3_000", "4_000", "5_000", "6_000"],
    "hex": ["0x1", "0x2", "0x3", "0x4", "0x5", "0x6"],
    "arabic": ["\u0661", "\u0662", "\u0663", "\u0664", "\u0665", "\u0666"],
    "days": ["1/2/2024", "2/2/2024", "3/2/2024", "4/2/2024", "5/2/2024", "6/2/2024"],
    "times": ["12:01", "12:02", "12:03", "12:04", "12:05", "12:06"],
    "codes": ["01234", "02234", "03234", "04234", "05234", "06234"],
    "mixed": ["1", "two", "3", "four", "5", "six"],
    "missing": ["a", "NA", "a", "b", "", "b"],
}


def classify(read: Callable[[], Any], expected: Sequence[Any]) -> str:
    """Return one of `GOOD`, or a text that says what is wrong.

    read : returns the cells that were read, one for each row
    expected : the cells that were written; None for a missing one
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            actual = list(read())
        except StreamkernError as error:
            text = str(error)
            has_remedy = "\n" not in text and max(map(len, text.split(";")[1:]), default=0) > 8
            has_remedy |= any(
                f": {word} " in text
                for word in ("decide", "drop", "give", "make", "rename", "write")
            )
            return REFUSED if has_remedy else f"refused without a remedy: {text}"
        except Exception as error:
            return f"raised {type(error).__name__}: {error}"
    our_warnings = [str(k.message) for k in caught if issubclass(k.category, UserWarning)]
    if any(not issubclass(k.category, UserWarning) for k in caught):
        return f"warned of something else: {[str(k.message) for k in caught]}"
    if len(actual) == len(expected) and all(map(is_same_cell, actual, expected)):
        return EXACT
    return WARNED if our_warnings else f"changed silently: {actual[:4]} for {list(expected)[:4]}"


def is_same_cell(actual: Any, expected: Any) -> bool:
    """Return whether a cell was read as it was written; numbers to the digits of float32."""
    if expected is None or actual is None:
        return expected is actual
    if isinstance(actual, str) and isinstance(expected, int | float):
        actual = _label_as_number(actual)
    if isinstance(expected, str) or isinstance(actual, str):
        return str(actual) == str(expected)
    if isinstance(expected, int) and abs(expected) >= 2**53:
        return int(actual) == expected
    return math.isclose(actual, float(expected), rel_tol=1e-6, abs_tol=1e-6)


def _label_as_number(label: str) -> float | str:
    """Return a date in days, or a duration in seconds, that is the label of a class."""
    if re.match(r"\d{4}-\d\d-\d\d", label):
        return float((np.datetime64(label) - np.datetime64(0, "D")) / np.timedelta64(1, "D"))
    if re.search(r"\d day|second|\d:\d\d:\d\d", label):
        return pd.Timedelta(label).total_seconds()
    return label


def read_role(inputs: Any, role: str, targets: str = "auto", **options: Any) -> list[Any]:
    """Return what `ingest` makes of column ``c`` of a table in this role, one entry for each row.

    role : "feature" (the only one, beside the target ``t``), "target" or "weight" (beside the
        feature ``f``)
    """
    with ExitStack() as files:
        x, y = ("c", "t") if role == "feature" else ("f", "c" if role == "target" else "t")
        w = "c" if role == "weight" else None
        inputs, _, y, w, _ = convert_for_store(inputs, None, y, w)
        request = ReadRequest([x], y, w)
        open_table = partial(open_reader, inputs, opener=FileOpener({}, files, **options))
        if role == "feature":
            return _feature(open_table, request)
        blocks = list(open_table(request).blocks(0, 1 << 20))
        if role == "weight":
            return [float(w) for block in blocks for w in block.weights()]
        actual = TargetConverter(blocks[0], targets)
        converted = [k for block in blocks for k in actual.convert(block)]
        if actual.are_classes:
            return [actual.labels[code] for code in converted]
        return [float(k[0]) for k in converted]


def _feature(open_table: Callable[[ReadRequest], Any], request: ReadRequest) -> list[Any]:
    """Return the column as numbers, days or words; None where it is missing."""
    reader = open_table(request)
    try:
        blocks = list(reader.blocks(0, 1 << 20))
        features = FeatureConverter(blocks[0], input_dtype=reader.natural_dtype)
        return [float(row[0]) for block in blocks for row in features.convert(block)]
    except StreamkernError:
        if not reader.can_be_table:
            raise
    options = EncodingOptions.from_arguments()
    convert = partial(TargetConverter, targets="values")
    coded = options.reader(open_table, request, convert, 0, 1 << 20)
    X = np.concatenate([block.X for block in coded.blocks(0, 1 << 20)])
    (code,) = coded._encoder.codes
    missing_mask = X[:, -1] == 1 if code.n_missing else np.zeros(len(X), bool)
    if isinstance(code, OneHot):
        indicators = X[:, : len(code.known)]
        cells = [code.known[int(np.argmax(row))] if row.any() else None for row in indicators]
    else:
        assert isinstance(code, Number | Date)
        cells = [float(row[0]) * code.std + code.mean for row in X]
    return [
        None if is_missing else cell for cell, is_missing in zip(cells, missing_mask, strict=True)
    ]
