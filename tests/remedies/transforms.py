"""Mistakes in transforms of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import streamkern as sk
from tests.remedies import RNG, Case, N, X, Y, fit_values, ingested, long_rows, regressor

COVERED = (
    "stream/sources/random_transforms.py", "stream/sources/transforms.py",
    "stream/sources/patch_features.py",
)  # fmt: skip


def transform_cases() -> list[Case]:
    """Return mistakes in transforms, by name and as objects."""
    images = np.zeros((N, 4, 4, 1), np.uint8)
    bytes_ = np.zeros((N, 3), np.uint8)

    def augmented(*transforms: Any, rows: Any = X) -> Callable[[], Any]:
        """Write rows that these transforms change."""
        source = sk.ArraySource(rows, Y)
        return lambda: sk.materialise_store(
            sk.AugmentedSource(source, 1, transforms), "made.zarr", overwrite=True
        )

    def made(**setting: Any) -> Callable[[], Any]:
        return lambda: sk.augment_store(
            "data.zarr", "made.zarr", transforms=[setting], overwrite=True
        )

    def generated(**given: Any) -> sk.GeneratorSource:
        return sk.GeneratorSource(
            lambda seed, epoch, start, stop: (X[start:stop], Y[start:stop]), N, (3,), "f8", 1,
            transforms=[sk.Scale(**given)])  # fmt: skip

    def kept(X: Any, y: Any, rng: Any) -> Any:
        return X + 1, y

    def shorter(X: Any, y: Any, rng: Any) -> Any:
        return X[:, :2], y

    def failing(X: Any, y: Any, rng: Any) -> Any:
        return X + None, y

    def masking(X: Any, y: Any, rng: Any) -> Any:
        return np.ma.masked_greater(X, 0), y

    def dividing(X: Any, y: Any, rng: Any) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            return X / 0, y

    def of_words(*transforms: Any) -> Callable[[], Any]:
        def made() -> Any:
            ingested(long_rows(), y=Y)
            return sk.AugmentedSource(sk.ZarrSource("made.zarr"), 2, transforms)

        return made

    plain, noise, rounded = augmented(), sk.GaussianNoise(1.0), sk.GaussianNoise(1.0, round=True)
    return [
        ("use one of scale, noise", made(kind="blur"), made(kind="scale")),
        ("its options are sigma, round", made(kind="noise", std=1.0),
         made(kind="noise", sigma=1.0)),
        ("noise sigma=-1.0 must be a finite number, 0 or above", made(kind="noise", sigma=-1.0),
         made(kind="noise", sigma=0.0)),
        ("noise round='yes' must be True or False", made(kind="noise", sigma=1.0, round="yes"),
         made(kind="noise", sigma=1.0, round=False)),
        ("rows of uint8 or uint16.* leave round out", made(kind="noise", sigma=1.0, round=True),
         made(kind="noise", sigma=1.0)),
        ("mixup alpha=0 must be a finite number above 0", made(kind="mixup", alpha=0),
         made(kind="mixup", alpha=0.5)),
        ('use "none", "global" or "feature"', made(kind="scale", mode="row"),
         made(kind="scale", mode="feature")),
        ("needs a sample of the rows.*set it in data.scale", made(kind="scale", mode="quantiles"),
         made(kind="scale", mode="feature")),
        ("only one of mean= and scale=; give both or neither", made(kind="scale", mean=1.0),
         made(kind="scale", mean=1.0, scale=2.0)),
        (r"give \(3,\) numbers for each", made(kind="scale", mode="feature", mean=1.0, scale=1.0),
         made(kind="scale", mode="feature", mean=[1.0] * 3, scale=[1.0] * 3)),
        ("give one number for each", made(kind="scale", mean=[1.0] * 3, scale=[1.0] * 3),
         made(kind="scale", mean=1.0, scale=1.0)),
        ("crop padding=-1 must be a whole number, 0 or above", made(kind="crop", padding=-1),
         augmented(sk.RandomCrop(padding=1), rows=images)),
        (r"store the data as images, \(n, h, w, ch\)", augmented(sk.RandomFlip()),
         augmented(sk.RandomFlip(), rows=images)),
        (r"not callable; give an object such as .*, or a function \(X, Y, rng\) -> \(X, Y\)",
         augmented("noise"), augmented(kept)),
        ("move it before that transform", augmented(noise, rounded, rows=bytes_),
         augmented(rounded, noise, rows=bytes_)),
        ("failed in epoch 0.*correct the transform", augmented(failing), augmented(kept)),
        ("must return .X, Y., arrays, not ndarray; correct the transform",
         augmented(lambda X, Y, rng: X), augmented(lambda X, Y, rng: (X, Y))),
        ("keep shape and dtype", augmented(shorter), plain),
        ('^X from transform .*masking" .*fill the masked entries, X.filled.value.',
         augmented(masking), augmented(kept)),
        ("in X after transform .*dividing in epoch 0, row 0, column 0; correct the transform",
         augmented(dividing), augmented(kept)),
        ("needs dense rows, .*; leave data.transforms out", of_words(noise), of_words()),
        ("give mean= and scale=", generated, lambda: generated(mean=0.0, scale=1.0)),
    ]  # fmt: skip


def patch_cases() -> list[Case]:
    """Return mistakes in patch features."""
    images = RNG.normal(size=(N, 4, 5, 1))

    def fitted(rows: Any = images, **given: Any) -> Callable[[], Any]:
        return fit_values(rows, Y, **given)

    def refitted(n: int) -> Callable[[], Any]:
        model = regressor(patch_features=9, warm_start=True, solver="block")
        return lambda: model.fit(images, Y).set_params(patch_features=n).fit(images, Y)

    few = np.repeat(images[:1, :2, :2], N, axis=0)
    few = np.where(np.arange(N)[:, None, None, None] % 2, few, -few)
    return [
        (r"store the data as images, \(n, h, w, ch\), or leave it out", fitted(X, patch_features=9),
         fitted(patch_features=9)),
        ("is larger than the images of 4 x 5 pixels; lower it, or leave it at",
         fitted(patch_features=9, patch_size=5), fitted(patch_features=9, patch_size=4)),
        ("of a sample are flat; leave it out", fitted(np.ones((N, 4, 4, 1)), patch_features=9),
         fitted(np.ones((N, 4, 4, 1)))),
        ("a sample of the rows has .*; lower patch_features", fitted(few, patch_features=99),
         fitted(few, patch_features=2)),
        ("give the values of that fit, or leave warm_start out", refitted(0), refitted(9)),
    ]  # fmt: skip


TABLES = (transform_cases, patch_cases)
