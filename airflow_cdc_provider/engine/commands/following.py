"""``stream``: the source is followed until an end is reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.commands.run_start import require_copied, run_with_spark
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.stream_end import Ending
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres import slots
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.runs.restarting import keep_trying
from airflow_cdc_provider.engine.state.heartbeat import STREAM

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_cdc_provider.engine.runs.progress import StreamProgress
    from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.commands.report import Report, silent

Follow = Callable[["SparkSession", "Run", Record, Callable[["StreamProgress"], None]], "StreamProgress"]


Reached = Callable[["StreamProgress"], bool]


def stream(
    pipeline: Pipeline,
    *,
    until: str = "forever",
    epoch: int | None = None,
    takeover: bool = False,
    report: Report = silent,
) -> dict[str, Any]:
    """Follow the log.

    :param until: ``forever``, ``caught-up`` (everything committed before this command began, and H, is durable in the
        sink) or ``lsn:X/Y``; see :meth:`.Ending.parse`.
    """
    from airflow_cdc_provider.engine.runs.progress import StreamProgress
    from airflow_cdc_provider.engine.spark.session import outliving

    ending = Ending.parse(until)
    with run_with_spark(pipeline, STREAM, epoch, takeover) as (run, record, spark):
        require_copied(pipeline, record)
        follow, reached = _follower(pipeline, record, ending)
        done = StreamProgress(record.applied)

        def attempt(record: Record) -> None:
            before = done

            def tell(progress: StreamProgress) -> None:
                nonlocal done
                done = before.plus(progress)
                run.progress = done.as_dict()
                report("stream", run.progress)

            with outliving(spark, lambda: run.stopping):
                follow(spark, run, record, tell)

        keep_trying(run, record, attempt)
        told = done.as_dict() | run.lag.as_dict()
        names = ("applied_lsn", "changes", "tables", "lag_bytes", "lag_seconds")
        return {name: told[name] for name in names} | {"caught_up": reached(done)}


def _follower(pipeline: Pipeline, record: Record, ending: Ending) -> tuple[Follow, Reached]:
    """Return what follows the source until its end is reached, and what tells whether it has been."""
    if pipeline.topics is not None:
        from airflow_cdc_provider.engine.sources.kafka.stream_job import follower

        return follower(pipeline, ending.lsn, ending.caught_up)
    from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob

    target = ending.lsn
    if ending.caught_up:
        with connected(pipeline.source.dsn, settings={"synchronous_commit": "local"}) as source:
            target = max(slots.emit_marker(source, "caught-up"), record.high)
    return (
        lambda spark, run, record, tell: StreamJob(spark, run, record, tell).follow(target),
        lambda done: target is not None and done.applied >= target,
    )
