"""A cluster as seen by a driver of ranks: its workers, their processes, and messages to all
ranks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

from streamkern.basics.errors import ClusterError, ConfigError
from streamkern.basics.message import mention
from streamkern.basics.text import size_text
from streamkern.stream.unit_readers import address_of, run_on

_REACH_S = 5.0  # a nanny's machine counts as gone if it does not answer for so long


@dataclass(frozen=True)
class WorkerInfo:
    """A worker: its address and host, and the nanny that can end its process."""

    address: str
    host: str
    nanny: str
    takes_tasks: bool


class RankCluster:
    """A `distributed.Client` whose requests have a time limit.

    name : name of the placement, the topic of messages from and to its ranks
    timeout_s : longest silence of a rank
    lonely_s : longest silence of the driver

    Raises
    ------
    ClusterError
        From any method, if the scheduler is gone or does not answer for `timeout_s`.
    """

    def __init__(self, client: Any, name: str, timeout_s: float, lonely_s: float) -> None:
        self.client, self.name = client, name
        self.timeout_s, self.lonely_s = timeout_s, lonely_s
        self.news = threading.Event()
        self._beats = 0

    def listen(self, receive: Callable[[dict[str, Any]], None]) -> None:
        """Call `receive` with each message of a rank, on the client's thread."""
        self.client.subscribe_topic(self.name, lambda event: receive(event[1]))

    def stop_listening(self) -> None:
        """Stop calling the function given to `listen`."""
        if self.client.status == "running":
            self.client.unsubscribe_topic(self.name)

    def tell(self, generation: int, stop: str | None) -> None:
        """Send a message to all ranks, which also shows that the driver is alive."""
        self._beats += 1
        message = {"generation": generation, "stop": stop, "beat": self._beats}
        self._ask(self.client.scheduler.set_metadata(keys=[self.name], value=message))

    def workers(self) -> dict[str, WorkerInfo]:
        """Return address -> worker for all workers of the scheduler, in the order of their
        addresses."""
        known = self._ask(self.client.scheduler.identity())["workers"]
        without_nanny = [address for address, worker in known.items() if not worker["nanny"]]
        if without_nanny:
            raise ConfigError(
                f"the worker {without_nanny[0]} of {address_of(self.client)} has no nanny, which "
                "ends its process with the other ranks'",
                "start it without --no-nanny",
            )
        limited = [address for address, worker in known.items() if worker["memory_limit"]]
        if limited:
            limit = size_text(known[limited[0]]["memory_limit"])
            raise ConfigError(
                f"the worker {limited[0]} of {address_of(self.client)} has a limit of {limit} on "
                "its memory, at which Dask would stop or kill it in training",
                f"start it with --memory-limit 0, and give {mention('run.memory')} in its place",
            )
        return {
            address: WorkerInfo(
                address, worker["host"], worker["nanny"], worker["status"] == "running"
            )
            for address, worker in sorted(known.items())
        }

    def processes(self, workers: list[WorkerInfo]) -> dict[str, int]:
        """Return nanny -> process id of its worker, for the nannies that answer."""
        return self.each(_process, [worker.nanny for worker in workers])

    def end(self, processes: Mapping[str, int]) -> set[str]:
        """Kill processes, also suspended ones. Return the nannies that answered.

        The processes of these are surely gone, and the nannies start others.
        """
        return set(self.each(_end, list(processes), dict(processes)))

    def each(self, ask: Callable[..., Any], addresses: list[str], *args: Any) -> dict[str, Any]:
        """Return address -> result of a function on workers or nannies, for those that answer."""

        async def one(address: str) -> dict[str, Any]:
            # The nanny's address, not its worker's, which the scheduler may have forgotten by then.
            answers = self.client.run(ask, *args, workers=[address], on_error="ignore")
            return dict(await asyncio.wait_for(answers, _REACH_S))

        async def all_of_them() -> list[dict[str, Any] | BaseException]:
            return await asyncio.gather(*map(one, addresses), return_exceptions=True)

        by_address: dict[str, Any] = {}
        for answer in self._ask(all_of_them(), self.timeout_s + _REACH_S):
            by_address |= answer if isinstance(answer, dict) else {}
        return by_address

    def _ask(self, question: Any, wait_s: float | None = None) -> Any:
        answer = run_on(self.client.loop, question)
        try:
            return answer.result(wait_s or self.timeout_s)
        except (OSError, CancelledError) as error:
            raise ClusterError(
                f"{address_of(self.client)} is gone, or has not answered for {self.timeout_s:g} s",
                "start it again, then run the same command again to go on",
            ) from error
        finally:
            answer.cancel()


async def _process(dask_worker: Any) -> Any:
    """Return, on a nanny, the process id of its worker, after any restart in progress."""
    while dask_worker.process is None or dask_worker.process.status.name == "starting":
        await asyncio.sleep(0.01)
    return dask_worker.pid


async def _end(processes: Mapping[str, int], dask_worker: Any) -> bool:
    """Kill the process, on its nanny, unless it has been replaced already, and wait until it is
    gone."""
    process = processes[dask_worker.address]
    if dask_worker.pid == process:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.kill(process, signal.SIGKILL)
    while dask_worker.pid == process:
        await asyncio.sleep(0.01)
    return True
