"""Sends metrics of slots and pipelines through Airflow's own stats: StatsD, Datadog or OpenTelemetry.

Each metric is sent under its name, with the slot or the pipeline as a tag. If ``[metrics] legacy_names_on`` is set, it
is also sent with the slot or the pipeline as part of the name, as Airflow does, because plain StatsD has no tags.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from airflow.sdk.configuration import conf

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.postgres.slots import Slots

_PIPELINE_GAUGES = {
    "lag_bytes": "lag_bytes",
    "lag_messages": "lag_messages",
    "lag_seconds": "lag_seconds",
    "rows_per_second": "rows_per_second",
    "chunks": "chunks",
    "finished": "chunks_finished",
    "batch_seconds": "batch_seconds",
    "acknowledgement_seconds": "acknowledgement_age",
}
"""Metric names, without the prefix ``cdc.pipeline.``, by the name in a job's progress."""


class SlotMetrics:
    """Metrics of all permanent slots of a server.

    * ``cdc.slot.retained_bytes``: bytes of log that the server retains for the slot.
    * ``cdc.slot.lag_bytes``: bytes of log that have not been acknowledged.
    * ``cdc.slot.acknowledgement_age``: seconds since the last acknowledgement was seen; 0 if everything is
      acknowledged.

    :param dsn: the DSN of the server, which becomes the tag ``server``, such as ``db_5432``.
    """

    def __init__(self, dsn: str) -> None:
        from airflow_cdc_provider.engine.postgres.connection import describe

        # In StatsD, a colon ends a name.
        self._server = _stats().normalize_name_for_stats(describe(dsn).partition("/")[0], log_warning=False)
        self._acknowledged: dict[str, tuple[int, float]] = {}

    def report(self, slots: Slots) -> None:
        """Send the metrics of the observed slots."""
        now = time.monotonic()
        for name, state in slots.states.items():
            if state.temporary:
                continue
            last, since = self._acknowledged.get(name, (-1, now))
            behind = max(slots.end - state.confirmed_flush_lsn, 0)
            if state.confirmed_flush_lsn != last or not behind:
                since = now
            self._acknowledged[name] = (state.confirmed_flush_lsn, since)
            tags = {"slot": name, "server": self._server}
            _gauge("cdc.slot.retained_bytes", state.retained, name, tags)
            _gauge("cdc.slot.lag_bytes", behind, name, tags)
            _gauge("cdc.slot.acknowledgement_age", now - since, name, tags)


def report_pipeline(pipeline: str, progress: Mapping[str, Any]) -> None:
    """Send the metrics of a pipeline from a job's progress, if it has them.

    Gauges: ``cdc.pipeline.lag_bytes``, ``lag_messages``, ``lag_seconds``, ``rows_per_second``, ``chunks``,
    ``chunks_finished``, ``batch_seconds``, ``acknowledgement_age`` and ``retained_bytes``.

    :param pipeline: the pipeline's name, which becomes the tag ``pipeline``.
    :param progress: the progress in a heartbeat.
    """
    values = {metric: progress.get(key) for key, metric in _PIPELINE_GAUGES.items()}
    values["retained_bytes"] = (progress.get("slot") or {}).get("retained_bytes")
    for metric, value in values.items():
        if value is not None:
            _gauge(f"cdc.pipeline.{metric}", value, pipeline, {"pipeline": pipeline})


def _gauge(name: str, value: float, of: str, tags: dict[str, str]) -> None:
    _stats().gauge(name, value, tags=tags)
    if _names_too():
        _stats().gauge(f"{name}.{of}", value)


@cache
def _stats() -> ModuleType:
    """Return Airflow's stats, initialized, because a triggerer initializes only another copy of the module."""
    from airflow.sdk.observability import stats
    from airflow.sdk.observability.metrics.stats_utils import get_stats_factory

    stats.initialize(factory=get_stats_factory(), export_legacy_names=_names_too())
    return stats


@cache
def _names_too() -> bool:
    return bool(conf.getboolean("metrics", "legacy_names_on", fallback=True))
