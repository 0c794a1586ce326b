"""What a run asks of its source: to be let in, to be gone on with after an outage, and to end what earlier runs left.

A run owns the epoch, and the source what is at the other end: a replication slot and who reads from it, or offsets of
topics. The rest of a source's contract is :class:`.sources.contract.Source`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, cast

from airflow_cdc_provider.engine.core.errors import SlotBudgetExceeded
from airflow_cdc_provider.engine.core.record import Record, Target
from airflow_cdc_provider.engine.pipeline.kinds import SourceSettings
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.pipeline.registry import source_kind
from airflow_cdc_provider.engine.postgres.slots import SlotState
from airflow_cdc_provider.engine.sinks.contract import CommitRecord, Sink

Fence = Callable[[], AbstractContextManager[None]]
"""Entered, it keeps others from taking the epoch, or raises :class:`.Fenced` when another run has it."""


class AttachedSource(Protocol):
    """The source of one pipeline, for its runs. Nothing is connected before a method is called."""

    @property
    def slot(self) -> str:
        """Name of the replication slot that is read; empty where the source has none."""

    @property
    def without_record(self) -> str:
        """What to do when a sink has no commit record of the pipeline."""

    def without_targets(self, gone: Sequence[Target], record: Record) -> str:
        """Return what to do when target tables are gone."""

    def take_epoch(self, record: Record, records: CommitRecord, owner: str) -> int:
        """Take the epoch, see :meth:`.CommitRecord.take_epoch`, and end what earlier runs have at the source.

        :param record: as it stands before.
        :param owner: the process that takes it.
        :returns: the epoch.
        :raises GateClosed: when nothing can be read from the source, before the epoch is taken.
        :raises SecondWriter: when somebody who is no run of the pipeline reads from the slot.
        """

    def enter(self, part: str) -> None:
        """Let a part of a run in, under an epoch that it has, and note in the records how the source has moved on.

        :raises GateClosed: when the source cannot continue what the sinks have, or target tables are gone.
        """

    def leave(self, epoch: int, sinks: Sequence[Sink]) -> None:
        """Note in the records where a stream that ends leaves the source.

        :param epoch: of the run. Nothing is noted when another has taken over.
        :param sinks: of the pipeline's branches, in their order.
        """

    def end_readers(self, fence: Fence) -> None:
        """End what a stream of this run has left at the source when its connections broke.

        :raises Blocked: when it cannot be ended.
        """

    def look_at_slot(self) -> SlotState | None:
        """Look how far the slot is; ``None`` when there is none, or the source cannot be reached."""

    def give_up_slot(self, exceeded: SlotBudgetExceeded, fence: Fence) -> None:
        """Drop the slot, which has kept more of the log than it may.

        :raises SlotBudgetExceeded: saying why, when the slot cannot be dropped.
        """


class SourcePlugin(Protocol):
    """A kind of sources: made once, without arguments, by the name in ``source.type``.

    Importing its module imports neither driver nor Spark, as that is done where Dags are parsed.
    """

    @property
    def settings(self) -> type[SourceSettings]:
        """The class of the section."""

    def attach(self, pipeline: Pipeline) -> AttachedSource:
        """Return the source of a pipeline; all of :class:`.sources.contract.Source`. Nothing is connected yet."""


def attached(pipeline: Pipeline) -> AttachedSource:
    """Return the source of a pipeline, as its runs ask it.

    :raises ConfigError: when its kind cannot be loaded.
    """
    return cast(SourcePlugin, source_kind(pipeline.source.type)).attach(pipeline)
