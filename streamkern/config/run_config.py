"""The settings of a run: one frozen, self-checking model per stage, and `RunConfig` over them.

A run file is TOML with one table per stage; only `data.train` has no default::

    [data]
    train = "s3://bucket/train.zarr"
    test = "s3://bucket/test.zarr"
    transforms = [{kind = "scale", mode = "global"}, {kind = "noise", sigma = 0.5}]

    [model]
    kernel = "laplace"
    n_centers = 100_000

    [solver]
    name = "block"

    [run]
    run_dir = "runs/first"
    memory = "8 GiB"
    checkpoint_every = "5 min"

A bad setting is a `ConfigError` that names the key, its value, the rule and the remedy; several
bad settings are reported together, one sentence a line. Relative paths are relative to the
current directory. Credentials belong in the environment or in `data.storage_options`, which no
repr, dump, log or message shows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    model_validator,
)

from streamkern.basics.errors import ConfigError
from streamkern.config.rules import (
    AutoCount,
    AutoPositive,
    AutoStep,
    Cadence,
    Centers,
    ClassWeights,
    Count,
    Counts,
    Device,
    Flag,
    Fraction,
    LocalFolder,
    Memory,
    Name,
    NotNegative,
    OptionalName,
    OptionalPart,
    OptionalUrl,
    Positive,
    Rule,
    Scheduler,
    Secrets,
    Seed,
    Table,
    Urls,
    Weights,
    parse_seconds,
    parse_toml,
    unknown_key,
)
from streamkern.kernels.builtin import KERNELS, Kernel, get_kernel
from streamkern.planning.sizes import ON_FEATURES

# What a resumed run may change: it moves no sample, no draw and no weight, or (memory, device)
# what it does move is recorded by the trainer after it is resolved to batch size and backend.
FREE_AT_RESUME: Final = frozenset(
    {
        "data.test",
        "data.prefetch_threads",
        "data.dask",
        "data.cache",
        "data.cache_size",
        "data.storage_options",
        "run.run_dir",
        "run.device",
        "run.accelerator",
        "run.memory",
        "run.device_memory",
        "run.threads",
        "run.checkpoint_every",
        "run.keep_checkpoints",
        "run.evaluate_every",
        "run.evaluate_at",
        "run.log",
    }
)


class _Transform(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class ScaleConfig(_Transform):
    """Centre and scale by the store's statistics: over all entries, per feature, or not at all."""

    kind: Literal["scale"] = "scale"
    mode: Literal["global", "feature", "none"] = "global"


class NoiseConfig(_Transform):
    """Add independent Gaussian noise of standard deviation `sigma`."""

    kind: Literal["noise"] = "noise"
    sigma: NotNegative


class MixUpConfig(_Transform):
    """Mix pairs of rows and their targets with Beta(alpha, alpha) weights."""

    kind: Literal["mixup"] = "mixup"
    alpha: Positive


class CropConfig(_Transform):
    """Pad images by `padding` pixels and crop back at a random offset."""

    kind: Literal["crop"] = "crop"
    padding: Count = 4


class FlipConfig(_Transform):
    """Flip images left to right at random."""

    kind: Literal["flip"] = "flip"


TRANSFORMS: Final[dict[str, type[_Transform]]] = {
    "scale": ScaleConfig,
    "noise": NoiseConfig,
    "mixup": MixUpConfig,
    "crop": CropConfig,
    "flip": FlipConfig,
}
TransformConfig = Annotated[
    ScaleConfig | NoiseConfig | MixUpConfig | CropConfig | FlipConfig,
    Field(discriminator="kind"),
]
Transforms = Annotated[tuple[TransformConfig, ...], Rule("a list of tables")]


class DataConfig(Table):
    """[data]: what is trained on, and the order and size in which it comes.

    train : a store, or several: one after another, or with `weights` in those shares.
    sample_weight : name of the array of sample weights, in stores that streamkern did not write;
    ours bring theirs along. foreign : read the arrays of a store of ours, perhaps a damaged one, as
    if another program had written them: without classes, weights and checks.
    class_weight : "balanced", or weights by class name. See `sample_weights`.
    Of `test`, only weights that an ingested store brings along count, and class weights do not.
    transforms see rows in the units they are stored in, unless a scale is first among them.
    scale : how what comes out of the transforms is scaled, as a part of the model: "feature", every
    feature by its own mean and standard deviation; "global", all of them by one; "none"; "auto":
    "global" for images, rows of uint8, and features that vary little because they are nearly always
    0, which are pixels as a rule; "feature" for all others. A scale in `transforms` takes its
    place.
    epochs : passes; "auto": enough for 100 000 rows, copies included, between 1 and 20, and at
    most 20 with solver "falkon", which stops when it has converged.
    cache : a folder that keeps chunks of remote stores, up to `cache_size`, by default half of the
    free disk, so that a second epoch or run does not fetch them again.
    """

    table = "data"
    kinds = TRANSFORMS
    train: Urls
    weights: Weights = None
    test: OptionalUrl = None
    x: Name = "X"
    y: Name = "y"
    sample_weight: OptionalName = None
    foreign: bool = False
    class_weight: ClassWeights = None
    copies: Count = 1
    transforms: Transforms = ()
    scale: Literal["auto", "feature", "global", "none"] = "auto"
    epochs: AutoCount = "auto"
    batch_size: AutoCount = "auto"
    prefetch_threads: AutoCount = "auto"
    dask: Scheduler = None
    cache: LocalFolder = None
    cache_size: Memory = "auto"
    storage_options: Secrets = Field(default_factory=dict)

    @model_validator(mode="after")
    def _a_weight_each(self) -> DataConfig:
        if self.weights is None:
            return self
        if isinstance(self.train, str):
            raise ConfigError(
                "data.weights is for several stores; make data.train a list, or leave weights out"
            )
        if len(self.weights) != len(self.train):
            raise ConfigError(
                f"data.weights has {len(self.weights)} numbers for {len(self.train)} stores in "
                "data.train; give one for each"
            )
        return self

    @property
    def passes(self) -> int:
        """`epochs` of a run that was opened, where "auto" is a number
        (`training_data.with_epochs`)."""
        assert not isinstance(self.epochs, str)
        return self.epochs

    @property
    def train_urls(self) -> tuple[str, ...]:
        """`train` as a tuple, also of one."""
        return (self.train,) if isinstance(self.train, str) else self.train

    @property
    def transform_tables(self) -> list[dict[str, object]]:
        """The transforms as plain tables, `{"kind": "noise", "sigma": 0.5}`, in order."""
        return [transform.model_dump() for transform in self.transforms]


def _kernel(value: object) -> object:
    if value in KERNELS if isinstance(value, str) else isinstance(value, Mapping | Kernel):
        return value
    raise ValueError("not a kernel")


def _described(kernel: object) -> object:
    return kernel.describe() if isinstance(kernel, Kernel) else kernel


KernelChoice = Annotated[
    str | dict[str, Any] | InstanceOf[Kernel],
    BeforeValidator(_kernel),
    PlainSerializer(_described, when_used="json"),
    Rule(
        f"one of {', '.join(json.dumps(name) for name in KERNELS)}, or a table with kind = one of "
        'these, "sum" or "product"'
    ),
]


class ModelConfig(Table):
    """[model]: the kernel and its centers.

    kernel : a name, or a table: `{kind = "polynomial", degree = 2}`, or a sum or product of
    kernels, `{kind = "sum", parts = ["laplace", {kind = "gaussian", bandwidth = 2.0}]}`. In Python
    it may be a `Kernel`, with its own bandwidth.
    bandwidth : of the kernel, or of those parts that do not say theirs.
    features : "kernel": f is a sum of kernels at the centers. "nystrom": the same f, trained as
    a linear model of L^-1 k(Z, x), K(Z, Z) = L L^T. "fourier": a linear model of `n_features`
    random Fourier features, without centers.
    centers : how they are chosen. "random": rows of the data. "balanced": the same, with equally
    many of each class as far as there are. "kmeans": means of a stream of rows (`kmeans`); they
    help where p is far below n. "rpcholesky": rows that span the kernel matrix well, out of up to
    8 p random ones (`rpcholesky`). "all": every row. Or the place of an array of rows or a store.
    fit_intercept : the weighted mean of the targets is taken from them before and added to f after;
    false, as in most papers: f is kernels and nothing else.
    """

    table = "model"
    kernel: KernelChoice = "laplace"
    bandwidth: AutoPositive = "auto"
    n_centers: AutoCount = "auto"
    centers: Centers = "random"
    features: Literal["kernel", "fourier", "nystrom"] = "kernel"
    n_features: AutoCount = "auto"
    fit_intercept: Flag = True

    @model_validator(mode="after")
    def _kernel_can_be_made(self) -> ModelConfig:
        if isinstance(self.kernel, str) and self.bandwidth == "auto":
            return self
        asked: list[str] = []

        def width(geometry: str) -> float:
            asked.append(geometry)
            return 1.0

        try:
            get_kernel(self.kernel, width)
        except ConfigError as error:
            raise ConfigError(f"model.kernel: {error}") from None
        if self.bandwidth != "auto" and not asked:
            raise ConfigError(
                f"model.bandwidth={self.bandwidth:g} is used by no part of model.kernel="
                f"{self.kernel!r}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _one_way_to_count(self) -> ModelConfig:
        fourier = self.features == "fourier"
        if not fourier and self.n_features != "auto":
            raise ConfigError(
                f'model.n_features={self.n_features} is for model.features="fourier"; leave it '
                "out, or set n_centers"
            )
        if self.n_features != "auto" and self.n_features % 2:
            raise ConfigError(
                f"model.n_features={self.n_features} must be even: a cosine and a sine of each "
                "frequency"
            )
        if fourier and (self.centers != "random" or self.n_centers != "auto"):
            given = "" if self.n_centers == "auto" else f"model.n_centers={self.n_centers}: "
            raise ConfigError(
                f'{given}model.features="fourier" has no centers; leave centers and n_centers out, '
                'and set n_features, or set features = "nystrom"'
            )
        if self.centers == "all" and self.n_centers != "auto":
            raise ConfigError(
                f'model.n_centers={self.n_centers} contradicts model.centers="all", which takes '
                'every training row; leave n_centers out or set centers = "random"'
            )
        return self


_STEPS: Final = ("average", "step_scale")
_NYSTROM: Final = ("n_nystrom", "level")
# What each solver takes; "auto" takes what the block solver does.
SOLVER_OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "block": ("block_size", "ridge", "damping", *_STEPS, "warm_start"),
    "sgd": ("ridge", *_STEPS),
    "eigenpro1": (*_NYSTROM, "ridge", "damping", *_STEPS),
    "eigenpro2": (*_NYSTROM, *_STEPS),
    "eigenpro3": (*_NYSTROM, "period", "projection", *_STEPS, "warm_start"),
    "eigenpro4": (*_NYSTROM, "period", "projection", *_STEPS, "warm_start"),
    "direct": ("ridge",),
    "falkon": ("ridge", "tolerance", "warm_start"),
}


class SolverConfig(Table):
    """[solver]: the method, and what of it the user wants to fix by hand.

    ridge : coefficient of tr(alpha^T K(Z, Z) alpha) / 2 beside half the mean squared error.
    tolerance : FALKON stops at this residual, relative to that of the zero function, in the norm
    of its preconditioner; left out it is 1e-4. warm_start : run directory whose newest weights
    training starts from; its centers must be the same.
    """

    table = "solver"
    name: Literal[
        "auto",
        "block",
        "sgd",
        "eigenpro1",
        "eigenpro2",
        "eigenpro3",
        "eigenpro4",
        "direct",
        "falkon",
    ] = "auto"
    block_size: AutoCount = "auto"
    ridge: NotNegative = 0.0
    n_nystrom: AutoCount = "auto"
    level: AutoCount = "auto"
    period: AutoCount = "auto"
    projection: Literal["auto", "exact", "resident", "inexact"] = "auto"
    average: Flag = True
    damping: AutoPositive = "auto"
    step_scale: Fraction = 1.0
    tolerance: OptionalPart = None
    warm_start: OptionalUrl = None

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that are not at their defaults, and those defaults."""
        usual = {name: field.default for name, field in SolverConfig.model_fields.items()}
        return {name: default for name, default in usual.items() if getattr(self, name) != default}

    @model_validator(mode="after")
    def _defined_for_the_solver(self) -> SolverConfig:
        allowed = SOLVER_OPTIONS["block" if self.name == "auto" else self.name]
        for name, default in self.changed.items():
            if name != "name" and name not in allowed:
                value = getattr(self, name)
                shown = "" if name == "warm_start" else f"={json.dumps(value)}"  # a URL may tell
                raise ConfigError(
                    f"solver.{name}{shown} is not defined for solver {self.name!r}; leave it "
                    f"{'out' if default is None else 'at ' + json.dumps(default)}, or use another "
                    f"solver: this one takes {', '.join(allowed)}"
                )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> SolverConfig:
        if self.level != "auto" and self.n_nystrom != "auto" and self.level >= self.n_nystrom:
            raise ConfigError(
                f"solver.level={self.level} must lie between 1 and solver.n_nystrom - 1 = "
                f"{self.n_nystrom - 1}, as its eigenvectors come from so many rows; lower level or "
                "raise n_nystrom"
            )
        if self.name == "eigenpro1" and self.damping != "auto" and self.damping > 1:
            raise ConfigError(
                f"solver.damping={self.damping:g} must be at most 1 with solver.name="
                '"eigenpro1", where it is the factor tau; lower it'
            )
        if self.name == "eigenpro3" and self.period not in ("auto", 1):
            raise ConfigError(
                f'solver.period={self.period} must be 1 with solver.name="eigenpro3", which '
                'projects after every step; set name = "eigenpro4" to delay the projection'
            )
        return self


class Every(NamedTuple):
    """How often something happens: a number of steps, or seconds; both None is "auto"."""

    steps: int | None
    seconds: float | None


class ExecutionConfig(Table):
    """[run]: where and how the run executes, and how it is saved and watched.

    evaluate_every : steps; evaluate_at : counts of samples, each evaluated once it is reached.
    """

    table = "run"
    run_dir: OptionalUrl = None
    precision: Literal["auto", "exact", "high", "fast", "integer", "float64"] = "auto"
    device: Device = "auto"
    accelerator: Literal["auto", "numba", "none"] = "auto"
    memory: Memory = "auto"
    device_memory: Memory = "auto"
    threads: AutoCount = "auto"
    random_state: Seed = 0
    checkpoint_every: Cadence = "auto"
    keep_checkpoints: Count = 3
    evaluate_every: AutoStep = "auto"
    evaluate_at: Counts = ()
    log: Flag = True

    @property
    def checkpoint_cadence(self) -> Every:
        """`checkpoint_every` as steps or seconds."""
        every = self.checkpoint_every
        if isinstance(every, int):
            return Every(every, None)
        return Every(None, None if every == "auto" else parse_seconds(every))


class RunConfig(Table):
    """Every setting of a run. Build it from tables, a run file, or the stage models."""

    data: DataConfig
    model: ModelConfig = ModelConfig()
    solver: SolverConfig = SolverConfig()
    run: ExecutionConfig = ExecutionConfig()

    @model_validator(mode="after")
    def _method_fits(self) -> RunConfig:
        features, name = self.model.features, self.solver.name
        if features != "kernel" and name not in ("auto", *ON_FEATURES):
            raise ConfigError(
                f'model.features="{features}" can not be trained by solver.name="{name}"; use one '
                f"of {', '.join(ON_FEATURES)}"
            )
        return self

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any]) -> RunConfig:
        """Return the configuration in nested tables, as TOML gives them."""
        if "data" not in tables:
            tables = {"data": {}, **tables}  # So that the message names data.train, not data.
        return cls(**{str(key): value for key, value in tables.items()})

    def with_overrides(self, overrides: Mapping[str, Any]) -> RunConfig:
        """Return a copy with `{"solver.name": "block"}` and the like set, and checked again."""
        tables: dict[str, Any] = {name: dict(table) for name, table in self}
        for key, value in overrides.items():
            section, _, field = key.partition(".")
            if section not in tables or not field:
                raise ConfigError(unknown_key(RunConfig, key if not field else section))
            tables[section][field] = value
        return RunConfig(**tables)

    def identity(self) -> dict[str, dict[str, Any]]:
        """Return, as JSON values, the settings that must not change when a run is resumed."""
        return {
            name: {
                k: v
                for k, v in table.items()
                if v is not None and f"{name}.{k}" not in FREE_AT_RESUME
            }
            for name, table in self.model_dump(mode="json").items()
        }


def load_run_file(path: str | os.PathLike[str]) -> RunConfig:
    """Return the configuration in a TOML run file; a `ConfigError` names the file and the key."""
    path = Path(path)
    try:
        tables = parse_toml(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(
            f"run file {str(path)!r} can not be read ({error.strerror}); give the path of a "
            "TOML file"
        ) from None
    except ValueError as error:  # TOML syntax or text that is not UTF-8
        raise ConfigError(
            f"run file {str(path)!r} is not valid TOML ({error}); correct it there"
        ) from None
    try:
        return RunConfig.from_tables(tables)
    except ConfigError as error:
        raise ConfigError(f"run file {str(path)!r}: {error}") from None
