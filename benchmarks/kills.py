"""Kill every command at random instants, repeat it, and compare every byte of the result.

    python -m benchmarks.kills --kills 1000          all commands, solvers and losses
    python -m benchmarks.kills --kills 20 --only ingest,predict
    python -m benchmarks.kills --kills 150 --only loss

Each command runs once without a kill. Many other runs of it are killed (SIGKILL) again and again
until one ends by itself. The results must be the same, byte for byte, and no other files may be
left. Each process is killed at a uniformly random instant of the duration of the undisturbed run,
so that starting, writing, publishing and cleaning up are hit in proportion to their time. An exit
code other than 0 is a failure, and so is a difference. If the predictions were complete when the
process was killed, the next process raises an error because they exist.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

N, N_MORE, D, C = 3000, 1001, 12, 3
METHODS: dict[str, dict[str, object]] = {
    "block": {"name": "block"},
    "blocks": {"name": "block", "block_size": 60},
    "blocks, ridge": {"name": "block", "block_size": 60, "ridge": 1e-3},
    "eigenpro3": {"name": "eigenpro3"},
    "eigenpro4": {"name": "eigenpro4", "period": 4},
    "block, metric": {"name": "block", "model.metric": "learn"},
    "block, early": {"name": "block", "run.early_stopping": True, "run.n_iter_no_change": 1},
    "direct": {"name": "direct"},
    "falkon": {"name": "falkon"},
    "sgd": {"name": "sgd"},
    "eigenpro1": {"name": "eigenpro1"},
    "eigenpro2": {"name": "eigenpro2"},
}
"""Settings of `solver`, and others by their full names."""
LOSSES: dict[str, dict[str, object]] = {
    "squared_hinge": {"name": "block"},
    "log_loss": {"name": "block"},
    "log_loss, blocks": {"name": "block", "block_size": 60},
    "log_loss, direct": {"name": "direct"},
    "log_loss, falkon": {"name": "falkon"},
    "log_loss, eigenpro4": {"name": "eigenpro4", "period": 4},
    "huber": {"name": "block"},
    "huber, direct": {"name": "direct"},
    "absolute_error": {"name": "block"},
    "quantile": {"name": "block", "model.quantile": [0.05, 0.5, 0.95]},
    "quantile, falkon": {"name": "falkon", "model.quantile": [0.05, 0.5, 0.95]},
    "expectile": {"name": "block", "model.quantile": 0.9},
    "poisson": {"name": "block"},
    "poisson, direct": {"name": "direct"},
    "gamma": {"name": "block", "block_size": 60},
}
"""Settings for each loss, which is the first word of the name; `METHODS` all minimise squares."""
CLASS_LOSSES = ("squared_hinge", "log_loss")
IN_PLACE = ("sgd", "eigenpro1", "eigenpro2")
# Times, and the seal of a document that holds one.
VOLATILE = ("writer", "time", "saved", "seconds", "mtime", "sha256")


@dataclass
class Command:
    """Arguments of the command, given the folder it works in, what it left there, by name, and what
    is wrong there after a kill."""

    name: str
    arguments: Callable[[Path], list[str]]
    left: Callable[[Path], Mapping[str, str]]
    wrong: Callable[[Path], list[str]] = lambda folder: []


@dataclass
class Outcome:
    """Counts and failures of one command."""

    kills: int = 0
    ended: int = 0
    whole_s: float = 0.0
    failures: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------- the data


def make_inputs(folder: Path) -> None:
    """Arrays, a store and a trained run that the commands start from."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((N + N_MORE, D)).astype(np.float32)
    y = np.abs(X[:, :C]).argmax(axis=1)
    np.savez(folder / "raw.npz", X=X[:N], y=y[:N])
    np.savez(folder / "more.npz", X=X[N:], y=y[N:])
    call(["ingest", str(folder / "raw.npz"), str(folder / "train.zarr"), "--chunk-mb", "0.02"])
    path = run_file(folder, folder / "trained", METHODS["direct"])
    call(["train", str(path)])
    amounts = np.exp(np.sin(X[:N, 0]) + X[:N, 1] / 2) * rng.gamma(2.0, 0.5, N)
    np.savez(folder / "amounts.npz", X=X[:N], y=amounts)
    values = ["--targets", "values", "--chunk-mb", "0.02"]
    call(["ingest", str(folder / "amounts.npz"), str(folder / "amounts.zarr"), *values])
    write_table(folder / "table.csv", N, 0)
    write_table(folder / "new.csv", N_MORE, 1)
    call(ingest_table(folder, folder / "table.zarr"))
    path = run_file(folder, folder / "of-table", METHODS["direct"], "table.zarr")
    call(["train", str(path)])


def write_table(path: Path, n: int, seed: int) -> None:
    """Write a CSV file with text, dates, missing values, and a target that follows from them."""
    rng = np.random.default_rng(seed)
    day, city, shop = rng.integers(0, 900, n), rng.integers(0, 4, n), rng.integers(0, 60, n)
    days = np.datetime64("2021-01-01") + day
    lines = ["day,city,shop,size,price"]
    for k in range(n):
        size = "" if k % 9 == 0 else f"{rng.random():.4f}"
        price = city[k] + shop[k] % 7 + np.sin(day[k] / 58)
        lines.append(f'{days[k]},"city, {city[k]}",shop {shop[k]},{size},{price:.4f}')
    path.write_text("\n".join(lines) + "\n")


def ingest_table(folder: Path, out: Path) -> list[str]:
    """Return the command that ingests the table through scratch files."""
    memory = ["--memory", "512 KiB", "--chunk-mb", "0.02"]
    return ["ingest", str(folder / "table.csv"), str(out), "--y", "price", *memory]


def run_file(
    folder: Path, run_dir: Path, method: Mapping[str, object], store: str = "train.zarr"
) -> Path:
    """Write a run file next to its run directory. store : name of the training store in
    `folder`."""
    in_place = method["name"] in IN_PLACE
    tables: dict[str, dict[str, object]] = {
        "data": {"train": str(folder / store), "test": str(folder / store),
                 "epochs": 4, "batch_size": 300},
        "model": {"bandwidth": 4.0} | ({} if in_place else {"n_centers": 240}),
        "solver": {},
        "run": {"run_dir": str(run_dir), "checkpoint_every": 3, "memory": "1 GiB", "device": "cpu",
                "threads": 1, "accelerator": "none"},
    }  # fmt: skip
    for name, value in method.items():
        table, _, key = name.rpartition(".")
        tables[table or "solver"][key] = value
    lines = [
        line
        for table, entries in tables.items()
        for line in (f"[{table}]", *(f"{k} = {json.dumps(v)}" for k, v in entries.items()))
    ]
    path = run_dir.with_suffix(".toml")
    path.write_text("\n".join(lines) + "\n")
    return path


# ------------------------------------------------------------------------- what a command leaves


def all_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by its path."""
    return {
        str(path.relative_to(folder)): digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def digest(path: Path) -> str:
    """Return the SHA-256 of a file; of JSON without the entries that differ from run to run."""
    raw = path.read_bytes()
    if path.suffix == ".json":
        raw = json.dumps(_steady(json.loads(raw)), sort_keys=True).encode()
    return hashlib.sha256(raw).hexdigest()


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _steady(v) for k, v in value.items() if k not in VOLATILE}
    return [_steady(v) for v in value] if isinstance(value, list) else value


def trained(run_dir: Path) -> dict[str, str]:
    """Return every array of the setup and of the last checkpoint, and the names of the files of a
    run.

    A manifest records when it was saved, and a log when a line was written; their contents are
    compared as they are read.
    """
    from streamkern.rundir.run_directory import RunDirectory

    with RunDirectory(run_dir, writable=False) as run:
        setup, saved = run.load_setup(), run.load_latest()
    assert setup is not None
    assert saved is not None
    assert saved.meta["position"]["done"]
    named = {f"setup {name}": a for name, a in setup.arrays.items()}
    named |= {f"checkpoint {name}": a for name, a in saved.arrays.items()}
    results = {name: hashlib.sha256(a.tobytes()).hexdigest() for name, a in named.items()}
    results["metrics"] = json.dumps(saved.meta["metrics"], sort_keys=True)
    # A killed save may have been given another number; no more groups than manifests.
    groups = [p for p in (run_dir / "checkpoints").iterdir() if p.is_dir()]
    manifests = [p for p in (run_dir / "checkpoints").iterdir() if p.is_file()]
    results["in the folder"] = ", ".join(sorted(p.name for p in run_dir.iterdir()))
    results["checkpoints"] = f"{len(groups)} groups, {sorted(p.name for p in manifests)}"
    return results


def copied(folder: Path, work: Path) -> str:
    """Copy the store for a command that changes it; return the path of the copy."""
    place = work / "out.zarr"
    shutil.copytree(folder / "train.zarr", place)
    return str(place)


def neither_old_nor_new(work: Path) -> list[str]:
    """Return the faults of a store after `append` was killed: every chunk is read and compared."""
    from streamkern.basics.errors import StreamkernError
    from streamkern.store.store import open_store

    try:
        store = open_store(work / "out.zarr")
        store.verify()
    except StreamkernError as error:
        return [f"after a kill: {error}"]
    n = store.spec.n_rows
    return [] if n in (N, N + N_MORE) else [f"after a kill: {n} rows"]


def commands(folder: Path) -> Iterator[Command]:
    """Yield all commands. `folder` holds the inputs."""
    raw, store = str(folder / "raw.npz"), str(folder / "train.zarr")
    spilling = ["--memory", "1 MiB", "--chunk-mb", "0.02"]
    yield Command(
        "ingest", lambda f: ["ingest", raw, str(f / "out.zarr"), *spilling], all_files
    )  # fmt: skip
    yield Command("ingest table", lambda f: ingest_table(folder, f / "out.zarr"), all_files)
    yield Command(
        "augment",
        lambda f: ["augment", store, str(f / "out.zarr"), "--copies", "3", "--transform",
                   '{kind = "noise", sigma = 0.5}', "--chunk-mb", "0.02"],
        all_files,
    )  # fmt: skip
    yield Command(
        "append",
        lambda f: ["append", copied(folder, f), str(folder / "more.npz"), "--memory", "1 MiB"],
        lambda f: all_files(f / "out.zarr"),
        neither_old_nor_new,
    )
    for ending in ("zarr", "npy", "csv"):
        yield Command(
            f"predict .{ending}",
            lambda f, ending=ending: [  # type: ignore[misc]
                "predict", str(folder / "trained"), store, str(f / f"out.{ending}")
            ],
            all_files,
        )  # fmt: skip
    yield Command(
        "predict table",
        lambda f: [
            "predict", str(folder / "of-table"), str(folder / "new.csv"), str(f / "out.csv"),
            "--with-input",
        ],
        all_files,
    )  # fmt: skip
    yield Command(
        "train table",
        lambda f: ["train", str(run_file(folder, f / "run", METHODS["block"], "table.zarr"))],
        lambda f: trained(f / "run"),
    )
    for name, method in METHODS.items():
        yield Command(
            f"train {name}",
            lambda f, method=method: [  # type: ignore[misc]
                "train", str(run_file(folder, f / "run", method))
            ],
            lambda f: trained(f / "run"),
        )  # fmt: skip
    for name, method in LOSSES.items():
        loss = name.partition(",")[0]
        settings = method | {"model.loss": loss}
        rows = "train.zarr" if loss in CLASS_LOSSES else "amounts.zarr"
        yield Command(
            f"loss {name}",
            lambda f, settings=settings, rows=rows: [  # type: ignore[misc]
                "train", str(run_file(folder, f / "run", settings, rows))
            ],
            lambda f: trained(f / "run"),
        )  # fmt: skip
    yield Command(
        "tune",
        lambda f: [
            "tune", str(run_file(folder, f / "run", {"name": "auto"})), "--rows", "600",
            "--centers", "60",
        ],
        # The journal of a killed search has the trials that were begun as well.
        lambda f: {
            name: digest for name, digest in all_files(f / "run-tune").items()
            if name != "journal.log"
        },
    )  # fmt: skip


# ----------------------------------------------------------------------------------- the killing


def _life(arguments: list[str], errors: str) -> None:
    from streamkern.cli.main import run_command

    sys.argv = ["streamkern", *arguments]
    with Path(errors).open("w") as error_file:
        sys.stdout = sys.stderr = error_file
        sys.exit(run_command())


def begin(arguments: list[str], errors: Path) -> Any:
    """Start the command in a process of its own, forked from a server that has imported
    everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "streamkern.cli.main",
            "streamkern.train.train",
            "streamkern.ingest.ingest",
            "streamkern.ingest.append",
        ]
    )
    life = context.Process(target=_life, args=(arguments, str(errors)))
    life.start()
    return life


def call(arguments: list[str]) -> float:
    """Run a command to its end, and return its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "said"
        began = time.perf_counter()
        life = begin(arguments, errors)
        life.join()
        if life.exitcode != 0:
            raise RuntimeError(f"{arguments} ended with {life.exitcode}: {errors.read_text()}")
        return time.perf_counter() - began


def kill(command: Command, folder: Path, kills: int, draw: random.Random) -> Outcome:
    """Kill a command so many times, and compare each time that it came to its end."""
    outcome, error_file = Outcome(), folder / "said"
    plain = folder / "plain"
    plain.mkdir()
    outcome.whole_s = call(command.arguments(plain))
    expected = command.left(plain)
    while outcome.kills < kills and not outcome.failures:
        work = folder / "killed"
        work.mkdir()
        arguments = command.arguments(work)
        while not outcome.failures:
            life = begin(arguments, error_file)
            life.join(draw.uniform(0, 1.2 * outcome.whole_s) if outcome.kills < kills else None)
            life.kill()
            life.join()
            if life.exitcode == 0 or _was_there(life.exitcode, error_file):
                break
            if life.exitcode != -9:
                outcome.failures.append(
                    f"exit code {life.exitcode}: {error_file.read_text()[-2000:]}"
                )
                break
            outcome.kills += 1
            outcome.failures += command.wrong(work)
        if not outcome.failures:
            outcome.ended += 1
            outcome.failures += _differences(expected, command.left(work))
            shutil.rmtree(work)
    return outcome


def _was_there(code: int | None, error_file: Path) -> bool:
    """Return whether a command refused to overwrite its output. Predictions that were complete when
    the command was killed stay, and are compared."""
    return code == 2 and "exists already; give another output" in error_file.read_text()


def _differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    return [
        f"{name} is {'left over' if name not in expected else 'missing' if name not in found else 'another'}"  # noqa: E501
        for name in sorted({*expected, *found})
        if expected.get(name) != found.get(name)
    ]


def run(kills: int, only: tuple[str, ...] = (), seed: int = 0) -> dict[str, Outcome]:
    """Kill the commands whose names begin with one of `only`, `kills` times in all."""
    with tempfile.TemporaryDirectory(prefix="streamkern-kills-") as name:
        inputs = Path(name) / "inputs"
        inputs.mkdir()
        make_inputs(inputs)
        chosen = [c for c in commands(inputs) if not only or c.name.startswith(only)]
        outcomes = {}
        for i, command in enumerate(chosen):
            folder = Path(name) / f"command-{i}"
            folder.mkdir()
            each = -(-kills // len(chosen))
            outcomes[command.name] = kill(command, folder, each, random.Random(f"{seed}, {i}"))
            print(command.name, vars(outcomes[command.name]), flush=True)
        return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--only", type=lambda text: tuple(text.split(",")), default=())
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    outcomes = run(args.kills, args.only, args.seed)
    total = sum(outcome.kills for outcome in outcomes.values())
    failed = [name for name, outcome in outcomes.items() if outcome.failures]
    print(f"{total} kills, {sum(o.ended for o in outcomes.values())} came to an end; ", end="")
    print(f"differences in {', '.join(failed)}" if failed else "every byte as undisturbed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
