"""A fast read-only S3 file server for measuring readers, and the ceiling to compare them with.

    python -m benchmarks.s3_files FOLDER --port 0 --latency-ms 40

serves FOLDER/BUCKET/KEY as `GET /BUCKET/KEY` and prints its port. Ranges, HEAD, ListObjectsV2 and
NoSuchKey are enough for obstore, s3fs and boto3; signatures are not looked at. Whole files go out
with sendfile, one thread per connection, so the server is not what a benchmark measures.
From Python: `with FileServer(folder, latency_s=0.04) as server: server.endpoint`.
"""

from __future__ import annotations

import argparse
import contextlib
import email.utils
import http.client
import os
import re
import socketserver
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from benchmarks.serverprocess import ServerProcess, Throttle, end_with_parent

PIECE_BYTES = 1 << 20
PATIENCE_S = 60.0
LIST_MAX_KEYS = 1000


# -------------------------------------------------------------------------------- the file server


class FileServer(ServerProcess):
    """Serves the folders in `folder` as buckets; read-only. `latency_s` is added to each request.

    `bandwidth` (bytes/s, 0 for no limit) is shared by all connections.
    """

    def __init__(self, folder: str | Path, latency_s: float = 0.0, bandwidth: float = 0.0) -> None:
        limits = (f"--latency-ms={1000 * latency_s}", f"--bandwidth={bandwidth}")
        super().__init__(__file__, str(folder), *limits, "--with-parent")

    def __enter__(self) -> FileServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, folder: Path, port: int, latency_s: float, bandwidth: float) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.folder = folder.resolve(strict=True)
        self.latency_s = latency_s
        self.throttle = Throttle(bandwidth)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that closes the connection during an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # the head goes out in one piece
    server: Server

    def do_GET(self) -> None:
        time.sleep(self.server.latency_s)
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        root = self.server.folder / bucket
        path = (root / key).resolve()
        if bucket in ("", "..") or not root.is_dir():
            self._error(404, "NoSuchBucket", bucket)
        elif not key:
            self._list(root, {name: values[0] for name, values in parse_qs(url.query).items()})
        elif path.is_relative_to(root) and path.is_file():
            self._file(path)
        else:
            self._error(404, "NoSuchKey", key)

    do_HEAD = do_GET

    def _file(self, path: Path) -> None:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            try:
                start, stop = byte_range(self.headers.get("Range"), stat.st_size)
            except ValueError:
                self._error(416, "InvalidRange", self.path)
                return
            self.send_response(206 if "Range" in self.headers else 200)
            if "Range" in self.headers:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{stat.st_size}")
            self.send_header("Content-Length", str(stop - start))
            self.send_header("ETag", etag(stat))
            self.send_header("Last-Modified", email.utils.formatdate(stat.st_mtime, usegmt=True))
            self.send_header("Accept-Ranges", "bytes")
            self.end_headers()
            self.wfile.flush()
            if self.command == "HEAD":
                return
            while start < stop:
                n_bytes = min(PIECE_BYTES, stop - start)
                self.server.throttle.take(n_bytes)
                start += os.sendfile(self.connection.fileno(), file.fileno(), start, n_bytes)

    def _list(self, root: Path, query: dict[str, str]) -> None:
        n_max = min(int(query.get("max-keys", LIST_MAX_KEYS)), LIST_MAX_KEYS)
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        if delimiter not in ("", "/"):
            self._error(400, "InvalidArgument", delimiter)
            return
        after = max(query.get("start-after", ""), query.get("continuation-token", ""))
        found = sorted(name for name in names_below(root, prefix, delimiter) if name > after)
        shown = found[:n_max]
        more = len(shown) < len(found)
        as_url = query.get("encoding-type") == "url"
        fields = [
            ("Name", root.name),
            ("Prefix", quote(prefix) if as_url else prefix),
            ("KeyCount", len(shown)),
            ("MaxKeys", n_max),
            ("IsTruncated", str(more).lower()),
            *([("EncodingType", "url")] if as_url else []),
            *([("NextContinuationToken", shown[-1])] if more else []),
        ]
        entries = [entry(root, name, quote(name) if as_url else name) for name in shown]
        self._xml(
            200,
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"{elements(fields)}{''.join(entries)}</ListBucketResult>",
        )

    def _error(self, status: int, code: str, what: str) -> None:
        fields = [("Code", code), ("Message", f"{code}: {what}")]
        self._xml(status, f"<Error>{elements(fields)}</Error>")

    def _xml(self, status: int, text: str) -> None:
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing per request."""


def elements(fields: Sequence[tuple[str, object]]) -> str:
    return "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in fields)


def entry(root: Path, name: str, shown: str) -> str:
    """Return the entry of a listing for a key, or for a folder, whose name ends with a slash."""
    if name.endswith("/"):
        return f"<CommonPrefixes>{elements([('Prefix', shown)])}</CommonPrefixes>"
    stat = (root / name).stat()
    fields = [
        ("Key", shown),
        ("LastModified", time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stat.st_mtime))),
        ("ETag", etag(stat)),
        ("Size", stat.st_size),
        ("StorageClass", "STANDARD"),
    ]
    return f"<Contents>{elements(fields)}</Contents>"


def etag(stat: os.stat_result) -> str:
    return f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'


def byte_range(text: str | None, size: int) -> tuple[int, int]:
    """Return [start, stop) of a Range field: `bytes=3-7`, `bytes=3-` or `bytes=-5`.

    Raises ValueError for a range outside the file or written in another way.
    """
    if text is None:
        return 0, size
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", text.strip())
    if match is None or not any(match.groups()):
        raise ValueError(f"cannot read the range {text!r}")
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if not start < stop:
        raise ValueError(f"the range {text!r} is outside {size} bytes")
    return start, stop


def names_below(root: Path, prefix: str, delimiter: str) -> Iterator[str]:
    """Yield the keys under `prefix`, or with a delimiter the keys and folders ("a/") one below."""
    if ".." in prefix.split("/"):
        return
    folder = root / prefix.rpartition("/")[0]
    for where, folders, files in os.walk(folder):
        base = "" if Path(where) == root else Path(where).relative_to(root).as_posix() + "/"
        names = [base + name for name in files]
        if delimiter:
            names += [f"{base}{name}/" for name in folders]
            folders.clear()
        yield from (name for name in names if name.startswith(prefix))


# ------------------------------------------------------------------------------------ the ceiling


def raw_ceiling(endpoint: str, bucket: str, keys: Sequence[str], connections: int) -> float:
    """Return the bytes/s of plain GETs of whole objects by range, each key once.

    One thread per kept connection reads into one reused buffer. Nothing is checked or copied, so
    this is what other readers on the same machine are compared with. Each connection reads the
    first key once before the clock starts. Raises RuntimeError for an answer that is not 206 or
    not whole.
    """
    paths = [quote(f"/{bucket}/{key}") for key in keys]
    host = urlsplit(endpoint).netloc
    with contextlib.ExitStack() as stack:
        pool = [_RawReader(host) for _ in range(connections)]
        for reader in pool:
            stack.callback(reader.connection.close)
        threads = stack.enter_context(ThreadPoolExecutor(connections))
        list(threads.map(_RawReader.read, pool, [paths[0]] * connections))
        waiting = deque(paths)
        began = time.perf_counter()
        n_bytes = sum(threads.map(_RawReader.read_all, pool, [waiting] * connections))
        return n_bytes / (time.perf_counter() - began)


class _RawReader:
    def __init__(self, host: str) -> None:
        self.connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
        self._buffer = memoryview(b"")

    def read_all(self, waiting: deque[str]) -> int:
        n_bytes = 0
        while True:
            try:
                path = waiting.popleft()
            except IndexError:
                return n_bytes
            n_bytes += self.read(path)

    def read(self, path: str) -> int:
        self.connection.request("GET", path, headers={"Range": "bytes=0-"})
        with self.connection.getresponse() as answer:
            size = int(answer.headers["Content-Length"])
            if size > len(self._buffer):
                self._buffer = memoryview(bytearray(size))
            n_bytes = answer.readinto(self._buffer[:size])
            whole = answer.headers.get("Content-Range", "").endswith(f"/{n_bytes}")
            if answer.status != 206 or not whole:
                raise RuntimeError(f"GET {path}: status {answer.status}, {n_bytes} bytes came")
        return n_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="its sub-folders are the buckets")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="added to each request")
    parser.add_argument("--bandwidth", type=float, default=0.0, help="bytes/s, 0 for no limit")
    parser.add_argument("--with-parent", action="store_true", help="end when stdin closes")
    chosen = parser.parse_args()
    server = Server(chosen.folder, chosen.port, chosen.latency_ms / 1000, chosen.bandwidth)
    print(server.server_address[1], flush=True)
    if chosen.with_parent:
        threading.Thread(target=end_with_parent, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
