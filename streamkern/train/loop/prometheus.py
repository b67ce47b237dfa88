"""A callback that serves the newest numbers of a run to Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional
from streamkern.basics.values import checked_int
from streamkern.train.loop.callbacks import Callback, TrainStart
from streamkern.train.loop.sinks import numbers_in


class Prometheus(Callback):
    """Serves the newest losses and figures of a run, for Prometheus to scrape while it trains.

    The address is ``http://host:port/metrics``. Each number of the log is a gauge, such as
    ``streamkern_train_mse``, ``streamkern_samples_per_s`` or ``streamkern_test_accuracy``. There
    are also ``streamkern_step``, ``streamkern_epoch`` and ``streamkern_samples``. The server ends
    with the run. A collector of OpenTelemetry can read the same address.

    Parameters
    ----------
    port : int
        Port of the server; 0 selects a free one. The attribute `port` has its number once the run
        has started.
    host : str
        Address to listen at; "0.0.0.0" lets other machines read.
    labels : mapping of str to str, optional
        Labels of every gauge, such as the name of the run.

    Raises
    ------
    MissingDependencyError
        prometheus-client is not installed.
    ConfigError
        The port is not an integer, or the labels are not a mapping or have a name that Prometheus
        refuses. When the run starts: the port is in use.
    """

    def __init__(
        self, port: int = 9464, *, host: str = "127.0.0.1", labels: Mapping[str, str] | None = None
    ) -> None:
        label_values: Any = {} if labels is None else labels
        if not isinstance(label_values, Mapping) or not all(
            isinstance(name, str) for name in label_values
        ):
            raise ConfigError(
                f"{mention('labels', labels)} is not a mapping of names to values",
                'give {"run": "first"}',
            )
        self.port, self.host = checked_int("port", port, 0), host
        self.labels = dict(label_values)
        self._server: Any = None
        self._gauges: dict[str, Any] = {}
        self._registry: Any = None
        self._gauge("step", self._client().CollectorRegistry())  # raises for invalid labels

    def _client(self) -> Any:
        return import_optional("prometheus_client", "Prometheus", "prometheus")

    def begin(self, run: TrainStart) -> None:
        """Start the server."""
        client = self._client()
        self._registry, self._gauges = client.CollectorRegistry(), {}
        try:
            self._server, _ = client.start_http_server(self.port, self.host, self._registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{mention('port', self.port)} at {self.host} cannot be used ({error})",
                "give a free port, or 0 for any",
            ) from error
        self.port = self._server.server_port
        self._set_gauges({"step": run.step, "epoch": run.epoch})

    def record(self, record: Mapping[str, Any]) -> None:
        """Show the numbers of a record."""
        counts = {name: record[name] for name in ("step", "epoch", "samples") if name in record}
        self._set_gauges(counts | {name: value for name, value, _ in numbers_in(record)})

    def end(self, error: BaseException | None) -> None:
        """End the server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self._gauges, self._registry = {}, None  # so that the estimator can be cloned

    def _set_gauges(self, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            if name not in self._gauges:
                self._gauges[name] = self._gauge(name, self._registry)
            self._gauges[name].set(value)

    def _gauge(self, name: str, registry: Any) -> Any:
        """Return a new gauge with the labels; raise ConfigError if Prometheus rejects them."""
        try:
            gauge = self._client().Gauge(
                f"streamkern_{name}", f"Newest {name} of the run.", list(self.labels),
                registry=registry,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(
                f"{mention('labels', self.labels)} is refused by Prometheus ({error})",
                "give other names",
            ) from error
        return gauge.labels(**self.labels) if self.labels else gauge
