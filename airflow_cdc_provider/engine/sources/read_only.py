"""Base of sources that are only read: they have no slot and no chunks, and the pipeline leaves nothing at them.

The sinks' records say which messages a unit was made of; this is written in the commit of the unit. So a run that takes
over does not have to end anything at the source, and a dropped pipeline leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import ConfigError, SlotBudgetExceeded
from airflow_cdc_provider.engine.core.findings import Finding
from airflow_cdc_provider.engine.core.record import Record, Target
from airflow_cdc_provider.engine.core.stream_end import Ending
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
from airflow_cdc_provider.engine.runs.record_copy import forget_record_copy, require_same_source
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.runs.single_writer import refuse_second_writer
from airflow_cdc_provider.engine.runs.source import Fence
from airflow_cdc_provider.engine.sinks.contract import CommitRecord, Sink
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.location import clear, refuse_others

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class ReadOnlySource:
    """The common part of read-only sources, see :class:`.sources.contract.Source`; subclasses add the rest."""

    reads: ClassVar[str]
    """What is read, for messages, such as ``Kafka topics``."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    # -- runs ---------------------------------------------------------------------------------------

    @property
    def slot(self) -> str:
        """Return an empty string, as the source has no slot."""
        return ""

    @property
    def without_record(self) -> str:
        """Return what to do when a sink has no commit record of the pipeline."""
        return (
            "Run `airflow-cdc provision` (or `airflow-cdc run`) first. If the record was lost, restore it from a"
            " backup; without a backup, run `airflow-cdc drop`, empty or drop the target tables, then run"
            " `airflow-cdc run`."
        )

    def without_targets(self, gone: Sequence[Target], record: Record) -> str:
        """Return what to do when target tables are gone."""
        return "Restore them. Otherwise run `airflow-cdc drop`, then `airflow-cdc run` to begin again."

    def take_epoch(self, record: Record, records: CommitRecord, owner: str) -> int:
        """Take the epoch; earlier runs have nothing at the source to be ended."""
        return records.take_epoch(owner)

    def enter(self, part: str) -> None:
        """Require that the target tables exist.

        The stream itself checks at its start, and while it runs, whether the source can still continue.
        """
        for branch in self.pipeline.branches:
            require_targets(branch, sink_of(branch, part), existing_record(branch))

    def leave(self, epoch: int, sinks: Sequence[Sink]) -> None:
        """Do nothing, as the records already contain everything."""

    def end_readers(self, fence: Fence) -> None:
        """Do nothing, as nothing at the source belongs to readers."""

    def look_at_slot(self) -> SlotState | None:
        """Return ``None``, as the source has no slot."""
        return None

    def give_up_slot(self, exceeded: SlotBudgetExceeded, fence: Fence) -> None:
        """Do nothing, as the source has no slot."""

    # -- before anything is touched -----------------------------------------------------------------

    @property
    def checks_with_spark(self) -> bool:
        """Return false: :meth:`check_with_spark` finds nothing."""
        return False

    def check_with_spark(self, spark: SparkSession) -> list[Finding]:
        """Return no findings."""
        return []

    def require_spark(self, spark: SparkSession) -> None:
        """Accept any Spark."""

    # -- commands -----------------------------------------------------------------------------------

    def joining(self) -> list[str]:
        """Return no labels: a live stream cannot add tables."""
        return []

    def facts(self) -> Mapping[str, Any]:
        """Return no facts."""
        return {}

    def workload(self, record: Record | None, chunks: Sequence[Chunk] = (), ending: Ending | None = None) -> None:
        """Return ``None``, as the source is read only by Spark."""

    def copy_chunks(
        self,
        spark: SparkSession | None,
        run: Run,
        record: Record,
        chunks: Sequence[Chunk],
        tell: Callable[[SnapshotProgress], None],
    ) -> None:
        """Do nothing, as the source has no chunks."""

    def is_finished(self, record: Record) -> bool:
        """Refuse, as the pipeline cannot be copy-only.

        :raises ConfigError: always.
        """
        self._refuse_copying_only()

    def release(self, record: Record) -> None:
        """Refuse, as the pipeline cannot be copy-only.

        :raises ConfigError: always.
        """
        self._refuse_copying_only()

    def _refuse_copying_only(self) -> NoReturn:
        raise ConfigError(
            f"snapshot.mode: 'only' is for tables of Postgres, and pipeline {self.pipeline.name!r} reads {self.reads}",
            "Remove the key. To stop at the current end, run `airflow-cdc stream --until caught-up`.",
        )

    def rereads(self, command: str) -> NoReturn:
        """Refuse, as only tables of Postgres can be read again.

        :raises ConfigError: always.
        """
        raise ConfigError(
            f"{command} reads tables of Postgres, and pipeline {self.pipeline.name!r} reads {self.reads}",
            "To read again from the beginning, run `airflow-cdc drop`, empty or drop the target tables, then run"
            " `airflow-cdc run`.",
        )

    def skip(self, topic: str, partition: int, offsets: Iterable[tuple[int, int]], takeover: bool) -> Mapping[str, Any]:
        """Refuse, as the source has no messages to skip.

        :raises ConfigError: always.
        """
        raise ConfigError(
            f"skip is for Kafka topics, and pipeline {self.pipeline.name!r} reads {self.reads}",
            "Correct the refused value at the source, or change the target so that it accepts the value.",
        )

    def remove(self, takeover: bool, source_gone: bool) -> list[str]:
        """Remove the pipeline's records and state; nothing is left at the source."""
        pipeline, state = self.pipeline, State(self.pipeline.state)
        refuse_others(state, pipeline.name)
        require_same_source(pipeline, state)  # a source of another kind may have left something
        record = record_if_any(pipeline)
        refuse_second_writer(state, record.epoch if record else 0, None, takeover)
        forget_record_copy(state)
        commit_record_of(pipeline).drop()
        self.forget()
        clear(state)
        return []

    def forget(self) -> None:
        """Remove what the source keeps of the pipeline outside its records and its state."""
