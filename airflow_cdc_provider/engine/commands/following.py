"""``stream``: follows the source until an end is reached."""

from __future__ import annotations

from functools import partial
from typing import Any

from airflow_cdc_provider.engine.commands.report import Report, silent
from airflow_cdc_provider.engine.commands.run_start import (
    needs_spark,
    reporting_jvm_end,
    require_copied,
    started_run,
)
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.stream_end import Ending
from airflow_cdc_provider.engine.core.workload import Workload
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.progress import StreamProgress
from airflow_cdc_provider.engine.runs.restarting import keep_trying
from airflow_cdc_provider.engine.sources.contract import source_of
from airflow_cdc_provider.engine.state.heartbeat import STREAM


def follow_needs_spark(pipeline: Pipeline, ending: Ending) -> bool:
    """Return whether :func:`stream` starts Spark to reach an end."""
    return needs_spark(pipeline, partial(_estimate, pipeline, ending))


def _estimate(pipeline: Pipeline, ending: Ending, record: Record | None) -> Workload | None:
    return None if record is None else source_of(pipeline).workload(record, ending=ending)


def stream(
    pipeline: Pipeline,
    *,
    until: str = "forever",
    epoch: int | None = None,
    takeover: bool = False,
    spark: bool = True,
    report: Report = silent,
) -> dict[str, Any]:
    """Follow the log.

    :param until: ``forever``, ``caught-up`` (until everything committed before this command began, and up to the high
        watermark, is durable in the sink) or ``lsn:X/Y``; see :meth:`.Ending.parse`.
    :param spark: whether Spark may be started, see :func:`follow_needs_spark`.
    """
    ending = Ending.parse(until)
    needed = partial(follow_needs_spark, pipeline, ending) if spark else lambda: False
    with started_run(pipeline, STREAM, epoch, takeover, needed) as (run, record, session):
        require_copied(pipeline, record)
        follow, reached = source_of(pipeline).follower(record, ending)
        done = StreamProgress(record.applied)

        def attempt(record: Record) -> None:
            before = done

            def report_progress(progress: StreamProgress) -> None:
                nonlocal done
                done = before.plus(progress)
                run.progress = done.as_dict()
                report("stream", run.progress)

            with reporting_jvm_end(session, run):
                follow(session, run, record, report_progress)

        keep_trying(run, record, attempt)
        result = done.as_dict() | run.lag.as_dict()
        names = ("applied_lsn", "changes", "tables", "lag_bytes", "lag_seconds")
        return {name: result[name] for name in names} | {"caught_up": reached(done)}
