"""Estimates the sizes of tables and chunks from the files and statistics of the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.core.workload import Workload
from airflow_cdc_provider.engine.postgres.connection import Connection, rows

# Tables that were never analyzed have -1 rows, which then count as rows of 100 bytes.
_SIZES = """
    SELECT c.oid::int8, s.bytes, CASE WHEN c.reltuples < 0 THEN s.bytes / 100 ELSE c.reltuples::int8 END
    FROM pg_catalog.pg_class c, LATERAL (SELECT pg_catalog.pg_table_size(c.oid) AS bytes) s
    WHERE c.oid = ANY (%s::pg_catalog.oid[]) AND s.bytes IS NOT NULL
"""


def size_of_tables(connection: Connection, tables: Iterable[Table]) -> Workload:
    """Return the size of all rows of tables; tables that have been dropped count nothing."""
    return sum(sizes_of_tables(connection, list(tables)), Workload(0, 0))


def sizes_of_tables(connection: Connection, tables: Sequence[Table]) -> list[Workload]:
    """Return the size of each of the tables; those that have been dropped have no rows."""
    sizes = _sizes(connection, [leaf.oid for table in tables for leaf in table.leaves])
    return [sum((sizes[leaf.oid] for leaf in table.leaves if leaf.oid in sizes), Workload(0, 0)) for table in tables]


def size_of_chunks(connection: Connection, record: Record, chunks: Sequence[Chunk]) -> Workload:
    """Return the size of chunks, each as its share of its table."""
    if not chunks:
        return Workload(0, 0)
    wanted = Counter(chunk.table for chunk in chunks)
    planned = Counter(each.chunk.table for each in record.chunks if each.keys is None)
    leaves = {
        target.table.label: [leaf.oid for leaf in target.table.leaves]
        for target in record.targets
        if target.table.label in wanted
    }
    sizes = _sizes(connection, [oid for oids in leaves.values() for oid in oids])
    total = Workload(0, 0)
    for label, oids in leaves.items():
        whole = sum((sizes[oid] for oid in oids if oid in sizes), Workload(0, 0))
        total += Workload(*(each * wanted[label] // planned[label] for each in (whole.rows, whole.bytes)))
    return total


def _sizes(connection: Connection, oids: Collection[int]) -> dict[int, Workload]:
    found = rows(connection, _SIZES, [list(oids)])
    return {oid: Workload(count, size) for oid, size, count in found}
