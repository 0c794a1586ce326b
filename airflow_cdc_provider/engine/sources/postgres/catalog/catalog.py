"""Reads the source's catalog: relations with their columns, keys, replica identities and leaves, in one snapshot.

Rows live in *leaves*: an ordinary table is its own leaf, a partitioned one has those of its partition tree. Leaves
are what is published and read, so their replica identity counts.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from psycopg2.extensions import connection as Connection

from airflow_cdc_provider.engine.core.table import Column, quote_identifier
from airflow_cdc_provider.engine.core.table_rule import plain_pattern
from airflow_cdc_provider.engine.postgres.connection import rows
from airflow_cdc_provider.engine.postgres.type_shapes import read_shapes

_RELATIONS = """
SELECT c.oid::int8, n.nspname, c.relname, c.relkind, c.relpersistence, c.relispartition, c.relreplident,
       c.relnatts, c.relfilenode::int8, c.reltoastrelid::int8
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f')
ORDER BY n.nspname, c.relname
"""
# Postgres's own function would wait for a lock on every partition, and would not use the query's snapshot.
TREE = """tree AS (
    SELECT t.root, t.root::pg_catalog.oid AS oid FROM pg_catalog.unnest(%s::int8[]) AS t (root)
    UNION ALL
    SELECT tree.root, i.inhrelid FROM tree
    JOIN pg_catalog.pg_class c ON c.oid = tree.oid AND c.relkind = 'p'
    JOIN pg_catalog.pg_inherits i ON i.inhparent = tree.oid AND NOT i.inhdetachpending
)"""
"""A common table expression for ``WITH RECURSIVE``: some relations, and the partitions below each ``root``."""


_LEAVES = f"""
WITH RECURSIVE {TREE}
SELECT tree.root, c.oid::int8 FROM tree JOIN pg_catalog.pg_class c ON c.oid = tree.oid
WHERE c.relkind <> 'p' ORDER BY 1, 2
"""
# Only ATTACH, DETACH and SET SCHEMA write these entries, and no VACUUM changes the transaction that has written them.
_PLACES = """
WITH RECURSIVE line AS (
    SELECT l.leaf, l.leaf::pg_catalog.oid AS oid, 0 AS depth FROM pg_catalog.unnest(%s::int8[]) AS l (leaf)
    UNION ALL
    SELECT line.leaf, i.inhparent, depth + 1 FROM line JOIN pg_catalog.pg_inherits i ON i.inhrelid = line.oid
    JOIN pg_catalog.pg_class p ON p.oid = i.inhparent AND p.relkind = 'p'
)
SELECT line.leaf, pg_catalog.string_agg(pg_catalog.concat_ws('/', d.xmin, i.xmin), ' ' ORDER BY depth)
FROM line
LEFT JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = line.oid
  AND d.objsubid = 0 AND d.refclassid = 'pg_catalog.pg_namespace'::pg_catalog.regclass
LEFT JOIN pg_catalog.pg_inherits i ON i.inhrelid = line.oid
  AND i.inhparent IN (SELECT p.oid FROM pg_catalog.pg_class p WHERE p.relkind = 'p')
GROUP BY line.leaf
"""
_ANCESTORS = """
SELECT t.oid, p.relid::pg_catalog.oid::int8
FROM pg_catalog.unnest(%s::int8[]) AS t (oid)
CROSS JOIN LATERAL pg_catalog.pg_partition_ancestors(t.oid::pg_catalog.oid::pg_catalog.regclass) AS p
WHERE p.relid::pg_catalog.oid::int8 <> t.oid
"""
TYPES = """
made AS (
    SELECT DISTINCT a.atttypid AS type, a.atttypid AS part FROM pg_catalog.pg_attribute a
    WHERE a.attrelid = ANY (%s::pg_catalog.oid[]) AND a.attnum > 0 AND a.atttypid >= 16384
    UNION
    SELECT m.type, p.part FROM made m JOIN pg_catalog.pg_type t ON t.oid = m.part
    CROSS JOIN LATERAL (
        VALUES (t.typelem), (t.typbasetype)
        UNION ALL SELECT r.rngsubtype FROM pg_catalog.pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
        UNION ALL SELECT a.atttypid FROM pg_catalog.pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0
    ) AS p (part)
    WHERE p.part >= 16384
)
"""
"""A common table expression: the types of the columns of some relations, and the types that each is composed of.

Types that come with Postgres are left out, since they never change.
"""


# Sorting finds a type's operators in any schema, a comparison only on the search path, which is pg_catalog here.
_COLUMNS = f"""
WITH RECURSIVE {TYPES}, parts AS (
    SELECT m.type, 'label ' || e.oid AS name, e.enumlabel || ' ' || e.xmin::text AS content
    FROM made m JOIN pg_catalog.pg_enum e ON e.enumtypid = m.part
    UNION ALL
    SELECT m.type, 'attributes ' || t.typrelid,
           coalesce(pg_catalog.string_agg(a.attnum || ' ' || a.atttypid, ', ' ORDER BY a.attnum), '')
    FROM made m JOIN pg_catalog.pg_type t ON t.oid = m.part AND t.typrelid <> 0
    LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = t.typrelid AND a.attnum > 0
    GROUP BY m.type, t.typrelid
), contents AS (
    SELECT type, pg_catalog.json_object_agg(name, content) AS parts FROM parts GROUP BY type
), domains AS (
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
    SELECT l.root, p.attname, pg_catalog.array_agg(DISTINCT pg_catalog.array_to_string(p.attmissingval, '')) AS found
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
       pg_catalog.format_type(b.oid, -1) || CASE WHEN a.attcollation <> b.typcollation
            THEN ' COLLATE ' || pg_catalog.quote_ident(cn.nspname) || '.' || pg_catalog.quote_ident(c.collname)
            ELSE '' END,
       s.parts, a.attgenerated <> ''
FROM pg_catalog.pg_attribute a
JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
LEFT JOIN contents s ON s.type = a.atttypid
LEFT JOIN missing m ON m.root = a.attrelid::int8 AND m.attname = a.attname
LEFT JOIN btree o ON o.type = t.oid OR o.type IN (SELECT d.base FROM domains d WHERE d.type = t.oid)
LEFT JOIN pg_catalog.pg_type e ON e.oid = t.typelem
LEFT JOIN (domains d JOIN pg_catalog.pg_type b ON b.oid = d.base AND b.typtype <> 'd') ON d.type = t.oid
LEFT JOIN pg_catalog.pg_collation c ON c.oid = a.attcollation
LEFT JOIN pg_catalog.pg_namespace cn ON cn.oid = c.collnamespace
WHERE a.attrelid = ANY (%s::pg_catalog.oid[]) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""
# A deferrable index cannot be a replica identity, and identifies no row while a transaction swaps two keys.
_KEYS = """
SELECT i.indrelid::int8, i.indisprimary, i.indisreplident, coalesce(k.oid, i.indexrelid)::int8,
       ARRAY(SELECT a.attname::text FROM pg_catalog.unnest(i.indkey) WITH ORDINALITY AS u (attnum, position)
             JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = u.attnum
             WHERE u.position <= i.indnkeyatts ORDER BY u.position)
FROM pg_catalog.pg_index i
LEFT JOIN pg_catalog.pg_constraint k ON k.conindid = i.indexrelid AND k.conrelid = i.indrelid
  AND k.contype IN ('p', 'u')
WHERE i.indrelid = ANY (%s::pg_catalog.oid[]) AND i.indisvalid AND i.indisunique AND i.indimmediate
  AND (i.indisprimary OR i.indisreplident)
"""


@dataclass(frozen=True)
class CatalogRelation:
    """A relation of the source, whether it can be captured or not.

    :param kind: as ``pg_class.relkind``.
    :param persistence: as ``pg_class.relpersistence``.
    :param identity: its replica identity, as ``pg_class.relreplident``.
    :param attnums: the highest number that any of its columns has had.
    :param filenode, toast: see :class:`Leaf`.
    """

    oid: int
    schema: str
    name: str
    kind: str
    persistence: str
    is_partition: bool
    identity: str
    attnums: int
    filenode: int
    toast: int

    @property
    def label(self) -> str:
        """Return ``schema.name`` without quotes."""
        return f"{self.schema}.{self.name}"

    @property
    def quoted(self) -> str:
        """Return its name as SQL."""
        return f"{quote_identifier(self.schema)}.{quote_identifier(self.name)}"

    @property
    def pattern(self) -> str:
        """Return the pattern that names it in the pipeline file."""
        return plain_pattern(self.schema, self.name)

    @property
    def is_system(self) -> bool:
        """Return whether its schema is one of Postgres's own."""
        return self.schema.startswith("pg_") or self.schema == "information_schema"

    @property
    def is_candidate(self) -> bool:
        """Return whether a glob may match it."""
        ours = self.schema == "airflow_cdc"
        return self.kind in "rp" and not self.is_partition and not self.is_system and not ours


@dataclass(frozen=True)
class Key:
    """The key that identifies a row.

    :param columns: in the order of the index; empty when there are none.
    :param constraint: oid of its constraint, or of its index when it has none.
    """

    columns: tuple[str, ...] = ()
    constraint: int = 0


@dataclass(frozen=True)
class Catalog:
    """The catalog's entries for the relations that a pipeline names.

    :param version: of the server, as a number.
    :param relations: all of the source, by oid.
    :param leaves: by the oid of a named relation.
    :param places: by the oid of a leaf, see :class:`Leaf`.
    :param columns: by the oid of a named relation, each with a flag for generated columns.
    :param primary: by oid of a relation or leaf, its primary key.
    :param identity_index: by oid of a relation or leaf, its REPLICA IDENTITY USING INDEX.
    """

    version: int
    relations: Mapping[int, CatalogRelation]
    leaves: Mapping[int, tuple[CatalogRelation, ...]]
    places: Mapping[int, str]
    columns: Mapping[int, tuple[tuple[Column, bool], ...]]
    primary: Mapping[int, Key]
    identity_index: Mapping[int, Key]

    @classmethod
    def load(
        cls, connection: Connection, relations: Sequence[CatalogRelation], named: Sequence[CatalogRelation]
    ) -> Catalog:
        """Read the entries of the ``named`` among the ``relations``, within :func:`one_snapshot`."""
        by_oid = {relation.oid: relation for relation in relations}
        leaves: dict[int, tuple[CatalogRelation, ...]] = {r.oid: (r,) if r.kind == "r" else () for r in named}
        for root, leaf in rows(connection, _LEAVES, [[r.oid for r in named if r.kind == "p"]]):
            leaves[root] += (by_oid[leaf],)
        oids = list(leaves) + [leaf.oid for group in leaves.values() for leaf in group]
        columns: dict[int, tuple[tuple[Column, bool], ...]] = defaultdict(tuple)
        names = [field.name for field in dataclasses.fields(Column) if field.name != "shape"]
        stored = [(root, leaf.oid) for root, group in leaves.items() for leaf in group]
        roots = list(leaves)
        parameters = [roots, [root for root, _ in stored], [leaf for _, leaf in stored], roots]
        for oid, *values, generated in rows(connection, _COLUMNS, parameters):
            columns[oid] += ((Column.from_dict(dict(zip(names, values, strict=True))), generated),)
        columns.update(_with_shapes(connection, columns))
        places: dict[int, str] = dict(rows(connection, _PLACES, [list({leaf for _, leaf in stored})]))
        primary: dict[int, Key] = {}
        identity_index: dict[int, Key] = {}
        for oid, is_primary, is_identity, constraint, names in rows(connection, _KEYS, [oids]):
            key = Key(tuple(names), constraint)
            if is_primary:
                primary[oid] = key
            if is_identity:
                identity_index[oid] = key
        return cls(connection.info.server_version, by_oid, leaves, places, columns, primary, identity_index)

    def key(self, relation: CatalogRelation, identity: str) -> Key:
        """Return the key of ``relation`` under a replica identity."""
        return (self.identity_index if identity == "i" else self.primary).get(relation.oid, Key())


def _with_shapes(
    connection: Connection, columns: Mapping[int, tuple[tuple[Column, bool], ...]]
) -> dict[int, tuple[tuple[Column, bool], ...]]:
    """Add to the columns of some relations the shapes of their types, for types that do not come with Postgres."""
    own = {(c.type_oid, c.type) for group in columns.values() for c, _ in group if not c.builtin}
    shapes = dict(zip(own, read_shapes(connection, list(own)), strict=True))
    return {
        oid: tuple((dataclasses.replace(c, shape=shapes.get((c.type_oid, c.type))), g) for c, g in group)
        for oid, group in columns.items()
        if any(not c.builtin for c, _ in group)
    }


@contextmanager
def one_snapshot(connection: Connection) -> Iterator[None]:
    """Run the block in one snapshot: a rewrite between reading columns and files would go unnoticed."""
    rows(connection, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        yield
    finally:
        rows(connection, "COMMIT")


def ancestors(connection: Connection, oids: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the partitioned tables of which each table is a partition, at any depth; tables may be gone."""
    found: dict[int, tuple[int, ...]] = dict.fromkeys(oids, ())
    for oid, root in rows(connection, _ANCESTORS, [list(oids)]):
        found[oid] += (root,)
    return found


def read_relations(connection: Connection) -> list[CatalogRelation]:
    """Return all tables, views and foreign tables of the source, by schema and name."""
    return [CatalogRelation(*values) for values in rows(connection, _RELATIONS)]
