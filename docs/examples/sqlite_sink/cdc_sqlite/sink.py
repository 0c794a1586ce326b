"""The sink: chunks and re-reads, units, and what is compared. See ``Sink`` for what each method has to guarantee."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import pyarrow as pa

from airflow_cdc_provider.engine.comparison.fetched_side import row_sides
from airflow_cdc_provider.engine.comparison.side import Key, Sides
from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import (
    ConfigError,
    Fenced,
    GateClosed,
    StagingLost,
    StreamFailed,
    UnknownTable,
)
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.record import Target, Watermark
from airflow_cdc_provider.engine.postgres.connection import Connection
from airflow_cdc_provider.engine.postgres.server_identity import Origin
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk, MissingValues, Staged, StagedPiece
from cdc_sqlite.record import SqliteRecord
from cdc_sqlite.store import connected, listed, marks, quoted, transaction
from cdc_sqlite.tables import TargetTable, place

_FRAGMENT_BYTES = 1 << 20
_PAGE_ROWS = 250


@dataclass(frozen=True)
class SqliteSink(SqliteRecord):
    """A pipeline's place in a database file."""

    # -- chunks and re-reads -----------------------------------------------------------------------

    def write_chunk(
        self,
        epoch: int,
        target: Target,
        chunk: Chunk,
        origin: Origin,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
    ) -> int | None:
        """See ``Sink.write_chunk``: rows and watermark are committed here."""
        with connected(self.path) as connection:
            before = self._unfinished(connection, epoch, chunk, origin)
            if before is None:
                return None
            table = TargetTable(connection, target)
            failpoint("before-chunk-staged")
            count = table.load(_columns(batches), None)
            failpoint("after-chunk-staged")
            watermark = finish()
            failpoint("before-chunk-prepared")
            with transaction(connection):
                # All of it anew: the file was anybody's while the rows were read.
                applied = self._unfinished(connection, epoch, chunk, origin)
                if applied is None:
                    return None
                self._require_still(before, applied, target)
                if chunk.whole:
                    table.delete(None)
                table.take_loaded()
                connection.execute(
                    "UPDATE airflow_cdc_chunks SET snapshot = ?, high = ?, row_count = ?"
                    " WHERE pipeline = ? AND label = ? AND number = ?",
                    [str(watermark.snapshot), watermark.high, count, self.pipeline, chunk.table, chunk.index],
                )
                failpoint("before-chunk-commit")
        failpoint("after-chunk-commit")
        return count

    def _unfinished(self, connection: sqlite3.Connection, epoch: int, chunk: Chunk, origin: Origin) -> int | None:
        """The applied LSN, if a chunk may still be committed."""
        applied = self._fence(connection, epoch)
        noted = Origin.of(self._identity(connection))
        if noted != origin:
            raise StreamFailed(
                f"chunk {chunk.title} is read from {origin}, but the pipeline has gone on to {noted}",
                "Start again: the chunk is then read there.",
            )
        query = "SELECT 1 FROM airflow_cdc_chunks WHERE pipeline = ? AND label = ? AND number = ? AND snapshot IS NULL"
        found = connection.execute(query, [self.pipeline, chunk.table, chunk.index]).fetchone()
        return applied if found else None

    @staticmethod
    def _require_still(before: int, applied: int, target: Target) -> None:
        """Rows that were read before a unit was applied would take its changes back."""
        if applied != before:
            raise StagingLost(
                f"while rows of {target.table.label} were read, the stream has gone on to {format_lsn(applied)}",
                "Start again: they are read anew.",
            )

    def commit_chunks(self, epoch: int, copied: Sequence[CopiedChunk]) -> Sequence[int]:
        """See ``Sink.commit_chunks``: their tasks have committed them."""
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
        """See ``Sink.replace``."""
        label = target.table.label
        with connected(self.path) as connection:
            table = TargetTable(connection, target)
            start = self._fence(connection, epoch)
            count = table.load(_columns(batches), keys)
            watermark = finish()
            with transaction(connection):
                self._require_still(start, self._fence(connection, epoch), target)
                index = 0
                if keys is None:
                    self._enter(connection, [target], [])
                    connection.execute(
                        "DELETE FROM airflow_cdc_chunks WHERE pipeline = ? AND label = ?", [self.pipeline, label]
                    )
                else:
                    query = (
                        "SELECT coalesce(max(number), 0) + 1 FROM airflow_cdc_chunks WHERE pipeline = ? AND label = ?"
                    )
                    ((index,),) = connection.execute(query, [self.pipeline, label])
                table.delete(keys)
                table.take_loaded()
                connection.execute(
                    "INSERT INTO airflow_cdc_chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    [
                        self.pipeline,
                        label,
                        index,
                        json.dumps(Chunk(label, index, None, None).to_dict()),
                        None if keys is None else json.dumps(sorted(keys)),
                        str(watermark.snapshot),
                        watermark.high,
                        count,
                    ],
                )
                failpoint("before-reread-commit")
        failpoint("after-reread-commit")
        return count

    def redefine(self, epoch: int, before: Target, after: Target) -> None:
        """See ``Sink.redefine``."""
        failpoint("before-redefinition")
        with self._fenced_writing(epoch) as (connection, _):
            TargetTable(connection, after).redefine(before)
            connection.execute(
                "UPDATE airflow_cdc_tables SET definition = ? WHERE pipeline = ? AND label = ?",
                [json.dumps(after.table.to_dict()), self.pipeline, after.table.label],
            )
        failpoint("after-redefinition")

    def check_condition(self, target: Target, where: str) -> NoReturn:
        """See ``Sink.check_condition``: text compares otherwise than numbers and dates, so none would be told right."""
        raise ConfigError(
            f"--where {where!r} cannot be told of the rows of {place(target)}, whose values are all text",
            "Leave --where out: the table is then read again whole.",
        )

    def matching_keys(self, target: Target, where: str) -> frozenset[tuple[str, ...]]:
        """See ``Sink.matching_keys``."""
        self.check_condition(target, where)

    def members(
        self, target: Target, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]
    ) -> Sequence[tuple[int, int]]:
        """See ``Sink.members``: two keys are one if their texts are."""
        places = {member: place for place, member in enumerate(members)}
        texts = zip(*(column.to_pylist() for column in keys), strict=True)
        return [(n, places[text]) for n, text in enumerate(texts) if text in places]

    # -- units of the stream -----------------------------------------------------------------------

    def deposit(self, epoch: int, name: str, data: bytes | bytearray) -> None:
        """See ``Sink.deposit``: in fragments, as a value of SQLite's has a limit."""
        whole = memoryview(data)
        with self._fenced_writing(epoch) as (connection, _):
            connection.executemany(
                "INSERT INTO airflow_cdc_deposits VALUES (?, ?, ?, ?)",
                (
                    (self.pipeline, name, number, whole[at : at + _FRAGMENT_BYTES])
                    for number, at in enumerate(range(0, len(whole), _FRAGMENT_BYTES))
                ),
            )

    def fetch(self, epoch: int, name: str, size: int) -> bytearray:
        """See ``Sink.fetch``."""
        data = bytearray()
        query = "SELECT fragment FROM airflow_cdc_deposits WHERE pipeline = ? AND name = ? ORDER BY number"
        with connected(self.path) as connection:
            self._fence(connection, epoch)
            for (fragment,) in connection.execute(query, [self.pipeline, name]):
                data += fragment
        if len(data) != size:
            raise StagingLost(
                f"a piece of the log of {size} bytes was deposited in {self.path}, {len(data)} are there",
                "Start again: the piece is read anew.",
            )
        return data

    def discard(self, epoch: int, names: Collection[str] | None = None) -> None:
        """See ``Sink.discard``."""
        with suppress(Fenced), self._fenced_writing(epoch) as (connection, _):
            if names is None:
                connection.execute("DELETE FROM airflow_cdc_deposits WHERE pipeline = ?", [self.pipeline])
            for name in names or ():
                query = "DELETE FROM airflow_cdc_deposits WHERE pipeline = ? AND name = ?"
                connection.execute(query, [self.pipeline, name])

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """See ``Sink.stage``: a table for each effect, with the columns that the engine gives it."""
        if not effects:
            return ()
        staged = []
        with self._fenced_writing(epoch) as (connection, _):
            for number, effect in enumerate(effects):
                names, relation = tuple(effect.rows.column_names), None
                if effect.rows.num_rows:
                    relation = f"{self._staged}{attempt}_{number}"
                    connection.execute(f"CREATE TABLE {quoted(relation)} {listed(names)}")
                    for batch in _columns(effect.rows.to_batches()):
                        rows = zip(*batch, strict=True)
                        connection.executemany(f"INSERT INTO {quoted(relation)} VALUES {marks(len(names))}", rows)
                staged.append(Staged(effect.label, relation, effect.rows.num_rows, effect.truncate, names))
            failpoint("before-batch-staged")
        failpoint("after-batch-staged")
        return tuple(staged)

    def commit(
        self,
        epoch: int,
        start: int,
        end: int,
        pieces: Sequence[StagedPiece],
        noted: Mapping[str, Any] | None = None,
    ) -> bool:
        """See ``Sink.commit``."""
        failpoint("before-batch-commit")
        with self._fenced_writing(epoch) as (connection, applied):
            skip = applied >= end
            if not skip:
                if start != applied:
                    raise GateClosed(
                        f"the unit ({format_lsn(start)}, {format_lsn(end)}] of pipeline {self.pipeline} does not begin"
                        f" at the applied LSN {format_lsn(applied)}: transactions would be lost or repeated",
                        "Start the pipeline again; it goes on from the applied LSN. If the file was restored from a"
                        " backup, run `airflow-cdc resnapshot --all`.",
                    )
                self._check_filters(connection, pieces)
                self._apply(connection, pieces)
                connection.execute(
                    "UPDATE airflow_cdc_pipelines SET applied = ?, advanced = ? WHERE pipeline = ?",
                    [end, time.time(), self.pipeline],
                )
                if noted:
                    self._note(connection, noted)
                # A re-read of keys is a filter and nothing else; passed, it is forgotten.
                passed = "DELETE FROM airflow_cdc_chunks WHERE pipeline = ? AND keys IS NOT NULL AND high <= ?"
                connection.execute(passed, [self.pipeline, end])
            for relation in (staged.relation for piece in pieces for staged in piece.tables):
                if relation is not None:
                    connection.execute(f"DROP TABLE IF EXISTS {quoted(relation)}")
            failpoint("in-batch-commit")
        failpoint("after-batch-commit")
        return not skip

    def _check_filters(self, connection: sqlite3.Connection, pieces: Sequence[StagedPiece]) -> None:
        """Rows that were read since the unit was staged hold changes that it would take back."""
        query = "SELECT label FROM airflow_cdc_chunks WHERE pipeline = ? AND high > ? LIMIT 1"
        for high in {piece.high for piece in pieces}:
            for (label,) in connection.execute(query, [self.pipeline, high]).fetchall():
                raise StagingLost(
                    f"rows of {label} were read again after the unit had been staged",
                    "Start again: the unit is staged anew, without what has been read.",
                )

    def _apply(self, connection: sqlite3.Connection, pieces: Sequence[StagedPiece]) -> None:
        targets = self._targets(connection)
        missing: dict[str, set[tuple[str, ...]]] = {}
        for piece in sorted(pieces, key=lambda piece: piece.index):
            for staged in piece.tables:
                _require_all(connection, staged)
                lacking = TargetTable(connection, targets[staged.label]).apply(staged)
                missing.setdefault(staged.label, set()).update(lacking)
        if any(missing.values()):  # all at once, so that all are read at once; what was applied is rolled back
            raise MissingValues({label: frozenset(keys) for label, keys in missing.items() if keys})

    def sweep(self, epoch: int) -> None:
        """See ``Sink.sweep``."""
        with suppress(Fenced), self._fenced_writing(epoch) as (connection, _):
            self._drop_staged(connection)

    # -- comparison --------------------------------------------------------------------------------

    @contextmanager
    def compared(self, source: Connection, target: Target) -> Iterator[Sides]:
        """See ``Sink.compared``."""
        with connected(self.path) as connection:
            present = TargetTable(connection, target).columns
        lacking = [column.name for column in target.table.columns if column.name not in present]
        if lacking:
            raise UnknownTable(
                f"the table {place(target)} {'lacks ' + ', '.join(lacking) if present else 'does not exist'}",
                f"Run `airflow-cdc resnapshot --table {target.table.label}`.",
            )
        with row_sides(source, target, self.mode, self.rows) as sides:
            yield sides

    def rows(self, target: Target, keys: Sequence[Key] | None) -> Iterator[pa.RecordBatch]:
        """All rows of a target, or those at some keys, in one statement and so of one moment."""
        names = [column.name for column in target.table.columns]
        query = f"SELECT {listed(names)[1:-1]} FROM {quoted(place(target))}"
        values: list[str | None] = []
        if keys is not None and target.table.key:  # without a key all are read, and the engine chooses
            tuples = ", ".join([marks(len(target.table.key))] * len(keys))
            query += f" WHERE {listed(target.table.key)} IN (VALUES {tuples})"
            values = [text for key in keys for text in key]
        with connected(self.path) as connection:
            cursor = connection.execute(query, values)
            while page := cursor.fetchmany(_PAGE_ROWS):
                columns = [pa.array(column, pa.string()) for column in zip(*page, strict=True)]
                yield pa.RecordBatch.from_arrays(columns, names=names)


def _columns(batches: Iterator[pa.RecordBatch]) -> Iterator[list[list[str | None]]]:
    return ([column.to_pylist() for column in batch.columns] for batch in batches)


def _require_all(connection: sqlite3.Connection, staged: Staged) -> None:
    """Count what is staged before it is applied."""
    if staged.relation is None:
        return
    exists = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [staged.relation]).fetchone()
    count = 0
    if exists:
        ((count,),) = connection.execute(f"SELECT count(*) FROM {quoted(staged.relation)}")
    if count != staged.rows:
        raise StagingLost(
            f"{staged.rows} rows were staged for {staged.label}, {count} are there",
            "Start again: the unit is staged anew.",
        )
