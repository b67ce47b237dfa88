"""[data] of a run file: the training data."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.rules import (
    AutoCount,
    ClassShares,
    ClassWeights,
    Count,
    FolderSetting,
    MemorySetting,
    NameSetting,
    NotNegative,
    OptionalName,
    OptionalUrl,
    OptionalUrls,
    Positive,
    Rule,
    SchedulerSetting,
    SecretsSetting,
    Table,
    WeightsSetting,
)


class _Transform(BaseModel):
    """A transform in a run file; `stream.sources.transforms` implements it."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class ScaleConfig(_Transform):
    """Standardise rows by the statistics of the store.

    mode : "global": one mean and standard deviation for all features; "feature": one for each;
        "none": no scaling.
    """

    kind: Literal["scale"] = "scale"
    mode: Literal["global", "feature", "none"] = "global"


class NoiseConfig(_Transform):
    """Add independent Gaussian noise of standard deviation `sigma`.

    round : whether noisy values are rounded, and clipped to the range of the stored integers.
    """

    kind: Literal["noise"] = "noise"
    sigma: NotNegative
    round: bool = False

    @model_serializer(mode="wrap")
    def _without_default_round(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `round` if false, so that runs of versions without it can be resumed."""
        table: dict[str, Any] = dump(self)
        return table if self.round else {k: v for k, v in table.items() if k != "round"}


class MixUpConfig(_Transform):
    """Mix pairs of rows, and their targets, with weights drawn from Beta(alpha, alpha)."""

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
    ScaleConfig | NoiseConfig | MixUpConfig | CropConfig | FlipConfig, Field(discriminator="kind")
]
Transforms = Annotated[tuple[TransformConfig, ...], Rule("a list of tables")]


class DataConfig(Table):
    """[data]: the training data, and the order and size in which it is read.

    train : a store, or a list of stores, which are read one after another, or mixed by `weights`.
    weights : share of the rows that each store in `train` provides; without them the stores are
        read one after another.
    test : store on which the model is evaluated during training, and never trained. Its sample
        weights are used if streamkern ingested them; class weights are not.
    x : name of the array of rows in a foreign store.
    y : name of the array of targets in a foreign store.
    sample_weight : name of the array of sample weights in a foreign store. Stores of streamkern
        have their own.
    foreign : whether a store of streamkern is read as if another program had written it. Its
        classes, weights and checksums are then ignored, and damage is not detected.
    class_weight : weights of the classes, by which sample weights are multiplied. "balanced" gives
        every class the same total weight: n / (classes * rows of the class) for each row. A table
        gives weights by class; a class that it leaves out has weight 1.
    class_sampling : shares of the classes in the rows of an epoch. "balanced" reads equally many
        rows of every class; a table gives a share for every class. An epoch has as many rows as the
        data: rows of rare classes are repeated, and rows of frequent classes are read in some
        epochs only. Over the epochs, all rows of a class are read equally often. Scaling, held-out
        rows and evaluations use the data as it is. Sample and class weights may be used as well.
    copies : number of times that each row is used in an epoch, each time with new random numbers
        in the transforms.
    transforms : transforms of training rows, in order, before they are scaled. They receive rows
        with their stored values, unless the first transform is a scale. Random transforms are
        augmentation.
    scale : scaling of the features, as a part of the model; "auto": depends on the data. "feature"
        standardises each feature by its own mean and standard deviation. "quantiles" does the same,
        and adds quantile scores for the features that are far from normally distributed. "global"
        uses one mean and one standard deviation for all features. "none" does not scale. "auto" is
        "global" for images, for rows of uint8, and for features that vary little because they are
        nearly always 0, which are usually pixels. Otherwise it is "feature", or "quantiles" if the
        scores lower the leave-one-out error on a sample of the rows. The means and standard
        deviations are those of a store or of arrays in memory, otherwise of a sample of the rows.
        Rows and centers are always given with their values before the scaling. A constant feature
        is only centred. A scale in `transforms` replaces this setting.
    epochs : number of times that training reads all rows; "auto": enough for 100 000 rows, copies
        included, between 1 and 20. With early stopping, and with solvers that stop when they have
        converged, "auto" is at most 20; "direct" stops after the first epoch, unless transforms
        change every epoch.
    batch_size : training rows of a step; "auto": chosen by the solver and the memory.
    prefetch_threads : threads that read ahead; "auto": as many as speed up reading from this
        storage. The batches do not depend on their number.
    dask : address of a Dask scheduler whose workers read and transform the rows.
    cache : a folder that keeps chunks of remote stores, up to `cache_size`, so that a second epoch
        or run does not fetch them again.
    cache_size : largest size of the cache in bytes; "auto": half of the free disk.
    storage_options : options for all remote places of the run: those of fsspec, and two of
        streamkern. `engine` is "obstore" or "s3fs"; `deadline_s` is the number of seconds for which
        a failing request is retried. The options are never logged or saved.
    """

    table = "data"
    kinds = TRANSFORMS
    train: OptionalUrls = None
    weights: WeightsSetting = None
    test: OptionalUrl = None
    x: NameSetting = "X"
    y: NameSetting = "y"
    sample_weight: OptionalName = None
    foreign: bool = False
    class_weight: ClassWeights = None
    class_sampling: ClassShares = None
    copies: Count = 1
    transforms: Transforms = ()
    scale: Literal["auto", "feature", "quantiles", "global", "none"] = "auto"
    epochs: AutoCount = "auto"
    batch_size: AutoCount = "auto"
    prefetch_threads: AutoCount = "auto"
    dask: SchedulerSetting = None
    cache: FolderSetting = None
    cache_size: MemorySetting = "auto"
    storage_options: SecretsSetting = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_weights(self) -> DataConfig:
        """Require one weight for each store of a list of stores."""
        if self.weights is None:
            return self
        if self.train is None or isinstance(self.train, str):
            raise ConfigError(
                f"{mention('data.weights')} is for several stores",
                f"make {mention('data.train')} a list, or leave weights out",
            )
        if len(self.weights) != len(self.train):
            raise ConfigError(
                f"{mention('data.weights')} has {len(self.weights)} numbers for {len(self.train)} "
                f"stores in {mention('data.train')}",
                "give one number for each store",
            )
        return self

    @property
    def n_epochs(self) -> int:
        """`epochs` as a number, after `training_data.with_epochs` has replaced "auto"."""
        assert not isinstance(self.epochs, str)
        return self.epochs

    @property
    def train_urls(self) -> tuple[str, ...]:
        """The stores in `train` as a tuple, which may be empty."""
        return (self.train,) if isinstance(self.train, str) else self.train or ()

    @property
    def transform_tables(self) -> list[dict[str, object]]:
        """The transforms as plain tables, `{"kind": "noise", "sigma": 0.5}`, in order."""
        return [transform.model_dump() for transform in self.transforms]
