"""Checks the views of the pipeline file in a Postgres sink, before anything is touched.

Target tables that do not exist yet are created in a transaction that is rolled back, so that the server can check the
SELECT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from psycopg2 import sql

from airflow_cdc_provider.engine.core.errors import ConfigError, MissingPrivilege
from airflow_cdc_provider.engine.core.findings import Caution, Checks
from airflow_cdc_provider.engine.core.lsn import LOG_START
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.postgres.privileges import quoted_user, schema_privileges
from airflow_cdc_provider.engine.sinks.postgres.record import create_record_tables
from airflow_cdc_provider.engine.sinks.postgres.settings import PostgresSettings
from airflow_cdc_provider.engine.sinks.postgres.target_tables import prepare_target
from airflow_cdc_provider.engine.sinks.postgres.view_store import PostgresViewStore
from airflow_cdc_provider.engine.views.definition import View
from airflow_cdc_provider.engine.views.settings import ViewSettings

_LONGEST_NAME = 63  # bytes
_PRIVILEGE = "SELECT pg_catalog.has_database_privilege(pg_catalog.current_database(), %s)"
_DATABASE = "SELECT pg_catalog.quote_ident(pg_catalog.current_database())"
_OTHERS = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_class
               WHERE oid = pg_catalog.to_regclass(%s)
               AND NOT (pg_catalog.pg_has_role(relowner, 'USAGE')
                        AND pg_catalog.has_schema_privilege(relnamespace, 'CREATE')))
"""


def check_views(
    checks: Checks, sink: Connection, settings: PostgresSettings, pipeline: str, targets: Sequence[Target]
) -> None:
    """Check the views of the file, one finding each.

    :param targets: the targets of the pipeline; recorded ones as they are recorded.
    """
    if settings.views:
        checks.run("view privileges", partial(_may_keep_views, sink, settings.views))
        for view in settings.views if checks.passed("view privileges") else ():
            checks.run(f"view {view.label}", partial(_view, sink, settings, pipeline, targets, view))


def _may_keep_views(sink: Connection, views: Sequence[ViewSettings]) -> str:
    """Check that temporary tables, and the tables of views, can be created."""
    user, database = quoted_user(sink), scalar(sink, _DATABASE)
    lacking, statements = [], []
    if not scalar(sink, _PRIVILEGE, ["TEMPORARY"]):
        lacking.append("create temporary tables")
        statements.append(f"GRANT TEMPORARY ON DATABASE {database} TO {user};")
    names = sorted({view.schema for view in views})
    found = schema_privileges(sink, names)
    may_create = scalar(sink, _PRIVILEGE, ["CREATE"])
    for schema in names:
        quoted = sql.Identifier(schema).as_string(sink)
        if schema not in found:
            if not may_create:
                lacking.append(f"create schema {schema}")
                statements.append(f"CREATE SCHEMA {quoted} AUTHORIZATION {user};")
        elif missing := [privilege for privilege in ("USAGE", "CREATE") if privilege not in found[schema]]:
            lacking.append(f"create tables in schema {schema}")
            statements.append(f"GRANT {', '.join(missing)} ON SCHEMA {quoted} TO {user};")
    if lacking:
        raise MissingPrivilege(
            f"role {user} may not, in the sink: {'; '.join(lacking)}, which views need", f"Run: {' '.join(statements)}"
        )
    return "Temporary tables and the tables of views can be created in the sink."


def _view(
    sink: Connection, settings: PostgresSettings, pipeline: str, targets: Sequence[Target], view: ViewSettings
) -> str:
    if any(len(name.encode()) > _LONGEST_NAME for name in (view.schema, view.name)):
        raise ConfigError(
            f"view {view.label}: Postgres would truncate its name to {_LONGEST_NAME} bytes", "Choose a shorter name."
        )
    by_label = {target.table.label: target for target in targets}
    rows(sink, "BEGIN READ WRITE")
    try:
        store = PostgresViewStore(sink, pipeline, (view,), by_label, LOG_START)
        with store.excusing(view):
            parsed = store.parse(view, {label: target.table for label, target in by_label.items()})
            _create_missing(sink, settings, pipeline, [by_label[label] for label in parsed.columns])
            store.check()
        missing = [create for _, create in store.lacking_indexes(parsed)]
        return _indexes(sink, by_label, view, parsed, missing)
    finally:
        if not sink.closed:
            rows(sink, "ROLLBACK")


def _create_missing(sink: Connection, settings: PostgresSettings, pipeline: str, used: Sequence[Target]) -> None:
    """Create target tables that do not exist."""
    lacking = [target for target in used if not _exists(sink, target)]
    if lacking:
        create_record_tables(sink)
    for target in lacking:
        prepare_target(sink, pipeline, settings.mode, target, settings.types == "convert", views=True)


def _exists(sink: Connection, target: Target) -> bool:
    return scalar(sink, "SELECT pg_catalog.to_regclass(%s)", [_quoted(sink, target)]) is not None


def _quoted(sink: Connection, target: Target) -> str:
    return sql.Identifier(target.schema, target.name).as_string(sink)


def _indexes(
    sink: Connection, targets: Mapping[str, Target], view: ViewSettings, parsed: View, missing: Sequence[str]
) -> str:
    """Report indexes that the view needs and that do not exist."""
    statements = " ".join(f"{statement};" for statement in missing)
    if missing and view.indexes == "print":
        raise Caution(f"View {view.label} needs indexes that do not exist: {statements}")
    tables = (_quoted(sink, targets[label]) for label in parsed.columns)
    others = [
        name for name in tables if any(f" ON {name} (" in each for each in missing) and scalar(sink, _OTHERS, [name])
    ]
    if others:
        raise MissingPrivilege(
            f"role {quoted_user(sink)} may not create the indexes that view {view.label} needs, because it does not own"
            f" {', '.join(others)}, or may not create in their schemas",
            f"Let the owner run: {statements} Or set `indexes: print` for the view.",
        )
    made = f"; {len(missing)} indexes will be created for it" if missing else ""
    return f"View {view.label} can be kept equal to its SELECT{made}."
