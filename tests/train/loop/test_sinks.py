"""Read back the files of TensorBoard and MLflow."""

from __future__ import annotations

import importlib
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from streamkern.basics.errors import ConfigError, MissingDependencyError
from streamkern.basics.optional import import_optional
from streamkern.rundir.run_log import read_log
from streamkern.train.loop import guard, sinks
from streamkern.train.loop.callbacks import TrainStart
from streamkern.train.loop.sinks import MLflow, TensorBoard, _parameters, numbers_in
from tests.runs import array_source, finished, settings, stopped, stream

EPOCHS = {"data.epochs": 3, "run.evaluate_every": "auto"}


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """Return (tag, step) -> the newest value in the event files, whose records are length,
    checksum, bytes and checksum."""
    event_pb2: Any = importlib.import_module("tensorboardX.proto.event_pb2")
    found: dict[tuple[str, int], float] = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            found |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
            data = data[16 + length :]
    return found


def test_numbers_are_extracted_from_records() -> None:
    where = {"step": 80, "epoch": 1, "samples": 9}
    train = {"event": "train", **where, "train_mse": 3.0, "window": 1, "losses": [2.0, 3.0]}
    assert list(numbers_in(train | {"left_s": 5.0, "samples_per_s": 7})) == [
        ("train_mse", 2.0, 2 * guard.WINDOW), ("train_mse", 3.0, 3 * guard.WINDOW),
        ("samples_per_s", 7.0, 80),
    ]  # fmt: skip
    evaluation = {"event": "evaluation", **where, "test_mse": 0.5, "why": "x", "flag": True}
    assert list(numbers_in(evaluation)) == [("test_mse", 0.5, 80)]
    assert list(numbers_in({"event": "start", **where, "plan": 3})) == []


def test_parameters_contain_no_secret() -> None:
    reported = dict(
        _parameters({"data": {"train": ("https://h/x?sig=SECRET", "s3://b/y"), "epochs": 3}})
    )
    assert reported["data.epochs"] == "3"
    assert "s3://b/y" in reported["data.train"]
    assert "SECRET" not in reported["data.train"]


class _NoServer:
    """An MLflow whose server cannot be reached, until `found`."""

    MlflowException = ConnectionError
    found = False

    def MlflowClient(self, uri: str) -> Any:
        if not self.found:
            raise ConnectionError(f"{uri} does not answer")
        return self

    def set_terminated(self, run_id: str, status: str) -> None:
        raise AssertionError(f"{run_id} has ended before")


def test_missing_mlflow_run_is_named_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mlflow = _NoServer()
    monkeypatch.setattr(sinks, "import_optional", lambda *_: mlflow)
    mlflow.found = True
    sink = MLflow("https://user:SECRET@h/x")
    sink.run_id, mlflow.found = "of the fit before", False
    with pytest.raises(ConfigError, match="does not answer") as caught:
        sink.begin(TrainStart({}, {}, 0, 0, 1))
    sink.end(caught.value)
    assert "SECRET" not in str(caught.value)


def test_tensorboard_folder_contains_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    result = finished(
        settings(tmp_path / "run", **EPOCHS, **{"run.tensorboard": str(tmp_path / "tb")}),
        source=stream(), test=array_source(50, 5),
    )  # fmt: skip
    found = scalars(tmp_path / "tb")
    assert len(result.history) == 3
    for record in result.history:
        assert found["test_mse", record["step"]] == pytest.approx(record["test_mse"], rel=1e-6)
    losses = [value for (tag, _), value in sorted(found.items()) if tag == "train_mse"]
    records = read_log(tmp_path / "run" / "log.jsonl")
    logged = [loss for record in records for loss in record.get("losses", ())]
    assert losses == pytest.approx(logged, rel=1e-6)


def test_file_in_place_of_folder_is_refused_before_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "tb"):
        with pytest.raises(ConfigError, match=r"^folder='.*file.*' cannot be written to .*is a fi"):
            TensorBoard(folder)
        config = settings(tmp_path / "run", **EPOCHS, **{"run.tensorboard": str(folder)})
        with pytest.raises(ConfigError, match=r"^run\.tensorboard='.*' cannot be written to"):
            finished(config, source=stream())
        assert not (tmp_path / "run").exists()


def test_resumed_run_continues_its_tensorboard_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    config = settings(tmp_path / "run", **EPOCHS, **{"run.tensorboard": str(tmp_path / "tb")})
    stopped(config, 10, source=stream(), test=array_source(50, 5))
    result = finished(config, source=stream(), test=array_source(50, 5))
    found = scalars(tmp_path / "tb")
    shown = {step: value for (tag, step), value in found.items() if tag == "test_mse"}
    own = {record["step"]: record["test_mse"] for record in result.history}
    assert len(own) > 10
    assert shown == pytest.approx(own, rel=1e-6)


@pytest.mark.filterwarnings("ignore")  # of MLflow's own
def test_mlflow_store_contains_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow, which brings forty packages")
    # Stores of files have to be allowed; those in SQLite need more packages.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = import_optional("mlflow").MlflowClient(uri := (tmp_path / "mlruns").as_uri())
    sink = MLflow(uri, experiment="digits")
    config = settings(tmp_path / "run", **EPOCHS)
    stopped(config, 10, source=stream(), callbacks=[sink])
    first = sink.run_id
    assert first is not None
    assert client.get_run(first).info.status == "KILLED"
    result = finished(config, source=stream(), test=array_source(50, 5), callbacks=[sink])
    assert sink.run_id == first  # the same one goes on
    run = client.get_run(first)
    assert run.info.status == "FINISHED"
    assert run.data.params["solver.name"] == "block"
    assert run.data.params["data.epochs"] == "3"
    assert run.data.metrics["test_mse"] == result.metrics["test_mse"]
    shown = {m.step: m.value for m in client.get_metric_history(first, "test_mse")}
    assert shown.items() >= {r["step"]: r["test_mse"] for r in result.history[-2:]}.items()
    other = MLflow(uri, experiment="digits")
    finished(settings(**EPOCHS), source=stream(), callbacks=[other])
    assert other.run_id != first
    with pytest.raises(ZeroDivisionError):
        finished(
            settings(**EPOCHS), source=stream(), test=array_source(50, 5),
            callbacks=[other], on_evaluation=lambda record: 1 // 0,
        )  # fmt: skip
    assert other.run_id is not None
    assert client.get_run(other.run_id).info.status == "FAILED"


@pytest.mark.filterwarnings("ignore")
def test_invalid_mlflow_uri_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow, which brings forty packages")
    config = settings(tmp_path / "run", **{"run.mlflow": "nowhere://x"})
    with pytest.raises(ConfigError, match=r"run\.mlflow=nowhere://x is not a place"):
        finished(config, source=stream())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("kind", "extra"), [(TensorBoard, "tensorboard"), (MLflow, "mlflow")])
def test_missing_package_is_reported_before_writing(
    tmp_path: Path, kind: Any, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tensorboardX", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"pip install .*\[{extra}\]"):
        finished(settings(tmp_path / "run", **{f"run.{extra}": str(tmp_path / "x")}))
    assert not list(tmp_path.iterdir())
