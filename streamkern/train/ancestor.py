"""The run that another run continues: load it and put its model in the place of the settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from streamkern.backend.devices import get_backend
from streamkern.basics.errors import ConfigError, ResumeMismatchError, RunError
from streamkern.basics.text import redact
from streamkern.config.run_config import RunConfig
from streamkern.config.solver import options_of
from streamkern.filesystem.urls import local_path
from streamkern.kernels.builtin import get_kernel
from streamkern.rundir.checkpoint_format import Saved, checkpoint_errors
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.continued import Continued
from streamkern.train.device_loader import describing, load_trained
from streamkern.train.kept_centers import CentersSeen, KeptCenters
from streamkern.train.model import model_of
from streamkern.train.resolve import RunInputs
from streamkern.train.run_identity import recorded_run
from streamkern.train.warm_start import reader


class ParentRun(NamedTuple):
    """A run that is continued: its `ancestry`, see `Continued`, and the sha256 of its centers."""

    ancestry: dict[str, Any]
    centers: str

    @classmethod
    def of(cls, continued: Continued | None) -> ParentRun | None:
        """Return the record of the run that is continued, or None if none is."""
        return None if continued is None else cls(continued.ancestry, continued.Z.sha256)


def continuing(
    old: str | os.PathLike[str] | None,
    config: RunConfig,
    given: RunInputs,
    directory: RunDirectory | None,
    told: ParentRun | None = None,
) -> tuple[RunConfig, RunInputs]:
    """Return the settings and inputs of a run that continues `old`; unchanged if `old` is None.

    A run that has begun holds all that it needs, so the old run may be gone by then.

    told : ancestry and digest from rank 0, on another rank

    Raises
    ------
    ConfigError
        The settings contradict the old run, whose kernel, centers, metric and scaling are kept.
    ResumeMismatchError
        The directory holds a run that continues another run, or none.
    """
    recorded = recorded_run(directory)
    known = None if recorded is None else recorded["identity"].get("continues")
    if old is None:
        if known is not None and directory is not None:
            raise ResumeMismatchError(
                f"{directory.place} holds a run that continues {known['run']}; say so with "
                f"continues={known['run']}, or give another run_dir"
            )
        return config, given
    place = os.fspath(old)
    _check_place(place, directory)
    config = _warm(config, place, given)
    if recorded is None:
        return _begun(place, config, given, told)
    assert directory is not None
    if known is None or known["run"] != _place(place):
        what = "no other run" if known is None else known["run"]
        raise ResumeMismatchError(
            f"{directory.place} holds a run that continues {what}, and not {_place(place)}; give "
            "another run_dir"
        )
    # A separate reader: what it loads must not be mistaken for what the writer has read.
    opened, seen = reader(config, config.run.run_dir or ""), CentersSeen()
    with opened() as run:
        setup = run.load_setup(describing(seen))
    if setup is None:
        raise RunError(
            f"the setup in {directory.place} is gone, without which a run that continues another "
            "one cannot go on; restore it from a copy, or continue in another run_dir"
        )
    with checkpoint_errors(directory.place):
        # Not recorded for Fourier features, which are read from the existing setup.
        digest = recorded["identity"].get("centers", {"sha256": ""})
        Z = replace(KeptCenters.of(setup, seen, opened), recorded=digest["sha256"])
        if told is not None:
            Z = replace(Z, sha256=told.centers)
        continued = Continued.of(known, setup, Z)
    return _taken_over(recorded["identity"]["settings"], continued, config, given)


def _warm(config: RunConfig, place: str, given: RunInputs) -> RunConfig:
    for what, wish in (("centers", given.centers), ("metric", given.metric)):
        if wish is not None:
            raise ConfigError(f"{what} are those of the run that is continued; leave {what}= out")
    name, own = config.solver.name, config.solver.warm_start
    if "warm_start" not in options_of(name):
        raise ConfigError(
            f"solver.name={name!r} starts from nothing and cannot continue a run; use another "
            "one, such as 'block'"
        )
    if own is not None and _place(own) != _place(place):
        raise ConfigError(
            f"solver.warm_start={redact(own)} is another run than the one that is continued, whose "
            "weights are taken; leave it out"
        )
    path = local_path(place)
    return config.with_overrides(
        {"solver.warm_start": place if path is None else str(path.absolute())}
    )


def _begun(
    place: str, config: RunConfig, given: RunInputs, told: ParentRun | None
) -> tuple[RunConfig, RunInputs]:
    """Return settings and inputs from the old run. Its weights are read later, by the setup."""
    opened, seen = reader(config, place), CentersSeen()
    with opened() as run:
        recorded = recorded_run(run)
        if told is None:
            setup, saved = load_trained(run, seen)
        else:
            setup, saved = run.load_setup(describing(seen)), None
    if recorded is None or setup is None or (saved is None and told is None):
        raise ConfigError(f"{redact(place)} has no checkpoint to continue from yet; train it first")
    with checkpoint_errors(run.place):
        Z = KeptCenters.of(setup, seen, opened)
        if saved is not None:
            told = ParentRun(_ancestry(_place(place), recorded, setup, saved, seen), Z.sha256)
        assert told is not None
        held = setup.meta.get("facts", {})
        # Facts about the targets that its caller gave; the targets stay the same.
        facts = given.facts or {
            k: held[k] for k in ("flat", "labels", "weight_column") if k in held
        }
        Z = replace(Z, sha256=told.centers)
        continued = Continued.of(told.ancestry, setup, Z)
    given = replace(given, facts=facts)
    return _taken_over(recorded["identity"]["settings"], continued, config, given)


def _ancestry(
    place: str, recorded: Mapping[str, Any], setup: Saved, saved: Saved, seen: CentersSeen
) -> dict[str, Any]:
    """Return the ancestry of a run that continues this one, see `Continued`."""
    setup = replace(setup, arrays=setup.arrays | {"Z": seen.rows})  # no rows: unused by the digest
    position, own = saved.meta["position"], recorded["identity"].get("continues")
    backend = get_backend("cpu", 1)
    try:
        model = model_of(place, backend, setup, saved).digest()
    finally:
        backend.close()
    behind = position["epoch"] + (position["batch"] > 0) + (0 if own is None else own["epochs"])
    parent = {k: v for k, v in (own or {}).items() if k != "before"}
    return {
        "run": place, "step": saved.step, "samples": position["samples"], "epochs": behind,
        "model": model, "before": [] if own is None else [parent, *own["before"]],
    }  # fmt: skip


def _taken_over(
    settings: Mapping[str, Mapping[str, Any]],
    continued: Continued,
    config: RunConfig,
    given: RunInputs,
) -> tuple[RunConfig, RunInputs]:
    """Return the settings with [model] of the old run; a setting at its default counts as unset."""
    asked, usual = config.identity()["model"], RunConfig().identity()["model"]
    old = settings["model"]
    # Missing settings were given as arrays, as in every run that continues another one.
    other = [k for k, v in asked.items() if v not in (usual.get(k), old.get(k, usual.get(k)))]
    if other:
        wrong = "; ".join(f"model.{k}: was {old.get(k)!r}, now {asked[k]!r}" for k in other)
        raise ConfigError(
            f"a run keeps the model of the one it continues, {continued.ancestry['run']}: {wrong}; "
            "leave these out, or start a run of its own"
        )
    own = {f"model.{k}": v for k, v in {**usual, **old}.items()}
    kernel = old.get("kernel")
    if isinstance(kernel, Mapping) and "kind" not in kernel:  # a `Kernel` object, described
        own["model.kernel"] = get_kernel(kernel)
    centers = None if old.get("features") == "fourier" else continued.Z
    metric = None if "metric" in old else continued.metric
    given = replace(given, continued=continued, centers=centers, metric=metric)
    return config.with_overrides(own), given


def _check_place(place: str, directory: RunDirectory | None) -> None:
    """Raise ConfigError if the run would be written into the directory of the run it continues."""
    if directory is not None and _place(directory.place) == _place(place):
        raise ConfigError(
            f"run_dir={directory.place} is the run that is continued, which stays as it is; give "
            f"the new one its own, such as run_dir={directory.place.rstrip('/')}-2"
        )


def _place(place: str) -> str:
    """Return a place in the form in which it is shown and compared."""
    path = local_path(place)
    return redact(place).rstrip("/") if path is None else str(path.absolute())
