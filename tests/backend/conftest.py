"""Give the tests of backends a stand-in for CuPy."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests import fake_cupy


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the stand-in, which imports of `cupy` find during the test."""
    modules = fake_cupy.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules["cupy"]
