"""The versions of views in the commit record of a Postgres sink."""

from __future__ import annotations

import dataclasses
import json

from psycopg2 import sql

from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn, parse_lsn
from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.views.definition import View
from airflow_cdc_provider.engine.views.settings import ViewSettings
from airflow_cdc_provider.engine.views.version import ViewVersion

VIEWS = """
CREATE TABLE IF NOT EXISTS airflow_cdc.views (
    pipeline text,
    version int,
    settings jsonb NOT NULL,
    definition jsonb NOT NULL,
    relation text NOT NULL DEFAULT '',
    queue text NOT NULL DEFAULT '',
    built jsonb,
    complete boolean NOT NULL DEFAULT false,
    kept boolean NOT NULL DEFAULT true,
    behind_lsn pg_lsn,
    anchors_built bigint NOT NULL DEFAULT 0,
    anchors_expected bigint NOT NULL DEFAULT 0,
    units bigint NOT NULL DEFAULT 0,
    anchors bigint NOT NULL DEFAULT 0,
    seconds float8 NOT NULL DEFAULT 0,
    PRIMARY KEY (pipeline, version)
)
"""
"""The statement that creates the table, which records of earlier versions of the engine lack."""


def has_views(connection: Connection) -> bool:
    """Return whether the record has the table."""
    return scalar(connection, "SELECT to_regclass('airflow_cdc.views')") is not None


def read_versions(connection: Connection, pipeline: str) -> list[ViewVersion]:
    """Return the versions of a pipeline's views, in order; the table exists."""
    found = rows(
        connection,
        "SELECT version, settings, definition, relation, queue, built, complete, kept, behind_lsn::text,"
        " anchors_built, anchors_expected, units, anchors, seconds"
        " FROM airflow_cdc.views WHERE pipeline = %s ORDER BY version",
        [pipeline],
    )
    return [
        ViewVersion(
            number,
            ViewSettings(**settings),
            View.from_dict(definition),
            relation,
            queue,
            None if built is None else tuple(built),
            complete,
            kept,
            None if behind is None else parse_lsn(behind),
            *counts,
        )
        for number, settings, definition, relation, queue, built, complete, kept, behind, *counts in found
    ]


def add_version(connection: Connection, pipeline: str, settings: ViewSettings, view: View) -> None:
    """Add a version that is to be built."""
    rows(
        connection,
        "INSERT INTO airflow_cdc.views (pipeline, version, settings, definition) VALUES"
        " (%(pipeline)s, (SELECT coalesce(max(version), 0) + 1 FROM airflow_cdc.views WHERE pipeline = %(pipeline)s),"
        " %(settings)s, %(definition)s)",
        {
            "pipeline": pipeline,
            "settings": json.dumps(dataclasses.asdict(settings)),
            "definition": json.dumps(view.to_dict()),
        },
    )


def change_version(connection: Connection, pipeline: str, number: int, **values: object) -> None:
    """Change columns of a version; texts and numbers as they are, lists as JSON."""
    values = {name: json.dumps(value) if isinstance(value, list) else value for name, value in values.items()}
    pairs = sql.SQL(", ").join(
        sql.SQL("{} = {}").format(sql.Identifier(name), sql.Literal(value)) for name, value in values.items()
    )
    rows(
        connection,
        sql.SQL("UPDATE airflow_cdc.views SET {} WHERE pipeline = {} AND version = {}").format(
            pairs, sql.Literal(pipeline), sql.Literal(number)
        ),
    )


def change_settings(connection: Connection, pipeline: str, number: int, settings: ViewSettings) -> None:
    """Change the settings of a version."""
    change_version(connection, pipeline, number, settings=json.dumps(dataclasses.asdict(settings)))


def remove_version(connection: Connection, pipeline: str, version: ViewVersion) -> None:
    """Remove a version from the record, with its queue and, unless readers see them, its rows."""
    if version.queue:
        rows(connection, sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier("airflow_cdc", version.queue)))
    if version.relation and not version.in_place:
        relation = sql.Identifier(version.view.schema, version.relation)
        rows(connection, sql.SQL("DROP TABLE IF EXISTS {}").format(relation))
    rows(connection, "DELETE FROM airflow_cdc.views WHERE pipeline = %s AND version = %s", [pipeline, version.number])


def record_work(
    connection: Connection,
    pipeline: str,
    version: ViewVersion,
    behind: LogPosition | None,
    anchors: int,
    seconds: float,
) -> None:
    """Record a unit that affected a version."""
    rows(
        connection,
        "UPDATE airflow_cdc.views SET behind_lsn = %s, units = units + 1, anchors = anchors + %s,"
        " seconds = seconds + %s WHERE pipeline = %s AND version = %s",
        [None if behind is None else format_lsn(behind), anchors, seconds, pipeline, version.number],
    )


def end_version(connection: Connection, pipeline: str, version: ViewVersion, applied: LogPosition) -> None:
    """Let a version no longer move with the mirror; remove it if readers do not see it yet."""
    if not version.in_place:
        remove_version(connection, pipeline, version)
    elif version.kept:
        behind = applied if version.behind is None else version.behind
        change_version(connection, pipeline, version.number, kept=False, behind_lsn=format_lsn(behind))
