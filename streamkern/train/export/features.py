"""Export the part of a model before the kernel: inputs, the encoder of a table, and the scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional
from streamkern.ingest.tables import cells
from streamkern.ingest.tables.columns import (
    CYCLES,
    ColumnCode,
    Date,
    KnownWords,
    Number,
    OneHot,
    TargetMeans,
    cycle_angles,
)
from streamkern.ingest.tables.encoder import Encoder
from streamkern.ingest.tables.numbers import is_integer, is_number
from streamkern.stream.sources.patch_features import PatchFeatures
from streamkern.stream.sources.quantile_scores import QuantileScores
from streamkern.stream.sources.transforms import Scale, Transform, transform_name
from streamkern.train.export.traced import Graph, Traced

ROWS = "X"
"""Name of the input of a model of plain numbers."""


def plain_rows(
    graph: Graph, row_shape: tuple[int, ...], dtype: np.dtype[Any], *, sparse: bool
) -> Traced:
    """Add the input of a model without an encoder, and return it flat: (n, d).

    Raises ConfigError for a model of sparse rows.
    """
    if sparse:
        raise ConfigError(
            "the model was trained on sparse rows, but ONNX has no operator for them",
            "load the model with streamkern.load instead",
        )
    rows = graph.add_input(ROWS, dtype, row_shape)
    return rows if len(row_shape) == 1 else rows.reshape(-1, math.prod(row_shape))


def table_rows(graph: Graph, encoder: Encoder) -> Traced:
    """Add an input (n, 1) for each column of a table, and return the encoded rows (n, d) float32.

    Numbers are float64, with NaN for missing cells. Dates are float64 days since 1970. Words are
    text; the empty text, and the markers of missing cells in files, stand for missing cells.

    Raises ConfigError for a column of hashed words.
    """
    parts = []
    for code in encoder.codes:
        encode = _ENCODERS.get(type(code))
        if encode is None:
            raise ConfigError(
                f"column {code.name!r} has {code.kind} words, but ONNX has no operator for them",
                "leave the column out of the training, or train with fewer different words, which "
                "are not hashed",
            )
        parts += encode(graph, code, encoder)
    encoded = graph.add_node("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]
    return encoded.astype(np.float32)


def _missing_indicator(code: ColumnCode, is_missing: Traced) -> list[Traced]:
    """Return the feature that marks missing cells, if the column has one."""
    return [is_missing.astype(np.float64)] if code.n_missing else []


def _encode_number(graph: Graph, code: Number, encoder: Encoder) -> list[Traced]:
    values = graph.add_input(code.name, np.float64, (1,))
    missing_numbers = [float(text) for text in encoder.missing if is_number(text)]
    is_missing = _is_missing(graph, values, missing_numbers)
    scaled = (values - code.mean) / code.std
    zero = graph.add_constant(0, np.float64)
    values_or_zero = graph.add_node("Where", is_missing, zero, scaled, dtype=np.float64)
    return [values_or_zero, *_missing_indicator(code, is_missing)]


def _encode_date(graph: Graph, code: Date, encoder: Encoder) -> list[Traced]:
    days = graph.add_input(code.name, np.float64, (1,))
    is_missing = _is_missing(graph, days, [_days(code, text) for text in encoder.missing])
    zero = graph.add_constant(0, np.float64)
    parts = [(days - code.mean) / code.std]
    for cycle in code.cycles:
        angles = cycle_angles(days, CYCLES[cycle], lambda value: graph.add_node("Floor", value))
        parts += [graph.add_node("Sin", angle) for angle in angles]
    values_or_zero = [
        graph.add_node("Where", is_missing, zero, part, dtype=np.float64) for part in parts
    ]
    return [*values_or_zero, *_missing_indicator(code, is_missing)]


def _days(code: Date, text: str) -> float:
    """Return a text as days since 1970; NaN if it is not a date of the column."""
    arrow = import_optional("pyarrow")
    try:
        return float(cells.as_days(arrow.array([text]), code.form)[0])
    except cells.WrongCellError:
        return math.nan


def _is_missing(graph: Graph, values: Traced, missing_values: Iterable[float]) -> Traced:
    """Return where values are NaN or one of the numbers that stand for a missing cell."""
    is_missing = graph.add_node("IsNaN", values, dtype=np.bool_)
    for missing_value in filter(math.isfinite, missing_values):
        is_missing = graph.add_node("Or", is_missing, values.equals(missing_value))
    return is_missing


def _spellings(word: str) -> list[str]:
    """Return the texts that the encoder of a column treats as the same word."""
    if word in cells.BOOLEAN_WORDS:
        return [word, word.title(), word.upper()]
    return [word, f"{word}.0"] if is_integer(word) else [word]


def _word_indices(graph: Graph, code: KnownWords, encoder: Encoder, unknown: int) -> Traced:
    """Return the index of each word, (n, 1): 0 if it is missing, `unknown` if it is not known."""
    words = graph.add_input(code.name, np.str_, (1,))
    word_index = {text: 0 for marker in ["", *encoder.missing] for text in _spellings(marker)}
    word_index |= {text: 1 + k for k, word in enumerate(code.known) for text in _spellings(word)}
    return graph.add_node(
        "LabelEncoder", words, dtype=np.int64, domain="ai.onnx.ml", keys_strings=list(word_index),
        values_int64s=list(word_index.values()), default_int64=unknown,
    )  # fmt: skip


def _encode_one_hot(graph: Graph, code: OneHot, encoder: Encoder) -> list[Traced]:
    word_index = _word_indices(graph, code, encoder, -1)
    if not code.known:
        return _missing_indicator(code, word_index.equals(0))
    numbers = graph.add_constant([np.arange(1, 1 + len(code.known))], np.int64)
    indicators = word_index.equals(numbers).astype(np.float64)
    return [indicators, *_missing_indicator(code, word_index.equals(0))]


def _encode_target_means(graph: Graph, code: TargetMeans, encoder: Encoder) -> list[Traced]:
    word_index = _word_indices(graph, code, encoder, len(code.known) + 1)
    table = code.standardise(np.array([code.missing, *code.means, code.unknown]))
    means = graph.add_node(
        "Gather", graph.add_constant(table, np.float64), word_index.reshape(-1), axis=0
    )
    return [means, *_missing_indicator(code, word_index.equals(0))]


_ENCODERS: dict[type[ColumnCode], Callable[..., list[Traced]]] = {
    Number: _encode_number,
    Date: _encode_date,
    OneHot: _encode_one_hot,
    TargetMeans: _encode_target_means,
}


def scale_features(graph: Graph, X: Traced, transforms: Sequence[Transform], d: int) -> Traced:
    """Return rows (n, d) after the transforms of a model, which are computed in float64.

    Raises ConfigError for patch features, and for a user-defined transform.
    """
    for transform in transforms:
        if isinstance(transform, PatchFeatures):
            raise ConfigError(
                f"{mention('model.patch_features', transform.n_filters)} cannot be exported",
                "export a model of the pixels, or predict with streamkern",
            )
        if not isinstance(transform, Scale):
            raise ConfigError(
                f"transform {transform_name(transform)!r} is a function of yours, which cannot "
                "be exported",
                "apply it to the rows before training, or export a model without it",
            )
        if transform.mode == "none":
            continue
        mean, scale = (np.ravel(np.asarray(a)) for a in (transform.mean, transform.scale))
        X = (X.astype(np.float64) - mean) / scale
        if transform.scores is not None:
            X = graph.add_node("Concat", X, *_scores(graph, X, transform.scores), axis=1)
    return X


def _scores(graph: Graph, X: Traced, scores: QuantileScores) -> list[Traced]:
    return [
        interpolate(graph, X.take([column], axis=1), knots, levels)
        for column, knots, levels in zip(
            scores.columns.tolist(), scores.values, scores.heights, strict=True
        )
    ]


def interpolate(graph: Graph, x: Traced, positions: Any, values: Any) -> Traced:
    """Return the piecewise linear function of x (n, 1) through points, constant outside of them.

    It is computed as a sum of ramps, one for each piece.

    positions, values : (k,) positions, ascending, and values of the points
    """
    positions, values = (np.asarray(a, np.float64) for a in (positions, values))
    ascending = np.append(True, np.diff(positions) > 0)
    positions, values = positions[ascending], values[ascending]
    if len(positions) == 1:
        constant: Traced = x * 0 + float(values[0])
        return constant
    within_pieces: Traced = graph.add_node(
        "Min", graph.add_node("Max", x - positions[None, :-1], 0), np.diff(positions)[None]
    )
    slopes = np.diff(values) / np.diff(positions)
    value: Traced = within_pieces @ slopes[:, None] + float(values[0])
    return value
