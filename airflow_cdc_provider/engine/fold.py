"""The two sides of a comparison as relations: a table, its mirror, and the current rows of a changelog.

A *relation* gives for each row its key as texts, its content as a text that is to be equal on both sides, and a
version that changes whenever the row is written. Every value is text as its type's output function writes it, so the
target's column may be ``text`` where the target lacks the source's type. Arrays join the texts because the text of
an array keeps NULL, '' and quotes apart, on every server in the same way.

A changelog is folded to the row that each key has now. A row's *life* at a key begins with a snapshot row, an insert
or an update that moved it there; a later beginning, a delete, a move elsewhere or a truncate ends it. Values come
from the last event of that life that sent them: an update leaves out TOASTed values it did not change, and those of
an earlier life belong to another row. What no event of the life sent, for instance because the row was moved, is
unknown and left out of the comparison.

A row without a key has all its columns for a key, NULLs included, so that what is compared is how many copies of it
either side holds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import psycopg2
from psycopg2 import sql

from airflow_cdc_provider.engine.catalog import Table
from airflow_cdc_provider.engine.chunks import text_of
from airflow_cdc_provider.engine.connection import Connection, condition, rows, scalar
from airflow_cdc_provider.engine.errors import UnknownTable

UNKNOWN = "?"  # a cell of the target that equals every value

Key = tuple[str | None, ...]
Hash = Callable[[sql.Composable, int], sql.Composable]

_BUCKET_BYTES = 64 << 10
_KEY = sql.SQL("key::text")
_CONTENT = sql.SQL("content")
_LAST = sql.SQL("9223372036854775807")  # rows without a sequence number sort after those that have one
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
# The greatest pair of event number and hash has the hash that was sent last.
_CELL = sql.SQL("CASE WHEN {last} IS NULL THEN {unknown} ELSE ({last})[2]::text END")
_SENT_LAST = sql.SQL("max(ARRAY[n, {hash}]) FILTER (WHERE written AND {name} <> ALL (unchanged))")


@dataclass(frozen=True)
class Relation:
    """One side of a table, and the queries that a comparison asks of it.

    :param locks: the tables it reads, as ``LOCK TABLE`` takes them.
    :param select: makes the query for its rows, or for those at some keys: ``key`` (``text[]``), ``content`` and
        ``version`` (``text``; null for the target).
    :param cells: expression of ``text[]`` over these: what must be equal, small enough to be fetched.
    """

    locks: sql.Composable
    select: Callable[[Sequence[Key] | None], sql.Composable]
    cells: sql.Composable
    hashed: Hash

    @contextlib.contextmanager
    def reading(self, connection: Connection) -> Iterator[None]:
        """One snapshot of every row: a policy that hides some fails, a rewrite that would hide all has to wait."""
        rows(connection, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            rows(connection, "SET LOCAL row_security = off")
            rows(connection, "SET LOCAL statement_timeout = 0")
            rows(connection, sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(self.locks))
            yield
        finally:
            with contextlib.suppress(psycopg2.Error):
                rows(connection, "ROLLBACK")

    def scan(self, buckets: int) -> sql.Composable:
        """Query each bucket's number, rows and two sums of hashes."""
        # OFFSET 0 keeps the content from being computed anew for each hash.
        return sql.SQL("SELECT {}, count(*), sum({}), sum({}) FROM ({} OFFSET 0) r GROUP BY 1").format(
            self._bucket(buckets), self.hashed(_CONTENT, 0), self.hashed(_CONTENT, 1), self.select(None)
        )

    def open(self, buckets: int, opened: Sequence[int]) -> sql.Composable:
        """Query hash and text of the key, key, cells and version in some buckets.

        They come in an order that both sides have: by the hash, then by code points.
        """
        return sql.SQL(
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

    def read(self, keys: Sequence[Key]) -> sql.Composable:
        """Query key, cells and version of the rows at some keys."""
        return sql.SQL("SELECT key, {}, version FROM ({}) r").format(self.cells, self.select(keys))

    def _bucket(self, buckets: int) -> sql.Composable:
        return sql.SQL("{} & {}").format(self.hashed(_KEY, 0), sql.Literal(buckets - 1))


@dataclass(frozen=True)
class Sides:
    """A table and what it is compared with."""

    table: Table
    source: Relation
    target: Relation

    def bucket_count(self, source: Connection) -> int:
        """Return a power of two: some hundred rows a bucket, or more in very large tables."""
        size = "SELECT coalesce(sum(pg_relation_size(leaf)), 0)::int8 FROM unnest(%s::oid[]) AS leaf"
        pieces = int(scalar(source, size, ([leaf.oid for leaf in self.table.leaves],))) // _BUCKET_BYTES
        return 1 << min(max(pieces.bit_length(), 6), 13)


def mirror_sides(source: Connection, sink: Connection, table: Table, target: tuple[str, str]) -> Sides:
    """Return a table and its mirror; a row's cells are two hashes of all its columns.

    :raises UnknownTable: when the target or one of its columns does not exist.
    """
    hashed = _hash(source, sink)
    types = _target_types(sink, table, target, [])
    content = sql.SQL("{}::text").format(_array(text_of(column) for column in table.columns))
    copy = sql.Identifier(*target)
    cells = _array(sql.SQL("{}::text").format(hashed(_CONTENT, seed)) for seed in (0, 1))

    def select(keys: Sequence[Key] | None) -> sql.Composable:
        return _rows(table, copy, content, "NULL::text", [], types, keys)

    return Sides(table, _source(table, content, cells, hashed), Relation(copy, select, cells, hashed))


def changelog_sides(source: Connection, sink: Connection, table: Table, target: tuple[str, str]) -> Sides:
    """Return a table and its folded changelog; a row's cells are the hashes of its columns.

    :raises UnknownTable: when the target or one of its columns does not exist.
    """
    hashed = _hash(source, sink)
    _target_types(sink, table, target, ["_op", "_commit_lsn", "_seq", "_before", "_unchanged"])
    log = sql.Identifier(*target)
    hashes = [hashed(text_of(column), 0) for column in table.columns]
    names = [sql.Identifier(f"c{i}") for i in range(len(hashes))]
    sent = [
        _SENT_LAST.format(hash=name, name=sql.Literal(column.name))
        for name, column in zip(names, table.columns, strict=True)
    ]
    key = _array(text_of(column) for column in table.key_columns)
    old_key = _array(
        sql.SQL("coalesce(_before ->> {}, {})").format(sql.Literal(column.name), text_of(column))
        for column in table.key_columns
    )
    wanted = _array(sql.SQL(f"texts ->> {place}") for place in range(len(table.key)))

    def select(keys: Sequence[Key] | None) -> sql.Composable:
        written, erased = (sql.SQL("true") if keys is None else _among(k, wanted, keys) for k in (key, old_key))
        fold = _FOLD.format(
            target=log,
            key=key,
            old_key=old_key,
            alive=_ALIVE.format(last=_LAST, target=log),
            written=written,
            erased=erased,
            hashes=_list(sql.SQL("{} AS {}").format(hash_, name) for hash_, name in zip(hashes, names, strict=True)),
            nulls=_list(sql.SQL("NULL") for _ in hashes),
            cells=_list(_CELL.format(last=last, unknown=sql.Literal(UNKNOWN)) for last in sent),
        )
        return sql.SQL("({})").format(fold)

    content = sql.SQL("{}::text").format(_array(sql.SQL("{}::text").format(hash_) for hash_ in hashes))
    cells = sql.SQL("content::text[]")
    return Sides(table, _source(table, content, cells, hashed), Relation(log, select, cells, hashed))


def _hash(source: Connection, sink: Connection) -> Hash:
    """What makes, of a text and a seed, a 64-bit hash that both servers compute alike."""
    encodings = {scalar(connection, "SHOW server_encoding") for connection in (source, sink)}
    # The hash is one of bytes, which are only the same text in the same encoding.
    text = "{}" if len(encodings) == 1 else "encode(convert_to({}, 'UTF8'), 'hex')"
    template = sql.SQL(f'hashtextextended({text} COLLATE "C", {{}})')
    return lambda value, seed: template.format(value, sql.Literal(seed))


def _source(table: Table, content: sql.Composable, cells: sql.Composable, hashed: Hash) -> Relation:
    """The rows that the table's condition captures, read from its leaves."""
    leaves = [(leaf.schema, leaf.name) for leaf in table.leaves] or [(table.schema, table.name)]
    only = [sql.SQL("ONLY {}").format(sql.Identifier(*leaf)) for leaf in leaves]
    types = {column.name: column.beneath or column.type for column in table.columns}
    where = [condition(table.where)] if table.where is not None else []
    version = "ROW(tableoid, ctid, xmin)::text"

    def select(keys: Sequence[Key] | None) -> sql.Composable:
        return sql.SQL(" UNION ALL ").join(_rows(table, leaf, content, version, where, types, keys) for leaf in only)

    return Relation(_list(only), select, cells, hashed)


def _rows(
    table: Table,
    relation: sql.Composable,
    content: sql.Composable,
    version: str,
    where: Sequence[sql.Composable],
    types: Mapping[str, str],
    keys: Sequence[Key] | None,
) -> sql.Composable:
    conditions = [sql.SQL("true"), *where]
    key = _array(text_of(column) for column in table.key_columns or table.columns)
    if keys is not None:
        conditions.append(_at(table, types, key, keys))
    return sql.SQL("SELECT {} AS key, {} AS content, {} AS version FROM {} WHERE {}").format(
        key,
        content,
        sql.SQL(version),
        relation,
        sql.SQL(" AND ").join(conditions),
    )


def _at(table: Table, types: Mapping[str, str], key: sql.Composable, keys: Sequence[Key]) -> sql.Composable:
    """The condition that a row has one of some keys.

    Cast to the columns' types, so that their indexes serve, where all servers find the types' equality.
    """
    width = range(len(table.key or table.columns))
    if not table.key or any(column.operators for column in table.key_columns):
        return _among(key, _array(sql.SQL(f"texts ->> {place}") for place in width), keys)
    texts = [sql.SQL(f"(texts ->> {place})::{types[name]}") for place, name in enumerate(table.key)]
    return _among(_list(map(sql.Identifier, table.key)), _list(texts), keys)


def _target_types(sink: Connection, table: Table, target: tuple[str, str], more: Sequence[str]) -> dict[str, str]:
    """The types of the target's columns, of which the table's and ``more`` must exist."""
    types = dict(
        rows(
            sink,
            "SELECT a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_attribute a"
            " JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped",
            target,
        )
    )
    absent = [name for name in (*(column.name for column in table.columns), *more) if name not in types]
    if absent:
        what = f"has no column {', '.join(absent)}" if types else "does not exist"
        raise UnknownTable(
            f"the target table {'.'.join(target)} of {table.label} {what}",
            "Run `airflow-cdc snapshot` if it was never copied, `airflow-cdc resnapshot` if it was changed since.",
        )
    return types


def _among(key: sql.Composable, wanted: sql.Composable, keys: Sequence[Key]) -> sql.Composable:
    """A condition; the keys travel as one literal, which is parsed far faster than a thousand."""
    return sql.SQL("({}) IN (SELECT {} FROM jsonb_array_elements({}::jsonb) AS wanted (texts))").format(
        key, wanted, sql.Literal(json.dumps(keys, ensure_ascii=False))
    )


def _array(texts: Iterable[sql.Composable]) -> sql.Composable:
    """Under one collation, because columns of different ones leave the array's undecided."""
    return sql.SQL('(ARRAY[{}]::text[] COLLATE "C")').format(_list(texts))


def _list(parts: Iterable[sql.Composable]) -> sql.Composable:
    return sql.SQL(", ").join(parts)
