"""Compare patch features with pixels, with the same centers, on two sets of images.

    python -m benchmarks.patch_features --json benchmarks/results/patch_features.json

"digits" are scikit-learn's digits, 8 x 8 in one channel, a quarter of them for testing.
"photographs" have the size of CIFAR's images, 32 x 32 in three channels: a digit, 18 to 28 pixels
wide, at any place and in any colour, on a part of one of scikit-learn's two photographs, with
noise. Test images have other digits than training images, and the other halves of the photographs.
The sets show the purpose of the features, not their accuracy on CIFAR.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.ndimage import zoom
from sklearn.datasets import load_digits, load_sample_images

import streamkern as sk
from benchmarks.harness import json_parser, told_and_kept

Array = npt.NDArray[Any]
Split = tuple[Array, Array, Array, Array]
SEEDS, ROWS, TEST_ROWS, CENTERS, SIDE = 2, 6000, 2000, 3000, 32
WAYS: dict[str, dict[str, int]] = {
    "pixels": {},
    "64": {"patch_features": 64},
    "128": {"patch_features": 128},
    "256": {"patch_features": 256},
    "512": {"patch_features": 512},
    "128, 3 x 3 regions": {"patch_features": 128, "patch_grid": 3},
    "256, of 4 pixels": {"patch_features": 256, "patch_size": 4},
    "256, of 8 pixels": {"patch_features": 256, "patch_size": 8},
}


def digits(seed: int) -> Split:
    """Return images and labels for the fit, and for the test."""
    X, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(X))
    X, y, n_test = X.astype(np.uint8).reshape(-1, 8, 8, 1)[order], y[order], len(X) // 4
    return X[n_test:], y[n_test:], X[:n_test], y[:n_test]


def photographs(seed: int) -> Split:
    """Digits on parts of photographs, to fit and to test."""
    fit, labels, test, test_labels = digits(seed)
    halves = [
        [photo[:, part] for photo in load_sample_images().images]
        for part in (slice(0, 320), slice(320, 640))
    ]
    rng = np.random.default_rng([seed, 1])
    return (
        *_on_photographs(fit, labels, halves[0], ROWS, rng),
        *_on_photographs(test, test_labels, halves[1], TEST_ROWS, rng),
    )


def _on_photographs(
    shapes: Array, labels: Array, photos: list[Array], n: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    found, chosen = np.empty((n, SIDE, SIDE, 3), np.uint8), rng.integers(0, len(shapes), n)
    for image, shape in zip(found, shapes[chosen, ..., 0] / 16, strict=True):
        photo, width = photos[rng.integers(len(photos))], int(rng.integers(18, 29))
        i, j = (int(rng.integers(0, extent - SIDE)) for extent in photo.shape[:2])
        top, left = rng.integers(0, SIDE - width + 1, 2)
        ink = np.zeros((SIDE, SIDE, 1))
        ink[top : top + width, left : left + width, 0] = 0.8 * zoom(shape, width / 8, order=1)
        pixels = photo[i : i + SIDE, j : j + SIDE] * (1 - ink) + rng.uniform(0, 255, 3) * ink
        image[:] = np.clip(pixels + rng.normal(0, 6, pixels.shape), 0, 255)
    return found, labels[chosen]


def rows() -> Iterator[dict[str, Any]]:
    """Yield the results of each method on each data set."""
    for seed in range(SEEDS):
        for name, split in (("digits", digits(seed)), ("photographs", photographs(seed))):
            X, y, X_test, y_test = split
            for way, settings in WAYS.items():
                model = sk.KernelClassifier(
                    n_centers=min(CENTERS, len(X)), random_state=seed, device="cpu",
                    calibrate=False, **settings,
                )  # fmt: skip
                began = time.perf_counter()
                model.fit(X, y)
                trained = time.perf_counter()
                accuracy = model.score(X_test, y_test)
                predicted = time.perf_counter()
                yield {
                    "set": name, "seed": seed, "way": way, "accuracy": float(accuracy),
                    "features": len(model.get_feature_names_out()), "centers": model.n_centers_,
                    "fit_s": round(trained - began, 2),
                    "predict_ms": round(1e3 * (predicted - trained) / len(y_test), 3),
                }  # fmt: skip


def main() -> None:
    """Print a line for each set and way; write all of them."""
    parser = json_parser(__doc__)
    options = parser.parse_args()
    found = told_and_kept(rows(), options.json)
    for name in ("digits", "photographs"):
        for way in WAYS:
            own = [r["accuracy"] for r in found if (r["set"], r["way"]) == (name, way)]
            print(f"{name}, {way}: {np.mean(own):.4f} in the mean")


if __name__ == "__main__":
    main()
