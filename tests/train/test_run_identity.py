"""Test which calls resume a run, and the messages about their differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern import Gaussian, KernelRegressor, Laplace, Polynomial
from streamkern.backend import devices
from streamkern.basics.errors import CheckpointError, ResumeMismatchError, RunError
from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.kernels.builtin import get_kernel
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.patch_features import PatchFeatures
from streamkern.train.resolve import find_scaling
from streamkern.train.resolve.run_inputs import NO_INPUTS
from streamkern.train.restart.run_snapshot import recorded_run, recorded_sizes
from streamkern.train.run_identity import (
    check_same_model,
    check_same_run,
    has_scale,
    recorded_patches,
    run_record,
)
from tests.runs import (
    CLASSES,
    Array,
    array_source,
    arrays,
    assert_same_bits,
    final,
    finished,
    opened,
    settings,
    stopped,
    stream,
)


def directory_with(path: Path, record: dict[str, Any], *, setup: bool = True) -> RunDirectory:
    """Return a run directory that holds a record, and a setup if requested."""
    directory = RunDirectory(path)
    with directory:
        directory.write_config(record)
        if setup:
            directory.save_setup({"a": np.zeros(1)}, {})
    return directory


def test_run_record_roundtrips_through_json() -> None:
    laplace = get_kernel("laplace", 2.0)
    kernel = {"model.kernel": laplace, "model.bandwidth": "auto"}
    record = run_record(opened(centers=arrays(4)[0], **kernel))
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["identity"]["centers"]["shape"] == [4, 5]
    model = record["identity"]["settings"]["model"]
    assert model["kernel"] == laplace.describe()
    assert "centers" not in model  # they are not given by a setting
    assert {"streamkern", "python", "numpy", "zarr"} <= set(record["versions"])


def test_equal_calls_have_equal_records() -> None:
    assert run_record(opened()) == run_record(opened())


def test_paths_are_not_part_of_identity() -> None:
    """Check also settings that a resume may change."""
    plain = run_record(opened())["identity"]
    moved = opened(
        **{"data.train": "elsewhere", "run.memory": "500 MiB", "run.checkpoint_every": 7}
    )
    assert run_record(moved)["identity"] == plain


@pytest.mark.parametrize("order", ["C", "F", "strided"])
def test_centers_are_identified_by_values(order: str) -> None:
    Z = arrays(6)[0]
    layouts = {"C": Z.copy(), "F": np.asfortranarray(Z), "strided": np.repeat(Z, 2, axis=0)[::2]}
    plain = run_record(opened(centers=Z))["identity"]["centers"]
    assert run_record(opened(centers=layouts[order]))["identity"]["centers"] == plain
    assert run_record(opened(centers=Z + 1))["identity"]["centers"] != plain


def odd(X: Array, Y: Array, rng: Any) -> tuple[Array, Array]:
    """Return rows unchanged; its description is no JSON."""
    return X, Y


odd.describe = lambda: {"kind": "odd", "by": {1, 2}}  # type: ignore[attr-defined]


def test_description_that_is_not_json_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"\['by'\] is set, not JSON"):
        run_record(opened(array_source(transforms=[odd])))


def test_all_differences_are_named(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, run_record(opened()))
    check_same_run(directory, run_record(opened()))
    other = opened(**{"run.random_state": 5, "data.epochs": 7})
    with pytest.raises(ResumeMismatchError) as caught:
        check_same_run(directory, run_record(other))
    text = str(caught.value)
    assert str(tmp_path) in text
    assert "run.random_state: was 0, now 5" in text
    assert "data.epochs: was 2, now 7" in text
    assert "another run_dir" in text


def test_settings_bind_after_setup_only(tmp_path: Path) -> None:
    """Check that other settings are accepted as long as nothing was computed."""
    assert recorded_run(None) is None
    assert recorded_run(RunDirectory(tmp_path / "none")) is None
    record = run_record(opened())
    directory = directory_with(tmp_path / "run", record, setup=False)
    assert recorded_run(directory) is None
    check_same_run(directory, {"identity": {}})
    with directory:
        directory.write_config(record)
        directory.save_setup({"a": np.zeros(1)}, {})
    assert recorded_run(directory) == record
    assert recorded_sizes(record) == opened().sizes


def test_model_settings_are_compared_before_reading_data(tmp_path: Path) -> None:
    record, config = run_record(opened()), opened().config
    directory, epochs = directory_with(tmp_path / "run", record), {"data.epochs": 7}
    wider = config.with_overrides({"model.bandwidth": 9.0, **epochs})
    check_same_model(RunDirectory(tmp_path / "none"), wider, NO_INPUTS)
    check_same_model(directory, config.with_overrides(epochs), NO_INPUTS)
    with pytest.raises(ResumeMismatchError, match=r"model\.bandwidth: was .*, now 9") as caught:
        check_same_model(directory, wider, NO_INPUTS)
    assert "epochs" not in str(caught.value)
    identity = record["identity"] | {"continues": {"run": "another"}}
    continued = directory_with(tmp_path / "continued", record | {"identity": identity})
    check_same_model(continued, wider, NO_INPUTS)


@pytest.mark.parametrize("scale", ["quantiles", "feature"])
def test_quantile_scores_of_started_run_are_recorded(scale: str, tmp_path: Path) -> None:
    X, y = arrays(135)
    source = ArraySource(np.exp(3 * X), y, classes=CLASSES)  # far from normal
    stopped(settings(tmp_path / "run", **{"data.scale": scale}), 3, source=source)
    record = recorded_run(RunDirectory(tmp_path / "run"))
    assert record is not None
    assert has_scale(record["identity"]["data"], "quantiles") is (scale == "quantiles")


@pytest.mark.parametrize("taken_for_pixels", [False, True])
def test_resumed_run_keeps_its_scaling(
    taken_for_pixels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop a run of amounts, and resume it with another rule for what looks like pixels."""
    X = np.random.default_rng(0).gamma([20, 20, 10, 0.2, 0.05], [2, 0.4, 4, 2, 2], (135, 5))
    source = ArraySource(X.astype(np.float32), arrays(135)[1], classes=CLASSES)
    features = {False: 64, True: 1}

    def settings_of(name: str) -> RunConfig:
        return settings(tmp_path / name, **{"data.scale": "auto"})

    monkeypatch.setattr(find_scaling, "MIN_PIXELS", features[taken_for_pixels])
    whole = finished(settings_of("whole"), source=source)
    assert whole.model.fixed_transforms[-1].mode == ("global" if taken_for_pixels else "feature")
    stopped(settings_of("run"), 3, source=source)
    monkeypatch.setattr(find_scaling, "MIN_PIXELS", features[not taken_for_pixels])
    finished(settings_of("run"), source=source)
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "whole"))


def test_patch_features_of_started_run_are_recorded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (130, 9, 9, 1)).astype(np.uint8)
    source = ArraySource(images, rng.integers(0, 2, 130))
    with_patches = {"model.patch_features": 6, "data.scale": "auto"}
    path = tmp_path / "run"
    actual = finished(settings(path, **with_patches), source=source).model.fixed_transforms[-1]
    assert isinstance(actual, PatchFeatures)
    recorded_features = recorded_patches(RunDirectory(path))
    assert recorded_features is not None
    assert recorded_features.describe() == actual.describe()
    assert recorded_patches(RunDirectory(tmp_path / "none")) is None


def with_sizes(record: dict[str, Any], **sizes: Any) -> dict[str, Any]:
    """Return the record of a run with other sizes."""
    return record | {"sizes": record["sizes"] | sizes}


@pytest.mark.parametrize(
    "change",
    [
        lambda r: {},
        lambda r: r | {"more": 1},
        lambda r: {k: v for k, v in r.items() if k != "versions"},
        lambda r: r | {"identity": 3},
        lambda r: r | {"versions": []},
        lambda r: r | {"sizes": {}},
        lambda r: with_sizes(r, unknown=1),
        lambda r: with_sizes(r, block_size=None),
        lambda r: with_sizes(r, batch_size="20"),
        lambda r: with_sizes(r, solver="other"),
    ],
)
def test_record_of_another_version_gives_one_sentence(change: Any, tmp_path: Path) -> None:
    """Check a record with a right checksum and a missing or additional key, or a value of another
    type."""
    directory = directory_with(tmp_path, change(run_record(opened())))
    with pytest.raises(RunError, match="holds a run of another version of streamkern; continue it"):
        recorded_run(directory)


@pytest.mark.parametrize("compile_threshold", [0.0, float("inf")])
def test_resumed_run_keeps_its_accelerator(
    compile_threshold: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a version of streamkern that would choose another accelerator."""
    monkeypatch.setattr(devices, "WORTH_COMPILING", compile_threshold)
    finished(settings(tmp_path / "whole"), source=stream())
    stopped(settings(tmp_path / "run"), 9, source=stream())
    monkeypatch.setattr(devices, "WORTH_COMPILING", float("inf") if compile_threshold == 0 else 0.0)
    finished(settings(tmp_path / "run"), source=stream())
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "whole"))


KERNEL_TABLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "laplace": (Laplace(2), {"kind": "laplace", "bandwidth": 2.0}),
    "polynomial": (Polynomial(2), {"kind": "polynomial", "degree": 2}),
    "sum": (
        0.5 * Laplace(3) + Gaussian(1.0) * Laplace(2),
        {
            "kind": "sum", "weights": [0.5, 1.0], "parts": [
                {"kind": "laplace", "bandwidth": 3.0},
                {"kind": "product", "parts": [
                    {"kind": "gaussian", "bandwidth": 1.0}, {"kind": "laplace", "bandwidth": 2}]},
            ],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNEL_TABLES)
def test_kernel_object_resumes_as_table(name: str, tmp_path: Path) -> None:
    """Resume a run of Python by the command line, with the same weights."""
    kernel, table = KERNEL_TABLES[name]
    X = np.random.default_rng(0).normal(size=(200, 2))
    store = str(tmp_path / "data.zarr")
    ingest(X, store, y=np.sin(X[:, 0]))
    options = {
        "data.train": store, "data.epochs": 6, "data.batch_size": 50, "run.threads": 1,
        "run.accelerator": "none", "model.n_centers": 40, "solver.name": "block",
        "run.checkpoint_every": 1,
    }  # fmt: skip
    config = RunConfig().with_overrides(options | {"run.run_dir": str(tmp_path / "run")})
    test = ArraySource(X[:10], np.sin(X[:10, 0]))
    stopped(config.with_overrides({"model.kernel": kernel}), 10, test=test)
    other = {"kind": "laplace", "bandwidth": 99.0}
    remedy = rf'give its kernel, model\.kernel = {{kind = "{name}", '
    with pytest.raises(ResumeMismatchError, match=remedy):
        finished(config.with_overrides({"model.kernel": other}))
    with pytest.raises(ResumeMismatchError, match=r"data\.epochs: was 6, now 7; restore these"):
        finished(config.with_overrides({"model.kernel": table, "data.epochs": 7}))
    resumed = finished(config.with_overrides({"model.kernel": table}))
    undisturbed = finished(RunConfig().with_overrides(options | {"model.kernel": kernel}))
    np.testing.assert_array_equal(resumed.model.weights, undisturbed.model.weights)


def test_kernel_object_with_metric_resumes_in_python(tmp_path: Path) -> None:
    """Check the remedy for such a run, which no setting in a run file describes."""
    X = np.random.default_rng(0).normal(size=(60, 2))
    parameters = {"n_centers": 20, "solver": "block", "epochs": 1, "run_dir": tmp_path / "run"}
    KernelRegressor(Laplace(2.0, metric=np.eye(2)), **parameters).fit(X, X[:, 0])
    for kernel, message in (
        ("laplace", "in Python by the call that began"),
        (Laplace(3.0), "restore"),
    ):
        with pytest.raises(ResumeMismatchError, match=rf"model\.kernel: .*; .*{message}"):
            KernelRegressor(kernel, **parameters).fit(X, X[:, 0])
