"""The commit record of the Postgres sink: tables in the schema ``airflow_cdc`` of the target database."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg2 import sql

from airflow_cdc_provider.engine.changes.redefinition import redefinition
from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import GateClosed
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.core.record import ChunkRecord, Record, Target, Watermark
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.postgres.connection import (
    Connection,
    describe,
    row,
    rows,
    scalar,
)
from airflow_cdc_provider.engine.sinks.postgres.fence import PostgresFence
from airflow_cdc_provider.engine.sinks.postgres.staging_tables import PostgresTableStatements
from airflow_cdc_provider.engine.sinks.postgres.table_changes import redefine
from airflow_cdc_provider.engine.sinks.postgres.target_tables import adopt_target, prepare_target, record_target
from airflow_cdc_provider.engine.sinks.postgres.view_record import VIEWS
from airflow_cdc_provider.engine.sinks.protocol_errors import provisioned_meanwhile

_RECORD_TABLES = """
CREATE TABLE IF NOT EXISTS airflow_cdc.pipelines (
    pipeline text PRIMARY KEY,
    epoch bigint NOT NULL,
    owner text NOT NULL,
    applied_lsn pg_lsn NOT NULL,
    source jsonb NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE IF NOT EXISTS airflow_cdc.tables (
    pipeline text,
    source_table text,
    target_schema text NOT NULL,
    target_table text NOT NULL,
    definition jsonb NOT NULL,
    PRIMARY KEY (pipeline, source_table)
);
CREATE TABLE IF NOT EXISTS airflow_cdc.chunks (
    pipeline text,
    source_table text,
    chunk int,
    definition jsonb NOT NULL,
    keys jsonb,
    snapshot text,
    high_lsn pg_lsn,
    row_count bigint,
    epoch bigint,
    finished_at timestamptz,
    PRIMARY KEY (pipeline, source_table, chunk)
);
"""

_RECORD_NAMES = ("pipelines", "tables", "chunks")
_PRESENT = """
SELECT relname::text FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace
WHERE nspname = 'airflow_cdc' AND relname = ANY (%s)
"""


def create_record_tables(connection: Connection) -> None:
    """Create the tables of the commit record unless they exist.

    ``IF NOT EXISTS`` alone would require the privilege to create a schema even if a DBA has created it. It also fails
    if two pipelines begin at once, so that they take turns until their transactions end.
    """
    rows(connection, "SELECT pg_advisory_xact_lock(hashtext('airflow_cdc'))")
    if scalar(connection, "SELECT to_regnamespace('airflow_cdc')") is None:
        rows(connection, "CREATE SCHEMA airflow_cdc")
    rows(connection, _RECORD_TABLES)
    rows(connection, VIEWS)


@dataclass(frozen=True)
class PostgresRecord(PostgresFence):
    """A pipeline's commit record in a Postgres database.

    :param dsn: libpq URI of the target database.
    :param pipeline: name of the pipeline.
    :param mode: ``mirror`` or ``changelog``.
    :param part: the part of a run that uses the sessions; empty outside of runs.
    :param convert: accept target tables whose types do not keep the source's values.
    :param views: the views of the pipeline file.
    """

    def _prepare(
        self,
        targets: Sequence[Target],
        chunks: Sequence[Chunk],
        identity: Mapping[str, Any],
        start: LogPosition,
        ours: Collection[str],
        rehearsal: bool,
    ) -> None:
        with self._transaction(rehearsal) as connection:
            self._limit_waiting(connection)
            create_record_tables(connection)
            begun = rows(
                connection,
                "INSERT INTO airflow_cdc.pipelines (pipeline, epoch, owner, applied_lsn, source)"
                " VALUES (%s, 0, '', %s, %s) ON CONFLICT (pipeline) DO NOTHING RETURNING pipeline",
                [self.pipeline, format_lsn(start), json.dumps(identity)],
            )
            if not begun:
                raise provisioned_meanwhile(self.pipeline)
            # Leftovers of a lost record belong to another slot: their chunks count as finished, with an old snapshot.
            self._forget_tables(connection)
            for target in targets:
                if target.table.label in ours and _exists(connection, target):
                    if self.mode == "changelog":
                        self._refuse_older_history(connection, target, start)
                    adopt_target(connection, self.pipeline, self.mode, target, self.convert)
                else:
                    prepare_target(connection, self.pipeline, self.mode, target, self.convert, bool(self.views))
            for chunk in chunks:
                self._plan(connection, chunk)
            self._view_store(connection, start).check()
            failpoint("before-plan")

    def _add(self, epoch: int, targets: Sequence[Target], chunks: Sequence[Chunk]) -> None:
        with self._transaction() as connection:
            self._limit_waiting(connection)
            self._begin(connection, epoch, "alone")
            for target in targets:
                prepare_target(connection, self.pipeline, self.mode, target, self.convert, bool(self.views))
            for chunk in chunks:
                self._plan(connection, chunk)
            failpoint("before-plan")

    def _forget_tables(self, connection: Connection) -> None:
        for table in ("chunks", "tables"):
            statement = sql.SQL("DELETE FROM {} WHERE pipeline = %s").format(sql.Identifier("airflow_cdc", table))
            rows(connection, statement, [self.pipeline])

    def _plan(self, connection: Connection, chunk: Chunk) -> None:
        rows(
            connection,
            "INSERT INTO airflow_cdc.chunks (pipeline, source_table, chunk, definition) VALUES (%s, %s, %s, %s)",
            [self.pipeline, chunk.table, chunk.index, json.dumps(chunk.to_dict())],
        )

    def restart(
        self,
        epoch: int,
        targets: Sequence[Target],
        identity: Mapping[str, Any],
        start: LogPosition,
        rehearsal: bool = False,
    ) -> None:
        """Begin again at another start of the slot, with every table as one unfinished chunk."""
        with self._fenced(epoch, "alone", rehearsal) as (connection, applied):
            recorded = self._targets(connection)
            for target in targets:
                if target.table.label in recorded:
                    self._redefine_views(connection, applied, recorded[target.table.label], target)
            for target in targets:
                if self.mode == "changelog" and _exists(connection, target):
                    self._refuse_older_history(connection, target, start)
                before = recorded.get(target.table.label)
                prepare_target(connection, self.pipeline, self.mode, before or target, self.convert, bool(self.views))
                if before is not None:
                    self._make_fit(connection, before, target)
            self._forget_tables(connection)
            self._view_store(connection, applied).rebuild(recorded)
            for target in targets:
                record_target(connection, self.pipeline, target)
                self._plan(connection, Chunk(target.table.label, 0, None, None))
            rows(
                connection,
                "UPDATE airflow_cdc.pipelines SET applied_lsn = %s, source = %s, updated_at = clock_timestamp()"
                " WHERE pipeline = %s",
                [format_lsn(start), json.dumps(identity), self.pipeline],
            )

    def _forget(self, tx: Connection, labels: Sequence[str]) -> None:
        for table in ("chunks", "tables"):
            statement = sql.SQL("DELETE FROM {} WHERE pipeline = %s AND source_table = ANY (%s)")
            rows(tx, statement.format(sql.Identifier("airflow_cdc", table)), [self.pipeline, list(labels)])

    def _source(self, tx: Connection) -> Mapping[str, Any]:
        found: Mapping[str, Any] = scalar(
            tx, "SELECT source FROM airflow_cdc.pipelines WHERE pipeline = %s", [self.pipeline]
        )
        return found

    def _note(self, connection: Connection, values: Mapping[str, Any]) -> None:
        query = "UPDATE airflow_cdc.pipelines SET source = source || %s WHERE pipeline = %s"
        rows(connection, query, [json.dumps(values), self.pipeline])

    def missing(self, targets: Sequence[Target]) -> tuple[Target, ...]:
        """Return the targets whose table no longer exists."""
        with self._transaction() as connection:
            return tuple(target for target in targets if not _exists(connection, target))

    def _make_fit(self, connection: Connection, before: Target, after: Target) -> None:
        """Change a table whose rows will be replaced to its source's current columns."""
        change = redefinition(before.table, after.table)
        if self.mode == "mirror" and (change.key or change.retyped or change.replaced):
            PostgresTableStatements(connection, before, self.mode).delete(None)
        redefine(connection, self.pipeline, self.mode, before, after, rows_stay=False, convert=self.convert)

    def identity(self) -> Mapping[str, Any]:
        """Return what distinguishes this database from every other."""
        query = (
            "SELECT (SELECT system_identifier::text FROM pg_control_system()),"
            " (SELECT oid::bigint FROM pg_database WHERE datname = current_database())"
        )
        with self._asked() as connection:
            system, database = row(connection, query)
        return {"system": system, "database": database}

    def record(self) -> Record | None:
        """Return the commit record; ``None`` if there is none."""
        with self._transaction(writes=False) as connection:
            # Looked up in one query, because another pipeline may be creating the tables right now.
            present = {name for (name,) in rows(connection, _PRESENT, [list(_RECORD_NAMES)])}
            lacking = [f"airflow_cdc.{name}" for name in _RECORD_NAMES if name not in present]
            if len(lacking) == len(_RECORD_NAMES):
                return None
            if lacking:
                raise GateClosed(
                    f"the commit record in {describe(self.dsn)} is incomplete: it lacks {', '.join(lacking)}",
                    "Restore the schema airflow_cdc from a backup of the sink. Without a backup, drop it, and"
                    " follow the messages of `airflow-cdc provision`.",
                )
            found = rows(
                connection,
                "SELECT epoch, applied_lsn::text, extract(epoch FROM updated_at)::float8, source"
                " FROM airflow_cdc.pipelines WHERE pipeline = %s",
                [self.pipeline],
            )
            if not found:
                return None
            targets = rows(
                connection,
                "SELECT definition, target_schema, target_table FROM airflow_cdc.tables"
                " WHERE pipeline = %s ORDER BY source_table",
                [self.pipeline],
            )
            chunks = rows(
                connection,
                "SELECT definition, snapshot, high_lsn::text, row_count, keys FROM airflow_cdc.chunks"
                " WHERE pipeline = %s ORDER BY source_table, chunk",
                [self.pipeline],
            )
        ((epoch, applied, advanced, identity),) = found
        return Record(
            epoch=epoch,
            applied=parse_lsn(applied),
            advanced=advanced,
            identity=identity,
            targets=tuple(Target(Table.from_dict(d), schema, name) for d, schema, name in targets),
            chunks=tuple(_chunk_record(*chunk) for chunk in chunks),
        )

    def _refuse_older_history(self, connection: Connection, target: Target, point: LogPosition) -> None:
        """Refuse a changelog with events after a point; new events would sort before events of an
        abandoned timeline.
        """
        name = sql.Identifier(target.schema, target.name)
        last = scalar(connection, sql.SQL("SELECT max(_commit_lsn)::text FROM {}").format(name))
        if last is not None and parse_lsn(last) > point:
            raise GateClosed(
                f"the changelog {target.schema}.{target.name} has events up to {last}, but the source's log is at"
                f" {format_lsn(point)}: they belong to a timeline that the source has abandoned, so new events would"
                " sort before them",
                f"Rename or empty {target.schema}.{target.name}, then run `airflow-cdc resnapshot --all` again.",
            )

    def _targets(self, connection: Connection, labels: Collection[str] | None = None) -> dict[str, Target]:
        found = rows(
            connection,
            "SELECT definition, target_schema, target_table FROM airflow_cdc.tables"
            " WHERE pipeline = %(pipeline)s AND (%(labels)s::text[] IS NULL OR source_table = ANY (%(labels)s))",
            {"pipeline": self.pipeline, "labels": None if labels is None else list(labels)},
        )
        targets = (Target(Table.from_dict(definition), schema, name) for definition, schema, name in found)
        return {target.table.label: target for target in targets}


def _exists(connection: Connection, target: Target) -> bool:
    name = sql.Identifier(target.schema, target.name).as_string(connection)
    return scalar(connection, "SELECT to_regclass(%s)", [name]) is not None


def _chunk_record(
    definition: dict[str, Any], snapshot: str | None, high: str | None, count: int | None, keys: list[list[str]] | None
) -> ChunkRecord:
    watermark = Watermark(Snapshot.parse(snapshot), parse_lsn(high)) if snapshot and high else None
    return ChunkRecord(
        Chunk.from_dict(definition),
        watermark,
        count or 0,
        None if keys is None else frozenset(tuple(key) for key in keys),
    )
