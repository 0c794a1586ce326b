"""Determines when two keys of a target table are equal.

A key is compared with the operator and collation of its unique index, in any schema. The search path of the sink's
sessions contains only ``pg_catalog``, where ``citext`` would be compared as text and ``hstore`` not at all. Equality of
the index may be coarser than that of texts: ``citext`` and nondeterministic collations fold case, ``numeric`` has 1.0
and 1.00, ``float8`` has 0 and -0.

A row of the source has one text at a time, and every change of its key arrives as an erase of the old text and a write
of the new one. So texts suffice to collapse a piece, and to distinguish rows if the target's column is text because it
lacks the type. The target's equality determines the keys of a re-read: the re-read replaces all rows that are equal for
the target, so that it includes events under any of their spellings. If the target's equality was made coarser than the
source's by hand, one row must not overwrite another. So erased rows must also be equal in text, and written rows must
not replace a row with another text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from psycopg2 import sql

from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection, rows

# Types whose equal values have equal texts: bool, bytea, name, int8, int2, int4, text, oid, varchar, date, timestamp,
# timestamptz, uuid.
_EXACT = [16, 17, 19, 20, 21, 23, 25, 26, 1043, 1082, 1114, 1184, 2950]

# Type names have the modifier -1, because `character` without one means a length of one.
_KEYS = """
SELECT asked.label, found.* FROM (
    SELECT label, relation, ARRAY(SELECT jsonb_array_elements_text(names)) AS names
    FROM jsonb_to_recordset(%(asked)s) AS given (label text, relation text, names jsonb)
) AS asked, LATERAL (WITH arbiter AS (
    SELECT i.indkey::int2[] AS columns, i.indclass::oid[] AS classes, i.indcollation::oid[] AS collations
    FROM pg_index i
    WHERE i.indrelid = to_regclass(asked.relation) AND i.indisunique AND i.indimmediate AND i.indisvalid
      AND i.indpred IS NULL
      AND (SELECT array_agg(a.attname::text ORDER BY a.attname COLLATE "C")
           FROM unnest(i.indkey) WITH ORDINALITY AS u (attnum, position)
           LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = u.attnum
           WHERE u.position <= i.indnkeyatts)
          = (SELECT array_agg(k ORDER BY k COLLATE "C") FROM unnest(asked.names) AS k)
    ORDER BY i.indisprimary DESC, i.indexrelid LIMIT 1
), compared AS (
    SELECT u.attnum, c.collisdeterministic, quote_ident(n.nspname) || '.' || o.oprname AS operator,
           quote_ident(cn.nspname) || '.' || quote_ident(c.collname) AS collation
    FROM arbiter, unnest(columns, classes, collations) AS u (attnum, class, collated)
    JOIN pg_opclass p ON p.oid = u.class
    JOIN pg_amop m ON m.amopfamily = p.opcfamily AND m.amopstrategy = 3
        AND m.amoplefttype = p.opcintype AND m.amoprighttype = p.opcintype
    JOIN pg_operator o ON o.oid = m.amopopr
    JOIN pg_namespace n ON n.oid = o.oprnamespace
    LEFT JOIN pg_collation c ON c.oid = u.collated
    LEFT JOIN pg_namespace cn ON cn.oid = c.collnamespace
)
SELECT k.position, format_type(a.atttypid, -1), coalesce(operator, 'pg_catalog.='), compared.collation,
       (t.oid = ANY (%(exact)s::oid[]) OR t.typtype = 'e') AND collisdeterministic IS NOT FALSE
FROM unnest(asked.names) WITH ORDINALITY AS k (name, position)
JOIN pg_attribute a ON a.attrelid = to_regclass(asked.relation) AND a.attname = k.name
JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN compared ON compared.attnum = a.attnum) AS found
ORDER BY asked.label, found.position
"""


@dataclass(frozen=True)
class KeyColumn:
    """A key column of a target table.

    :param type: the type without a modifier, for a cast.
    :param operator: the equality operator of the unique index, for ``OPERATOR()``.
    :param collation: the index's collation, ``None`` if the type has none.
    :param exact: whether equal values have equal texts.
    """

    type: str
    operator: str
    collation: str | None
    exact: bool

    def cast(self, text: sql.Composable) -> sql.Composable:
        """Return a text cast to the column's type."""
        return sql.SQL("{}::{}").format(text, sql.SQL(self.type))

    def equal(self, ours: sql.Composable, theirs: sql.Composable) -> sql.Composable:
        """Return the condition that two values are equal for the target."""
        condition = sql.SQL("{} OPERATOR({}) {}").format(ours, sql.SQL(self.operator), theirs)
        return condition if self.collation is None else condition + sql.SQL(" COLLATE ") + sql.SQL(self.collation)


@dataclass(frozen=True)
class TargetKey:
    """The key of a target table."""

    columns: tuple[KeyColumn, ...]

    @classmethod
    def of_all(cls, connection: Connection, targets: Iterable[Target]) -> dict[str, TargetKey]:
        """Return the keys of target tables by label, with one query; planning it takes milliseconds."""
        asked = []
        keys: dict[str, list[KeyColumn]] = {}
        for target in targets:
            relation = sql.Identifier(target.schema, target.name).as_string(connection)
            asked.append({"label": target.table.label, "relation": relation, "names": list(target.table.key)})
            keys[target.table.label] = []
        # A database without an encoding supports only ASCII escapes.
        parameters = {"asked": json.dumps(asked, ensure_ascii=False), "exact": _EXACT}
        for label, _, *column in rows(connection, _KEYS, parameters) if asked else ():
            keys[label].append(KeyColumn(*column))
        return {label: cls(tuple(columns)) for label, columns in keys.items()}

    def equal(self, ours: Sequence[sql.Composable], theirs: Sequence[sql.Composable]) -> sql.Composable:
        """Return the condition that two keys are equal for the target."""
        triples = zip(self.columns, ours, theirs, strict=True)
        return sql.SQL(" AND ").join(column.equal(our, their) for column, our, their in triples)

    def same(self, ours: Sequence[sql.Composable], theirs: Sequence[sql.Composable]) -> sql.Composable:
        """Return the condition that two keys are equal and have the same texts."""
        texts = [sql.SQL("format('%s', {}) = format('%s', {})").format(*pair) for pair in self._inexact(ours, theirs)]
        return sql.SQL(" AND ").join([self.equal(ours, theirs), *texts])

    def differ(self, ours: Sequence[sql.Composable], theirs: Sequence[sql.Composable]) -> sql.Composable | None:
        """Return the condition that the texts of two keys differ; ``None`` if the texts of equal keys cannot differ."""
        texts = [sql.SQL("format('%s', {}) <> format('%s', {})").format(*pair) for pair in self._inexact(ours, theirs)]
        return sql.SQL("({})").format(sql.SQL(" OR ").join(texts)) if texts else None

    def _inexact(
        self, ours: Sequence[sql.Composable], theirs: Sequence[sql.Composable]
    ) -> Iterable[tuple[sql.Composable, sql.Composable]]:
        triples = zip(self.columns, ours, theirs, strict=True)
        return ((our, their) for column, our, their in triples if not column.exact)

    def given(self, alias: str, texts: Iterable[Sequence[str]]) -> tuple[sql.Composable, list[sql.Composable]]:
        """Return a relation of keys that are given as texts, one sequence per column.

        :returns: the relation, with a ``position`` from 1, and the expressions of the values.
        """
        arrays = sql.SQL(", ").join(sql.SQL("{}::text[]").format(sql.Literal(list(column))) for column in texts)
        names = sql.SQL(", ").join(sql.SQL(f"k{n}") for n in range(len(self.columns)))
        relation = sql.SQL("unnest({}) WITH ORDINALITY AS {} ({}, position)").format(arrays, sql.SQL(alias), names)
        return relation, [column.cast(sql.SQL(f"{alias}.k{n}")) for n, column in enumerate(self.columns)]
