"""What the experiments share: the data, a run, the table, the plot and the verdict.

Each script of this folder that uses it repeats one result of the papers:

    python examples/more_samples.py                            scikit-learn's digits
    python examples/more_samples.py --data fashion-mnist       a folder of IDX files, plain or .gz
    python examples/more_samples.py --data train.zarr --test test.zarr       Zarr stores

Without `--test` a quarter of the rows of a store is held out, as of the digits, and which quarter
changes from one repetition to the next. With IDX files the test images are those of the folder.
A repetition also draws its own centers and order. At most `--samples` rows are trained on, and
10 000 tested on.

In `--folder` a script leaves NAME.json (table, settings, verdict) and NAME.png (plot). A difference
counts as clear here if it is above twice its standard error, over the repetitions.

EP1: Ma and Belkin, arXiv 1703.10622. EP3: Abedsoltan, Belkin and Pandit, arXiv 2302.02605.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from augmented_120m import write_stores
from scipy.spatial.distance import pdist

import streamkern as sk
from streamkern.basics.optional import import_optional
from streamkern.basics.text import text_table

Array = np.ndarray
DIGITS, MIN_ROWS, TEST_ROWS = "digits", 200, 10_000
MEASURED = "test error, %"


# -------------------------------------------------------------------------------------- the data


@dataclass(frozen=True)
class Split:
    """Rows to train on and rows to test on. X : as stored, in random order; y : class ids.

    bandwidth : the median distance of training rows, in the units the kernel sees, times
    `--bandwidth`; the same for all that is compared. seed : of everything drawn.
    """

    X: Array
    y: Array
    X_test: Array
    y_test: Array
    classes: tuple[str, ...]
    scale: sk.Scale
    bandwidth: float
    seed: int
    device: str

    def source(
        self, rows: int | None = None, copies: int = 1, transforms: Sequence[Any] = ()
    ) -> sk.AugmentedSource:
        """`copies` of the first `rows` rows, scaled and transformed.

        What keeps the storage dtype, crops and flips, goes before the scaling.
        """
        base = sk.ArraySource(self.X[:rows], self.y[:rows], classes=self.classes)
        early = [t for t in transforms if getattr(t, "keeps_dtype", False)]
        late = [t for t in transforms if t not in early]
        return sk.AugmentedSource(base, copies, [*early, self.scale, *late])


@dataclass(frozen=True)
class Data:
    """All rows in memory; `held_out` are the rows of a test set, if there is one."""

    name: str
    X: Array
    y: Array
    classes: tuple[str, ...]
    held_out: tuple[Array, Array] | None

    def splits(self, options: argparse.Namespace) -> Iterator[Split]:
        """One for each repetition."""
        for seed in range(options.seeds):
            order = np.random.default_rng([seed, 0]).permutation(len(self.X))
            X, y = self.X[order], self.y[order]
            X_test, y_test = self.held_out or (X[: len(X) // 4], y[: len(X) // 4])
            if self.held_out is None:
                X, y = X[len(X) // 4 :], y[len(X) // 4 :]
            X, y = X[: options.samples], y[: options.samples]
            scale = sk.Scale(mean=float(X.mean()), scale=float(X.std()) or 1.0)
            few = X[:400].reshape(len(X[:400]), -1).astype(np.float64) / scale.scale
            width = options.bandwidth * float(np.median(pdist(few)))
            yield Split(
                X, y, X_test, y_test, self.classes, scale, width, seed, options.device
            )  # fmt: skip


def read_data(options: argparse.Namespace) -> Data:
    """The digits, or what `--data` and `--test` name."""
    if options.data is None:
        from sklearn.datasets import load_digits

        X, y = load_digits(return_X_y=True)
        images = X.astype(np.uint8).reshape(-1, 8, 8, 1)
        return Data(DIGITS, images, y, tuple("0123456789"), None)
    path, test, name = options.data, options.test, Path(options.data).name
    if any(Path(path).glob("train-images*")):
        path, test = write_stores(options.folder / "stores", Path(path))
    X, y, classes = first_rows(path, options.samples + (TEST_ROWS if test is None else 0))
    if len(X) < MIN_ROWS:
        raise sk.DataError(f"{path}: {len(X)} rows are too few; give {MIN_ROWS} or more")
    if test is None:
        return Data(name, X, y, classes, None)
    X_test, y_test, others = first_rows(test, TEST_ROWS)
    if others != classes:
        raise sk.DataError(f"{test} has other classes than {path}; use data with the same ones")
    return Data(name, X, y, classes, (X_test, y_test))


def first_rows(path: str | Path, n: int) -> tuple[Array, Array, tuple[str, ...]]:
    """At most n rows of a store, its class ids and its classes; rows are shuffled at ingest."""
    store = sk.open_store(path)
    if store.spec.classes is None:
        raise sk.DataError(f"{path} has no classes; ingest it with targets='classes'")
    X, y = store.read_rows(np.arange(min(n, store.spec.n_rows)))
    return X, y, store.spec.classes


def doubled(options: argparse.Namespace, low: int, high: int) -> list[int]:
    """..., high/4, high/2, high, none of them below `low`; the first and the last if quick."""
    sizes = [high >> k for k in range(high.bit_length(), -1, -1) if high >> k >= low]
    return sorted({sizes[0], sizes[-1]}) if options.quick else sizes


# ------------------------------------------------------------------------------------------ runs


@dataclass(frozen=True)
class Fitted:
    """error : on the test rows, in percent. seconds : setup and training. history : (samples,
    error) of every evaluation."""

    error: float
    seconds: float
    history: list[tuple[int, float]]


def fit(
    split: Split,
    source: sk.AugmentedSource,
    settings: Mapping[str, Any],
    centers: Array | None = None,
) -> Fitted:
    """One run. settings : as `RunConfig.with_overrides` takes them. centers : rows as stored."""
    config = sk.RunConfig.from_tables(
        {
            "data": {"train": "in memory", "epochs": 1},
            # The papers have no intercept.
            "model": {"kernel": "laplace", "bandwidth": split.bandwidth, "fit_intercept": False},
            "run": {"random_state": split.seed, "device": split.device, "evaluate_every": 0},
        }
    ).with_overrides(settings)
    test = sk.ArraySource(split.X_test, split.y_test, classes=split.classes)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "class .* no rows")  # a few rows may lack a class
        result = sk.train_model(config, source=source, test=test, centers=centers)
    seconds = time.perf_counter() - began
    result.model.backend.close()
    errors = [(int(e["samples"]), percent_wrong(e["test_accuracy"])) for e in result.history]
    return Fitted(percent_wrong(result.metrics["test_accuracy"]), seconds, errors)


def percent_wrong(accuracy: float) -> float:
    """Rounded, so that equally many wrong rows are equal errors."""
    return round(100 * (1 - accuracy), 9)


# --------------------------------------------------------------------------------------- results


@dataclass
class Results:
    """Errors in percent by label, place on the axis and repetition. x : the axis."""

    x: str
    values: dict[str, dict[float, list[float]]] = field(default_factory=dict)

    def add(self, label: str, x: float, value: float) -> None:
        """One more repetition of one measurement."""
        self.values.setdefault(label, {}).setdefault(x, []).append(value)

    def at(self, label: str, x: float) -> Array:
        """All repetitions of a measurement."""
        return np.array(self.values[label][x])

    def rows(self) -> list[dict[str, Any]]:
        """The table: a row for each place, a column for each label, mean ± deviation."""
        places = sorted({x for by_place in self.values.values() for x in by_place})
        return [
            {self.x: f"{x:g}"}
            | {name: shown(by_place[x]) for name, by_place in self.values.items() if x in by_place}
            for x in places
        ]


def shown(values: Sequence[float] | Array) -> str:
    """ "2.31 ± 0.12": mean and deviation over the repetitions."""
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1) if len(values) > 1 else 0:.2f}"


def clearly(difference: Array) -> bool:
    """Whether differences of paired repetitions are above 0 by twice their standard error."""
    n = len(difference)
    error = difference.std(ddof=1) / math.sqrt(n) if n > 1 else 0.0
    return bool(difference.mean() > 2 * error and difference.mean() > 0)


@dataclass(frozen=True)
class Verdict:
    """claim : what the paper says, and where. criterion : what counts here as having seen it.
    numbers : those it was judged by."""

    claim: str
    criterion: str
    seen: bool
    numbers: str

    def line(self) -> str:
        """The verdict in one line."""
        word = "SEEN" if self.seen else "NOT SEEN"
        return f"{word}: {self.claim}. Criterion: {self.criterion}. Here: {self.numbers}."


def draw(results: Results, title: str, path: Path) -> None:
    """Means with bars of one deviation; those in brackets, references, dashed and without bars."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(8.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, by_place in results.values.items():
        x = sorted(by_place)
        mean = [np.mean(by_place[k]) for k in x]
        bars = [np.std(by_place[k], ddof=1) if len(by_place[k]) > 1 else 0.0 for k in x]
        if label.startswith("("):
            colour = axes.lines[-1].get_color() if axes.lines else "0.4"
            axes.plot(x, mean, "--", lw=1, color=colour, label=label)
        else:
            axes.errorbar(x, mean, bars, fmt="o-", ms=4, capsize=2, label=label)
    axes.set_xscale("log")
    scales = [axes.xaxis]
    if min(min(values) for by_place in results.values.values() for values in by_place.values()) > 0:
        axes.set_yscale("log")
        scales.append(axes.yaxis)
    for scale in scales:
        scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
        scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        scale.set_minor_formatter(NullFormatter())
    axes.set(xlabel=results.x, ylabel=MEASURED, title=title)
    axes.grid(color="0.9")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=140)


# ---------------------------------------------------------------------------------- the command


Experiment = Callable[[Data, argparse.Namespace], tuple[Results, Verdict]]


def command(
    name: str,
    text: str | None,
    experiment: Experiment,
    arguments: list[str] | None,
    more: Callable[[argparse.ArgumentParser], Any] = lambda parser: None,
    epochs: tuple[int, int] | None = None,
    seeds: int = 5,
    digits: int | None = None,
) -> int:
    """Run an experiment from the command line; 0 when it is done, whatever was seen.

    more : adds options. epochs : in full and if quick, or None if they are no option. seeds,
    digits : repetitions, and digits to train on, if not said otherwise.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", help="folder of IDX files, or a Zarr store (default: the digits)")
    add("--test", help="a Zarr store to test on")
    few = f", {digits} of the digits" if digits else ""
    add("--samples", type=int, help=f"rows to train on, at most (default 10000{few})")
    add("--seeds", type=int, default=seeds, help=f"repetitions (default {seeds})")
    if epochs is not None:
        both = f"default {epochs[0]}, {epochs[1]} with --quick"
        add("--epochs", type=int, help=f"passes over the rows ({both})")
    add("--bandwidth", type=float, default=1.0, help="in median distances (default 1)")
    add("--device", default="auto", help="auto, cpu, gpu or gpu:N")
    add("--folder", type=Path, default=Path("runs/experiments"), help="for the results")
    add("--quick", action="store_true", help="300 rows, 2 repetitions: to see that it works")
    more(parser)
    options = parser.parse_args(arguments)
    if options.samples is None:
        options.samples = digits if digits and options.data is None else 10_000
    if epochs is not None and options.epochs is None:
        options.epochs = epochs[options.quick]
    if options.quick:
        options.seeds, options.samples = 2, min(options.samples, 300)
    if options.test is not None and options.data is None:
        parser.error("--test needs --data, the store to train on")
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds} must be at least 1")
    if options.samples < MIN_ROWS:
        parser.error(f"--samples {options.samples} is too few; use at least {MIN_ROWS}")
    began = time.perf_counter()
    try:
        import_optional("matplotlib.figure", "the plot", "report")
        options.folder.mkdir(parents=True, exist_ok=True)
        data = read_data(options)
        results, verdict = experiment(data, options)
    except sk.StreamkernError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    seconds = time.perf_counter() - began
    report(name, data, options, results, verdict, seconds)
    return 0


def report(
    name: str,
    data: Data,
    options: argparse.Namespace,
    results: Results,
    verdict: Verdict,
    seconds: float,
) -> None:
    """Print and write the table, the plot and the verdict."""
    path, rows = options.folder / f"{name}.json", results.rows()
    settings = {k: v if v is None or isinstance(v, int | float | str) else str(v)
                for k, v in vars(options).items()}  # fmt: skip
    whole = {
        "experiment": name,
        "data": {"name": data.name, "rows": len(data.X), "row shape": list(data.X.shape[1:])},
        "settings": settings,
        "measured": MEASURED,
        "table": rows,
        "values": results.values,
        "verdict": {**vars(verdict), "line": verdict.line()},
        "seconds": round(seconds, 1),
        "streamkern": sk.__version__,
    }
    path.write_text(json.dumps(whole, indent=1, ensure_ascii=False), encoding="utf-8")
    draw(results, f"{verdict.claim.split(':')[0]} on {data.name}", path.with_suffix(".png"))
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print(f"\n{MEASURED}, mean ± deviation of {options.seeds} repetitions ({data.name})\n")
    print(text_table(rows, columns))
    print(f"\n{verdict.line()}\n{path}, {path.with_suffix('.png')}; {seconds:.0f} s in all")
