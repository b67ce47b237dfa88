"""A folder that is called like a function says which function is meant."""

from __future__ import annotations

import importlib

import pytest

import streamkern
from streamkern.basics.room import INSTEAD


@pytest.mark.parametrize("name", INSTEAD)
def test_a_folder_that_is_called_names_the_function(name: str) -> None:
    function = INSTEAD[name].partition("(")[0]
    assert callable(getattr(streamkern, function))
    with pytest.raises(TypeError, match=rf"call streamkern\.{function}\(") as raised:
        getattr(streamkern, name)("data.csv")
    assert isinstance(raised.value, streamkern.ConfigError)
    assert importlib.import_module(f"streamkern.{name}") is getattr(streamkern, name)


@pytest.mark.parametrize("name", ["append", "evaluate", "plan", "report", "tune", "load"])
def test_what_commands_do_functions_do(name: str) -> None:
    assert callable(getattr(streamkern, name))
    assert name in streamkern.__all__


def test_a_name_that_is_none_names_the_one_that_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'open'; use streamkern\.open_store"):
        streamkern.open  # noqa: B018
