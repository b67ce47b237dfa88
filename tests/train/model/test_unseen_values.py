"""Test the warning about rows whose values no center has."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import streamkern as sk
from tests.categorical import LEVEL, panel


def test_unseen_categorical_values_give_warning() -> None:
    X, y = panel(400)
    kernel = sk.Laplace(5.0).with_categorical([(LEVEL, 8.0)])
    model = sk.KernelRegressor(kernel, metric="none", random_state=0).fit(X, y)
    fresh, _ = panel(200, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(fresh)
        model.predict(fresh[:5] + 1000)  # too few rows for a warning
    minority = fresh.copy()
    minority[: len(minority) * 2 // 5, LEVEL] += 1000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(minority)
    with pytest.warns(UserWarning, match=rf"most rows have values of 'x{LEVEL}' that no center"):
        actual = model.predict(fresh + 1000 * (np.arange(4) == LEVEL))
    assert np.isfinite(actual).all()
