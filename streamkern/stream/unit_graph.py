"""The work on a unit as a Dask graph, which threads of this process and clusters run.

    read ──> transform, if the source ends in host transforms

`read` fetches and decodes. Rows are permuted in this process: `buffers.Fill` scatters the result of
a graph, wherever it ran, into the block that batches are views of.

A thread calls the tasks one after the other, which costs 1 to 3 % of the processor time to read a
unit of 8 MB more than plain calls. Dask's `get_sync` costs 14 to 22 %, mostly to find the order of
the tasks; `Delayed.compute` takes ten times as long as that.
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
from streamkern.basics.optional import import_optional
from streamkern.basics.version import __version__
from streamkern.stream.sources.base import BaseSource, Block

_KEPT = 4


class UnitWork:
    """Makes the graphs of the units of a source.

    A key is ("read-<token>", epoch, unit, number), so that a dashboard shows the tasks of a loader
    as one "read" and one "transform". No two graphs share a key, not even those of two tries.
    """

    def __init__(self, source: BaseSource) -> None:
        self._token, self._numbers = uuid.uuid4().hex, itertools.count()
        # Only if `read_unit` is the same as the two tasks one after the other.
        ours = type(source).read_unit is BaseSource.read_unit
        self._in_two = ours and bool(source.host_transforms)

    def graph(self, held: Any, u: int, seed: int, epoch: int) -> tuple[dict[Key, Task], Key]:
        """Return the tasks of unit u, and the key of its `Block`.

        held : the source, its `Recipe`, or a future of the recipe
        """
        number = (epoch, u, next(self._numbers))
        key: Key = (f"read-{self._token}", *number)
        tasks = {key: Task(key, _read, held, not self._in_two, u, seed, epoch)}
        if self._in_two:
            rows, key = TaskRef(key), (f"transform-{self._token}", *number)
            tasks[key] = Task(key, _transform, held, rows, seed, epoch)
        return tasks, key


def run(tasks: dict[Key, Task]) -> Block:
    """Run the tasks of a graph here, and return the result of the last one."""
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
    """Return the versions that must agree: the draws of NumPy may change with its version."""
    return {"streamkern": __version__, "numpy": np.__version__}


def mismatch(name: str, ours: str, theirs: object, where: str) -> str:
    shown = f"has {name} {theirs}" if isinstance(theirs, str) else f"lacks {name} ({theirs})"
    return f"{where} {shown}; install {name} {ours} there, the version used here"


class Recipe:
    """A pickled source; its repr, which dashboards and logs may show, reveals nothing of it."""

    def __init__(self, source: BaseSource) -> None:
        self.token = uuid.uuid4().hex
        self.versions = draw_versions()
        cloudpickle = import_optional("cloudpickle", "reading on a cluster", "cluster")
        try:
            self.data: bytes = cloudpickle.dumps(source)
        except Exception as error:
            raise ConfigError(
                f"the source cannot travel to the workers of a cluster: {error}; make it of "
                "things that can be pickled, and open stores by URL"
            ) from error

    def __repr__(self) -> str:
        return f"Recipe({self.token})"

    def __dask_tokenize__(self) -> str:
        return self.token  # rather than a digest of all the data for every graph


_open: OrderedDict[str, BaseSource] = OrderedDict()  # of this process, the last used at the end
_opening = threading.Lock()


def opened(held: BaseSource | Recipe) -> BaseSource:
    """Return the source, opened once per process from a recipe; the last four are kept."""
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
    """Return the recipe: as a task's result it is fetched from peers, or recomputed if lost."""
    return recipe
