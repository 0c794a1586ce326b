"""The restart gate: checks that the source can continue from the sink's commit record.

Postgres does not check that. It silently forwards a stale start, and accepts a start beyond the end of its log; rows
would be lost without an error. So it is checked here, at every start and every heartbeat. A refusal names the repair.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from airflow_cdc_provider.engine.core.errors import GateClosed
from airflow_cdc_provider.engine.core.lsn import Lsn, format_lsn
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.postgres.connection import Connection, describe, scalar
from airflow_cdc_provider.engine.postgres.slots import (
    SlotIdentity,
    SlotState,
    flushed,
    is_ours,
    read_identity,
    read_slot,
)
from airflow_cdc_provider.engine.postgres.timeline import left_at, read_history
from airflow_cdc_provider.engine.sinks.contract import Sink
from airflow_cdc_provider.engine.sources.postgres.recorded_slot import RecordedSlot, noted_seen, noted_timeline
from airflow_cdc_provider.engine.sources.postgres.settings import PostgresSourceSettings

log = logging.getLogger(__name__)

REPAIR = (
    "Run `airflow-cdc resnapshot --all`, in Airflow the Dag cdc_resnapshot with Everything: it recreates publication"
    " and slot and reads all tables again."
)
_KEEP_MORE = "raise max_slot_wal_keep_size"
_PREVENTION = {
    "idle_timeout": "raise idle_replication_slot_timeout",
    "rows_removed": "set hot_standby_feedback on standbys, and let them take the slot over from the primary",
    "wal_level_insufficient": "leave wal_level at logical",
}
"""Settings that prevent a server from invalidating a slot, by its reason for that."""


@dataclass(frozen=True)
class Passage:
    """The state of the source when the gate let a pipeline through.

    :param record: the commit record that it can continue.
    :param timeline: the timeline that the source is on now.
    """

    record: Record
    slot: SlotState
    timeline: int

    @property
    def has_moved(self) -> bool:
        """Return whether the source is on another timeline than is recorded."""
        return self.timeline != RecordedSlot.of(self.record.identity).slot_identity.timeline

    def news(self, record: Record) -> dict[str, Any]:
        """Return the values that the commit record does not have yet.

        A server writes ``restart_lsn`` to its disk before it acts on it. So on the same timeline the slot is never seen
        below it again, not even after a crash; but it is in an earlier copy of the cluster.
        """
        recorded, seen = RecordedSlot.of(record.identity), noted_seen(self.slot.restart_lsn)
        if self.timeline != recorded.slot_identity.timeline:
            return noted_timeline(self.timeline) | seen
        return seen if self.slot.restart_lsn > recorded.seen else {}


def record_passage(sink: Sink, record: Record, passage: Passage) -> dict[str, Any]:
    """Record how the source has moved on.

    :returns: the values that were recorded; empty if there were no new ones.
    :raises Fenced: when another run has taken over.
    """
    news = passage.news(record)
    if news:
        sink.record_source(record.epoch, news)
    return news


def require_primary(connection: Connection) -> None:
    """Refuse a standby, whose log is another server's and whose slots belong to that server.

    :raises GateClosed: when the source is a standby.
    """
    if scalar(connection, "SELECT pg_is_in_recovery()"):
        raise GateClosed(
            f"{connection.info.host}:{connection.info.port}/{connection.info.dbname} is a standby",
            "Point `source.dsn` at the primary, or promote the standby, then start again.",
        )


def gate(connection: Connection, source: PostgresSourceSettings, read: Callable[[], Record]) -> Passage:
    """Check that the source can continue from the sink's record.

    :param connection: to the source.
    :param read: returns the commit record; called before and after the slot is read, because a stream may be running.
        What the stream has seen of the slot was recorded before, and it commits before it acknowledges.
    :raises GateClosed: naming what differs and the repair.
    """
    require_primary(connection)
    before = RecordedSlot.of(read().identity)
    state = read_slot(connection, source.slot)
    record = read()
    recorded = RecordedSlot.of(record.identity)
    now = read_identity(connection, source.slot, source.publication)
    _check_identity(recorded.slot_identity, source, now)
    moved = now.timeline != recorded.slot_identity.timeline
    _check_slot(connection, source, state, record.applied, f"timeline {now.timeline}" if moved else None)
    assert state is not None
    # The filters of chunks whose high watermark lies beyond it are needed, too.
    needed = max(record.applied, record.high)
    if moved:
        _check_timeline(source, recorded.slot_identity.timeline, now.timeline, needed)
    elif before.slot_identity == recorded.slot_identity and state.restart_lsn < before.seen:
        raise GateClosed(
            f"slot {source.slot!r} is at {format_lsn(state.restart_lsn)}, but was at {format_lsn(before.seen)}"
            " before: the source has been restored from a copy, and its log since then is not the one from which the"
            " sink was filled",
            REPAIR,
        )
    end = flushed(connection)
    if needed > end:
        raise GateClosed(
            f"the sink has applied up to {format_lsn(needed)}, but the source's log ends at {format_lsn(end)}:"
            " the source has been set back",
            REPAIR,
        )
    return Passage(record, state, now.timeline)


def _check_identity(recorded: SlotIdentity, source: PostgresSourceSettings, now: SlotIdentity) -> None:
    """Check that this is the cluster and database that the sink was filled from, and that the file names our slot."""
    if (now.system, now.database) != (recorded.system, recorded.database):
        raise GateClosed(
            f"the source {describe(source.dsn)} is not the one that the sink was filled from: system identifier and"
            f" database were {recorded.system} and {recorded.database}, are {now.system} and {now.database}",
            f"If `source.dsn` is wrong, correct it. If the source has been replaced: {REPAIR}",
        )
    if now.slot != recorded.slot:
        raise GateClosed(
            f"`source.slot` was {recorded.slot!r} when the pipeline was provisioned, is {now.slot!r}",
            f"Put it back. If the old slot cannot be used any more: {REPAIR}",
        )
    if now.publication != recorded.publication:
        found = f"has been recreated (oid {now.publication})" if now.publication else "no longer exists"
        raise GateClosed(
            f"publication {source.publication!r}, of oid {recorded.publication}, {found}: changes made meanwhile"
            " are not in the stream",
            REPAIR,
        )
    if now.publication_version != recorded.publication_version:
        raise GateClosed(
            f"publication {source.publication!r} has been altered: changes made meanwhile may not be in the stream",
            "If it does not publish insert, update, delete and truncate any more, or publishes via the partition root,"
            f" and is not the pipeline's own, let its owner set that back first. {REPAIR}",
        )


def refuse_lost(slot: str, state: SlotState) -> None:
    """Refuse a slot from which nothing can be read any more.

    :raises GateClosed: naming the reason and the repair.
    """
    if state.lost:
        reason = f"wal_status = {state.wal_status}" + (f", {state.invalidation}" if state.invalidation else "")
        raise GateClosed(
            f"replication slot {slot!r} has lost the log it needs ({reason})",
            f"{REPAIR} So that it does not happen again, {_PREVENTION.get(state.invalidation or '', _KEEP_MORE)}.",
        )


def _check_slot(
    connection: Connection,
    source: PostgresSourceSettings,
    state: SlotState | None,
    applied: Lsn,
    moved: str | None,
) -> None:
    """Check that the slot still has the log from ``applied`` on."""
    if state is None:
        reason = f"; the source is on {moved}: a standby without the slot has been promoted" if moved else ""
        raise GateClosed(f"replication slot {source.slot!r} no longer exists on the source{reason}", REPAIR)
    if not is_ours(connection, state):
        raise GateClosed(
            f"replication slot {source.slot!r} is not ours: plugin {state.plugin!r} in database {state.database!r},"
            " expected pgoutput in this one",
            f"Give the pipeline another slot name (`source.slot`). {REPAIR}",
        )
    refuse_lost(source.slot, state)
    if state.confirmed_flush_lsn > applied:
        raise GateClosed(
            f"slot {source.slot!r} has been acknowledged up to {format_lsn(state.confirmed_flush_lsn)}, but the sink"
            f" has applied only up to {format_lsn(applied)}: what lies between is lost to the stream",
            REPAIR,
        )
    if state.wal_status == "unreserved":
        log.warning(
            "slot %s has fallen behind max_slot_wal_keep_size (wal_status = unreserved): the source may remove log"
            " that it needs at the next checkpoint. Nothing is lost yet; let the stream catch up, or raise the limit.",
            source.slot,
        )


def _check_timeline(source: PostgresSourceSettings, recorded: int, timeline: int, needed: Lsn) -> None:
    """Check that everything up to ``needed`` is part of the history of the timeline that the source is on now."""
    switched = left_at(read_history(source.log_dsn, timeline), recorded)
    if switched is None or switched < needed:
        where = "is not its ancestor" if switched is None else f"was left at {format_lsn(switched)}"
        raise GateClosed(
            f"the source is on timeline {timeline}; timeline {recorded}, of which the sink has"
            f" {format_lsn(needed)}, {where}: the sink has what the source no longer has",
            REPAIR,
        )
