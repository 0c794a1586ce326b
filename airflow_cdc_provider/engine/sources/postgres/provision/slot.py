"""Creates and drops the replication slot, and waits for the barrier after its creation.

The slot is created first, and moved to a position from which Postgres decodes correctly. Then a barrier waits until
every transaction that the slot will not stream is visible to every new snapshot. From that moment on, the stream
delivers whatever a chunk does not see.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import psycopg2

from airflow_cdc_provider.engine.core.errors import Blocked, MissingPrivilege, SecondWriter, ServerNotReady
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LOG_START, Lsn, format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.postgres.slots import SlotState, blockers, emit_marker, is_ours, read_slot

WAIT_SECONDS = 600.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_FAILOVER_VERSION = 170000


def create_slot(connection: Connection, slot: str, timeout: float = WAIT_SECONDS) -> Lsn:
    """Create the slot and return the LSN from which it streams.

    :param timeout: seconds to wait for transactions that were open before, and again for those open at its end.
    :raises Blocked: naming the transactions that it waited for.
    :raises ServerNotReady: when no slot is free.
    """
    # Standbys that synchronize slots take over only marked ones; without such standbys the mark has no effect.
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


def _leave_creation(connection: Connection, slot: str, consistent: Lsn, timeout: float) -> Lsn:
    """Move a new slot beyond its creation, and return the LSN from which it streams then.

    While the creation waits for the transactions that were open when it began, Postgres, up to 18 at least, does not
    track those that alter tables: their changes are missing in the catalog snapshot with which it decodes at first. It
    then silently sends rows in the old definition, or cannot send them at all after a TRUNCATE (pgsql-hackers, 2024:
    "Historic snapshot doesn't track txns committed in BUILDING_SNAPSHOT state"). A slot that restarts beyond its
    creation uses the snapshot that the server has written to its disk there, which is complete.

    The server writes one with each record of running transactions: at once if the role may request that record,
    otherwise usually within half a minute. The snapshot is usable when the transactions have ended that were open at
    the end of the creation. The slot has not been read or relied on yet, so nothing is skipped.

    :param consistent: the slot's consistent point.
    """
    state = read_slot(connection, slot)
    if state is not None and consistent - state.restart_lsn < _BY_WAY_OF_FULL_SNAPSHOT:
        return consistent
    deadline, pause, start = time.monotonic() + timeout, _FIRST_PAUSE, None
    # From 17 on, advancing may wait without a limit for the standbys in synchronized_standby_slots.
    settings = "SELECT set_config('statement_timeout', %s, false), set_config('synchronous_commit', 'local', false)"
    try:
        while start is None and (began := time.monotonic()) < deadline:
            rows(connection, settings, [f"{max(1, int((deadline - began) * 1000))}ms"])
            end, restart = _advance(connection, slot)
            if restart >= consistent:
                start = end
            else:
                # Each time everything since the creation is decoded again; that should take half of the time at most.
                pause = max(min(2 * pause, _LONGEST_PAUSE), time.monotonic() - began)
                time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
    except psycopg2.errors.QueryCanceled:
        pass
    rows(connection, "RESET statement_timeout")
    rows(connection, "RESET synchronous_commit")
    if start is None:
        raise _blocked(connection, f"moving slot {slot!r} beyond its creation", timeout)
    return start


def _advance(connection: Connection, slot: str) -> tuple[Lsn, Lsn]:
    """Move a slot without a reader to the end of the log; return the LSNs where it streams and where it restarts."""
    ask = "SELECT has_function_privilege(to_regprocedure('pg_log_standby_snapshot()'), 'EXECUTE')"
    if scalar(connection, ask):
        rows(connection, "SELECT pg_log_standby_snapshot()")
    # The commit of the marker flushes everything before it, and its end is the end of a record.
    end = emit_marker(connection, "slot")
    advance = "SELECT end_lsn::text FROM pg_replication_slot_advance(%s, %s)"
    start = parse_lsn(scalar(connection, advance, [slot, format_lsn(end)]))
    state = read_slot(connection, slot)
    return start, state.restart_lsn if state is not None else LOG_START


def barrier(connection: Connection, timeout: float = WAIT_SECONDS) -> None:
    """Wait until every transaction that began before now is visible to new snapshots or rolled back.

    :param connection: in autocommit, so that each poll takes a new snapshot.
    :raises Blocked: naming the transactions that it waited for.
    """
    failpoint("before-barrier")
    own = scalar(connection, "SELECT pg_current_xact_id()::text::bigint")
    query = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
    if not await_condition(lambda: scalar(connection, query) >= own, timeout):
        raise _blocked(connection, "waiting for transactions older than the slot", timeout)
    failpoint("after-barrier")


def _blocked(connection: Connection, what: str, timeout: float) -> Blocked:
    return Blocked(
        f"{what} took longer than {timeout:g} seconds; it waits for: {blockers(connection)}",
        "End these transactions (COMMIT or ROLLBACK PREPARED for prepared ones; a session that waits in SyncRep needs"
        " its standby, and a slot those in synchronized_standby_slots), then try again.",
    )


def end_walsender(
    connection: Connection,
    slot: str,
    reader: str,
    fence: Callable[[], AbstractContextManager[None]] = nullcontext,
    timeout: float = 30.0,
) -> None:
    """End a walsender that still holds the slot, left behind by an earlier run, and wait until the slot is free.

    A walsender outlives a run that was killed or lost its network, until the server notices. It might also belong to a
    later run, which reads under the same name and must not be ended. So the fence keeps later runs from taking over
    while the walsender is looked up and ended. It is held only for that: a run that takes over ends sessions that hold
    the fence for long.

    :param reader: the ``application_name`` of the pipeline's walsenders; others are left alone.
    :param fence: keeps later runs from taking over.
    :raises SecondWriter: when another program reads from the slot, or the walsender cannot be ended.
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


def drop_slot(connection: Connection, slot: str, reader: str) -> None:
    """Remove the slot, if it exists and belongs to a pipeline of this database.

    :param reader: see :func:`end_walsender`.
    :raises SecondWriter: when another program reads from it.
    """
    state = read_slot(connection, slot)
    if state is not None and is_ours(connection, state):
        end_walsender(connection, slot, reader)
        drop_free_slot(connection, slot)


def drop_free_slot(connection: Connection, slot: str) -> None:
    """Remove the slot, if it exists and belongs to a pipeline of this database.

    :raises psycopg2.Error: when a session reads from it.
    """
    state = read_slot(connection, slot)
    if state is not None and is_ours(connection, state):
        rows(connection, "SELECT pg_drop_replication_slot(%s)", [slot])


# A stale catalog only occurs after Postgres' state FULL_SNAPSHOT, which takes three records of running transactions of
# 56 bytes or more. A slot that is consistent earlier has found a record without any; its catalog is complete.
_BY_WAY_OF_FULL_SNAPSHOT = 3 * 56
