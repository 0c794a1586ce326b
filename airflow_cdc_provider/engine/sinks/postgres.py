"""The Postgres sink: mirror and changelog tables, committed with their record in one transaction.

The commit record and the staging tables stand in the schema ``airflow_cdc`` of the
target database. Executors write the effects of a piece by COPY into unlogged
staging tables of their own; the driver then applies all pieces of a unit, checks
the epoch, and records the unit, in one transaction. Chunks are committed by the
task that read them: rows, watermark and epoch check are one transaction too.

The epoch row is locked by every commit. A plain SELECT would not fence: an old
writer could read its epoch, be overtaken, and commit after the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import psycopg2
import pyarrow as pa
from psycopg2 import sql

from airflow_cdc_provider.engine.catalog import Table
from airflow_cdc_provider.engine.chunks import Chunk
from airflow_cdc_provider.engine.connection import Connection, connect, connected, describe, row, rows, scalar
from airflow_cdc_provider.engine.effects import MISSING, Effect
from airflow_cdc_provider.engine.errors import Fenced, GateClosed, StagingLost
from airflow_cdc_provider.engine.failpoint import failpoint
from airflow_cdc_provider.engine.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.sinks.base import (
    ChunkRecord,
    MissingValues,
    Record,
    Staged,
    StagedPiece,
    Target,
    Watermark,
)
from airflow_cdc_provider.engine.sinks.postgres_copy import copy_batches
from airflow_cdc_provider.engine.sinks.postgres_tables import (
    FIRST_READ,
    TableStatements,
    create_record_tables,
    prepare_target,
    record_target,
)
from airflow_cdc_provider.engine.visibility import Snapshot

COMMIT_SECONDS = 30.0
"""How long a commit in flight is waited for when the epoch is taken, before its session is ended."""


@dataclass(frozen=True)
class PostgresSink:
    """A pipeline's place in a Postgres database.

    :param dsn: libpq URI of the target database.
    :param pipeline: name of the pipeline.
    :param mode: ``mirror`` or ``changelog``.
    """

    dsn: str = field(repr=False)
    pipeline: str
    mode: Literal["mirror", "changelog"]

    # -- the commit record -------------------------------------------------------------------------

    def prepare(
        self,
        targets: Sequence[Target],
        chunks: Sequence[Chunk],
        identity: Mapping[str, Any],
        consistent_point: int,
    ) -> None:
        """See :meth:`.base.Sink.prepare`."""
        with self._transaction() as connection:
            create_record_tables(connection)
            rows(
                connection,
                "INSERT INTO airflow_cdc.pipelines (pipeline, epoch, owner, applied_lsn, source)"
                " VALUES (%s, 0, '', %s, %s) ON CONFLICT (pipeline) DO NOTHING",
                [self.pipeline, format_lsn(consistent_point), json.dumps(identity)],
            )
            for target in targets:
                prepare_target(connection, self.pipeline, self.mode, target)
            for chunk in chunks:
                self._plan(connection, chunk)
            failpoint("plan-written")

    def _plan(self, connection: Connection, chunk: Chunk) -> None:
        rows(
            connection,
            "INSERT INTO airflow_cdc.chunks (pipeline, source_table, chunk, definition)"
            " VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING",
            [self.pipeline, chunk.table, chunk.index, json.dumps(chunk.to_dict())],
        )

    def restart(self, targets: Sequence[Target], identity: Mapping[str, Any], consistent_point: int) -> None:
        """See :meth:`.base.Sink.restart`."""
        with self._transaction() as connection:
            for target in targets:
                prepare_target(connection, self.pipeline, self.mode, target)
            for table in ("chunks", "tables"):
                statement = sql.SQL("DELETE FROM {} WHERE pipeline = %s").format(sql.Identifier("airflow_cdc", table))
                rows(connection, statement, [self.pipeline])
            for target in targets:
                record_target(connection, self.pipeline, target)
                self._plan(connection, Chunk(target.table.label, 0, None, None))
            rows(
                connection,
                "UPDATE airflow_cdc.pipelines SET applied_lsn = %s, source = %s, updated_at = clock_timestamp()"
                " WHERE pipeline = %s",
                [format_lsn(consistent_point), json.dumps(identity), self.pipeline],
            )

    def record(self) -> Record | None:
        """See :meth:`.base.Sink.record`."""
        with self._transaction() as connection:
            if scalar(connection, "SELECT to_regclass('airflow_cdc.pipelines')") is None:
                return None
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

    def take_epoch(self, owner: str) -> int:
        """See :meth:`.base.Sink.take_epoch`."""
        failpoint("before-epoch")
        try:
            epoch = self._next_epoch(owner)
        except psycopg2.errors.LockNotAvailable:
            self._end_sessions()
            epoch = self._next_epoch(owner)
        failpoint("after-epoch")
        return epoch

    def _next_epoch(self, owner: str) -> int:
        with self._transaction() as connection:
            rows(connection, "SELECT set_config('lock_timeout', %s, true)", [f"{int(COMMIT_SECONDS * 1000)}ms"])
            query = "UPDATE airflow_cdc.pipelines SET epoch = epoch + 1, owner = %s WHERE pipeline = %s RETURNING epoch"
            return int(scalar(connection, query, [owner, self.pipeline]))

    def _end_sessions(self) -> None:
        """End what an earlier run has left: a paused process or a lost host would hold the epoch for hours."""
        with connected(self.dsn) as connection:
            query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"
            rows(connection, query, [self._application])

    # -- chunks and re-reads -----------------------------------------------------------------------

    def write_chunk(
        self,
        epoch: int,
        target: Target,
        chunk: Chunk,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
    ) -> int | None:
        """See :meth:`.base.Sink.write_chunk`."""
        with self._transaction() as connection:
            applied = self._fence(connection, epoch, "FOR SHARE")
            recorded = rows(
                connection,
                "SELECT snapshot FROM airflow_cdc.chunks"
                " WHERE pipeline = %s AND source_table = %s AND chunk = %s FOR UPDATE",
                [self.pipeline, chunk.table, chunk.index],
            )
            if not recorded or recorded[0][0] is not None:
                return None
            seq = FIRST_READ
            if chunk.lower is None and chunk.upper is None:
                seq = self._remove_rows(connection, target, None, applied)
            count = self._copy_rows(connection, target, batches, applied, seq)
            failpoint("chunk-staged")
            watermark = finish()
            rows(
                connection,
                "UPDATE airflow_cdc.chunks SET snapshot = %s, high_lsn = %s, row_count = %s, epoch = %s,"
                " finished_at = clock_timestamp() WHERE pipeline = %s AND source_table = %s AND chunk = %s",
                [
                    str(watermark.snapshot),
                    format_lsn(watermark.high),
                    count,
                    epoch,
                    self.pipeline,
                    chunk.table,
                    chunk.index,
                ],
            )
            failpoint("before-chunk-commit")
        failpoint("after-chunk-commit")
        return count

    def replace(
        self,
        epoch: int,
        target: Target,
        keys: frozenset[tuple[str, ...]] | None,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
    ) -> int:
        """See :meth:`.base.Sink.replace`."""
        label = target.table.label
        with self._transaction() as connection:
            applied = self._fence(connection, epoch, "FOR UPDATE")
            seq = self._remove_rows(connection, target, keys, applied)
            count = self._copy_rows(connection, target, batches, applied, seq)
            watermark = finish()
            index = 0
            if keys is None:
                rows(
                    connection,
                    "DELETE FROM airflow_cdc.chunks WHERE pipeline = %s AND source_table = %s",
                    [self.pipeline, label],
                )
            else:
                index = scalar(
                    connection,
                    "SELECT coalesce(max(chunk), 0) + 1 FROM airflow_cdc.chunks"
                    " WHERE pipeline = %s AND source_table = %s",
                    [self.pipeline, label],
                )
            rows(
                connection,
                "INSERT INTO airflow_cdc.chunks (pipeline, source_table, chunk, definition, keys, snapshot, high_lsn,"
                " row_count, epoch, finished_at) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, clock_timestamp())",
                [
                    self.pipeline,
                    label,
                    index,
                    json.dumps(Chunk(label, index, None, None).to_dict()),
                    None if keys is None else json.dumps(sorted(keys)),
                    str(watermark.snapshot),
                    format_lsn(watermark.high),
                    count,
                    epoch,
                ],
            )
        return count

    def _remove_rows(
        self, connection: Connection, target: Target, keys: frozenset[tuple[str, ...]] | None, applied: str
    ) -> int:
        """Make room for rows that are read again; a changelog says so by a truncate or by deletes.

        :returns: the rows' ``_seq`` in a changelog.
        """
        statements = TableStatements(connection, target)
        if self.mode == "mirror":
            statements.delete(keys)
        elif not statements.empty():
            return statements.log_delete(keys, applied)
        return FIRST_READ

    def matching_keys(self, target: Target, where: str) -> frozenset[tuple[str, ...]]:
        """See :meth:`.base.Sink.matching_keys`."""
        if self.mode == "changelog":
            return frozenset()
        with connected(self.dsn) as connection:
            return TableStatements(connection, target).matching_keys(where)

    def _copy_rows(
        self, connection: Connection, target: Target, batches: Iterator[pa.RecordBatch], applied: str, seq: int
    ) -> int:
        """Copy snapshot rows into the target; in a changelog they are events of kind ``r`` at the applied LSN."""
        names = [column.name for column in target.table.columns]
        if self.mode == "changelog":
            # They sort after events up to the applied LSN and before the next commit's, whose _seq begins at 1.
            meta = {"_op": "r", "_commit_lsn": applied, "_seq": seq}
            names += list(meta)
            batches = (_with_constants(batch, list(map(str, meta.values()))) for batch in batches)
        return copy_batches(connection, sql.Identifier(target.schema, target.name), names, batches)

    # -- stream units ------------------------------------------------------------------------------

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """See :meth:`.base.Sink.stage`."""
        if not effects:
            return ()
        staged = []
        with self._transaction() as connection:
            self._fence(connection, epoch, "FOR SHARE")
            rows(connection, "SET LOCAL synchronous_commit = off")
            targets = self._targets(connection)
            for number, effect in enumerate(effects):
                relation = None
                if effect.rows.num_rows:
                    relation = f"{self._staging_prefix}{attempt}_{number}"
                    statements = TableStatements(connection, targets[effect.label])
                    if self.mode == "mirror":
                        statements.create_mirror_staging(relation, effect.rows.column_names)
                    else:
                        statements.create_changelog_staging(relation, effect.rows.column_names)
                    copy_batches(
                        connection,
                        sql.Identifier("airflow_cdc", relation),
                        effect.rows.column_names,
                        iter(effect.rows.to_batches()),
                    )
                staged.append(
                    Staged(
                        effect.label,
                        relation,
                        effect.rows.num_rows,
                        effect.truncate,
                        tuple(effect.rows.column_names),
                    )
                )
            failpoint("before-batch-staged")
        failpoint("batch-staged")
        return tuple(staged)

    def commit(self, epoch: int, start: int, end: int, pieces: Sequence[StagedPiece]) -> bool:
        """See :meth:`.base.Sink.commit`."""
        failpoint("before-batch-commit")
        with self._transaction() as connection:
            applied = parse_lsn(self._fence(connection, epoch, "FOR UPDATE"))
            skip = applied >= end
            if not skip:
                if start != applied:
                    raise GateClosed(
                        f"the unit ({format_lsn(start)}, {format_lsn(end)}] of pipeline {self.pipeline} does not begin"
                        f" at the applied LSN {format_lsn(applied)}: transactions would be lost or repeated",
                        "Start the pipeline again; it goes on from the applied LSN. If the sink was restored from a"
                        " backup, run `airflow-cdc resnapshot --all`.",
                    )
                self._apply(connection, pieces)
                rows(
                    connection,
                    "UPDATE airflow_cdc.pipelines SET applied_lsn = %s, updated_at = clock_timestamp()"
                    " WHERE pipeline = %s",
                    [format_lsn(end), self.pipeline],
                )
                # A re-read of keys is a filter and nothing else; passed, it is forgotten.
                rows(
                    connection,
                    "DELETE FROM airflow_cdc.chunks WHERE pipeline = %s AND keys IS NOT NULL AND high_lsn <= %s",
                    [self.pipeline, format_lsn(end)],
                )
            for piece in pieces:
                for staged in piece.tables:
                    if staged.relation is not None:
                        rows(
                            connection,
                            sql.SQL("DROP TABLE {}").format(sql.Identifier("airflow_cdc", staged.relation)),
                        )
            failpoint("in-batch-commit")
        failpoint("after-batch-commit")
        return not skip

    def _apply(self, connection: Connection, pieces: Sequence[StagedPiece]) -> None:
        targets = self._targets(connection)
        missing: dict[str, set[tuple[str, ...]]] = {}
        for piece in sorted(pieces, key=lambda p: p.index):
            for staged in piece.tables:
                statements = TableStatements(connection, targets[staged.label])
                self._check_staged(connection, staged)
                if self.mode == "changelog":
                    statements.apply_changelog(staged)
                    continue
                if staged.truncate:
                    # TRUNCATE would show an empty table to readers that hold an older snapshot.
                    statements.delete(None)
                if staged.relation is None:
                    continue
                if MISSING in staged.columns:
                    missing.setdefault(staged.label, set()).update(statements.fill_missing(staged.relation))
                statements.apply_mirror(staged)
        if any(missing.values()):
            raise MissingValues({label: frozenset(keys) for label, keys in missing.items() if keys})

    def _check_staged(self, connection: Connection, staged: Staged) -> None:
        """Unlogged tables are empty after a crash of the target: count before anything is applied."""
        if staged.relation is None:
            return
        relation = sql.Identifier("airflow_cdc", staged.relation)
        exists = scalar(connection, "SELECT to_regclass(%s)", [relation.as_string(connection)])
        query = sql.SQL("SELECT count(*) FROM {}").format(relation)
        count = scalar(connection, query) if exists is not None else 0
        if count != staged.rows:
            raise StagingLost(
                f"{staged.rows} rows were staged for {staged.label}, {count} are there",
                "Start again: the unit is staged anew. The target server has probably crashed in between.",
            )

    def sweep(self, epoch: int) -> None:
        """See :meth:`.base.Sink.sweep`."""
        with contextlib.suppress(Fenced), self._transaction() as connection:
            self._fence(connection, epoch, "FOR SHARE")
            self._drop_staging(connection)

    def _drop_staging(self, connection: Connection) -> None:
        for name in self._staging(connection):
            rows(connection, sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier("airflow_cdc", name)))

    def _staging(self, connection: Connection) -> list[str]:
        found = rows(
            connection,
            "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = 'airflow_cdc' AND starts_with(c.relname, %s)",
            [self._staging_prefix],
        )
        return [name for (name,) in found]

    def drop(self) -> None:
        """See :meth:`.base.Sink.drop`."""
        with self._transaction() as connection:
            if scalar(connection, "SELECT to_regclass('airflow_cdc.pipelines')") is None:
                return
            self._drop_staging(connection)
            for table in ("chunks", "tables", "pipelines"):
                rows(
                    connection,
                    sql.SQL("DELETE FROM {} WHERE pipeline = %s").format(sql.Identifier("airflow_cdc", table)),
                    [self.pipeline],
                )

    @property
    def _application(self) -> str:
        return f"airflow-cdc sink {self.pipeline}"

    @property
    def _staging_prefix(self) -> str:
        """Of a fixed length, so that no pipeline's prefix begins another's."""
        return f"stage_{hashlib.sha256(self.pipeline.encode()).hexdigest()[:12]}_"

    # -- helpers -----------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        connection = connect(self.dsn, self._application, autocommit=False)
        try:
            with connection:
                rows(connection, "SET LOCAL synchronous_commit = on")
                yield connection
        finally:
            connection.close()

    def _fence(self, connection: Connection, epoch: int, lock: Literal["FOR SHARE", "FOR UPDATE"]) -> str:
        """Lock the epoch row and return the applied LSN."""
        current, applied = row(
            connection,
            f"SELECT epoch, applied_lsn::text FROM airflow_cdc.pipelines WHERE pipeline = %s {lock}",
            [self.pipeline],
        )
        if current != epoch:
            raise Fenced(
                f"this run of pipeline {self.pipeline} has epoch {epoch}, but the sink {describe(self.dsn)} is at"
                f" epoch {current}: another run has taken over",
                "Nothing to do if the other run is meant; otherwise stop it and start again.",
            )
        return str(applied)

    def _targets(self, connection: Connection) -> dict[str, Target]:
        found = rows(
            connection,
            "SELECT definition, target_schema, target_table FROM airflow_cdc.tables WHERE pipeline = %s",
            [self.pipeline],
        )
        targets = (Target(Table.from_dict(definition), schema, name) for definition, schema, name in found)
        return {target.table.label: target for target in targets}


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


def _with_constants(batch: pa.RecordBatch, values: Sequence[str]) -> pa.RecordBatch:
    constants = [pa.repeat(pa.scalar(value), batch.num_rows) for value in values]
    names = [f"f{i}" for i in range(batch.num_columns + len(values))]
    return pa.RecordBatch.from_arrays([*batch.columns, *constants], names=names)
