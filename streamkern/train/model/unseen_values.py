"""Warn of rows whose categorical features have values that no center has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.message import mention
from streamkern.basics.warning import warn
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator

MIN_UNSEEN_ROWS = 10
"""Smallest number of rows for a warning."""


class UnseenValues:
    """The values that the centers have in each of the k categorical features of the kernel.

    op : kernel products of the model
    Z : (p,) prepared centers, whose right side begins with these k columns
    names : the d names of the features; empty without names
    """

    def __init__(self, op: KernelOperator, Z: Points, names: Sequence[str] = ()) -> None:
        self._columns, self._names = op.categorical_columns, names
        self._center_values: list[npt.NDArray[Any]] = []
        if self._columns:
            assert Z.right is not None
            values = op.backend.to_host(Z.right[:, : len(self._columns)])
            self._center_values = [np.unique(column) for column in values.T]

    def warn_of(self, values: npt.NDArray[Any]) -> None:
        """Warn of each categorical feature in which most rows have a value that no center has.

        values : (n, k) values of these features on the host, scaled
        """
        if len(values) < MIN_UNSEEN_ROWS:
            return
        for column, center_values, row_values in zip(
            self._columns, self._center_values, values.T, strict=True
        ):
            if 2 * np.isin(row_values, center_values).sum() < len(row_values):
                name = self._names[column] if column < len(self._names) else f"x{column}"
                warn(
                    f"most rows have values of {name!r} that no center of the model has, so "
                    "their predictions may be worse than without this column; train without "
                    f"this column, or with {mention('model.metric', 'none')}"
                )
