"""The work on a unit, said once, as a Dask graph that threads of this process and clusters run.

    read ──> transform, where the source ends in host transforms

`read` fetches and decodes. The rows are permuted where they are used: `buffers.Fill` scatters what
a graph returns into the block that batches are views of, in this process, whoever ran the graph.

A thread calls the tasks one after the other: over plain calls 1 to 3 % of the processor time that a
unit of 8 MB takes to read. Dask's `get_sync` returns the same at 14 to 22 %, most of it to find out
in which order; `Delayed.compute` takes ten times as long as that.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import uuid
from collections import OrderedDict
from typing import Any

import numpy as np
from dask.task_spec import Task, TaskRef
from dask.typing import Key

from streamkern.basics.errors import ClusterError, ConfigError
from streamkern.basics.optional import need
from streamkern.basics.version import __version__
from streamkern.stream.sources.base import BaseSource, Block

_KEPT = 4


class UnitWork:
    """Makes the graphs of the units of a source.

    A key is ("read-<token>", epoch, unit, number), so that a dashboard shows the tasks of a loader
    as one "read" and one "transform". No two graphs share a key, not those of two tries either.
    """

    def __init__(self, source: BaseSource) -> None:
        self._token, self._numbers = uuid.uuid4().hex, itertools.count()
        # Only where `read_unit` is what the two tasks do one after the other.
        ours = type(source).read_unit is BaseSource.read_unit
        self._in_two = ours and bool(source.host_transforms)

    def graph(self, held: Any, u: int, seed: int, epoch: int) -> tuple[dict[Key, Task], Key]:
        """The tasks of unit u, and the key of its `Block`.

        held : the source, its `Recipe`, or a future of that
        """
        number = (epoch, u, next(self._numbers))
        key: Key = (f"read-{self._token}", *number)
        tasks = {key: Task(key, _read, held, not self._in_two, u, seed, epoch)}
        if self._in_two:
            rows, key = TaskRef(key), (f"transform-{self._token}", *number)
            tasks[key] = Task(key, _transform, held, rows, seed, epoch)
        return tasks, key


def run(tasks: dict[Key, Task]) -> Block:
    """What the last one of a graph's tasks returns, run here."""
    done: dict[Key, Any] = {}
    for key, task in tasks.items():
        done[key] = task(done)
    block: Block = done[key]
    return block


def _read(held: BaseSource | Recipe, whole: bool, u: int, seed: int, epoch: int) -> Block:
    source = opened(held)
    return source.read_unit(u, seed, epoch) if whole else source.read_rows(u, seed, epoch)


def _transform(held: BaseSource | Recipe, rows: Block, seed: int, epoch: int) -> Block:
    return opened(held).transform(rows, seed, epoch)


# ------------------------------------------------------------------- a source that travels


def draw_versions() -> dict[str, str]:
    """What must be the same everywhere: NumPy's draws may change with its version."""
    return {"streamkern": __version__, "numpy": np.__version__}


def mismatch(name: str, ours: str, theirs: object, where: str) -> str:
    shown = f"has {name} {theirs}" if isinstance(theirs, str) else f"lacks {name} ({theirs})"
    return f"{where} {shown}; install {name} {ours} there, the version used here"


class Recipe:
    """A source as it travels; its repr, which dashboards and logs may show, says nothing of it."""

    def __init__(self, source: BaseSource) -> None:
        self.token = uuid.uuid4().hex
        self.versions = draw_versions()
        cloudpickle = need("cloudpickle", "reading on a cluster", "cluster")
        try:
            self.data: bytes = cloudpickle.dumps(source)
        except Exception as error:
            raise ConfigError(
                f"the source can not travel to the workers of a cluster: {error}; make it of "
                "things that can be pickled, and open stores by URL"
            ) from error

    def __repr__(self) -> str:
        return f"Recipe({self.token})"

    def __dask_tokenize__(self) -> str:
        return self.token  # not a digest of all the data, with every graph


_open: OrderedDict[str, BaseSource] = OrderedDict()  # of this process, the last used at the end
_opening = threading.Lock()


def opened(held: BaseSource | Recipe) -> BaseSource:
    """The source itself, or that of a recipe, opened once per process; the last four are kept."""
    if not isinstance(held, Recipe):
        return held
    with _opening:
        source = _open.pop(held.token, None)
        if source is None:
            for name, theirs in draw_versions().items():
                if theirs != held.versions[name]:
                    where = "a worker of the cluster"
                    raise ClusterError(mismatch(name, held.versions[name], theirs, where))
            source = pickle.loads(held.data)
        _open[held.token] = source
        while len(_open) > _KEPT:
            _open.popitem(last=False)
    return source


def hold(recipe: Recipe) -> Recipe:
    """A large source as a task's result: fetched from its peers, made again when they are lost."""
    return recipe
