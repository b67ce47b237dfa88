from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from dask.local import get_sync
from dask.task_spec import Task
from dask.typing import Key
from dask.utils import key_split

from streamkern.stream import local_reader, unit_graph
from streamkern.stream.loader import HostBatch, Loader
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import Block, Source
from streamkern.stream.sources.generator import GeneratorSource
from streamkern.stream.sources.user import as_source
from streamkern.stream.unit_graph import Recipe, UnitWork, opened
from tests import clusters
from tests.streams import Plain, assert_same, assert_same_rows, kept

N_UNITS = 24


def transformed() -> GeneratorSource:
    return clusters.source(transforms=[clusters.noisy])


def batches(source: Source, **options: Any) -> list[HostBatch]:
    """Two epochs."""
    with Loader(source, batch_size=23, seed=3, block_bytes=5000, **options) as loader:
        return kept(loader.epochs(0, 2))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[dict[Key, Task]]:
    """The graphs that threads of this process run, in the order in which they begin."""
    graphs: list[dict[Key, Task]] = []

    def run(tasks: dict[Key, Task]) -> Block:
        graphs.append(tasks)
        return unit_graph.run(tasks)

    monkeypatch.setattr(local_reader, "run", run)
    return graphs


def names(tasks: dict[Key, Task]) -> list[str]:
    """As Dask calls them."""
    return list(map(key_split, tasks))


# ------------------------------------------------------------------------------ one description


@pytest.mark.slow
@pytest.mark.parametrize("source", [clusters.source(), transformed()])
def test_a_cluster_runs_the_graphs_that_threads_run(
    source: Source, client: Any, ran: list[dict[Key, Task]]
) -> None:
    local = batches(source, threads=4)
    assert len(ran) == 2 * N_UNITS
    for tasks in ran[::5]:
        (_, epoch, u, _) = key = list(tasks)[-1]
        for block in (client.get(tasks, key), get_sync(tasks, key), unit_graph.run(tasks)):
            assert_same_rows(block, source.read_unit(u, 3, epoch))
    assert_same(batches(source, client=client), local)
    assert len(ran) == 2 * N_UNITS  # the cluster's units are not read here


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "steps"),
    [(clusters.source(), ["read"]), (transformed(), ["read", "transform"])],
)
def test_a_dashboard_shows_what_is_done_to_each_unit(
    source: Source, steps: list[str], client: Any
) -> None:
    """The task stream, its colours and its bars of progress go by these names and groups."""
    client.get_task_stream()  # the scheduler begins to record
    began = time.time()
    with Loader(source, batch_size=23, seed=3, client=client) as loader:
        assert sum(len(batch.rows) for batch in loader.epoch(5)) == 240
    shown = client.get_task_stream(start=began)
    keys = [task["key"] for task in shown]
    # As the dashboard calls and colours them.
    assert Counter(map(key_split, keys)) == dict.fromkeys(steps, N_UNITS)
    groups = {group for group, *_ in keys}
    assert sorted(map(key_split, groups)) == steps
    for group in groups:
        assert sorted(k[1:3] for k in keys if k[0] == group) == [(5, u) for u in range(N_UNITS)]


def test_threads_run_the_graphs_in_the_order_of_the_plan(ran: list[dict[Key, Task]]) -> None:
    with Loader(transformed(), batch_size=23, seed=3, block_bytes=5000, threads=1) as loader:
        list(loader.epoch(0))
        plan = loader._plan(0)
    planned = [int(u) for k in range(plan.n_blocks) for u in plan.block_units(k)[0]]
    assert [next(iter(tasks))[2] for tasks in ran] == planned
    assert all(names(tasks) == ["read", "transform"] for tasks in ran)


def test_the_steps_come_to_what_read_unit_gives() -> None:
    source = AugmentedSource(transformed(), 2, [clusters.noisy])
    for u in range(source.n_units):
        tasks, _ = UnitWork(source).graph(source, u, 3, 1)
        assert names(tasks) == ["read", "transform"]
        assert_same_rows(unit_graph.run(tasks), source.read_unit(u, 3, 1))


class Own(GeneratorSource):
    """Has transforms, and a `read_unit` of its own."""

    def read_unit(self, u: int, seed: int, epoch: int) -> Block:
        block = super().read_unit(u, seed, epoch)
        return block._replace(X=-block.X)


def test_a_read_unit_that_is_not_ours_is_one_task() -> None:
    classes = ("a", "b", "c")
    own: Any = Own(
        clusters.rows, 240, (4,), np.float32, 3, classes, 10, transforms=[clusters.noisy]
    )
    plain = as_source(Plain(clusters.source()))
    for source in (own, plain):
        tasks, _ = UnitWork(source).graph(source, 7, 3, 1)
        assert names(tasks) == ["read"]
        assert_same_rows(unit_graph.run(tasks), source.read_unit(7, 3, 1))
    assert_same(batches(plain), batches(clusters.source()))


def test_no_two_graphs_share_a_key() -> None:
    source = transformed()
    work, other = UnitWork(source), UnitWork(source)
    keys = [key for made in (work, work, other) for key in made.graph(source, 1, 0, 0)[0]]
    assert len(set(keys)) == len(keys) == 6


# ----------------------------------------------------------------------- a source that travels


def test_a_process_keeps_few_sources_open() -> None:
    recipes = [Recipe(clusters.source()) for _ in range(6)]
    sources = [opened(recipe) for recipe in recipes]
    assert opened(recipes[5]) is sources[5]
    assert opened(recipes[0]) is not sources[0]
    assert len(unit_graph._open) == 4
