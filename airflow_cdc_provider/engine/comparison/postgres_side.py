"""One side of a comparison as a relation: a table on a Postgres server, or a query on it.

The texts of a row's values are joined as an array, because the text of an array distinguishes NULL, '' and quotes in
the same way on every server.

The key of a row without a key consists of all its columns, NULLs included. For such rows, the comparison counts the
copies that either side has.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg2
from psycopg2 import sql

from airflow_cdc_provider.engine.comparison.side import FoundRow, HashedRow, RowKey
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.postgres.column_text import text_of
from airflow_cdc_provider.engine.postgres.connection import Connection, condition, rows, scalar

Hash = Callable[[sql.Composable, int], sql.Composable]
"""Returns an expression for the 64-bit hash of a text and a seed."""

_KEY = sql.SQL("key::text")
_CONTENT = sql.SQL("content")
_FETCH = "FETCH 10000 FROM opened"
_PAGE = 1000  # keys in one query


@dataclass(frozen=True)
class PostgresSide:
    """A :class:`.Side` that is a table on a Postgres server, with the queries of the comparison.

    :param connection: an autocommit connection.
    :param locks: the tables that it reads, in the syntax of ``LOCK TABLE``.
    :param select: returns the query for its rows, or for those at some keys, with the columns ``key`` (``text[]``),
        ``content`` and ``version`` (``text``; null for the target).
    :param cells: ``text[]`` expression over these columns for the values that must be equal, small enough to be
        fetched.
    """

    connection: Connection
    locks: sql.Composable
    select: Callable[[Sequence[RowKey] | None], sql.Composable]
    cells: sql.Composable
    hashed: Hash

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Open a snapshot, see :meth:`.Side.reading`; a rewrite of the table would hide its rows, so it has to wait."""
        rows(self.connection, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            rows(self.connection, "SET LOCAL statement_timeout = 0")
            rows(self.connection, sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(self.locks))
            yield
        finally:
            with contextlib.suppress(psycopg2.Error):
                rows(self.connection, "ROLLBACK")

    def scan(self, buckets: int) -> Mapping[int, Sequence[Any]]:
        """Return row counts and sums of hashes by bucket, see :meth:`.Side.scan`."""
        # OFFSET 0 prevents that the content is computed again for each hash.
        query = sql.SQL("SELECT {}, count(*), sum({}), sum({}) FROM ({} OFFSET 0) r GROUP BY 1").format(
            self._bucket(buckets), self.hashed(_CONTENT, 0), self.hashed(_CONTENT, 1), self.select(None)
        )
        return {bucket: checksum for bucket, *checksum in rows(self.connection, query)}

    def open(self, buckets: int, opened: Sequence[int]) -> Iterable[HashedRow]:
        """Begin to read the rows of some buckets, see :meth:`.Side.open`."""
        query = sql.SQL(
            "SELECT {hash}, {key}, key, {cells}, version FROM ({rows}) r"
            ' WHERE {bucket} = ANY ({opened}::int8[]) ORDER BY {hash}, {key} COLLATE "C"'
        ).format(
            hash=self.hashed(_KEY, 0),
            key=_KEY,
            cells=self.cells,
            rows=self.select(None),
            bucket=self._bucket(buckets),
            opened=sql.Literal(list(opened)),
        )
        rows(self.connection, sql.SQL("DECLARE opened NO SCROLL CURSOR FOR {}").format(query))
        return self._fetched(rows(self.connection, _FETCH))

    def _fetched(self, batch: list[Any]) -> Iterator[HashedRow]:
        while batch:
            yield from batch
            batch = rows(self.connection, _FETCH)

    def read(self, keys: Sequence[RowKey]) -> Iterator[FoundRow]:
        """Yield the rows at some keys, see :meth:`.Side.read`."""
        for start in range(0, len(keys), _PAGE):
            query = sql.SQL("SELECT key, {}, version FROM ({}) r")
            yield from rows(self.connection, query.format(self.cells, self.select(keys[start : start + _PAGE])))

    def cancel(self) -> None:
        """Cancel the running query, see :meth:`.Side.cancel`."""
        with contextlib.suppress(psycopg2.Error):
            self.connection.cancel()

    def _bucket(self, buckets: int) -> sql.Composable:
        return sql.SQL("{} & {}").format(self.hashed(_KEY, 0), sql.Literal(buckets - 1))


def shared_hash(source: Connection, sink: Connection) -> Hash:
    """Return a hash function that both servers compute with the same result."""
    encodings = {scalar(connection, "SHOW server_encoding") for connection in (source, sink)}
    # The hash is computed over bytes, which differ for the same text in different encodings.
    text = "{}" if len(encodings) == 1 else "encode(convert_to({}, 'UTF8'), 'hex')"
    template = sql.SQL(f'hashtextextended({text} COLLATE "C", {{}})')
    return lambda value, seed: template.format(value, sql.Literal(seed))


def shipped_hash(source: Connection) -> Hash:
    """Return a hash function that does not need Postgres: the halves of the MD5 sum of the text in UTF-8."""
    encoding = scalar(source, "SHOW server_encoding")
    text = "{}" if encoding == "UTF8" else "convert_to({}, 'UTF8')"
    template = sql.SQL(f"('x' || substr(md5({text}), {{}}, 16))::bit(64)::int8")
    return lambda value, seed: template.format(value, sql.Literal(1 + 16 * seed))


def source_side(
    connection: Connection, table: Table, content: sql.Composable, cells: sql.Composable, hashed: Hash
) -> PostgresSide:
    """Return the side that has the rows captured by the table's condition, read from its leaves.

    :param content: expression over the table's columns, see :mod:`.side`.
    :param cells: ``text[]`` expression over ``content``.
    """
    leaves = [(leaf.schema, leaf.name) for leaf in table.leaves] or [(table.schema, table.name)]
    only = [sql.SQL("ONLY {}").format(sql.Identifier(*leaf)) for leaf in leaves]
    types = {column.name: column.beneath or column.type for column in table.columns}
    where = [condition(table.where)] if table.where is not None else []
    version = "ROW(tableoid, ctid, xmin)::text"

    def select(keys: Sequence[RowKey] | None) -> sql.Composable:
        return sql.SQL(" UNION ALL ").join(rows_of(table, leaf, content, version, where, types, keys) for leaf in only)

    return PostgresSide(connection, listed(only), select, cells, hashed)


def whole_content(table: Table, hashed: Hash) -> tuple[sql.Composable, sql.Composable]:
    """Return content and cells of rows that are compared as a whole: all columns, and two hashes of them."""
    content = sql.SQL("{}::text").format(text_array(text_of(column) for column in table.columns))
    return content, text_array(sql.SQL("{}::text").format(hashed(_CONTENT, seed)) for seed in (0, 1))


def content_of_cells(table: Table, hashed: Hash) -> tuple[sql.Composable, sql.Composable]:
    """Return content and cells of rows that are compared column by column: one hash for each column."""
    hashes = (sql.SQL("{}::text").format(hashed(text_of(column), 0)) for column in table.columns)
    return sql.SQL("{}::text").format(text_array(hashes)), sql.SQL("content::text[]")


def rows_of(
    table: Table,
    relation: sql.Composable,
    content: sql.Composable,
    version: str,
    where: Sequence[sql.Composable],
    types: Mapping[str, str],
    keys: Sequence[RowKey] | None,
) -> sql.Composable:
    """Return the query for the rows of a table, or for those at some keys.

    :param version: expression for a row's version.
    :param where: conditions on the rows.
    :param types: the types of the columns in ``relation``, by name.
    """
    conditions = [sql.SQL("true"), *where]
    key = text_array(text_of(column) for column in table.key_columns or table.columns)
    if keys is not None:
        conditions.append(_at(table, types, key, keys))
    return sql.SQL("SELECT {} AS key, {} AS content, {} AS version FROM {} WHERE {}").format(
        key,
        content,
        sql.SQL(version),
        relation,
        sql.SQL(" AND ").join(conditions),
    )


def _at(table: Table, types: Mapping[str, str], key: sql.Composable, keys: Sequence[RowKey]) -> sql.Composable:
    """Return the condition that a row has one of the given keys.

    The keys are cast to the types of the columns, so that their indexes are used, if all servers find the equality
    operators of the types.
    """
    width = range(len(table.key or table.columns))
    if not table.key or any(column.operators for column in table.key_columns):
        return among(key, text_array(sql.SQL(f"texts ->> {place}") for place in width), keys)
    texts = [sql.SQL(f"(texts ->> {place})::{types[name]}") for place, name in enumerate(table.key)]
    return among(listed(map(sql.Identifier, table.key)), listed(texts), keys)


def among(key: sql.Composable, wanted: sql.Composable, keys: Sequence[RowKey]) -> sql.Composable:
    """Return the condition that an expression is one of some keys, passed as one literal: many would be far slower."""
    return sql.SQL("({}) IN (SELECT {} FROM jsonb_array_elements({}::jsonb) AS wanted (texts))").format(
        key, wanted, sql.Literal(json.dumps(keys, ensure_ascii=False))
    )


def text_array(texts: Iterable[sql.Composable]) -> sql.Composable:
    """Return an array of texts with one collation, because mixed collations of columns leave the array's undefined."""
    return sql.SQL('(ARRAY[{}]::text[] COLLATE "C")').format(listed(texts))


def listed(parts: Iterable[sql.Composable]) -> sql.Composable:
    return sql.SQL(", ").join(parts)
