"""Chunks and re-reads in MySQL: rows are written with their watermark in one transaction."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import ConfigError, StreamFailed
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.record import Target, Watermark
from airflow_cdc_provider.engine.postgres.server_identity import Origin
from airflow_cdc_provider.engine.postgres.sql_condition import find_trouble
from airflow_cdc_provider.engine.sinks.mysql.address import driver
from airflow_cdc_provider.engine.sinks.mysql.pending_ddl import announce, settle
from airflow_cdc_provider.engine.sinks.mysql.redefinition import MysqlRedefinition
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.staging_tables import FIRST_READ, TableStatements
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk


@dataclass(frozen=True)
class MysqlReads(MysqlRedefinition):
    """See :class:`.contract.Sink`: chunks and re-reads."""

    def write_chunk(
        self,
        epoch: int,
        target: Target,
        chunk: Chunk,
        origin: Origin,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
    ) -> int | None:
        """See :meth:`.contract.Sink.write_chunk`."""
        whole = chunk.whole

        def is_wanted(opened: Session) -> bool:
            # The record's row is locked until the chunk is committed: who notes another origin waits for that.
            (noted,) = opened.one("SELECT source FROM airflow_cdc.pipelines WHERE pipeline = %s", [self.pipeline])
            known = Origin.of(json.loads(noted))
            if known != origin:
                raise StreamFailed(
                    f"chunk {chunk.title} is read from {origin}, but the pipeline has gone on to {known}",
                    "Start again: the chunk is then read there.",
                )
            recorded = opened.rows(
                "SELECT snapshot FROM airflow_cdc.chunks"
                " WHERE pipeline = %s AND source_table = %s AND chunk = %s FOR UPDATE",
                [self.pipeline, chunk.table, chunk.index],
            )
            return bool(recorded) and recorded[0][0] is None

        def note(opened: Session, watermark: Watermark, count: int) -> None:
            opened.run(
                "UPDATE airflow_cdc.chunks SET snapshot = %s, high_lsn = %s, row_count = %s, epoch = %s,"
                " finished_at = NOW(6) WHERE pipeline = %s AND source_table = %s AND chunk = %s",
                [str(watermark.snapshot), watermark.high, count, epoch, self.pipeline, chunk.table, chunk.index],
            )

        with self._transaction(epoch, "share") as (opened, applied):
            if not is_wanted(opened):
                return None
            aside = whole and self._make_room(opened, epoch, target, reread=False)
            if aside:
                failpoint("before-chunk-staged")
                count, watermark, applied = self._fill_aside(opened, epoch, target, aside, batches, finish)
                with self._naming_lock(opened):
                    self._require_still(applied, self._begin(opened, epoch, "update"), target)
                    if not is_wanted(opened):
                        return None
                    self._require_aside(opened, target, aside)
                    failpoint("before-chunk-prepared")
                    note(opened, watermark, count)
                    announce(opened, self.pipeline, target, "exchange", aside)
                    failpoint("before-chunk-commit")
                    opened.commit()
                    settle(opened, self.pipeline, self.mode)
            else:
                if whole:  # the room may have been made in a transaction of its own
                    opened.rollback()
                    applied = self._begin(opened, epoch, "share")
                    if not is_wanted(opened):
                        return None
                statements = TableStatements(opened, target, self.mode)
                seq = FIRST_READ
                if whole:
                    seq = self._remove_rows(statements, None, applied)
                    self._record_shape(opened, target)
                failpoint("before-chunk-staged")
                count = statements.copy(quoted(target.schema, target.name), batches, applied, seq)
                failpoint("after-chunk-staged")
                watermark = finish()
                failpoint("before-chunk-prepared")
                note(opened, watermark, count)
                failpoint("before-chunk-commit")
                opened.commit()
        failpoint("after-chunk-commit")
        return count

    def commit_chunks(self, epoch: int, copied: Sequence[CopiedChunk]) -> Sequence[int]:
        """See :meth:`.contract.Sink.commit_chunks`: their tasks have committed them."""
        return [each.written for each in copied]

    def replace(
        self,
        epoch: int,
        target: Target,
        keys: frozenset[tuple[str, ...]] | None,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
        before: Target | None,
    ) -> int:
        """See :meth:`.contract.Sink.replace`."""

        def note(opened: Session, watermark: Watermark, count: int) -> None:
            self._note_reread(opened, epoch, target, keys, watermark, count)

        with self._transaction(epoch, "update") as (opened, applied):
            if before is None:
                self._lacks(opened, target)  # refuses what is not ours
            aside = keys is None and self._make_room(opened, epoch, target, reread=True)
            if aside:
                count, watermark, applied = self._fill_aside(opened, epoch, target, aside, batches, finish)
                with self._naming_lock(opened):
                    self._require_still(applied, self._begin(opened, epoch, "update"), target)
                    self._require_aside(opened, target, aside)
                    note(opened, watermark, count)
                    announce(opened, self.pipeline, target, "exchange", aside)
                    failpoint("before-reread-commit")
                    opened.commit()
                    settle(opened, self.pipeline, self.mode)
            else:
                if keys is None:
                    opened.rollback()
                    applied = self._begin(opened, epoch, "update")
                statements = TableStatements(opened, target, self.mode)
                seq = self._remove_rows(statements, keys, applied)
                if keys is not None:
                    batches = (self._only_members(statements, target, keys, batch) for batch in batches)
                count = statements.copy(quoted(target.schema, target.name), batches, applied, seq)
                note(opened, finish(), count)
                if keys is None:
                    self._record_shape(opened, target)
                failpoint("before-reread-commit")
                opened.commit()
        failpoint("after-reread-commit")
        return count

    def _note_reread(
        self,
        opened: Session,
        epoch: int,
        target: Target,
        keys: frozenset[tuple[str, ...]] | None,
        watermark: Watermark,
        count: int,
    ) -> None:
        label, index = target.table.label, 0
        if keys is None:
            self._enter(opened, target)
            opened.run(
                "UPDATE airflow_cdc.tables SET definition = %s WHERE pipeline = %s AND source_table = %s",
                [json.dumps(target.table.to_dict()), self.pipeline, label],
            )
            opened.run(
                "DELETE FROM airflow_cdc.chunks WHERE pipeline = %s AND source_table = %s", [self.pipeline, label]
            )
        else:
            (index,) = opened.one(
                "SELECT COALESCE(MAX(chunk), 0) + 1 FROM airflow_cdc.chunks WHERE pipeline = %s AND source_table = %s",
                [self.pipeline, label],
            )
        opened.run(
            "INSERT INTO airflow_cdc.chunks (pipeline, source_table, chunk, definition, keys_read, snapshot, high_lsn,"
            " row_count, epoch, finished_at) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, NOW(6))",
            [
                self.pipeline,
                label,
                index,
                json.dumps(Chunk(label, int(index), None, None).to_dict()),
                None if keys is None else json.dumps(sorted(keys)),
                str(watermark.snapshot),
                watermark.high,
                count,
                epoch,
            ],
        )

    def _remove_rows(self, statements: TableStatements, keys: frozenset[tuple[str, ...]] | None, applied: int) -> int:
        """Make room for rows that are read again; a changelog says so by a truncate or by deletes.

        :returns: the rows' ``_seq`` in a changelog.
        """
        if self.mode == "mirror":
            statements.delete(keys)
        elif not statements.empty():
            return statements.log_delete(keys, applied)
        return FIRST_READ

    def _only_members(
        self, statements: TableStatements, target: Target, keys: frozenset[tuple[str, ...]], batch: pa.RecordBatch
    ) -> pa.RecordBatch:
        """Leave out rows that the source has found under another text of a key, if that is another key for the target.

        The stream brings these rows.
        """
        names = [column.name for column in target.table.columns]
        columns = [batch.column(names.index(name)) for name in target.table.key]
        chosen = {place for place, _ in statements.members(sorted(keys), columns)}
        return batch.filter(pa.array([row in chosen for row in range(batch.num_rows)], pa.bool_()))

    def check_condition(self, target: Target, where: str) -> None:
        """See :meth:`.contract.Sink.check_condition`; in a changelog rows are found by the source's keys alone.

        The condition is read as SQL of the target, with the names and strings of Postgres.
        """
        if self.mode == "mirror":
            self._require_condition(where)
            pymysql = driver()
            with self._session() as opened:
                opened.speak_postgres()
                try:
                    TableStatements(opened, target, self.mode).check_condition(where)
                except (pymysql.err.ProgrammingError, pymysql.err.OperationalError, pymysql.err.NotSupportedError) as e:
                    raise ConfigError(
                        f"{where!r} is no condition on {target.schema}.{target.name}: {e.args[-1]}",
                        "Write a condition that both Postgres and MySQL understand.",
                    ) from e

    def matching_keys(self, target: Target, where: str) -> frozenset[tuple[str, ...]]:
        """See :meth:`.contract.Sink.matching_keys`."""
        if self.mode == "changelog":
            return frozenset()
        self._require_condition(where)
        with self._session() as opened:
            opened.speak_postgres()
            return TableStatements(opened, target, self.mode).matching_keys(where)

    @staticmethod
    def _require_condition(where: str) -> None:
        trouble = find_trouble(where)
        if trouble is not None:
            raise ConfigError(
                f"{where!r} is not one SQL condition: {trouble}", "Write one condition on the table's columns."
            )

    def members(
        self, target: Target, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]
    ) -> Sequence[tuple[int, int]]:
        """See :meth:`.contract.Sink.members`; the keys of a changelog are one if their texts are."""
        if self.mode == "changelog":
            places = {member: place for place, member in enumerate(members)}
            texts = zip(*(column.to_pylist() for column in keys), strict=True)
            return [(n, places[text]) for n, text in enumerate(texts) if text in places]
        with self._session() as opened:
            return TableStatements(opened, target, self.mode).members(members, keys)
