"""The callback for OpenTelemetry that the page on callbacks shows, read by OpenTelemetry's SDK."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import streamkern
from tests.whole.test_docs import DOCS, blocks

pytest.importorskip("opentelemetry.sdk.metrics", reason="needs opentelemetry-sdk")


def callback(provider: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an instance of the class that the page defines."""
    from opentelemetry import metrics

    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    (text,) = (b.text for b in blocks(DOCS / "howto/callbacks.md") if "get_meter" in b.text)
    names: dict[str, Any] = {"streamkern": streamkern}
    exec(re.split(r"\n\n\nstreamkern\.", text)[0], names)
    return names["OpenTelemetry"]()


def test_the_figures_of_a_run_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    sent = callback(MeterProvider([reader]), monkeypatch)
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(300, 3)), rng.normal(size=300)
    model = streamkern.KernelRegressor(
        "laplace", bandwidth=2.0, n_centers=50, solver="block", epochs=2, callbacks=[sent]
    ).fit(X, y, test=(X, y))
    data = reader.get_metrics_data()
    shown = {
        metric.name: point.value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert shown["streamkern.epoch"] == 2
    assert shown["streamkern.test_mse"] == pytest.approx(model.report_["test_mse"])
