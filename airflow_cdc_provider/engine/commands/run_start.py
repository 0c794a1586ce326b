"""What comes before a run takes the epoch: all that can fail before its first commit, while the run before it goes on.

Taking the epoch ends the run that has it. One that took it first, and then could not start Spark, would leave nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from airflow_cdc_provider.engine.commands.attention import noting_errors, require_source
from airflow_cdc_provider.engine.core.errors import GateClosed, SparkUnusable
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.runs.commit_records import existing_record, require_targets, sink_of
from airflow_cdc_provider.engine.runs.metrics import require_client
from airflow_cdc_provider.engine.runs.run import Run, run_part
from airflow_cdc_provider.engine.runs.single_writer import refuse_second_writer
from airflow_cdc_provider.engine.sources.postgres.provision.gate import require_primary
from airflow_cdc_provider.engine.state.announcement import announced
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import RESNAPSHOT, STREAM
from airflow_cdc_provider.engine.state.location import refuse_others

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
from typing import TYPE_CHECKING

from airflow_cdc_provider.engine.runs.commit_records import record_if_any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_cdc_provider.engine.runs.run import Run


@contextmanager
def run_with_spark(
    pipeline: Pipeline, part: str, epoch: int | None, takeover: bool
) -> Iterator[tuple[Run, Record, SparkSession]]:
    """Work on a pipeline with Spark, see :func:`.run_part`; a run of its own takes the epoch once Spark is there.

    :param epoch: the epoch of the run this is a part of, which has ended others already; ``None`` to take a new one.
    :raises SparkUnusable: when Spark cannot be used.
    """
    from airflow_cdc_provider.engine.spark.session import spark_session

    title = part.partition("-")[0]
    if epoch is not None:
        with run_part(pipeline, part, epoch, takeover) as (run, record), spark_session(pipeline, title) as spark:
            yield _named(run, spark), record, spark
        return
    with (
        spark_before(pipeline, part, title, lambda: rehearse(pipeline, part, takeover)) as spark,
        run_part(pipeline, part, None, takeover) as (run, record),
    ):
        yield _named(run, spark), record, spark


@contextmanager
def spark_before(pipeline: Pipeline, part: str, title: str, check: Callable[[], None]) -> Iterator[SparkSession]:
    """Start Spark for a block that takes the epoch.

    :param part: what the run begins with.
    :param title: for the application's name.
    :param check: raises what else stands in the way; called before Spark is started.
    :raises SparkUnusable: when Spark cannot be used.
    """
    from airflow_cdc_provider.engine.spark.session import spark_session

    with noting_errors(pipeline, part):
        check()
    with announced(State(pipeline.state), part), ExitStack() as stack:
        with noting_errors(pipeline, part):
            spark = stack.enter_context(spark_session(pipeline, title))
            if part == STREAM:
                _require_stream(pipeline, spark)
        yield spark


def rehearse(pipeline: Pipeline, part: str, takeover: bool) -> None:
    """Check what a part of a run is refused for, without writing anything.

    :raises CdcError: see :func:`.run_part`.
    """
    state = State(pipeline.state)
    require_client(pipeline)
    refuse_others(state, pipeline.name)
    record = existing_record(pipeline)
    refuse_second_writer(state, record.epoch, None, takeover)
    if part == STREAM:
        require_copied(pipeline, record)
    records = [existing_record(branch) for branch in pipeline.branches]
    if pipeline.topics is not None:
        require_source(pipeline, None, records)
    else:
        with connected(pipeline.source.dsn) as source:
            require_primary(source)
            require_source(pipeline, source, records)
    if part != RESNAPSHOT:
        for branch, own in zip(pipeline.branches, records, strict=True):
            require_targets(sink_of(branch), own)


def require_copied(pipeline: Pipeline, record: Record) -> None:
    """Refuse to stream before all chunks have been read.

    :raises GateClosed: when some have not.
    """
    if record.unfinished:
        raise GateClosed(
            f"{len(record.unfinished)} chunks of pipeline {pipeline.name!r} have not been read",
            "Run `airflow-cdc snapshot` first; `airflow-cdc run` does both.",
        )


def _require_stream(pipeline: Pipeline, spark: SparkSession) -> None:
    """Check what a stream needs of Spark, before another one is ended for it.

    :raises SparkUnusable: when it cannot write its checkpoint.
    :raises ConfigError: when the query over topics is not the one that the target was made for.
    """
    if pipeline.topics is not None:
        from airflow_cdc_provider.engine.sources.kafka.stream_job import require_query

        for branch in pipeline.branches:
            require_query(spark, pipeline, existing_record(branch))
        return
    context = spark.sparkContext
    jvm, configuration = context._jvm, context._jsc.hadoopConfiguration()
    try:
        path = jvm.org.apache.hadoop.fs.Path(pipeline.state)  # type: ignore[union-attr]
        path.getFileSystem(configuration).exists(path)
    except Exception as e:
        cause = str(getattr(e, "java_exception", e)).splitlines()[0]
        raise SparkUnusable(
            f"Spark cannot reach the state {pipeline.state}, where its checkpoint is to be: {cause}",
            "Give `state` a URL that Spark knows as well, and what it needs for it in spark.conf, such as the package"
            " of an object store by spark.jars.packages.",
        ) from e


def _named(run: Run, spark: SparkSession) -> Run:
    run.name_application(spark.sparkContext.applicationId, spark.sparkContext.uiWebUrl)
    return run


def refuse_second(pipeline: Pipeline, takeover: bool) -> None:
    record = record_if_any(pipeline)
    refuse_second_writer(State(pipeline.state), record.epoch if record else 0, None, takeover)
