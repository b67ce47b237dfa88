"""A real S3 server for tests: moto in a process of its own, on a free port of 127.0.0.1."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any

from benchmarks.serverprocess import ServerProcess, end_with_parent

KEY, SECRET, REGION = "test-access-key", "test-secret-key", "us-east-1"

# What would lead a library to the settings of whoever runs the tests, or to a network.
AWS_ENVIRONMENT = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_DEFAULT_REGION": REGION,
}


class S3Server:
    """A running moto server with one bucket; use as a context manager or call `stop`.

    It keeps objects in memory, refuses a conditional create of an existing key with 412, and does
    not check signatures or checksums of uploads.
    """

    def __init__(self) -> None:
        self._process = ServerProcess(__file__)
        self.endpoint = self._process.endpoint
        self.pid = self._process.pid
        self._clients: list[Any] = []
        self._numbers = itertools.count()
        self.bucket = self.make_bucket()

    def options(self, endpoint: str | None = None) -> dict[str, Any]:
        """Return fsspec's storage_options; `endpoint` is a proxy's, if one is in between."""
        return {"key": KEY, "secret": SECRET, "endpoint_url": endpoint or self.endpoint}

    def words(self, patch: Any, endpoint: str | None = None) -> list[str]:
        """Return the words of a command for this server; the credentials enter the environment.

        patch : pytest's `monkeypatch`
        """
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        return ["--storage-option", f"endpoint_url={endpoint or self.endpoint}"]

    def client(self, endpoint: str | None = None, **config: Any) -> Any:
        """Return a boto3 client, closed by `stop`; `config` goes to botocore's Config."""
        import boto3
        from botocore.config import Config

        client = boto3.client(
            "s3",
            endpoint_url=endpoint or self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name=REGION,
            config=Config(**{"s3": {"addressing_style": "path"}} | config),
        )
        self._clients.append(client)
        return client

    def make_bucket(self) -> str:
        """Return the name of a new, empty bucket; the n-th of a server is always `bucket-n`."""
        name = f"bucket-{next(self._numbers)}"
        if not self._clients:
            self.client()
        self._clients[0].create_bucket(Bucket=name)
        return name

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()
        self._process.stop()

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def serve() -> None:
    import logging

    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line per request
    server = make_server(
        "127.0.0.1",
        0,
        DomainDispatcherApplication(create_backend_app),
        threaded=True,
        request_handler=MotoRequestHandler,
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    end_with_parent()


if __name__ == "__main__":
    serve()
