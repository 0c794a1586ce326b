"""Checks the tables that a pipeline captures, and its publication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from psycopg2 import sql
from psycopg2.extensions import connection as Connection

from airflow_cdc_provider.engine.core.errors import MissingPrivilege
from airflow_cdc_provider.engine.core.findings import Checks
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import rows
from airflow_cdc_provider.engine.postgres.privileges import (
    leaves_where,
    may_read,
    quoted_user,
    sees_all_rows,
    takes_writes,
)
from airflow_cdc_provider.engine.runs.sink_checks import require_own_targets
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve
from airflow_cdc_provider.engine.sources.postgres.catalog.publication import publication_sql, published_otherwise
from airflow_cdc_provider.engine.sources.postgres.provision.readiness import (
    find_publication,
    may_create_publication,
)
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings


def check_tables(checks: Checks, source: Connection, pipeline: Pipeline) -> tuple[Table, ...] | None:
    """Find the tables that are captured, and check that they can be.

    :returns: the tables; ``None`` when the rules of the file are refused.
    """
    tables = checks.run(
        "tables",
        lambda: resolve(source, postgres_settings(pipeline).tables),
        lambda found: f"Tables that can be captured: {len(found)}.",
    )
    if tables is not None:
        for name, check in _TABLE_CHECKS.items():
            checks.run(name, partial(check, source, pipeline, tables))
        for branch in pipeline.branches:
            checks.run("targets", partial(require_own_targets, branch, tables))
    return tables


def _publication(source: Connection, pipeline: Pipeline, tables: Sequence[Table]) -> str:
    """Check the publication as :func:`check_publication`, without the record, which has the captured tables."""
    query = "SELECT 1 FROM pg_catalog.pg_replication_slots WHERE slot_name = %s"
    settled = () if rows(source, query, [postgres_settings(pipeline).slot]) else tables
    return check_publication(source, pipeline, tables, settled)


def check_publication(source: Connection, pipeline: Pipeline, tables: Sequence[Table], settled: Sequence[Table]) -> str:
    """Check that the publication can be created, or exists and publishes what is captured.

    :param settled: those of the tables, with those of their leaves, that are not going to be published again.
    """
    name = postgres_settings(pipeline).publication
    quoted = sql.Identifier(name).as_string(source)
    statement = publication_sql(source, name, tables)
    not_owned = leaves_where(source, tables, "NOT pg_catalog.pg_has_role(c.relowner, 'USAGE')")
    is_ours = find_publication(source, name)
    if is_ours is None:
        if not_owned:
            raise MissingPrivilege(
                f"publication {name!r} does not exist, and role {quoted_user(source)} cannot create it because it does"
                f" not own {', '.join(not_owned)}",
                f"Let the tables' owner, with CREATE on the database, or a superuser run: {statement}",
            )
        return may_create_publication(source, name)
    missing, different = published_otherwise(source, name, tables)
    fixed = published_otherwise(source, name, settled)[1]
    if fixed or ((missing or different) and (not_owned or not is_ours)):
        shown = ", ".join(f"{leaf.schema}.{leaf.name}" for leaf in different or missing)
        what = "publishes other columns or rows of" if different else "lacks"
        body = statement.partition(" FOR ")[2].rpartition(" WITH ")[0]
        raise MissingPrivilege(
            f"publication {name!r} {what} {shown}", f"Let its owner run: ALTER PUBLICATION {quoted} SET {body};"
        )
    if missing or different:
        takes_writes(source)
        return f"Publication {name!r} exists, tables will be added to it."
    return f"Publication {name!r} exists and has all tables."


_TABLE_CHECKS: dict[str, Callable[[Connection, Pipeline, Sequence[Table]], str]] = {
    "select": lambda source, pipeline, tables: may_read(source, tables),
    "row security": lambda source, pipeline, tables: sees_all_rows(source, tables),
    "publication": _publication,
}
