"""Checks a Postgres sink without changing anything.

The role is not a superuser: it owns, or may write, the commit record and the target tables. For the source, see
:mod:`.privileges`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial

from psycopg2 import sql

from airflow_cdc_provider.engine.core.errors import (
    ConfigError,
    ForeignTable,
    MissingPrivilege,
    ServerNotReady,
    SinkIsSource,
)
from airflow_cdc_provider.engine.core.findings import Caution, Checks, Finding
from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.postgres.connection import Connection, connect, describe, row, rows, scalar
from airflow_cdc_provider.engine.postgres.driver_checks import convert_driver_errors
from airflow_cdc_provider.engine.postgres.privileges import (
    may_execute,
    quoted_user,
    schema_privileges,
    table_privileges,
    takes_writes,
)
from airflow_cdc_provider.engine.sinks.postgres.obstacles import (
    find_cautions,
    find_code_of_others,
    find_obstacles,
    listed,
    require_clear,
)
from airflow_cdc_provider.engine.sinks.postgres.packed_rows import require_width
from airflow_cdc_provider.engine.sinks.postgres.prepared_tables import (
    column_mismatches,
    future_columns,
    require_kept,
    target_columns,
)
from airflow_cdc_provider.engine.sinks.postgres.settings import PostgresSettings
from airflow_cdc_provider.engine.sinks.postgres.target_tables import wanted_columns
from airflow_cdc_provider.engine.sinks.postgres.view_preflight import check_views

_SCHEMA = "airflow_cdc"
_RECORDS = ("pipelines", "tables", "chunks", "views")
_FUNCTIONS = ("pg_control_system", "pg_terminate_backend")
_LONGEST_NAME = 63  # bytes


def check(
    settings: PostgresSettings,
    checks: Checks,
    pipeline: str,
    targets: Sequence[Target] | None,
    source: SourceIdentity | None,
) -> None:
    """Check the sink, and whether it can have the targets."""
    place = settings.place

    def opened() -> Connection:
        return connect(settings.dsn, "airflow-cdc preflight")

    sink = checks.run("sink", opened, lambda _: f"sink {place} is reachable.")
    if sink is None:
        return
    with closing(sink):
        checks.run("sink functions", partial(may_execute, sink, _FUNCTIONS))
        # If the role may not ask the server for its identifier, that has been reported already.
        if source is not None and checks.passed("sink functions"):
            checks.run("identity", partial(_identity, source, sink, place))
        if targets is not None:
            names = [(target.schema, target.name) for target in targets]
            checks.run("sink schemas", partial(_schema_names, names))
            checks.run("sink privileges", partial(_may_write, sink, names, settings.mode))
            if checks.passed("sink privileges"):  # otherwise the role may not be able to look into a schema or table
                checks.run("target tables", partial(_target_tables, sink, settings, pipeline, targets))
                checks.run("target obstacles", partial(_obstacles, sink, settings.mode, pipeline, targets))
                checks.run("target constraints", partial(_constraints, sink, settings.mode, pipeline, targets))
                checks.run("target code", partial(_code_of_others, sink, settings.mode, pipeline, targets))
                if checks.passed("target tables", "target obstacles"):
                    check_views(checks, sink, settings, pipeline, _recorded_targets(sink, pipeline, targets))


def check_server(dsn: str, mode: Mode = "mirror") -> list[Finding]:
    """Check a target server independent of its tables; change nothing."""
    checks = Checks(convert_driver_errors)
    opened = checks.run(
        "target", partial(connect, dsn, "airflow-cdc preflight"), lambda _: f"target {describe(dsn)} is reachable."
    )
    if opened is not None:
        with closing(opened) as sink:
            checks.run("target functions", partial(may_execute, sink, _FUNCTIONS))
            checks.run("target privileges", partial(_may_write, sink, (), mode))
    return checks.findings


def _identity(source: SourceIdentity, sink: Connection, place: str) -> str:
    query = "SELECT (SELECT system_identifier FROM pg_catalog.pg_control_system())::text, pg_catalog.current_database()"
    system, database = row(sink, query)
    if source.holds(f"postgres {system}", database):
        raise SinkIsSource(f"source and sink are the same database, {place}", "Choose another database in sink.dsn.")
    return "Source and sink are different databases."


def _schema_names(targets: Sequence[tuple[str, str]]) -> str:
    for schema, _ in targets:
        if len(schema.encode()) > _LONGEST_NAME:
            raise ConfigError(
                f"sink.schema: {schema} has {len(schema.encode())} bytes, but Postgres would truncate it to"
                f" {_LONGEST_NAME}",
                "Choose a shorter sink.schema.",
            )
    return "No schema name is too long."


def _may_write(sink: Connection, targets: Sequence[tuple[str, str]], mode: Mode) -> str:
    """Check that missing record, staging and target tables can be created, and existing ones written.

    :param targets: schema and name of each target table.
    """
    if scalar(sink, "SELECT pg_catalog.pg_is_in_recovery()"):
        raise ServerNotReady("the sink is a standby", "Give sink.dsn the primary's address.")
    takes_writes(sink)
    user = quoted_user(sink)
    tables = [*((_SCHEMA, name) for name in _RECORDS), *targets]
    schemas = schema_privileges(sink, sorted({schema for schema, _ in tables}))
    found = table_privileges(sink, tables)
    may_create = scalar(sink, "SELECT pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE')")
    lacking, statements = [], []
    for schema in sorted({schema for schema, _ in tables}):
        quoted = sql.Identifier(schema).as_string(sink)
        if schema not in schemas:
            if not may_create:
                lacking.append(f"create schema {schema}")
                statements.append(f"CREATE SCHEMA {quoted} AUTHORIZATION {user};")
            continue
        # Staging tables are created for each unit; if all targets exist, nothing else has to be created.
        complete = schema != _SCHEMA and all(table in found for table in tables if table[0] == schema)
        wanted = ["USAGE"] if complete else ["USAGE", "CREATE"]
        missing = [privilege for privilege in wanted if privilege not in schemas[schema]]
        if missing:
            lacking.append(f"{'create tables in' if 'CREATE' in missing else 'use'} schema {schema}")
            statements.append(f"GRANT {', '.join(missing)} ON SCHEMA {quoted} TO {user};")
    for table in tables:
        # A mirror is changed by merges, a changelog only by inserts.
        append_only = mode == "changelog" and table[0] != _SCHEMA
        wanted = ["SELECT", "INSERT"] if append_only else ["SELECT", "INSERT", "UPDATE", "DELETE"]
        missing = [privilege for privilege in wanted if privilege not in found.get(table, wanted)]
        if missing:
            lacking.append(f"{', '.join(missing)} {'.'.join(table)}")
            statements.append(f"GRANT {', '.join(missing)} ON {sql.Identifier(*table).as_string(sink)} TO {user};")
    hidden = [".".join(table) for table in targets if "ROWS" not in found.get(table, ["ROWS"])]
    if hidden:
        lacking.append(f"see all rows of {', '.join(hidden)}, which have row-level security")
        statements.append(f"ALTER ROLE {user} WITH BYPASSRLS;")
    if lacking:
        raise MissingPrivilege(
            f"role {user} may not, in the sink: {'; '.join(lacking)}", f"Run: {' '.join(statements)}"
        )
    return "Schemas and tables can be created and written in the sink."


def _may_select(connection: Connection, table: tuple[str, str]) -> bool:
    """Return whether a table exists and the role may read it."""
    return "SELECT" in table_privileges(connection, [table]).get(table, []) and "USAGE" in schema_privileges(
        connection, [table[0]]
    ).get(table[0], [])


def _target_tables(sink: Connection, settings: PostgresSettings, pipeline: str, targets: Sequence[Target]) -> str:
    recorded: dict[tuple[str, str], tuple[str, str]] = {}
    if _may_select(sink, (_SCHEMA, "tables")):
        query = f"SELECT target_schema, target_table, pipeline, source_table FROM {_SCHEMA}.tables"
        recorded = {(schema, name): (owner, table) for schema, name, owner, table in rows(sink, query)}
    for target in targets:
        schema, name = target.schema, target.name
        owner = recorded.get((schema, name))
        if owner == (pipeline, target.table.label):
            continue
        quoted_name = sql.Identifier(schema, name)
        advice = "Empty or drop the table, or give the pipeline another target schema (sink.schema)."
        if owner is not None:
            raise ForeignTable(
                f"the target table {schema}.{name} belongs to pipeline {owner[0]!r}, which copies {owner[1]} into it",
                "Give the pipeline another target schema (sink.schema), or drop the other one.",
            )
        if _may_select(sink, (schema, name)) and rows(sink, sql.SQL("SELECT 1 FROM {} LIMIT 1").format(quoted_name)):
            raise ForeignTable(
                f"the target table {schema}.{name} exists and has rows that pipeline {pipeline!r} did not write",
                advice,
            )
        # Otherwise the role may not look into the schema.
        if "USAGE" in schema_privileges(sink, [schema]).get(schema, ["USAGE"]):
            _keeps_values(sink, settings, target)
    return "Existing target tables have no foreign rows, and keep the source's values."


def _keeps_values(sink: Connection, settings: PostgresSettings, target: Target) -> None:
    """Refuse columns that cannot keep every value, in an existing table or with existing types."""
    found, wanted = target_columns(sink, target), wanted_columns(sink, settings.mode, target)
    names = None if found else [column.name for column in target.table.columns]
    wrong = column_mismatches(sink, target, found or future_columns(sink, target), wanted, names)
    require_kept(target, wrong, settings.types == "convert")


def _recorded_targets(sink: Connection, pipeline: str, targets: Sequence[Target]) -> list[Target]:
    """Return the recorded targets; new tables as defined by the source."""
    recorded: dict[str, Target] = {}
    if _may_select(sink, (_SCHEMA, "tables")):
        query = f"SELECT definition, target_schema, target_table FROM {_SCHEMA}.tables WHERE pipeline = %s"
        for definition, schema, name in rows(sink, query, [pipeline]):
            found = Target(Table.from_dict(definition), schema, name)
            recorded[found.table.label] = found
    return [recorded.get(target.table.label, target) for target in targets]


def _obstacles(sink: Connection, mode: Mode, pipeline: str, targets: Sequence[Target]) -> str:
    known = _recorded_targets(sink, pipeline, targets)
    for target in known:
        require_width(target, mode)
    require_clear(find_obstacles(sink, known, mode))
    return "No target table refuses the sink's statements."


def _constraints(sink: Connection, mode: Mode, pipeline: str, targets: Sequence[Target]) -> str:
    found = find_cautions(sink, _recorded_targets(sink, pipeline, targets), mode)
    if found:
        raise Caution(f"Target tables may refuse rows that the source has: {listed(found)}.")
    return "No target table is stricter than its source."


def _code_of_others(sink: Connection, mode: Mode, pipeline: str, targets: Sequence[Target]) -> str:
    """Warn of roles that can run code as the sink's role, because triggers run as the role that writes."""
    found = find_code_of_others(sink, _recorded_targets(sink, pipeline, targets), mode)
    if found:
        user = quoted_user(sink)
        raise Caution(f"Triggers of target tables, which their owners can create, run as role {user}: {listed(found)}.")
    return "No trigger of a target table runs as the sink's role, and no other role can create one."
