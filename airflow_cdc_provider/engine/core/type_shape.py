"""What a type of Postgres is made of, as far as it decides which values it keeps; read alike of source and target."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from psycopg2.extensions import connection as Connection

from airflow_cdc_provider.engine.postgres.connection import rows

_MODIFIER = re.compile(r"\([^()]*\)")

# What comes with Postgres is known by its name, but for the domains of information_schema.
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

Sort = Literal["base", "array", "enum", "composite", "range"]
_SORTS: Mapping[str, Sort] = {"a": "array", "e": "enum", "c": "composite", "r": "range", "m": "range"}


@dataclass(frozen=True)
class TypeShape:
    """What a type is made of; a domain is what lies beneath it.

    :param name: as Postgres writes it, without a modifier; of a type that users have made, without its schema.
    :param modifier: in parentheses, such as ``(10,2)``; empty without.
    :param own: users or an extension have made it.
    :param labels: of an enum.
    :param elements: an array's element, a composite's attributes, a range's bounds.
    """

    name: str
    sort: Sort = "base"
    modifier: str = ""
    own: bool = False
    labels: tuple[str, ...] = ()
    elements: tuple[TypeShape, ...] = ()

    @classmethod
    def builtin(cls, text: str) -> TypeShape:
        """Return the shape of a type that comes with Postgres.

        :param text: as ``format_type`` writes it.
        """
        if text.endswith("[]"):
            return cls(_MODIFIER.sub("", text), "array", elements=(cls.builtin(text[:-2]),))
        found = _MODIFIER.search(text)
        return cls(_MODIFIER.sub("", text), modifier=found[0] if found else "")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TypeShape:
        """Read a shape from JSON values."""
        elements = tuple(map(cls.from_dict, values["elements"]))
        return cls(**{**values, "labels": tuple(values["labels"]), "elements": elements})

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the modifier of a type that comes with Postgres."""
        return tuple(int(number) for number in self.modifier[1:-1].split(",") if number)


def read_shapes(connection: Connection, types: Sequence[tuple[int, str]]) -> list[TypeShape]:
    """Look up what types are made of.

    :param types: oid, and text as ``format_type`` writes it with the column's modifier.
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
        return TypeShape(name, _SORTS.get(sort, "base"), text[len(plain) :], True, tuple(labels), elements)

    return [shape(oid, text) for oid, text in types]
