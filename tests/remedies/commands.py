"""Mistakes on the command line."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.remedies import TRAIN, Case, cases_of, command, regressor

COVERED = ("cli",)
RUN = f"{TRAIN} --solver block --set data.batch_size=20 --set run.checkpoint_every=2"


def damaged(name: str, *parts: str) -> Case:
    """Return a run whose newest parts with these names are damaged, and the remedy that `info
    --verify` prints."""
    command(f"{RUN} --run-dir {name}")

    def wrong() -> None:
        for part in parts:
            newest = max(path for path in Path(name, part).iterdir() if path.is_dir())
            file = max(path for path in newest.rglob("*") if path.name == "0" and path.is_file())
            file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
        command(f"info {name} --verify")

    def right() -> None:
        if "setup" in parts:
            Path(name, "setup.json").unlink()
        command(f"{RUN} --run-dir {name}")
        command(f"info {name} --verify")

    delete = f"delete {name}/setup.json, and " if "setup" in parts else "; "
    return (f"{delete}run the training command of this run again", wrong, right)


def command_cases() -> list[Case]:
    """Return mistakes on the command line; what is said is on stderr."""
    regressor(run_dir="metric", metric=[1.0, 2.0, 1.0]).fit("data.zarr")
    commands = [
        ("needs the model of a run, but .* leave it out", "info data.zarr --importances rows.npz",
         "info data.zarr"),
        ("set it in .data., or give --train URL", "plan empty.toml --no-measure",
         "plan empty.toml --no-measure --train data.zarr"),
        ("is in a folder that does not exist; create it first", "tune run.toml --write no/x.toml",
         "plan run.toml --no-measure"),
        ("must be KEY=VALUE; write for example anon=true", "info run --storage-option anon",
         "info run --storage-option anon=true"),
        ("put credentials into the environment", "info run --storage-option secret=abc",
         "info run --storage-option profile=minio"),
        ("holds credentials, .*; put credentials into the environment", "info s3://k:s@b/x",
         "info run"),
        ("write it in single quotes, such as",
         "info run --storage-option 'client_kwargs={region_name: eu-west-1}'",
         "info run --storage-option 'client_kwargs={\"region_name\": \"eu-west-1\"}'"),
        ("names of columns in one line; write for example a,b,c",
         "ingest rides.csv k.zarr --x 'a\nb' --y fare", "ingest rides.csv k.zarr --x a,b --y fare"),
        ("give the store before the files: streamkern append k.zarr rides.csv",
         "append rides.csv k.zarr", "append k.zarr rides.csv --x a,b"),
        ("--out parts cannot be replaced .*name another file", "report run --out parts",
         "report run --out parts.html"),
        ("does not end in .onnx or .c; give m.onnx", "export run m", "export run m.onnx"),
        ("holds another model or run already; give a new or empty directory",
         "compress run data.zarr metric --n-centers 5",
         "compress run data.zarr small --n-centers 5"),
        ("is a folder of runs; list them with streamkern runs .,", "info .", "runs ."),
        ("or describe one with streamkern info ./bad_checkpoint", "info .",
         "info ./bad_checkpoint"),
        ("give the name of a new file", "info metric --plot rides.csv",
         "info metric --plot metric.png"),
        ("there is no folder no; create this folder first", "info metric --plot no/metric.png",
         "info metric --plot metric2.png"),
        ("--copies 0 must be a whole number, at least 1", "augment data.zarr l.zarr --copies 0",
         "augment data.zarr l.zarr --copies 1"),
        ("--weights has 3 numbers for 2 stores in the list of inputs; give one number",
         "augment data.zarr data.zarr m.zarr --weights 1,2,3",
         "augment data.zarr data.zarr m.zarr --weights 1,2"),
        ("--transform number 1.sigma is missing: .*a number.*set it in the same table",
         "augment data.zarr n.zarr --transform '{kind = \"noise\"}'",
         "augment data.zarr n.zarr --transform '{kind = \"noise\", sigma = 1.0}'"),
        ("there is no training data; give a run file, or --train URL", "plan --no-measure",
         "plan --no-measure --train data.zarr"),
        ("must be SECTION.KEY=VALUE, such as --set solver.level=100", f"{TRAIN} --set run.threads",
         f"{TRAIN} --set run.threads=1"),
        ("give a folder of runs", "runs nothing", "runs ."),
        ("give the path of a store or of a run directory", "info nothing", "info run"),
        ("give one of them, such as", "evaluate . rows.npz", "evaluate run rows.npz"),
        ("has none; leave it out", "info data.zarr --plot x.png", "info data.zarr"),
        ("has none; leave it out", "info run --plot x.png", "info run"),
        ("'s3://b/x.html' is a URL, but the report writes a local file; give the path",
         "report run --out s3://b/x.html", "report run --out local.html"),
        ("'s3://b/x.png' is a URL, but --plot writes a local file; give the path",
         "info metric --plot s3://b/x.png", "info metric --plot local.png"),
        ("there is no folder no; create it first", "report run --out no/x.html",
         "report run --out x.html"),
        ("was not made by streamkern report; name another file", "report run --out rides.csv",
         "report run --out y.html"),
        ("or was edited; name another file",
         "tune run.toml --write run.toml --rows 50 --bandwidths 1 --ridges 0.001 --epochs 1",
         "tune run.toml --write new.toml --rows 50 --bandwidths 1 --ridges 0.001 --epochs 1 "
         "--refine 0 --set model.metric=none --set model.kernel=gaussian"),
        ("name columns, such as a,b,c, or leave it out", "ingest rides.csv e.zarr --x '' --y fare",
         "ingest rides.csv e.zarr --x a,b,w --y fare"),
        ("such as '{kind = \"noise\", sigma = 0.5}'", "augment data.zarr g.zarr --transform noise",
         "augment data.zarr g.zarr --transform '{kind = \"noise\", sigma = 0.5}'"),
        ("must be numbers with commas between them; write for example 3,1",
         "augment data.zarr data.zarr h.zarr --weights x",
         "augment data.zarr data.zarr h.zarr --weights 3,1"),
        ("give the path of a new store as the last word", "ingest rides.csv rides.csv --y fare",
         "ingest rides.csv f.zarr --y fare"),
        ("name columns of the file with --x and --y", "ingest rides.csv i.zarr --y target",
         "ingest rides.csv i.zarr --y fare"),
        ("pass --overwrite to replace it", "ingest rows.npz labels.zarr",
         "ingest rows.npz labels.zarr --overwrite"),
        ("give it as --train data.zarr", "plan data.zarr", "plan --train data.zarr --no-measure"),
        ("did you mean --y?", "ingest rides.csv j.zarr --target fare",
         "ingest rides.csv j.zarr --y fare"),
        ("--set model.n_centers=20", "train --train data.zarr --n-centers 20", TRAIN),
        ("is a file of data, not a run file; make a store of it with streamkern ingest",
         "train rides.csv", "ingest rides.csv rides.zarr --y fare"),
        ("in settings|restore these, or give another run_dir",
         f"{TRAIN} --run-dir bad_setup --solver direct",
         f"{TRAIN} --run-dir other --solver direct"),
    ]  # fmt: skip
    return [
        damaged("bad_checkpoint", "checkpoints"),
        damaged("bad_setup", "setup"),
        damaged("both_bad", "setup", "checkpoints"),
        *cases_of(lambda line: partial(command, line), commands),
    ]


TABLES = (command_cases,)
