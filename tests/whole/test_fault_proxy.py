"""The tests' own tools: the fault proxy in front of a real S3 server, and the file server."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import psutil
import pytest
import s3fs
from botocore.exceptions import ClientError
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import S3Store

from benchmarks.s3_files import FileServer, raw_ceiling
from tests.fault_proxy import FaultProxy
from tests.interruptions import PATIENCE_S, eventually
from tests.s3_server import KEY, REGION, S3Server

BODY = bytes(range(256)) * 2000
# The server looks at who asks, not at the signature.
SIGNED = {
    "Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/{REGION}/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
}

StartProxy = Callable[..., FaultProxy]


@pytest.fixture
def start_proxy(s3: S3Server) -> Iterator[StartProxy]:
    """Yield a function that starts a proxy of the S3 server."""
    with contextlib.ExitStack() as stack:
        yield lambda **changes: stack.enter_context(FaultProxy(s3.endpoint, **changes))


@contextlib.contextmanager
def connect(server: FaultProxy | FileServer, timeout: float = PATIENCE_S) -> Iterator[Any]:
    """Yield a connection to a server."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
    with contextlib.closing(connection):
        yield connection


def send_request(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, **more: Any
) -> tuple[int, bytes]:
    """Send a request, and return the status and the body of the answer."""
    connection.request(method, path, body, headers=SIGNED, **more)
    with connection.getresponse() as answer:
        return answer.status, answer.read()


# ------------------------------------------------------------------------------ without faults


@settings(max_examples=25)
@given(n_bytes=st.one_of(st.integers(0, 3), st.integers(0, 1 << 20)), chunked=st.booleans())
def test_bytes_pass_unchanged_on_one_connection(
    s3: S3Server, faultless_proxy: FaultProxy, n_bytes: int, chunked: bool
) -> None:
    sent = os.urandom(n_bytes)
    path = f"/{s3.bucket}/passed"
    n_before = faultless_proxy.stats()["connections"]
    with connect(faultless_proxy) as connection:
        if chunked:
            pieces = (sent[at : at + 100_000] for at in range(0, n_bytes, 100_000))
            status, _ = send_request(connection, "PUT", path, pieces, encode_chunked=True)
        else:
            status, _ = send_request(connection, "PUT", path, sent)
        assert status == 200
        assert send_request(connection, "GET", path) == (200, sent)
        assert send_request(connection, "HEAD", path) == (200, b"")
        assert send_request(connection, "DELETE", path)[0] == 204
        assert send_request(connection, "GET", path)[0] == 404
    stats = faultless_proxy.stats()
    assert stats["connections"] == n_before + 1
    assert stats["upstream_errors"] == 0
    assert stats["faults"] == {}


@pytest.fixture(scope="module")
def faultless_proxy(s3: S3Server) -> Iterator[FaultProxy]:
    """Yield a proxy without faults."""
    with FaultProxy(s3.endpoint) as proxy:
        yield proxy


def test_client_waiting_for_100_continue_receives_it(s3: S3Server, start_proxy: StartProxy) -> None:
    proxy = start_proxy()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S) as sock:
        head = f"PUT /{s3.bucket}/k HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n"
        fields = "".join(f"{name}: {value}\r\n" for name, value in SIGNED.items())
        sock.sendall(f"{head}{fields}Expect: 100-continue\r\n\r\n".encode())
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"12345")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert s3.client().get_object(Bucket=s3.bucket, Key="k")["Body"].read() == b"12345"


def test_host_field_is_forwarded_unchanged() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with FaultProxy(f"http://127.0.0.1:{port}") as proxy, connect(proxy) as connection:
            connection.request("GET", "/a/b", headers={"Host": "name.example"})
            server_side, _ = listener.accept()
            with server_side:
                head = server_side.recv(10_000)
                # No length: the answer ends with the connection.
                server_side.sendall(b"HTTP/1.1 200 OK\r\n\r\nto the end")
            assert b"Host: name.example\r\n" in head
            assert connection.getresponse().read() == b"to the end"


def test_server_disconnect_is_counted_but_not_as_a_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with FaultProxy(f"http://127.0.0.1:{port}") as proxy, connect(proxy) as connection:
            connection.request("GET", "/a/b")
            server_side, _ = listener.accept()
            server_side.recv(10_000)
            server_side.close()
            with pytest.raises(ConnectionResetError):
                connection.getresponse()
            stats = proxy.stats()
    assert (stats["upstream_errors"], stats["faults"]) == (1, {})


def test_latency_and_bandwidth_reach_the_configured_values(
    s3: S3Server, start_proxy: StartProxy
) -> None:
    # Lower bounds only: a busy machine makes this later, never wrong.
    proxy = start_proxy(latency_s=0.2, bandwidth=4 * len(BODY))
    start_time = time.monotonic()
    with connect(proxy) as connection:
        assert send_request(connection, "PUT", f"/{s3.bucket}/k", BODY)[0] == 200
        assert send_request(connection, "GET", f"/{s3.bucket}/k") == (200, BODY)
    assert time.monotonic() - start_time >= 2 * 0.2 + 2 * 0.25 - 0.01


# ---------------------------------------------------------------------------------- single faults


@pytest.fixture
def start_faulty(s3: S3Server, bucket: str, start_proxy: StartProxy) -> Callable[..., FaultProxy]:
    """Return a function that starts a proxy with one certain fault, once, over an object `k`."""
    s3.client().put_object(Bucket=bucket, Key="k", Body=BODY)
    return lambda fault, **more: start_proxy(faults={fault: 1.0}, **{"limit": 1} | more)


def fault_counts(proxy: FaultProxy) -> dict[str, int]:
    """Return how often each fault was injected."""
    faults: dict[str, int] = proxy.stats()["faults"]
    return faults


def test_refuse_closes_new_connections(
    start_faulty: Callable[..., FaultProxy], bucket: str
) -> None:
    proxy = start_faulty("refuse", refuse_s=1.0)
    with connect(proxy) as connection, pytest.raises(http.client.RemoteDisconnected):
        send_request(connection, "GET", f"/{bucket}/k")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S).close()

    def works_again() -> bool:
        with connect(proxy) as connection, contextlib.suppress(ConnectionRefusedError):
            return send_request(connection, "GET", f"/{bucket}/k") == (200, BODY)
        return False

    eventually(works_again)
    assert fault_counts(proxy) == {"refuse": 1}


def test_reset_breaks_the_connection(start_faulty: Callable[..., FaultProxy], bucket: str) -> None:
    proxy = start_faulty("reset", limit=2)
    with connect(proxy) as connection:
        with pytest.raises(ConnectionResetError):
            send_request(connection, "GET", f"/{bucket}/k")
        connection.close()
        with pytest.raises(ConnectionResetError):
            send_request(connection, "DELETE", f"/{bucket}/other")
        connection.close()
        assert send_request(connection, "GET", f"/{bucket}/k") == (200, BODY)
    assert fault_counts(proxy) == {"reset": 2}


def test_truncate_ends_the_answer_early(
    start_faulty: Callable[..., FaultProxy], bucket: str
) -> None:
    proxy = start_faulty("truncate", limit=2)
    with connect(proxy) as connection:
        with pytest.raises(http.client.IncompleteRead) as caught:
            send_request(connection, "GET", f"/{bucket}/k")
        assert caught.value.partial == BODY[: len(BODY) // 2]
        connection.close()
        with pytest.raises(http.client.BadStatusLine):
            send_request(connection, "HEAD", f"/{bucket}/k")
    assert fault_counts(proxy) == {"truncate": 2}


def test_shorten_gives_a_consistent_shorter_answer(
    start_faulty: Callable[..., FaultProxy], bucket: str
) -> None:
    proxy = start_faulty("shorten")
    with connect(proxy) as connection:
        assert send_request(connection, "GET", f"/{bucket}/k") == (200, BODY[: len(BODY) // 2])
        assert send_request(connection, "GET", f"/{bucket}/k") == (200, BODY)
    assert proxy.stats()["connections"] == 1


def test_badbytes_keep_the_length(start_faulty: Callable[..., FaultProxy], bucket: str) -> None:
    proxy = start_faulty("badbytes")
    with connect(proxy) as connection:
        status, got = send_request(connection, "GET", f"/{bucket}/k")
        assert (status, len(got)) == (200, len(BODY))
        assert sum(a != b for a, b in zip(got, BODY, strict=True)) == 2
        assert send_request(connection, "GET", f"/{bucket}/k") == (200, BODY)


def test_stall_stops_the_answer(start_faulty: Callable[..., FaultProxy], bucket: str) -> None:
    proxy = start_faulty("stall", stall_s=1000.0)
    with connect(proxy, timeout=0.5) as connection:
        connection.request("GET", f"/{bucket}/k", headers=SIGNED)
        answer = connection.getresponse()
        half = answer.read(len(BODY) // 2)
        assert half == BODY[: len(half)]
        with pytest.raises(TimeoutError), answer:
            answer.read()
    proxy.set(stall_s=0.01)
    with connect(proxy) as connection, pytest.raises(ConnectionResetError):
        send_request(connection, "GET", f"/{bucket}/k")
    assert fault_counts(proxy) == {"stall": 2}


def test_slowdns_holds_the_request(start_faulty: Callable[..., FaultProxy], bucket: str) -> None:
    proxy = start_faulty("slowdns", slow_s=1000.0)
    with connect(proxy, timeout=0.2) as connection, pytest.raises(TimeoutError):
        send_request(connection, "GET", f"/{bucket}/k")
    proxy.set(slow_s=0.01)
    with connect(proxy) as connection:
        assert send_request(connection, "GET", f"/{bucket}/k") == (200, BODY)
    assert fault_counts(proxy) == {"slowdns": 2}


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("error500", 500, b"Internal Server Error"),
        ("error503", 503, b"Service Unavailable"),
        ("slowdown", 503, b"<Code>SlowDown</Code>"),
        ("expired", 400, b"<Code>ExpiredToken</Code>"),
        ("badupload", 400, b"<Code>XAmzContentSHA256Mismatch</Code>"),
    ],
)
def test_proxy_answers_errors_by_itself(
    start_faulty: Callable[..., FaultProxy],
    s3: S3Server,
    bucket: str,
    fault: str,
    status: int,
    message: bytes,
) -> None:
    proxy = start_faulty(fault, max_consecutive=1, limit=None)
    with connect(proxy) as connection:
        got, body = send_request(connection, "PUT", f"/{bucket}/new", BODY)
        assert got == status
        assert message in body
        with pytest.raises(ClientError, match="NoSuchKey"):
            s3.client().get_object(Bucket=bucket, Key="new")
        if fault != "badupload":
            assert send_request(connection, "HEAD", f"/{bucket}/k") == (status, b"")
            assert send_request(connection, "GET", f"/{bucket}/k")[0] == status
        assert send_request(connection, "GET", f"/{bucket}/k") == (200, BODY)
        assert send_request(connection, "PUT", f"/{bucket}/new", BODY)[0] == 200
    assert proxy.stats()["connections"] == 1
    assert proxy.stats()["bytes_out"] >= len(BODY)


@pytest.mark.parametrize("fault", ["shorten", "badbytes", "badupload"])
def test_wrong_bytes_affect_objects_only(
    start_faulty: Callable[..., FaultProxy], bucket: str, fault: str
) -> None:
    proxy = start_faulty(fault)
    with connect(proxy) as connection:
        assert b"<Key>k</Key>" in send_request(connection, "GET", f"/{bucket}?list-type=2")[1]
        assert send_request(connection, "GET", f"/{bucket}/missing")[0] == 404
        assert send_request(connection, "DELETE", f"/{bucket}/missing")[0] == 204
        assert fault_counts(proxy) == {}
        # What could not happen does not count towards the limit.
        send_request(connection, "PUT" if fault == "badupload" else "GET", f"/{bucket}/k")
        assert fault_counts(proxy) == {fault: 1}


def test_repeated_conditional_create_after_lost_reply_is_refused(
    start_faulty: Callable[..., FaultProxy], s3: S3Server, bucket: str
) -> None:
    """Check the reason for the fault "lostreply": the second try of a create finds its own
    object."""
    proxy = start_faulty("lostreply")
    client = s3.client(proxy.endpoint, retries={"total_max_attempts": 3})
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket=bucket, Key="new", Body=b"mine", IfNoneMatch="*")
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    assert s3.client().get_object(Bucket=bucket, Key="new")["Body"].read() == b"mine"
    assert [entry[2] for entry in proxy.log()] == ["lostreply", None]


# --------------------------------------------------------------------------- choice of requests

TABLE = {"error500": 0.2, "slowdown": 0.2, "badbytes": 0.2}


def request_faults(proxy: FaultProxy, bucket: str, keys: list[str]) -> list[str | None]:
    """Return the fault of each of a series of requests by one client, as the log has them."""
    with connect(proxy) as connection:
        for key in keys:
            send_request(connection, "GET", f"/{bucket}/{key}")
    return [fault for _, _, fault in proxy.log()]


@pytest.mark.slow
def test_same_seed_gives_same_faults(s3: S3Server, start_proxy: StartProxy) -> None:
    keys = ["a", "b", "a"] * 40
    runs = []
    for seed in (1, 1, 2):
        bucket = s3.make_bucket()
        for key in ("a", "b"):
            s3.client().put_object(Bucket=bucket, Key=key, Body=b"content")
        proxy = start_proxy(seed=seed, faults=TABLE)
        runs.append(request_faults(proxy, bucket, keys))
        counted = Counter(fault for fault in runs[-1] if fault)
        assert fault_counts(proxy) == counted
        assert proxy.stats()["requests"] == {"GET": len(keys)}
        assert set(counted) == set(TABLE)
        # One key's faults do not depend on the requests for others in between.
        proxy.set(seed=seed)
        single_run = request_faults(proxy, bucket, ["b"] * 40)
        assert single_run == runs[-1][1::3]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_retry_succeeds_after_max_consecutive_faults(
    start_faulty: Callable[..., FaultProxy], bucket: str
) -> None:
    proxy = start_faulty("error503", limit=None, max_consecutive=2)
    assert request_faults(proxy, bucket, ["k"] * 6) == ["error503", "error503", None] * 2


def test_methods_keys_and_limit_select_requests(
    start_faulty: Callable[..., FaultProxy], bucket: str
) -> None:
    proxy = start_faulty("error503", methods=["GET"], keys="wanted", limit=2, max_consecutive=9)
    with connect(proxy) as connection:
        statuses = [
            send_request(connection, method, f"/{bucket}/{key}")[0]
            for method, key in [
                ("PUT", "wanted"), ("GET", "wanted"), ("GET", "k"), ("GET", "wanted"),
                ("GET", "wanted"),
            ]
        ]  # fmt: skip
    assert statuses == [200, 503, 200, 503, 200]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"faults": {"error404": 0.1}}, "unknown faults"),
        ({"faults": {"reset": 0.6, "stall": 0.6}}, "add up"),
        ({"faults": {"reset": -0.1}}, "add up"),
    ],
)
def test_invalid_fault_table_is_refused(
    faultless_proxy: FaultProxy, table: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FaultProxy("http://127.0.0.1:1", **table)
    with pytest.raises(ValueError, match=message):
        faultless_proxy.set(**table)


# ----------------------------------------------------------------------------- ends of processes

OWNER = """
import sys
from tests.s3_server import S3Server
from tests.fault_proxy import FaultProxy
s3 = S3Server()
proxy = FaultProxy(s3.endpoint)
print(s3.pid, proxy.pid, flush=True)
sys.stdin.read()
"""


def has_ended(pid: int) -> bool:
    """Return whether a process has ended."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_servers_exit_with_a_killed_owner() -> None:
    path = str(Path(__file__).parents[2])
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    with owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(map(has_ended, pids))
        owner.send_signal(signal.SIGKILL)
    eventually(lambda: all(map(has_ended, pids)))


def test_stop_ends_the_process_during_a_request(
    start_faulty: Callable[..., FaultProxy], bucket: str
) -> None:
    proxy = start_faulty("stall", stall_s=1000.0)
    with connect(proxy) as connection:
        connection.request("GET", f"/{bucket}/k", headers=SIGNED)
        with connection.getresponse():
            proxy.stop()
            proxy.stop()
            assert has_ended(proxy.pid)


# -------------------------------------------------------------------------------- the file server

KEYS = ["a.txt", "deep/er/empty", "deep/er/k", "deep/one", "deep-est", "with space&more"]


@pytest.fixture(scope="module")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file for each of `KEYS`, and another file above them."""
    root = tmp_path_factory.mktemp("served")
    for k, key in enumerate(KEYS):
        path = root / "bucket" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if key.endswith("empty") else BODY[k:])
    (root / "secret").write_bytes(b"outside")
    return root


@pytest.fixture(scope="module")
def file_server(served_folder: Path) -> Iterator[FileServer]:
    """Yield a server of the files of `folder`."""
    with FileServer(served_folder) as server:
        yield server


@settings(max_examples=40)
@given(start=st.integers(0, 2000), length=st.integers(1, 2000), form=st.sampled_from("-+="))
def test_ranges_are_slices(file_server: FileServer, start: int, length: int, form: str) -> None:
    text, expected = {
        "-": (f"bytes=-{length}", BODY[-length:]),
        "+": (f"bytes={start}-", BODY[start:]),
        "=": (f"bytes={start}-{start + length - 1}", BODY[start : start + length]),
    }[form]
    with connect(file_server) as connection:
        connection.request("GET", "/bucket/a.txt", headers={"Range": text})
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (206, expected)
        first, _, rest = answer.headers["Content-Range"].removeprefix("bytes ").partition("-")
        last, _, size = rest.partition("/")
        assert BODY[int(first) : int(last) + 1] == expected
        assert int(size) == len(BODY)
        assert send_request(connection, "GET", "/bucket/a.txt") == (200, BODY)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/bucket/none", 404, b"NoSuchKey"),
        ("/bucket/deep", 404, b"NoSuchKey"),
        ("/none/k", 404, b"NoSuchBucket"),
        ("/bucket/../secret", 404, b"NoSuchKey"),
        ("/..", 404, b"NoSuchBucket"),
        ("/", 404, b"NoSuchBucket"),
    ],
)
def test_missing_files_are_answered_like_s3(
    file_server: FileServer, path: str, status: int, code: bytes
) -> None:
    with connect(file_server) as connection:
        answer, body = send_request(connection, "GET", path)
        assert answer == status
        assert b"<Code>" + code + b"</Code>" in body
        assert send_request(connection, "HEAD", path) == (status, b"")
        assert send_request(connection, "HEAD", "/bucket/a.txt") == (200, b"")


def test_obstore_and_s3fs_list_and_read_the_same_files(file_server: FileServer) -> None:
    store = S3Store(
        "bucket",
        endpoint=file_server.endpoint,
        skip_signature=True,
        client_options={"allow_http": True},
    )
    assert [entry["path"] for page in store.list() for entry in page] == sorted(KEYS)
    listing = store.list_with_delimiter("deep")
    assert listing["common_prefixes"] == ["deep/er"]
    assert [entry["path"] for entry in listing["objects"]] == ["deep/one"]
    fs = s3fs.S3FileSystem(anon=True, endpoint_url=file_server.endpoint, skip_instance_cache=True)
    assert fs.find("bucket") == [f"bucket/{key}" for key in sorted(KEYS)]
    assert sorted(fs.ls("bucket/deep", detail=False)) == ["bucket/deep/er", "bucket/deep/one"]
    for k, key in enumerate(KEYS):
        expected = b"" if key.endswith("empty") else BODY[k:]
        assert bytes(obstore.get(store, key).bytes()) == expected
        assert fs.cat_file(f"bucket/{key}") == expected
    assert bytes(obstore.get_range(store, "a.txt", start=5, length=9)) == BODY[5:14]


def test_long_lists_are_paginated(file_server: FileServer, s3: S3Server) -> None:
    pages = s3.client(file_server.endpoint).get_paginator("list_objects_v2")
    pages_found = list(pages.paginate(Bucket="bucket", PaginationConfig={"PageSize": 2}))
    assert [entry["Key"] for page in pages_found for entry in page["Contents"]] == sorted(KEYS)
    assert len(pages_found) == 3


def test_ceiling_is_measured_and_short_reads_raise(
    file_server: FileServer, start_proxy: StartProxy
) -> None:
    assert raw_ceiling(file_server.endpoint, "bucket", ["a.txt", "deep/one"] * 3, connections=2) > 0
    with FaultProxy(file_server.endpoint, faults={"shorten": 1.0}) as proxy:  # noqa: SIM117
        with pytest.raises(RuntimeError, match=r"a\.txt"):
            raw_ceiling(proxy.endpoint, "bucket", ["a.txt"], connections=2)


def test_file_server_command_prints_its_port(served_folder: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.s3_files", str(served_folder), "--latency-ms", "1"]
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            assert send_request(connection, "GET", "/bucket/a.txt") == (200, BODY)
        server.terminate()
