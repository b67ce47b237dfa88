"""The command: `python -m experiments [NAME | all] [options]`; NAME --help lists the options."""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import streamkern as sk
from experiments.catalogue import NAMES, experiment_named
from experiments.data import MIN_ROWS, Data, digits
from experiments.experiment import Experiment, Sizes
from experiments.readers import read_data
from experiments.run import report, run
from streamkern.basics.optional import import_optional

OF_DATA = ("--data", "--test", "--bandwidth")
QUICK = Sizes(rows=300, repetitions=2, epochs=3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one experiment or all; return 0 at the end, for any verdict."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(__doc__, "\n")
        for name in NAMES:
            print(f"{name:28} {experiment_named(name).source}")
        return 0
    name, *rest = given
    if name not in (*NAMES, "all"):
        print(f"there is no experiment {name}; python -m experiments lists them", file=sys.stderr)
        return 2
    if name != "all":
        return one(name, rest)
    return max(one(each, rest, of_all=True) for each in NAMES)


def one(name: str, arguments: Sequence[str], of_all: bool = False) -> int:
    """Run one experiment with its options. of_all : whether the options are for all experiments."""
    experiment = experiment_named(name)
    options = parsed(name, experiment, arguments, of_all)
    try:
        import_optional("matplotlib.figure", "the plot", "report")
        make_folder(options.folder)
        data = data_of(experiment, options)
        results = run(name, experiment, data, options)
    except sk.StreamkernError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    report(name, experiment, data, options, results)
    return 0


def make_folder(folder: Path) -> None:
    """Make the folder of the results, and raise ConfigError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise sk.ConfigError(
            f"--folder {folder} cannot be written to: {error.strerror}", "give another folder"
        ) from error


def parsed(
    name: str, experiment: Experiment, arguments: Sequence[str], of_all: bool = False
) -> argparse.Namespace:
    """Return the options; with `--data`, the default sizes are the sizes of the paper.

    of_all : whether options of data are accepted for an experiment without data.
    """
    module = inspect.getmodule(experiment.points)
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments {name}",
        description=module.__doc__ if module else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    here, paper = experiment.stand_in, experiment.paper
    if experiment.needs != "nothing":
        add("--data", help="the paper's data: see experiments/readers.py")
        add("--test", help="a Zarr store to test on")
        add("--bandwidth", type=float, default=1.0, help="in median distances (default 1)")
    elif of_all:
        for option in OF_DATA:
            add(option, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    both = "(default {0}; with --data {1})"
    add("--rows", type=int, help="rows to train on, at most " + both.format(here.rows, paper.rows))
    add("--repetitions", type=int, help=both.format(here.repetitions, paper.repetitions))
    add("--epochs", type=int, help="passes over the rows " + both.format(here.epochs, paper.epochs))
    add("--device", default="auto", help="auto, cpu, gpu or gpu:N")
    add("--folder", type=Path, default=Path("runs/experiments"), help="for the results")
    add("--quick", action="store_true", help="a small run, to see that it works")
    experiment.options(parser)
    options = parser.parse_args(arguments)
    if experiment.needs == "nothing":
        for option in OF_DATA:
            vars(options).pop(option.removeprefix("--"), None)
    own = getattr(options, "data", None) is not None
    sizes = paper if own else here
    if options.quick:
        sizes = replace(QUICK, rows=min(QUICK.rows, sizes.rows), epochs=min(3, sizes.epochs))
    for field in ("rows", "repetitions", "epochs"):
        if getattr(options, field) is None:
            setattr(options, field, getattr(sizes, field))
    if getattr(options, "test", None) is not None and not own:
        parser.error("--test needs --data, the store to train on")
    if options.repetitions < 1 or options.epochs < 1:
        parser.error("--repetitions and --epochs must be at least 1")
    if options.rows < MIN_ROWS:
        parser.error(f"--rows {options.rows} is too few; use at least {MIN_ROWS}")
    return options


def data_of(experiment: Experiment, options: argparse.Namespace) -> Data:
    """Return the rows that `--data` names, or the built-in ones."""
    if experiment.needs == "nothing":
        return Data("made", np.empty((0, 1)), np.empty(0), None, None, own=False)
    if options.data is None:
        return digits() if experiment.make is None else experiment.make(options)
    data = read_data(options.data, options.test, options.rows, options.folder)
    if experiment.needs == "images" and data.X.ndim < 3:
        raise sk.DataError(
            f"{options.data} has rows of shape {data.X.shape[1:]}, which are not images; give "
            "data with rows of shape (height, width) or (height, width, channels)"
        )
    return data


if __name__ == "__main__":
    sys.exit(main())
