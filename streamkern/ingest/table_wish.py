"""How a caller wants a table to be encoded, and the reader that does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from streamkern.basics.errors import ConfigError
from streamkern.basics.text import redact
from streamkern.ingest.columns import listed
from streamkern.ingest.encoded_reader import EncodedReader, encoded_reader
from streamkern.ingest.tables.cells import MISSING
from streamkern.ingest.tables.encoder import Encoder
from streamkern.ingest.tables.fit import fit
from streamkern.ingest.tables.missing import Marks
from streamkern.ingest.tables.scan import Declared
from streamkern.store.store import open_store

ENCODE = ("auto", "none")


@dataclass(frozen=True)
class TableWish:
    """What `ingest` was told about the columns of a table; see there.

    like : the encoder of another store, and the names of its targets
    """

    encode: str
    declared: Declared
    missing: tuple[str, ...]
    like: Encoder | None = None
    like_targets: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        *,
        encode: str = "auto",
        categorical: Any = None,
        numeric: Any = None,
        dates: Any = None,
        drop: Any = None,
        na_values: Any = None,
        like: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> TableWish:
        """From the arguments of `ingest`; ConfigError for what contradicts itself."""
        if encode not in ENCODE:
            raise ConfigError(f'encode="{encode}" is unknown; use "auto" or "none"')
        forms = dates if isinstance(dates, Mapping) else dict.fromkeys(_names(dates, "dates"))
        for name, form in forms.items():
            _check_form(name, form)
        na_values = _marks(na_values)
        declared = Declared(
            _names(categorical, "categorical"), _names(numeric, "numeric"), dict(forms),
            _names(drop, "drop"),
        )  # fmt: skip
        given = {
            "categorical": declared.categorical, "numeric": declared.numeric,
            "dates": declared.dates, "na_values": na_values,
        }  # fmt: skip
        asked = [name for name, value in given.items() if value]
        if encode == "none" and asked:
            raise ConfigError(
                f'{asked[0]}= says how to encode, and encode="none" not to; leave one out'
            )
        if like is not None and (asked or declared.dropped or encode == "none"):
            other = (*asked, *(["drop"] if declared.dropped else []), "encode")[0]
            raise ConfigError(
                f"{other}= makes no sense beside like=, which brings what is done to each column; "
                "leave one of them out"
            )
        missing = (*MISSING, *(text.strip() for text in na_values))
        wish = cls(encode, declared, missing)
        return wish if like is None else wish._like(like, storage_options)

    def _like(self, like: Any, storage_options: Mapping[str, Any] | None) -> TableWish:
        if isinstance(like, Mapping):  # the encoder itself
            encoder = Encoder.of(like, "the model")
            return TableWish(self.encode, self.declared, encoder.missing, encoder)
        spec = open_store(like, storage_options=storage_options).spec
        if spec.encoder is None:
            raise ConfigError(
                f"like={redact(like)} is a store of plain numbers, which were not encoded; leave "
                "like= out"
            )
        encoder = Encoder.of(spec.encoder, redact(like))
        return TableWish(self.encode, self.declared, encoder.missing, encoder, spec.target_columns)

    def targets(self, y: Any, table: bool) -> Any:
        """`y`, or the names that `like` brings; ConfigError where columns were described of what
        is no `table`."""
        if (self.certain or self.declared.dropped) and not table:
            raise ConfigError(
                "categorical=, numeric=, dates=, drop=, na_values= and like= say what is in the "
                "columns of a CSV, a Parquet file or a data frame, and the input is none; leave "
                "them out"
            )
        return list(self.like_targets) if y is None and self.like_targets else y

    @property
    def certain(self) -> bool:
        """Whether the table is encoded whatever it holds."""
        told = self.declared
        named = told.categorical or told.numeric or told.dates or len(self.missing) > len(MISSING)
        return self.like is not None or bool(named)

    def json(self) -> dict[str, Any]:
        """What the rows follow from beside the input; nothing where nothing was asked."""
        told = self.declared
        said = {
            "encode": None if self.encode == "auto" else self.encode,
            "categorical": sorted(told.categorical),
            "numeric": sorted(told.numeric),
            "dates": dict(sorted(told.dates.items())),
            "drop": sorted(told.dropped),
            "na_values": sorted(self.missing[len(MISSING) :]) if self.like is None else None,
            "like": None if self.like is None else self.like.digest,
        }
        return {name: value for name, value in said.items() if value}

    def reader(
        self,
        open_cells: Callable[..., Any],
        targets: Callable[[Any], Any],
        seed: int,
        block_bytes: int,
        progress: Any = None,
    ) -> EncodedReader:
        """The rows encoded: by the encoder of `like`, or by one that is fitted to them first."""
        if self.like is not None:
            return encoded_reader(open_cells, self.like)
        marks = Marks(self.missing[len(MISSING) :])
        # Marks are looked for where it is known whether they were found: in `fit`.
        reader = open_cells(cells=MISSING, dropped=self.declared.dropped, marks=marks)
        fitted = fit(
            reader,
            targets,
            self.declared,
            self.missing,
            seed,
            block_bytes,
            progress,
            marks,
            typed=getattr(reader, "typed", False),
        )
        return EncodedReader(reader, fitted.encoder, fitted)


def _marks(given: Any) -> tuple[str, ...]:
    """Return the texts that stand for a missing value; a number counts however it is written."""
    one = given is None or isinstance(given, str) or not isinstance(given, Iterable)
    marks = ([] if given is None else [given]) if one else list(given)
    if not all(isinstance(mark, str | Real) and not isinstance(mark, bool) for mark in marks):
        raise ConfigError(f"na_values={given!r} must be text or numbers")
    return tuple(dict.fromkeys(str(mark) for mark in marks))


def _names(given: Any, what: str) -> tuple[str, ...]:
    names = listed(given)
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{what}={given!r} must be names of columns")
    return tuple(dict.fromkeys(names))


def _check_form(name: Any, form: Any) -> None:
    """ConfigError for a form of dates that says no day, or a time zone by a name."""
    if form is None:
        return
    said = isinstance(form, str) and isinstance(name, str)
    if not said or not {"%Y", "%y"} & {form[k : k + 2] for k in range(len(form))}:
        raise ConfigError(
            f"dates={{{name!r}: {form!r}}} must be a form with a year, as %d/%m/%Y for strptime"
        )
    wrong = next((k for k in ("%Z", "%W", "%U") if k in form), None)
    if wrong:
        raise ConfigError(
            f"dates={{{name!r}: {form!r}}} has {wrong}, which says no one time; use %z, %d and %m"
        )
