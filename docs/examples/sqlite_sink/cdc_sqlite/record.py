"""The commit record: tables in the same file as the targets, so that one transaction commits data and record."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import ForeignTable
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.core.record import ChunkRecord, Record, Target, Watermark
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.sinks.protocol_errors import provisioned_meanwhile
from airflow_cdc_provider.engine.sinks.transactional.reads import TransactionalSink
from airflow_cdc_provider.engine.sinks.transactional.record import Lock
from cdc_sqlite.store import connected, quoted
from cdc_sqlite.tables import SqliteTable, place

_TABLES = (
    "CREATE TABLE IF NOT EXISTS airflow_cdc_store (id TEXT)",
    "INSERT INTO airflow_cdc_store SELECT hex(randomblob(16)) WHERE NOT EXISTS (SELECT 1 FROM airflow_cdc_store)",
    "CREATE TABLE IF NOT EXISTS airflow_cdc_pipelines (pipeline TEXT PRIMARY KEY, epoch INTEGER, owner TEXT,"
    " applied INTEGER, advanced REAL, identity TEXT)",
    "CREATE TABLE IF NOT EXISTS airflow_cdc_tables (pipeline TEXT, label TEXT, target_schema TEXT, target_name TEXT,"
    " place TEXT UNIQUE COLLATE NOCASE, definition TEXT, PRIMARY KEY (pipeline, label))",
    "CREATE TABLE IF NOT EXISTS airflow_cdc_chunks (pipeline TEXT, label TEXT, number INTEGER, definition TEXT,"
    " keys TEXT, snapshot TEXT, high INTEGER, row_count INTEGER, PRIMARY KEY (pipeline, label, number))",
    "CREATE TABLE IF NOT EXISTS airflow_cdc_deposits (pipeline TEXT, name TEXT, number INTEGER, fragment BLOB,"
    " PRIMARY KEY (pipeline, name, number))",
)


@dataclass(frozen=True)
class SqliteRecord(TransactionalSink[sqlite3.Connection]):
    """A pipeline's commit record in a database file."""

    path: str
    pipeline: str
    mode: Literal["mirror"] = "mirror"

    @property
    def _place(self) -> str:
        return self.path

    @contextmanager
    def _transaction(self, rehearsal: bool = False) -> Iterator[sqlite3.Connection]:
        with connected(self.path) as connection:
            yield connection
            if rehearsal:
                connection.rollback()
            else:
                connection.commit()

    @contextmanager
    def _writing(self, rehearsal: bool = False) -> Iterator[sqlite3.Connection]:
        """Begin the only writing transaction, and create the record's tables if they do not exist."""
        with self._transaction(rehearsal) as connection:
            connection.execute("BEGIN IMMEDIATE")
            for statement in _TABLES:
                connection.execute(statement)
            yield connection

    def _begin(self, tx: sqlite3.Connection, epoch: int, lock: Lock) -> LogPosition:
        """Lock the whole file, whichever lock is asked for: no run can take the epoch until the transaction ends."""
        tx.execute("BEGIN IMMEDIATE")
        return self._fence(tx, epoch, lock)

    def _lock_epoch(self, tx: sqlite3.Connection, lock: Lock | None) -> tuple[int, LogPosition] | None:
        if not tx.execute("SELECT 1 FROM sqlite_master WHERE name = 'airflow_cdc_pipelines'").fetchone():
            return None
        query = "SELECT epoch, applied FROM airflow_cdc_pipelines WHERE pipeline = ?"
        found: tuple[int, LogPosition] | None = tx.execute(query, [self.pipeline]).fetchone()
        return found

    # -- provisioning ------------------------------------------------------------------------------

    def _prepare(
        self,
        targets: Sequence[Target],
        chunks: Sequence[Chunk],
        identity: Mapping[str, Any],
        start: LogPosition,
        ours: Collection[str],
        rehearsal: bool,
    ) -> None:
        with self._writing(rehearsal) as connection:
            begun = connection.execute(
                "INSERT OR IGNORE INTO airflow_cdc_pipelines VALUES (?, 0, '', ?, ?, ?)",
                [self.pipeline, start, time.time(), json.dumps(identity)],
            )
            if not begun.rowcount:
                raise provisioned_meanwhile(self.pipeline)
            self._forget_all(connection)  # leftovers of a lost record belong to another slot
            self._enter(connection, targets, chunks, ours)
            failpoint("before-plan")

    def _add(self, epoch: int, targets: Sequence[Target], chunks: Sequence[Chunk]) -> None:
        with self._fenced(epoch, "alone") as (connection, _):
            self._enter(connection, targets, chunks)
            failpoint("before-plan")

    def restart(
        self,
        epoch: int,
        targets: Sequence[Target],
        identity: Mapping[str, Any],
        start: LogPosition,
        rehearsal: bool = False,
    ) -> None:
        """Record all tables as unfinished chunks from a new start, see ``Sink.restart``."""
        with self._fenced(epoch, "alone", rehearsal) as (connection, _):
            ours = [target.table.label for target in targets if self._owner(connection, target)]
            self._forget_all(connection)
            chunks = [Chunk(target.table.label, 0, None, None) for target in targets]
            self._enter(connection, targets, chunks, ours)
            connection.execute(
                "UPDATE airflow_cdc_pipelines SET applied = ?, advanced = ?, identity = ? WHERE pipeline = ?",
                [start, time.time(), json.dumps(identity), self.pipeline],
            )

    def _forget_all(self, connection: sqlite3.Connection) -> None:
        for table in ("airflow_cdc_tables", "airflow_cdc_chunks"):
            connection.execute(f"DELETE FROM {table} WHERE pipeline = ?", [self.pipeline])

    def _enter(
        self,
        connection: sqlite3.Connection,
        targets: Sequence[Target],
        chunks: Sequence[Chunk],
        ours: Collection[str] = (),
    ) -> None:
        """Create or accept target tables, and record them with their chunks."""
        for target in targets:
            recorded = self._owner(connection, target)
            SqliteTable(connection, target).accept(recorded or target.table.label in ours)
            connection.execute(
                "INSERT OR REPLACE INTO airflow_cdc_tables VALUES (?, ?, ?, ?, ?, ?)",
                [
                    self.pipeline,
                    target.table.label,
                    target.schema,
                    target.name,
                    place(target),
                    json.dumps(target.table.to_dict()),
                ],
            )
        for chunk in chunks:
            connection.execute(
                "INSERT INTO airflow_cdc_chunks (pipeline, label, number, definition) VALUES (?, ?, ?, ?)",
                [self.pipeline, chunk.table, chunk.index, json.dumps(chunk.to_dict())],
            )

    def _owner(self, connection: sqlite3.Connection, target: Target) -> bool:
        """Return whether the record assigns a target table to its source table.

        :raises ForeignTable: if it belongs to another source table or another pipeline.
        """
        query = "SELECT pipeline, label FROM airflow_cdc_tables WHERE place = ?"
        found = connection.execute(query, [place(target)]).fetchone()
        if found not in (None, (self.pipeline, target.table.label)):
            raise ForeignTable(
                f"the table {place(target)} belongs to {found[1]} of pipeline {found[0]!r}",
                "Set another target schema (`sink.schema`) for this pipeline, or drop the other pipeline.",
            )
        return found is not None

    def _forget(self, tx: sqlite3.Connection, labels: Sequence[str]) -> None:
        for table in ("airflow_cdc_tables", "airflow_cdc_chunks"):
            query = f"DELETE FROM {table} WHERE pipeline = ? AND label = ?"
            tx.executemany(query, [(self.pipeline, label) for label in labels])

    # -- reading -----------------------------------------------------------------------------------

    def identity(self) -> Mapping[str, Any]:
        """Return the random number that the file gets when it is first written to."""
        with self._writing() as connection:
            return {"file": connection.execute("SELECT id FROM airflow_cdc_store").fetchone()[0]}

    def record(self) -> Record | None:
        """Return the commit record; ``None`` if there is none."""
        if not Path(self.path).exists():  # connecting would create it
            return None
        with connected(self.path) as connection:
            connection.execute("BEGIN")  # reads all tables in one state
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'airflow_cdc_pipelines'").fetchone():
                return None
            query = "SELECT epoch, applied, advanced, identity FROM airflow_cdc_pipelines WHERE pipeline = ?"
            found = connection.execute(query, [self.pipeline]).fetchone()
            if found is None:
                return None
            chunks = connection.execute(
                "SELECT definition, snapshot, high, row_count, keys FROM airflow_cdc_chunks"
                " WHERE pipeline = ? ORDER BY label, number",
                [self.pipeline],
            ).fetchall()
            targets = tuple(self._targets(connection).values())
        epoch, applied, advanced, identity = found
        return Record(epoch, applied, advanced, json.loads(identity), targets, tuple(_chunk(*each) for each in chunks))

    def _targets(self, tx: sqlite3.Connection, labels: Collection[str] | None = None) -> dict[str, Target]:
        found = tx.execute(
            "SELECT label, definition, target_schema, target_name FROM airflow_cdc_tables"
            " WHERE pipeline = ? ORDER BY label",
            [self.pipeline],
        )
        return {
            label: Target(Table.from_dict(json.loads(text)), schema, name)
            for label, text, schema, name in found
            if labels is None or label in labels
        }

    def missing(self, targets: Sequence[Target]) -> tuple[Target, ...]:
        """Return the targets whose table no longer exists."""
        with connected(self.path) as connection:
            return tuple(target for target in targets if not SqliteTable(connection, target).columns)

    # -- the epoch ---------------------------------------------------------------------------------

    def _next_epoch(self, owner: str, at_least: int) -> int:
        with self._writing() as connection:
            query = "SELECT epoch FROM airflow_cdc_pipelines WHERE pipeline = ?"
            ((last,),) = connection.execute(query, [self.pipeline])
            # The clock keeps epochs unique even if the file is restored from a copy.
            epoch = max(int(last) + 1, int(time.time() * 1000), at_least)
            update = "UPDATE airflow_cdc_pipelines SET owner = ?, epoch = ? WHERE pipeline = ?"
            connection.execute(update, [owner, epoch, self.pipeline])
        return epoch

    def end_sessions(self) -> None:
        """Wait until the current writer has committed, because SQLite cannot end another process's session.

        A task that has not committed its chunk yet may still do so later: once, and only while the chunk is recorded as
        unfinished.
        """
        with self._writing():
            pass

    def _source(self, tx: sqlite3.Connection) -> Mapping[str, Any]:
        query = "SELECT identity FROM airflow_cdc_pipelines WHERE pipeline = ?"
        return dict(json.loads(tx.execute(query, [self.pipeline]).fetchone()[0]))

    def _note(self, tx: sqlite3.Connection, values: Mapping[str, Any]) -> None:
        noted = {**self._source(tx), **values}
        update = "UPDATE airflow_cdc_pipelines SET identity = ? WHERE pipeline = ?"
        tx.execute(update, [json.dumps(noted), self.pipeline])

    # -- removal -----------------------------------------------------------------------------------

    def drop(self) -> None:
        """Remove the commit record, everything staged and all deposits; target tables stay."""
        if not Path(self.path).exists():
            return
        with self._writing() as connection:
            self._sweep(connection)
            for table in ("deposits", "chunks", "tables", "pipelines"):
                connection.execute(f"DELETE FROM airflow_cdc_{table} WHERE pipeline = ?", [self.pipeline])

    @property
    def _staged(self) -> str:
        """Return the prefix of staging tables: pipeline names have no space, and names of targets have a dot."""
        return f"airflow_cdc_stage {self.pipeline} "

    def _sweep(self, tx: sqlite3.Connection) -> None:
        query = "SELECT name FROM sqlite_master WHERE substr(name, 1, ?) = ?"
        for (name,) in tx.execute(query, [len(self._staged), self._staged]).fetchall():
            tx.execute(f"DROP TABLE {quoted(name)}")


def _chunk(
    definition: str, snapshot: str | None, high: LogPosition, count: int | None, keys: str | None
) -> ChunkRecord:
    return ChunkRecord(
        Chunk.from_dict(json.loads(definition)),
        None if snapshot is None else Watermark(Snapshot.parse(snapshot), high),
        count or 0,
        None if keys is None else frozenset(map(tuple, json.loads(keys))),
    )
