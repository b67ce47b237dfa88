"""Fit the encoder of a table in a pass over its rows, or two, in bounded memory.

All sums are accumulated row by row, or in pieces of fixed length, so the encoder does not depend on
the memory, the file format or the number of files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.basics.progress import Progress
from streamkern.basics.text import some
from streamkern.basics.warning import warn
from streamkern.ingest.tables.ambiguity import (
    OPTION_REMEDIES,
    ColumnRemedies,
    describe_ambiguity,
    only_date_format,
    problems_text,
)
from streamkern.ingest.tables.cells import WrongCellError
from streamkern.ingest.tables.columns import (
    CYCLES,
    ColumnCode,
    Date,
    Hashed,
    Number,
    OneHot,
    TargetMeans,
)
from streamkern.ingest.tables.encoder import Encoder, FittedEncoder, wrong_cell_error
from streamkern.ingest.tables.key_columns import IndexDetector
from streamkern.ingest.tables.missing import MissingMarkers
from streamkern.ingest.tables.scan import Column, ColumnDeclarations
from streamkern.ingest.tables.words import N_FOLDS, row_folds, shrunk_means

MAX_ONE_HOT = 40  # words of a column that is encoded one-hot; as in skrub's TableVectorizer
WRONG_CELL_REMEDY = (
    f"correct it, or list it in {mention('na_values=')} if it stands for a missing value"
)
MAX_TARGETS = 10  # outputs whose means encode words
MOST_WORDS_PER_ROW = 0.9  # different words per row of a column that is encoded by mean targets
MAX_ONE_HOT_WITHOUT_MEANS = 256  # with more than `MAX_TARGETS` outputs; more words are hashed


def fit(
    reader: Any,
    targets: Callable[[Any], Any],
    declared: ColumnDeclarations,
    missing: Sequence[str],
    seed: int,
    block_bytes: int,
    progress: Progress | None = None,
    markers: MissingMarkers | None = None,
    remedies: ColumnRemedies = OPTION_REMEDIES,
    wrong_cell_remedy: str = WRONG_CELL_REMEDY,
) -> FittedEncoder:
    """Fit an encoder to the rows of `reader`, whose `RawBlock`s have Arrow tables as X.

    reader : reader of the rows
    targets : makes the `TargetConverter` of y from the first block
    declared : the user's declarations about columns
    missing : texts that mark a missing cell in a CSV
    seed : seed of the folds
    block_bytes : bytes of a block that is read at once
    progress : as in `ingest`
    markers : the user's markers of missing cells, in any column
    remedies : the options or the code that an error about an ambiguous column may name
    wrong_cell_remedy : the remedy for a cell that does not fit its column

    Raises DataError naming every column whose content is ambiguous.
    """

    def scan_rows(declared: ColumnDeclarations, mixed: tuple[str, ...] | None = None) -> _TableScan:
        """Return the scan of all rows.

        mixed : names of columns that mix numbers and words; None in the first pass
        """
        scan: _TableScan | None = None
        for block in reader.blocks(0, block_bytes):
            if scan is None:
                missing_markers = markers or MissingMarkers()
                scan = _TableScan(
                    block, targets(block), declared, seed, missing_markers, reader.has_types,
                    mixed or (),
                )  # fmt: skip
            scan.add(block, wrong_cell_remedy)
            if progress is not None and mixed is None:
                progress("look", scan.n_rows, reader.n_rows)
        if scan is None or not scan.n_rows:
            raise DataError("the input has no rows", "give at least one")
        return scan

    scan = scan_rows(declared)
    mixed, formats = scan.mixed_columns(), scan.date_formats()
    if mixed or formats:  # only now are numbers counted as words, and dates in other formats read
        scan = scan_rows(declared._replace(dates={**declared.dates, **formats}), mixed)
    return scan.make_encoder(missing, remedies)


class _TableScan:
    """Statistics of all columns in the pass over the rows, with sums of the targets.

    first_block : the first rows
    values : `TargetConverter` of the targets
    declared : the user's declarations about columns
    seed : seed of the folds
    markers : the user's markers of missing cells
    has_types : whether the table has types, so that text is never a number
    mixed : names of columns in which an earlier scan found numbers and words
    """

    def __init__(
        self, first_block: Any, values: Any, declared: ColumnDeclarations, seed: int,
        markers: MissingMarkers, has_types: bool, mixed: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.n_rows, self._location, self._markers = 0, first_block.location, markers
        self._values, self._declared, self._seed = values, declared, seed
        width = MAX_TARGETS if values.are_classes else values.shape[0]
        self._n_targets = width if width <= MAX_TARGETS else 0
        # The targets of the first row, which are subtracted from all values for accuracy.
        self._origin: NDArray[np.float64] | None = None
        names = first_block.X.column_names
        declared_names = [*declared.categorical, *declared.numeric, *declared.dates]
        unknown = [name for name in declared_names if name not in names]
        if unknown:
            raise DataError(
                f"{first_block.location} has no feature column {some(unknown)}",
                f"name feature columns of the table: {some(names)}",
            )
        repeated = sorted({name for name in declared_names if declared_names.count(name) > 1})
        if repeated:
            raise DataError(
                f"column {some(repeated)} is named more than once in {mention('categorical=')}, "
                f"{mention('numeric=')} and {mention('dates=')}",
                "name it once",
            )
        self._columns = [
            Column(
                field.name, field.type, declared, self._n_targets, has_types, field.name in mixed
            )
            for field in first_block.X.schema
        ]
        self._counter = IndexDetector()
        self._counter.matches_rows = len(names) > 1 and names[0] not in declared_names

    def add(self, block: Any, remedy: str) -> None:
        """Add the rows of a block; raise DataError for a cell that does not fit its column.

        remedy : for the error
        """
        folds = row_folds(self._seed, self.n_rows, len(block.X))
        T = self._targets(block)
        self._counter.add_cells(block.X.column(0), block.row_numbers)
        for column in self._columns:
            if column.has_scalars:
                try:
                    cells = self._markers.with_nulls(block.X.column(column.name))
                    column.add(cells, block.row_numbers, folds, T)
                except WrongCellError as error:
                    kind = column.kind or "number"
                    raise wrong_cell_error(
                        error,
                        column.name,
                        kind,
                        block.location,
                        block.row_numbers,
                        remedy,
                    ) from None
        self.n_rows += len(block.X)

    def _targets(self, block: Any) -> NDArray[np.float64]:
        """Return targets (k, t): one-hot classes, or values minus the first row of all."""
        y = self._values.convert(block)
        T = np.zeros((len(y), self._n_targets))
        if self._values.are_classes:
            is_encoded = y < MAX_TARGETS
            T[np.flatnonzero(is_encoded), y[is_encoded]] = 1
        elif self._n_targets:
            if self._origin is None:
                self._origin = y[0].astype(np.float64)
            T[:] = y - self._origin
        return T

    # ------------------------------------------------------------------ after the last row

    def mixed_columns(self) -> tuple[str, ...]:
        """Return the names of undeclared columns that mix numbers and words."""
        return tuple(column.name for column in self._columns if column.has_numbers_and_words)

    def date_formats(self) -> dict[str, str]:
        """Return the formats of undeclared columns that can be read as dates in one way only."""
        formats = {
            column.name: only_date_format(list(column.example_words))
            for column in self._columns
            if column.kind is None and not column.n_numbers and column.first_date is None
        }
        return {name: form for name, form in formats.items() if form is not None}

    def make_encoder(self, missing: Sequence[str], remedies: ColumnRemedies) -> FittedEncoder:
        """Return the fitted encoder; raise DataError that names all ambiguous columns."""
        # A marker that is a word here, as in files with types, stays a word in all later files.
        marker_words = {
            text for k in self._columns if k.words is not None for text in k.words.marker_words
        }
        user_texts = self._markers.texts
        missing = [*user_texts, *(k for k in missing if k not in (*user_texts, *marker_words))]
        self._values.check_classes(self._location)
        self._markers.warn_unseen()
        self._counter.warn_if_index(self._columns[0].name, self._location)
        ambiguities = {
            k.name: ambiguity
            for k in self._columns
            if (ambiguity := describe_ambiguity(k, remedies)) is not None
        }
        if ambiguities:
            raise DataError(
                "it is not clear what to do with "
                f"{'a column' if len(ambiguities) == 1 else f'{len(ambiguities)} columns'} of "
                f"{self._location}: {problems_text(ambiguities)} "
                f"{remedies.describe(ambiguities.values())}"
            )
        codes = []
        fold_means = {}
        left_out = []
        for column in self._columns:
            kind = column.infer_kind()
            if kind == "empty":
                left_out.append(column.name)
            elif kind != "category":
                codes.append(_number_or_date(column, kind))
            elif column.says_little(MAX_ONE_HOT) and not self._helps(column, remedies):
                if column.n_missing:
                    codes.append(OneHot(column.name, column.n_missing, ()))
                else:
                    left_out.append(column.name)
            else:
                code, means = self._category(column)
                codes.append(code)
                if means is not None:
                    fold_means[code.name] = means
                if column.has_numbers_and_words and not column.says_little(MAX_ONE_HOT):
                    self._warn_of_mixed(column, remedies)
        if not codes:
            raise DataError(
                "no column is left as a feature, because all are empty or have words that hardly "
                "repeat",
                "give other columns, or turn texts into numbers",
            )
        dropped = (*self._declared.dropped_columns, *left_out)
        return FittedEncoder(Encoder(tuple(codes), dropped, tuple(missing)), self._seed, fold_means)

    def _helps(self, column: Column, remedies: ColumnRemedies) -> bool:
        """Return whether a column whose words hardly repeat can help, and warn of it.

        It can if a tenth of its rows repeat words of other rows, and it is encoded by mean targets.
        Hashed, or one-hot encoded, its words would be noise; only missing cells are then encoded.
        """
        words = column.words
        assert words is not None
        has_means = not words.too_many and bool(self._outputs())
        helps = has_means and words.n_words <= MOST_WORDS_PER_ROW * words.n_seen
        if helps:
            use = "it is encoded by the mean target of each word"
        else:
            use = "its words are left out" if column.n_missing else "it is left out"
        n_words = min(words.n_words, words.n_seen)  # an estimate if there are too many
        about = "about " if words.too_many and n_words < words.n_seen else ""
        warn(
            f"column {column.name!r} has {about}{n_words:,} different words in {words.n_seen:,} "
            f"rows, which say little about new rows; {use}: to decide it yourself, drop the "
            f"column, make it categorical, or turn its texts into numbers ({remedies.choices})"
        )
        return helps

    def _warn_of_mixed(self, column: Column, remedies: ColumnRemedies) -> None:
        """Warn that the numbers of a column are taken as words."""
        assert column.first_number is not None
        assert column.first_word is not None
        warn(
            f"column {column.name!r} has numbers ({column.first_number[1]}) and words "
            f"({column.first_word[1][:40]!r}), and all are taken as words: to decide it yourself, "
            f"make it categorical, or drop it ({remedies.choices})"
        )

    def _category(self, column: Column) -> tuple[ColumnCode, NDArray[np.float64] | None]:
        """Return the code of a column of words, and the means of each fold if it uses targets."""
        words = column.words
        assert words is not None
        head, outputs = (column.name, column.n_missing), self._outputs()
        max_one_hot = MAX_ONE_HOT if outputs else MAX_ONE_HOT_WITHOUT_MEANS
        if not words.too_many and words.n_words <= max_one_hot:
            return OneHot(*head, tuple(sorted(words.index_of))), None
        if words.too_many or not outputs:
            return Hashed(*head), None
        return _target_means(column, outputs)

    def _outputs(self) -> dict[str, int]:
        """Return the name and index of each target that encodes words; empty if there are too many.

        Of two classes, only the second one is used.
        """
        if not self._values.are_classes:
            several = self._n_targets > 1
            return {f"target {k}" if several else "target": k for k in range(self._n_targets)}
        if len(self._values.labels) > MAX_TARGETS:
            return {}
        names, ids_of_codes = self._values.sorted_class_ids()
        code_of = {name: int(np.argmax(ids_of_codes == k)) for k, name in enumerate(names)}
        return {names[1]: code_of[names[1]]} if len(names) == 2 else code_of


def _number_or_date(column: Column, kind: str) -> ColumnCode:
    """Return the code of a column of numbers or dates. kind : "number" or "date"."""
    mean, std = column.moments()
    if not np.isfinite(std):
        largest = max(-column.min_value, column.max_value)
        raise DataError(
            f"column {column.name!r} has numbers up to {largest:.3g}, whose squares overflow",
            "divide them by a constant, or drop the column",
        )
    std = std if std > 0 else 1.0
    if kind == "number":
        return Number(column.name, column.n_missing, mean, std)
    length = column.max_value - column.min_value
    cycles = tuple(
        name
        for name, days in CYCLES.items()
        if length >= 2 * days and (column.has_fractions or days > 1)
    )
    zoned = (
        column.zoned if column.zoned or column.has_fractions else None
    )  # dates alone have no zone
    return Date(column.name, column.n_missing, mean, std, column.date_format, cycles, zoned)


def _target_means(
    column: Column, outputs: dict[str, int]
) -> tuple[TargetMeans, NDArray[np.float64]]:
    """Return the code of a column by mean targets, and the means of each fold."""
    words = column.words
    assert words is not None
    sums, target_ids = words.sums(), np.array(list(outputs.values()))
    if not np.isfinite(sums).all():
        raise DataError(
            f"the squares of the targets overflow, but the words of column {column.name!r} are "
            "encoded by mean targets",
            "divide the targets by a constant",
        )
    # Keep the numbers of rows, and the sums and sums of squares of the chosen targets; sort words.
    t = (sums.shape[2] - 1) // 2
    sums = sums[:, :, np.concatenate([[0], 1 + target_ids, 1 + t + target_ids])]
    order = sorted(words.index_of)
    sums = sums[[0, *(words.index_of[word] for word in order)]]
    total = sums.sum(axis=1)
    means, mean = shrunk_means(total)
    share = total[:, :1] / total[:, 0].sum()
    center = (share * means).sum(axis=0)
    std = np.sqrt((share * (means - center) ** 2).sum(axis=0))
    std[~(std > 0)] = 1
    means_of_words = means[1:]
    mean_of_missing = means[0] if column.n_missing else mean
    code = TargetMeans(
        column.name, column.n_missing, tuple(order), tuple(map(tuple, means_of_words.tolist())),
        tuple(mean_of_missing.tolist()), tuple(mean.tolist()), tuple(center.tolist()),
        tuple(std.tolist()), tuple(outputs),
    )  # fmt: skip
    means_by_fold = [shrunk_means(total - sums[:, f]) for f in range(N_FOLDS)]
    return code, np.stack([np.concatenate([m, all_[None]]) for m, all_ in means_by_fold])
