"""Mistakes in sources: arrays, functions, mixtures, copies, shares of classes, rows set aside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pandas as pd
import scipy.sparse

import streamkern as sk
from streamkern.stream.sources.alignment import align_classes
from streamkern.stream.sources.sampling import sample_rows
from tests.remedies import LABELS, Case, N, X, Y, fit_values, ingested, long_rows, regressor
from tests.streams import Plain

COVERED = (
    "stream/sources/arrays.py", "stream/sources/augmented.py", "stream/sources/base.py",
    "stream/sources/class_sampling.py",
    "stream/sources/mixture.py", "stream/sources/repeatable.py", "stream/sources/unit_edges.py",
    "stream/sources/sampling.py", "stream/sources/stores.py",
    "stream/sources/user.py", "stream/sources/split.py", "stream/sources/alignment.py",
    "store/class_labels.py",
)  # fmt: skip

IDS = np.arange(N) % 2


def stored(source: Any) -> None:
    """Write the rows of a source, which reads all of them."""
    sk.materialise_store(source, "made.zarr", overwrite=True)


def rows_of(X: Any, y: Any, **given: Any) -> Callable[[], None]:
    return lambda: stored(sk.ArraySource(X, y, **given))


def sparse_cases() -> list[Case]:
    """Return rows for a model that was trained on others."""

    def predicted(rows: Any) -> Callable[[], Any]:
        model = regressor()
        return lambda: (ingested(rows, y=Y), model.fit(long_rows(), Y).predict("made.zarr"))

    def scored(rows: Any) -> Callable[[], Any]:
        return lambda: (ingested(rows, y=Y), regressor().fit(X, Y).score("made.zarr"))

    return [
        ("give both as sparse rows", predicted(X), predicted(long_rows())),
        ("or both as dense ones", scored(long_rows()), scored(X)),
        ("trained on 9,000; use data with the same features", predicted(long_rows(d=8000)),
         predicted(long_rows())),
    ]  # fmt: skip


def array_cases() -> list[Case]:
    """Return mistakes in ArraySource."""
    gaps, many_labels = np.where(np.arange(N)[:, None] == 7, np.nan, X), np.arange(10_001)
    full = ~np.isnan(gaps).any(axis=1)
    cases = [
        ("leave classes= out", (X, Y), {"classes": ["a"]}, (X, Y), {}),
        ("convert it to floats for a regression", (many_labels[:, None] * 1.0, many_labels), {},
         (many_labels[:, None] * 1.0, many_labels * 1.0), {}),
        (r"give rows \(n, d\)", (scipy.sparse.coo_array(Y), Y), {},
         (scipy.sparse.coo_array(Y[:, None]), Y), {}),
        ("each dimension known and at least 1", (X[:, 0], Y), {}, (X[:, :1], Y), {}),
        (r"need \(60,\) labels or", (X, Y[1:]), {}, (X, Y), {}),
        (r"convert it by X.astype\(...\)", (X.astype("i8"), Y), {}, (X.astype("f8"), Y), {}),
        ("must be distinct names", (X, IDS), {"classes": ["a", "a"]}, (X, IDS),
         {"classes": ["a", "b"]}),
        ("correct it, or leave the row out", (gaps, Y), {}, (gaps[full], Y[full]), {}),
        ("label 'up' .* is none of the .* leave the row out", (X, LABELS), {"classes": ["down"]},
         (X[LABELS == "down"], LABELS[LABELS == "down"]), {"classes": ["down"]}),
    ]  # fmt: skip
    case_rows = [(message, rows_of(*mistake, **no), rows_of(*remedy, **yes))
             for message, mistake, no, remedy, yes in cases]  # fmt: skip
    np.save("mapped.npy", X)

    def changed(copy: bool) -> None:
        mapped = np.load("mapped.npy", mmap_mode="r")
        source = sk.ArraySource(np.array(mapped) if copy else mapped, Y)
        np.save("mapped.npy", np.zeros(3))
        np.save("mapped.npy", X)
        regressor(epochs=1).fit(source)
        source.check_unchanged()

    return [*case_rows, (r"train on a copy, numpy.array", lambda: changed(False),
                           lambda: changed(True))]  # fmt: skip


def generated(made: Callable[..., Any], **given: Any) -> Callable[[], None]:
    """Make a store of the rows of a function. made : of the number of rows."""
    declared = {"n_rows": N, "row_shape": (3,), "dtype": "f8", "n_outputs": 1} | given

    def rows(seed: int, epoch: int, start: int, stop: int) -> Any:
        return made(stop - start)

    return lambda: stored(sk.GeneratorSource(rows, **declared))


def drawn(repeatable: bool) -> sk.GeneratorSource:
    """Return rows of a function, which are the same in each call if `repeatable`."""

    def rows(seed: int, epoch: int, start: int, stop: int) -> tuple[Any, Any]:
        drawn = np.random.default_rng().random((stop - start, 3))
        own = sk.RowRandom(np, seed, epoch, 0, np.arange(start, stop), np.float64).uniform((3,))
        made = own if repeatable else drawn
        return made, made[:, 0]

    return sk.GeneratorSource(rows, N, (3,), np.float64, 1)


def function_cases() -> list[Case]:
    """Return mistakes in GeneratorSource."""
    ones, two = (lambda k: (np.ones((k, 3)), np.ones(k))), ("a", "b")
    valid, ids = generated(ones), generated(lambda k: (np.ones((k, 3)), np.arange(k) % 2),
                                           n_outputs=2, classes=two)  # fmt: skip
    weighted = generated(lambda k: (*ones(k), np.ones(k)), weight_totals=[float(N)])
    cases = [
        (r"fn=None is not a function; give a function fn\(seed, epoch, start, stop\) -> \(X, y\)",
         lambda: sk.GeneratorSource(cast("Any", None), N, (3,), "f8", 1), valid),
        ("give at least one row, and one output for each class", generated(ones, classes=two), ids),
        ("must be one number, 0 or above", generated(ones, weight_totals=[-1.0]), weighted),
        ("failed for .*ZeroDivisionError.*correct the function", generated(lambda k: 1 // 0),
         valid),
        ("return a tuple of arrays", generated(lambda k: np.ones((k, 3))), valid),
        (r"return \(X, y, w\) with weight_totals", generated(ones, weight_totals=[60.0]), weighted),
        (r"give \(60, 3\) float64, or correct row_shape=",
         generated(lambda k: (np.ones((k, 2)), np.ones(k))), valid),
        (r"give class ids, \(60,\) integers", generated(ones, n_outputs=2, classes=two), ids),
        (r"give \(60, 2\) numbers, or correct n_outputs=", generated(ones, n_outputs=2), valid),
    ]  # fmt: skip
    masked = np.ma.masked_greater(np.arange(N), 1)

    def reused(new: bool) -> Callable[[], Any]:
        """Return a generator that writes all rows to one array, or to new ones."""
        out = np.empty((N, 3))

        def rows(seed: int, epoch: int, start: int, stop: int) -> tuple[Any, Any]:
            part = out[: stop - start]
            part[...] = X[start:stop]
            return part.copy() if new else part, Y[start:stop]

        return lambda: stored(sk.GeneratorSource(rows, N, (3,), np.float64, 1, block_rows=20))

    def many(block_rows: int) -> sk.GeneratorSource:
        return sk.GeneratorSource(cast("Any", ones), 10**10, (3,), "f8", 1, block_rows=block_rows)

    cases += [
        (r"^X of unit 0 of generator .*fill the masked entries, X.filled.value.",
         generated(lambda k: (np.ma.masked_greater(np.ones((k, 3)), 0), np.ones(k))), valid),
        (r"^y of unit 0.*fill the masked entries, y.filled.value.",
         generated(lambda k: (np.ones((k, 3)), masked[:k])), valid),
        (r"^w of unit 0.*fill the masked entries, w.filled.value.",
         generated(lambda k: (*ones(k), masked[:k]), weight_totals=[float(N)]), weighted),
        ("return new arrays in each call, because several threads", reused(False), reused(True)),
        ("give larger units .block_rows= of a generator", lambda: many(1), lambda: many(10**6)),
    ]  # fmt: skip
    return [*(case for case in cases),
            ("for example with streamkern.RowRandom", lambda: regressor().fit(drawn(False)),
             lambda: regressor().fit(drawn(True)))]  # fmt: skip


def own_object_cases() -> list[Case]:
    """Return mistakes in a user-defined source."""

    def own(changed: dict[str, Any] | None = None, lacks: str = "") -> Callable[[], None]:
        base = sk.ArraySource(X, Y)
        plain = Plain(base)
        for name, value in (changed or {}).items():
            setattr(plain, name, value)
        if lacks:
            delattr(plain, lacks)
        return lambda: stored(plain)

    def reads(change: Callable[[Any], Any]) -> dict[str, Any]:
        return {"read_unit": lambda u, *key: change(sk.ArraySource(X, Y).read_unit(u, *key))}

    cases = [
        ("it has no statistics; give a source with n_rows", own(lacks="statistics")),
        ("must be a whole number, at least 1", own({"n_rows": 2.5})),
        (r"start unit_bounds\(u\) where unit_bounds\(u - 1\) stops", own({"n_rows": 10})),
        ("return from read_unit a streamkern.store.row_block.RowBlock", own(reads(tuple))),
        ("correct RowBlock.row_ids", own(reads(lambda b: b._replace(row_ids=b.row_ids[::-1])))),
        ("^X of unit 0 .*fill the masked entries, X.filled.value.",
         own(reads(lambda b: b._replace(X=np.ma.masked_greater(b.X, 0))))),
        ("declares .* correct one of them", own(reads(lambda b: b._replace(y=b.y[1:])))),
        ("unexpected sample weights.*correct one of them",
         own(reads(lambda b: b._replace(w=np.ones(N, "f4"))))),
    ]  # fmt: skip
    return [(message, mistake, own()) for message, mistake in cases]


def mixture_cases() -> list[Case]:
    """Return mistakes in what sources are put together from."""
    values, narrow = sk.ArraySource(X, Y), sk.ArraySource(X[:, :2], Y)
    noise = sk.GaussianNoise(0.1)
    noisy = sk.ArraySource(X, Y, [noise])
    for name in ("abc", "bac"):
        sk.ingest_store(pd.DataFrame(X, columns=list(name)), f"{name}.zarr", y=Y)
    abc, bac = sk.ZarrSource("abc.zarr"), sk.ZarrSource("bac.zarr")
    other = sk.ZarrSource("bac.zarr", transforms=[noise])
    mixed: Any = sk.MixtureSource

    def numbered(classes: list[str]) -> sk.ArraySource:
        return sk.ArraySource(X, np.arange(N) % 2, classes=classes)

    return [
        ("give from 1 to 65535 sources", lambda: mixed([]), lambda: mixed([values])),
        ("give one finite number above 0 for each", lambda: mixed([values], [0]),
         lambda: mixed([values], [1])),
        ("must be a whole number, at least 1, and needs weights", lambda: mixed([values], n_rows=9),
         lambda: mixed([values], [1], n_rows=9)),
        ("mix only sources with the same", lambda: mixed([values, narrow]),
         lambda: mixed([values] * 2)),
        ("give the transform to the mixture, in transforms=", lambda: mixed([noisy]),
         lambda: mixed([values], transforms=[noise])),
        ("leave the transforms out, or give the columns in the order", lambda: mixed([abc, other]),
         lambda: mixed([abc, bac])),
        ("lower copies, and raise epochs instead", lambda: sk.AugmentedSource(values, 1 << 40),
         lambda: sk.AugmentedSource(values, 40)),
        ("use data with the same features", lambda: sk.load("run").predict(narrow),
         lambda: sk.load("run").predict(values)),
        ("classes '0', '00', which all correspond to .* '0'.* give them the same label",
         lambda: align_classes(numbered(["0", "00"]), ("0", "1"), "<i8", "the data"),
         lambda: align_classes(numbered(["0", "01"]), ("0", "1"), "<i8", "the data")),
        ("known classes are .*; leave such rows out",
         lambda: align_classes(numbered(["up", "down"]), ("up", "left"), None, "the data"),
         lambda: align_classes(numbered(["up", "left"]), ("left", "up"), None, "the data")),
        ("give 1 to 60", lambda: sample_rows(values, 61, 0), lambda: sample_rows(values, 60, 0)),
    ]  # fmt: skip


def share_cases() -> list[Case]:
    """Return mistakes in shares of classes."""
    values, labels = sk.ArraySource(X, Y), sk.ArraySource(X, LABELS)
    copies = sk.AugmentedSource(labels, 2)
    flipped = sk.ArraySource(X, LABELS, [sk.host_transform(lambda X, y, rng: (-X, y))])
    balanced = sk.BalancedSource

    def written() -> None:
        stored(flipped)
        balanced(sk.ZarrSource("made.zarr"))

    return [
        ("leave it out, or give sample weights instead", lambda: balanced(values),
         lambda: stored(sk.ArraySource(X, Y, sample_weight=np.ones(N)))),
        ("already resampled by class; leave it out", lambda: balanced(balanced(labels)),
         lambda: stored(balanced(labels))),
        ("or within copies; leave one of them out", lambda: balanced(copies),
         lambda: stored(balanced(labels))),
        ("write them to a store first", lambda: balanced(flipped), written),
        ('must be "balanced" or shares by class name', lambda: balanced(labels, "even"),
         lambda: balanced(labels, "balanced")),
        ("must be finite numbers above 0", lambda: balanced(labels, {"up": 0, "down": 1}),
         lambda: balanced(labels, {"up": 0.1, "down": 1})),
        ("the classes of the data are 'down'.*'up'", lambda: balanced(labels, {"up": 1, "left": 1}),
         lambda: balanced(labels, {"up": 1, "down": 1})),
        ("give a share for each class", lambda: balanced(labels, {"up": 1}),
         lambda: balanced(labels, {"up": 1, "down": 2})),
    ]  # fmt: skip


def held_out_row_cases() -> list[Case]:
    """Return mistakes with sources of which no rows can be set aside."""
    values = sk.ArraySource(X, Y)

    def fitted(source: Any, **given: Any) -> Callable[[], Any]:
        given = {"early_stopping": True, "validation_fraction": 0.2, "solver": "block"} | given
        return fit_values(source, **given)

    plain = fitted(values)
    weighted, both = sk.MixtureSource([values], [1.0]), sk.MixtureSource(
        [sk.AugmentedSource(values, 2), values])  # fmt: skip
    sk.materialise_store(both, "both.zarr")
    copied = sk.ZarrSource("both.zarr")
    moved = sk.AugmentedSource(sk.ZarrSource("bac.zarr"), 2)
    alike = sk.AugmentedSource(sk.ZarrSource("abc.zarr"), 2)
    return [
        ("with the shares of a mixture .* leave one of them out", fitted(weighted), plain),
        ("in a mixture.* leave early_stopping out, or train on the store alone",
         fitted(sk.MixtureSource([copied, values])), plain),
        ("or write them to a store first", fitted(drawn(True)),
         lambda: (stored(drawn(True)), fitted(sk.ZarrSource("made.zarr"))())),
        ("leave early_stopping out", fitted(copied), fitted(copied, early_stopping=False)),
        ("store the columns of all sources in the same order",
         fitted(sk.MixtureSource([sk.ZarrSource("abc.zarr"), moved])),
         fitted(sk.MixtureSource([sk.ZarrSource("abc.zarr"), alike]))),
        ("give more rows, or change the fraction", fitted(values, validation_fraction=0.01), plain),
    ]  # fmt: skip


TABLES = (
    sparse_cases, array_cases, function_cases, own_object_cases, mixture_cases, share_cases,
    held_out_row_cases,
)  # fmt: skip
