"""What the roles of a pipeline may do, and the SQL that grants what they lack.

None is a superuser. The source's may replicate, and read its tables. Each function here is a check: it returns a
sentence, or raises :class:`.MissingPrivilege` whose solution is the statement for an administrator.
"""

from __future__ import annotations

from collections.abc import Sequence

from airflow_cdc_provider.engine.core.errors import ConnectionFailed, MissingPrivilege, ServerNotReady
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.postgres.connection import Connection, row, rows, scalar
from airflow_cdc_provider.engine.postgres.replication import open_replication

# Everybody may execute them by default; where servers are hardened, that has been revoked.
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
"""Of these the role that reads the log, if it is one of its own."""
SLOT_FUNCTIONS = (
    "pg_create_logical_replication_slot",
    "pg_drop_replication_slot",
    "pg_replication_slot_advance",
)


def quoted_user(connection: Connection) -> str:
    """The role that the connection acts as, quoted."""
    return str(scalar(connection, "SELECT pg_catalog.quote_ident(current_user)"))


def _place(connection: Connection) -> str:
    info = connection.info
    return f"{info.host}:{info.port}/{info.dbname}"


def leaves_where(source: Connection, tables: Sequence[Table], condition: str) -> list[str]:
    """The quoted names of the leaves ``c`` (of ``pg_class``, in the namespace ``n``) that meet a condition."""
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
    """Open a replication connection, as the stream will.

    What lets a role do so is the attribute REPLICATION, but on managed services it can be a membership, so the server
    is asked and the catalog is only for the explanation.

    :raises ConnectionFailed: when the role may, but the connection is refused.
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
    """Check some functions of the server, all that have these names."""
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
    """Check SELECT on the tables, and USAGE on their schemas and on those of their keys' types."""
    # Of the whole table, not of its columns: the snapshot's LOCK TABLE asks for that.
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
    """Check that row-level security hides nothing of the tables."""
    hidden = leaves_where(source, tables, "pg_catalog.row_security_active(c.oid)")
    if hidden:
        user = quoted_user(source)
        raise MissingPrivilege(
            f"row-level security hides rows of {', '.join(hidden)} from role {user}",
            f"Run: ALTER ROLE {user} WITH BYPASSRLS; or let the tables' owner disable row-level security.",
        )
    return "No row is hidden by row-level security."


def takes_writes(connection: Connection) -> str:
    """Check that a transaction may write unless it is told otherwise, on a server that is no standby.

    :raises ServerNotReady: when server, database or role (or the DSN) make transactions read-only by default.
    """
    # What it was before the session stated its own.
    query = "SELECT reset_val = 'on' FROM pg_catalog.pg_settings WHERE name = 'default_transaction_read_only'"
    if not scalar(connection, query):
        return f"Transactions on {_place(connection)} may write."
    database = scalar(connection, "SELECT pg_catalog.quote_ident(pg_catalog.current_database())")
    # Of all places where it can stand, the role in this database comes last but for the client's own options.
    of_client = "Take it out of the DSN's options."
    of_server = (
        f"Run: ALTER ROLE {quoted_user(connection)} IN DATABASE {database} SET default_transaction_read_only = off;"
    )
    raise ServerNotReady(
        f"default_transaction_read_only is on for role {quoted_user(connection)} on {_place(connection)}",
        of_client if "default_transaction_read_only" in connection.info.options else of_server,
    )


def schema_privileges(connection: Connection, names: Sequence[str]) -> dict[str, list[str]]:
    """What the role may do in those of the schemas that exist."""
    query = (
        "SELECT nspname, ARRAY(SELECT p FROM pg_catalog.unnest('{USAGE,CREATE}'::text[]) AS p"
        " WHERE pg_catalog.has_schema_privilege(n.oid, p)) FROM pg_catalog.pg_namespace n WHERE nspname = ANY (%s)"
    )
    return dict(rows(connection, query, [list(names)]))


def table_privileges(connection: Connection, names: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    """What the role may do with those of the tables that exist; ``ROWS`` stands for seeing all of them."""
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
