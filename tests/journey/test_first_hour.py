"""Run the documented first steps from a wheel in a new environment.

Each step goes on from those before. What was typed, what came back and how long it took
is in `first_hour.txt` beside the files of the newcomer, and with `-s` on the screen.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.s3_server import AWS_ENVIRONMENT, KEY, SECRET, S3Server

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(python|toml|sh)\n(.*?)^```$", re.M | re.S)
PEOPLE = """
import numpy as np

rng = np.random.default_rng(0)
X = rng.standard_normal((6000, 3))
tall = np.where(X[:, 0] + np.sin(X[:, 1]) > 0, "tall", "small")
for name, some in (("people", slice(5000)), ("others", slice(5000, None))):
    with open(f"{name}.csv", "w") as file:
        file.write("height,arm,leg,kind\\n")
        for row, kind in zip(X[some], tall[some]):
            file.write(",".join(f"{x:.4f}" for x in row) + f",{kind}\\n")
"""


class Newcomer:
    """folder : an empty one, where all happens. bin : of the environment, made by `install`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "venv" / "bin"
        self.capture = folder / "first_hour.txt"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
        self.env = kept | {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}

    def type(self, line: str) -> str:
        """Run a line of a shell, which must succeed; what it wrote."""
        start_time = time.monotonic()
        done = subprocess.run(
            ["sh", "-e", "-c", line], cwd=self.folder, env=self.env, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._keep(line, done.stdout, time.monotonic() - start_time)
        assert done.returncode == 0, f"{line}\n{done.stdout}"
        return done.stdout

    def python(self, text: str) -> str:
        """Run a program."""
        return self.type(f"python -c {shlex.quote(text)}")

    def _keep(self, line: str, written: str, seconds: float) -> None:
        text = f"$ {line}\n{written}({seconds:.1f} s)\n\n"
        print(text)
        with self.capture.open("a", encoding="utf-8") as file:
            file.write(text)


@pytest.fixture
def newcomer(tmp_path: Path) -> Newcomer:
    folder = tmp_path
    command = [sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(ROOT)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode and "No matching distribution" in made.stdout + made.stderr:
        pytest.skip("needs a package index to install from")
    assert made.returncode == 0, made.stdout + made.stderr
    return Newcomer(folder)


def release_is_documented(newcomer: Newcomer) -> None:
    made = sorted((newcomer.folder / "dist").iterdir())
    assert [path.suffix for path in made] == [".whl", ".gz"]
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def installed_from_a_wheel(newcomer: Newcomer) -> None:
    [wheel] = (newcomer.folder / "dist").glob("*.whl")
    newcomer.type(f"{shlex.quote(sys.executable)} -m venv venv")
    newcomer.type(f"pip install --quiet --disable-pip-version-check '{wheel}[s3,report]'")
    where = newcomer.python("import streamkern; print(streamkern.__file__)")
    assert str(newcomer.folder) in where
    newcomer.type("pip check")


def the_tutorial(newcomer: Newcomer) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    texts: list[str] = []
    for kind, block in BLOCK.findall(text):
        if kind == "python":  # each goes on from those before
            texts.append(block)
            newcomer.python("".join(texts))
        elif kind == "toml":
            (newcomer.folder / "run.toml").write_text(block, encoding="utf-8")
        else:
            newcomer.type(block)
    predicted = (newcomer.folder / "predictions.csv").read_text(encoding="utf-8").splitlines()
    assert len(predicted) == 1 + 450


def own_csv_file(newcomer: Newcomer) -> None:
    newcomer.python(PEOPLE)
    newcomer.type("streamkern ingest people.csv people.zarr --y kind")
    newcomer.type("streamkern train --train people.zarr --run-dir runs/people")
    shown = newcomer.type("streamkern evaluate runs/people others.csv --y kind")
    accuracy = re.search(r"accuracy\D*([\d.]+)", shown)
    assert accuracy is not None, shown
    assert float(accuracy[1]) > 0.95


@contextlib.contextmanager
def on_s3(newcomer: Newcomer, s3: S3Server) -> Iterator[str]:
    """Return a folder of an S3 server; the credentials are in the environment."""
    before = newcomer.env
    newcomer.env = before | AWS_ENVIRONMENT | {
        "AWS_ENDPOINT_URL": s3.endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
    }  # fmt: skip
    yield f"s3://{s3.make_bucket()}/of-mine"
    newcomer.env = before


def train_from_s3(newcomer: Newcomer, s3: S3Server) -> None:
    with on_s3(newcomer, s3) as location:
        newcomer.type(f"streamkern ingest people.csv {location}/people.zarr --y kind")
        newcomer.type(f"streamkern train --train {location}/people.zarr --run-dir {location}/run")
        newcomer.type(f"streamkern predict {location}/run others.csv from-s3.csv --y kind")
    newcomer.type("streamkern predict runs/people others.csv from-disk.csv --y kind")
    ours, theirs = (
        (newcomer.folder / f"from-{location}.csv").read_bytes() for location in ("s3", "disk")
    )
    assert ours == theirs


KILLED = "train run.toml --set data.copies=60 --set run.checkpoint_every=8 --run-dir"


def kill_and_resume(newcomer: Newcomer) -> None:
    command = ["streamkern", *KILLED.split(), "runs/killed"]
    process = subprocess.Popen(
        [str(newcomer.bin / command[0]), *command[1:]], cwd=newcomer.folder, env=newcomer.env,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    checkpoints = newcomer.folder / "runs" / "killed" / "checkpoints"
    while process.poll() is None and not (checkpoints.is_dir() and any(checkpoints.iterdir())):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    newcomer.type(f"streamkern {KILLED} runs/killed")
    newcomer.type(f"streamkern {KILLED} runs/undisturbed")
    for name in ("killed", "undisturbed"):
        newcomer.type(f"streamkern predict runs/{name} digits-test.zarr {name}.npy")
    ours, theirs = (np.load(newcomer.folder / f"{n}.npy") for n in ("killed", "undisturbed"))
    np.testing.assert_array_equal(ours, theirs)


def looked_at(newcomer: Newcomer) -> None:
    newcomer.type("streamkern report runs/killed runs/undisturbed --out report.html")
    page = (newcomer.folder / "report.html").read_text(encoding="utf-8")
    assert "runs/killed" in page
    assert "undisturbed" in newcomer.type("streamkern runs runs")


def loaded_in_python(newcomer: Newcomer) -> None:
    shown = newcomer.python("""
import numpy as np
import streamkern

model = streamkern.load("runs/people")
rows = np.loadtxt("others.csv", delimiter=",", skiprows=1, usecols=(0, 1, 2))
kinds = np.loadtxt("others.csv", delimiter=",", skiprows=1, usecols=3, dtype=str)
print(model)
print("right:", model.score(rows, kinds))
""")
    assert float(shown.split()[-1]) > 0.95


@pytest.mark.full
def test_documented_first_steps_work_from_a_wheel(newcomer: Newcomer, s3: S3Server) -> None:
    """Run the commands of the documentation in order; each uses the results of earlier ones."""
    release_is_documented(newcomer)
    installed_from_a_wheel(newcomer)
    the_tutorial(newcomer)
    own_csv_file(newcomer)
    train_from_s3(newcomer, s3)
    kill_and_resume(newcomer)
    looked_at(newcomer)
    loaded_in_python(newcomer)
