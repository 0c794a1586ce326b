"""The metrics of a job for Prometheus, which its driver serves while it runs, if the pipeline file asks for it.

Nothing is counted here: a scrape reads what the job reports at that moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_GAUGES = {
    "lag_bytes": "Bytes of log that had not been looked through at the last look at its end.",
    "lag_messages": "Messages of topics that had not been read at the last look.",
    "lag_seconds": "Seconds for which there has been something to apply.",
    "acknowledgement_seconds": "Seconds since the slot was first seen where it is.",
    "rows_per_second": "Rows a second since a snapshot began, changes a second of a stream in its last ten.",
    "batch_seconds": "Seconds that the last batch with changes took.",
    "chunks": "Chunks that the snapshot job has to copy.",
    "eta_seconds": "Seconds until the snapshot job is done, if it goes on as until now.",
}
"""By the name in the job's progress."""

_log = logging.getLogger(__name__)


def require_client(pipeline: Pipeline) -> str:
    """Check that what the file asks for can be served here.

    :returns: a sentence.
    :raises ConfigError: when the package that does it is not installed.
    """
    if pipeline.metrics.prometheus is None:
        return "No metrics endpoint is asked for."
    if find_spec("prometheus_client") is None:
        raise ConfigError(
            "metrics.prometheus is set, but the package prometheus-client is not installed where the job runs",
            "Install airflow-cdc-provider[prometheus] there, or remove the key.",
        )
    return "The package prometheus-client is there."


@contextmanager
def serving(pipeline: Pipeline, part: str, epoch: int, report: Callable[[], Mapping[str, Any]]) -> Iterator[int | None]:
    """Serve the metrics of a part of a run for the time of a block. An address that is not to be had ends no job.

    :param report: returns the part's progress.
    :returns: the port; ``None`` when nothing is served.
    """
    if pipeline.metrics.prometheus is None:
        yield None
        return
    from prometheus_client import CollectorRegistry, start_http_server

    host, port = pipeline.metrics.prometheus
    registry = CollectorRegistry()
    registry.register(_Progress(pipeline.name, part, epoch, report))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as e:
        _log.warning("%s: the metrics cannot be served at %s:%d: %s", part, host, port, e)
        yield None
        return
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Progress:
    """A collector of Prometheus."""

    def __init__(self, pipeline: str, part: str, epoch: int, report: Callable[[], Mapping[str, Any]]) -> None:
        self._labels = {"pipeline": pipeline, "part": part}
        self._epoch = epoch
        self._report = report

    def describe(self) -> list[Metric]:
        return []  # nothing is known before the first scrape

    def collect(self) -> Iterator[Metric]:
        """The metrics of what is reported now; what the part does not know, or does not do, is left out."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        labels, report = list(self._labels.values()), self._report()

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(f"airflow_cdc_{name}", text, labels=list(self._labels))
            family.add_metric(labels, value)
            return family

        def counter(name: str, text: str, values: Mapping[tuple[str, ...], float], *further: str) -> Metric:
            family = CounterMetricFamily(f"airflow_cdc_{name}", text, labels=[*self._labels, *further])
            for added, value in values.items():
                family.add_metric([*labels, *added], value)
            return family

        info = InfoMetricFamily("airflow_cdc_job", "The epoch under which the job works.", labels=list(self._labels))
        info.add_metric(labels, {"epoch": str(self._epoch)})
        yield info
        yield counter("restarts", "Failures that the job has gone on after.", {(): report["restarts"]})
        for name, text in _GAUGES.items():
            if report.get(name) is not None:
                yield gauge(name, text, report[name])
        if report.get("slot"):
            yield gauge("retained_wal_bytes", "Bytes of log that the slot keeps.", report["slot"]["retained_bytes"])
        if "tables" in report:
            changes: dict[tuple[str, ...], float] = {(table,): count for table, count in report["tables"].items()}
            yield counter("changes", "Changes committed by the job, by source table.", changes, "table")
        if "finished" in report:
            yield counter("chunks_finished", "Chunks that the snapshot job has copied.", {(): report["finished"]})
            yield counter("rows_copied", "Rows that the snapshot job has written.", {(): report["rows"]})
