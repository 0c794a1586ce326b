"""The publication, which decides about the tables, columns and rows in the slot's stream.

Leaves are published, not partition roots: with ``publish_via_partition_root`` a TRUNCATE of a partition is not sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from psycopg2 import sql

from airflow_cdc_provider.engine.core.errors import ConfigError, MissingPrivilege
from airflow_cdc_provider.engine.core.table import Leaf, Table
from airflow_cdc_provider.engine.postgres.connection import Connection, condition, rows


def publication_sql(connection: Connection, publication: str, tables: Sequence[Table]) -> str:
    """Return the statement that creates a publication of the tables' leaves, by the rules of the pipeline file.

    :param connection: to the source.
    :param publication: its name.
    :raises ConfigError: when rules choose columns or rows and the server is older than Postgres 15.
    """
    items = ", ".join(published_leaf(connection, table, leaf) for table in tables for leaf in table.leaves)
    name = sql.Identifier(publication).as_string(connection)
    return (
        f"CREATE PUBLICATION {name}{' FOR TABLE ' if items else ''}{items} WITH (publish_via_partition_root = false);"
    )


def published_leaf(connection: Connection, table: Table, leaf: Leaf) -> str:
    """Return a leaf as an item of ``CREATE PUBLICATION … FOR TABLE``, with the columns and condition of its rule."""
    if (table.column_list or table.where is not None) and connection.info.server_version < 150000:
        raise ConfigError(
            f"source.tables: columns and where of {table.label} need Postgres 15 or newer on the source",
            "Remove columns and where from the rule, or upgrade the source.",
        )
    parts = [sql.SQL("ONLY {}").format(sql.Identifier(leaf.schema, leaf.name))]
    if table.column_list:
        names = sql.SQL(", ").join(sql.Identifier(column.name) for column in table.columns)
        parts.append(sql.SQL(" ({})").format(names))
    if table.where is not None:
        parts.append(sql.SQL(" WHERE ") + condition(table.where))
    return sql.Composed(parts).as_string(connection)


def published_oids(connection: Connection, publication: str) -> frozenset[int]:
    """Return the oids of the tables and partitions that a publication streams, if not via their roots.

    Postgres's own function waits for a lock on each of them.
    """
    by_schema = (
        " UNION SELECT c.oid FROM ours p JOIN pg_catalog.pg_publication_namespace s ON s.pnpubid = p.oid"
        " JOIN pg_catalog.pg_class c ON c.relnamespace = s.pnnspid"
    )
    query = (
        "WITH RECURSIVE ours AS (SELECT * FROM pg_catalog.pg_publication WHERE pubname = %s), named AS ("
        "SELECT r.prrelid AS oid FROM ours p JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid"
        " UNION SELECT c.oid FROM ours p JOIN pg_catalog.pg_class c ON p.puballtables"
        f"{by_schema if connection.info.server_version >= 150000 else ''}), tree AS ("
        "SELECT oid FROM named UNION SELECT i.inhrelid FROM tree t"
        " JOIN pg_catalog.pg_class c ON c.oid = t.oid AND c.relkind = 'p'"
        " JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid AND NOT i.inhdetachpending)"
        " SELECT c.oid::bigint FROM tree t JOIN pg_catalog.pg_class c USING (oid)"
        " WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND c.oid >= 16384"
    )
    return frozenset(oid for (oid,) in rows(connection, query, [publication]))


def named_oids(connection: Connection, publication: str) -> frozenset[int]:
    """Return the oids of the relations that a publication has by name."""
    query = (
        "SELECT r.prrelid::bigint FROM pg_catalog.pg_publication_rel r"
        " JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid AND p.pubname = %s"
    )
    return frozenset(oid for (oid,) in rows(connection, query, [publication]))


def published_entries(connection: Connection, publication: str, tables: Sequence[Table]) -> dict[int, str]:
    """Return the catalog entries that publish each leaf, as oids; none if the publication is for all tables.

    A table that leaves the publication and comes back, and one whose columns or condition are changed, get a new entry.

    :returns: by the leaf's oid, to be recorded.
    """
    by_schema = (
        " UNION ALL SELECT s.oid, c.oid, s.pnpubid FROM pg_catalog.pg_publication_namespace s"
        " JOIN pg_catalog.pg_class c ON c.relnamespace = s.pnnspid"
    )
    query = (
        "SELECT leaf, coalesce(pg_catalog.string_agg(e.oid::text, ' ' ORDER BY e.oid), '')"
        " FROM pg_catalog.unnest(%s::int8[]) AS leaf CROSS JOIN LATERAL (SELECT leaf::oid AS oid UNION"
        " SELECT relid::oid FROM pg_catalog.pg_partition_ancestors(leaf::oid::regclass)) AS t"
        " LEFT JOIN ((SELECT r.oid, r.prrelid, r.prpubid FROM pg_catalog.pg_publication_rel r"
        f"{by_schema if connection.info.server_version >= 150000 else ''}) AS e (oid, relid, publication)"
        " JOIN pg_catalog.pg_publication p ON p.oid = e.publication AND p.pubname = %s) ON e.relid = t.oid"
        " GROUP BY leaf"
    )
    leaves = [leaf.oid for table in tables for leaf in table.leaves]
    return dict(rows(connection, query, [list(dict.fromkeys(leaves)), publication]))


def published_otherwise(
    connection: Connection, publication: str, tables: Sequence[Table]
) -> tuple[list[Leaf], list[Leaf]]:
    """Return the leaves that a publication lacks, and those of which it publishes other columns or rows than captured.

    A column that was dropped or renamed after ``tables`` were read does not count as a difference.
    """
    # The columns of a leaf that are not published.
    hidden = (
        "ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute a"
        " JOIN pg_catalog.pg_class c ON c.oid = a.attrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = schemaname AND c.relname = tablename AND a.attnum > 0 AND NOT a.attisdropped"
        " AND a.attname <> ALL (attnames)), rowfilter"
    )
    details = hidden if connection.info.server_version >= 150000 else "'{}'::text[], NULL"
    query = f"SELECT schemaname, tablename, {details} FROM pg_catalog.pg_publication_tables WHERE pubname = %s"
    published = {(schema, table): rest for schema, table, *rest in rows(connection, query, [publication])}
    missing, different = [], []
    for table in tables:
        captured = {column.name for column in table.columns}
        for leaf in table.leaves:
            if (leaf.schema, leaf.name) not in published:
                missing.append(leaf)
                continue
            hides, where = published[leaf.schema, leaf.name]
            if not captured.isdisjoint(hides) or not _same_rows(connection, leaf, table.where, where):
                different.append(leaf)
    return missing, different


def _same_rows(connection: Connection, leaf: Leaf, captured: str | None, published: str | None) -> bool:
    """Return whether two conditions are the same to the server, by their plans: it rewrites their text."""
    if captured is None or published is None:
        return captured is published
    one, other = (
        rows(
            connection,
            sql.SQL("EXPLAIN (COSTS OFF) SELECT FROM ONLY {} WHERE {}").format(
                sql.Identifier(leaf.schema, leaf.name), condition(where)
            ),
        )
        for where in (captured, published)
    )
    return one == other


def republish(
    connection: Connection, publication: str, before: Table | None, table: Table, recorded: Mapping[int, str]
) -> dict[int, str]:
    """Publish a table that is going to be read as a whole, with the columns and condition of its rule.

    A publication of another owner that has all of that, and maybe more columns, stays as it is.

    :param before: as it was published until now.
    :param recorded: the entries that published it then, among others; if it has others by now, the re-read for another
        sink has already published it again.
    :returns: see :func:`published_entries`.
    :raises MissingPrivilege: when it is published otherwise, and the role may not change that.
    """
    otherwise = published_otherwise(connection, publication, [table])[1]
    chosen_anew = before is not None and _chosen(before) != _chosen(table)
    if chosen_anew:
        now = published_entries(connection, publication, [table])
        chosen_anew = all(recorded.get(leaf, entry) == entry for leaf, entry in now.items())
    if otherwise or (chosen_anew and _is_ours(connection, publication)):
        # Only its current leaves: a former leaf may belong to another captured table.
        unpublish(connection, publication, [leaf.oid for leaf in table.leaves])
    create_publication(connection, publication, [table])
    entries = published_entries(connection, publication, [table])
    missing, different = published_otherwise(connection, publication, [table])
    if missing or different:
        names = ", ".join(f"{leaf.schema}.{leaf.name}" for leaf in missing + different)
        raise MissingPrivilege(
            f"publication {publication!r} publishes other columns or rows of {names} than source.tables says",
            f"Let its owner publish {', '.join(published_leaf(connection, table, leaf) for leaf in table.leaves)}.",
        )
    return entries


def _chosen(table: Table) -> tuple[object, ...]:
    """Return the rows and columns that the publication has to publish of a table."""
    return table.where, [column.attnum for column in table.columns] if table.column_list else None


def create_publication(connection: Connection, publication: str, tables: Sequence[Table]) -> bool:
    """Create the publication, or add missing tables to the one that exists.

    :returns: whether it was created.
    :raises MissingPrivilege: when the role may not; the solution is the SQL for a DBA.
    """
    statement = publication_sql(connection, publication, tables)
    exists = rows(connection, "SELECT puballtables FROM pg_publication WHERE pubname = %s", [publication])
    try:
        if not exists:
            rows(connection, statement)
        elif not exists[0][0]:
            published = published_oids(connection, publication)
            for table in tables:
                for leaf in table.leaves:
                    if leaf.oid not in published:
                        # As in publication_sql: with the columns and the condition of the table's rule.
                        add = sql.SQL("ALTER PUBLICATION {} ADD TABLE {}")
                        item = sql.SQL(published_leaf(connection, table, leaf))
                        rows(connection, add.format(sql.Identifier(publication), item))
    except MissingPrivilege as e:
        raise MissingPrivilege(
            f"publication {publication!r} cannot be created by this role: {e.message}",
            f"Let the owner of the tables run: {statement}",
        ) from e
    return not exists


def unpublish(connection: Connection, publication: str, leaves: Collection[int]) -> None:
    """Remove those leaves from the publication that it has by name.

    :param leaves: their oids; they may be gone.
    """
    query = (
        "SELECT n.nspname, c.relname FROM pg_catalog.pg_publication_rel r"
        " JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid AND p.pubname = %s"
        " JOIN pg_catalog.pg_class c ON c.oid = r.prrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.oid = ANY (%s::oid[])"
    )
    for schema, name in rows(connection, query, [publication, list(leaves)]):
        drop = sql.SQL("ALTER PUBLICATION {} DROP TABLE ONLY {}")
        rows(connection, drop.format(sql.Identifier(publication), sql.Identifier(schema, name)))


def drop_publication(connection: Connection, publication: str) -> None:
    """Drop the publication, if it exists and the role owns it; one that another role has made under its name stays."""
    if _is_ours(connection, publication):
        rows(connection, sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(publication)))


def _is_ours(connection: Connection, publication: str) -> bool:
    """Return whether a publication exists and the role may change it."""
    ours = "SELECT 1 FROM pg_publication WHERE pubname = %s AND pg_has_role(pubowner, 'USAGE')"
    return bool(rows(connection, ours, [publication]))
