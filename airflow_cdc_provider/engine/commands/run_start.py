"""Prepares a run before it takes the epoch: all steps that can fail before the first commit, Spark's start included.

Taking the epoch ends the run that has it. If a run took it first and then could not start Spark, no run would be left.
Therefore the previous run continues during these steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from airflow_cdc_provider.engine.commands.attention import noting_errors
from airflow_cdc_provider.engine.core.errors import GateClosed
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.workload import Workload
from airflow_cdc_provider.engine.pipeline.kinds import SparkBound
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record, record_if_any, require_targets, sink_of
from airflow_cdc_provider.engine.runs.metrics import require_client
from airflow_cdc_provider.engine.runs.run import Run, run_part
from airflow_cdc_provider.engine.runs.single_writer import refuse_second_writer
from airflow_cdc_provider.engine.sources.contract import source_of
from airflow_cdc_provider.engine.state.announcement import announced
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import RESNAPSHOT, STREAM
from airflow_cdc_provider.engine.state.location import refuse_others

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Estimate = Callable[[Record | None], Workload | None]
"""Returns the workload of a part of a run from the commit record, see :meth:`.Source.workload`."""


def needs_spark(pipeline: Pipeline, estimate: Estimate) -> bool:
    """Return whether a part of a run needs Spark: because of its sinks, or because it has much to do.

    Starting Spark takes longer than a small copy or catch-up, which the process of the command does itself. If Spark's
    JVM or a session is there already, it is used.
    """
    least, session = pipeline.spark, sys.modules.get("airflow_cdc_provider.engine.spark.session")
    if "PYSPARK_GATEWAY_PORT" in os.environ or (session is not None and session.has_session()):
        return True
    if not (least.min_rows and least.min_bytes) or any(isinstance(sink, SparkBound) for sink in pipeline.sinks):
        return True
    found = estimate(record_if_any(pipeline))
    return found is None or found.rows >= least.min_rows or found.bytes >= least.min_bytes


@contextmanager
def started_run(
    pipeline: Pipeline, part: str, epoch: int | None, takeover: bool, needed: Callable[[], bool]
) -> Iterator[tuple[Run, Record, SparkSession | None]]:
    """Work on a pipeline, see :func:`.run_part`, with Spark if it is needed; a new run takes the epoch after its start.

    :param epoch: the epoch of the run that the part belongs to, which has already ended others; ``None`` to take a new
        one.
    :param needed: returns whether the part needs Spark, see :func:`needs_spark`.
    :raises SparkUnusable: if Spark cannot be used.
    """
    title = part.partition("-")[0]
    if epoch is not None:
        with run_part(pipeline, part, epoch, takeover) as (run, record), ExitStack() as stack:
            spark = None
            if needed():
                from airflow_cdc_provider.engine.spark.session import spark_session

                spark = stack.enter_context(spark_session(pipeline.spark_start, title))
            yield _named(run, spark), record, spark
        return
    with (
        spark_if_needed(pipeline, part, title, lambda: rehearse(pipeline, part, takeover), needed) as spark,
        run_part(pipeline, part, None, takeover) as (run, record),
    ):
        yield _named(run, spark), record, spark


@contextmanager
def spark_if_needed(
    pipeline: Pipeline, part: str, title: str, check: Callable[[], None], needed: Callable[[], bool]
) -> Iterator[SparkSession | None]:
    """Start Spark, if it is needed, for a block that takes the epoch.

    :param part: the part that the run begins with.
    :param title: title for the application's name.
    :param check: raises other errors that prevent the run; called before Spark is started.
    :param needed: returns whether the block needs Spark, see :func:`needs_spark`.
    :raises SparkUnusable: if Spark cannot be used.
    """
    with noting_errors(pipeline, part):
        check()
        with_spark = needed()
    with announced(State(pipeline.state), part), ExitStack() as stack:
        if not with_spark:
            yield None
            return
        from airflow_cdc_provider.engine.spark.session import spark_session

        with noting_errors(pipeline, part):
            spark = stack.enter_context(spark_session(pipeline.spark_start, title))
            if part == STREAM:
                source_of(pipeline).require_spark(spark)
        yield spark


def rehearse(pipeline: Pipeline, part: str, takeover: bool) -> None:
    """Check whether a part of a run would be refused, without writing anything.

    :raises CdcError: if it would be, see :func:`.run_part`.
    """
    state = State(pipeline.state)
    require_client(pipeline)
    refuse_others(state, pipeline.name)
    record = existing_record(pipeline)
    refuse_second_writer(state, record.epoch, None, takeover)
    if part == STREAM:
        require_copied(pipeline, record)
    source_of(pipeline).require_continuation([partial(existing_record, branch) for branch in pipeline.branches])
    if part != RESNAPSHOT:
        for branch in pipeline.branches:
            require_targets(branch, sink_of(branch), existing_record(branch))


def require_copied(pipeline: Pipeline, record: Record) -> None:
    """Refuse to stream before all chunks have been read.

    :raises GateClosed: if some have not been read.
    """
    if record.unfinished:
        raise GateClosed(
            f"{len(record.unfinished)} chunks of pipeline {pipeline.name!r} have not been read",
            "Run `airflow-cdc snapshot` first; `airflow-cdc run` does both.",
        )


def _named(run: Run, spark: SparkSession | None) -> Run:
    if spark is not None:
        run.name_application(spark.sparkContext.applicationId, spark.sparkContext.uiWebUrl)
    return run


def refuse_second(pipeline: Pipeline, takeover: bool) -> None:
    """Refuse to continue while another run is alive, even if the pipeline has not been provisioned.

    :raises SecondWriter: if there is one; names it.
    """
    record = record_if_any(pipeline)
    refuse_second_writer(State(pipeline.state), record.epoch if record else 0, None, takeover)


@contextmanager
def reporting_jvm_end(spark: SparkSession | None, run: Run) -> Iterator[None]:
    """Raise :class:`.SparkLost` if the JVM of a session ends during the block, and the run was not asked to stop."""
    if spark is None:
        yield
        return
    from airflow_cdc_provider.engine.spark import session

    with session.reporting_jvm_end(spark, lambda: run.stopping):
        yield
