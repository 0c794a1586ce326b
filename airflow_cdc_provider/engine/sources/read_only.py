"""What a source answers that is only read: it has no slot and no chunks, and nothing of a pipeline's is left there.

What a unit has been made of is noted in the sinks' records, in the commit of the unit. So a run that takes over need
not end anything at the source, and a pipeline that is dropped leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import ConfigError, SlotBudgetExceeded
from airflow_cdc_provider.engine.core.findings import Finding
from airflow_cdc_provider.engine.core.record import Record, Target
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.slots import SlotState
from airflow_cdc_provider.engine.runs.commit_records import (
    commit_record_of,
    existing_record,
    record_if_any,
    require_targets,
    sink_of,
)
from airflow_cdc_provider.engine.runs.progress import SnapshotProgress
from airflow_cdc_provider.engine.runs.record_copy import forget_ledger, require_same_source
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.runs.single_writer import refuse_second_writer
from airflow_cdc_provider.engine.runs.source import Fence
from airflow_cdc_provider.engine.sinks.contract import CommitRecord, Sink
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.location import clear, refuse_others

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class ReadOnlySource:
    """A part of :class:`.sources.contract.Source`; a source of this kind adds what is left, and what is otherwise."""

    reads: ClassVar[str]
    """What is read, for messages, such as ``topics of Kafka``."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

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
        return "Restore them; or `airflow-cdc drop` the pipeline, and `run` it from the beginning."

    def take_epoch(self, record: Record, records: CommitRecord, owner: str) -> int:
        """See :meth:`.AttachedSource.take_epoch`: earlier runs have nothing at the source that could be ended."""
        return records.take_epoch(owner)

    def enter(self, part: str) -> None:
        """See :meth:`.AttachedSource.enter`: target tables are there.

        What follows the source looks itself, when it begins and while it works, whether that can still be gone on with.
        """
        for branch in self.pipeline.branches:
            require_targets(branch, sink_of(branch, part), existing_record(branch))

    def leave(self, epoch: int, sinks: Sequence[Sink]) -> None:
        """See :meth:`.AttachedSource.leave`: all is in the records already."""

    def end_readers(self, fence: Fence) -> None:
        """See :meth:`.AttachedSource.end_readers`: there are none."""

    def look_at_slot(self) -> SlotState | None:
        """See :meth:`.AttachedSource.look_at_slot`: there is none."""
        return None

    def give_up_slot(self, exceeded: SlotBudgetExceeded, fence: Fence) -> None:
        """See :meth:`.AttachedSource.give_up_slot`: there is none."""

    # -- before anything is touched -----------------------------------------------------------------

    @property
    def checks_with_spark(self) -> bool:
        """See :attr:`.Source.checks_with_spark`."""
        return False

    def check_with_spark(self, spark: SparkSession) -> list[Finding]:
        """See :meth:`.Source.check_with_spark`."""
        return []

    def require_spark(self, spark: SparkSession) -> None:
        """See :meth:`.Source.require_spark`."""

    # -- commands -----------------------------------------------------------------------------------

    def joining(self) -> list[str]:
        """See :meth:`.Source.joining`: none."""
        return []

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
        """See :meth:`.Source.copy_chunks`: there are none."""

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
            f"snapshot.mode: 'only' is for tables of Postgres, and pipeline {self.pipeline.name!r} reads {self.reads}",
            "Leave it out; `airflow-cdc stream --until caught-up` ends at the end of what is there.",
        )

    def rereads(self, command: str) -> NoReturn:
        """See :meth:`.Source.rereads`.

        :raises ConfigError: in any case.
        """
        raise ConfigError(
            f"{command} reads tables of Postgres, and pipeline {self.pipeline.name!r} reads {self.reads}",
            "To read again from the beginning, run `airflow-cdc drop`, empty or drop the target tables, then"
            " `airflow-cdc run`.",
        )

    def skip(self, topic: str, partition: int, offsets: Iterable[tuple[int, int]], takeover: bool) -> Mapping[str, Any]:
        """See :meth:`.Source.skip`.

        :raises ConfigError: in any case.
        """
        raise ConfigError(
            f"skip is for topics of Kafka, and pipeline {self.pipeline.name!r} reads {self.reads}",
            "Mend what is refused, at the source or at the target.",
        )

    def remove(self, takeover: bool, source_gone: bool) -> list[str]:
        """See :meth:`.Source.remove`: nothing is left at the source."""
        pipeline, state = self.pipeline, State(self.pipeline.state)
        refuse_others(state, pipeline.name)
        require_same_source(pipeline, state)  # another kind may have left something at its source
        record = record_if_any(pipeline)
        refuse_second_writer(state, record.epoch if record else 0, None, takeover)
        forget_ledger(state)
        commit_record_of(pipeline).drop()
        self.forget()
        clear(state)
        return []

    def forget(self) -> None:
        """Remove what the source keeps of the pipeline elsewhere, between its records and its state."""
