"""Checks of the privileges of a pipeline's roles, with the SQL that grants missing ones.

No role is a superuser. The source's role may replicate and read its tables. Each check returns a sentence, or raises
:class:`.MissingPrivilege`, whose solution is the statement for an administrator.
"""

from __future__ import annotations

from collections.abc import Sequence

from airflow_cdc_provider.engine.core.errors import ConnectionFailed, MissingPrivilege, ServerNotReady
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.postgres.connection import Connection, row, rows, scalar
from airflow_cdc_provider.engine.postgres.replication import open_replication

# All roles may execute these functions by default; on hardened servers this has been revoked.
SOURCE_FUNCTIONS = (
    "pg_control_system",
    "pg_current_snapshot",
    "pg_current_wal_flush_lsn",
    "pg_current_wal_lsn",
    "pg_current_xact_id",
    "pg_get_replication_slots",
    "pg_logical_emit_message",
    "pg_partition_ancestors",
    "pg_terminate_backend",
    "pg_walfile_name",
)
LOG_FUNCTIONS = (
    "pg_control_system",
    "pg_current_wal_lsn",
    "pg_get_replication_slots",
    "pg_logical_emit_message",
    "pg_terminate_backend",
    "pg_walfile_name",
)
"""The functions that a separate role for reading the log needs."""
SLOT_FUNCTIONS = (
    "pg_create_logical_replication_slot",
    "pg_drop_replication_slot",
    "pg_replication_slot_advance",
)


def quoted_user(connection: Connection) -> str:
    """Return the quoted name of the connection's current role."""
    return str(scalar(connection, "SELECT pg_catalog.quote_ident(current_user)"))


def _place(connection: Connection) -> str:
    info = connection.info
    return f"{info.host}:{info.port}/{info.dbname}"


def leaves_where(source: Connection, tables: Sequence[Table], condition: str) -> list[str]:
    """Return the quoted names of the leaves that meet a condition.

    :param condition: SQL on the leaf ``c`` of ``pg_class`` and its namespace ``n``.
    """
    return [f"{schema}.{name}" for schema, name in _leaves_where(source, tables, condition)]


def _leaves_where(source: Connection, tables: Sequence[Table], condition: str) -> list[tuple[str, str]]:
    query = (
        "SELECT pg_catalog.quote_ident(n.nspname), pg_catalog.quote_ident(c.relname) FROM pg_catalog.pg_class c"
        " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        f" WHERE c.oid = ANY (%s::pg_catalog.oid[]) AND {condition} ORDER BY 1, 2"
    )
    found = rows(source, query, [[leaf.oid for table in tables for leaf in table.leaves]])
    return [(schema, name) for schema, name in found]


def may_replicate(source: Connection, dsn: str) -> str:
    """Open a replication connection, as the stream will, to check that the role may replicate.

    A role usually needs the attribute REPLICATION, but on managed services a membership can grant the same. Therefore
    the check tries a connection, and uses the catalog only to explain a failure.

    :raises ConnectionFailed: if the role may replicate, but the connection is refused.
    """
    user = quoted_user(source)
    attribute, senders_left = row(
        source,
        "SELECT rolreplication OR rolsuper OR EXISTS (SELECT FROM pg_catalog.pg_roles r"
        " WHERE r.rolname = 'rds_replication' AND pg_catalog.pg_has_role(u.oid, r.oid, 'MEMBER')),"
        " (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_replication)"
        " < pg_catalog.current_setting('max_wal_senders')::int"
        " FROM pg_catalog.pg_roles u WHERE rolname = current_user",
    )
    try:
        if senders_left:
            open_replication(dsn, "airflow-cdc preflight").finish()
        elif not attribute:
            raise ConnectionFailed("no WAL sender is free to ask", "")
    except ConnectionFailed as e:
        if attribute:
            raise
        raise MissingPrivilege(
            f"role {user} may not use replication",
            f"Run: ALTER ROLE {user} WITH REPLICATION; (on Amazon RDS and Aurora: GRANT rds_replication TO {user};)",
        ) from e
    return f"Role {user} may use replication."


def may_execute(connection: Connection, functions: Sequence[str]) -> str:
    """Check that the role may execute all functions of the server that have the given names."""
    refused = rows(
        connection,
        "SELECT oid::pg_catalog.regprocedure::text FROM pg_catalog.pg_proc"
        " WHERE pronamespace = 'pg_catalog'::pg_catalog.regnamespace AND proname = ANY (%s)"
        " AND NOT pg_catalog.has_function_privilege(oid, 'EXECUTE') ORDER BY 1",
        [list(functions)],
    )
    if refused:
        names = ", ".join(name for (name,) in refused)
        user = quoted_user(connection)
        raise MissingPrivilege(
            f"role {user} may not execute {names} on {_place(connection)}",
            f"Run: GRANT EXECUTE ON FUNCTION {names} TO {user};",
        )
    return f"All functions can be executed on {_place(connection)}."


def may_read(source: Connection, tables: Sequence[Table]) -> str:
    """Check SELECT on the tables, and USAGE on their schemas and on the schemas of their keys' types."""
    # SELECT must be granted on the whole table, not on its columns, because the snapshot's LOCK TABLE needs that.
    unreadable = leaves_where(source, tables, "NOT pg_catalog.has_table_privilege(c.oid, 'SELECT')")
    schemas = rows(
        source,
        "SELECT DISTINCT pg_catalog.quote_ident(n.nspname) FROM pg_catalog.pg_namespace n WHERE n.oid IN ("
        " SELECT relnamespace FROM pg_catalog.pg_class WHERE oid = ANY (%s::pg_catalog.oid[])"
        " UNION SELECT typnamespace FROM pg_catalog.pg_type WHERE oid = ANY (%s::pg_catalog.oid[]))"
        " AND NOT pg_catalog.has_schema_privilege(n.oid, 'USAGE') ORDER BY 1",
        [
            [leaf.oid for table in tables for leaf in table.leaves],
            [column.type_oid for table in tables for column in table.key_columns],
        ],
    )
    closed = ", ".join(schema for (schema,) in schemas)
    user = quoted_user(source)
    statements = [f"GRANT USAGE ON SCHEMA {closed} TO {user};"] if closed else []
    if unreadable:
        statements.append(f"GRANT SELECT ON {', '.join(unreadable)} TO {user};")
    if statements:
        what = f"read {', '.join(unreadable)}" if unreadable else f"use schema {closed}"
        raise MissingPrivilege(f"role {user} may not {what}", f"Run: {' '.join(statements)}")
    return "All tables can be read."


def sees_all_rows(source: Connection, tables: Sequence[Table]) -> str:
    """Check that row-level security hides no rows of the tables."""
    hidden = leaves_where(source, tables, "pg_catalog.row_security_active(c.oid)")
    if hidden:
        user = quoted_user(source)
        raise MissingPrivilege(
            f"row-level security hides rows of {', '.join(hidden)} from role {user}",
            f"Run: ALTER ROLE {user} WITH BYPASSRLS; or let the tables' owner disable row-level security.",
        )
    return "No row is hidden by row-level security."


def takes_writes(connection: Connection) -> str:
    """Check that transactions may write by default, on a server that is not a standby.

    :raises ServerNotReady: if server, database, role or the DSN make transactions read-only by default.
    """
    # The value before the session set its own.
    query = "SELECT reset_val = 'on' FROM pg_catalog.pg_settings WHERE name = 'default_transaction_read_only'"
    if not scalar(connection, query):
        return f"Transactions on {_place(connection)} may write."
    database = scalar(connection, "SELECT pg_catalog.quote_ident(pg_catalog.current_database())")
    # The setting of the role in this database overrides all others except the options of the client.
    of_client = "Remove it from the options of the DSN."
    of_server = (
        f"Run: ALTER ROLE {quoted_user(connection)} IN DATABASE {database} SET default_transaction_read_only = off;"
    )
    raise ServerNotReady(
        f"default_transaction_read_only is on for role {quoted_user(connection)} on {_place(connection)}",
        of_client if "default_transaction_read_only" in connection.info.options else of_server,
    )


def schema_privileges(connection: Connection, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the role's privileges on those of the named schemas that exist."""
    query = (
        "SELECT nspname, ARRAY(SELECT p FROM pg_catalog.unnest('{USAGE,CREATE}'::text[]) AS p"
        " WHERE pg_catalog.has_schema_privilege(n.oid, p)) FROM pg_catalog.pg_namespace n WHERE nspname = ANY (%s)"
    )
    return dict(rows(connection, query, [list(names)]))


def table_privileges(connection: Connection, names: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    """Return the role's privileges on those of the named tables that exist; ``ROWS`` means that it sees all rows."""
    query = (
        "SELECT n.nspname, c.relname, ARRAY(SELECT p FROM pg_catalog.unnest('{SELECT,INSERT,UPDATE,DELETE}'::text[])"
        " AS p WHERE pg_catalog.has_table_privilege(c.oid, p))"
        " || CASE WHEN pg_catalog.row_security_active(c.oid) THEN '{}' ELSE '{ROWS}'::text[] END"
        " FROM pg_catalog.pg_class c"
        " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " JOIN unnest(%s::text[], %s::text[]) AS t (nspname, relname)"
        " ON n.nspname = t.nspname AND c.relname = t.relname"
    )
    found = rows(connection, query, [[schema for schema, _ in names], [name for _, name in names]])
    return {(schema, name): privileges for schema, name, privileges in found}
