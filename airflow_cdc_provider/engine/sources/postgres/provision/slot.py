"""The replication slot: creation, barrier, markers, end.

The slot is created first, and moved to where Postgres decodes it rightly. Then a
barrier waits until every transaction that the slot will not stream is visible to
every new snapshot: from that moment on, what a chunk does not see, the stream
delivers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg2

from airflow_cdc_provider.engine.core.errors import Blocked, MissingPrivilege, SecondWriter, ServerNotReady
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.connection import Connection, row, rows, scalar, session_dsn
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import MESSAGE_PREFIX

WAIT_SECONDS = 600.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_FAILOVER_VERSION = 170000
# A stale catalog comes about only by way of Postgres' FULL_SNAPSHOT, which takes three records of running transactions
# of 56 bytes or more. Who finds a record without any before that begins with a catalog that is whole.
_BY_WAY_OF_FULL_SNAPSHOT = 3 * 56


@dataclass(frozen=True)
class Identity:
    """What a source is, recorded when the slot is made.

    :param system: ``system_identifier`` of the cluster.
    :param timeline: timeline of its log.
    :param database: oid of the database.
    :param publication: oid of the publication.
    :param publication_version: transaction that last altered the publication itself (operations, options, owner);
        tables come and go without it.
    """

    system: str
    timeline: int
    database: int
    slot: str
    publication: int
    publication_version: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SlotState:
    """A row of ``pg_replication_slots``; LSNs as integers, ``retained`` in bytes.

    :param invalidation: why the server has given the slot up, where it says so (17 and newer; 16 says the same
        ``conflicting`` for every reason).
    :param temporary: whether it goes with its session.
    :param idle_seconds: how long nobody has read from it, where the server says so (17 and newer).
    """

    plugin: str | None
    database: str | None
    active: bool
    active_pid: int | None
    restart_lsn: int
    confirmed_flush_lsn: int
    wal_status: str | None
    retained: int
    invalidation: str | None = None
    temporary: bool = False
    idle_seconds: float | None = None

    @property
    def lost(self) -> bool:
        """Whether nothing can be read from it any more."""
        return self.wal_status == "lost" or self.invalidation is not None

    @property
    def end(self) -> int:
        """The end of the log when the slot was read, as far as the server had written it to its disk."""
        return self.restart_lsn + self.retained

    def as_dict(self) -> dict[str, Any]:
        """The ``slot`` object of ``status``."""
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

    :param end: end of the log that the server has written to its disk; of a standby, what it has replayed.
    :param states: by name.
    """

    end: int
    states: Mapping[str, SlotState]


# By way of JSON where columns differ between versions of Postgres.
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
    """Return the states of all slots of a server, by one query."""
    found = rows(connection, _SLOTS)
    states = {}
    for _, name, plugin, database, active, pid, restart, confirmed, *rest in found:
        if name is not None:
            states[name] = SlotState(plugin, database, active, pid, parse_lsn(restart), parse_lsn(confirmed), *rest)
    return Slots(parse_lsn(found[0][0]), states)


def read_slot(connection: Connection, slot: str) -> SlotState | None:
    """Return the state of a slot, ``None`` when there is none of that name."""
    return read_slots(connection).states.get(slot)


def is_ours(connection: Connection, state: SlotState) -> bool:
    """Whether a slot is one that a pipeline of this database can read."""
    return state.plugin == "pgoutput" and state.database == scalar(connection, "SELECT current_database()")


def read_identity(connection: Connection, slot: str, publication: str) -> Identity:
    """Read what the source is now."""
    system, timeline, database, oid, version = row(
        connection,
        "SELECT (SELECT system_identifier::text FROM pg_control_system()),"
        " ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int,"
        " (SELECT oid::bigint FROM pg_database WHERE datname = current_database()),"
        " (SELECT oid::bigint FROM pg_publication WHERE pubname = %s),"
        " (SELECT xmin::text::bigint FROM pg_publication WHERE pubname = %s)",
        [publication, publication],
    )
    return Identity(system, timeline, database, slot, oid or 0, version or 0)


def flushed(connection: Connection) -> int:
    """The end of the log that the server has written to its disk."""
    return parse_lsn(scalar(connection, "SELECT pg_current_wal_flush_lsn()::text"))


def create_slot(connection: Connection, slot: str, timeout: float = WAIT_SECONDS) -> int:
    """Create the slot and return the LSN from which on it streams.

    :param timeout: seconds to wait for transactions that were open before, and as many for those open at its end.
    :raises Blocked: naming the transactions that it waited for.
    :raises ServerNotReady: when no slot is free.
    """
    # Standbys that synchronise slots take over only those that are marked; without such standbys the mark does nothing.
    failover = ", failover => true" if connection.info.server_version >= _FAILOVER_VERSION else ""
    create = f"SELECT lsn::text FROM pg_create_logical_replication_slot(%s, 'pgoutput'{failover})"
    failpoint("before-slot")
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('lock_timeout', %s, false)", [f"{int(timeout * 1000)}ms"])
        try:
            cursor.execute(create, [slot])
        except psycopg2.errors.LockNotAvailable:
            raise _blocked(connection, f"creating slot {slot!r}", timeout) from None
        except psycopg2.errors.InsufficientPrivilege as e:
            raise MissingPrivilege(
                f"slot {slot!r} cannot be created: {e}".strip(), "Grant the role REPLICATION."
            ) from e
        except psycopg2.errors.ConfigurationLimitExceeded as e:
            raise ServerNotReady(
                f"slot {slot!r} cannot be created: all replication slots are in use",
                "Raise max_replication_slots and restart the source, or drop a slot that is no longer used.",
            ) from e
        (consistent,) = cursor.fetchone() or ("0/0",)
        cursor.execute("RESET lock_timeout")
    failpoint("after-slot")
    return _leave_creation(connection, slot, parse_lsn(consistent), timeout)


def _leave_creation(connection: Connection, slot: str, consistent: int, timeout: float) -> int:
    """Move a new slot beyond its creation, and return the LSN from which on it streams then.

    While the creation waits for the transactions that were open when it began, Postgres, to 18 at least, takes no
    notice of those that alter tables: what they did is missing in the catalog snapshot by which it decodes at first.
    It then sends rows as the old definition has them, without a word, or cannot send them at all after a TRUNCATE
    (pgsql-hackers, 2024: "Historic snapshot doesn't track txns committed in BUILDING_SNAPSHOT state"). A slot that
    restarts beyond its creation takes the snapshot that the server has written to its disk there, which is whole.

    The server writes one with each record of running transactions: at once where the role may ask for that record,
    otherwise usually within half a minute. It serves when those have ended that were open at the end of the creation.
    Nobody has read from the slot, nor relied on it, so nothing is passed over.

    :param consistent: the slot's consistent point.
    """
    state = read_slot(connection, slot)
    if state is not None and consistent - state.restart_lsn < _BY_WAY_OF_FULL_SNAPSHOT:
        return consistent
    deadline, pause, start = time.monotonic() + timeout, _FIRST_PAUSE, None
    # To advance may be to wait without a limit for the standbys in synchronized_standby_slots, from 17 on.
    settings = "SELECT set_config('statement_timeout', %s, false), set_config('synchronous_commit', 'local', false)"
    try:
        while start is None and (began := time.monotonic()) < deadline:
            rows(connection, settings, [f"{max(1, int((deadline - began) * 1000))}ms"])
            end, restart = _advance(connection, slot)
            if restart >= consistent:
                start = end
            else:
                # All since the creation is decoded again each time, which is to be half of the work at most.
                pause = max(min(2 * pause, _LONGEST_PAUSE), time.monotonic() - began)
                time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
    except psycopg2.errors.QueryCanceled:
        pass
    rows(connection, "RESET statement_timeout")
    rows(connection, "RESET synchronous_commit")
    if start is None:
        raise _blocked(connection, f"moving slot {slot!r} beyond its creation", timeout)
    return start


def _advance(connection: Connection, slot: str) -> tuple[int, int]:
    """Move a slot that nobody reads to the end of the log; returns the LSNs where it streams and where it restarts."""
    ask = "SELECT has_function_privilege(to_regprocedure('pg_log_standby_snapshot()'), 'EXECUTE')"
    if scalar(connection, ask):
        rows(connection, "SELECT pg_log_standby_snapshot()")
    # Its commit brings all before it to the disk; and where it ends, a record ends.
    end = emit_marker(connection, "slot")
    advance = "SELECT end_lsn::text FROM pg_replication_slot_advance(%s, %s)"
    start = parse_lsn(scalar(connection, advance, [slot, format_lsn(end)]))
    state = read_slot(connection, slot)
    return start, state.restart_lsn if state is not None else 0


def barrier(connection: Connection, timeout: float = WAIT_SECONDS) -> None:
    """Wait until every transaction that began before now is visible to new snapshots or gone.

    :param connection: in autocommit, so that each poll takes a new snapshot.
    :raises Blocked: naming the transactions that it waited for.
    """
    failpoint("before-barrier")
    own = scalar(connection, "SELECT pg_current_xact_id()::text::bigint")
    query = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
    if not await_condition(lambda: scalar(connection, query) >= own, timeout):
        raise _blocked(connection, "waiting for transactions older than the slot", timeout)
    failpoint("after-barrier")


def blockers(connection: Connection, xids: Collection[int] | None = None) -> str:
    """Name the sessions and prepared transactions that have transaction ids.

    :param xids: only those with these ids, 32 or 64 bits; ``None`` for all.
    """
    chosen = {"xids": None if xids is None else [xid & 0xFFFFFFFF for xid in xids]}
    among = "(%(xids)s::bigint[] IS NULL OR {}::text::bigint = ANY (%(xids)s::bigint[]))"
    # Whether a session has a transaction id, only pg_monitor may see in pg_stat_activity; the lock on it everybody may.
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


def _blocked(connection: Connection, what: str, timeout: float) -> Blocked:
    return Blocked(
        f"{what} took longer than {timeout:g} seconds; it waits for: {blockers(connection)}",
        "End these transactions (COMMIT or ROLLBACK PREPARED for prepared ones; a session that waits in SyncRep needs"
        " its standby, and a slot those in synchronized_standby_slots), then try again.",
    )


def emit_marker(connection: Connection, content: str) -> int:
    """Commit a marker into the log and return its LSN: all that was committed before lies below it."""
    query = "SELECT pg_logical_emit_message(true, %s, %s)::text"
    return parse_lsn(scalar(connection, query, [MESSAGE_PREFIX, content]))


def reader_name(dsn: str, slot: str) -> str:
    """The ``application_name`` of a pipeline's own reader of the slot, as the server keeps it."""
    (name,) = parse_qs(urlsplit(session_dsn(dsn, f"airflow-cdc {slot}")).query)["application_name"]
    return name[:63]


def end_walsender(
    connection: Connection,
    slot: str,
    reader: str,
    fence: Callable[[], AbstractContextManager[None]] = nullcontext,
    timeout: float = 30.0,
) -> None:
    """End a walsender that still holds the slot, left behind by an earlier run, and wait until it is free.

    :param reader: the ``application_name`` of such walsenders; those of others are left alone.
    :param fence: keeps later runs from taking over, which would read under the same name; it is held only to look
        and to tell, as who takes over ends the session that holds it for long.
    :raises SecondWriter: when somebody else reads from the slot, or it cannot be ended.
    """

    def free() -> bool:
        with fence():
            state = read_slot(connection, slot)
            if state is None or not state.active:
                return True
            _refuse_other_reader(connection, slot, state, reader)
            rows(connection, "SELECT pg_terminate_backend(%s)", [state.active_pid])
            return False

    if not await_condition(free, timeout):
        raise SecondWriter(
            f"slot {slot!r} is still in use after {timeout:g} seconds", "Stop the process that reads from it."
        )


def _refuse_other_reader(connection: Connection, slot: str, state: SlotState, reader: str) -> None:
    query = "SELECT application_name, usename, client_addr::text FROM pg_stat_activity WHERE pid = %s"
    for name, user, address in rows(connection, query, [state.active_pid]):
        if name != reader:
            raise SecondWriter(
                f"slot {slot!r} is being read by session {state.active_pid} of {user or '?'}, application {name!r},"
                f" from {address or 'the server itself'}, which is not this pipeline",
                "Stop that program (SELECT pg_terminate_backend"
                f"({state.active_pid}) ends the session), then try again. If it has acknowledged changes, that will be"
                " refused with the repair.",
            )


def visible_in_current(connection: Connection) -> Snapshot:
    """The server's current snapshot."""
    return Snapshot.parse(scalar(connection, "SELECT pg_current_snapshot()::text"))


def drop_slot(connection: Connection, slot: str, reader: str) -> None:
    """Remove the slot, if it exists and is one of a pipeline of this database.

    :param reader: see :func:`end_walsender`.
    :raises SecondWriter: when somebody else reads from it.
    """
    state = read_slot(connection, slot)
    if state is not None and is_ours(connection, state):
        end_walsender(connection, slot, reader)
        drop_free_slot(connection, slot)


def drop_free_slot(connection: Connection, slot: str) -> None:
    """Remove the slot, if it exists and is one of a pipeline of this database.

    :raises psycopg2.Error: when somebody reads from it.
    """
    state = read_slot(connection, slot)
    if state is not None and is_ours(connection, state):
        rows(connection, "SELECT pg_drop_replication_slot(%s)", [slot])
