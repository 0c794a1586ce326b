"""Finds reasons why a target table would refuse or change the sink's rows, before anything is written.

An *obstacle* certainly does so: a rule, a generated column, a view. A *caution* may do so, depending on the rows, or
allows others to run code as the sink's role; preflight warns of it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import psycopg2
from psycopg2 import sql

from airflow_cdc_provider.engine.core.errors import ForeignTable, Refused, TargetConflict
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar

Mode = Literal["mirror", "changelog"]

_ASKED = """
WITH RECURSIVE asked AS (
    SELECT n, to_regclass(relation)::oid AS root, space, name
    FROM jsonb_to_recordset(%(asked)s) AS given (n int, relation text, space text, name text)
), tree AS (
    SELECT n, root, root AS oid FROM asked WHERE root IS NOT NULL
    UNION ALL SELECT t.n, t.root, i.inhrelid FROM tree t JOIN pg_inherits i ON i.inhparent = t.oid
)
"""
_RELATIONS = f"""{_ASKED}
SELECT t.n, c.oid::regclass::text, t.oid = t.root, c.relkind::text, c.relpersistence::text, c.relispartition,
       p.partstrat::text <> 'h' AND p.partdefid = 0,
       CASE WHEN o.rolname <> current_user AND NOT o.rolsuper THEN quote_ident(o.rolname) END,
       CASE WHEN c.relkind = 'r' AND c.relreplident <> 'f' AND NOT EXISTS (
           SELECT FROM pg_index x WHERE x.indrelid = c.oid AND x.indisvalid AND x.indimmediate
             AND CASE c.relreplident WHEN 'd' THEN x.indisprimary ELSE x.indisreplident END)
       THEN (SELECT string_agg(DISTINCT quote_ident(u.pubname), ', ') FROM pg_publication_tables v
             JOIN pg_publication u USING (pubname) JOIN pg_namespace s ON s.nspname = v.schemaname
             WHERE s.oid = c.relnamespace AND v.tablename = c.relname AND (u.pubupdate OR u.pubdelete)) END
FROM tree t JOIN pg_class c ON c.oid = t.oid JOIN pg_roles o ON o.oid = c.relowner
LEFT JOIN pg_partitioned_table p ON p.partrelid = c.oid
ORDER BY t.n, t.oid <> t.root, 2
"""
_TYPES = f"""{_ASKED}
SELECT a.n, y.typtype = 'd' FROM asked a JOIN pg_namespace s ON s.nspname = a.space
JOIN pg_type y ON y.typnamespace = s.oid AND y.typname = a.name AND y.typrelid = 0 AND y.typelem = 0
WHERE a.root IS NULL
"""
# For ON CONFLICT, a disabled rule for UPDATE counts too.
_RULES = f"""{_ASKED}
SELECT a.n, r.rulename::text FROM asked a JOIN pg_rewrite r ON r.ev_class = a.root
WHERE (r.ev_type IN ('2', '3') OR r.ev_type = '4' AND %(mode)s = 'mirror')
  AND (r.ev_enabled IN ('O', 'A') OR r.ev_type = '2' AND %(mode)s = 'mirror')
ORDER BY 1, 2
"""
_COLUMNS = f"""{_ASKED}
SELECT a.n, t.attname::text, t.attnotnull, t.atthasdef OR t.attidentity <> '' OR y.typdefault IS NOT NULL OR EXISTS (
           SELECT FROM pg_trigger g WHERE g.tgrelid = a.root AND NOT g.tgisinternal AND g.tgenabled IN ('O', 'A')
           AND g.tgtype & 7 = 7), -- before an INSERT, for each row: it may fill the column
       t.attgenerated <> '', t.attidentity <> '', CASE y.typtype WHEN 'd' THEN format_type(y.oid, -1) END
FROM asked a JOIN pg_attribute t ON t.attrelid = a.root AND t.attnum > 0 AND NOT t.attisdropped
JOIN pg_type y ON y.oid = t.atttypid ORDER BY a.n, t.attnum
"""
_INDEXES = f"""{_ASKED}
SELECT a.n, i.indexrelid::regclass::text, i.indisunique, i.indimmediate, i.indisvalid, i.indpred IS NOT NULL,
       coalesce(k.condeferrable, false), quote_ident(k.conname),
       ARRAY(SELECT t.attname::text FROM unnest(i.indkey) WITH ORDINALITY AS u (attnum, position)
             LEFT JOIN pg_attribute t ON t.attrelid = i.indrelid AND t.attnum = u.attnum
             WHERE u.position <= i.indnkeyatts ORDER BY u.position)
FROM asked a JOIN pg_index i ON i.indrelid = a.root AND (i.indisunique OR i.indisexclusion)
LEFT JOIN pg_constraint k ON k.conindid = i.indexrelid AND k.conrelid = i.indrelid AND k.contype IN ('p', 'u', 'x')
ORDER BY 1, 2
"""
_FOREIGN_KEYS = f"""{_ASKED}
SELECT DISTINCT a.n, quote_ident(k.conname) FROM asked a JOIN pg_constraint k ON a.root IN (k.conrelid, k.confrelid)
WHERE k.contype = 'f' AND NOT k.condeferrable AND k.conparentid = 0 ORDER BY 1, 2
"""
_TRIGGERS = f"""{_ASKED}
SELECT DISTINCT t.n, quote_ident(g.tgname), g.tgfoid::regproc::text FROM tree t JOIN pg_trigger g ON g.tgrelid = t.oid
WHERE NOT g.tgisinternal AND g.tgenabled IN ('O', 'A') ORDER BY 1, 2
"""
_KINDS = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "S": "a sequence",
    "c": "a composite type",
    "i": "an index",
    "I": "an index",
}
_REQUIRED = frozenset({"_op", "_commit_lsn", "_seq"})
_OPTIONAL = frozenset({"_xid", "_commit_ts", "_before", "_unchanged"})


@dataclass(frozen=True)
class Obstacle:
    """A problem of a target table.

    :param what: a clause whose subject is the table.
    :param remedy: what to do; a statement for the target, if there is one.
    """

    target: Target
    what: str
    remedy: str
    error: type[Refused] = TargetConflict


def require_clear(obstacles: Sequence[Obstacle]) -> None:
    """Refuse targets with obstacles.

    :raises TargetConflict: naming all obstacles; ForeignTable, if the first one concerns the key.
    """
    if obstacles:
        shown = "; ".join(f"{o.target.schema}.{o.target.name} {o.what}" for o in obstacles)
        solution = " ".join(dict.fromkeys(o.remedy for o in obstacles))
        message = f"the target table {shown}"
        raise obstacles[0].error(message, f"At the target: {solution} Then start again.", message)


def find_obstacles(connection: Connection, targets: Sequence[Target], mode: Mode) -> list[Obstacle]:
    """Return reasons why the sink's statements would fail or be changed."""
    look = _TargetQueries(connection, targets, mode)
    found = [*look.relations(), *look.namesakes(), *look.rules()]
    found += look.keys() if mode == "mirror" else look.unique_events()
    found += look.columns()
    return sorted(found, key=lambda o: (o.target.schema, o.target.name))


def find_cautions(connection: Connection, targets: Sequence[Target], mode: Mode) -> list[str]:
    """Return conditions that may refuse some rows, as clauses that name the table."""
    look = _TargetQueries(connection, targets, mode)
    return [*look.partitions(), *look.stricter_columns(), *look.row_by_row()]


def find_code_of_others(connection: Connection, targets: Sequence[Target], mode: Mode) -> list[str]:
    """Return triggers, and owners who can create them; triggers run as the sink's role."""
    look = _TargetQueries(connection, targets, mode)
    return [*look.triggers(), *look.owners()]


class _TargetQueries:
    """Queries about some target tables, if they exist; each runs once."""

    def __init__(self, connection: Connection, targets: Sequence[Target], mode: Mode) -> None:
        self._connection = connection
        self._targets = targets
        self._mode = mode
        names = [self._quoted(target.schema, target.name) for target in targets]
        asked = [
            {"n": n, "relation": names[n], "space": target.schema, "name": target.name}
            for n, target in enumerate(targets)
        ]
        # A database without an encoding supports only ASCII escapes.
        self._parameters = {"asked": json.dumps(asked, ensure_ascii=False), "mode": mode}
        self._null_refused: dict[str, bool] = {}
        self._answers: dict[str, list[tuple[Any, ...]]] = {}

    def _quoted(self, *names: str) -> str:
        return sql.Identifier(*names).as_string(self._connection)

    def _ask(self, query: str) -> Iterator[tuple[Any, ...]]:
        if query not in self._answers:
            self._answers[query] = rows(self._connection, query, self._parameters) if self._targets else []
        for n, *values in self._answers[query]:
            yield (self._targets[n], *values)

    def _gathered(self, query: str) -> list[tuple[Target, list[tuple[Any, ...]]]]:
        """Return answers grouped by target."""
        found = [(target, rest) for target, *rest in self._ask(query)]
        groups = groupby(found, key=lambda each: id(each[0]))
        return [(each[0][0], [tuple(rest) for _, rest in each]) for each in (list(group) for _, group in groups)]

    def relations(self) -> Iterator[Obstacle]:
        """Yield targets that are not permanent tables with only their own rows."""
        for target, name, is_root, kind, persistence, is_partition, _, _, published in self._ask(_RELATIONS):
            what = "" if is_root else f"has the partition {name}, which "
            if kind in _KINDS:
                yield Obstacle(target, f"{what}is {_KINDS[kind]}", f"Drop or rename {name}.")
            elif persistence != "p":
                remedy = f"ALTER TABLE {name} SET LOGGED;"
                yield Obstacle(target, f"{what}is not logged, so it is empty after a crash of the server", remedy)
            elif not is_root and not is_partition:
                remedy = f"ALTER TABLE {name} NO INHERIT {self._quoted(target.schema, target.name)};"
                yield Obstacle(target, f"has the inheritance child {name}, whose rows also appear in it", remedy)
            elif published and self._mode == "mirror":
                yield Obstacle(
                    target,
                    f"{what}is published with updates or deletes by {published}, without a replica identity",
                    f"ALTER TABLE {name} REPLICA IDENTITY FULL;",
                )
        for target, ((_, _, kind, *_), *partitions) in self._gathered(_RELATIONS):
            if kind == "p" and not partitions:
                yield Obstacle(target, "is partitioned and has no partition", "Create its partitions.")

    def namesakes(self) -> Iterator[Obstacle]:
        """Yield targets whose row types would have the name of an existing type."""
        for target, is_domain in self._ask(_TYPES):
            name = self._quoted(target.schema, target.name)
            statement = f"ALTER {'DOMAIN' if is_domain else 'TYPE'} {name} RENAME TO {self._quoted(target.name + '_')};"
            yield Obstacle(target, "cannot be created because a type of that name exists", statement)

    def rules(self) -> Iterator[Obstacle]:
        for target, rule in self._ask(_RULES):
            name = self._quoted(target.schema, target.name)
            what = f"has the rule {rule}, which would change the sink's statements"
            yield Obstacle(target, what, f"DROP RULE {self._quoted(rule)} ON {name};")

    def columns(self) -> Iterator[Obstacle]:
        """Yield columns that accept no values, or require values that are missing."""
        for target, column, not_null, is_filled, generated, identity, domain in self._ask(_COLUMNS):
            names = {each.name for each in target.table.columns}
            ours = _REQUIRED | _OPTIONAL if self._mode == "changelog" else frozenset()
            alter = f"ALTER TABLE {self._quoted(target.schema, target.name)} ALTER COLUMN {self._quoted(column)}"
            if generated:
                if column in names | ours:
                    what = f"generates the column {column}, so it cannot have the source's values"
                    yield Obstacle(target, what, f"{alter} DROP EXPRESSION;")
                continue
            if column in names | ours:
                null_comes = self._mode == "changelog" and column not in _REQUIRED
                why = "which deletes and truncates do not have" if column in names else "which not all events have"
            else:
                null_comes, why = not is_filled, "which the source does not have, and has no default"
            if null_comes and not_null:
                drop = "DROP IDENTITY IF EXISTS, " if identity else ""
                statement = f"{alter} {drop and drop + f'ALTER COLUMN {self._quoted(column)} '}DROP NOT NULL;"
                yield Obstacle(target, f"requires values in the column {column}, {why}", statement)
            elif null_comes and domain is not None and self._refuses_null(domain):
                what = f"has the column {column} of the domain {domain}, which forbids NULL, {why}"
                yield Obstacle(target, what, f"Allow NULL in {domain} (ALTER DOMAIN), or give the column another type.")

    def _refuses_null(self, domain: str) -> bool:
        if domain not in self._null_refused:
            with _tried(self._connection):
                try:
                    scalar(self._connection, f"SELECT NULL::{domain} IS NULL")
                    self._null_refused[domain] = False
                except psycopg2.IntegrityError:
                    self._null_refused[domain] = True
        return self._null_refused[domain]

    def keys(self) -> Iterator[Obstacle]:
        """Yield keys of mirrors without a unique index that ON CONFLICT can use."""
        unique = {target.table.label: indexes for target, indexes in self._gathered(_INDEXES)}
        for target, _, is_root, kind, *_ in self._ask(_RELATIONS):
            if not is_root or kind not in ("r", "p") or not target.table.key:
                continue
            alter = f"ALTER TABLE {self._quoted(target.schema, target.name)}"
            reasons, drops, finds = [], [], False
            for name, is_unique, immediate, valid, partial, _, constraint, columns in unique.get(
                target.table.label, ()
            ):
                if not is_unique or sorted(map(str, columns)) != sorted(target.table.key):
                    continue
                trouble = {"deferrable": not immediate, "partial": partial, "invalid": not valid}
                finds |= not any(trouble.values())
                if any(trouble.values()):
                    reasons.append(f"{name} is {' and '.join(word for word, applies in trouble.items() if applies)}")
                if not immediate:  # ON CONFLICT would also choose this index next to a valid one, and fail
                    drops.append(f"{alter} DROP CONSTRAINT {constraint};")
            if finds and not drops:
                continue
            key = ", ".join(target.table.key)
            add = f"{alter} ADD UNIQUE ({', '.join(map(self._quoted, target.table.key))});"
            yield Obstacle(
                target,
                f"exists, but has no usable unique key on ({key}){''.join(f'; {each}' for each in reasons)}",
                " ".join(["Drop the table, so that it is created correctly; or:", *drops, *([] if finds else [add])]),
                ForeignTable,
            )

    def unique_events(self) -> Iterator[Obstacle]:
        """Yield unique indexes of changelogs that a row's second event would violate."""
        for target, indexes in self._gathered(_INDEXES):
            captured = {column.name for column in target.table.columns}
            for name, is_unique, _, _, partial, _, constraint, columns in indexes:
                if is_unique and not partial and captured.issuperset(columns):
                    what = f"has the unique index {name}, but a changelog has several events per row"
                    alter = f"ALTER TABLE {self._quoted(target.schema, target.name)} DROP CONSTRAINT {constraint};"
                    yield Obstacle(target, what, alter if constraint else f"DROP INDEX {name};")

    def partitions(self) -> Iterator[str]:
        for target, name, is_root, kind, _, is_partition, lacks_default, _, _ in self._ask(_RELATIONS):
            if kind == "p" and lacks_default:
                yield f"{name} has no DEFAULT partition: a row outside of all partitions stops the pipeline"
            elif is_root and is_partition:
                yield f"{target.schema}.{target.name} is a partition: a row outside of its bounds stops the pipeline"

    def stricter_columns(self) -> Iterator[str]:
        """Yield columns of mirrors that refuse NULLs that the source may have."""
        for target, name, not_null, *_ in self._ask(_COLUMNS) if self._mode == "mirror" else ():
            loose = {column.name for column in target.table.columns if not column.not_null} - set(target.table.key)
            if not_null and name in loose:
                yield f"{target.schema}.{target.name} forbids NULL in {name}, but the source allows it"

    def row_by_row(self) -> Iterator[str]:
        """Yield constraints that rows must satisfy in the order in which a unit writes them."""
        names: dict[str, list[str]] = defaultdict(list)
        for target, *index in self._ask(_INDEXES) if self._mode == "mirror" else ():
            name, _, immediate, _, _, deferrable, _, columns = index
            if immediate and not deferrable and sorted(map(str, columns)) != sorted(target.table.key):
                names[f"{target.schema}.{target.name}"].append(name)
        for target, name in self._ask(_FOREIGN_KEYS):
            names[f"{target.schema}.{target.name}"].append(name)
        for table, each in names.items():
            yield f"{', '.join(each)} of {table} cannot be deferred, so rows are checked one by one"

    def triggers(self) -> Iterator[str]:
        for target, trigger, function in self._ask(_TRIGGERS):
            yield f"{target.schema}.{target.name} has the trigger {trigger} ({function})"

    def owners(self) -> Iterator[str]:
        for target, name, is_root, *_, owner, _ in self._ask(_RELATIONS):
            if owner is not None:
                yield f"{name if not is_root else f'{target.schema}.{target.name}'} belongs to role {owner}"


@contextmanager
def _tried(connection: Connection) -> Iterator[None]:
    """Roll back everything in the block, within a transaction or outside of one."""
    begin, end = ("BEGIN", "ROLLBACK") if connection.autocommit else ("SAVEPOINT tried", "ROLLBACK TO SAVEPOINT tried")
    rows(connection, begin)
    try:
        yield
    finally:
        rows(connection, end)


def listed(clauses: Iterable[str], most: int = 20) -> str:
    """Join clauses; of many, only the first ones."""
    every = list(clauses)
    rest = f"; and {len(every) - most} more" if len(every) > most else ""
    return "; ".join(every[:most]) + rest
