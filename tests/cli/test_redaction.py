"""Check the output of the command: it contains no secret, and a closed reader does not change the
outcome."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
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
from streamkern.cli.redaction import HIDDEN, SafeStream, refuse_credentials
from streamkern.config.run_config import RunConfig
from streamkern.filesystem import urls
from streamkern.filesystem.urls import check_no_credentials, local_path, zarr_store
from streamkern.ingest.ingest import ingest
from streamkern.ingest.input_files import FileOpener
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.train import train

DONE, FAILED = 0, 3

rng = np.random.default_rng(0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores") / "s.zarr"
    X = rng.standard_normal((300, 4)).astype(np.float32)
    ingest(X, path, y=(X[:, 0] > 0).astype(int))
    return path


# ------------------------------------------------------------------------------------- secrets

SCHEMES = ("s3", "https", "http", "gs", "simplecache::s3", "filecache::https", "zip::s3", "nope")
QUERIES = ("X-Amz-Signature", "AWSAccessKeyId", "sig", "token", "password", "anything")
# Without small letters, because eight in a row may be a word of a message.
LETTERS = st.characters(codec="ascii", categories=("Lu", "Nd"))
SIGNS = ("", "/", "+", "=", "!", "%", "$", "-", "~")
ENDS = (":", "@")  # the rest of a secret after these may be read as a host or a path


def secret_texts(signs: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Return a strategy for secrets with special characters, which occur in no other text."""
    return st.builds(
        lambda a, sign, b: f"Zq{a}{sign}{b}7Xk",
        st.text(LETTERS, min_size=3, max_size=8),
        st.sampled_from(signs),
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


def urls_with(signs: tuple[str, ...]) -> st.SearchStrategy[tuple[str, str]]:
    """Return a strategy for pairs of a URL and the secret in it."""
    return st.builds(
        lambda shape, scheme, query, secret: (
            shape.format(scheme=scheme, query=query, secret=secret, encoded=quote(secret, safe="")),
            secret,
        ),
        st.sampled_from(SHAPES), st.sampled_from(SCHEMES), st.sampled_from(QUERIES),
        secret_texts(signs),
    )  # fmt: skip


URLS = urls_with(SIGNS + ENDS)
KNOWN_URLS = (
    ("https://u:ZqPWPWPW@host/x?X-Amz-Signature=ZqSIGNATURE" + 40 * "x", "ZqPWPWPW"),
    ("https://u:PW@host/x?X-Amz-Signature=ZqSIGNATURE7Xk", "ZqSIGNATURE7Xk"),
    ("simplecache::s3://KEYNAME:ZqSECRET7Xk@bucket/x", "ZqSECRET7Xk"),
    ("s3:/KEYNAME:ZqSECRET7Xk@b/x", "ZqSECRET7Xk"),
)


def contains_part_of(text: str, secret: str) -> bool:
    """Return whether eight consecutive characters of a secret can be read."""
    return any(secret[i : i + 8] in text for i in range(max(1, len(secret) - 7)))


def error_of(call: Any) -> str:
    """Return the message and the `repr` of the error of a call, or "" without an error."""
    try:
        call()
    except StreamkernError as error:
        return f"{error} {error!r}"
    return ""


@example(KNOWN_URLS[0])
@example(KNOWN_URLS[1])
@example(KNOWN_URLS[2])
@example(KNOWN_URLS[3])
@given(URLS)
def test_refused_setting_shows_no_secret(case: tuple[str, str]) -> None:
    """Check that secrets are removed before a text is shortened."""
    url, secret = case
    for key in ("train", "test", "cache", "dask"):
        tables = {"data": {"train": "x.zarr", key: url}}
        assert not contains_part_of(error_of(lambda t=tables: RunConfig.from_tables(t)), secret)
    tables = {"data": {"train": [url, 3]}}
    assert not contains_part_of(error_of(lambda: RunConfig.from_tables(tables)), secret)


@example(KNOWN_URLS[2])
@example(KNOWN_URLS[3])
@given(URLS)
def test_refused_url_shows_no_secret(case: tuple[str, str]) -> None:
    """Check chained URLs, and URLs with one slash."""
    url, secret = case
    assert not contains_part_of(error_of(lambda: zarr_store(url)), secret)


def output_of(url: str, secret: str) -> str:
    """Return the output of the commands for this URL."""
    out, err = io.StringIO(), io.StringIO()
    arguments = ["train", "--train", "nothing.zarr", "--set", f"solver.name={url}", "--debug"]
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        assert main.run_command(arguments) != DONE
        info = ["info", "nothing.zarr", "--x", url, "--storage-option", f"secret={secret}"]
        assert main.run_command(info) == 2
    finally:
        sys.stdout, sys.stderr = streams
    assert not out.getvalue()
    assert err.getvalue()
    return err.getvalue()


@example(KNOWN_URLS[0])
@example(KNOWN_URLS[1])
@example(KNOWN_URLS[2])
@example(KNOWN_URLS[3])
@given(urls_with(SIGNS))
@settings(max_examples=50)
def test_command_output_shows_no_secret_of_its_arguments(case: tuple[str, str]) -> None:
    """Check all output about the arguments, including the output of libraries and tracebacks."""
    assert not contains_part_of(output_of(*case), case[1])


@given(urls_with(ENDS))
@settings(max_examples=10)
def test_command_hides_secret_that_resembles_suffix(case: tuple[str, str]) -> None:
    assert case[1] not in output_of(*case)


# What is opened, written or kept somewhere, by every command. {} : a URL. Others are real.
COMMAND_LINES = (
    "ingest {} o.zarr", "ingest raw.npz {} o.zarr", "ingest raw.npz {}",
    "ingest X.npy o.zarr --y {}", "ingest X.npy o.zarr --y y.npy --sample-weight {}",
    "ingest raw.npz o.zarr --scratch {}",
    "append {} raw.npz", "append s.zarr {}", "append s.zarr X.npy --y {}",
    "append s.zarr X.npy --y y.npy --sample-weight {}",
    "augment {} o.zarr", "augment s.zarr {} o.zarr", "augment s.zarr {}",
    "tune --train {}", "tune --train s.zarr --out {}", "tune --train s.zarr --write {}", "tune {}",
    "plan --train {}", "plan --train s.zarr --test {}", "plan --train s.zarr --run-dir {}",
    "plan --train s.zarr --cache {}", "plan --train s.zarr --set model.centers={}", "plan {}",
    "plan --train s.zarr --set solver.warm_start={}", "plan --train s.zarr --continue {}",
    "train --train {}", "train --train s.zarr --test {}", "train --train s.zarr --run-dir {}",
    "train --train s.zarr --cache {}", "train --train s.zarr --set model.centers={}", "train {}",
    "train --train s.zarr --set solver.warm_start={}", "train --train s.zarr --dask {}",
    "evaluate {} s.zarr", "evaluate run {}", "evaluate run raw.npz {}", "evaluate run X.npy --y {}",
    "predict {} s.zarr o.csv", "predict run {} o.csv", "predict run s.zarr {}",
    "train --train s.zarr --run-dir o --continue {}",
    "compress {} s.zarr o", "compress run {} o", "compress run s.zarr {}",
    "export {} o.onnx", "export run {}",
    "info {}", "report {}", "report run {}", "report run --out {}", "runs {}", "bench-read {}",
    "warmup --device {}",
)  # fmt: skip
ENDINGS = ("", ".npz", ".npy", ".csv", ".csv.gz", ".parquet", ".h5", ".zarr", ".toml", "-ubyte")
WITH_USER = st.builds(
    lambda shape, scheme, ending, secret: (
        shape.format(scheme=scheme, secret=secret, encoded=quote(secret, safe="")) + ending,
        secret,
    ),
    st.sampled_from((
        "{scheme}://KEYNAME:{secret}@bucket/x",
        "{scheme}://{encoded}@bucket/x", "{scheme}://KEYNAME:{encoded}@bucket/a@b/x",
        "{scheme}://KEYNAME:{secret}@bucket:9000/a@b/x", "zip://a@b/c.npz::{scheme}://K:{secret}@b/x",
        "simplecache::{scheme}://K:{secret}/{secret}+{secret}@b/x",
    )),
    st.sampled_from(SCHEMES), st.sampled_from(ENDINGS), secret_texts(SIGNS + ENDS),
)  # fmt: skip
SECRET_WITH_SLASH = "wJalr/Xut+nFEMI"


@pytest.fixture(scope="module")
def populated_folder(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """Return a folder with everything that the commands of `COMMAND_LINES` need besides the URL."""
    path = tmp_path_factory.mktemp("doors")
    X = rng.standard_normal((60, 4)).astype(np.float32)
    np.savez(path / "raw.npz", X=X, y=np.arange(60) % 2)
    np.save(path / "X.npy", X)
    np.save(path / "y.npy", np.arange(60) % 2)
    (path / "s.zarr").symlink_to(store)
    config = {
        "data": {"train": str(store), "epochs": 1, "batch_size": 50},
        "model": {"n_centers": 20, "bandwidth": 1.0},
        "run": {"run_dir": str(path / "run")},
    }
    train(RunConfig.from_tables(config)).model.backend.close()
    return path


def test_url_arguments_cover_every_command() -> None:
    assert {line.split()[0] for line in COMMAND_LINES} == set(main.COMMANDS)


@pytest.mark.parametrize("command_line", COMMAND_LINES)
def test_every_command_refuses_url_with_secret(
    command_line: str, populated_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the URL is refused, with no request, no file, and no part of the secret."""
    monkeypatch.chdir(populated_folder)
    monkeypatch.setattr(urls, "DEADLINE_S", 0)  # an unexpected request fails at once

    @example(
        (f"simplecache::s3://AKIAFAKEFAKEKEY1:{SECRET_WITH_SLASH}@bucket/x.npz", SECRET_WITH_SLASH)
    )
    @example((f"s3://AKIAFAKEFAKEKEY1:{SECRET_WITH_SLASH}@bucket/x.csv", SECRET_WITH_SLASH))
    @example((f"filecache::https://user:{SECRET_WITH_SLASH}@host:9000/a@b.csv", SECRET_WITH_SLASH))
    @given(WITH_USER)
    @settings(max_examples=6)
    def check_refusal(case: tuple[str, str]) -> None:
        url, secret = case
        files = sorted(populated_folder.iterdir())
        text = io.StringIO()
        with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
            code = main.run_command([word.replace("{}", url) for word in command_line.split()])
        output = text.getvalue()
        assert code == 2, output
        assert "this is a bug" not in output
        assert not any(piece in output for piece in re.split(r"[/+]", secret) if len(piece) > 4)
        assert not contains_part_of(output, secret)
        assert sorted(populated_folder.iterdir()) == files

    check_refusal()


@given(WITH_USER)
def test_every_url_function_refuses_url_with_secret(case: tuple[str, str]) -> None:
    """Check also the functions of Python, without the redaction of the command."""
    url, secret = case
    for entry_point in (local_path, zarr_store, open_rows_of, RunDirectory):
        text = error_of(lambda entry_point=entry_point: entry_point(url))
        assert "credentials" in text
        assert not contains_part_of(text, secret)


def open_rows_of(url: str) -> None:
    """Open the rows of a URL, as `predict` does."""
    with contextlib.ExitStack() as files:
        FileOpener({}, files).open_once(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a@b/x.zarr", "https://host:9000/a/x.npz?X-Amz-Signature=abc", "memory://a/b@c",
        "simplecache::https://host/a@b/x.npz", "zip://a/x.csv::/data/c@d.zip",
        "https://[::1]:9000/x.csv", "simplecache::memory://x/y@z.npz", "gs://bucket/x#1",
    ],
)  # fmt: skip
def test_at_sign_without_secret_is_accepted(url: str) -> None:
    """Check that a URL with an @ is accepted, and refused if it contains a secret."""
    check_no_credentials(url)
    with pytest.raises(StreamkernError, match="holds credentials"):
        check_no_credentials("://user:secret@".join(url.rsplit("://", 1)))


@pytest.mark.parametrize(
    "line",
    [
        "info s3://b/x --storage-option secret=b", "info s3://b/x --storage-option=key=Zq7XkZq7Xk",
        """plan --set data.storage_options={token="Zq7XkZq7Xk"}""",
        "plan --set data.storage_options.password=Zq7XkZq7Xk",
        """info s3://b/x --storage-option client_kwargs={"aws_secret_access_key":"Zq7XkZq7Xk"}""",
        "info https://host/x.npz?v=1&X-Amz-Signature=Zq7XkZq7Xk",
        "plan --train=s3:/K:Zq7XkZq7Xk@b/x",
        "ingest simplecache::s3://K:Zq7XkZq7Xk@b/x.npz o.zarr",
        "plan --set data.train=['s3://a/b','https://u:Zq7XkZq7Xk@h/x']",
    ],
)  # fmt: skip
def test_credentials_on_command_line_are_refused(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run_command(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "put credentials into the environment, a profile" in err
    assert "Zq7Xk" not in err


def test_storage_settings_are_not_credentials() -> None:
    arguments = [
        "endpoint_url=http://host:9000", "anon=true", "region=eu-central-1", "secret=",
        'client_kwargs={"endpoint_url": "http://127.0.0.1:1"}', "profile=minio",
    ]  # fmt: skip
    refuse_credentials([word for option in arguments for word in ("--storage-option", option)])
    refuse_credentials(["--set", "data.train=['s3://a/b','s3://c/d']", "--dask", "tcp://h:8786"])
    refuse_credentials(["https://host/x.npz?version=3", "C:/a@b/x", "zip://a/x.csv::/d/c@d.zip"])


def test_secrets_of_environment_are_redacted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "MY_TOKEN": "ZqSECRET'7Xk",
        "NO_SECRET": "nothing",
        "A_TOKEN": "12345678",
    }.items():
        monkeypatch.setenv(name, value)
    assert main.run_command(["info", "nothing/ZqSECRET'7Xk/12345678"]) == 2
    err = capsys.readouterr().err
    assert "ZqSECRET" not in err
    assert f"nothing/{HIDDEN}/12345678" in err


# ------------------------------------------------------------------------------- closed streams


class ClosedPipe(io.StringIO):
    """A stream whose reader has closed it."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize("stream", [ClosedPipe(), None])
def test_failing_stream_accepts_every_write(stream: Any) -> None:
    safe_stream = SafeStream(stream)
    for _ in range(3):
        assert safe_stream.write("text") == 4
        safe_stream.flush()
    assert not safe_stream.isatty()


# Name -> the end of a shell command whose output is lost.
REDIRECTIONS = {
    "disk full": "> /dev/full 2>&1",
    "closed": "<&- >&- 2>&-",
    "gone": "2>&1 | head -c 1 > /dev/null",
}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, as Linux has it")
@pytest.mark.parametrize("redirection", REDIRECTIONS.values(), ids=REDIRECTIONS)
def test_closed_reader_does_not_change_outcome_of_run(
    store: Path, tmp_path: Path, redirection: str
) -> None:
    arguments = [sys.executable, "-m", "streamkern", "train", "--train", str(store), "--test"]
    arguments += [str(store), "--run-dir", str(tmp_path / "run"), "--epochs", "2", "--set"]
    arguments += ["model.n_centers=40", "--set", "run.checkpoint_every=1", "--json"]
    script = f"set -o pipefail; {' '.join(arguments)} {redirection}"
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (DONE, "")
    with RunDirectory(tmp_path / "run", writable=False) as run:
        saved = run.load_latest()
    assert saved is not None
    assert saved.meta["position"]["done"]
    # A command that fails has its usual exit code.
    script = f"set -o pipefail; {' '.join(arguments[:3])} info {tmp_path / 'nothing'} {redirection}"
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, as Linux has it")
@pytest.mark.parametrize(
    ("redirection", "code"), [("> /dev/full", 3), (">&-", DONE), ("| :", DONE)]
)
def test_query_command_fails_if_its_output_is_lost(
    store: Path, redirection: str, code: int
) -> None:
    script = f"set -o pipefail; {sys.executable} -m streamkern info {store} --json {redirection}"
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == code
    assert ("No space left" in process.stderr) == (code == 3)


def test_closed_streams_do_not_become_files_of_run(store: Path, tmp_path: Path) -> None:
    """Check that no file of the run takes the number of a closed stream, to which libraries write
    errors."""
    code = (
        "import os\n"
        "from streamkern import __main__\n"
        "__main__.open_standard_streams()\n"
        "held = os.open(os.devnull, os.O_RDONLY)\n"
        f"open({str(tmp_path / 'fd')!r}, 'w').write(str(held))\n"
    )
    script = f'{sys.executable} -c "{code}" <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", script], check=False).returncode == DONE
    assert int((tmp_path / "fd").read_text()) > 2


def test_finished_command_exits_with_its_code() -> None:
    """Check an abort while the interpreter is torn down, which threads of native libraries
    sometimes cause; exit handlers run before, and threads end."""
    code = (
        "import atexit, os, sys, threading, time\n"
        "class Aborts:\n"
        "    def __del__(self, abort=os.abort):\n"
        "        abort()\n"
        "kept, sys.argv = Aborts(), ['streamkern', '--version']\n"
        "from streamkern.__main__ import main\n"
        "atexit.register(print, 'seen to')\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('ended'))).start()\n"
        "{}"
    )
    # The second script ends without the protection of `main`.
    endings = "sys.exit(main())", "main(); main.__globals__['_codes'].clear()"
    protected, unprotected = (
        subprocess.run(
            [sys.executable, "-c", code.format(ending)], capture_output=True, text=True, check=False
        )
        for ending in endings
    )
    assert protected.returncode == DONE
    for process in (protected, unprotected):
        assert process.stdout.split()[-3:] == ["ended", "seen", "to"]
    assert unprotected.returncode == -signal.SIGABRT
