"""Complete objects below a URL, by key: all traffic with remote storage passes here.

    zarr arrays, run directories, caches
                 |
             [ Objects ]          keys, retries, deadlines, errors with URL and key, counters
             /         \\
    [ clouds by obstore ]  [ anything by fsspec ]      one attempt at one request each

Every request runs on fsspec's event loop, so that many are in flight at once on any calling
thread, and a late one can be cancelled. An attempt that makes no progress for 20 s counts as
failed. After a transient error the attempt is repeated after a random, growing delay, until a
deadline. The engines do not retry on their own. This way, both behave alike, every retry is
counted, a refused connection is an error within seconds, and a warning reports repeated failures.
"""

from __future__ import annotations

import asyncio
import copy
import enum
import logging
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from streamkern.basics.errors import StorageAccessError, StorageError, StreamkernError
from streamkern.basics.text import redact
from streamkern.filesystem.traffic import Traffic
from streamkern.filesystem.waiting import (
    await_within,
    backoff_delays,
    gather_requests,
    is_connection_refused,
    run_request,
)

STALL_S = 20.0
"""Seconds without a byte after which a request has failed."""
_MIN_UPLOAD_BYTES_PER_S = 256 << 10
"""A request body must arrive within `STALL_S` plus its bytes divided by this."""
DEADLINE_S = 120.0
"""Seconds for which a request that fails is repeated."""
_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 10.0
"""First and largest delay in seconds before a request is repeated."""
_REFUSED_RETRY_S = 3.0
"""Seconds for which a refused connection is repeated to a server that has never answered."""
_WARN_AFTER_S = 10.0
"""Seconds after which a warning reports the failing request."""
MAX_READS = 3
"""Largest number of reads of bytes that fail their check, which may be due to the transfer."""

_HAS_REMEDY = re.compile(r"; (check|set) ")  # an engine's message may name a remedy

_log = logging.getLogger("streamkern")

_T = TypeVar("_T")
Bytes = Any  # anything with the buffer protocol
Listing = list[tuple[str, int]]  # keys and bytes
ObjectNames = list[str]  # named, because in `Objects` the name `list` is a method
BytesCheck = Callable[[Bytes], bool]


class ErrorKind(enum.Enum):
    """The kind of an engine's error, which decides the reaction to it."""

    MISSING = enum.auto()  # no such object
    EXISTS = enum.auto()  # the object of a conditional create exists already
    EXPIRED = enum.auto()  # the credentials: they are read again, once
    REFUSED = enum.auto()  # no permission or no such bucket: not retried
    TRANSIENT = enum.auto()  # retried
    OTHER = enum.auto()  # not an error of the storage: raised unchanged


class Engine(Protocol):
    """One attempt at one request; errors of the library are raised unchanged.

    keys_per_delete : largest number of keys in one request
    attempt_s : time limit of an attempt in seconds; far above `STALL_S` if the library itself
        ends stalled attempts
    """

    keys_per_delete: int
    attempt_s: float

    async def get(self, key: str, start: int, stop: int | None) -> Bytes: ...

    async def put(self, key: str, data: Bytes, create: bool) -> None: ...

    async def delete(self, keys: Sequence[str]) -> None: ...

    async def list(self, prefix: str) -> Listing: ...

    async def entries(self, prefix: str) -> ObjectNames: ...

    async def stat(self, key: str) -> tuple[int, str]: ...

    def error_kind(self, error: Exception) -> ErrorKind: ...

    def explain(self, error: Exception) -> str:
        """Return the error in a few words, to be part of a sentence."""
        ...

    async def renew(self) -> None:
        """Read the credentials again."""
        ...


class _Renewals:
    """Number of times that credentials were read again, one at a time."""

    def __init__(self) -> None:
        self.lock, self.count = asyncio.Lock(), 0


class Objects:
    """The objects below `url`. Safe to share between threads; holds no thread of its own.

    Parameters
    ----------
    url : shown in messages, without secrets
    deadline_s : no further attempt is started after this long

    `traffic` counts requests and bytes. Every method raises `StorageError` naming URL, key and the
    original error once the deadline is over, and `StorageAccessError` at once if retrying cannot
    help.
    """

    def __init__(self, url: str, engine: Engine, *, deadline_s: float = DEADLINE_S) -> None:
        self.url, self.deadline_s = url, deadline_s
        self._pid = os.getpid()
        self._engine = engine
        self._renewals = _Renewals()
        self._stopped: threading.Event | None = None
        self.traffic = Traffic()
        self._has_responded = False  # whether the server has answered anything yet

    def __repr__(self) -> str:
        return f"Objects({redact(self.url)!r})"

    def with_stop_event(self, stopped: threading.Event) -> Self:
        """Return the same objects, whose requests end with StorageError once `stopped` is set."""
        stoppable = copy.copy(self)
        stoppable._stopped = stopped
        return stoppable

    # -- for callers on any thread ---------------------------------------------------------

    def get(
        self, key: str, start: int = 0, stop: int | None = None, *,
        is_intact: BytesCheck | None = None,
    ) -> Bytes:  # fmt: skip
        """Return the bytes of an object, or bytes start to stop.

        start, stop : bounds in bytes; a negative start means a suffix
        is_intact : returns whether the bytes are intact; if not, they are read again, because the
            transfer may have altered them. The last of at most `MAX_READS` results is returned.

        Raises FileNotFoundError if there is no such object.
        """
        return self._wait(lambda: self.get_async(key, start, stop, is_intact=is_intact))

    def get_many(
        self, keys: Sequence[str], *, refetch: bool = False, is_intact: BytesCheck | None = None
    ) -> list[Bytes]:
        """Return the bytes of several objects, requested at once.

        refetch : request them again even if a copy is cached (`CachedObjects`)
        is_intact : as for `get`
        """
        requests = [partial(self.get_async, key, is_intact=is_intact) for key in keys]
        return self._wait(lambda: gather_requests(requests))

    def put(self, key: str, data: Bytes) -> None:
        """Create or replace an object; readers see the old or the new bytes, never a mixture."""
        self._wait(lambda: self.put_async(key, data))

    def create(self, key: str, data: Bytes) -> bool:
        """Create an object; return False, without any change, if it exists.

        Exactly one of several callers gets True, if the storage honours conditional writes;
        StorageAccessError if it reports that it does not. `data` must differ between callers.
        """
        return self._wait(lambda: self.create_async(key, data))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing ones are ignored."""
        key_list = list(keys)
        self._wait(lambda: self.delete_async(key_list))

    def list(self, prefix: str = "") -> Listing:
        """Return the keys below the folder `prefix`, at any depth, with their sizes, in order."""
        return self._wait(lambda: self.list_async(prefix))

    def children(self, prefix: str = "") -> ObjectNames:
        """Return the names directly below the folder `prefix`, objects and folders, in order."""
        return self._wait(lambda: self.children_async(prefix))

    def entries(self, prefix: str = "") -> ObjectNames:
        """Return the names of `children`, with a slash at the end of a folder's name."""
        return self._wait(lambda: self.entries_async(prefix))

    def stat(self, key: str) -> tuple[int, str]:
        """Return an object's bytes, and its ETag or time, which identifies its version.

        Raises FileNotFoundError if there is no such object.
        """
        return self._wait(lambda: self.stat_async(key))

    # -- for callers on an event loop; they run on fsspec's --------------------------------

    async def get_async(
        self, key: str, start: int = 0, stop: int | None = None, *,
        is_intact: BytesCheck | None = None,
    ) -> Bytes:  # fmt: skip
        """See `get`."""
        for reads_left in reversed(range(MAX_READS)):
            data = await self._with_retries(
                "reading", key, lambda: self._engine.get(key, start, stop)
            )
            self.traffic.add(bytes_in=len(data))
            if is_intact is None or not reads_left or is_intact(data):
                break
            self.traffic.add(retries=1)
        return data

    async def put_async(self, key: str, data: Bytes) -> None:
        """See `put`."""
        await self._with_retries("writing", key, lambda: self._put(key, data, create=False))

    async def create_async(self, key: str, data: Bytes) -> bool:
        """See `create`."""
        if await self._with_retries("creating", key, lambda: self._put(key, data, create=True)):
            return True
        # This call may have created it: the reply to an earlier attempt may have been lost.
        given_bytes = bytes(data)
        try:
            stored_bytes = await self.get_async(
                key, is_intact=lambda data: bytes(data) == given_bytes
            )
        except FileNotFoundError:
            return False
        return bytes(stored_bytes) == given_bytes

    async def _put(self, key: str, data: Bytes, *, create: bool) -> bool:
        """Make one attempt; return False if the object to create exists."""
        limit_s = STALL_S + len(data) / _MIN_UPLOAD_BYTES_PER_S
        try:
            await await_within(limit_s, self._engine.put(key, data, create))
        except Exception as error:
            if not create or self._engine.error_kind(error) is not ErrorKind.EXISTS:
                raise
            return False
        return True

    async def delete_async(self, keys: Sequence[str]) -> None:
        """See `delete`."""
        step = self._engine.keys_per_delete  # with too many keys, no attempt would ever succeed
        groups = (keys[i : i + step] for i in range(0, len(keys), step))
        await gather_requests([partial(self._delete_group, group) for group in groups])

    async def _delete_group(self, keys: Sequence[str]) -> None:
        text = keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"
        await self._with_retries("deleting", text, lambda: self._engine.delete(keys))

    async def list_async(self, prefix: str) -> Listing:
        """See `list`."""
        return sorted(await self._list_with_retries(self._engine.list, prefix))

    async def children_async(self, prefix: str = "") -> ObjectNames:
        """See `children`."""
        return sorted({name.rstrip("/") for name in await self.entries_async(prefix)})

    async def entries_async(self, prefix: str = "") -> ObjectNames:
        """See `entries`."""
        return sorted(await self._list_with_retries(self._engine.entries, prefix))

    async def _list_with_retries(self, request: Callable[[str], Awaitable[_T]], prefix: str) -> _T:
        return await self._with_retries(
            "listing", f"{prefix}/", lambda: request(prefix.rstrip("/"))
        )

    async def stat_async(self, key: str) -> tuple[int, str]:
        """See `stat`."""
        return await self._with_retries("looking up", key, lambda: self._engine.stat(key))

    # -- retries and errors ----------------------------------------------------------------

    def _wait(self, request: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Return the result of a request, which runs on fsspec's event loop."""
        if os.getpid() != self._pid:
            raise StorageAccessError(
                f"{redact(self.url)} was opened before this process was forked, but its "
                "connections do not survive a fork",
                "start processes with the method 'spawn'",
            )
        return run_request(request(), self._stopped)

    async def _with_retries(self, doing: str, key: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of `attempt`, repeated after transient errors until the deadline.

        doing, key : for messages, such as "reading" and the key of the object
        """
        request_text = f"{doing} {key} of {redact(self.url)}"
        has_renewed = False  # the credentials, for this request

        async def attempt_once() -> _T:
            nonlocal has_renewed
            self.traffic.add(requests=1)
            renewals, limit_s = self._renewals.count, self._engine.attempt_s
            try:
                return await await_within(limit_s, attempt())
            except Exception as error:
                if has_renewed or self._error_kind(error) is not ErrorKind.EXPIRED:
                    raise
                has_renewed = True
            await self._renew(renewals)
            return await await_within(limit_s, attempt())

        start_s = time.monotonic()
        delays = backoff_delays(_FIRST_DELAY_S, _MAX_DELAY_S, start_s + self.deadline_s)
        n_tries, has_warned = 1, False
        while True:
            try:
                result = await attempt_once()
                self._has_responded = True
                return result
            except Exception as error:
                is_transient = self._error_kind(error) is ErrorKind.TRANSIENT
                self._has_responded |= not is_transient
                delay_s = next(delays, None) if is_transient else None
                elapsed_s = time.monotonic() - start_s
                # A server that restarts comes back; one that never answered may not exist.
                never_responded = not self._has_responded and is_connection_refused(error)
                if delay_s is None or (never_responded and elapsed_s > _REFUSED_RETRY_S):
                    new_error = self._error_to_raise(request_text, key, error, n_tries, elapsed_s)
                    if new_error is error:  # not an error of the storage
                        raise
                    raise new_error from error
                if elapsed_s > _WARN_AFTER_S and not has_warned:
                    has_warned = True
                    _log.warning(
                        "%s fails (%s); it is tried again until %.0f s have passed",
                        request_text, self._error_text(error), self.deadline_s,
                    )  # fmt: skip
            self.traffic.add(retries=1)
            n_tries += 1
            await asyncio.sleep(delay_s)

    def _error_kind(self, error: Exception) -> ErrorKind:
        is_ours = isinstance(error, StreamkernError)  # such as for credentials that are gone
        return ErrorKind.OTHER if is_ours else self._engine.error_kind(error)

    def _error_text(self, error: BaseException) -> str:
        """Return an error in one line of at most 300 characters, without secrets."""
        text = self._engine.explain(error) if isinstance(error, Exception) else str(error)
        return " ".join(redact(text).split())[:300]

    async def _renew(self, seen_count: int) -> None:
        """Read the credentials again, once for all requests in flight.

        seen_count : number of renewals before the request whose credentials had expired
        """
        async with self._renewals.lock:
            if self._renewals.count == seen_count:
                await self._engine.renew()
                self._renewals.count += 1

    def _error_to_raise(
        self, request_text: str, key: str, error: Exception, n_tries: int, seconds: float
    ) -> Exception:
        """Return the error to raise, with a remedy; `error` itself if it is not of the storage."""
        kind = self._error_kind(error)
        if kind is ErrorKind.OTHER:
            return error
        text = self._error_text(error)
        if kind is ErrorKind.MISSING:
            return FileNotFoundError(f"{key} is missing from {redact(self.url)}")
        if kind is ErrorKind.EXPIRED:
            return StorageAccessError(
                f"{request_text}: the credentials have expired, also after they were read again",
                f"renew them and run the same command again ({text})",
            )
        if kind is ErrorKind.REFUSED:
            remedy = "" if _HAS_REMEDY.search(text) else "; check the URL and its storage options"
            return StorageAccessError(f"{request_text} was refused: {text}{remedy}")
        if not self._has_responded and is_connection_refused(error):
            return StorageError(
                f"{request_text} failed: nothing listens at this address (connection refused, "
                f"tries: {n_tries})",
                "check host and port, and that the server is running",
            )
        return StorageError(
            f"{request_text} failed {n_tries} times in {seconds:.0f} s: {text}",
            "run the same command again once the server answers, or raise the storage option "
            f"deadline_s={self.deadline_s:g}",
        )
