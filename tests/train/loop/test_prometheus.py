"""Test the figures of a run that Prometheus reads, against its log."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone

import streamkern as sk
from streamkern.rundir.run_log import read_log
from tests.runs import array_source, finished, settings, stream

parser = pytest.importorskip("prometheus_client.parser", reason="no prometheus-client")
CONFIG = {"data.epochs": 3, "run.evaluate_every": "auto"}


def scrape(port: int) -> dict[str, tuple[float, dict[str, str]]]:
    """Return the value and the labels of each figure, by its name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        sample.name: (sample.value, dict(sample.labels))
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


class ScrapingCallback(sk.Callback):
    """Callback that reads the server of `shown` after each record; it comes after `shown`."""

    def __init__(self, shown: sk.Prometheus) -> None:
        self.shown = shown
        self.seen: list[tuple[dict[str, Any], dict[str, tuple[float, dict[str, str]]]]] = []

    def record(self, record: Any) -> None:
        self.seen.append((dict(record), scrape(self.shown.port)))


def test_gauges_equal_the_log(tmp_path: Path) -> None:
    shown = sk.Prometheus(0, labels={"run": 'a "first" one'})
    scraping = ScrapingCallback(shown)
    finished(
        settings(tmp_path / "run", **CONFIG), source=stream(), test=array_source(40, 5),
        callbacks=[shown, scraping],
    )  # fmt: skip
    evaluations = [(r, page) for r, page in scraping.seen if r["event"] == "evaluation"]
    assert len(evaluations) == 3
    for record, page in evaluations:
        for name in ("step", "epoch", "test_mse"):
            assert page[f"streamkern_{name}"] == (record[name], {"run": 'a "first" one'})
    logged = [r for r in read_log(tmp_path / "run" / "log.jsonl") if r["event"] == "evaluation"]
    assert [r["test_mse"] for r in logged] == [r["test_mse"] for r, _ in evaluations]
    with pytest.raises(OSError, match="refused"):
        scrape(shown.port)


def test_second_fit_is_served_again() -> None:
    shown = sk.Prometheus(0)
    for _ in range(2):
        scraping = ScrapingCallback(shown)
        finished(settings(**CONFIG), source=stream(), callbacks=[shown, scraping])
        for record, page in scraping.seen:
            assert page["streamkern_step"][0] == record["step"]


def test_occupied_port_is_refused() -> None:
    first = sk.Prometheus(0)
    errors: list[str] = []

    class Second(sk.Callback):
        def record(self, record: Any) -> None:
            if errors:
                return
            with pytest.raises(sk.ConfigError, match="give a free port") as refused:
                finished(settings(), source=stream(), callbacks=[sk.Prometheus(first.port)])
            errors.append(str(refused.value))

    finished(settings(), source=stream(), callbacks=[first, Second()])
    assert str(first.port) in errors[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"labels": labels}, "is not a mapping of names") for labels in (["a"], {1: "a"}, 3)),
        ({"labels": {"__run": "a"}}, "give other names"),
        *(({"port": port}, "port") for port in ("9464", -1, 1.5)),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sk.ConfigError, match=message):
        sk.Prometheus(**options)


def test_estimator_with_prometheus_is_cloned() -> None:
    model = sk.KernelRegressor(callbacks=[sk.Prometheus(0)], n_centers=20)
    model.fit(np.arange(60.0).reshape(30, 2), np.arange(30.0))
    assert clone(model).callbacks[0].labels == {}
