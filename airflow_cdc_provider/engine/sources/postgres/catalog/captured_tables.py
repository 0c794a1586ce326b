"""Resolves the rules of a pipeline file against the source's catalog, to find the tables that it captures.

They are resolved once, before anything is touched. A table that cannot be captured is refused here, with the SQL that
would change that. Postgres itself would report it too late: a published table whose updates cannot be described makes
the *source's* UPDATE and DELETE statements fail. That happens to a table without replica identity, to a column list or
row filter that does not fit the identity, and on Postgres 18 to an identity with generated columns.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import psycopg2
from psycopg2 import sql
from psycopg2.extensions import connection as Connection

from airflow_cdc_provider.engine.changes.redefinition import has_unlogged_key_changes
from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError, UncapturableTable, UnknownTable
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.core.table_rule import TableRule
from airflow_cdc_provider.engine.postgres.connection import condition, rows
from airflow_cdc_provider.engine.postgres.driver_errors import is_outage
from airflow_cdc_provider.engine.sources.postgres.catalog.catalog import (
    Catalog,
    CatalogRelation,
    one_snapshot,
    read_relations,
)

log = logging.getLogger(__name__)

_TOKEN = re.compile(r'("(?:[^"]|"")*")|([^"])', re.DOTALL)
_NOT_TABLES = {"v": "view", "m": "materialized view", "f": "foreign table"}


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

    def matches(self, relation: CatalogRelation) -> bool:
        return fnmatchcase(relation.schema, self.schema) and fnmatchcase(relation.name, self.name)


@dataclass(frozen=True)
class MatchingTables:
    """The tables in the source's catalog that match the rules of a pipeline.

    :param labels: the label of every relation of the source, by oid.
    :param tables: those that can be captured, by label, in the order of the rules and then of the names.
    :param errors: by label, why a table that a rule names cannot be captured.
    :param fatal: errors, some of them of tables, because of which the rules are refused.
    """

    labels: Mapping[int, str]
    tables: Mapping[str, Table]
    errors: Mapping[str, CdcError]
    fatal: tuple[CdcError, ...]


def resolve(connection: Connection, rules: tuple[TableRule, ...]) -> tuple[Table, ...]:
    """Find the tables that the rules of a pipeline name, in the order of the rules and then of the names.

    :param connection: to the source, with the session settings of :mod:`connection`.
    :raises UnknownTable: when a rule matches no table.
    :raises UncapturableTable: when a table named by a plain rule, or every table a glob matches, cannot be captured.
    :raises ConfigError: when a rule's pattern, columns or condition do not fit.
    """
    found = find(connection, rules)
    for error in found.fatal:
        raise error
    for error in found.errors.values():
        log.warning("Skipped: %s. %s", error.message, error.solution)
    _refuse_overlaps(tuple(found.tables.values()))
    return tuple(found.tables.values())


def find(connection: Connection, rules: tuple[TableRule, ...]) -> MatchingTables:
    """Find tables as :func:`resolve` does, but return errors of tables in place of raising them.

    :raises ConfigError: when a rule's pattern is not valid.
    """
    patterns = [_Pattern.parse(rule.pattern) for rule in rules]
    with one_snapshot(connection):
        relations = read_relations(connection)
        matches = [[r for r in relations if p.matches(r) and (p.is_plain or r.is_candidate)] for p in patterns]
        owner: dict[int, int] = {}  # the rule that a relation belongs to: the first plain one, else the first
        for index in sorted(range(len(rules)), key=lambda i: not patterns[i].is_plain):
            for relation in matches[index]:
                owner.setdefault(relation.oid, index)
        catalog = Catalog.load(connection, relations, [r for r in relations if r.oid in owner])

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
                tables[relation.label] = _table(connection, catalog, relation, rule)
            except ConfigError as e:
                errors[relation.label] = e
                if patterns[index].is_plain or not isinstance(e, UncapturableTable):
                    fatal.append(e)
    for matched in matches:
        if matched and all(relation.label in errors for relation in matched):
            fatal.append(errors[matched[0].label])
    return MatchingTables({relation.oid: relation.label for relation in relations}, tables, errors, tuple(fatal))


def _unknown(rule: TableRule, pattern: _Pattern, relations: Sequence[CatalogRelation]) -> UnknownTable:
    candidates = {r.label: r.pattern for r in relations if r.is_candidate}
    similar = difflib.get_close_matches(rule.pattern.replace('"', ""), candidates, n=3)
    hint = f" Similar: {', '.join(candidates[label] for label in similar)}." if similar else ""
    return UnknownTable(
        f"table {rule.pattern} does not exist" if pattern.is_plain else f"no table matches {rule.pattern}",
        f"Correct it in source.tables; names are matched exactly as they are stored.{hint}",
    )


def _table(connection: Connection, catalog: Catalog, relation: CatalogRelation, rule: TableRule) -> Table:
    leaves = catalog.leaves.get(relation.oid, ())
    for part in (relation, *leaves):
        _refuse_kind(part, relation.label)
    identity, key = _identity(catalog, relation)
    table = Table(
        oid=relation.oid,
        schema=relation.schema,
        name=relation.name,
        columns=_columns(catalog, relation, rule, identity, key),
        key=key,
        replica_identity=identity,
        where=rule.where,
        leaves=tuple(
            Leaf(leaf.oid, leaf.schema, leaf.name, leaf.filenode, leaf.toast, catalog.places[leaf.oid])
            for leaf in leaves
        ),
        kind=relation.kind,
        column_list=rule.columns is not None,
        attnums=relation.attnums,
        generated=tuple(column.name for column, generated in catalog.columns[relation.oid] if generated),
    )
    if has_unlogged_key_changes(table):
        table = dataclasses.replace(table, key_constraint=catalog.key(relation, identity).constraint)
    if table.where is not None:
        _check_where(connection, table, table.where)
    return table


def _refuse_kind(relation: CatalogRelation, label: str) -> None:
    remove = "Remove it from source.tables, or name the tables that its rows come from."
    if relation.kind in _NOT_TABLES:
        raise UncapturableTable(f"{relation.label} is a {_NOT_TABLES[relation.kind]}", remove)
    if relation.is_system or relation.persistence == "t":
        raise UncapturableTable(f"{relation.label} is a system or temporary table", remove)
    if relation.persistence == "u":
        raise UncapturableTable(
            f"{relation.label} is unlogged: changes to it are not in the write-ahead log",
            f"Run: ALTER TABLE {relation.quoted} SET LOGGED; and, if {label} has been copied already,"
            f" `airflow-cdc resnapshot --table '{label}'`.",
        )


def _identity(catalog: Catalog, relation: CatalogRelation) -> tuple[str, tuple[str, ...]]:
    """Return the replica identity of the relation's leaves, and its key columns."""
    label, quoted = relation.label, relation.quoted
    leaves = catalog.leaves[relation.oid]
    identities = {leaf.identity for leaf in leaves} or {relation.identity}
    if len(identities) > 1:
        statements = " ".join(f"ALTER TABLE {leaf.quoted} REPLICA IDENTITY FULL;" for leaf in leaves)
        raise UncapturableTable(
            f"the partitions of {label} differ in their replica identity",
            f"Give them the same replica identity; for example run: {statements}",
        )
    (identity,) = identities
    if identity == "n":
        statements = " ".join(f"ALTER TABLE {part.quoted} REPLICA IDENTITY DEFAULT;" for part in leaves or (relation,))
        raise UncapturableTable(
            f"{label} has REPLICA IDENTITY NOTHING, so that changes to it name no row", f"Run: {statements}"
        )
    key = catalog.key(relation, identity).columns
    for leaf in leaves:
        if identity != "f" and set(catalog.key(leaf, identity).columns) != set(key):
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
    catalog: Catalog, relation: CatalogRelation, rule: TableRule, identity: str, key: tuple[str, ...]
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
    """Let the source check a rule's condition; unless the identity is FULL, it may use key columns only."""
    stored = table.leaves[0] if table.leaves else Leaf(table.oid, table.schema, table.name)
    relation, name = sql.Identifier(stored.schema, stored.name), sql.Identifier(stored.name)
    key = sql.SQL(", ").join(map(sql.Identifier, table.key))
    tail = sql.SQL(" WHERE ") + condition(where)
    rule = f"source.tables: the condition {where!r} on {table.label}"
    try:
        rows(connection, sql.SQL("EXPLAIN SELECT FROM ONLY {}").format(relation) + tail)
    except psycopg2.Error as e:
        if is_outage(e):
            raise
        raise ConfigError(f"{rule} is not valid: {str(e).splitlines()[0]}", "Write a condition on its columns.") from e
    try:
        if table.replica_identity != "f":
            source = sql.SQL("EXPLAIN SELECT FROM (SELECT {} FROM ONLY {}) AS {}").format(key, relation, name)
            rows(connection, source + tail)
    except psycopg2.Error as e:
        if is_outage(e):
            raise
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
                    "Name either the partitioned table or its partitions. Where a captured table has been attached to"
                    " another one, name that one alone.",
                )
