"""Options for encoding a table, and the reader that applies them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.text import redact
from streamkern.basics.values import json_digest
from streamkern.ingest.columns import ReadRequest, as_list, recorded_form
from streamkern.ingest.formats import FileForm
from streamkern.ingest.reader import EncodedReader, Reader, encoded_reader
from streamkern.ingest.tables.cells import MISSING
from streamkern.ingest.tables.encoder import Encoder
from streamkern.ingest.tables.fit import fit
from streamkern.ingest.tables.missing import MissingMarkers
from streamkern.ingest.tables.scan import ColumnDeclarations
from streamkern.store.store import open_store

ENCODE = ("auto", "none")


class ReferenceData(NamedTuple):
    """Description of data that other rows must match: a store, or the training data of a model.

    encoder : encoder of the features; None if they are plain numbers
    columns : names of the feature columns; None if they have none
    target_columns : names of the target columns; None if they have none
    weight_column : name of the column of weights; None if it has none
    file_form : form of the files, as in `StoreSpec`
    row_shape : shape of a row; None if it is compared later
    """

    encoder: Encoder | None
    columns: tuple[str, ...] | None
    target_columns: tuple[str, ...] | None
    weight_column: str | None
    file_form: Mapping[str, Any] | None
    row_shape: tuple[int, ...] | None = None

    @classmethod
    def from_store(cls, url: Any, storage_options: Mapping[str, Any] | None) -> ReferenceData:
        """Return the description of a store."""
        spec = open_store(url, storage_options=storage_options).spec
        encoder = None if spec.encoder is None else Encoder.from_json(spec.encoder, redact(url))
        return cls(
            encoder, spec.columns, spec.target_columns, spec.weight_column, spec.file_form,
            spec.row_shape,
        )  # fmt: skip

    @property
    def digest(self) -> str:
        """Digest of everything that the encoded rows depend on."""
        if self.encoder is not None:
            return self.encoder.digest
        return json_digest([self.columns, self.row_shape])


@dataclass(frozen=True)
class EncodingOptions:
    """Arguments of `ingest` about the columns of a table.

    encode : "auto" or "none", as in `ingest`
    declared : columns that are categorical, numeric, dates or left out
    missing : texts that mark a missing cell: the markers of pandas, then `na_values`
    like : data that the rows must match; None for no such data
    """

    encode: str
    declared: ColumnDeclarations
    missing: tuple[str, ...]
    like: ReferenceData | None = None

    @classmethod
    def from_arguments(
        cls, *, encode: str = "auto", categorical: Any = None, numeric: Any = None,
        dates: Any = None, drop: Any = None, na_values: Any = None, like: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> EncodingOptions:  # fmt: skip
        """Return the options for arguments of `ingest`; raise ConfigError if they contradict."""
        if encode not in ENCODE:
            raise ConfigError(f"{mention('encode', encode)} is unknown", 'use "auto" or "none"')
        forms = dates if isinstance(dates, Mapping) else dict.fromkeys(_names(dates, "dates"))
        for name, form in forms.items():
            _check_form(name, form)
        na_values = _marker_texts(na_values)
        declared = ColumnDeclarations(
            _names(categorical, "categorical"), _names(numeric, "numeric"), dict(forms),
            _names(drop, "drop"),
        )  # fmt: skip
        arguments = {**declared._asdict(), "na_values": na_values}
        dropped_columns = arguments.pop("dropped_columns")
        descriptions = [name for name, value in arguments.items() if value]
        if encode == "none" and descriptions:
            raise ConfigError(
                f"{descriptions[0]}= cannot be used with {mention('encode', 'none')}, which turns "
                "the encoding off",
                "leave one of them out",
            )
        if like is not None and (descriptions or dropped_columns or encode == "none"):
            argument = (*descriptions, "drop" if dropped_columns else "encode")[0]
            raise ConfigError(
                f"{mention(f'{argument}=')} contradicts {mention('like=')}, which determines "
                f"how each column is encoded",
                "leave one of them out",
            )
        missing = (*MISSING, *(text.strip() for text in na_values))
        if like is None:
            return cls(encode, declared, missing)
        like_data = (
            like
            if isinstance(like, ReferenceData)
            else ReferenceData.from_store(like, storage_options)
        )
        if like_data.encoder is None:  # plain numbers, and so are rows like them
            return cls("none", declared, missing, like_data)
        return cls(encode, declared, like_data.encoder.missing, like_data)

    def request(
        self, x: Any, y: Any, sample_weight: Any, is_table: bool, drop_missing: bool
    ) -> ReadRequest:
        """Return the request for the rows; for a table, targets are by default those of `like`.

        x, y, sample_weight : as in `ingest`
        is_table : whether the input is a table
        drop_missing : whether rows that lack a target are left out

        Raises ConfigError if columns are to be encoded or dropped, but the input is not a table.
        """
        dropped_columns = self.declared.dropped_columns
        if (self.always_encodes or dropped_columns) and not is_table:
            raise ConfigError(
                f"{mention('categorical=')}, {mention('numeric=')}, {mention('dates=')}, "
                f"{mention('drop=')}, {mention('na_values=')} and {mention('like=')} describe "
                "the columns of a CSV, a Parquet file or a data frame, but the input is none of "
                "these",
                'leave them out, or give a data frame, pandas.DataFrame(X).add_prefix("x")',
            )
        if y is None and is_table and self.like is not None:
            y = list(self.like.target_columns or ()) or None
        return ReadRequest(
            x, y, sample_weight, columns=self.columns, dropped_columns=dropped_columns,
            drop_missing=drop_missing,
        )  # fmt: skip

    @property
    def always_encodes(self) -> bool:
        """True if the table is encoded even if all of its columns are numbers."""
        categorical, numeric, dates, _ = self.declared
        has_markers = len(self.missing) > len(MISSING)
        return self.encoder is not None or bool(categorical or numeric or dates) or has_markers

    @property
    def encoder(self) -> Encoder | None:
        """The encoder of `like`."""
        return None if self.like is None else self.like.encoder

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Columns that features must have if `like` is plain numbers with names; else None."""
        return None if self.like is None or self.encoder is not None else self.like.columns

    def with_recorded_form(self, form: FileForm) -> FileForm:
        """Return the form of files, with the recorded form of the files of `like` as defaults."""
        if self.like is None:
            return form
        return form._replace(earlier_record=recorded_form(self.like) or {})

    @property
    def row_shape(self) -> tuple[int, ...] | None:
        """Shape that rows must have if `like` is plain numbers; None for any."""
        return None if self.like is None or self.encoder is not None else self.like.row_shape

    def json(self) -> dict[str, Any]:
        """Return everything besides the input that the rows depend on; empty for the defaults."""
        declared = self.declared
        options = {
            "encode": None if self.encode == "auto" or self.like is not None else self.encode,
            "categorical": sorted(declared.categorical),
            "numeric": sorted(declared.numeric),
            "dates": dict(sorted(declared.dates.items())),
            "drop": sorted(declared.dropped_columns),
            "na_values": sorted(self.missing[len(MISSING) :]) if self.like is None else None,
            "like": None if self.like is None else self.like.digest,
        }
        return {name: value for name, value in options.items() if value}

    def chooses_columns(self, x: Any) -> bool:
        """Return whether the user chooses the feature columns. x : as in `ingest`."""
        return x is not None or self.like is not None

    def reader(
        self, open_table: Callable[[ReadRequest], Reader], request: ReadRequest,
        targets: Callable[[Any], Any], seed: int, block_bytes: int, progress: Any = None,
    ) -> EncodedReader:  # fmt: skip
        """Return a reader of encoded rows, by the encoder of `like` or a newly fitted one.

        open_table : opens the table
        request : the columns and rows to read
        targets, seed, block_bytes, progress : as in `fit`
        """
        if self.encoder is not None:
            return encoded_reader(open_table, request, self.encoder)
        markers = MissingMarkers(self.missing[len(MISSING) :])
        # Markers are searched only in `fit`, which reports those that no cell matches.
        reader = open_table(request._replace(as_table=True, missing_texts=MISSING, markers=markers))
        fitted = fit(
            reader, targets, self.declared, self.missing, seed, block_bytes, progress, markers
        )
        return EncodedReader(reader, fitted.encoder, fitted)


def _marker_texts(na_values: Any) -> tuple[str, ...]:
    """Return the texts that mark a missing value."""
    if na_values is None:
        return ()
    is_single = isinstance(na_values, str) or not isinstance(na_values, Iterable)
    markers = [na_values] if is_single else list(na_values)
    if not all(isinstance(mark, str | Real) and not isinstance(mark, bool) for mark in markers):
        raise ConfigError(
            f"{mention('na_values', na_values)} must be text or numbers",
            'give a list, such as ["?", -999]',
        )
    return tuple(dict.fromkeys(map(str, markers)))


def _names(columns: Any, argument: str) -> tuple[str, ...]:
    """Return distinct names of columns; raise ConfigError for anything else."""
    names = as_list(columns)
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{mention(argument, columns)} must be names of columns",
            'give a list of names, such as ["a", "b"]',
        )
    return tuple(dict.fromkeys(names))


def _check_form(name: Any, form: Any) -> None:
    """Raise ConfigError for a date format without a year, or with %Z, %W or %U."""
    if form is None:
        return
    texts = isinstance(form, str) and isinstance(name, str)
    if not texts or not {"%Y", "%y"} & {form[k : k + 2] for k in range(len(form))}:
        raise ConfigError(
            f"dates={{{name!r}: {form!r}}} must be a format of strptime with a year; give for "
            "example %d/%m/%Y"
        )
    directives = [directive for directive in ("%Z", "%W", "%U") if directive in form]
    if directives:
        raise ConfigError(
            f"dates={{{name!r}: {form!r}}} has {directives[0]}, which does not determine a date",
            "use %z, %d and %m",
        )
