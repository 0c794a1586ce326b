"""Compares the definitions of captured tables in the source's catalog with those in the sink's record.

The log does not show DDL that is followed by no change, nor partitions that come and go, nor rewrites. So the catalog
is checked when a stream starts and, if it has been modified, at every heartbeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from airflow_cdc_provider.engine.changes.schema_change import Unchanged, decide
from airflow_cdc_provider.engine.core.errors import CannotFollow, CdcError
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Leaf, Table
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import MatchingTables, find
from airflow_cdc_provider.engine.sources.postgres.catalog.catalog import TREE, TYPES, ancestors
from airflow_cdc_provider.engine.sources.postgres.catalog.publication import (
    named_oids,
    published_entries,
    published_oids,
)
from airflow_cdc_provider.engine.sources.postgres.recorded_slot import RecordedSlot
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings

# All catalog entries that a definition consists of, each with the transaction that wrote it.
_STATE = f"""
WITH RECURSIVE {TYPES}, types AS (
    SELECT t.tableoid, t.oid, t.xmin, t.typnamespace, t.typrelid FROM pg_catalog.pg_type t
    WHERE t.oid IN (SELECT part FROM made)
), {TREE}, entries AS (
    SELECT c.tableoid, c.oid, 0 AS part, c.xmin FROM pg_catalog.pg_class c JOIN tree USING (oid)
    UNION ALL
    SELECT a.tableoid, a.attrelid, a.attnum, a.xmin FROM pg_catalog.pg_attribute a
    JOIN pg_catalog.unnest(%s::int8[]) AS t (root) ON a.attrelid = t.root::pg_catalog.oid
    UNION ALL
    SELECT i.tableoid, i.indexrelid, 0, i.xmin FROM pg_catalog.pg_index i JOIN tree ON i.indrelid = tree.oid
    UNION ALL
    SELECT tableoid, oid, 0, xmin FROM types
    UNION ALL
    SELECT n.tableoid, n.oid, 0, n.xmin FROM pg_catalog.pg_namespace n WHERE n.oid IN (SELECT typnamespace FROM types)
    UNION ALL
    SELECT e.tableoid, e.oid, 0, e.xmin FROM pg_catalog.pg_enum e JOIN types t ON e.enumtypid = t.oid
    UNION ALL
    SELECT a.tableoid, a.attrelid, a.attnum, a.xmin FROM pg_catalog.pg_attribute a
    JOIN types t ON a.attrelid = t.typrelid WHERE a.attnum > 0
)
SELECT pg_catalog.md5(pg_catalog.string_agg(e::pg_catalog.text, ' ' ORDER BY e::pg_catalog.text)) FROM entries e
"""
# A transaction that rewrites the table after its TRUNCATE, or does something else before it, has more than one command.
# A later update of the entry, even if rolled back, stores its command number in cmin's place, and sets xmax.
_TRUNCATED = """
SELECT c.oid::int8
FROM ROWS FROM (pg_catalog.unnest(%s::int8[]), pg_catalog.unnest(%s::int8[])) AS t (leaf, xid)
JOIN pg_catalog.pg_class c ON c.oid = t.leaf::pg_catalog.oid AND c.xmin::text = t.xid::text AND c.cmin::text = '0'
  AND c.xmax::text = '0'
"""


def catalog_state(connection: Connection, publication: str, targets: Sequence[Target]) -> str:
    """Return a digest of the catalog's entries for captured tables; while it stays the same, so do the definitions."""
    roots = [target.table.oid for target in targets]
    entries = published_entries(connection, publication, [target.table for target in targets])
    return f"{scalar(connection, _STATE, [roots, roots, roots])} {sorted(entries.items())}"


def read_definitions(
    connection: Connection, pipeline: Pipeline, targets: Sequence[Target], truncates: Mapping[int, int] | None = None
) -> dict[str, Table | CdcError]:
    """Read the current definitions of captured tables from the catalog, or why they cannot be followed; by label.

    :param truncates: the transactions that last truncated leaves, according to the log so far.
    """
    found = find(connection, postgres_settings(pipeline).tables)
    # The record is read first: a table that is published again meanwhile shows as a difference, and is checked again.
    record = existing_record(pipeline)
    published = published_oids(connection, postgres_settings(pipeline).publication)
    entries = published_entries(
        connection, postgres_settings(pipeline).publication, [target.table for target in targets]
    )
    recorded = RecordedSlot.of(record.identity).published
    altered = frozenset(leaf for leaf, entry in entries.items() if entry != recorded.get(leaf))
    named = named_oids(connection, postgres_settings(pipeline).publication)
    above = ancestors(connection, [target.table.oid for target in targets])
    captured = {target.table.oid: target.table.label for target in record.targets}
    roots = {oid: [captured[root] for root in among if root in captured] for oid, among in above.items()}
    # Last: a leaf that is still as a TRUNCATE left it was so when the tables were read, too.
    parameters = [list(truncates or ()), list((truncates or {}).values())]
    truncated = frozenset(oid for (oid,) in rows(connection, _TRUNCATED, parameters))
    now: dict[str, Table | CdcError] = {}
    for target in targets:
        attached = _attached(found, roots[target.table.oid], target.table)
        after = attached or _now(found, published, altered, target.table, pipeline)
        accounted = after if isinstance(after, CdcError) else _accounted(target.table, after, named, truncated)
        now[target.table.label] = accounted
    return now


def changed_definitions(
    connection: Connection, pipeline: Pipeline, targets: Sequence[Target], truncates: Mapping[int, int] | None = None
) -> dict[str, Table | CdcError]:
    """Return the definitions as :func:`read_definitions`, but only of tables that are not defined as recorded."""
    now = read_definitions(connection, pipeline, targets, truncates)
    recorded = {target.table.label: target.table for target in targets}
    return {label: after for label, after in now.items() if decide(recorded[label], after) != Unchanged()}


def _attached(found: MatchingTables, roots: Sequence[str], table: Table) -> CannotFollow | None:
    """Return an error if a table has become a partition of another captured table, which also has its rows now."""
    label = table.label
    if not roots or (label in found.tables and found.tables[label].oid != table.oid):
        return None
    return CannotFollow(
        f"{label} has become a partition of {roots[0]}, which is captured, too",
        f"Take {label} out of source.tables, unless only a glob names it, and run `airflow-cdc run`: its rows go into"
        f" the target of {roots[0]}, and its own target table stays as it is. Or detach it, and start again.",
    )


def _now(
    found: MatchingTables, published: frozenset[int], altered: frozenset[int], table: Table, pipeline: Pipeline
) -> Table | CdcError:
    label = table.label
    name = found.labels.get(table.oid)
    if name != label and label not in found.labels.values():
        gone = (
            f"Take {label} out of source.tables, unless only a glob names it, and run `airflow-cdc run`: its target"
            " table stays as it is."
        )
        if name is None:
            return CannotFollow(f"{label} has been dropped at the source", gone)
        return CannotFollow(
            f"{label} has been renamed {name} at the source",
            f"Rename it back and start again. Or name {name} in source.tables, as a new table. {gone}",
        )
    if label in found.errors:
        return found.errors[label]
    if label not in found.tables:
        return CannotFollow(
            f"no entry of source.tables takes {label} any more", "Name it there, without a glob, and start again."
        )
    now = found.tables[label]
    recorded = {leaf.oid for leaf in table.leaves}
    publication = postgres_settings(pipeline).publication
    lost = [leaf for leaf in now.leaves if leaf.oid in recorded and leaf.oid not in published]
    again = f"Run `airflow-cdc resnapshot --table '{label}'`: it publishes the table again and reads it, then go on."
    if lost:
        return CannotFollow(
            f"{_names(lost)} is no longer in publication {publication!r}: changes are lost to the stream", again
        )
    differ = [leaf for leaf in now.leaves if leaf.oid in recorded and leaf.oid in altered]
    if differ:
        return CannotFollow(
            f"publication {publication!r} has been altered as to {_names(differ)}: it was taken out for a while, or"
            " other columns or rows were published; changes are lost to the stream",
            again,
        )
    return pipeline.transform.table(now)


def _accounted(before: Table, now: Table, named: frozenset[int], truncated: frozenset[int]) -> Table:
    """Mark leaves in a new place, or with a new file, as completely streamed, if that is known.

    A leaf that the publication has by name stays in it wherever the leaf is moved, and Postgres does not allow it to be
    UNLOGGED. And after a TRUNCATE that has been streamed, no effect of earlier changes is left.
    """
    recorded = {leaf.oid: leaf for leaf in before.leaves}

    def with_account(leaf: Leaf) -> Leaf:
        was = recorded.get(leaf.oid)
        if was is None:
            return leaf
        streamed = was.streamed if leaf.filenode == was.filenode else leaf.oid in named | truncated
        return replace(leaf, streamed=streamed, place=was.place if leaf.oid in named else leaf.place)

    return replace(now, leaves=tuple(map(with_account, now.leaves)))


def _names(leaves: Sequence[Leaf]) -> str:
    return ", ".join(f"{leaf.schema}.{leaf.name}" for leaf in leaves)
