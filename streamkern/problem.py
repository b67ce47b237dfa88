"""A run before it starts: the data opened, everything "auto" resolved, memory counted.

`open_run` is what `streamkern plan` prints and what `train` begins with; it reads metadata only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from streamkern.augment import Transform, from_config, is_deterministic, transform_name
from streamkern.backend import Backend
from streamkern.budget import default_budget
from streamkern.cache import Cache
from streamkern.choice import choose
from streamkern.config import RunConfig
from streamkern.devices import get_backend
from streamkern.errors import ConfigError, DataError, StoreNotFoundError, StreamkernError
from streamkern.fourier import FourierFeatures, check_sampled
from streamkern.kernels import Kernel, get_kernel
from streamkern.memory import Buffers, count
from streamkern.mixture import open_stores, stored_rows
from streamkern.plan import unit_sizes
from streamkern.points import Grid, point_bytes, point_width, scratch_bytes
from streamkern.precision import resolve_precision
from streamkern.prefetch import MAX_THREADS
from streamkern.remotefile import open_object
from streamkern.report import redact
from streamkern.selection import METHODS, ROW_METHODS, Selection, selection
from streamkern.sizes import IN_PLACE, ON_FEATURES, Problem, Sizes, Wishes
from streamkern.source_base import Source, read_ahead, target_bytes
from streamkern.sources import AugmentedSource, ZarrSource
from streamkern.storage import local_path, zarr_store
from streamkern.store import open_store
from streamkern.weights import class_notes, weight_factors

DEFAULT_CENTERS = 10_000
SAVING = 128 << 20  # beside the arrays, while `checksums` has chunks of them on their way


@dataclass(frozen=True)
class Data:
    """The stream, and the rows it is made from.

    source : what is trained on. base : the same rows before any augmentation, each once.
    fixed : the transforms that are no augmentation (scaling), in order, bound to their numbers;
    centers and evaluated rows go through these alone. cache : for chunks of remote stores.
    weight_factors : see `weights.weight_factors`; None where rows have no sample weights.
    """

    source: Source
    base: Source
    fixed: tuple[Transform, ...]
    cache: Cache | None = None
    weight_factors: npt.NDArray[np.float64] | None = None

    @property
    def d(self) -> int:
        """Features of a row."""
        return int(np.prod(self.source.row_shape))

    @property
    def augmented(self) -> bool:
        """Whether a stored row comes out in more than one form, or more often than another."""
        plain = self.source
        while isinstance(plain, AugmentedSource):
            plain = plain.base
        again = self.source.n_rows != self.base.n_rows or plain is not self.base
        random = len(self.fixed) < len(self.source.feed_transforms)
        return again or random or bool(host_transforms(self.source))

    @property
    def repeats(self) -> bool:
        """Whether every epoch is known to bring the same rows, in the same form."""
        return not self.augmented and _repeats(self.source)


def _repeats(source: Source) -> bool:
    parts = getattr(source, "parts", ())
    return getattr(source, "repeats", False) and all(map(_repeats, parts))


def host_transforms(source: Source) -> list[Transform]:
    """Transforms that run with the read, of a source and of those below it."""
    below = [t for part in getattr(source, "parts", ()) for t in host_transforms(part)]
    return [*below, *getattr(source, "_host", ())]


def open_data(config: RunConfig, source: Source | None = None) -> Data:
    """Open the training data. `source` overrides data.train and data.transforms."""
    settings, cache = config.data, None
    if settings.cache is not None:
        cache = Cache(settings.cache, settings.cache_size)
    if source is None:
        source = open_stores(
            settings.train_urls,
            settings.weights,
            x=settings.x,
            y=settings.y,
            w=settings.sample_weight,
            storage_options=options_for(config, *settings.train_urls),
            cache=cache,
        )
        if settings.copies > 1 or settings.transforms:
            transforms = from_config(settings.transform_tables)
            source = AugmentedSource(source, settings.copies, transforms)
    if source.n_outputs < 1:
        raise ConfigError("the training data has no targets y; training needs them")
    for transform in host_transforms(source):
        if is_deterministic(transform):
            raise ConfigError(
                f"transform {transform_name(transform)!r} is marked both host_transform and "
                "deterministic; as a part of the model it has to run at the feed: leave "
                "host_transform out"
            )
    fixed = tuple(t for t in source.feed_transforms if is_deterministic(t))
    factors = weight_factors(source, settings.class_weight)
    return Data(source, stored_rows(source), fixed, cache, factors)


def open_test(config: RunConfig, data: Data, test: Source | None = None) -> Source | None:
    """The held-out rows, checked against the training rows."""
    settings = config.data
    if test is None and settings.test is not None:
        test = ZarrSource(
            settings.test,
            x=settings.x,
            y=settings.y,
            storage_options=options_for(config, settings.test),
            cache=data.cache,
        )
    if test is None:
        return None
    check_evaluable(test, data.source.row_shape, "data.test")
    if test.n_outputs != data.source.n_outputs or test.classes != data.source.classes:
        raise ConfigError(
            f"data.test has {targets(test.classes, test.n_outputs)} and data.train "
            f"{targets(data.source.classes, data.source.n_outputs)}; use data with the same targets"
        )
    return test


def options_for(config: RunConfig, *urls: str) -> dict[str, Any]:
    """The storage options, for `urls` that are remote, or if no place of the run is."""
    places = (
        *config.data.train_urls, config.data.test, config.run.run_dir, config.model.centers,
        config.solver.warm_start,
    )  # fmt: skip
    remote = any(place is not None and local_path(place) is None for place in places)
    wanted = not remote or any(local_path(url) is None for url in urls)
    return config.data.storage_options if wanted else {}


def check_same_rows(source: Source, row_shape: tuple[int, ...], name: str) -> None:
    """Raise unless the rows of `source` have the shape the model was trained on."""
    if np.prod(source.row_shape) != np.prod(row_shape):
        raise ConfigError(
            f"{name} has rows of shape {source.row_shape}, the model was trained on "
            f"{tuple(row_shape)}; use data with the same features"
        )


def check_evaluable(source: Source, row_shape: tuple[int, ...], name: str) -> None:
    """Raise unless `source` can be evaluated: rows of that shape, and no augmentation of its own.

    Evaluated rows go through the model's own fixed transforms and no others.
    """
    check_same_rows(source, row_shape, name)
    random = [t for t in source.feed_transforms if not is_deterministic(t)]
    if random:
        raise ConfigError(
            f"{name} is augmented by {transform_name(random[0])!r}, which is not applied to "
            "evaluated rows; write the augmented rows to a store and evaluate that"
        )


def checked_classes(data: Data) -> list[str]:
    """What is unusual about the classes that are trained on, in sentences.

    Raises DataError where all rows that have a weight are of one class. Who gives weights has made
    up their mind about the rest.
    """
    source, factors = data.source, data.weight_factors
    totals = getattr(source, "totals", None)
    if source.classes is None or totals is None:
        return []
    weighed = totals if factors is None else totals * factors
    notes = class_notes(source.classes, weighed, "rows" if factors is None else "weight")
    if np.count_nonzero(weighed) < 2:
        raise DataError(notes[0])
    return notes if factors is None else []


def targets(classes: Sequence[str] | None, n_outputs: int) -> str:
    """What there is to predict, in words."""
    if classes is None:
        return f"{n_outputs} values"
    names = ", ".join(classes[:10]) + (", ..." if n_outputs > 10 else "")
    return f"{n_outputs} classes ({names})"


@dataclass(frozen=True)
class Run:
    """Everything `plan` prints and `train` needs before the first row is read.

    reason : why it is this solver.
    """

    config: RunConfig
    data: Data
    problem: Problem
    sizes: Sizes
    buffers: Buffers
    reason: str
    budget_bytes: int
    backend: Backend
    precision: str
    grid: Grid | None


def open_run(
    config: RunConfig,
    *,
    source: Source | None = None,
    n_centers: int | None = None,
    fixed_sizes: Sizes | None = None,
    on_cluster: bool = False,
    kernel: Kernel | None = None,
) -> Run:
    """Open the data and resolve the sizes.

    n_centers : of centers handed over in memory. fixed_sizes : those a run was started with.
    on_cluster : the reading is done on a cluster that is handed over. kernel : in place of
    model.kernel.
    The caller closes `Run.backend`.
    """
    kernel = get_kernel(config.model.kernel) if kernel is None else kernel
    data = open_data(config, source)
    p = n_centers if n_centers is not None else count_centers(config, data)
    settings = config.run
    threads = None if settings.threads == "auto" else settings.threads
    backend = get_backend(settings.device, threads, settings.accelerator)
    try:
        budget = settings.memory if backend.name == "cpu" else settings.device_memory
        budget_bytes = default_budget(backend.memory_available()) if budget == "auto" else budget
        transforms = data.source.feed_transforms
        own = n_centers is None and config.model.centers in (*ROW_METHODS, "all")
        # Centers from elsewhere need not be integers, and means are none.
        integers = own or settings.precision == "integer"
        dtype = data.source.dtype if integers else np.dtype(np.float32)
        if config.model.features == "fourier":
            check_sampled(kernel)
            kernel = FourierFeatures(p, kernel.describe())
        precision = resolve_precision(settings.precision, dtype, transforms, backend, kernel)
        problem = _problem(config, data, p, backend, precision[0], on_cluster, kernel)
        if n_centers is None and config.model.features != "fourier":
            problem = replace(problem, selection=_selection(config, data, problem, budget_bytes))
        if fixed_sizes is None:
            wishes, ridge = _wishes(config), config.solver.ridge
            sizes, buffers, reason = choose(problem, wishes, ridge, int(budget_bytes))
        else:
            sizes, buffers = fixed_sizes, count(problem, fixed_sizes)
            reason = "as when the run was started"
        _check_method(config, data, sizes, n_centers is not None)
    except BaseException:
        backend.close()
        raise
    return Run(
        config, data, problem, sizes, buffers, reason, int(budget_bytes), backend, *precision
    )


def _check_method(config: RunConfig, data: Data, sizes: Sizes, given: bool) -> None:
    if sizes.features == "fourier" and given:
        raise ConfigError(
            "model.features='fourier' has no centers; leave centers out, or set features='nystrom'"
        )
    if config.solver.ridge and sizes.solver.startswith("eigenpro") and not sizes.linear:
        raise ConfigError(
            f"solver.ridge={config.solver.ridge:g} is not defined for solver "
            f"{sizes.solver!r}; set it to 0 or use solver 'block', 'direct' or 'falkon'"
        )
    if sizes.solver == "falkon" and config.data.epochs < 2:
        raise ConfigError(
            f"data.epochs={config.data.epochs} must be at least 2 with solver 'falkon', whose "
            "first pass is no iteration yet; set it to the iterations wished for and 1 more"
        )
    if not sizes.in_place:
        return
    instead = "another solver"
    if sizes.solver in ON_FEATURES:
        instead += ", or features='nystrom' for chosen centers"
    if data.augmented:
        raise ConfigError(
            f"solver={sizes.solver!r} takes the training rows themselves as centers and can not be "
            f"used with random transforms, copies or weights; use {instead}"
        )
    model, n = config.model, data.base.n_rows
    if given or model.centers not in ("random", "all") or model.n_centers not in ("auto", n):
        count = "" if model.n_centers == "auto" else f"n_centers={model.n_centers}: "
        raise ConfigError(
            f"{count}solver={sizes.solver!r} takes all {n} training rows as centers; leave centers "
            f"and n_centers out, or use {instead}"
        )


def count_centers(config: RunConfig, data: Data) -> int:
    """p, from the settings and metadata."""
    model, n = config.model, data.base.n_rows
    if model.features == "fourier":
        return DEFAULT_CENTERS if model.n_features == "auto" else model.n_features
    in_place = config.solver.name in IN_PLACE and model.features == "kernel"
    if model.centers == "all" or in_place:
        return n
    if model.centers == "balanced" and data.base.classes is None:
        raise ConfigError(
            "model.centers='balanced' needs classes and the targets are values; set "
            "centers = 'random', or another way to choose"
        )
    if model.centers not in METHODS:
        array = open_centers(config)
        if int(np.prod(array.shape[1:])) != data.d:
            raise ConfigError(
                f"model.centers has rows of shape {array.shape[1:]}, the data has "
                f"{data.d} features; use centers with the same features"
            )
        if model.n_centers not in ("auto", array.shape[0]):
            raise ConfigError(
                f"model.n_centers={model.n_centers} but model.centers holds {array.shape[0]} rows; "
                "leave n_centers out"
            )
        return int(array.shape[0])
    if model.n_centers == "auto":
        return min(n, DEFAULT_CENTERS)
    if model.n_centers > n:
        raise ConfigError(
            f"model.n_centers={model.n_centers} must lie between 1 and {n}: no more "
            f"{model.centers} centers can be drawn from {n} rows; lower n_centers or give centers"
        )
    return model.n_centers


def _selection(
    config: RunConfig, data: Data, problem: Problem, budget_bytes: int
) -> Selection | None:
    return selection(
        config.model.centers, data.base.n_rows, problem.p, problem.d,
        row_bytes=problem.row_bytes, point_bytes=problem.point_bytes or 0,
        itemsize=problem.itemsize, threads=problem.threads, budget_bytes=budget_bytes,
    )  # fmt: skip


def open_centers(config: RunConfig) -> Any:
    """An array of centers: a .npy file, read whole where it is remote, a zarr array, or X of a
    store.

    Raises StoreNotFoundError, ConfigError, StorageError and MissingDependencyError.
    """
    url = config.model.centers
    remote = local_path(url) is None
    options = options_for(config, url) if remote else {}
    try:
        if url.endswith(".npy"):
            return _open_npy(url, options)
        store = zarr_store(url, storage_options=options) if remote else url
        found = zarr.open(store, mode="r")
        if isinstance(found, zarr.Group):
            # Checked as a store: finished, and X of rows.
            return open_store(
                url, x=config.data.x, y=None, storage_options=options or None
            ).features  # fmt: skip
        return found
    except StreamkernError:
        raise
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"there is no array of centers at {redact(url)}") from error
    except Exception as error:  # zarr raises many types for what is not an array
        raise ConfigError(
            f"model.centers={redact(url)!r} is no .npy file, zarr array or store: "
            f"{redact(str(error))}"
        ) from error


def _open_npy(url: str, options: dict[str, Any]) -> Any:
    if local_path(url) is not None:
        return np.load(url, mmap_mode="r", allow_pickle=False)
    with open_object(url, options) as file:
        return np.load(file, allow_pickle=False)


def _problem(
    config: RunConfig, data: Data, p: int, backend: Backend, precision: str, on_cluster: bool,
    kernel: Kernel,
) -> Problem:  # fmt: skip
    source, run_dir = data.source, config.run.run_dir
    # For a network or a cluster, rather than for this machine.
    waits = on_cluster or config.data.dask is not None or bool(getattr(source, "remote", False))
    width = point_width(data.d, precision, backend, kernel)
    itemsize = 8 if precision == "float64" else 4
    row_bytes = data.d * source.dtype.itemsize + target_bytes(source)
    unit_rows = int(unit_sizes(source).max())
    return Problem(
        n_rows=source.n_rows,
        epochs=config.data.epochs,
        d=data.d,
        c=source.n_outputs,
        p=p,
        row_bytes=row_bytes,
        unit_rows=unit_rows,
        itemsize=itemsize,
        threads=backend.threads,
        width=width,
        tile_bytes=backend.tile_rows * min(backend.tile_width(width), p) * itemsize,
        library_bytes=backend.library_bytes,
        feed_arrays=1 + max(1, len(source.feed_transforms)),
        point_bytes=point_bytes(data.d, precision, backend, kernel),
        scratch_bytes=backend.prepare_rows * scratch_bytes(data.d, precision, kernel),
        staging=backend.staging,
        # Where reads wait for a network, as many are under way as `in_flight_bytes` allows.
        readers=MAX_THREADS if waits else 0,
        units_in_hand=read_ahead(waits),
        saving=SAVING if run_dir is not None and local_path(run_dir) is None else 0,
        kept=run_dir is not None,
    )


def _wishes(config: RunConfig) -> Wishes:
    solver = config.solver

    def fixed(value: Any) -> Any:
        return None if value == "auto" else value

    return Wishes(
        solver=solver.name,
        features=config.model.features,
        batch_size=fixed(config.data.batch_size),
        block_size=fixed(solver.block_size),
        n_nystrom=fixed(solver.n_nystrom),
        level=fixed(solver.level),
        period=fixed(solver.period),
        projection=fixed(solver.projection),
    )
