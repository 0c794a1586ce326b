"""Chunks and re-reads in Postgres: rows are written with their watermark in one transaction."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from psycopg.postgres import types
from psycopg2 import sql

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import StreamFailed
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.record import Target, Watermark
from airflow_cdc_provider.engine.postgres.connection import Connection, connected, rows, scalar
from airflow_cdc_provider.engine.postgres.server_identity import Origin
from airflow_cdc_provider.engine.sinks.contract import Copyable
from airflow_cdc_provider.engine.sinks.postgres.copy import copy_batches, copy_written, takes_binary
from airflow_cdc_provider.engine.sinks.postgres.refused_values import refusals
from airflow_cdc_provider.engine.sinks.postgres.staged_rows import FIRST_READ
from airflow_cdc_provider.engine.sinks.postgres.staging_tables import TableStatements
from airflow_cdc_provider.engine.sinks.postgres.table_changes import redefine
from airflow_cdc_provider.engine.sinks.postgres.target_tables import prepare_target
from airflow_cdc_provider.engine.sinks.postgres.units import PostgresUnits
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk

# What all rows of a chunk have in common in a changelog, and its types there.
_CONSTANTS = {"_op": '"char"', "_commit_lsn": "pg_lsn", "_seq": "bigint"}


@dataclass(frozen=True)
class PostgresReads(PostgresUnits):
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
        with self._transaction() as connection:
            applied = self._fence(connection, epoch, "FOR SHARE")
            # The record's row is locked until the chunk is committed: who notes another origin waits for that.
            noted = scalar(connection, "SELECT source FROM airflow_cdc.pipelines WHERE pipeline = %s", [self.pipeline])
            if Origin.of(noted) != origin:
                raise StreamFailed(
                    f"chunk {chunk.title} is read from {origin}, but the pipeline has gone on to {Origin.of(noted)}",
                    "Start again: the chunk is then read there.",
                )
            recorded = rows(
                connection,
                "SELECT snapshot FROM airflow_cdc.chunks"
                " WHERE pipeline = %s AND source_table = %s AND chunk = %s FOR UPDATE",
                [self.pipeline, chunk.table, chunk.index],
            )
            if not recorded or recorded[0][0] is not None:
                return None
            seq = FIRST_READ
            if chunk.whole:
                seq = self._remove_rows(connection, target, None, applied)
            failpoint("before-chunk-staged")
            count = self._copy_rows(connection, target, batches, applied, seq)
            failpoint("after-chunk-staged")
            watermark = finish()
            failpoint("before-chunk-prepared")
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
        label = target.table.label
        with self._transaction() as connection:
            applied = self._fence(connection, epoch, "FOR UPDATE")
            if keys is None:
                prepare_target(connection, self.pipeline, self.mode, before or target, self.convert)
            seq = self._remove_rows(connection, before or target, keys, applied)
            if before is not None and before.table.to_dict() != target.table.to_dict():
                redefine(connection, self.pipeline, self.mode, before, target, rows_stay=False, convert=self.convert)
            if keys is not None:
                batches = (self._only_members(target, keys, batch) for batch in batches)
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
            failpoint("before-reread-commit")
        failpoint("after-reread-commit")
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

    def _only_members(self, target: Target, keys: frozenset[tuple[str, ...]], batch: pa.RecordBatch) -> pa.RecordBatch:
        """Leave out rows that the source has found under another text of a key, if that is another key for the target.

        Its column is text where it lacks the key's type. The stream brings these rows.
        """
        names = [column.name for column in target.table.columns]
        columns = [batch.column(names.index(name)) for name in target.table.key]
        members = np.array([text in keys for text in zip(*(c.to_pylist() for c in columns), strict=True)], dtype=bool)
        others = np.flatnonzero(~members)
        if others.size:
            asked = [column.take(pa.array(others)) for column in columns]
            members[[others[place] for place, _ in self.members(target, sorted(keys), asked)]] = True
        return batch.filter(pa.array(members))

    def check_condition(self, target: Target, where: str) -> None:
        """See :meth:`.contract.Sink.check_condition`; in a changelog rows are found by the source's keys alone."""
        if self.mode == "mirror":
            with connected(self.dsn) as connection:
                TableStatements(connection, target).check_condition(where)

    def matching_keys(self, target: Target, where: str) -> frozenset[tuple[str, ...]]:
        """See :meth:`.contract.Sink.matching_keys`."""
        if self.mode == "changelog":
            return frozenset()
        with connected(self.dsn) as connection:
            return TableStatements(connection, target).matching_keys(where)

    def members(
        self, target: Target, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]
    ) -> Sequence[tuple[int, int]]:
        """See :meth:`.contract.Sink.members`; the keys of a changelog are one if their texts are."""
        if self.mode == "changelog":
            places = {member: place for place, member in enumerate(members)}
            texts = zip(*(column.to_pylist() for column in keys), strict=True)
            return [(n, places[text]) for n, text in enumerate(texts) if text in places]
        with self._asked() as connection:
            return TableStatements(connection, target).members(members, keys)

    def _copy_rows(
        self, connection: Connection, target: Target, batches: Iterator[pa.RecordBatch], applied: str, seq: int
    ) -> int:
        """Copy snapshot rows into the target; in a changelog they are events of kind ``r`` at the applied LSN."""
        table = sql.Identifier(target.schema, target.name)
        constants: dict[str, str] = {}
        if self.mode == "changelog":
            # They sort after events up to the applied LSN and before the next commit's, whose _seq begins at 1.
            constants = {"_op": "r", "_commit_lsn": applied, "_seq": str(seq)}
        names = [*(column.name for column in target.table.columns), *constants]
        with refusals(target):
            if isinstance(batches, Copyable):
                oids = {column.name: column.type_oid for column in target.table.columns}
                oids |= {name: types[_CONSTANTS[name]].oid for name in constants}
                binary = takes_binary(connection, table, oids)
                written = batches.copied([(text, _CONSTANTS[name]) for name, text in constants.items()], binary)
                return copy_written(connection, table, names, written, binary)
            if constants:
                batches = (_with_constants(batch, list(constants.values())) for batch in batches)
            return copy_batches(connection, table, names, batches)


def _with_constants(batch: pa.RecordBatch, values: Sequence[str]) -> pa.RecordBatch:
    constants = [pa.repeat(pa.scalar(value), batch.num_rows) for value in values]
    names = [f"f{i}" for i in range(batch.num_columns + len(values))]
    return pa.RecordBatch.from_arrays([*batch.columns, *constants], names=names)
