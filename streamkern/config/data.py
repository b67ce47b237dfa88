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
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class ScaleConfig(_Transform):
    """Centre and scale by the store's statistics: over all entries, per feature, or not at all."""

    kind: Literal["scale"] = "scale"
    mode: Literal["global", "feature", "none"] = "global"


class NoiseConfig(_Transform):
    """Add independent Gaussian noise of standard deviation `sigma`.

    round : to whole steps of stored integers, clipped to their range, so that they stay such.
    """

    kind: Literal["noise"] = "noise"
    sigma: NotNegative
    round: bool = False

    @model_serializer(mode="wrap")
    def _as_before(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `round` unless it is set, so that runs from before it can be resumed."""
        table: dict[str, Any] = dump(self)
        return table if self.round else {k: v for k, v in table.items() if k != "round"}


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
    """[data]: the training data, and the order and size in which it is read.

    train : a store, or several: one after another, or with `weights` in those shares.
    weights : shares of the stores in `train`; without them they are read one after another.
    test : store that is evaluated during training, and never trained on. Of its weights only those
        of an ingested store count, and class weights do not.
    x : name of the array of rows in a foreign store.
    y : name of the array of targets in a foreign store.
    sample_weight : name of the array of sample weights in a foreign store. Stores of streamkern
        have their own.
    foreign : whether a store of streamkern is read as if another program had written it. It may be
        damaged; its classes, weights and checks are ignored.
    class_weight : weights of the classes, on top of the sample weights. "balanced": every class has
        the same total weight, n / (classes * rows of the class) for each row. Or weights by class;
        1 for classes that are left out.
    class_sampling : shares in which rows of the classes are read. "balanced": every class as many
        rows of an epoch as any other. Or shares of all classes. An epoch has as many rows as the
        data: those of rare classes are repeated and those of frequent ones come less often, all
        equally often over the epochs. Scaling, rows set aside and evaluations are of the data as it
        is. May be combined with weights.
    copies : number of times that each row is used in an epoch, each time changed anew by the
        transforms.
    transforms : transforms of training rows, in order, before they are scaled. They see rows in the
        units they are stored in, unless a scale is first among them. Random ones are augmentation.
    scale : scaling of the features, as a part of the model; "auto": by the kind of the data.
        "feature": every feature by its own mean and standard deviation; "quantiles": the same, and
        beside them the quantile scores of the features that are far from normal; "global": all of
        them by one; "none". "auto" is "global" for images, rows of uint8, and features that vary
        little because they are nearly always 0, which are usually pixels; for all others "feature",
        or "quantiles" if rows of a sample predict each other better with it. The numbers are those
        of a store or of arrays in memory, else of a sample of the rows. Every row that the model
        sees, and its centers, are given in units before the scaling. A constant feature is only
        centred. A scale in `transforms` replaces it.
    epochs : passes over the training data; "auto": enough for 100 000 rows, copies included,
        between 1 and 20. They are at most 20 for solvers that stop when they have converged, and
        with early stopping; "direct" stops after the first, unless transforms change every pass.
    batch_size : training rows of a step; "auto": by the method and the memory.
    prefetch_threads : threads that read ahead; "auto": as many as speed up this storage. The
        batches are the same for any number.
    dask : address of a Dask scheduler whose workers read and transform the rows.
    cache : a folder that keeps chunks of remote stores, up to `cache_size`, so that a second epoch
        or run does not fetch them again.
    cache_size : bytes; "auto": half of the free disk.
    storage_options : for all remote places of the run, as fsspec takes them, and two of ours:
        `engine`, "obstore" or "s3fs", and `deadline_s`, seconds for which a failing request is
        retried. Never logged or saved.
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
    def _a_weight_each(self) -> DataConfig:
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
                "give one for each",
            )
        return self

    @property
    def passes(self) -> int:
        """`epochs` of an opened run, in which "auto" is a number (`training_data.with_epochs`)."""
        assert not isinstance(self.epochs, str)
        return self.epochs

    @property
    def train_urls(self) -> tuple[str, ...]:
        """`train` as a tuple, also for one store and for none."""
        return (self.train,) if isinstance(self.train, str) else self.train or ()

    @property
    def transform_tables(self) -> list[dict[str, object]]:
        """The transforms as plain tables, `{"kind": "noise", "sigma": 0.5}`, in order."""
        return [transform.model_dump() for transform in self.transforms]
