"""Reads the state of a server's replication slots, and writes the markers that advance them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from airflow_cdc_provider.engine.core.lsn import Lsn, format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.postgres.connection import Connection, row, rows, scalar, session_dsn

MESSAGE_PREFIX = "airflow_cdc"
"""Prefix of the logical messages (markers, heartbeats) that this engine writes into the source's log."""


@dataclass(frozen=True)
class SlotIdentity:
    """The slot that is read, with its server and its publication.

    :param system: ``system_identifier`` of the cluster.
    :param timeline: timeline of its log.
    :param database: oid of the database.
    :param publication: oid of the publication.
    :param publication_version: transaction that last altered the publication itself (operations, options, owner);
        adding and removing tables does not change it.
    """

    system: str
    timeline: int
    database: int
    slot: str
    publication: int
    publication_version: int


@dataclass(frozen=True)
class SlotState:
    """A row of ``pg_replication_slots``; LSNs as integers, ``retained`` in bytes.

    :param invalidation: why the server has invalidated the slot, if it reports that (17 and newer; 16 reports
        ``conflicting`` for every reason).
    :param temporary: whether it is dropped at the end of its session.
    :param idle_seconds: seconds that it has had no reader, if the server reports that (17 and newer).
    """

    plugin: str | None
    database: str | None
    active: bool
    active_pid: int | None
    restart_lsn: Lsn
    confirmed_flush_lsn: Lsn
    wal_status: str | None
    retained: int
    invalidation: str | None = None
    temporary: bool = False
    idle_seconds: float | None = None

    @property
    def lost(self) -> bool:
        """Return whether the slot can no longer be read."""
        return self.wal_status == "lost" or self.invalidation is not None

    @property
    def end(self) -> Lsn:
        """Return the end of the log that the server had written to its disk when the slot was queried."""
        return Lsn(self.restart_lsn + self.retained)

    def as_dict(self) -> dict[str, Any]:
        """Return the ``slot`` object of ``status``."""
        return {
            "restart_lsn": format_lsn(self.restart_lsn),
            "confirmed_flush_lsn": format_lsn(self.confirmed_flush_lsn),
            "retained_bytes": self.retained,
            "wal_status": self.wal_status,
            "active": self.active,
        }


@dataclass(frozen=True)
class Slots:
    """All slots of a server at one moment.

    :param end: end of the log that the server has written to its disk, or that a standby has replayed.
    :param states: the slots by name.
    """

    end: Lsn
    states: Mapping[str, SlotState]


# Columns that differ between versions of Postgres are read through JSON.
_SLOTS = """
    SELECT log.lsn::text, slot_name, plugin, database, active, active_pid, coalesce(restart_lsn, '0/0')::text,
        coalesce(confirmed_flush_lsn, '0/0')::text, wal_status,
        coalesce(pg_wal_lsn_diff(log.lsn, restart_lsn), 0)::bigint,
        to_jsonb(s) ->> 'invalidation_reason', temporary,
        extract(epoch FROM clock_timestamp() - (to_jsonb(s) ->> 'inactive_since')::timestamptz)::float8
    FROM (SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END)
        AS log (lsn) LEFT JOIN pg_replication_slots s ON true
"""


def read_slots(connection: Connection) -> Slots:
    """Return the states of all slots of a server, using one query."""
    found = rows(connection, _SLOTS)
    states = {}
    for _, name, plugin, database, active, pid, restart, confirmed, *rest in found:
        if name is not None:
            states[name] = SlotState(plugin, database, active, pid, parse_lsn(restart), parse_lsn(confirmed), *rest)
    return Slots(parse_lsn(found[0][0]), states)


def read_slot(connection: Connection, slot: str) -> SlotState | None:
    """Return the state of a slot, or ``None`` if it does not exist."""
    return read_slots(connection).states.get(slot)


def is_ours(connection: Connection, state: SlotState) -> bool:
    """Return whether a pipeline of this database can read a slot."""
    return state.plugin == "pgoutput" and state.database == scalar(connection, "SELECT current_database()")


def read_identity(connection: Connection, slot: str, publication: str) -> SlotIdentity:
    """Read the current identity of the source."""
    system, timeline, database, oid, version = row(
        connection,
        "SELECT (SELECT system_identifier::text FROM pg_control_system()),"
        " ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int,"
        " (SELECT oid::bigint FROM pg_database WHERE datname = current_database()),"
        " (SELECT oid::bigint FROM pg_publication WHERE pubname = %s),"
        " (SELECT xmin::text::bigint FROM pg_publication WHERE pubname = %s)",
        [publication, publication],
    )
    return SlotIdentity(system, timeline, database, slot, oid or 0, version or 0)


def flushed(connection: Connection) -> Lsn:
    """Return the end of the log that the server has written to its disk."""
    return parse_lsn(scalar(connection, "SELECT pg_current_wal_flush_lsn()::text"))


def blockers(connection: Connection, xids: Collection[int] | None = None) -> str:
    """Name the sessions and prepared transactions that have transaction ids.

    :param xids: ids to restrict the result to, 32 or 64 bits; ``None`` for all.
    """
    chosen = {"xids": None if xids is None else [xid & 0xFFFFFFFF for xid in xids]}
    among = "(%(xids)s::bigint[] IS NULL OR {}::text::bigint = ANY (%(xids)s::bigint[]))"
    # pg_stat_activity shows transaction ids only to pg_monitor, but all roles may see the locks on them.
    sessions = rows(
        connection,
        "SELECT format('session %%s of %%s (%%s, transaction open since %%s)', pid, coalesce(usename, '?'),"
        " coalesce(wait_event, state, 'its state is shown to members of pg_monitor'),"
        " coalesce(date_trunc('second', xact_start)::text, '?')) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        " AND pid IN (SELECT pid FROM pg_locks WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted"
        f" AND {among.format('transactionid')}) ORDER BY xact_start",
        chosen,
    )
    prepared = rows(
        connection,
        "SELECT format('prepared transaction %%L of %%s since %%s', gid, owner, date_trunc('second', prepared))"
        f" FROM pg_prepared_xacts WHERE {among.format('transaction')} ORDER BY prepared",
        chosen,
    )
    return "; ".join(name for (name,) in sessions + prepared) or "none that this role can see"


def emit_marker(connection: Connection, content: str) -> Lsn:
    """Commit a marker into the log and return its LSN; everything that was committed before is below it."""
    query = "SELECT pg_logical_emit_message(true, %s, %s)::text"
    return parse_lsn(scalar(connection, query, [MESSAGE_PREFIX, content]))


def reader_name(dsn: str, slot: str) -> str:
    """Return the ``application_name`` of a pipeline's own reader of the slot, as the server stores it."""
    (name,) = parse_qs(urlsplit(session_dsn(dsn, f"airflow-cdc {slot}")).query)["application_name"]
    return name[:63]


def visible_in_current(connection: Connection) -> Snapshot:
    """Return the server's current snapshot."""
    return Snapshot.parse(scalar(connection, "SELECT pg_current_snapshot()::text"))
