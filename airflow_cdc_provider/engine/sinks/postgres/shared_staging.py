"""Shared staging: the few changes of each of many tables in a piece are staged in one relation, by one COPY.

Creating a staging table takes 2 to 4 ms, which is longer than the COPY of a few rows. So the rows of tables with few
changes are gathered::

     effects of a piece        airflow_cdc.stage_…_few         commit
     ------------------        -----------------------         ------
     table a,    3 rows --+    number | c0      | c1
     table b,    1 row  --+--> 0      | {1,2,3} | {x,y,z} --> rows_of(a): unnest of row 0 --> INSERT INTO a
              gather()         1      | {7}     | {z}     --> rows_of(b): unnest of row 1 --> INSERT INTO b

     table c, 9000 rows -----> its own staging table      --> rows_of(c): that table      --> INSERT INTO c

The relation has a row for each table. A column of this row holds the text of the array of all values of the staged
column. They become values of the target's types when they are applied: an array is read by the input function of its
elements, as COPY would read them, and the INSERT applies the columns' modifiers, such as a numeric's scale.

Gain: 1,000,000 changes of 1,000 tables took 13.5 s in place of 28.8, of 100 tables 5.5 s in place of 8.2
(``docs/performance.md``; benchmark case ``scaling``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence

import psycopg2
import pyarrow as pa
from psycopg2 import sql

from airflow_cdc_provider.engine.core.effect import COUNT, ERASED, FRESH, MISSING
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.array_text import array_text
from airflow_cdc_provider.engine.postgres.connection import Connection, rows
from airflow_cdc_provider.engine.sinks.postgres.copy import copy_batches
from airflow_cdc_provider.engine.sinks.postgres.packed_rows import NEW
from airflow_cdc_provider.engine.sinks.staged import Share, Staged

_FEW = 1000  # from this number on it is worth separating new rows, see rows_to_stage()
_SMALL_BYTES = 256 << 10
_MOST_COLUMNS = 200  # a value stored elsewhere leaves 18 bytes in its row, and a row must fit on a page

# Four kinds of types are excluded: domains, which may forbid the NULL of an erased row; composite types, which unnest()
# would split; types whose arrays have another delimiter; and types that the role may not name. An assignment has to
# apply a modifier. It is known to do so for the server's own types, but comes too late for keys, which are compared
# before; keys of varchar are compared as they are. Type names have the modifier -1, because `character` without one has
# a length of one.
_TYPES = """
SELECT asked.label, a.attname::text, format_type(a.atttypid, -1)
FROM jsonb_to_recordset(%s) AS asked (label text, relation text, key jsonb)
JOIN pg_attribute a ON a.attrelid = to_regclass(asked.relation) AND a.attnum > 0
JOIN pg_type t ON t.oid = a.atttypid
WHERE t.typtype IN ('b', 'e', 'r', 'm') AND t.typarray <> 0 AND t.typdelim = ','
  AND has_schema_privilege(t.typnamespace, 'USAGE')
  AND (a.atttypmod = -1 OR t.typnamespace = 'pg_catalog'::regnamespace)
  AND (a.atttypmod = -1 OR t.typname = 'varchar' OR NOT asked.key ? a.attname::text)
"""


def is_small(staged: pa.Table) -> bool:
    """Return whether a mirror's rows are so few that they are better staged together with those of other tables."""
    return (
        0 < staged.num_rows < _FEW
        and staged.nbytes < _SMALL_BYTES
        and staged.num_columns <= _MOST_COLUMNS
        and {COUNT, FRESH, MISSING, NEW}.isdisjoint(staged.column_names)
    )


def element_types(connection: Connection, targets: Iterable[Target]) -> dict[str, dict[str, str]]:
    """Return by label the types of target columns by name, for tables that can be staged together."""
    asked, names = [], {}
    for target in targets:
        relation = sql.Identifier(target.schema, target.name).as_string(connection)
        asked.append({"label": target.table.label, "relation": relation, "key": list(target.table.key)})
        names[target.table.label] = {column.name for column in target.table.columns}
    found: dict[str, dict[str, str]] = {label: {} for label in names}
    # A database without an encoding supports only ASCII escapes.
    for label, name, kind in rows(connection, _TYPES, [json.dumps(asked, ensure_ascii=False)]):
        found[label][name] = kind
    return {label: types for label, types in found.items() if types.keys() >= names[label]}


def _place(number: int, staged: pa.Table, target: Target, types: Mapping[str, str]) -> Share:
    """Return the location of a table's rows.

    :param types: types of the target's columns by name.
    """
    kinds = {f"c{i}": types[column.name] for i, column in enumerate(target.table.columns)} | {ERASED: "boolean"}
    return Share(number, tuple(kinds[name] for name in staged.column_names))


def gather(
    connection: Connection,
    relation: str,
    targets: Mapping[str, Target],
    labels: Sequence[str],
    staged_rows: Sequence[pa.Table],
) -> dict[int, Share]:
    """Stage small changes in one relation, if at least two tables qualify.

    :param relation: its name in ``airflow_cdc``.
    :param labels, staged_rows: for each table of a mirror, the label and the rows to stage.
    :returns: by position in ``labels``, the location of the rows in the relation.
    """
    small = [n for n, each in enumerate(staged_rows) if is_small(each)]
    types = element_types(connection, [targets[labels[n]] for n in small]) if len(small) > 1 else {}
    shares = {
        n: _place(n, staged_rows[n], targets[label], types[label]) for n in small if (label := labels[n]) in types
    }
    if len(shares) < 2:
        return {}
    rows(connection, "SAVEPOINT few")
    try:
        _write(connection, relation, [(each, staged_rows[n]) for n, each in shares.items()])
    except psycopg2.DataError:
        # For example a character that the target's encoding lacks; staged alone, the error names the column.
        rows(connection, "ROLLBACK TO SAVEPOINT few")
        return {}
    return shares


def _write(connection: Connection, relation: str, gathered: Sequence[tuple[Share, pa.Table]]) -> None:
    """Create the relation, with a row for each table's rows."""
    table = sql.Identifier("airflow_cdc", relation)
    names = list(dict.fromkeys(name for _, staged in gathered for name in staged.column_names))
    columns = sql.SQL(", ").join(sql.SQL("{} text").format(sql.Identifier(name)) for name in names)
    # It exists for one unit; compressing it would take longer than writing it.
    plain = sql.SQL(", ").join(
        sql.SQL("ALTER COLUMN {} SET STORAGE EXTERNAL").format(sql.Identifier(name)) for name in names
    )
    rows(
        connection,
        sql.SQL(
            "CREATE UNLOGGED TABLE {table} (number int PRIMARY KEY, {columns}) WITH (autovacuum_enabled = off);"
            "ALTER TABLE {table} {plain}"
        ).format(table=table, columns=columns, plain=plain),
    )
    texts = {
        name: [array_text(staged[name]) if name in staged.column_names else None for _, staged in gathered]
        for name in names
    }
    numbers = pa.array([shared.number for shared, _ in gathered], pa.int32())
    batch = pa.RecordBatch.from_arrays(
        [numbers, *(pa.array(each, pa.large_binary()).view(pa.large_string()) for each in texts.values())],
        names=["number", *names],
    )
    copy_batches(connection, table, batch.schema.names, [batch])


def rows_of(staged: Staged, columns: Collection[str] | None = None) -> sql.Composable:
    """Return the staged rows of a table, from a separate or a shared relation.

    :param columns: the columns to read from shared rows; ``None`` for all.
    """
    assert staged.relation is not None
    relation = sql.Identifier("airflow_cdc", staged.relation)
    if staged.share is None:
        return relation
    typed = dict(zip(staged.columns, staged.share.types, strict=True))
    names = [sql.Identifier(name) for name in typed if columns is None or name in columns]
    arrays = [sql.SQL("p.{}::{}[]").format(name, sql.SQL(typed[name.string])) for name in names]
    return sql.SQL("(SELECT u.* FROM {} p, unnest({}) AS u ({}) WHERE p.number = {})").format(
        relation, sql.SQL(", ").join(arrays), sql.SQL(", ").join(names), sql.Literal(staged.share.number)
    )
