"""Serves the metrics of a running job for Prometheus from its driver, if the pipeline file enables it.

This module counts nothing itself: a scrape reads the progress that the job reports at that moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_GAUGES = {
    "lag_bytes": "Bytes of log that had not been processed when its end was last observed.",
    "lag_messages": "Messages of topics that had not been read at the last observation.",
    "lag_seconds": "Seconds for which there has been something to apply.",
    "acknowledgement_seconds": "Seconds since the slot was first seen at its position.",
    "rows_per_second": "Rows per second since a snapshot began, or changes per second of a stream in its last ten.",
    "batch_seconds": "Seconds that the last batch with changes took.",
    "chunks": "Chunks that the snapshot job has to copy.",
    "eta_seconds": "Seconds until the snapshot job is done, if it continues at its rate so far.",
}
"""Help texts by the name in the job's progress."""
_VIEW_GAUGES = {
    "view_built_ratio": "Share of the rows of the view's first table for which the view is built.",
    "view_queued": "Entries in the queue of rows to compute again.",
    "view_behind": "1 if readers of the view do not see all changes that the sink has applied.",
}
_VIEW_COUNTERS = {
    "view_anchors": "Rows or groups of the view that units have affected.",
    "view_seconds": "Seconds that units spent on the view.",
}

_log = logging.getLogger(__name__)


def require_client(pipeline: Pipeline) -> str:
    """Check that this process can serve the metrics that the file asks for.

    :returns: a sentence.
    :raises ConfigError: if the package for that is not installed.
    """
    if pipeline.metrics.prometheus is None:
        return "No metrics endpoint is configured."
    if find_spec("prometheus_client") is None:
        raise ConfigError(
            "metrics.prometheus is set, but the package prometheus-client is not installed where the job runs",
            "Install airflow-cdc-provider[prometheus] there, or remove the key.",
        )
    return "The package prometheus-client is installed."


@contextmanager
def serving(pipeline: Pipeline, part: str, epoch: int, report: Callable[[], Mapping[str, Any]]) -> Iterator[int | None]:
    """Serve the metrics of a part of a run during the block; an address that is not available does not end the job.

    :param report: returns the part's progress.
    :returns: the port; ``None`` if nothing is served.
    """
    if pipeline.metrics.prometheus is None:
        yield None
        return
    from prometheus_client import CollectorRegistry, start_http_server

    host, port = pipeline.metrics.prometheus
    registry = CollectorRegistry()
    registry.register(_ProgressCollector(pipeline.name, part, epoch, report))
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


class _ProgressCollector:
    """A collector of Prometheus."""

    def __init__(self, pipeline: str, part: str, epoch: int, report: Callable[[], Mapping[str, Any]]) -> None:
        self._labels = {"pipeline": pipeline, "part": part}
        self._epoch = epoch
        self._report = report

    def describe(self) -> list[Metric]:
        return []  # no metric is known before the first scrape

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the current progress, without those that do not apply to the part."""
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
        yield counter("restarts", "Failures after which the job has continued.", {(): report["restarts"]})
        for name, text in _GAUGES.items():
            if report.get(name) is not None:
                yield gauge(name, text, report[name])
        if report.get("slot"):
            yield gauge("retained_wal_bytes", "Bytes of log that the slot retains.", report["slot"]["retained_bytes"])
        if "tables" in report:
            changes: dict[tuple[str, ...], float] = {(table,): count for table, count in report["tables"].items()}
            yield counter("changes", "Changes committed by the job, by source table.", changes, "table")
        views: Sequence[Mapping[str, Any]] = report.get("views", ())
        if views:
            yield from self._of_views(views)
        if "finished" in report:
            yield counter("chunks_finished", "Chunks that the snapshot job has copied.", {(): report["finished"]})
            yield counter("rows_copied", "Rows that the snapshot job has written.", {(): report["rows"]})

    def _of_views(self, views: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        names = [*self._labels, "view", "sink"]
        values: dict[str, Callable[[Mapping[str, Any]], float]] = {
            "view_built_ratio": lambda view: view["built_percent"] / 100,
            "view_queued": lambda view: view["queued"],
            "view_behind": lambda view: int(view["behind"]),
            "view_anchors": lambda view: view["anchors"],
            "view_seconds": lambda view: view["seconds"],
        }
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for name, text in _VIEW_GAUGES.items():
            families[name] = GaugeMetricFamily(f"airflow_cdc_{name}", text, labels=names)
        for name, text in _VIEW_COUNTERS.items():
            families[name] = CounterMetricFamily(f"airflow_cdc_{name}", text, labels=names)
        for name, family in families.items():
            for view in views:
                family.add_metric([*self._labels.values(), view["view"], view.get("sink", "")], values[name](view))
            yield family
