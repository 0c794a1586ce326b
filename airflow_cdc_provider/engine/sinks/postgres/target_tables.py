"""The definition of a target table of the Postgres sink: its creation from the source table, and its changes.

In a mirror, the target has the source's columns. In a changelog, the history stays: a column that the source has
dropped is kept, but gets no more values.
"""

from __future__ import annotations

import json
from typing import Literal

from psycopg2 import sql

from airflow_cdc_provider.engine.core.errors import ForeignTable
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.sinks.postgres.column_types import column_definition, column_type
from airflow_cdc_provider.engine.sinks.postgres.obstacles import find_obstacles, require_clear
from airflow_cdc_provider.engine.sinks.postgres.packed_rows import require_width
from airflow_cdc_provider.engine.sinks.postgres.prepared_tables import (
    ColumnMismatch,
    column_mismatches,
    require_kept,
    target_columns,
)

CHANGELOG_COLUMNS = {
    "_op": '"char" NOT NULL',
    "_commit_lsn": "pg_lsn NOT NULL",
    "_seq": "bigint NOT NULL",
    "_xid": "bigint",
    "_commit_ts": "timestamptz",
    "_before": "jsonb",
    "_unchanged": "text[]",
}
"""Names and types of a changelog's additional columns."""


CHANGELOG_TYPES = {name: kind.removesuffix(" NOT NULL") for name, kind in CHANGELOG_COLUMNS.items()}
"""The same, without NOT NULL."""

ROOM_FOR_UPDATES = "fillfactor = 90"
"""With room for the new version of a row on its page, an update need not touch the indexes (HOT)."""

ROOM_FOR_VIEWS = "fillfactor = 70"
"""The same for the mirrors of a sink with views, which have indexes on join columns, and for the views."""


_SPELLED = {"timestamptz": "timestamp with time zone"}


def prepare_target(
    connection: Connection,
    pipeline: str,
    mode: Literal["mirror", "changelog"],
    target: Target,
    convert: bool = False,
    views: bool = False,
) -> None:
    """Create a target table, or accept it if it is the pipeline's or empty, and record it.

    :param convert: accept columns whose types do not keep the source's values.
    :param views: whether the sink has views.
    :raises ForeignTable: when it has rows that the pipeline did not write, belongs to another pipeline, lacks columns,
        or has columns that do not keep the source's values.
    :raises TargetConflict: when it would refuse or change written rows.
    """
    table = sql.Identifier(target.schema, target.name)
    ours = rows(
        connection,
        "SELECT 1 FROM airflow_cdc.tables WHERE pipeline = %s AND source_table = %s"
        " AND target_schema = %s AND target_table = %s",
        [pipeline, target.table.label, target.schema, target.name],
    )
    exists = scalar(connection, "SELECT to_regclass(%s)", [table.as_string(connection)]) is not None
    if not ours:
        _refuse_anothers(connection, pipeline, target)
    if exists and not ours and rows(connection, sql.SQL("SELECT 1 FROM {} LIMIT 1").format(table)):
        raise ForeignTable(
            f"the target table {target.schema}.{target.name} exists and has rows that pipeline {pipeline!r}"
            " did not write",
            "Empty or drop the table, or give the pipeline another target schema (`sink.schema`).",
        )
    require_width(target, mode)
    require_clear(find_obstacles(connection, [target], mode))
    if not exists:
        schema = sql.Identifier(target.schema)
        if scalar(connection, "SELECT to_regnamespace(%s)", [schema.as_string(connection)]) is None:
            rows(connection, sql.SQL("CREATE SCHEMA {}").format(schema))
        definitions = [column_definition(connection, mode, column) for column in target.table.columns]
        if mode == "changelog":
            definitions += [
                sql.SQL("{} " + kind).format(sql.Identifier(name)) for name, kind in CHANGELOG_COLUMNS.items()
            ]
        elif target.table.key:
            key = sql.SQL(", ").join(map(sql.Identifier, target.table.key))
            definitions.append(sql.SQL("PRIMARY KEY ({})").format(key))
        room = f"WITH ({ROOM_FOR_VIEWS if views else ROOM_FOR_UPDATES})"
        room = room if mode == "mirror" and target.table.key else ""
        columns = sql.SQL(", ").join(definitions)
        rows(connection, sql.SQL(f"CREATE TABLE {{}} ({{}}) {room}").format(table, columns))
        if mode == "changelog" or not target.table.key:
            # A publication of all tables would refuse to update or delete rows without a replica identity.
            rows(connection, sql.SQL("ALTER TABLE {} REPLICA IDENTITY FULL").format(table))
    if not ours:
        require_kept(target, _column_mismatches(connection, mode, target), convert)
    record_target(connection, pipeline, target)


def _column_mismatches(
    connection: Connection, mode: Literal["mirror", "changelog"], target: Target
) -> list[ColumnMismatch]:
    """Compare the columns of a target table with those of a new one."""
    return column_mismatches(
        connection, target, target_columns(connection, target), wanted_columns(connection, mode, target)
    )


def wanted_columns(connection: Connection, mode: Literal["mirror", "changelog"], target: Target) -> dict[str, str]:
    """Return the columns and types of a new target table."""
    columns = {column.name: column_type(connection, mode, column).bare for column in target.table.columns}
    if mode == "changelog":
        columns |= {name: _SPELLED.get(kind, kind) for name, kind in CHANGELOG_TYPES.items()}
    return columns


def adopt_target(
    connection: Connection,
    pipeline: str,
    mode: Literal["mirror", "changelog"],
    target: Target,
    convert: bool = False,
) -> None:
    """Accept an unrecorded target table as the pipeline's; its rows will be replaced.

    :param convert: see :func:`prepare_target`.
    :raises ForeignTable: when its definition differs from its source table's, or it belongs to another pipeline.
    """
    table = sql.Identifier(target.schema, target.name)
    _refuse_anothers(connection, pipeline, target)
    require_clear(find_obstacles(connection, [target], mode))
    wanted = wanted_columns(connection, mode, target)
    query = (
        "SELECT attname::text FROM pg_attribute"
        " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped AND attgenerated = ''"
    )
    found = {name for (name,) in rows(connection, query, [table.as_string(connection)])}
    if mode == "changelog":  # it keeps columns that the source has dropped
        found &= wanted.keys()
    differs = found != wanted.keys() or (not convert and bool(_column_mismatches(connection, mode, target)))
    if differs:
        shown = ", ".join(f"{name} {kind}" for name, kind in wanted.items())
        key = f", and a unique key on ({', '.join(target.table.key)})" if mode == "mirror" and target.table.key else ""
        raise ForeignTable(
            f"the target table {target.schema}.{target.name} is not defined like {target.table.label}; its columns"
            f" should be {shown}{key}",
            "Add these columns, or drop or rename the table, so that it is created; then run"
            " `airflow-cdc resnapshot --all`.",
        )
    record_target(connection, pipeline, target)


def _refuse_anothers(connection: Connection, pipeline: str, target: Target) -> None:
    """Refuse a target table, with rows or without, into which another pipeline copies."""
    owners = rows(
        connection,
        "SELECT DISTINCT pipeline FROM airflow_cdc.tables"
        " WHERE pipeline <> %s AND target_schema = %s AND target_table = %s",
        [pipeline, target.schema, target.name],
    )
    if owners:
        names = ", ".join(repr(owner) for (owner,) in owners)
        raise ForeignTable(
            f"the target table {target.schema}.{target.name} belongs to pipeline {names}",
            "Give this pipeline another target schema (`sink.schema`). Or, if the other pipeline is not needed anymore,"
            " run `airflow-cdc drop` with its file, then try again.",
        )


def record_target(connection: Connection, pipeline: str, target: Target) -> None:
    """Add a target table to the commit record as the pipeline's."""
    rows(
        connection,
        "INSERT INTO airflow_cdc.tables (pipeline, source_table, target_schema, target_table, definition)"
        " VALUES (%s, %s, %s, %s, %s) ON CONFLICT (pipeline, source_table) DO NOTHING",
        [pipeline, target.table.label, target.schema, target.name, json.dumps(target.table.to_dict())],
    )
