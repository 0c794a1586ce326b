"""The guard of a server's slots: what is wrong with them, and who holds them back.

A slot that nobody reads keeps the source's log until the disk is full, and the source stops. So does an old
transaction: ``restart_lsn`` of no slot passes the oldest one that was running. Pure judgements, two queries.
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
    """A transaction that is open, which slots may have to wait for.

    :param pid: of its session; ``None`` for a prepared transaction.
    :param name: the role, or the prepared transaction's identifier.
    :param application: of its session.
    :param seconds: how long it has been open.
    :param xid: its transaction id, if it has written; ``None`` for one that only reads.
    :param query_id: of its last statement, as in ``pg_stat_statements``, where the server computes it.
    """

    pid: int | None
    name: str
    application: str | None
    seconds: float
    xid: int | None
    query_id: int | None


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, what it is about, and what to do."""

    severity: Severity
    kind: Literal["lost", "unreserved", "budget", "dead", "kept", "transaction", "prepared"]
    subject: str
    message: str
    solution: str

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Limits:
    """From where on the guard speaks.

    :param budget: bytes of log that a slot may keep; a warning from four fifths on.
    :param dead_seconds: how long a slot may be without a reader.
    :param transaction_seconds: how long a transaction may be open.
    """

    budget: int
    dead_seconds: float
    transaction_seconds: float


# What a statement says may be secret, so only its id is told. Walsenders have snapshots, too, and are the slots' own.
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
    """Return the open transactions, the oldest first; those of other roles only a member of pg_monitor sees."""
    return [Holder(*found) for found in rows(connection, _HOLDERS)]


def inspect(
    slots: Slots, holders: list[Holder], limits: Limits, idle: Mapping[str, float] | None = None
) -> list[Finding]:
    """Say what is wrong, the worst first. Temporary slots go with their sessions and are nobody's burden.

    :param idle: seconds that slots have been without a reader, as far as the caller knows better than the server.
    """
    found = [
        finding
        for name, state in slots.states.items()
        if not state.temporary
        for finding in _of_slot(name, state, limits, (idle or {}).get(name, 0.0))
    ]
    found += [_of_holder(holder) for holder in holders if holder.seconds > limits.transaction_seconds]
    return sorted(found, key=lambda finding: finding.severity)


def _of_slot(name: str, state: SlotState, limits: Limits, idle: float) -> Iterator[Finding]:
    retained = human_bytes(state.retained)
    again = (
        "If its pipeline is still wanted, run `airflow-cdc resnapshot --all`, in Airflow the Dag cdc_resnapshot with"
        " Everything. Otherwise drop it:"
    )
    drop = f"SELECT pg_drop_replication_slot('{name}');"
    if state.lost:
        why = state.invalidation or "the log that it needs was removed"
        yield Finding("critical", "lost", name, f"slot {name!r} is lost: {why}", f"{again} {drop}")
        return
    if state.wal_status == "unreserved":
        yield Finding(
            "critical",
            "unreserved",
            name,
            f"slot {name!r} exceeds max_slot_wal_keep_size and is lost at one of the next checkpoints",
            "Let its stream catch up at once, or raise max_slot_wal_keep_size and reload.",
        )
    level = Budget(limits.budget, "warn").level(state.retained)
    if level != "ok":
        yield Finding(
            "critical" if level == "exceeded" else "warning",
            "budget",
            name,
            f"slot {name!r} retains {retained} of log; the budget is {human_bytes(limits.budget)}",
            f"Find out why its stream does not apply it: `airflow-cdc status`. If nobody needs the slot: {drop}",
        )
    seconds = max(idle, state.idle_seconds or 0.0)
    if not state.active and seconds > limits.dead_seconds:
        yield Finding(
            "critical",
            "dead",
            name,
            f"nobody has read from slot {name!r} for {seconds:.0f} seconds; it retains {retained} of log",
            f"Start its stream. If nobody needs it, drop it: {drop}",
        )


def _of_holder(holder: Holder) -> Finding:
    age = f"has been open for {holder.seconds:.0f} seconds"
    if holder.pid is None:
        return Finding(
            "warning",
            "prepared",
            holder.name,
            f"prepared transaction {holder.name!r} {age} and holds all slots back",
            "COMMIT PREPARED or ROLLBACK PREPARED it, in its database.",
        )
    query = f", query id {holder.query_id}" if holder.query_id else ""
    held = "holds all slots back" if holder.xid is not None else "keeps dead rows, also of the catalog, from removal"
    return Finding(
        "warning",
        "transaction",
        str(holder.pid),
        f"a transaction of session {holder.pid} ({holder.name}, {holder.application or 'no application name'}{query})"
        f" {age} and {held}",
        f"Let it end, or end it: SELECT pg_terminate_backend({holder.pid});",
    )


def break_circuit(
    connection: Connection, slots: Slots, hard_limit: int, also_active: bool = False
) -> tuple[list[str], list[Finding]]:
    """Drop the slots that retain more than a limit, so that the source's disk survives.

    What they have not delivered is lost to their pipelines, which have to read all tables again. A slot that has gone
    back below the limit meanwhile stays.

    :param hard_limit: bytes.
    :param also_active: also those that somebody reads from, whose session is ended.
    :returns: the names of those that were dropped, and a finding for each that could not be.
    """
    dropped: list[str] = []
    kept: list[Finding] = []
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
            # The others are to be dropped nevertheless. A reader may have been back at once: the next look tries again.
            kept.append(_undropped(name, state, e))
    return dropped, kept


def _undropped(name: str, state: SlotState, error: Exception) -> Finding:
    return Finding(
        "critical",
        "kept",
        name,
        f"slot {name!r} retains {human_bytes(state.retained)} of log and cannot be dropped: {str(error).strip()}",
        f"End who reads from it, and drop it by hand: SELECT pg_drop_replication_slot('{name}');",
    )
