"""The interface of a source for runs: entering, continuing after an outage, and ending readers of earlier runs.

A run owns the epoch, and the source owns the other end: a replication slot with its readers, or offsets of topics. The
rest of a source's contract is :class:`.sources.contract.Source`.
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
"""Returns a context that keeps others from taking the epoch; entering it raises :class:`.Fenced` if another run has it.
"""


class AttachedSource(Protocol):
    """The source of one pipeline, for its runs. It connects only when a method is called."""

    @property
    def slot(self) -> str:
        """Return the name of the replication slot that is read; empty if the source has none."""

    @property
    def without_record(self) -> str:
        """Return the remedy for a sink that has no commit record of the pipeline."""

    def without_targets(self, gone: Sequence[Target], record: Record) -> str:
        """Return the remedy for missing target tables."""

    def take_epoch(self, record: Record, records: CommitRecord, owner: str) -> int:
        """Take the epoch, see :meth:`.CommitRecord.take_epoch`, and end the readers of earlier runs at the source.

        :param record: the record before the epoch is taken.
        :param owner: the process that takes the epoch.
        :returns: the epoch.
        :raises GateClosed: if the source cannot be read; raised before the epoch is taken.
        :raises SecondWriter: if a session that does not belong to the pipeline reads the slot.
        """

    def enter(self, part: str) -> None:
        """Let a part of a run pass the gate under its epoch, and record changes of the source's identity.

        :raises GateClosed: if the source cannot continue the sinks' records, or if target tables are missing.
        """

    def leave(self, epoch: int, sinks: Sequence[Sink]) -> None:
        """Record the state in which a stream that ends leaves the source.

        :param epoch: the epoch of the run. Nothing is recorded if another run has taken over.
        :param sinks: the sinks of the pipeline's branches, in order.
        """

    def end_readers(self, fence: Fence) -> None:
        """End the readers that a stream of this run has left at the source when its connections broke.

        :raises Blocked: if they cannot be ended.
        """

    def look_at_slot(self) -> SlotState | None:
        """Read the slot's state; ``None`` if there is no slot, or the source cannot be reached."""

    def give_up_slot(self, exceeded: SlotBudgetExceeded, fence: Fence) -> None:
        """Drop the slot, which retains more log than allowed.

        :raises SlotBudgetExceeded: if the slot cannot be dropped; states the reason.
        """


class SourcePlugin(Protocol):
    """A kind of source, created once without arguments for its name in ``source.type``.

    Its module must not import a driver or Spark, because it is also imported where Dags are parsed.
    """

    @property
    def settings(self) -> type[SourceSettings]:
        """Return the class of the section."""

    def attach(self, pipeline: Pipeline) -> AttachedSource:
        """Return the source of a pipeline, a :class:`.sources.contract.Source`, without connecting to it."""


def attached(pipeline: Pipeline) -> AttachedSource:
    """Return the source of a pipeline for its runs.

    :raises ConfigError: if its kind cannot be loaded.
    """
    return cast(SourcePlugin, source_kind(pipeline.source.type)).attach(pipeline)
