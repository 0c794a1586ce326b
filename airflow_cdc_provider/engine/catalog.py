"""Which tables a pipeline captures, and what is known of them: columns, key, replica identity, leaves.

The rules of the pipeline file are resolved against the source's catalog once, before anything is touched. What
cannot be captured is refused here, with the SQL that would change it, because Postgres itself says so too late: a
published table whose updates cannot be described makes the *source's* UPDATE and DELETE statements fail. That
happens to a table without replica identity, to a column list or row filter that does not fit the identity, and on
Postgres 18 to an identity with generated columns.

Rows live in *leaves*: an ordinary table is its own leaf, a partitioned one has those of its partition tree. Leaves
are what is published and read, so it is their replica identity that counts.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import psycopg2
from psycopg2 import sql
from psycopg2.extensions import connection as Connection

from airflow_cdc_provider.engine.config import TableRule
from airflow_cdc_provider.engine.connection import rows
from airflow_cdc_provider.engine.errors import CdcError, ConfigError, UncapturableTable, UnknownTable

log = logging.getLogger(__name__)

Mode = Literal["mirror", "changelog"]

_TOKEN = re.compile(r'("(?:[^"]|"")*")|([^"])', re.DOTALL)
_NOT_TABLES = {"v": "view", "m": "materialized view", "f": "foreign table"}

_RELATIONS = """
SELECT c.oid::int8, n.nspname, c.relname, c.relkind, c.relpersistence, c.relispartition, c.relreplident,
       c.relnatts, c.relfilenode::int8
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f')
ORDER BY n.nspname, c.relname
"""
_LEAVES = """
SELECT t.root, p.relid::pg_catalog.oid::int8
FROM pg_catalog.unnest(%s::int8[]) AS t (root)
CROSS JOIN LATERAL pg_catalog.pg_partition_tree(t.root::pg_catalog.oid::pg_catalog.regclass) AS p
WHERE p.isleaf ORDER BY 1, 2
"""
# Sorting finds a type's operators by itself, a comparison only on the search path, which is pg_catalog's here.
_COLUMNS = """
WITH RECURSIVE domains AS (
    SELECT oid AS type, typbasetype AS base FROM pg_catalog.pg_type WHERE typtype = 'd'
    UNION ALL
    SELECT d.type, t.typbasetype FROM domains d JOIN pg_catalog.pg_type t ON t.oid = d.base AND t.typtype = 'd'
), btree AS (
    SELECT c.opcintype AS type,
           pg_catalog.array_agg(pg_catalog.quote_ident(n.nspname) || '.' || p.oprname ORDER BY a.amopstrategy) AS names
    FROM pg_catalog.pg_opclass c
    JOIN pg_catalog.pg_am m ON m.oid = c.opcmethod AND m.amname = 'btree'
    JOIN pg_catalog.pg_amop a ON a.amopfamily = c.opcfamily AND a.amopstrategy IN (1, 3, 4)
        AND a.amoplefttype = c.opcintype AND a.amoprighttype = c.opcintype
    JOIN pg_catalog.pg_operator p ON p.oid = a.amopopr
    JOIN pg_catalog.pg_namespace n ON n.oid = p.oprnamespace
    WHERE c.opcdefault AND n.nspname <> 'pg_catalog'
    GROUP BY c.opcintype
), missing AS (
    SELECT l.root, p.attname, pg_catalog.array_agg(DISTINCT (p.attmissingval::pg_catalog.text::pg_catalog.text[])[1])
        AS found
    FROM ROWS FROM (pg_catalog.unnest(%s::int8[]), pg_catalog.unnest(%s::int8[])) AS l (root, leaf)
    JOIN pg_catalog.pg_attribute p ON p.attrelid = l.leaf::pg_catalog.oid AND p.attnum > 0 AND NOT p.attisdropped
    GROUP BY l.root, p.attname
)
SELECT a.attrelid::int8, a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), a.atttypid::int8,
       CASE WHEN a.attcollation <> t.typcollation
            THEN pg_catalog.quote_ident(cn.nspname) || '.' || pg_catalog.quote_ident(c.collname) END,
       a.attnotnull,
       t.oid < 16384 AND t.typnamespace = 'pg_catalog'::pg_catalog.regnamespace AND t.typtype <> 'd'
           AND (t.typelem = 0 OR e.oid < 16384 AND e.typnamespace = t.typnamespace),
       o.names, a.attnum, a.xmin::text, m.found[1], coalesce(pg_catalog.cardinality(m.found), 0) < 2, a.atttypmod,
       a.attgenerated <> ''
FROM pg_catalog.pg_attribute a
JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
LEFT JOIN missing m ON m.root = a.attrelid::int8 AND m.attname = a.attname
LEFT JOIN btree o ON o.type = t.oid OR o.type IN (SELECT d.base FROM domains d WHERE d.type = t.oid)
LEFT JOIN pg_catalog.pg_type e ON e.oid = t.typelem
LEFT JOIN pg_catalog.pg_collation c ON c.oid = a.attcollation
LEFT JOIN pg_catalog.pg_namespace cn ON cn.oid = c.collnamespace
WHERE a.attrelid = ANY (%s::pg_catalog.oid[]) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""
# A deferrable index is no replica identity, and identifies no row while a transaction swaps two keys.
_KEYS = """
SELECT i.indrelid::int8, i.indisprimary, i.indisreplident,
       ARRAY(SELECT a.attname::text FROM pg_catalog.unnest(i.indkey) WITH ORDINALITY AS u (attnum, position)
             JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = u.attnum
             WHERE u.position <= i.indnkeyatts ORDER BY u.position)
FROM pg_catalog.pg_index i
WHERE i.indrelid = ANY (%s::pg_catalog.oid[]) AND i.indisvalid AND i.indisunique AND i.indimmediate
  AND (i.indisprimary OR i.indisreplident)
"""


@dataclass(frozen=True)
class Column:
    """A captured column.

    :param type: its type as SQL with modifier, schema-qualified unless it lives in ``pg_catalog``.
    :param collation: its collation, quoted and qualified, where that is not the type's own; else ``None``.
    :param builtin: whether the type, or the element of an array, comes with Postgres; a domain never does.
    :param operators: the source's operators for less, equal, and greater or equal, as ``OPERATOR()`` takes them;
        ``None`` where they are those of ``pg_catalog``. ``citext`` compared without them is compared as ``text``,
        and ``hstore`` not at all.
    :param attnum: its number in the table, which outlives renaming and is never used again.
    :param xmin: the transaction that last changed its entry in the catalog.
    :param missing: text of the value that rows from before the column have, ``None`` for null.
    :param uniform: whether they have it in all leaves.
    :param type_modifier: what ``type`` has in parentheses, as a number; -1 without.
    """

    name: str
    type: str
    type_oid: int
    collation: str | None
    not_null: bool
    builtin: bool
    operators: tuple[str, ...] | None = None
    attnum: int = field(default=0, compare=False)
    xmin: str = field(default="", compare=False)
    missing: str | None = field(default=None, compare=False)
    uniform: bool = field(default=True, compare=False)
    type_modifier: int = field(default=-1, compare=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Column:
        """Read a column from JSON values."""
        operators = values.get("operators")
        return cls(**{**values, "operators": tuple(operators) if operators else None})


@dataclass(frozen=True)
class Leaf:
    """A table that stores rows: the captured table itself, or a leaf of its partition tree.

    :param filenode: the file that its rows are in; another one means that it was rewritten or truncated.
    """

    oid: int
    schema: str
    name: str
    filenode: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Table:
    """A captured table.

    :param columns: the captured columns in the order of the table; generated columns are left out, stored ones
        too: Postgres before 18 does not stream them, and the target can compute them itself.
    :param key: names of the key columns in the order of the key's index: the replica identity's columns, under
        FULL those of the primary key; empty when there are none.
    :param replica_identity: that of the leaves: ``d`` primary key, ``i`` an index, ``f`` full (``n``, nothing, is
        never captured).
    :param where: the rule's condition on the rows, ``None`` for all.
    :param leaves: in the order of their oids.
    :param kind: ``r`` an ordinary table, ``p`` a partitioned one.
    :param column_list: whether the rule names the columns, so that the publication has to as well.
    :param attnums: the highest number that a column of the table has had, also one that is gone.
    """

    oid: int
    schema: str
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    replica_identity: str
    where: str | None
    leaves: tuple[Leaf, ...]
    kind: str
    column_list: bool = False
    attnums: int = field(default=0, compare=False)

    @property
    def label(self) -> str:
        """``schema.name`` without quotes: the table's identity in messages and records."""
        return f"{self.schema}.{self.name}"

    @property
    def key_columns(self) -> tuple[Column, ...]:
        """The columns of :attr:`key`."""
        columns = {column.name: column for column in self.columns}
        return tuple(columns[name] for name in self.key)

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON values; :meth:`from_dict` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Table:
        """Read what :meth:`to_dict` wrote."""
        return cls(
            **{
                **values,
                "columns": tuple(map(Column.from_dict, values["columns"])),
                "key": tuple(values["key"]),
                "leaves": tuple(Leaf(**leaf) for leaf in values["leaves"]),
            }
        )


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True)
class _Relation:
    oid: int
    schema: str
    name: str
    kind: str
    persistence: str
    is_partition: bool
    identity: str
    attnums: int
    filenode: int

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def quoted(self) -> str:
        return f"{_quote(self.schema)}.{_quote(self.name)}"

    @property
    def pattern(self) -> str:
        """How the pipeline file has to name it."""
        return ".".join(_quote(p) if re.search(r'[.*?["]', p) else p for p in (self.schema, self.name))

    @property
    def is_system(self) -> bool:
        return self.schema.startswith("pg_") or self.schema == "information_schema"

    @property
    def is_candidate(self) -> bool:
        """Whether a glob may take it."""
        ours = self.schema == "airflow_cdc"
        return self.kind in "rp" and not self.is_partition and not self.is_system and not ours


@dataclass(frozen=True)
class _Pattern:
    """A rule's pattern as two shell globs; ``is_plain`` when nothing in it is special."""

    schema: str
    name: str
    is_plain: bool

    @classmethod
    def parse(cls, pattern: str) -> _Pattern:
        parts, is_plain = [""], True
        for quoted, char in _TOKEN.findall(pattern):
            if char == "." and len(parts) == 1:
                parts.append("")
            elif char:
                parts[-1] += char
                is_plain = is_plain and char not in "*?["
            else:
                parts[-1] += re.sub(r"([*?[])", r"[\1]", quoted[1:-1].replace('""', '"'))
        if len(parts) != 2 or not all(parts) or _TOKEN.sub("", pattern):
            raise ConfigError(
                f"source.tables: {pattern!r} is not a table", 'Write `schema.table`; quote as in `public."a.b"`.'
            )
        return cls(parts[0], parts[1], is_plain)

    def matches(self, relation: _Relation) -> bool:
        return fnmatchcase(relation.schema, self.schema) and fnmatchcase(relation.name, self.name)


@dataclass(frozen=True)
class _Catalog:
    """What the source's catalog says of the matched relations."""

    version: int
    relations: Mapping[int, _Relation]
    leaves: Mapping[int, tuple[_Relation, ...]]
    columns: Mapping[int, tuple[tuple[Column, bool], ...]]  # with: is it generated
    primary: Mapping[int, tuple[str, ...]]
    identity_index: Mapping[int, tuple[str, ...]]

    @classmethod
    def load(cls, connection: Connection, relations: Sequence[_Relation], matched: Sequence[_Relation]) -> _Catalog:
        by_oid = {relation.oid: relation for relation in relations}
        leaves: dict[int, tuple[_Relation, ...]] = {r.oid: (r,) if r.kind == "r" else () for r in matched}
        for root, leaf in rows(connection, _LEAVES, [[r.oid for r in matched if r.kind == "p"]]):
            if leaf in by_oid:  # the tree is not that of the snapshot: a new leaf is seen by the next look
                leaves[root] += (by_oid[leaf],)
        oids = list(leaves) + [leaf.oid for group in leaves.values() for leaf in group]
        columns: dict[int, tuple[tuple[Column, bool], ...]] = defaultdict(tuple)
        names = [field.name for field in dataclasses.fields(Column)]
        stored = [(root, leaf.oid) for root, group in leaves.items() for leaf in group]
        parameters = [[root for root, _ in stored], [leaf for _, leaf in stored], list(leaves)]
        for oid, *values, generated in rows(connection, _COLUMNS, parameters):
            columns[oid] += ((Column.from_dict(dict(zip(names, values, strict=True))), generated),)
        primary: dict[int, tuple[str, ...]] = {}
        identity_index: dict[int, tuple[str, ...]] = {}
        for oid, is_primary, is_identity, names in rows(connection, _KEYS, [oids]):
            if is_primary:
                primary[oid] = tuple(names)
            if is_identity:
                identity_index[oid] = tuple(names)
        return cls(connection.info.server_version, by_oid, leaves, columns, primary, identity_index)

    def key(self, relation: _Relation, identity: str) -> tuple[str, ...]:
        """The columns that identify a row of ``relation`` under ``identity``; empty when there are none."""
        return (self.identity_index if identity == "i" else self.primary).get(relation.oid, ())


@dataclass(frozen=True)
class Found:
    """What the source's catalog has for the rules of a pipeline.

    :param labels: the label of every relation of the source, by oid.
    :param tables: what can be captured, by label, in the order of the rules and then of the names.
    :param errors: by label, why a table that a rule names cannot be captured.
    :param fatal: errors, some of them of tables, with which the rules cannot stand.
    """

    labels: Mapping[int, str]
    tables: Mapping[str, Table]
    errors: Mapping[str, CdcError]
    fatal: tuple[CdcError, ...]


def resolve(connection: Connection, rules: tuple[TableRule, ...], mode: Mode) -> tuple[Table, ...]:
    """Find the tables that the rules of a pipeline name, in the order of the rules and then of the names.

    :param connection: to the source, with the session settings of :mod:`connection`.
    :param mode: of the sink; either takes a table without a key if its identity is FULL.
    :raises UnknownTable: when a rule matches no table.
    :raises UncapturableTable: when a table named by a plain rule, or every table a glob matches, cannot be captured.
    :raises ConfigError: when a rule's pattern, columns or condition do not fit.
    """
    found = find(connection, rules, mode)
    for error in found.fatal:
        raise error
    for error in found.errors.values():
        log.warning("Skipped: %s. %s", error.message, error.solution)
    _refuse_overlaps(tuple(found.tables.values()))
    return tuple(found.tables.values())


def find(connection: Connection, rules: tuple[TableRule, ...], mode: Mode) -> Found:
    """As :func:`resolve`, but what cannot be captured is told and not raised, so that other tables can be looked at.

    :raises ConfigError: when a rule's pattern is none.
    """
    patterns = [_Pattern.parse(rule.pattern) for rule in rules]
    with _one_snapshot(connection):
        relations = [_Relation(*values) for values in rows(connection, _RELATIONS)]
        matches = [[r for r in relations if p.matches(r) and (p.is_plain or r.is_candidate)] for p in patterns]
        owner: dict[int, int] = {}  # which rule a relation belongs to: the first plain one, else the first
        for index in sorted(range(len(rules)), key=lambda i: not patterns[i].is_plain):
            for relation in matches[index]:
                owner.setdefault(relation.oid, index)
        catalog = _Catalog.load(connection, relations, [r for r in relations if r.oid in owner])

    fatal: list[CdcError] = [
        _unknown(rule, pattern, relations)
        for rule, pattern, matched in zip(rules, patterns, matches, strict=True)
        if not matched
    ]
    tables: dict[str, Table] = {}
    errors: dict[str, CdcError] = {}
    for index, rule in enumerate(rules):
        for relation in (r for r in matches[index] if owner[r.oid] == index):
            try:
                if relation.label in tables:
                    raise ConfigError(
                        f"source.tables: two tables are called {relation.label}, since a schema or a table has a dot"
                        " in its name",
                        "Capture one of them in another pipeline.",
                    )
                tables[relation.label] = _table(connection, catalog, relation, rule, mode)
            except ConfigError as e:
                errors[relation.label] = e
                if patterns[index].is_plain or not isinstance(e, UncapturableTable):
                    fatal.append(e)
    for matched in matches:
        if matched and all(relation.label in errors for relation in matched):
            fatal.append(errors[matched[0].label])
    return Found({relation.oid: relation.label for relation in relations}, tables, errors, tuple(fatal))


@contextmanager
def _one_snapshot(connection: Connection) -> Iterator[None]:
    """Columns and files are those of one moment: a rewrite between them would not be told from none."""
    rows(connection, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        yield
    finally:
        rows(connection, "COMMIT")


def _unknown(rule: TableRule, pattern: _Pattern, relations: Sequence[_Relation]) -> UnknownTable:
    candidates = {r.label: r.pattern for r in relations if r.is_candidate}
    similar = difflib.get_close_matches(rule.pattern.replace('"', ""), candidates, n=3)
    hint = f" Similar: {', '.join(candidates[label] for label in similar)}." if similar else ""
    return UnknownTable(
        f"table {rule.pattern} does not exist" if pattern.is_plain else f"no table matches {rule.pattern}",
        f"Correct it in source.tables; names are matched exactly as they are stored.{hint}",
    )


def _table(connection: Connection, catalog: _Catalog, relation: _Relation, rule: TableRule, mode: Mode) -> Table:
    leaves = catalog.leaves.get(relation.oid, ())
    for part in (relation, *leaves):
        _refuse_kind(part)
    identity, key = _identity(catalog, relation)
    table = Table(
        oid=relation.oid,
        schema=relation.schema,
        name=relation.name,
        columns=_columns(catalog, relation, rule, identity, key),
        key=key,
        replica_identity=identity,
        where=rule.where,
        leaves=tuple(Leaf(leaf.oid, leaf.schema, leaf.name, leaf.filenode) for leaf in leaves),
        kind=relation.kind,
        column_list=rule.columns is not None,
        attnums=relation.attnums,
    )
    if table.where is not None:
        _check_where(connection, table, table.where)
    return table


def _refuse_kind(relation: _Relation) -> None:
    remove = "Remove it from source.tables, or name the tables that its rows come from."
    if relation.kind in _NOT_TABLES:
        raise UncapturableTable(f"{relation.label} is a {_NOT_TABLES[relation.kind]}", remove)
    if relation.is_system or relation.persistence == "t":
        raise UncapturableTable(f"{relation.label} is a system or temporary table", remove)
    if relation.persistence == "u":
        raise UncapturableTable(
            f"{relation.label} is unlogged: changes to it are not in the write-ahead log",
            f"Run: ALTER TABLE {relation.quoted} SET LOGGED;",
        )


def _identity(catalog: _Catalog, relation: _Relation) -> tuple[str, tuple[str, ...]]:
    """The replica identity of the relation's leaves, and its key columns."""
    label, quoted = relation.label, relation.quoted
    leaves = catalog.leaves[relation.oid]
    identities = {leaf.identity for leaf in leaves} or {relation.identity}
    if len(identities) > 1:
        statements = " ".join(f"ALTER TABLE {leaf.quoted} REPLICA IDENTITY FULL;" for leaf in leaves)
        raise UncapturableTable(
            f"the partitions of {label} differ in their replica identity",
            f"Give all the same; for example run: {statements}",
        )
    (identity,) = identities
    if identity == "n":
        statements = " ".join(f"ALTER TABLE {part.quoted} REPLICA IDENTITY DEFAULT;" for part in leaves or (relation,))
        raise UncapturableTable(
            f"{label} has REPLICA IDENTITY NOTHING, so that changes to it name no row", f"Run: {statements}"
        )
    key = catalog.key(relation, identity)
    for leaf in leaves:
        if identity != "f" and set(catalog.key(leaf, identity)) != set(key):
            raise UncapturableTable(
                f"the replica identity of {leaf.label} is not the key of {label}",
                f"Add a primary key to {quoted} and run: ALTER TABLE {leaf.quoted} REPLICA IDENTITY DEFAULT;",
            )
    if not key and identity != "f":
        full = " ".join(f"ALTER TABLE {part.quoted} REPLICA IDENTITY FULL;" for part in leaves or (relation,))
        raise UncapturableTable(
            f"{label} has no key that identifies its rows (a primary key that is not deferrable)",
            f"Run: ALTER TABLE {quoted} ADD PRIMARY KEY (…); or, with a unique index on columns that are NOT NULL: "
            f"ALTER TABLE {quoted} REPLICA IDENTITY USING INDEX …; or, to identify rows by all their values: {full}",
        )
    return identity, key


def _columns(
    catalog: _Catalog, relation: _Relation, rule: TableRule, identity: str, key: tuple[str, ...]
) -> tuple[Column, ...]:
    label, quoted = relation.label, relation.quoted
    columns = {column.name: column for column, generated in catalog.columns[relation.oid] if not generated}
    generated = [column.name for column, generated in catalog.columns[relation.oid] if generated]
    by_index = f"Run: ALTER TABLE {quoted} REPLICA IDENTITY USING INDEX …; with an index on other columns."
    if not set(key) <= set(columns):
        raise UncapturableTable(f"the key of {label} contains a generated column, which is not streamed", by_index)
    if identity == "f" and generated and catalog.version >= 180000:
        raise UncapturableTable(
            f"{label} has REPLICA IDENTITY FULL and generated columns; Postgres 18 fails its updates once published",
            f"Run: ALTER TABLE {quoted} REPLICA IDENTITY DEFAULT; with a primary key.",
        )
    if not columns:
        raise UncapturableTable(f"{label} has no column that can be captured", "Remove it from source.tables.")
    if rule.columns is None:
        return tuple(columns.values())
    unknown = [name for name in rule.columns if name not in columns]
    if unknown:
        raise ConfigError(
            f"source.tables: {label} has no column {', '.join(unknown)} that can be captured",
            f"Name some of: {', '.join(columns)}" + (f" ({', '.join(generated)}: generated)." if generated else "."),
        )
    if identity == "f":
        raise ConfigError(
            f"source.tables: columns cannot be chosen for {label}, whose replica identity is FULL: "
            "its updates would fail",
            f"Remove columns from the rule, or run: ALTER TABLE {quoted} REPLICA IDENTITY DEFAULT;",
        )
    missing = [name for name in key if name not in rule.columns]
    if missing:
        raise ConfigError(
            f"source.tables: the columns of {label} lack {', '.join(missing)} of its key", "Add the key's columns."
        )
    return tuple(column for column in columns.values() if column.name in rule.columns)


def _check_where(connection: Connection, table: Table, where: str) -> None:
    """Let the source judge a rule's condition; unless the identity is FULL, only key columns may stand in it."""
    stored = table.leaves[0] if table.leaves else Leaf(table.oid, table.schema, table.name)
    relation, name = sql.Identifier(stored.schema, stored.name), sql.Identifier(stored.name)
    key = sql.SQL(", ").join(map(sql.Identifier, table.key))
    # The line break ends a comment in the condition.
    tail = sql.SQL(" WHERE (") + sql.SQL(where) + sql.SQL("\n)")
    rule = f"source.tables: the condition {where!r} on {table.label}"
    try:
        rows(connection, sql.SQL("EXPLAIN SELECT FROM ONLY {}").format(relation) + tail)
    except psycopg2.Error as e:
        raise ConfigError(f"{rule} is not valid: {str(e).splitlines()[0]}", "Write a condition on its columns.") from e
    try:
        if table.replica_identity != "f":
            source = sql.SQL("EXPLAIN SELECT FROM (SELECT {} FROM ONLY {}) AS {}").format(key, relation, name)
            rows(connection, source + tail)
    except psycopg2.Error as e:
        raise ConfigError(
            f"{rule} uses columns outside its key ({', '.join(table.key)}): once published, updates would fail",
            "Use key columns only, or give the table REPLICA IDENTITY FULL.",
        ) from e


def _refuse_overlaps(tables: Sequence[Table]) -> None:
    owner: dict[int, Table] = {}
    for table in tables:
        for leaf in table.leaves:
            other = owner.setdefault(leaf.oid, table)
            if other is not table:
                raise ConfigError(
                    f"source.tables: the rows of {leaf.schema}.{leaf.name} belong to both {other.label} "
                    f"and {table.label}",
                    "Name either the partitioned table or its partitions.",
                )
