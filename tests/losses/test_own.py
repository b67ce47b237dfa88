"""Check user-defined losses in settings, as JSON values, and in records of runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import ConfigError
from streamkern.losses.base import Loss
from streamkern.losses.losses import loss_for_figures, saved_loss
from streamkern.losses.own import described_loss, given_loss, recorded_loss
from tests.losses.own_losses import Distance, LogCosh

MODULE = "tests.losses.own_losses"
NAME = f"{MODULE}:LogCosh"


@pytest.mark.parametrize(
    ("value", "width"),
    [
        (LogCosh(2.0), 2.0),
        (LogCosh, 1.0),
        (NAME, 1.0),
        ({"kind": NAME, "width": 3.0}, 3.0),
    ],
)
def test_loss_setting_accepts_four_forms(value: Any, width: float) -> None:
    loss = given_loss(value)
    assert isinstance(loss, LogCosh)
    assert loss.width == width
    described = described_loss(loss)
    assert described == {"kind": NAME, "width": width}
    restored = given_loss(json.loads(json.dumps(described)))
    assert isinstance(restored, LogCosh)
    assert restored.width == width


def test_built_in_names_are_unchanged() -> None:
    for value in ("huber", "squared_error", "unknown", None, 3):
        assert given_loss(value) == value


def test_open_parameters_are_not_described() -> None:
    assert described_loss(Distance()) == f"{MODULE}:Distance"
    assert repr(LogCosh(2.0)) == "LogCosh(width=2.0)"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (f"{MODULE}:NoSuchClass", "is not a subclass of streamkern.Loss"),
        ({"kind": NAME, "wide": 3.0}, "cannot be constructed with wide .TypeError"),
        ({"width": 3.0}, "must have a kind, .module:Class."),
    ],
)
def test_invalid_loss_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given_loss(value)


def test_failing_module_is_named_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_at_import.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be imported .ZeroDivisionError: division by"):
        given_loss("fails_at_import:Mine")


def saved_meta(loss: Loss, fitted: Loss, n_outputs: int = 2) -> dict[str, Any]:
    """Return the metadata of a setup with the loss, as it is read back."""
    meta = {
        "loss": recorded_loss(loss, n_outputs), "n_outputs": n_outputs,
        "setup": {"loss": fitted.parameters()},
    }  # fmt: skip
    record: dict[str, Any] = json.loads(json.dumps(meta))
    return record


def test_saved_loss_is_restored() -> None:
    assert saved_loss(saved_meta(LogCosh(2.0), LogCosh(2.0))).parameters() == {"width": 2.0}  # type: ignore[union-attr]
    restored = saved_loss(saved_meta(Distance(), Distance(7.0)))
    assert isinstance(restored, Distance)
    assert restored.unit == 7.0


def test_changed_function_of_same_name_is_refused() -> None:
    def define_class(factor: float) -> type[Loss]:
        class Mine(LogCosh):
            def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
                return factor * super().gradient(xp, errors, Y)

        return Mine

    original = define_class(0.9)
    meta = saved_meta(original(), original())
    assert isinstance(saved_loss(meta), original)
    redefined = define_class(0.9)  # as if its cell of a notebook was executed again
    assert isinstance(saved_loss(meta), redefined)
    changed_loss = define_class(0.8)
    with pytest.raises(ConfigError, match="has changed since the model was trained"):
        saved_loss(meta)
    assert changed_loss().gradient(np, np.ones((1, 1)), None) < 0.8


def test_reading_a_saved_loss_imports_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "never_imported.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    meta = saved_meta(LogCosh(), LogCosh())
    meta["loss"]["kind"] = "never_imported:Mine"
    assert loss_for_figures(meta) is None
    with pytest.raises(ConfigError, match="that this process has not defined; import its module"):
        saved_loss(meta)
    assert "never_imported" not in sys.modules
