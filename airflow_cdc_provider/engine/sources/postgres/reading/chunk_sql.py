"""Divides tables into chunks, which are ranges of the key, and composes the SQL about them.

The ranges cover the whole key space, from minus to plus infinity, so that every row that exists or will ever exist
falls into exactly one chunk. That holds only if a single authority orders the keys: a text key compares by the
collation of its column, ``numeric`` and ``timestamptz`` by their own rules. So bounds are taken from, ordered by and
compared in the database, as texts cast to the column's type and collation. No key is compared here, except integers,
whose order is certain.

The number of rows is not taken from ``reltuples``, which may be stale or missing: small tables are counted, large ones
sampled by block.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from psycopg2 import sql
from psycopg2.extensions import connection as Connection

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.table import Column, Table
from airflow_cdc_provider.engine.postgres.column_text import UNMODIFIED, text_of
from airflow_cdc_provider.engine.postgres.connection import condition, rows, scalar

# Up to this size all keys are ranked: exact chunks for the price of one index or table scan.
EXACT_BYTES = 256 << 20
# The size of a chunk is estimated from this many blocks. Rows of one block often have neighboring keys, so the number
# of blocks matters, not that of rows.
SAMPLED_BLOCKS_PER_CHUNK = 30
PROBED_BLOCKS = 300
# For a sample the database reads at most this many blocks and sorts at most about as many keys; if there are more
# keys, it takes only some of each block.
SAMPLED_ROWS = 300_000
_SEED = 20201
_INTEGERS = frozenset({20, 21, 23})  # int8, int2, int4
# Indexes of the operators in Column.operators.
_LESS, _EQUAL, _GREATER_OR_EQUAL = 0, 1, 2
_SYMBOLS = ("<", "=", ">=")


def plan(connection: Connection, table: Table, chunk_rows: int) -> tuple[Chunk, ...]:
    """Divide a table into chunks of about ``chunk_rows`` rows that together cover its whole key space.

    :param connection: to the source.
    :param chunk_rows: rows a chunk; exact for tables up to ``EXACT_BYTES``, an estimate for larger ones.
    :returns: at least one chunk, in the order of the key; exactly one for a table without a key or rows.
    :raises MissingPrivilege: when the role may not read the table.
    """
    bounds: list[tuple[str, ...]] = []
    if table.key and table.leaves:
        size = "SELECT pg_catalog.sum(pg_catalog.pg_relation_size(o)) FROM pg_catalog.unnest(%s::pg_catalog.oid[]) o"
        stored = int(scalar(connection, size, [[leaf.oid for leaf in table.leaves]]) or 0)
        if stored <= EXACT_BYTES:
            is_bound = sql.SQL("position > 1 AND (position - 1) % {} = 0").format(sql.Literal(chunk_rows))
            bounds = _bounds(connection, table, _leaves_query(table, _keys(table)), is_bound)
        else:
            bounds = _sampled_bounds(connection, table, chunk_rows, stored)
    ends = [None, *bounds, None]
    return tuple(Chunk(table.label, i, ends[i], ends[i + 1]) for i in range(len(ends) - 1))


def range_condition(table: Table, chunk: Chunk) -> sql.Composable:
    """Return the SQL condition that a row of ``table`` lies in ``chunk``; it can use the index of the key."""
    sides = ((_GREATER_OR_EQUAL, chunk.lower), (_LESS, chunk.upper))
    conditions = [_compared(table.key_columns, side, bound) for side, bound in sides if bound is not None]
    return sql.SQL(" AND ").join(conditions) if conditions else sql.SQL("true")


def keys_condition(table: Table, keys: Iterable[tuple[str, ...]]) -> sql.Composable:
    """Return the SQL condition that a row of ``table`` has one of some keys, by the source's notion of equality.

    :param keys: texts of the key columns.
    """
    texts = sorted(keys)
    if not texts:
        return sql.SQL("false")
    prefix = "k"  # for names that no column of the table has
    while any(column.name.startswith(prefix) for column in table.columns):
        prefix += "k"
    names = [sql.Identifier(f"{prefix}{i}") for i in range(len(table.key))]
    wanted = sql.SQL(", ").join(
        sql.SQL("{} AS {}").format(cast_key(name, column), name)
        for name, column in zip(names, table.key_columns, strict=True)
    )
    equal = sql.SQL(" AND ").join(
        _applied(column.operators[_EQUAL] if column.operators else "pg_catalog.=", sql.Identifier(column.name), name)
        for column, name in zip(table.key_columns, names, strict=True)
    )
    return sql.SQL("EXISTS (SELECT FROM (SELECT {} FROM ROWS FROM ({}) AS k ({})) AS k WHERE {})").format(
        wanted, _unnest(zip(*texts, strict=True)), sql.SQL(", ").join(names), equal
    )


def read_query(table: Table, chunk: Chunk | None) -> sql.Composable:
    """Return the SELECT of a chunk's rows, with every captured column as the text that the stream would send.

    Execute it without parameters: the rule's condition may contain percent signs.

    :param chunk: ``None`` for the whole table.
    """
    names = [sql.Identifier(column.name) for column in table.columns]
    texts = [sql.SQL("{} AS {}").format(*pair) for pair in zip(map(text_of, table.columns), names, strict=True)]
    return _chunk_query(table, chunk, texts)


def copy_query(table: Table, chunk: Chunk | None) -> sql.Composable:
    """Return the SELECT of a chunk's rows for COPY, which writes their values itself.

    :param chunk: ``None`` for the whole table.
    """
    return _chunk_query(table, chunk, [sql.Identifier(column.name) for column in table.columns])


def _chunk_query(table: Table, chunk: Chunk | None, columns: Sequence[sql.Composable]) -> sql.Composable:
    if not table.leaves:  # a partitioned table without partitions: the right columns, no rows
        nothing = sql.SQL("NULL::pg_catalog.text AS {}")
        nulls = sql.SQL(", ").join(nothing.format(sql.Identifier(column.name)) for column in table.columns)
        return sql.SQL("SELECT {} WHERE false").format(nulls)
    conditions = () if chunk is None else (range_condition(table, chunk),)
    return _leaves_query(table, sql.SQL(", ").join(columns), conditions)


def chunk_of(
    connection: Connection, table: Table, bounds: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]
) -> npt.NDArray[np.int64]:
    """Return the chunk of each key, as the database compares keys.

    :param connection: to the source; not used for a single integer column or without bounds.
    :param bounds: the lower bounds of the chunks from the second on, in their order.
    :param keys: per key column the texts of the keys, without nulls.
    :returns: indexes of chunks, in the order of the keys.
    """
    count = len(keys[0]) if keys else 0
    if not bounds or not count:
        return np.zeros(count, dtype=np.int64)
    if len(table.key) == 1 and table.key_columns[0].type_oid in _INTEGERS:
        lowers = np.array([int(lower) for (lower,) in bounds], dtype=np.int64)
        values = keys[0].cast(pa.int64()).to_numpy(zero_copy_only=False)
        found: npt.NDArray[np.int64] = np.searchsorted(lowers, values, side="right").astype(np.int64)
        return found
    # Keys and bounds are sorted together; a key's chunk is the number of bounds up to it, equal ones included.
    names = [sql.Identifier(f"k{i}") for i in range(len(table.key))]
    casts = (
        sql.SQL("{} AS {}").format(cast_key(name, column), name)
        for name, column in zip(names, table.key_columns, strict=True)
    )
    query = sql.SQL(
        """
        WITH given AS (
            SELECT {casts}, position, false AS bound FROM ROWS FROM ({keys}) WITH ORDINALITY AS k ({names}, position)
            UNION ALL
            SELECT {casts}, position, true FROM ROWS FROM ({bounds}) WITH ORDINALITY AS b ({names}, position)
        ), counted AS (
            SELECT position, bound, pg_catalog.count(*) FILTER (WHERE bound)
                OVER (ORDER BY {names}, bound DESC ROWS UNBOUNDED PRECEDING) AS chunk
            FROM given
        )
        SELECT pg_catalog.string_agg(chunk::pg_catalog.text, ',' ORDER BY position) FROM counted WHERE NOT bound
        """
    ).format(
        casts=sql.SQL(", ").join(casts),
        names=sql.SQL(", ").join(names),
        keys=_unnest(column.to_pylist() for column in keys),
        bounds=_unnest(zip(*bounds, strict=True)),
    )
    return np.array(scalar(connection, query).split(","), dtype=np.int64)


def _unnest(columns: Iterable[Iterable[str]]) -> sql.Composable:
    """Return ``unnest`` of one array literal a column: one input function parses it, instead of a million constants."""

    def literal(values: Iterable[str]) -> sql.Composable:
        text = "\0".join(values).replace("\\", "\\\\").replace('"', '\\"').replace("\0", '","')
        return sql.SQL("pg_catalog.unnest({}::pg_catalog.text[])").format(sql.Literal('{"' + text + '"}'))

    return sql.SQL(", ").join(literal(values) for values in columns)


def cast_key(value: sql.Composable, column: Column) -> sql.Composable:
    """Return a text cast to the column's type and collation, for comparisons at the source.

    The cast omits the type's modifier: a key that came after ``varchar(5)`` became ``varchar(10)`` must not be cut to
    five characters. A domain is replaced by its base type, since it may have become stricter than the existing keys.
    """
    if column.beneath is not None:
        return sql.SQL("{}::{}").format(value, sql.SQL(column.beneath))
    bare = column.type
    if column.builtin:
        bare = re.sub(r"\([^)]*\)", "", bare)
        base, brackets, rest = bare.partition("[")
        base = "interval" if base.startswith("interval") else UNMODIFIED.get(base, base)
        bare = base + brackets + rest
    cast = sql.SQL("{}::{}").format(value, sql.SQL(bare))
    return cast if column.collation is None else cast + sql.SQL(f" COLLATE {column.collation}")


def _compared(key: Sequence[Column], side: int, bound: Sequence[str]) -> sql.Composable:
    """Return the comparison of a key with a bound, by the operators that also sort the key.

    :param side: ``_LESS`` or ``_GREATER_OR_EQUAL``.
    """
    names = [sql.Identifier(column.name) for column in key]
    literals = [cast_key(sql.Literal(text), column) for text, column in zip(bound, key, strict=True)]
    if all(column.operators is None for column in key):
        comma = sql.SQL(", ")
        return sql.SQL(f"({{}}) {_SYMBOLS[side]} ({{}})").format(comma.join(names), comma.join(literals))
    # A row comparison takes all its operators from one schema, so here it has to be spelled out.
    operators = key[0].operators or tuple(f"pg_catalog.{symbol}" for symbol in _SYMBOLS)
    less, equal, wanted = (_applied(operators[n], names[0], literals[0]) for n in (_LESS, _EQUAL, side))
    if len(key) == 1:
        return wanted
    rest = _compared(key[1:], side, bound[1:])
    strictly = less if side == _LESS else sql.SQL("NOT ({} OR {})").format(less, equal)
    return sql.SQL("({} OR {} AND {})").format(strictly, equal, rest)


def _applied(operator: str, one: sql.Composable, other: sql.Composable) -> sql.Composable:
    """Apply an operator to two values; the name of its schema may contain braces."""
    return sql.SQL("{} OPERATOR({}) {}").format(one, sql.SQL(operator), other)


def _aliases(table: Table) -> list[Column]:
    """Return the key columns under aliases that no column of the table can collide with."""
    return [dataclasses.replace(column, name=f"k{i}") for i, column in enumerate(table.key_columns)]


def _keys(table: Table) -> sql.Composable:
    pairs = zip(table.key, _aliases(table), strict=True)
    return sql.SQL(", ").join(
        sql.SQL("{} AS {}").format(sql.Identifier(name), sql.Identifier(alias.name)) for name, alias in pairs
    )


def _leaves_query(
    table: Table, select: sql.Composable, conditions: Sequence[sql.Composable] = (), sample: str = ""
) -> sql.Composable:
    """Return a ``SELECT`` from each leaf with ``ONLY``: a plain name would include tables that inherit from it."""
    where = [condition(table.where)] if table.where is not None else []
    chosen = sql.SQL(" AND ").join([*where, *conditions] or [sql.SQL("true")])
    return sql.SQL(" UNION ALL ").join(
        sql.SQL("SELECT {} FROM ONLY {}").format(select, sql.Identifier(leaf.schema, leaf.name))
        + sql.SQL(f"{sample} WHERE ")
        + chosen
        for leaf in table.leaves
    )


def _bounds(
    connection: Connection, table: Table, keys: sql.Composable, is_bound: sql.Composable, ranked: str = ""
) -> list[tuple[str, ...]]:
    """Rank the keys in the database's order and return the texts of those that bound chunks.

    :param keys: query for the keys under their aliases.
    :param is_bound: condition on ``position``, a key's rank from 1 on.
    :param ranked: further columns next to ``position`` for the condition.
    """
    names = sql.SQL(", ").join(sql.Identifier(alias.name) for alias in _aliases(table))
    texts = sql.SQL(", ").join(text_of(alias) for alias in _aliases(table))
    # DISTINCT, because a key whose index has its own collation need not be unique under the column's collation.
    query = sql.SQL("SELECT {} FROM (SELECT DISTINCT {} FROM (SELECT {}, ").format(texts, names, names)
    query += sql.SQL(f"pg_catalog.row_number() OVER (ORDER BY {{}}) AS position{ranked} FROM (").format(names)
    query += keys + sql.SQL(") AS keys) AS ranked WHERE ") + is_bound
    # Qualified: a bare name would mean the output column, which is text.
    order = sql.SQL(", ").join(sql.Identifier("bounds", alias.name) for alias in _aliases(table))
    return rows(connection, query + sql.SQL(") AS bounds ORDER BY {}").format(order))


def _sampled_bounds(connection: Connection, table: Table, chunk_rows: int, stored: int) -> list[tuple[str, ...]]:
    """Return bounds at equal distances in a sample of blocks.

    :param stored: bytes of all leaves.
    """
    blocks = stored / int(scalar(connection, "SELECT pg_catalog.current_setting('block_size')"))

    def sample(share: float) -> str:
        return f" TABLESAMPLE SYSTEM ({100 * share:.9e}) REPEATABLE ({_SEED})"

    share = min(1.0, PROBED_BLOCKS / blocks)
    probe = _leaves_query(table, sql.SQL("1"), sample=sample(share))
    count = scalar(connection, sql.SQL("SELECT pg_catalog.count(*) FROM (") + probe + sql.SQL(") AS probe"))
    estimate = count / share
    wanted = max(PROBED_BLOCKS, min(SAMPLED_BLOCKS_PER_CHUNK * estimate / chunk_rows, SAMPLED_ROWS))
    share = min(1.0, wanted / blocks)
    one_in = 1 << max(0, math.ceil(math.log2(max(1.0, estimate * share / SAMPLED_ROWS))))
    thinned = sql.SQL(f"pg_catalog.hashtid(ctid) & {one_in - 1} = 0")
    keys = _leaves_query(table, _keys(table), (thinned,) if one_in > 1 else (), sample(share))
    chunks = f"greatest(1, pg_catalog.round(pg_catalog.count(*) OVER () * {one_in / share / chunk_rows:.9e}))::int8"
    ranked = f", {chunks} AS chunks, pg_catalog.count(*) OVER () AS total"
    is_bound = sql.SQL("position > 1 AND (position - 1) * chunks / total <> (position - 2) * chunks / total")
    return _bounds(connection, table, keys, is_bound, ranked)
