"""The publication: which tables, columns and rows the slot's stream carries.

Leaves are published, not partition roots: under ``publish_via_partition_root`` a
TRUNCATE of a partition is not sent at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg2 import sql

from airflow_cdc_provider.engine.catalog import Leaf, Table
from airflow_cdc_provider.engine.connection import Connection, rows
from airflow_cdc_provider.engine.errors import ConfigError, MissingPrivilege


def publication_sql(connection: Connection, publication: str, tables: Sequence[Table]) -> str:
    """The statement that creates a publication of the tables' leaves, with the columns and conditions of their rules.

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
    """A leaf as it stands in ``CREATE PUBLICATION … FOR TABLE``, with the columns and condition of its rule."""
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
        parts.append(sql.SQL(" WHERE (") + sql.SQL(table.where) + sql.SQL("\n)"))
    return sql.Composed(parts).as_string(connection)


def published_oids(connection: Connection, publication: str) -> frozenset[int]:
    """The oids of the tables and partitions that a publication streams."""
    query = "SELECT t.relid::bigint FROM pg_catalog.pg_get_publication_tables(%s) t"
    exists = rows(connection, "SELECT 1 FROM pg_catalog.pg_publication WHERE pubname = %s", [publication])
    return frozenset(oid for (oid,) in rows(connection, query, [publication])) if exists else frozenset()


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


def unpublish(connection: Connection, publication: str, table: Table) -> None:
    """Take those leaves of a table out of the publication that stand in it by name; the tables may be gone."""
    query = (
        "SELECT n.nspname, c.relname FROM pg_catalog.pg_publication_rel r"
        " JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid AND p.pubname = %s"
        " JOIN pg_catalog.pg_class c ON c.oid = r.prrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.oid = ANY (%s::oid[])"
    )
    for schema, name in rows(connection, query, [publication, [leaf.oid for leaf in table.leaves]]):
        drop = sql.SQL("ALTER PUBLICATION {} DROP TABLE ONLY {}")
        rows(connection, drop.format(sql.Identifier(publication), sql.Identifier(schema, name)))


def drop_publication(connection: Connection, publication: str) -> None:
    """Remove the publication, if it exists and is ours: what somebody else has made since then under its name stays."""
    ours = "SELECT 1 FROM pg_publication WHERE pubname = %s AND pg_has_role(pubowner, 'USAGE')"
    if rows(connection, ours, [publication]):
        rows(connection, sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(publication)))
