"""Compares a source with a target in Postgres: rows stay on their servers, and both servers compute hashes.

A changelog is folded to the current row of each key. The *life* of a row at a key begins with a snapshot row, an
insert, or an update that moved it there. A later beginning, a delete, a move elsewhere or a truncate ends it. Values
come from the last event of that life that sent them: an update omits unchanged TOASTed values, and values of an earlier
life belong to another row. A value that no event of the life sent, for instance because the row was moved, is unknown
and excluded from the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from psycopg2 import sql

from airflow_cdc_provider.engine.comparison.postgres_side import (
    PostgresSide,
    among,
    content_of_cells,
    listed,
    rows_of,
    shared_hash,
    source_side,
    text_array,
    whole_content,
)
from airflow_cdc_provider.engine.comparison.side import UNKNOWN, RowKey, Sides, buckets_of
from airflow_cdc_provider.engine.core.errors import UnknownTable
from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.postgres.column_text import text_of
from airflow_cdc_provider.engine.postgres.connection import Connection, rows

_OF_EVENTS = ("_op", "_commit_lsn", "_seq", "_before", "_unchanged")
_FETCH = "FETCH 10000 FROM shown"
_LAST = sql.SQL("9223372036854775807")  # rows without a sequence number sort last
_FOLD = sql.SQL(
    """
    WITH halves AS (
        SELECT {key} AS key, true AS written, _op <> 'u' OR {old_key} <> {key} AS starts,
               _commit_lsn, _seq, coalesce(_unchanged, '{{}}') AS unchanged, {hashes}
        FROM {target} WHERE _op IN ('r', 'i', 'u') AND {alive} AND {written}
        UNION ALL
        SELECT {old_key}, false, true, _commit_lsn, _seq, NULL, {nulls}
        FROM {target} WHERE (_op = 'd' OR _op = 'u' AND {old_key} <> {key}) AND {alive} AND {erased}
    ), numbered AS (
        SELECT *, row_number() OVER (PARTITION BY key ORDER BY _commit_lsn, _seq) AS n FROM halves
    ), lives AS (
        SELECT *, max(n) FILTER (WHERE starts) OVER (PARTITION BY key) AS start FROM numbered
    )
    SELECT key, ARRAY[{cells}]::text AS content, NULL::text AS version
    FROM lives WHERE n >= coalesce(start, 0)
    GROUP BY key HAVING (max(ARRAY[n, written::int]))[2] = 1
    """
)
_ALIVE = sql.SQL(
    """coalesce((_commit_lsn, coalesce(_seq, {last})) > (
        SELECT _commit_lsn, coalesce(_seq, {last}) FROM {target} WHERE _op = 't' ORDER BY 1 DESC, 2 DESC LIMIT 1
    ), true)"""
)
# The greatest pair of event number and hash contains the hash that was sent last.
_CELL = sql.SQL("CASE WHEN {last} IS NULL THEN {unknown} ELSE ({last})[2]::text END")
_SENT_LAST = sql.SQL("max(ARRAY[n, {hash}]) FILTER (WHERE written AND {name} <> ALL (unchanged))")


def mirror_sides(source: Connection, sink: Connection, target: Target) -> Sides:
    """Return a table and its mirror; a row's cells are two hashes of all its columns.

    :raises UnknownTable: when the target or one of its columns does not exist.
    """
    table, hashed = target.table, shared_hash(source, sink)
    types = _target_types(sink, target, [])
    content, cells = whole_content(table, hashed)
    copy = sql.Identifier(target.schema, target.name)

    def select(keys: Sequence[RowKey] | None) -> sql.Composable:
        return rows_of(table, copy, content, "NULL::text", [], types, keys)

    original = source_side(source, table, content, cells, hashed)
    return Sides(table, original, PostgresSide(sink, copy, select, cells, hashed), buckets_of(source, table))


def changelog_sides(source: Connection, sink: Connection, target: Target) -> Sides:
    """Return a table and its folded changelog; a row's cells are the hashes of its columns.

    :raises UnknownTable: when the target or one of its columns does not exist.
    """
    table, hashed = target.table, shared_hash(source, sink)
    _target_types(sink, target, _OF_EVENTS)
    log = sql.Identifier(target.schema, target.name)
    hashes = [hashed(text_of(column), 0) for column in table.columns]
    names = [sql.Identifier(f"c{i}") for i in range(len(hashes))]
    sent = [
        _SENT_LAST.format(hash=name, name=sql.Literal(column.name))
        for name, column in zip(names, table.columns, strict=True)
    ]
    key = text_array(text_of(column) for column in table.key_columns)
    old_key = text_array(
        sql.SQL("coalesce(_before ->> {}, {})").format(sql.Literal(column.name), text_of(column))
        for column in table.key_columns
    )
    wanted = text_array(sql.SQL(f"texts ->> {place}") for place in range(len(table.key)))

    def select(keys: Sequence[RowKey] | None) -> sql.Composable:
        written, erased = (sql.SQL("true") if keys is None else among(k, wanted, keys) for k in (key, old_key))
        fold = _FOLD.format(
            target=log,
            key=key,
            old_key=old_key,
            alive=_ALIVE.format(last=_LAST, target=log),
            written=written,
            erased=erased,
            hashes=listed(sql.SQL("{} AS {}").format(hash_, name) for hash_, name in zip(hashes, names, strict=True)),
            nulls=listed(sql.SQL("NULL") for _ in hashes),
            cells=listed(_CELL.format(last=last, unknown=sql.Literal(UNKNOWN)) for last in sent),
        )
        return sql.SQL("({})").format(fold)

    content, cells = content_of_cells(table, hashed)
    original = source_side(source, table, content, cells, hashed)
    return Sides(table, original, PostgresSide(sink, log, select, cells, hashed), buckets_of(source, table))


def target_rows(
    sink: Connection, target: Target, mode: Mode, keys: Sequence[RowKey] | None
) -> Iterator[pa.RecordBatch]:
    """Yield a target's rows as texts, see :data:`.fetched_side.Rows`.

    :raises UnknownTable: when the target or one of its columns does not exist.
    """
    table, more = target.table, _OF_EVENTS if mode == "changelog" else ()
    _target_types(sink, target, more)
    texts = {column.name: text_of(column) for column in table.columns}
    texts |= {name: sql.SQL("{}::text").format(sql.Identifier(name)) for name in more}
    query = sql.SQL("SELECT {} FROM {}").format(listed(texts.values()), sql.Identifier(target.schema, target.name))
    if keys is not None and mode == "mirror":
        width = range(len(table.key or table.columns))
        key = text_array(text_of(column) for column in table.key_columns or table.columns)
        wanted = among(key, text_array(sql.SQL(f"texts ->> {place}") for place in width), keys)
        query = sql.SQL("{} WHERE {}").format(query, wanted)
    rows(sink, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    rows(sink, sql.SQL("DECLARE shown NO SCROLL CURSOR FOR {}").format(query))
    while batch := rows(sink, _FETCH):
        columns = [pa.array(column, pa.string()) for column in zip(*batch, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, names=list(texts))


def _target_types(sink: Connection, target: Target, more: Sequence[str]) -> dict[str, str]:
    """Return the types of the target's columns; those of the table and ``more`` must exist."""
    types = dict(
        rows(
            sink,
            "SELECT a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_attribute a"
            " JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped",
            (target.schema, target.name),
        )
    )
    absent = [name for name in (*(column.name for column in target.table.columns), *more) if name not in types]
    if absent:
        what = f"has no column {', '.join(absent)}" if types else "does not exist"
        raise UnknownTable(
            f"the target table {target.schema}.{target.name} of {target.table.label} {what}",
            "Run `airflow-cdc snapshot` if it was never copied, or `airflow-cdc resnapshot` if it was changed since.",
        )
    return types
