"""Connect to a Dask cluster, check it before a run, and find its dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pkgutil
import re
import threading
from collections.abc import Iterator
from typing import Any

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional, on_demand
from streamkern.basics.text import SCHEDULER_ADDRESS, redact
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.unit_readers import (
    Recipe,
    checked_versions,
    cluster_text,
    run_on,
    version_mismatch,
)

CONNECT_TIMEOUT_S = 10.0


@contextlib.contextmanager
def connect(
    address: str, *, wait_s: float = CONNECT_TIMEOUT_S, setting: str = "data.dask"
) -> Iterator[Any]:
    """Yield a `distributed.Client` of the scheduler at `address`, "tcp://host:8786", and close it.

    wait_s : seconds to connect, and to find a lost scheduler again
    setting : name of the setting that holds the address, for messages

    Raises
    ------
    MissingDependencyError
        If `distributed` is not installed.
    ConfigError
        If `address` is not the address of a scheduler, or no scheduler answers within `wait_s`.
    """
    if not re.search(SCHEDULER_ADDRESS, address):
        raise ConfigError(
            f"the scheduler address {redact(address)!r} must look like tcp://host:8786",
            f"correct {mention(setting)}",
        )
    client_class = import_optional("distributed", "reading on a cluster", "cluster").Client
    with _event_loop() as loop:
        try:
            # Before the client, which has no time limit for a port that does not answer.
            run_on(loop, asyncio.wait_for(_check_scheduler(address), wait_s)).result()
            client = client_class(address, loop=loop, timeout=wait_s, set_as_default=False)
        except Exception as error:  # any error, as the peer may be anything
            raise ConfigError(
                f"no scheduler answers at {address} ({str(error) or 'it does not answer'})",
                f"start one with `dask scheduler`, or correct {setting}",
            ) from error
        try:
            yield client
        finally:
            # The scheduler may hang; the loop ends anyway. If the scheduler is gone, the client's
            # attempt to reconnect ends here, and would write a traceback to the log.
            with contextlib.suppress(TimeoutError), _mute_client_log():
                client.close()


async def _check_scheduler(address: str) -> None:
    """Raise an error unless a scheduler answers at `address`."""
    distributed = on_demand("distributed")
    security = distributed.Security  # the certificates of Dask's settings, for tls://
    arguments = security().get_connection_args("client")
    async with distributed.rpc(address, connection_args=arguments) as scheduler:
        peer = (await scheduler.identity(n_workers=0))["type"]
    if peer != "Scheduler":
        raise ValueError(f"the address is that of a {peer}")


@contextlib.contextmanager
def _mute_client_log() -> Iterator[None]:
    """Mute the log of the client."""
    logger = logging.getLogger("distributed.client")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


@contextlib.contextmanager
def _event_loop() -> Iterator[Any]:
    """Yield a running event loop, because a client's own loop outlives a failed connection."""
    current_loop = on_demand("tornado.ioloop").IOLoop.current
    is_running = threading.Event()
    shared: dict[str, Any] = {}  # "loop", and "end", the event that ends it

    async def serve() -> None:
        shared["loop"], shared["end"] = current_loop(), asyncio.Event()
        is_running.set()
        await shared["end"].wait()

    thread = threading.Thread(
        target=lambda: asyncio.run(serve()), name="streamkern-cluster", daemon=True
    )
    thread.start()
    is_running.wait()
    try:
        yield shared["loop"]
    finally:
        shared["loop"].add_callback(shared["end"].set)
        thread.join(CONNECT_TIMEOUT_S)  # a DNS look-up may block the thread


def check_cluster(client: Any, source: BaseSource) -> None:
    """Raise a ConfigError unless the source can be pickled and the cluster runs the same code.

    A cluster without workers passes: workers that join are checked when they receive the source.
    """
    if client.asynchronous:
        raise ConfigError(
            "client is asynchronous", "pass a distributed.Client made without asynchronous=True"
        )
    Recipe(source)
    check_versions(client)


def check_versions(client: Any) -> None:
    """Raise a ConfigError unless the cluster runs the same versions of streamkern and NumPy."""
    for name, local_version in checked_versions().items():
        attribute = f"{name}:__version__"
        versions = client.run(pkgutil.resolve_name, attribute, on_error="return")
        if name == "streamkern":  # which the scheduler needs to unpickle tasks
            try:
                versions["scheduler"] = client.run_on_scheduler(pkgutil.resolve_name, attribute)
            except ImportError as error:
                versions["scheduler"] = error
        for process, version in versions.items():
            if version != local_version:
                raise ConfigError(
                    version_mismatch(
                        name, local_version, version, f"{process} of {cluster_text(client)}"
                    )
                )


def dashboard_link(client: Any) -> str | None:
    """Return the address of the scheduler's dashboard, without secrets; None if there is none."""
    try:
        link = client.dashboard_link
    except Exception:  # KeyError without one; a missing link must not fail a run
        return None
    return redact(link) if link else None
