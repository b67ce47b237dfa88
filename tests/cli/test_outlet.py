"""What leaves the command: no secret in any text, and no reader that could change the outcome."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamkern.basics.errors import StreamkernError
from streamkern.cli import main
from streamkern.cli.outlet import HIDDEN, Outlet, Secrets
from streamkern.config.run_config import RunConfig
from streamkern.filesystem.urls import zarr_store
from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_directory import RunDirectory

DONE, FAILED = 0, 3

rng = np.random.default_rng(0)

# ------------------------------------------------------------------------------------- secrets

SCHEMES = ("s3", "https", "http", "gs", "simplecache::s3", "filecache::https", "zip::s3", "nope")
QUERIES = ("X-Amz-Signature", "AWSAccessKeyId", "sig", "token", "password", "anything")
LETTERS = st.characters(codec="ascii", categories=("Lu", "Ll", "Nd"))
# As keys look, with the signs that are special to somebody. Nothing else in a text is like them.
SECRETS = st.builds(
    lambda a, sign, b: f"Zq{a}{sign}{b}7Xk",
    st.text(LETTERS, min_size=3, max_size=8),
    st.sampled_from(["", "/", "+", "=", "!", "%", "$", ":", "@", "-", "~"]),
    st.text(LETTERS, min_size=3, max_size=300),
)
SHAPES = (
    "{scheme}://KEYNAME:{secret}@bucket/x",
    "{scheme}://{encoded}@bucket/x",
    "{scheme}:/KEYNAME:{secret}@bucket/x",
    "{scheme}://bucket/x?{query}={secret}",
    "{scheme}://bucket/x?a=1&{query}={secret}&b=2",
    "{scheme}://bucket/x#{secret}",
    "{scheme}://user:{secret}@host:9000/a/b?{query}={secret}#{secret}",
    "{scheme}://user:{encoded}@host/x",
)
URLS = st.builds(
    lambda shape, scheme, query, secret: (
        shape.format(scheme=scheme, query=query, secret=secret, encoded=quote(secret, safe="")),
        secret,
    ),
    st.sampled_from(SHAPES), st.sampled_from(SCHEMES), st.sampled_from(QUERIES), SECRETS,
)  # fmt: skip
KNOWN = (
    ("https://u:ZqPWPWPW@host/x?X-Amz-Signature=ZqSIGNATURE" + 40 * "x", "ZqPWPWPW"),
    ("https://u:PW@host/x?X-Amz-Signature=ZqSIGNATURE7Xk", "ZqSIGNATURE7Xk"),
    ("simplecache::s3://KEYNAME:ZqSECRET7Xk@bucket/x", "ZqSECRET7Xk"),
    ("s3:/KEYNAME:ZqSECRET7Xk@b/x", "ZqSECRET7Xk"),
)


def leaks(text: str, secret: str) -> bool:
    """Whether eight characters of a secret in a row can be read."""
    return any(secret[i : i + 8] in text for i in range(max(1, len(secret) - 7)))


def said(call: Any) -> str:
    try:
        call()
    except StreamkernError as error:
        return f"{error} {error!r}"
    return ""


@example(KNOWN[0])
@example(KNOWN[1])
@example(KNOWN[2])
@example(KNOWN[3])
@given(URLS)
def test_no_setting_that_is_refused_shows_a_secret(case: tuple[str, str]) -> None:
    """S1: the text is cut short after the secrets are taken out of it."""
    url, secret = case
    for key in ("train", "test", "cache", "dask"):
        tables = {"data": {"train": "x.zarr", key: url}}
        assert not leaks(said(lambda t=tables: RunConfig.from_tables(t)), secret)
    tables = {"data": {"train": [url, 3]}}
    assert not leaks(said(lambda: RunConfig.from_tables(tables)), secret)


@example(KNOWN[2])
@example(KNOWN[3])
@given(URLS)
def test_no_place_that_is_refused_shows_a_secret(case: tuple[str, str]) -> None:
    """S2, S3: chained URLs, and those of one slash."""
    url, secret = case
    assert not leaks(said(lambda: zarr_store(url)), secret)


@example(KNOWN[0])
@example(KNOWN[1])
@example(KNOWN[2])
@example(KNOWN[3])
@given(URLS)
@settings(max_examples=60)
def test_no_command_shows_a_secret_of_its_words(case: tuple[str, str]) -> None:
    """S1 to S3, whatever is said of them: also by libraries, and in a traceback."""
    url, secret = case
    out, err = io.StringIO(), io.StringIO()
    words = ["train", "--train", "nothing.zarr", "--set", f"solver.name={url}", "--debug"]
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        assert main.main(words) != DONE
        assert main.main(["info", "nothing.zarr", "--x", url, "--storage-option", f"k={secret}"])
    finally:
        sys.stdout, sys.stderr = before
    assert not out.getvalue()
    shown = err.getvalue()
    assert shown
    assert secret not in shown
    assert not leaks(shown, secret) or "@" in secret or ":" in secret


def test_options_of_a_run_file_are_secrets(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[data]\ntrain = "https://h/x?sig=ZqSIGN7Xk"\n[data.storage_options]\n'
        'key = "ZqKEY7Xk"\nclient_kwargs = {password = "ZqPASS7Xk", region = "eu-central-1"}\n'
    )
    secrets = Secrets()
    secrets.add_words(["train", str(file)])
    text = "ZqSIGN7Xk ZqKEY7Xk ZqPASS7Xk eu-central-1 3600"
    assert secrets.hidden_in(text) == f"{HIDDEN} {HIDDEN} {HIDDEN} eu-central-1 3600"


def test_settings_of_a_storage_do_not_hide_parts_of_results() -> None:
    secrets = Secrets()
    words = ["region=test", "mode=normal", "password=eval", "key=minioadmin", "x=ZqSIGN7Xk"]
    secrets.add_words([word for option in words for word in ("--storage-option", option)])
    secrets.add_words(["--storage-option=endpoint=samples"])
    result = '{"test_mse": 0.1, "samples": 3, "eval": 1, "evaluation": "test"}'
    assert secrets.hidden_in(result) == result
    text = "normal: no access with eval:minioadmin and ZqSIGN7Xk"
    shown = f"normal: no access with {HIDDEN}:{HIDDEN} and {HIDDEN}"
    assert secrets.hidden_in(text) == shown
    secrets.add_words(['data.storage_options={region="test", secret="Zq7Xk"}'])
    assert secrets.hidden_in('{"test_mse": 0.1}') == '{"test_mse": 0.1}'
    assert secrets.hidden_in("'Zq7Xk'") == f"'{HIDDEN}'"


# --------------------------------------------------------------------------- nobody who listens


class Gone(io.StringIO):
    """A reader that went away."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize("stream", [Gone(), None])
def test_a_stream_that_fails_takes_every_write(stream: Any) -> None:
    outlet = Outlet(stream, Secrets())
    for _ in range(3):
        assert outlet.write("text") == 4
        outlet.flush()
    assert not outlet.isatty()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stores") / "s.zarr"
    X = rng.standard_normal((300, 4)).astype(np.float32)
    ingest(X, place, y=(X[:, 0] > 0).astype(int))
    return place


HOW = {
    "disk full": "> /dev/full 2>&1",
    "closed": "<&- >&- 2>&-",
    "gone": "2>&1 | head -c 1 > /dev/null",
}


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, as Linux has it")
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_who_listens_does_not_change_the_outcome_of_a_run(
    store: Path, tmp_path: Path, how: str
) -> None:
    words = [sys.executable, "-m", "streamkern", "train", "--train", str(store), "--test"]
    words += [str(store), "--run-dir", str(tmp_path / "run"), "--epochs", "2", "--set"]
    words += ["model.n_centers=40", "--set", "run.checkpoint_every=1", "--json"]
    script = f"set -o pipefail; {' '.join(words)} {how}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (DONE, "")
    with RunDirectory(tmp_path / "run", writable=False) as run:
        saved = run.load_latest()
    assert saved is not None
    assert saved.meta["position"]["done"]
    # And one that fails says so by its exit code, here as everywhere.
    script = f"set -o pipefail; {' '.join(words[:3])} info {tmp_path / 'nothing'} {how}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, as Linux has it")
@pytest.mark.parametrize(("how", "code"), [("> /dev/full", 3), (">&-", DONE), ("| :", DONE)])
def test_a_command_that_only_answers_fails_when_its_answer_is_lost(
    store: Path, how: str, code: int
) -> None:
    script = f"set -o pipefail; {sys.executable} -m streamkern info {store} --json {how}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("No space left" in done.stderr) == (code == 3)


def test_closed_streams_are_no_file_of_the_run(store: Path, tmp_path: Path) -> None:
    """A file opened as the second of the process would take what libraries write to stderr."""
    code = (
        "import os\n"
        "from streamkern import __main__\n"
        "__main__.stand_in()\n"
        "held = os.open(os.devnull, os.O_RDONLY)\n"
        f"open({str(tmp_path / 'fd')!r}, 'w').write(str(held))\n"
    )
    script = f'{sys.executable} -c "{code}" <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", script], check=False).returncode == DONE
    assert int((tmp_path / "fd").read_text()) > 2
