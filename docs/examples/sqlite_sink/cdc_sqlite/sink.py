"""The sink: SQL for chunks, re-reads, units and comparison. The base class implements the protocol."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import pyarrow as pa

from airflow_cdc_provider.engine.comparison.fetched_side import row_sides
from airflow_cdc_provider.engine.comparison.side import RowKey, Sides
from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import ConfigError, UnknownTable
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import ChunkRecord, Target
from airflow_cdc_provider.engine.core.source_rows import SourceRows
from airflow_cdc_provider.engine.postgres.connection import Connection
from airflow_cdc_provider.engine.sinks.staged import Staged
from airflow_cdc_provider.engine.sinks.transactional.reads import Destination, PendingRead
from cdc_sqlite.record import SqliteRecord
from cdc_sqlite.store import connected, listed, marks, quoted
from cdc_sqlite.tables import SqliteTable, place

_FRAGMENT_BYTES = 1 << 20
_PAGE_ROWS = 250


@dataclass(frozen=True)
class SqliteSink(SqliteRecord):
    """The sink of one pipeline in a database file."""

    # -- chunks and re-reads -----------------------------------------------------------------------

    def _is_unfinished(self, tx: sqlite3.Connection, chunk: Chunk) -> bool:
        query = "SELECT 1 FROM airflow_cdc_chunks WHERE pipeline = ? AND label = ? AND number = ? AND snapshot IS NULL"
        return tx.execute(query, [self.pipeline, chunk.table, chunk.index]).fetchone() is not None

    def _choose_destination(
        self, tx: sqlite3.Connection, epoch: int, read: PendingRead[sqlite3.Connection], applied: LogPosition
    ) -> Destination:
        """Load all rows aside, so that other processes can write to the file while rows are read."""
        tx.rollback()
        return Destination("loaded", applied)

    def _fill_aside(
        self,
        tx: sqlite3.Connection,
        read: PendingRead[sqlite3.Connection],
        destination: Destination,
        rows: SourceRows,
    ) -> int:
        failpoint("before-chunk-staged")
        return SqliteTable(tx, read.target).load(_columns(rows.batches()))

    @contextmanager
    def _take_place(
        self, tx: sqlite3.Connection, epoch: int, read: PendingRead[sqlite3.Connection], destination: Destination
    ) -> Iterator[bool]:
        self._require_still(destination.applied, self._begin(tx, epoch, "alone"), read.target)
        wanted = read.is_wanted(tx)
        if wanted:
            if read.is_reread and read.whole:
                self._enter(tx, [read.target], [])
            table = SqliteTable(tx, read.target)
            if read.whole or read.keys is not None:
                table.delete(read.keys)
            table.take_loaded()
        yield wanted

    def _finish_chunk(self, tx: sqlite3.Connection, epoch: int, read: ChunkRecord, target: Target) -> None:
        self._forget_chunks(tx, read.chunk.table, read.chunk.index)
        self._enter_reread(tx, epoch, read, target)

    def _forget_chunks(self, tx: sqlite3.Connection, label: str, number: int | None = None) -> None:
        query = "DELETE FROM airflow_cdc_chunks WHERE pipeline = ? AND label = ? AND number = coalesce(?, number)"
        tx.execute(query, [self.pipeline, label, number])

    def _free_index(self, tx: sqlite3.Connection, label: str) -> int:
        query = "SELECT coalesce(max(number), 0) + 1 FROM airflow_cdc_chunks WHERE pipeline = ? AND label = ?"
        return int(tx.execute(query, [self.pipeline, label]).fetchone()[0])

    def _enter_reread(self, tx: sqlite3.Connection, epoch: int, read: ChunkRecord, target: Target) -> None:
        assert read.watermark is not None
        tx.execute(
            "INSERT INTO airflow_cdc_chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                self.pipeline,
                read.chunk.table,
                read.chunk.index,
                json.dumps(read.chunk.to_dict()),
                None if read.keys is None else json.dumps(sorted(read.keys)),
                str(read.watermark.snapshot),
                read.watermark.high,
                read.rows,
            ],
        )

    def _redefine(self, epoch: int, before: Target, after: Target) -> None:
        with self._fenced(epoch, "alone") as (connection, _):
            SqliteTable(connection, after).redefine(before)
            connection.execute(
                "UPDATE airflow_cdc_tables SET definition = ? WHERE pipeline = ? AND label = ?",
                [json.dumps(after.table.to_dict()), self.pipeline, after.table.label],
            )

    def check_condition(self, target: Target, where: str) -> NoReturn:
        """Refuse every condition: text does not compare like numbers and dates, so it would match the wrong rows."""
        raise ConfigError(
            f"--where {where!r} cannot be evaluated in {place(target)}, because all values there are text",
            "Leave out `--where` to read the whole table again.",
        )

    def matching_keys(self, target: Target, where: str) -> frozenset[tuple[str, ...]]:
        """Refuse every condition, as :meth:`check_condition`."""
        self.check_condition(target, where)

    # -- units of the stream -----------------------------------------------------------------------

    def _write_deposit(self, tx: sqlite3.Connection, name: str, data: bytes | bytearray) -> None:
        """Write a deposit in fragments, because SQLite limits the size of a value."""
        whole = memoryview(data)
        tx.executemany(
            "INSERT INTO airflow_cdc_deposits VALUES (?, ?, ?, ?)",
            (
                (self.pipeline, name, number, whole[at : at + _FRAGMENT_BYTES])
                for number, at in enumerate(range(0, len(whole), _FRAGMENT_BYTES))
            ),
        )

    def _read_deposit(self, tx: sqlite3.Connection, name: str, size: int) -> bytearray:
        query = "SELECT fragment FROM airflow_cdc_deposits WHERE pipeline = ? AND name = ? ORDER BY number"
        data = bytearray()
        for (fragment,) in tx.execute(query, [self.pipeline, name]):
            data += fragment
        return data

    def _drop_deposits(self, tx: sqlite3.Connection, names: Collection[str] | None) -> None:
        delete = "DELETE FROM airflow_cdc_deposits WHERE pipeline = ?"
        if names is None:
            tx.execute(delete, [self.pipeline])
        for name in names or ():
            tx.execute(f"{delete} AND name = ?", [self.pipeline, name])

    def _stage(self, tx: sqlite3.Connection, epoch: int, attempt: str, effects: Sequence[Effect]) -> Sequence[Staged]:
        """Create a table for each effect with rows, with the columns of the effect."""
        staged = []
        for number, effect in enumerate(effects):
            names, relation = tuple(effect.rows.column_names), None
            if effect.rows.num_rows:
                relation = f"{self._staged}{attempt}_{number}"
                tx.execute(f"CREATE TABLE {quoted(relation)} {listed(names)}")
                insert = f"INSERT INTO {quoted(relation)} VALUES {marks(len(names))}"
                for batch in _columns(effect.rows.to_batches()):
                    tx.executemany(insert, zip(*batch, strict=True))
            staged.append(Staged(effect.label, relation, effect.rows.num_rows, effect.truncate, names))
        return staged

    def _staged_counts(self, tx: sqlite3.Connection, relations: Sequence[str]) -> Mapping[str, int]:
        counts = {}
        for relation in relations:
            if tx.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [relation]).fetchone():
                ((counts[relation],),) = tx.execute(f"SELECT count(*) FROM {quoted(relation)}")
        return counts

    def _table(self, tx: sqlite3.Connection, target: Target) -> SqliteTable:
        return SqliteTable(tx, target)

    def _advance(self, tx: sqlite3.Connection, end: LogPosition) -> None:
        advance = "UPDATE airflow_cdc_pipelines SET applied = ?, advanced = ? WHERE pipeline = ?"
        tx.execute(advance, [end, time.time(), self.pipeline])
        passed = "DELETE FROM airflow_cdc_chunks WHERE pipeline = ? AND keys IS NOT NULL AND high <= ?"
        tx.execute(passed, [self.pipeline, end])

    def _read_beyond(self, tx: sqlite3.Connection, high: LogPosition) -> str | None:
        query = "SELECT label FROM airflow_cdc_chunks WHERE pipeline = ? AND high > ? ORDER BY label LIMIT 1"
        for (label,) in tx.execute(query, [self.pipeline, high]):
            return str(label)
        return None

    def _finish_unit(self, tx: sqlite3.Connection, relations: Sequence[str]) -> None:
        for relation in relations:
            tx.execute(f"DROP TABLE IF EXISTS {quoted(relation)}")

    # -- comparison --------------------------------------------------------------------------------

    @contextmanager
    def compared(self, source: Connection, target: Target) -> Iterator[Sides]:
        """Open both sides of a comparison of one table, see ``Sink.compared``."""
        with connected(self.path) as connection:
            present = SqliteTable(connection, target).columns
        lacking = [column.name for column in target.table.columns if column.name not in present]
        if lacking:
            raise UnknownTable(
                f"the table {place(target)} {'lacks ' + ', '.join(lacking) if present else 'does not exist'}",
                f"Run `airflow-cdc resnapshot --table {target.table.label}`.",
            )
        with row_sides(source, target, self.mode, self.rows) as sides:
            yield sides

    def rows(self, target: Target, keys: Sequence[RowKey] | None) -> Iterator[pa.RecordBatch]:
        """Yield all rows of a target, or those at some keys; one statement reads them all in one state."""
        names = [column.name for column in target.table.columns]
        query = f"SELECT {listed(names)[1:-1]} FROM {quoted(place(target))}"
        values: list[str | None] = []
        if keys is not None and target.table.key:  # without a key, read all rows; the engine selects
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
