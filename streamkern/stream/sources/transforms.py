"""Transforms of rows: pure functions of the data and of (seed, epoch, row).

A transform is any callable that takes ``(X, Y, rng)`` and returns ``(X, Y)``:

    def dim(X, Y, rng):
        return X * rng.uniform((1,)), Y        # one factor per row, on the CPU or the GPU

`rng` is a `RowRandom` whose draws belong to the rows, so results do not depend on batches or
threads. X is (m, *row_shape). A transform returns new arrays and never writes into its arguments.

Transforms run in order. The first transforms that keep the storage dtype (`keeps_dtype`, or
`@host_transform`) are host transforms: they run when rows are read, on the host, with y as stored.
The first other transform and all that follow it are feed transforms: they run on the device, after
the upload, with X floating and Y (m, c) one-hot or values.

A row keeps its sample weight, but a transform that mixes rows also has the method
`weighted(X, Y, w, rng)`, which returns the mixed weights too. `keeps_integers` marks a transform
that maps stored integers to integers of the same range; `needs_integers` marks a transform that
accepts only stored integers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from streamkern.basics.errors import ConfigError, DataError, NonFiniteError, StreamkernError
from streamkern.basics.message import mention
from streamkern.basics.randomness import AnyArray, RowRandom
from streamkern.basics.values import checked_list, to_builtin
from streamkern.store.layout import first_nonfinite
from streamkern.store.row_block import without_mask
from streamkern.store.sparse_rows import sparse_features
from streamkern.stream.sources.quantile_scores import QuantileScores, brief_numbers, shape_after
from streamkern.stream.sources.random_transforms import GaussianNoise as GaussianNoise
from streamkern.stream.sources.random_transforms import MixUp as MixUp
from streamkern.stream.sources.random_transforms import RandomCrop as RandomCrop
from streamkern.stream.sources.random_transforms import RandomFlip as RandomFlip
from streamkern.stream.sources.random_transforms import RowLayout

Transform = Callable[[AnyArray, AnyArray, RowRandom], tuple[AnyArray, AnyArray]]
_Function = TypeVar("_Function", bound=Callable[..., Any])
Moments = tuple[float | None, float | None, np.ndarray | None, np.ndarray | None]
"""Mean and standard deviation over all entries of X, then mean and standard deviation of each
feature, (*row_shape,) or (d,); each pair is None if it is not known."""
# Standard deviation, relative to the mean, up to which a feature counts as a rounded constant.
CONSTANT_FEATURE = 16 * np.finfo(np.float64).eps
SCALE_SLAB_ENTRIES = 1 << 18  # entries that `Scale` converts to float64 at a time
SETUP_EPOCH = 1 << 30  # keys random transforms of rows in the setup; no run reaches it


class BaseData(RowLayout, Protocol):
    """The attributes of a source that its transforms may use."""

    def statistics(self) -> Moments: ...


def host_transform(function: _Function) -> _Function:
    """Mark a transform that keeps shape and storage dtype: it runs when rows are read."""
    function.keeps_dtype = True  # type: ignore[attr-defined]
    return function


def deterministic(function: _Function) -> _Function:
    """Mark a transform without random draws as part of the model.

    It also applies to centers and evaluated rows. Transforms without this mark are augmentation,
    which applies to training rows only.
    """
    function.deterministic = True  # type: ignore[attr-defined]
    return function


def keeps_integers(function: _Function) -> _Function:
    """Mark a transform that maps stored integers to integers from 0 to 255, or 65535 for uint16.

    X may be floating. If all transforms are marked so, rows of uint8 allow precision "integer".
    """
    function.keeps_integers = True  # type: ignore[attr-defined]
    return function


def integers_stay(transforms: Sequence[Transform]) -> bool:
    """Return whether stored integers are still integers after the given feed transforms."""
    return all(getattr(transform, "keeps_integers", False) for transform in transforms)


def is_deterministic(transform: Transform) -> bool:
    """Return whether a transform belongs to the model, such as a scaling, not to augmentation."""
    return bool(getattr(transform, "deterministic", False))


@dataclass(frozen=True, eq=False)
class Scale:
    """(X - mean) / scale.

    Parameters
    ----------
    mode : "global" (one mean and one scale), "feature" (a mean and a scale for each feature),
        "quantiles" (as "feature", with the quantile scores of some features appended) or "none"
    mean, scale : float, or (d,) for "feature"
        Both or neither; by default from the source's statistics. A scale of 0 (a constant feature)
        counts as 1, and so does a measured scale within the rounding error of the mean.
    scores : quantile scores of scaled features, which the setting data.scale computes

    The result is computed in float64 and rounded once: equal numbers of any dtype give equal
    features, and rows with a large common offset lose only the precision that their dtype lost.
    """

    mode: str = "global"
    mean: Any = None
    scale: Any = None
    scores: QuantileScores | None = None
    deterministic = True

    def __post_init__(self) -> None:
        if (self.mode == "quantiles") != (self.scores is not None):
            raise ConfigError(
                'scale mode="quantiles" needs a sample of the rows, but a transform has no such '
                "sample",
                f"set it in {mention('data.scale')}",
            )
        if self.mode not in ("none", "global", "feature", "quantiles"):
            raise ConfigError(
                f'scale mode="{self.mode}" is unknown', 'use "none", "global" or "feature"'
            )
        if (self.mean is None) != (self.scale is None):
            raise ConfigError(
                f"a scale transform has only one of mean= and {mention('scale=')}; give both or "
                "neither"
            )

    @property
    def keeps_integers(self) -> bool:
        """True if the transform does nothing."""
        return self.mode == "none"

    def bind(self, data: BaseData) -> Scale:
        """Return the same transform, with mean and scale of the data in the shape of a row.

        Raises ConfigError if they are not known, or have another number of entries.
        """
        if self.mode in ("none", "quantiles"):
            return self
        mean, scale = self.mean, self.scale
        if mean is None:
            global_mean, global_scale, feature_mean, feature_scale = data.statistics()
            mean, scale = global_mean, global_scale
            if self.mode == "feature":
                mean, scale = feature_mean, feature_scale
            if mean is not None and scale is not None:
                is_rounding_error = np.abs(mean) * CONSTANT_FEATURE >= scale
                scale = np.where(is_rounding_error, 0.0, scale)
        if mean is None or scale is None:
            raise ConfigError(
                f'scale mode="{self.mode}" needs statistics, but this source has none',
                f"give mean= and {mention('scale=')}, or ingest the data into a "
                "store, which has them",
            )
        shape = data.row_shape if self.mode == "feature" else ()
        mean, scale = np.asarray(mean, np.float64), np.asarray(scale, np.float64)
        if mean.size != np.prod(shape, dtype=int) or mean.size != scale.size:
            raise ConfigError(
                f'scale mode="{self.mode}" got arrays of shapes {mean.shape} and {scale.shape}',
                f"give {f'{shape} numbers' if shape else 'one number'} for each",
            )
        scale = np.where(scale == 0, 1.0, scale)
        return Scale(self.mode, mean.reshape(shape), scale.reshape(shape))

    def __call__(self, X: AnyArray, Y: AnyArray, rng: RowRandom) -> tuple[AnyArray, AnyArray]:
        if self.mode == "none":
            return X, Y
        d = max(math.prod(X.shape[1:]), 1)
        scaled = rng.empty((len(X), *shape_after([self], X.shape[1:])), X.dtype)
        if self.scores is None and rng.fills is not None and rng.fills.standardise is not None:
            rng.fills.standardise(X, self.mean, self.scale, scaled)
            return scaled, Y
        mean, scale = (rng.xp.asarray(a, np.float64) for a in (self.mean, self.scale))
        step = max(SCALE_SLAB_ENTRIES // d, 1)
        for rows in (slice(i, i + step) for i in range(0, len(X), step)):
            slab = rng.xp.subtract(X[rows], mean)
            slab /= scale
            if self.scores is None:
                scaled[rows] = slab
            else:
                scaled[rows, :d] = slab
                self.scores.write_scores(rng.xp, slab, scaled[rows, d:])
        return scaled, Y

    def shape_after(self, row_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a row after the transform."""
        return row_shape if self.scores is None else (row_shape[0] + len(self.scores),)

    def describe(self) -> dict[str, object]:
        numbers = {"mean": brief_numbers(self.mean), "scale": brief_numbers(self.scale)}
        if self.scores is not None:
            numbers |= {name: brief_numbers(a) for name, a in self.scores.arrays().items()}
        return {"kind": "scale", "mode": self.mode, **numbers}


TRANSFORM_KINDS: dict[str, Callable[..., Transform]] = {
    "scale": Scale,
    "noise": GaussianNoise,
    "mixup": MixUp,
    "crop": RandomCrop,
    "flip": RandomFlip,
}


def from_config(settings: Sequence[Mapping[str, Any] | Transform]) -> tuple[Transform, ...]:
    """Make transforms from plain settings such as ``[{"kind": "noise", "sigma": 0.5}]``.

    Entries that are not mappings are returned as they are. Raises ConfigError for an unknown kind,
    and for options or values that the kind does not accept.
    """
    transforms: list[Transform] = []
    for number, entry in enumerate(settings, start=1):
        if not isinstance(entry, Mapping):
            transforms.append(entry)
            continue
        options = dict(to_builtin(entry))
        kind = options.pop("kind", None)
        if kind not in TRANSFORM_KINDS:
            raise ConfigError(
                f"transform {number} has kind={kind!r}", f"use one of {', '.join(TRANSFORM_KINDS)}"
            )
        try:
            transforms.append(TRANSFORM_KINDS[kind](**options))
        except TypeError as error:
            options_of_kind = inspect.signature(TRANSFORM_KINDS[kind]).parameters
            option_names = [name for name in options_of_kind if name != "most"]  # set by `bind`
            raise ConfigError(
                f"transform {number} ({kind}) does not accept the options {options}",
                f"its options are {', '.join(option_names) or 'none'}: {error}",
            ) from error
    return tuple(transforms)


def bind_transform(transform: Transform, data: BaseData) -> Transform:
    """Return the transform bound to the data; raise ConfigError if it cannot be used."""
    candidate: Any = transform
    if isinstance(candidate, type) or not callable(candidate):
        problem = "a class" if isinstance(candidate, type) else "not callable"
        raise ConfigError(
            f"transform {candidate!r} is {problem}",
            "give an object such as GaussianNoise(0.1), or a function (X, Y, rng) -> (X, Y)",
        )
    if sparse_features(getattr(data, "file_form", None)) is not None:
        raise ConfigError(
            f"the transform {transform_name(transform)!r} needs dense rows, but these are sparse",
            f"leave {mention('data.transforms')} out",
        )
    bind: Any = getattr(transform, "bind", None)
    return transform if bind is None else bind(data)


def bind_transforms(
    transforms: Sequence[Transform], data: BaseData, before: Sequence[Transform] = ()
) -> tuple[tuple[Transform, ...], tuple[Transform, ...]]:
    """Return (host transforms, feed transforms), bound to the data.

    before : feed transforms that run before these; if there are any, all of these are feed
        transforms

    Raises ConfigError if a transform cannot be used with the data or after the earlier ones.
    """
    bound = [bind_transform(t, data) for t in checked_list("transforms", transforms)]
    n_host = 0
    while not before and n_host < len(bound) and getattr(bound[n_host], "keeps_dtype", False):
        n_host += 1
    feed = tuple(bound[n_host:])
    _check_integers((*before, *feed))
    return tuple(bound[:n_host]), feed


def _check_integers(feed: Sequence[Transform]) -> None:
    """Raise ConfigError if a transform that needs stored integers follows one that changes them."""
    for position, transform in enumerate(feed):
        earlier_floats = [t for t in feed[:position] if not integers_stay([t])]
        if earlier_floats and getattr(transform, "needs_integers", False):
            raise ConfigError(
                f"transform {transform_name(transform)!r} rounds to stored integers, but "
                f"follows {transform_name(earlier_floats[0])!r}, which returns other numbers",
                "move it before that transform, or leave round out",
            )


def describe_transform(transform: Transform) -> dict[str, object]:
    """Return a JSON-able description; a function is identified by its name."""
    describe = getattr(transform, "describe", None)
    if describe is not None:
        return dict(to_builtin(describe()))
    return {"kind": "function", "name": transform_name(transform)}


def transform_name(transform: Transform) -> str:
    """Return the name of a transform in messages."""
    name = getattr(transform, "__qualname__", type(transform).__qualname__)
    return str(name).replace("<locals>.", "")


def apply_transforms(
    transforms: Sequence[Transform], X: AnyArray, Y: AnyArray, w: AnyArray | None = None, *,
    random: Callable[[int], RowRandom], epoch: int,
) -> tuple[AnyArray, AnyArray, AnyArray | None]:  # fmt: skip
    """Return X, Y and the sample weights w (m,), if any, after the transforms in order.

    Parameters
    ----------
    X, Y : (m, *row_shape) and (m, c) or (m,)
    random : returns the draws of the transform with a given number, counted from 0
    epoch : epoch of the rows, for messages

    Raises
    ------
    DataError
        If a transform fails, does not return (X, Y), or changes the shape or dtype of X.
    NonFiniteError
        If X or Y is not finite after transforms that users defined; on the CPU only.
    """
    for number, transform in enumerate(transforms):
        name, rng = transform_name(transform), random(number)
        transform_weighted = None if w is None else getattr(transform, "weighted", None)
        try:
            if transform_weighted is None:
                returned: Any = transform(X, Y, rng)
            else:
                returned = transform_weighted(X, Y, w, rng)
        except (StreamkernError, MemoryError):
            raise
        except Exception as error:
            raise DataError(
                f'transform "{name}" failed {_when(epoch)}: {type(error).__name__}: {error}',
                "correct the transform",
            ) from error
        # Before the next transform, the arrays must be as `Transform` promises.
        n_arrays = 2 if transform_weighted is None else 3
        new_X, new_Y, *weights = _checked_arrays(returned, name, n_arrays)
        w = weights[0] if weights else w
        expected = (len(X), *shape_after([transform], X.shape[1:]))
        if new_X.shape != expected or new_X.dtype != X.dtype or len(new_Y) != len(Y):
            raise DataError(
                f'transform "{name}" turned X {X.shape} {X.dtype} with {len(Y)} targets into '
                f"{new_X.shape} {new_X.dtype} with {len(new_Y)}",
                "keep shape and dtype, for example with astype(X.dtype)",
            )
        X, Y = new_X, new_Y
    if transforms and rng.xp is np:
        _check_finite_results(transforms, X, Y, rng.rows, epoch)
    return X, Y, w


def _check_finite_results(
    transforms: Sequence[Transform], X: AnyArray, Y: AnyArray, rows: AnyArray, epoch: int
) -> None:
    """Raise NonFiniteError for NaN or infinity after transforms that users defined.

    Their input is finite. On a GPU such values are found later, by the loss: a check of every batch
    would wait for the device.
    """
    names = [
        transform_name(t) for t in transforms if not type(t).__module__.startswith("streamkern.")
    ]
    for name, array in (("X", X), ("Y", Y)) if names else ():
        position = first_nonfinite(array)
        if position is not None:
            row, column, value = position
            raise NonFiniteError(
                f"{value} in {name} after transform {', '.join(names)} {_when(epoch)}, row "
                f"{int(rows[row])}, column {column}",
                "correct the transform",
            )


def _when(epoch: int) -> str:
    """Return the epoch as a phrase for messages."""
    return "in the setup sample" if epoch >= SETUP_EPOCH else f"in epoch {epoch}"


def _checked_arrays(returned: Any, name: str, n_arrays: int) -> Sequence[AnyArray]:
    """Return the arrays (X, Y), or (X, Y, w) if `n_arrays` is 3, that a transform returned."""
    parts = returned if isinstance(returned, tuple | list) else ()
    if len(parts) != n_arrays or not all(hasattr(part, "shape") for part in parts):
        type_text = type(returned).__name__ + (f" of {len(parts)}" if parts else "")
        arrays = f"(X, Y{', w' * (n_arrays - 2)}), arrays"
        rule = f'transform "{name}" must return {arrays}, not {type_text}'
        raise DataError(rule, "correct the transform")
    location = f' from transform "{name}"'
    return [without_mask(part, role, location) for part, role in zip(parts, "XYw", strict=False)]
