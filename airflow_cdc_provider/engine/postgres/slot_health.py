"""Finds problems of a server's slots, and the transactions that hold them back.

A slot without a reader retains the source's log until the disk is full and the source stops. An old transaction has the
same effect, because no slot's ``restart_lsn`` passes the oldest transaction that was running. The module consists of
pure functions and two queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import psycopg2

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.text_output import human_bytes
from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.postgres.slot_budget import Budget
from airflow_cdc_provider.engine.postgres.slots import Slots, SlotState, read_slots

Severity: TypeAlias = Literal["warning", "critical"]


@dataclass(frozen=True)
class Holder:
    """An open transaction that slots may have to wait for.

    :param pid: process id of its session; ``None`` for a prepared transaction.
    :param name: the role, or the prepared transaction's identifier.
    :param application: application name of its session.
    :param seconds: seconds since it was opened.
    :param xid: its transaction id if it has written; ``None`` if it only reads.
    :param query_id: id of its last statement, as in ``pg_stat_statements``, if the server computes it.
    """

    pid: int | None
    name: str
    application: str | None
    seconds: float
    xid: int | None
    query_id: int | None


@dataclass(frozen=True)
class SlotProblem:
    """A problem, with its subject and a solution."""

    severity: Severity
    kind: Literal["lost", "unreserved", "budget", "dead", "kept", "transaction", "prepared"]
    subject: str
    message: str
    solution: str

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Limits:
    """The thresholds above which a problem is reported.

    :param budget: bytes of log that a slot may retain; there is a warning from four fifths on.
    :param dead_seconds: seconds that a slot may be without a reader.
    :param transaction_seconds: seconds that a transaction may be open.
    """

    budget: int
    dead_seconds: float
    transaction_seconds: float


# The text of a statement may be secret, so only its id is reported. Walsenders have snapshots too, but they are the
# readers of the slots themselves.
_HOLDERS = """
    SELECT pid, coalesce(usename, '?'), application_name, extract(epoch FROM clock_timestamp() - xact_start)::float8,
        backend_xid::text::bigint, (to_jsonb(a) ->> 'query_id')::bigint
    FROM pg_stat_activity a
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
        AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL)
    UNION ALL
    SELECT NULL, gid, NULL, extract(epoch FROM clock_timestamp() - prepared)::float8, transaction::text::bigint, NULL
    FROM pg_prepared_xacts
    ORDER BY 4 DESC
"""


def read_holders(connection: Connection) -> list[Holder]:
    """Return the open transactions, the oldest first.

    Only members of pg_monitor see those of other roles.
    """
    return [Holder(*found) for found in rows(connection, _HOLDERS)]


def inspect(
    slots: Slots, holders: list[Holder], limits: Limits, idle: Mapping[str, float] | None = None
) -> list[SlotProblem]:
    """Return the problems, the worst first; temporary slots are ignored because they disappear with their sessions.

    :param idle: seconds that slots have been without a reader, if the caller knows better than the server.
    """
    found = [
        finding
        for name, state in slots.states.items()
        if not state.temporary
        for finding in _of_slot(name, state, limits, (idle or {}).get(name, 0.0))
    ]
    found += [_of_holder(holder) for holder in holders if holder.seconds > limits.transaction_seconds]
    return sorted(found, key=lambda finding: finding.severity)


def _of_slot(name: str, state: SlotState, limits: Limits, idle: float) -> Iterator[SlotProblem]:
    retained = human_bytes(state.retained)
    again = (
        "If its pipeline is still needed, run `airflow-cdc resnapshot --all` (in Airflow the Dag cdc_resnapshot with"
        " Everything). Otherwise drop it:"
    )
    drop = f"SELECT pg_drop_replication_slot('{name}');"
    if state.lost:
        why = state.invalidation or "the log that it needs was removed"
        yield SlotProblem("critical", "lost", name, f"slot {name!r} is lost: {why}", f"{again} {drop}")
        return
    if state.wal_status == "unreserved":
        yield SlotProblem(
            "critical",
            "unreserved",
            name,
            f"slot {name!r} exceeds max_slot_wal_keep_size and is lost at one of the next checkpoints",
            "Let its stream catch up immediately, or raise max_slot_wal_keep_size and reload the configuration.",
        )
    level = Budget(limits.budget, "warn").level(state.retained)
    if level != "ok":
        yield SlotProblem(
            "critical" if level == "exceeded" else "warning",
            "budget",
            name,
            f"slot {name!r} retains {retained} of log; the budget is {human_bytes(limits.budget)}",
            f"Find out with `airflow-cdc status` why its stream does not apply it. If the slot is not needed: {drop}",
        )
    seconds = max(idle, state.idle_seconds or 0.0)
    if not state.active and seconds > limits.dead_seconds:
        yield SlotProblem(
            "critical",
            "dead",
            name,
            f"slot {name!r} has had no reader for {seconds:.0f} seconds; it retains {retained} of log",
            f"Start its stream. If the slot is not needed, drop it: {drop}",
        )


def _of_holder(holder: Holder) -> SlotProblem:
    age = f"has been open for {holder.seconds:.0f} seconds"
    if holder.pid is None:
        return SlotProblem(
            "warning",
            "prepared",
            holder.name,
            f"prepared transaction {holder.name!r} {age} and holds all slots back",
            "End it in its database with `COMMIT PREPARED` or `ROLLBACK PREPARED`.",
        )
    query = f", query id {holder.query_id}" if holder.query_id else ""
    held = "holds all slots back" if holder.xid is not None else "prevents removal of dead rows, also in the catalog"
    return SlotProblem(
        "warning",
        "transaction",
        str(holder.pid),
        f"a transaction of session {holder.pid} ({holder.name}, {holder.application or 'no application name'}{query})"
        f" {age} and {held}",
        f"Wait until it ends, or end it: SELECT pg_terminate_backend({holder.pid});",
    )


def break_circuit(
    connection: Connection, slots: Slots, hard_limit: int, also_active: bool = False
) -> tuple[list[str], list[SlotProblem]]:
    """Drop the slots that retain more than a limit, so that the source's disk does not fill up.

    Their pipelines lose the changes that were not delivered, and have to read all tables again. A slot that has fallen
    below the limit in the meantime is kept.

    :param hard_limit: bytes of log.
    :param also_active: whether to drop slots that have a reader, too; the reader's session is ended.
    :returns: the names of the dropped slots, and a finding for each slot that could not be dropped.
    """
    dropped: list[str] = []
    kept: list[SlotProblem] = []
    for name, state in slots.states.items():
        if state.temporary or state.retained <= hard_limit or (state.active and not also_active):
            continue
        try:
            now = read_slots(connection).states.get(name)
            if now is None or now.retained <= hard_limit or (now.active and not also_active):
                continue
            if now.active_pid is not None:
                scalar(connection, "SELECT pg_terminate_backend(%s, 5000)", [now.active_pid])
            rows(connection, "SELECT pg_drop_replication_slot(%s)", [name])
            dropped.append(name)
        except (psycopg2.Error, CdcError) as e:
            # The other slots must be dropped nevertheless. A reader may have returned immediately: the next check tries
            # again.
            kept.append(_undropped(name, state, e))
    return dropped, kept


def _undropped(name: str, state: SlotState, error: Exception) -> SlotProblem:
    return SlotProblem(
        "critical",
        "kept",
        name,
        f"slot {name!r} retains {human_bytes(state.retained)} of log and cannot be dropped: {str(error).strip()}",
        f"End its reader, and drop it by hand: SELECT pg_drop_replication_slot('{name}');",
    )
