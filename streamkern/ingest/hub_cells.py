"""Read cells of a data set of Hugging Face that are whole rows: lists, arrays and images."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError, MissingDependencyError
from streamkern.basics.text import some
from streamkern.ingest.tables.arrow import as_array, compute, unwrap_column
from streamkern.ingest.tables.cells import RowsInFile, row_number

_CHANNELS_OF_MODE = {"L": 1, "RGB": 3, "RGBA": 4}  # channels of the image modes with uint8 pixels


def is_of_hub(value: Any, *class_names: str) -> bool:
    """Return whether `value` is of one of these classes of `datasets`, without importing it."""
    library = sys.modules.get("datasets")
    classes = tuple(k for n in class_names if isinstance(k := getattr(library, n, None), type))
    return isinstance(value, classes)


class WideColumn:
    """A column of a data set whose cells are rows of one shape.

    feature : the type of the column, as the data set describes it
    name : name of the column, for messages
    first_cell : a column of the first cell, which gives the shape if `feature` declares none

    Attributes
    ----------
    shape : shape of a row, (d,) or (height, width, channels)
    """

    def __init__(self, feature: Any, name: str, first_cell: Any) -> None:
        self._feature, self._name = feature, name
        self._has_images = is_of_hub(feature, "Image")
        self.shape: tuple[int, ...] = ()
        if self._has_images:
            self.shape = self.rows(first_cell, 0).shape[1:]
            return
        declared = getattr(feature, "shape", None)
        if declared is None:
            declared = (len(unwrap_column(first_cell)[0].as_py() or ()),)
        elif None in declared:
            raise DataError(
                f"column {name!r} of X holds arrays of the shape {tuple(declared)}",
                "give it without None: rows have one shape",
            )
        self._sizes = tuple(declared)
        self.shape = self._sizes if len(self._sizes) == 3 else (math.prod(self._sizes),)

    def rows(self, column: Any, numbers: RowsInFile) -> NDArray[Any]:
        """Return cells as rows (k, ...). numbers : row numbers of the cells, for messages"""
        cells = unwrap_column(column)
        if cells.null_count:
            raise self._cell_error(numbers, cells.is_null().index(True).as_py(), "is null")
        if self._has_images:
            return np.stack([self._pixels(c, numbers, k) for k, c in enumerate(cells.to_pylist())])
        # Unpack one level of lists for each axis; all lists of a level must have the same length.
        values, width = cells, 1
        for size in self._sizes:
            lengths = compute.list_value_length(values)
            differs = as_array(lengths) != size  # NaN for null
            if differs.any():
                k = int(np.argmax(differs))
                problem = f"holds {lengths[k].as_py()} values where others hold {size}"
                raise self._cell_error(numbers, k // width, problem)
            values, width = values.flatten(), width * size
        if values.null_count:
            k = values.is_null().index(True).as_py() // width
            raise self._cell_error(numbers, k, "holds a null")
        return as_array(values).reshape(len(cells), *self.shape)

    def _cell_error(self, numbers: RowsInFile, k: int, problem: str, remedy: str = "") -> DataError:
        """Return the error for the k-th of these cells."""
        return DataError(
            f"X, row {row_number(numbers, k)}: column {self._name!r} {problem}",
            remedy or "correct such rows, or leave them out",
        )

    def _pixels(self, cell: Any, numbers: RowsInFile, k: int) -> NDArray[np.uint8]:
        """Return the k-th image as (height, width, channels)."""
        try:
            image = type(self._feature)(mode=self._feature.mode).decode_example(cell)
            image.load()
        except ImportError as error:
            raise MissingDependencyError(
                f"column {self._name!r} of X holds images, which cannot be read without Pillow; "
                "install it: pip install pillow"
            ) from error
        except Exception as error:  # whatever Pillow raises for bytes that are not an image
            problem = f"holds an image that cannot be read ({type(error).__name__})"
            raise self._cell_error(numbers, k, problem) from error
        size = image.height, image.width
        channels = _CHANNELS_OF_MODE.get(image.mode)
        height, width, expected_channels = self.shape or (*size, None)
        if channels is None or channels != (expected_channels or channels):
            remedy = f'X.cast_column({self._name!r}, Image(mode="RGB"))'
            if image.mode[0] in "IF":  # Pillow would cut off their numbers
                remedy = "and give their pixels as a column of Array3D"
            expected_modes = [
                m for m, c in _CHANNELS_OF_MODE.items() if expected_channels in (None, c)
            ]
            raise self._cell_error(
                numbers, k,
                f"holds an image of mode {image.mode!r} in place of {some(expected_modes)}",
                f"convert all, {remedy}",
            )  # fmt: skip
        if size != (height, width):
            raise self._cell_error(
                numbers, k,
                f"holds an image of {size[0]} x {size[1]} pixels where others have {height} x "
                f"{width}",
                "give images of one size, as image.resize makes them in X.map",
            )  # fmt: skip
        return np.asarray(image, np.uint8).reshape(*size, channels)
