"""A pipeline's source in topics of Kafka: where each question of the contract is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import ConfigError, SlotBudgetExceeded
from airflow_cdc_provider.engine.core.findings import Checks, Finding
from airflow_cdc_provider.engine.core.record import Record, Target
from airflow_cdc_provider.engine.core.stream_end import Ending
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.slots import SlotState
from airflow_cdc_provider.engine.runs.commit_records import existing_record, require_targets, sink_of
from airflow_cdc_provider.engine.runs.progress import SnapshotProgress
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.runs.source import Fence
from airflow_cdc_provider.engine.sinks.contract import CommitRecord, Sink
from airflow_cdc_provider.engine.sources.contract import (
    CheckedSource,
    Follow,
    Reached,
    SourceStatus,
    TellTable,
    trouble_of,
)
from airflow_cdc_provider.engine.sources.kafka import provisioning
from airflow_cdc_provider.engine.sources.kafka.gate import lag_of, pass_gate
from airflow_cdc_provider.engine.sources.kafka.position import Position
from airflow_cdc_provider.engine.sources.kafka.preflight import check
from airflow_cdc_provider.engine.sources.kafka.settings import topic_settings
from airflow_cdc_provider.engine.sources.kafka.skipped_messages import Skip
from airflow_cdc_provider.engine.sources.kafka.topics import Topics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_READ: dict[str, Any] = {"offsets": {}, "skipped": []}
"""What a commit record says of topics, with what it says when there is none."""


class KafkaSource:
    """See :class:`.sources.contract.Source`."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.settings = topic_settings(pipeline)

    # -- runs ---------------------------------------------------------------------------------------

    @property
    def slot(self) -> str:
        """See :attr:`.AttachedSource.slot`: none."""
        return ""

    @property
    def without_record(self) -> str:
        """See :attr:`.AttachedSource.without_record`."""
        return (
            "Run `airflow-cdc provision` (or `run`) first. If the record has been lost, restore it from a backup;"
            " without one, run `airflow-cdc drop`, empty or drop the target tables, and `run`."
        )

    def without_targets(self, gone: Sequence[Target], record: Record) -> str:
        """See :meth:`.AttachedSource.without_targets`."""
        return "Restore them; or `airflow-cdc drop` the pipeline, and `run` it from the beginning of its topics."

    def take_epoch(self, record: Record, records: CommitRecord, owner: str) -> int:
        """See :meth:`.AttachedSource.take_epoch`: nobody but Spark reads topics by what runs leave there."""
        return records.take_epoch(owner)

    def enter(self, part: str) -> None:
        """See :meth:`.AttachedSource.enter`; topics are looked at by the job itself, which knows its checkpoint."""
        for branch in self.pipeline.branches:
            require_targets(branch, sink_of(branch, part), existing_record(branch))

    def leave(self, epoch: int, sinks: Sequence[Sink]) -> None:
        """See :meth:`.AttachedSource.leave`: offsets are in the records already."""

    def end_readers(self, fence: Fence) -> None:
        """See :meth:`.AttachedSource.end_readers`: there are none."""

    def look_at_slot(self) -> SlotState | None:
        """See :meth:`.AttachedSource.look_at_slot`: there is none."""
        return None

    def give_up_slot(self, exceeded: SlotBudgetExceeded, fence: Fence) -> None:
        """See :meth:`.AttachedSource.give_up_slot`: there is none."""

    # -- before anything is touched -----------------------------------------------------------------

    @contextmanager
    def checking(self, checks: Checks) -> Iterator[CheckedSource]:
        """See :meth:`.Source.checking`; what the query returns is checked with Spark."""
        cluster = check(checks, self.pipeline)
        if cluster is None:
            yield CheckedSource()
        else:
            yield CheckedSource(None, Topics(self.settings).identity(cluster), self.require_continuation)

    @property
    def checks_with_spark(self) -> bool:
        """See :attr:`.Source.checks_with_spark`."""
        return True

    def check_with_spark(self, spark: SparkSession) -> list[Finding]:
        """See :meth:`.Source.check_with_spark`: what the query returns, and whether sinks can have a table of it."""
        return provisioning.check_query(self.pipeline, spark)

    def require_spark(self, spark: SparkSession) -> None:
        """See :meth:`.Source.require_spark`.

        :raises ConfigError: when the query is not the one that the target was made for.
        """
        from airflow_cdc_provider.engine.sources.kafka.stream_job import require_query

        for branch in self.pipeline.branches:
            require_query(spark, self.pipeline, existing_record(branch))

    def require_recorded(self, record: Record) -> None:
        """See :meth:`.Source.require_recorded`; :meth:`.Position.of` refuses others."""
        Position.of(record)

    def require_continuation(self, records: Sequence[Record]) -> str:
        """See :meth:`.Source.require_continuation`."""
        for record in filter(Position.is_in, records):  # provisioning refuses the others
            pass_gate(Topics(self.settings), Position.of(record))
        return "The source can continue what the sinks have." if records else "Nothing has been provisioned yet."

    # -- commands -----------------------------------------------------------------------------------

    def joining(self) -> list[str]:
        """See :meth:`.Source.joining`: none."""
        return []

    def provision(self, takeover: bool) -> tuple[Record, Mapping[str, Any]]:
        """See :meth:`.Source.provision`; at the source nothing is made."""
        return provisioning.provision(self.pipeline, takeover), {}

    def facts(self, record: Record) -> Mapping[str, Any]:
        """See :meth:`.Source.facts`: none."""
        return {}

    def copy_chunks(
        self,
        spark: SparkSession,
        run: Run,
        record: Record,
        chunks: Sequence[Chunk],
        tell: Callable[[SnapshotProgress], None],
    ) -> None:
        """See :meth:`.Source.copy_chunks`: topics have none."""

    def follower(self, record: Record, ending: Ending) -> tuple[Follow, Reached]:
        """See :meth:`.Source.follower`."""
        from airflow_cdc_provider.engine.sources.kafka.stream_job import follower

        return follower(self.pipeline, ending.lsn, ending.caught_up)

    def is_finished(self, record: Record) -> bool:
        """See :meth:`.Source.is_finished`.

        :raises ConfigError: in any case.
        """
        self._refuse_copying_only()

    def release(self, record: Record) -> None:
        """See :meth:`.Source.release`.

        :raises ConfigError: in any case.
        """
        self._refuse_copying_only()

    def _refuse_copying_only(self) -> NoReturn:
        raise ConfigError(
            f"snapshot.mode: 'only' is for tables, and pipeline {self.pipeline.name!r} reads topics of Kafka",
            "Leave it out; `airflow-cdc stream --until caught-up` ends at the end of the topics.",
        )

    def status(self, record: Record | None, records: Sequence[Record], judge: bool) -> SourceStatus:
        """See :meth:`.Source.status`: offsets, messages that are passed over, and how many have not been read."""
        read = {name: record.identity.get(name, default) if record else default for name, default in _READ.items()}
        facts = {**read, **lag_of(self.pipeline, record)}
        return SourceStatus(
            facts=facts, trouble=trouble_of(lambda: self.require_continuation(records)) if judge else None
        )

    def verify(self, live: bool, tell: TellTable) -> dict[str, Any]:
        """See :meth:`.Source.verify`: the query over all messages that have been read is compared."""
        from airflow_cdc_provider.engine.sources.kafka.verify import verify

        return verify(self.pipeline, live, tell)

    def rereads(self, command: str) -> NoReturn:
        """See :meth:`.Source.rereads`.

        :raises ConfigError: in any case.
        """
        raise ConfigError(
            f"{command} reads tables of the source, and pipeline {self.pipeline.name!r} reads topics of Kafka",
            "To read the topics again from their beginning, run `airflow-cdc drop`, empty or drop the target tables,"
            " then `airflow-cdc run`.",
        )

    def skip(self, topic: str, partition: int, offsets: Iterable[tuple[int, int]], takeover: bool) -> Record:
        """See :meth:`.Source.skip`."""
        skips = [Skip(topic, partition, first, last, "passed over by hand") for first, last in offsets]
        return provisioning.skip(self.pipeline, skips, takeover)

    def remove(self, takeover: bool, source_gone: bool) -> list[str]:
        """See :meth:`.Source.remove`: nothing is left at the source."""
        provisioning.remove(self.pipeline, takeover)
        return []
