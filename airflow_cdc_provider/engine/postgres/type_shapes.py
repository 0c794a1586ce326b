"""Looks up the components of types in the catalog of a source or of a target."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg2.extensions import connection as Connection

from airflow_cdc_provider.engine.core.type_shape import SORTS, TypeShape
from airflow_cdc_provider.engine.postgres.connection import rows

# Types that come with Postgres are known by name, except the domains of information_schema.
_OWN = "(t.oid >= 16384 OR t.typnamespace <> 'pg_catalog'::pg_catalog.regnamespace)"
_SHAPES = f"""
WITH RECURSIVE made AS (
    SELECT DISTINCT t.type FROM pg_catalog.unnest(%s::pg_catalog.oid[]) AS t (type)
    UNION
    SELECT p.part FROM made m JOIN pg_catalog.pg_type t ON t.oid = m.type AND {_OWN}
    CROSS JOIN LATERAL (
        VALUES (t.typelem), (t.typbasetype)
        UNION ALL SELECT r.rngsubtype FROM pg_catalog.pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
        UNION ALL SELECT a.atttypid FROM pg_catalog.pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0
    ) AS p (part)
    WHERE p.part <> 0
)
SELECT t.oid::int8, t.typname::text,
       CASE WHEN t.typtype = 'b' AND t.typcategory = 'A' THEN 'a' ELSE t.typtype::text END,
       pg_catalog.format_type(t.oid, -1),
       ARRAY(SELECT e.enumlabel::text FROM pg_catalog.pg_enum e WHERE e.enumtypid = t.oid ORDER BY e.enumsortorder),
       (SELECT coalesce(pg_catalog.json_agg(pg_catalog.json_build_array(
            p.part::int8, pg_catalog.format_type(p.part, p.modifier)) ORDER BY p.place), '[]')
        FROM (
            SELECT 0 AS place, t.typelem AS part, -1 AS modifier WHERE t.typtype = 'b' AND t.typcategory = 'A'
            UNION ALL SELECT 0, t.typbasetype, t.typtypmod WHERE t.typtype = 'd'
            UNION ALL SELECT 0, r.rngsubtype, -1 FROM pg_catalog.pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
            UNION ALL SELECT a.attnum, a.atttypid, a.atttypmod FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
        ) AS p)
FROM made m JOIN pg_catalog.pg_type t ON t.oid = m.type AND {_OWN}
"""


def read_shapes(connection: Connection, types: Sequence[tuple[int, str]]) -> list[TypeShape]:
    """Look up the shapes of types.

    :param types: for each type its oid, and its text as ``format_type`` writes it with the column's modifier.
    """
    oids = [oid for oid, _ in types]
    found = {oid: values for oid, *values in rows(connection, _SHAPES, [oids])} if oids else {}

    def shape(oid: int, text: str) -> TypeShape:
        if oid not in found:
            return TypeShape.builtin(text)
        name, sort, plain, labels, made_of = found[oid]
        if sort == "d":
            return shape(*made_of[0])
        if sort == "a":
            return TypeShape(name, "array", own=True, elements=(shape(made_of[0][0], text.removesuffix("[]")),))
        elements = tuple(shape(*part) for part in made_of)
        return TypeShape(name, SORTS.get(sort, "base"), text[len(plain) :], True, tuple(labels), elements)

    return [shape(oid, text) for oid, text in types]
