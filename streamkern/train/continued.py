"""The centers, kernel, metric and scaling that a run takes from the run it continues.

Its data may differ from that of the old run: appended rows, for instance, change the statistics of
a store. All that the weights depend on is therefore taken from the old run, and nothing is chosen
anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.kernels.builtin import Kernel, get_kernel
from streamkern.kernels.fourier import FourierFeatures, of_features
from streamkern.rundir.checkpoint_format import Saved
from streamkern.stream.sources.transforms import Scale, Transform, is_deterministic
from streamkern.train.kept_centers import KeptCenters
from streamkern.train.scaling import load_scaling


@dataclass(frozen=True, eq=False)
class Continued:
    """The parts of a model that a run takes from the run it continues.

    ancestry : JSON: which run is continued (`run`, `step`, `samples`, `epochs` already done, sha256
        of the `model`), and the runs that it continued itself (`before`), newest first
    Z : its centers, which stay in its directory
    order : as in `Assembled`
    kernel : description of the kernel
    metric : in the form that the kernel takes
    fixed : transforms of the model
    columns, target_columns : names, or None
    encoder, classes, label_dtype : as in `StoreSpec`
    """

    ancestry: dict[str, Any]
    Z: KeptCenters
    order: npt.NDArray[np.int64]
    kernel: Mapping[str, Any]
    metric: npt.NDArray[np.float64] | None
    fixed: tuple[Transform, ...]
    columns: tuple[str, ...] | None
    target_columns: tuple[str, ...] | None
    encoder: Mapping[str, Any] | None
    classes: Sequence[str] | None = None
    label_dtype: str | None = None

    @classmethod
    def of(cls, ancestry: dict[str, Any], setup: Saved, Z: KeptCenters) -> Continued:
        """Return the record from the setup of either run, which agree in these values.

        Z : the centers of that setup
        """
        arrays, meta = setup.arrays, setup.meta
        names = (meta["columns"], meta["target_columns"])
        columns, target_columns = (None if k is None else tuple(k) for k in names)
        return cls(
            ancestry, Z, np.asarray(arrays["order"]), of_features(meta["kernel"]),
            arrays.get("metric"), load_scaling(arrays, meta["scaling"]), columns, target_columns,
            meta.get("encoder"), meta["classes"], meta.get("facts", {}).get("labels"),
        )  # fmt: skip

    @property
    def epochs(self) -> int:
        """Epochs done before this run.

        Its own are numbered from there, so that no order of rows and no random draw is repeated.
        """
        return int(self.ancestry["epochs"])

    @property
    def words(self) -> str:
        """Description of the scaling of the features."""
        return f"as in {self.ancestry['run']}, which is continued"

    def made_kernel(self) -> Kernel:
        """Return the kernel of the old run, with bandwidth and metric; of features, what they stand
        for."""
        return get_kernel(self.kernel, metric=self.metric)

    def chosen(
        self, dtype: np.dtype[Any], features: str, rows: slice
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], Kernel]:
        """Return `rows` of Z, order and kernel, see `Chosen`; raise ConfigError for another
        dtype."""
        if self.Z.dtype != dtype:
            raise ConfigError(
                f"run.precision gives {dtype.name} numbers, and the run that is continued has "
                f"{self.Z.dtype.name} ones; set run.precision to what it has there"
            )
        kernel = self.made_kernel()
        if features == "fourier":
            kernel = FourierFeatures(len(self.Z), kernel.describe())
        return self.Z.read(rows), self.order, kernel

    def bound(self, built: Sequence[Transform]) -> tuple[list[Transform], list[Transform]]:
        """Return the transforms with the numbers of the old run, and those to apply after them.

        built : transforms that the settings ask for. Raises ConfigError if their fixed ones differ
            from those of the old run.
        """
        left = list(self.fixed)
        found: list[Transform] = []
        for transform in built:
            if not is_deterministic(transform) or getattr(transform, "mode", "") == "none":
                found.append(transform)
                continue
            old = left.pop(0) if left else None
            if old is None or getattr(old, "mode", "") != getattr(transform, "mode", None):
                raise ConfigError(
                    "data.transforms scales rows otherwise than the run that is continued; leave "
                    "the scale out, which is taken from there"
                )
            found.append(old)
        return found, left

    def check_scale(self, wish: str) -> None:
        """Raise ConfigError if data.scale asks for another scaling than that of the old run."""
        modes = [t.mode for t in self.fixed if isinstance(t, Scale)] or ["none"]
        if wish not in ("auto", *modes):
            raise ConfigError(
                f'data.scale="{wish}" contradicts the run that is continued, which has '
                f'"{modes[-1]}"; leave it out'
            )
