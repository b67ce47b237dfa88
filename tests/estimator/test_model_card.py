"""Check the cards of saved models, and models in the cache of the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from sklearn.metrics import mean_absolute_error, mean_pinball_loss

import streamkern
from streamkern import ConfigError, KernelClassifier, KernelRegressor, RunError

pytestmark = pytest.mark.usefixtures("one_blas_thread")

rng = np.random.default_rng(0)
X = rng.normal(size=(200, 3))
Y = X[:, 0] + 0.1 * rng.normal(size=200)
SMALL: dict[str, Any] = {
    "threads": 1, "n_centers": 40, "kernel": "laplace", "bandwidth": 2.5, "ridge": 1e-3,
    "metric": "none",
}  # fmt: skip
ODD = ["pipe | pipe", "- dash: 'quote'\n#", "<b>[x](y)*_`</b> ünï 🙂"]


def front_matter(folder: Path) -> tuple[Any, str]:
    """Return the YAML of the card in a folder, and the text below it."""
    _, front, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def as_snapshot(folder: Path, cache: Path) -> Path:
    """Copy a folder as huggingface_hub's cache has it: links from a snapshot to blobs."""
    snapshot = cache / "models--owner--name" / "snapshots" / ("0" * 40)
    blobs = cache / "models--owner--name" / "blobs"
    blobs.mkdir(parents=True)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.copy(path, blob)
            link = snapshot / path.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path(*[".."] * len(link.parent.relative_to(blobs.parent).parts))
                            / "blobs" / blob.name)  # fmt: skip
    (snapshot / ".gitattributes").write_text("*.bin filter=lfs\n")
    return snapshot


def test_hub_cache_snapshot_can_be_loaded(tmp_path: Path) -> None:
    model = KernelClassifier(**SMALL).fit(X, np.where(Y > 0, "up", "down"))
    model.save(tmp_path / "model", card=True)
    for name in ("run.lock", "writer.json"):  # docs/howto/huggingface.md leaves them out
        (tmp_path / "model" / name).unlink()
    snapshot = as_snapshot(tmp_path / "model", tmp_path / "cache")
    assert (snapshot / "run.json").is_symlink()
    times = {p: p.stat().st_mtime_ns for p in snapshot.rglob("*")}
    loaded = streamkern.load(snapshot)
    np.testing.assert_array_equal(loaded.decision_function(X), model.decision_function(X))
    assert times == {p: p.stat().st_mtime_ns for p in snapshot.rglob("*")}


@pytest.fixture(scope="module")
def oddly_named() -> tuple[pd.DataFrame, Any, KernelClassifier]:
    """Return rows and labels with unusual names, and a model of the first 150 rows."""
    frame = pd.DataFrame(X, columns=ODD)
    labels = np.array(ODD)[np.digitize(Y, [-0.5, 0.5])]
    model = KernelClassifier(**SMALL, calibrate=False).fit(
        frame[:150], labels[:150], test=(frame[150:], labels[150:])
    )
    return frame, labels, model


@pytest.mark.parametrize("name", ["plain", *ODD, "2024-01-01", "yes", "1.0"])
def test_model_card_is_valid_yaml_for_any_names(
    name: str, oddly_named: tuple[pd.DataFrame, Any, KernelClassifier], tmp_path: Path
) -> None:
    frame, labels, model = oddly_named
    folder = tmp_path / name.replace("/", "")
    model.save(folder, card=True)
    front, text = front_matter(folder)
    assert front["library_name"] == "streamkern"
    assert front["tags"] == ["streamkern", "kernel-methods", "classification"]
    (index,) = front["model-index"]
    assert index["name"] == folder.name
    (result,) = index["results"]
    assert result["task"] == {"type": "tabular-classification"}
    figures = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert figures == {
        "mse": model.report_["test_mse"], "accuracy": model.score(frame[150:], labels[150:])
    }  # fmt: skip
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert "| centers | 40 |" in table
    assert "| kernel | laplace, bandwidth 2.5 |" in table
    assert all(len(line.replace("\\|", "").split("|")) == 4 for line in table)
    assert "streamkern.load(snapshot_download(" in text
    np.testing.assert_array_equal(streamkern.load(folder).predict(frame), model.predict(frame))


def test_model_card_omits_training_metrics(tmp_path: Path) -> None:
    KernelRegressor(**SMALL).fit(X, Y).save(tmp_path / "a", card=True)
    front, text = front_matter(tmp_path / "a")
    assert front["tags"][-1] == "regression"
    assert "model-index" not in front
    assert "mse" not in text


def test_model_card_names_rows_that_stopped_the_training(tmp_path: Path) -> None:
    model = KernelRegressor(**SMALL, solver="block", early_stopping=True).fit(X, Y)
    model.save(tmp_path / "model", card=True)
    front, _ = front_matter(tmp_path / "model")
    (result,) = front["model-index"][0]["results"]
    assert result["dataset"]["name"] == ("validation rows, which were set aside for early stopping")


def test_model_card_of_quantiles_shows_pinball_loss(tmp_path: Path) -> None:
    """Check that the card has the pinball loss, because squared errors of quantiles near 0 and 1
    are large by design."""
    model = KernelRegressor(**SMALL, loss="quantile", quantile=[0.1, 0.9])
    model.fit(X[:150], Y[:150], test=(X[150:], Y[150:])).save(tmp_path / "a", card=True)
    front, text = front_matter(tmp_path / "a")
    (result,) = front["model-index"][0]["results"]
    figures = {metric["type"]: metric["value"] for metric in result["metrics"]}
    truth = np.mean([
        mean_pinball_loss(Y[150:], predicted, alpha=q)
        for q, predicted in zip((0.1, 0.9), model.predict(X[150:]).T, strict=True)
    ])  # fmt: skip
    assert figures["pinball_loss"] == pytest.approx(truth, rel=1e-5)
    assert not {"mse", "r2"} & figures.keys()
    assert "r2" not in text


def test_model_card_of_medians_has_no_squared_error(tmp_path: Path) -> None:
    model = KernelRegressor(**SMALL, loss="absolute_error")
    model.fit(X[:150], Y[:150], test=(X[150:], Y[150:])).save(tmp_path / "a", card=True)
    front, _ = front_matter(tmp_path / "a")
    (result,) = front["model-index"][0]["results"]
    figures = {metric["type"]: metric["value"] for metric in result["metrics"]}
    truth = mean_absolute_error(Y[150:], model.predict(X[150:]))
    assert figures == {"mae": pytest.approx(truth, rel=1e-5)}


def test_run_directory_and_loaded_model_write_cards(tmp_path: Path) -> None:
    model = KernelRegressor(**SMALL, run_dir=tmp_path / "run").fit(X[:150], Y[:150], test=(X, Y))
    model.save(tmp_path / "first" / "model", card=True)
    streamkern.load(tmp_path / "run").save(tmp_path / "second" / "model", card=True)
    first_card, second_card = (tmp_path / k / "model" / "README.md" for k in ("first", "second"))
    assert first_card.read_bytes() == second_card.read_bytes()


@pytest.fixture(scope="module")
def model() -> KernelRegressor:
    """Return a model that was not tested."""
    return KernelRegressor(**SMALL).fit(X, Y)


def test_card_is_optional(model: KernelRegressor, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    assert not (tmp_path / "model" / "README.md").exists()


def test_edited_card_is_not_replaced(model: KernelRegressor, tmp_path: Path) -> None:
    target = tmp_path / "model"
    card = target / "README.md"
    model.save(target)
    model.save(target, card=True)
    model.save(target, card=True)  # the same card may be written again
    card.write_text(text := card.read_text() + "\nTrained for a friend.\n")
    with pytest.raises(RunError, match=r"README\.md exists already, but is not the card of this"):
        model.save(target, card=True)
    model.save(target)
    assert card.read_text() == text
    np.testing.assert_array_equal(streamkern.load(target).predict(X), model.predict(X))


def test_card_is_written_to_local_folders_only(model: KernelRegressor) -> None:
    with pytest.raises(ConfigError, match="to a local folder only"):
        model.save("memory://model", card=True)


def test_broken_link_in_place_of_a_card_is_kept(model: KernelRegressor, tmp_path: Path) -> None:
    (tmp_path / "README.md").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"README\.md exists already"):
        model.save(tmp_path, card=True)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]  # nothing was written


def test_hub_library_reads_model_card(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    model = KernelRegressor(**SMALL).fit(X[:150], Y[:150], test=(X[150:], Y[150:]))
    model.save(tmp_path / "model", card=True)
    data = hub.ModelCard.load(tmp_path / "model" / "README.md").data
    figures = {result.metric_type: result.metric_value for result in data.eval_results}
    assert figures == {"mse": model.report_["test_mse"], "r2": model.report_["test_r2"]}
