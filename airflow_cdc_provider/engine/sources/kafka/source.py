"""The Kafka source of a pipeline: implements the source contract."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.core.findings import Checks, Finding
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.stream_end import Ending
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.sources.contract import (
    CheckedSource,
    Follow,
    Reached,
    ReadRecord,
    SourceStatus,
    TellTable,
    blocking_error,
)
from airflow_cdc_provider.engine.sources.kafka import provisioning
from airflow_cdc_provider.engine.sources.kafka.checkpoint import Checkpoint
from airflow_cdc_provider.engine.sources.kafka.gate import lag_of, pass_gate
from airflow_cdc_provider.engine.sources.kafka.position import RecordedTopics
from airflow_cdc_provider.engine.sources.kafka.preflight import check
from airflow_cdc_provider.engine.sources.kafka.settings import topic_settings
from airflow_cdc_provider.engine.sources.kafka.skipped_messages import Skip
from airflow_cdc_provider.engine.sources.kafka.topics import Topics
from airflow_cdc_provider.engine.sources.read_only import ReadOnlySource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class KafkaSource(ReadOnlySource):
    """A source that reads Kafka topics, see :class:`.sources.contract.Source`."""

    reads = "Kafka topics"

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self.settings = topic_settings(pipeline)

    # -- before anything is touched -----------------------------------------------------------------

    @contextmanager
    def checking(self, checks: Checks) -> Iterator[CheckedSource]:
        """Check the source without Spark; the result of the query is checked with Spark."""
        cluster = check(checks, self.pipeline)
        if cluster is None:
            yield CheckedSource()
        else:
            yield CheckedSource(None, Topics(self.settings).identity(cluster), self.require_continuation)

    @property
    def checks_with_spark(self) -> bool:
        """Return true: the query is checked with Spark."""
        return True

    def check_with_spark(self, spark: SparkSession) -> list[Finding]:
        """Check the result of the query, and whether the sinks can have a table for it."""
        return provisioning.check_query(self.pipeline, spark)

    def require_spark(self, spark: SparkSession) -> None:
        """Require the query for which the target was created.

        :raises ConfigError: when the query is a different one.
        """
        from airflow_cdc_provider.engine.sources.kafka.stream_job import require_query

        for branch in self.pipeline.branches:
            require_query(spark, self.pipeline, existing_record(branch))

    def require_continuation(self, readers: Sequence[ReadRecord]) -> str:
        """Check that the topics can continue what the sinks have."""
        for read in readers:
            pass_gate(Topics(self.settings), RecordedTopics.of(read()))
        return "The source can continue what the sinks have." if readers else "Nothing has been provisioned yet."

    # -- commands -----------------------------------------------------------------------------------

    def provision(self, takeover: bool) -> tuple[Record, Mapping[str, Any]]:
        """Create or verify target tables and records; nothing is created at the source."""
        return provisioning.provision(self.pipeline, takeover), {}

    def follower(self, record: Record, ending: Ending) -> tuple[Follow, Reached]:
        """Return the stream job, and a function that tells whether its end is reached."""
        from airflow_cdc_provider.engine.sources.kafka.stream_job import follower

        return follower(self.pipeline, ending.lsn, ending.caught_up)

    def status(self, record: Record | None, readers: Sequence[ReadRecord], judge: bool) -> SourceStatus:
        """Return offsets, skipped messages, and the number of unread messages."""
        read = {"offsets": {}, "skipped": []} if record is None else RecordedTopics.of(record).shown()
        facts = {**read, **lag_of(self.pipeline, record)}
        return SourceStatus(
            facts=facts, trouble=blocking_error(lambda: self.require_continuation(readers)) if judge else None
        )

    def verify(self, live: bool, tell: TellTable) -> dict[str, Any]:
        """Compare the sinks with the query over all messages that have been read."""
        from airflow_cdc_provider.engine.sources.kafka.verify import verify

        return verify(self.pipeline, live, tell)

    def skip(self, topic: str, partition: int, offsets: Iterable[tuple[int, int]], takeover: bool) -> Mapping[str, Any]:
        """Record that messages are to be skipped from now on."""
        skips = [Skip(topic, partition, first, last, "skipped by hand") for first, last in offsets]
        record = provisioning.skip(self.pipeline, skips, takeover)
        return {"epoch": record.epoch, "skipped": RecordedTopics.of(record).shown()["skipped"]}

    def forget(self) -> None:
        """Remove Spark's checkpoint."""
        Checkpoint.of(self.pipeline).remove()
