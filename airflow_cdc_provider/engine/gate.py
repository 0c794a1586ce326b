"""The restart gate: whether the source can continue what the sink's commit record says.

Postgres does not ask. It forwards a stale start silently, accepts a start beyond
the end of its log, and streams nothing for a table that has left the publication;
in each case rows would be gone without a word. So it is asked here, at every start
and at every heartbeat, and refused with the repair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from airflow_cdc_provider.engine.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.errors import GateClosed
from airflow_cdc_provider.engine.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.sinks.base import Record, Target
from airflow_cdc_provider.engine.slot import SlotState, read_identity, read_slot

_REPAIR = "Run `airflow-cdc resnapshot --all`: it recreates publication and slot and reads all tables again."

_LEAVES = """
SELECT c.oid::int8, n.nspname, c.relname, c.relreplident,
       p.puballtables OR EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = c.oid)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace CROSS JOIN pg_publication p
WHERE c.oid = ANY (%s::oid[]) AND p.pubname = %s
"""
_PARTITIONS = """
SELECT t.root, array_agg(p.relid::oid::int8 ORDER BY p.relid::oid::int8)
FROM unnest(%s::int8[]) AS t (root) CROSS JOIN LATERAL pg_partition_tree(t.root::oid::regclass) AS p
WHERE p.isleaf GROUP BY 1
"""


def gate(
    connection: Connection, slot: str, publication: str, record: Record, applied_now: Callable[[], int] | None = None
) -> SlotState:
    """Check that the source can continue what the sink's record says.

    :param record: the commit record.
    :param applied_now: tells the applied LSN where units are being committed meanwhile; it is asked after the slot.
    :raises GateClosed: naming what differs and the repair.
    """
    state = read_slot(connection, slot)
    applied = record.applied if applied_now is None else applied_now()
    if state is None:
        raise GateClosed(f"replication slot {slot!r} no longer exists on the source", _REPAIR)
    here = scalar(connection, "SELECT current_database()")
    if state.plugin != "pgoutput" or state.database != here:
        raise GateClosed(
            f"replication slot {slot!r} is not ours: plugin {state.plugin!r} in database {state.database!r},"
            f" expected pgoutput in {here!r}",
            "Give the pipeline another slot name (`source.slot`).",
        )
    if state.wal_status == "lost":
        raise GateClosed(
            f"replication slot {slot!r} has lost the log it needs (wal_status = lost)",
            f"{_REPAIR} Raise max_slot_wal_keep_size so that it does not happen again.",
        )
    if state.confirmed_flush_lsn > applied:
        raise GateClosed(
            f"slot {slot!r} has been acknowledged up to {format_lsn(state.confirmed_flush_lsn)}, but the sink has"
            f" applied only up to {format_lsn(applied)}: what lies between is lost to the stream",
            _REPAIR,
        )
    now = read_identity(connection, slot, publication).to_dict()
    differing = [
        f"{name} was {record.identity[name]}, is {now[name]}" for name in now if record.identity[name] != now[name]
    ]
    if differing:
        raise GateClosed(f"the source is not the one that the sink was filled from: {'; '.join(differing)}", _REPAIR)
    flushed = parse_lsn(scalar(connection, "SELECT pg_current_wal_flush_lsn()::text"))
    if applied > flushed:
        raise GateClosed(
            f"the sink has applied up to {format_lsn(applied)}, but the source's log ends at {format_lsn(flushed)}:"
            " the source has been set back",
            _REPAIR,
        )
    _check_tables(connection, publication, record.targets)
    return state


def _check_tables(connection: Connection, publication: str, targets: Sequence[Target]) -> None:
    """Check that what is published is what was recorded: nothing in the log tells when it is not."""
    recorded = {leaf.oid: (leaf, target.table) for target in targets for leaf in target.table.leaves}
    found = {oid: rest for oid, *rest in rows(connection, _LEAVES, [list(recorded), publication])}
    roots = [target.table.oid for target in targets if target.table.kind == "p"]
    partitions = dict(rows(connection, _PARTITIONS, [roots])) if roots else {}
    wrong = []
    for oid, (leaf, table) in recorded.items():
        schema, name, identity, published = found.get(oid, (None, None, None, False))
        if (schema, name) != (leaf.schema, leaf.name):
            wrong.append(f"{leaf.schema}.{leaf.name} has been dropped, recreated or renamed")
        elif not published:
            wrong.append(f"{leaf.schema}.{leaf.name} is no longer in publication {publication!r}")
        elif identity != table.replica_identity:
            wrong.append(f"the replica identity of {table.label} was {table.replica_identity!r}, is {identity!r}")
    for target in targets:
        table = target.table
        if table.kind == "p" and partitions.get(table.oid, []) != sorted(leaf.oid for leaf in table.leaves):
            wrong.append(f"the partitions of {table.label} have changed")
    if wrong:
        raise GateClosed(f"what the source publishes is not what was captured: {'; '.join(wrong)}", _REPAIR)
