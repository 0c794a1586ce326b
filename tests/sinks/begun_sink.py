"""A sink of one table for the tests of the contract, and the operations on the store beneath it."""

from __future__ import annotations

import itertools
import json
import pickle
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import (
    GateClosed,
)
from airflow_cdc_provider.engine.core.lsn import LOG_END, parse_lsn
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.core.record import Mode, Record, Target, Watermark
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
from airflow_cdc_provider.engine.sinks.contract import Sink
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk, Staged, StagedPiece
from tests.support.given_rows import GivenRows

TABLE = Table(
    oid=7,
    schema="public",
    name="Ord ers",
    columns=(
        Column("id", "bigint", 20, None, True, True, attnum=1),
        Column("note", "text", 25, None, False, True, attnum=2),
        Column("amount", "numeric(10,2)", 1700, None, False, True, attnum=3),
    ),
    key=("id",),
    replica_identity="d",
    where=None,
    leaves=(Leaf(7, "public", "Ord ers"),),
    kind="r",
)


TARGET = Target(TABLE, "copy", "Ord ers")


OTHER = Target(replace(TABLE, oid=8, name="other", leaves=(Leaf(8, "public", "other"),)), "copy", "other")


LABEL = TABLE.label


WHOLE = Chunk(LABEL, 0, None, None)


HALVES = (Chunk(LABEL, 0, None, ("5",)), Chunk(LABEL, 1, ("5",), None))


IDENTITY = {"system": "1", "timeline": 1, "database": 5}


ORIGIN = ServerIdentity.of(IDENTITY)


WATERMARK = Watermark(Snapshot(10, 12, frozenset({11})), 150)


Row = tuple[str | None, ...]


NEW: Row = ("5", "read", "7.00")


_numbers = itertools.count(1)


class SinkUnderTest(ABC):
    """An empty store, and the operations of the contract that are not part of the interface of sinks.

    :cvar moves_are_two: whether its changelogs record a row that changes its key as a deletion and an insertion.
    """

    moves_are_two = False

    @abstractmethod
    def sink(self, mode: Mode, pipeline: str = "p") -> Sink:
        """Return the sink of a pipeline in the store."""

    @abstractmethod
    def read(self, target: Target) -> Sequence[Mapping[str, Any]]:
        """Return all rows of a target table as its readers get them; none if the sink has not created it yet."""

    @abstractmethod
    def names(self) -> set[str]:
        """Return the names of everything in the store: tables, schemas, files."""

    @abstractmethod
    def staged(self) -> int:
        """Return the number of staged objects in the store."""

    @abstractmethod
    def damage(self, staged: Staged) -> None:
        """Remove the rows that are staged under a name, as a crash of the store would."""

    @abstractmethod
    def occupy(self, target: Target) -> None:
        """Create a target table with rows of another owner."""

    @abstractmethod
    def remove(self, target: Target) -> None:
        """Remove a target table, as a user might."""


def text(*values: str | None) -> pa.Array:
    return pa.array(values, pa.large_string())


def batch(*rows: Row) -> pa.RecordBatch:
    """Return rows as they are read from the source."""
    columns = [text(*column) for column in zip(*rows, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=[f"f{n}" for n in range(len(columns))])


def upsert(*row: str | None, label: str = LABEL, **more: str | None) -> Effect:
    """Return a row of a mirror as an effect."""
    return Effect(label, False, pa.table({"erased": pa.array([False])} | _cells(row, more)))


def change(op: str, *row: str | None, at: int = 160, label: str = LABEL, **more: str | None) -> Effect:
    """Return an event of a changelog as an effect."""
    numbers = {"commit_lsn": at, "seq": next(_numbers), "xid": 20, "commit_ts": 0}
    columns = {"op": pa.array([op])} | {name: pa.array([number]) for name, number in numbers.items()}
    return Effect(label, False, pa.table(columns | _cells(row, more)))


def _cells(row: Sequence[str | None], more: Mapping[str, str | None]) -> dict[str, pa.Array]:
    return {name: text(value) for name, value in ({f"c{n}": v for n, v in enumerate(row)} | dict(more)).items()}


@dataclass(frozen=True)
class Event:
    """An event as readers of a changelog see it."""

    op: str
    lsn: int
    seq: int
    row: Row
    before: Mapping[str, str | None] | None
    unchanged: tuple[str, ...] | None


@dataclass(frozen=True)
class Begun:
    """A pipeline at the applied LSN 100, under the epoch of its first run."""

    store: SinkUnderTest
    sink: Sink
    epoch: int

    @property
    def executor(self) -> Sink:
        """Return the sink as another process receives it."""
        sent: Sink = pickle.loads(pickle.dumps(self.sink))
        return sent

    @property
    def record(self) -> Record:
        found = self.sink.record()
        assert found is not None
        return found

    def write(
        self,
        chunk: Chunk,
        *rows: Row,
        origin: ServerIdentity = ORIGIN,
        finish: Callable[[], Watermark] = lambda: WATERMARK,
        batches: Iterator[pa.RecordBatch] | None = None,
        target: Target = TARGET,
    ) -> CopiedChunk | None:
        batches = iter([batch(*rows)] if rows else []) if batches is None else batches
        written = self.executor.write_chunk(self.epoch, target, chunk, origin, GivenRows(batches, finish))
        return None if written is None else CopiedChunk(target, chunk, origin, written)

    def copy(self, chunk: Chunk, *rows: Row, **how: Any) -> int | None:
        """Write a chunk and commit it."""
        copied = self.write(chunk, *rows, **how)
        return None if copied is None else self.sink.commit_chunks(self.epoch, [copied])[0]

    def put(self, *row: str | None, at: int = 160, target: Target = TARGET) -> Effect:
        """Return a row that the source has inserted."""
        label = target.table.label
        return upsert(*row, label=label) if self.sink.mode == "mirror" else change("i", *row, at=at, label=label)

    def piece(self, *effects: Effect, index: int = 0, high: int = LOG_END) -> StagedPiece:
        staged = self.executor.stage(self.epoch, f"test{uuid.uuid4().hex}", effects)
        return StagedPiece("", "", index, len(effects), b"", staged, frozenset(), high)

    def unit(self, start: int, end: int, *effects: Effect) -> bool:
        """Stage a unit of one piece, and commit it."""
        return self.sink.commit(self.epoch, start, end, [self.piece(*effects)])

    def reread(self, keys: Sequence[str] | None, *rows: Row, before: Target | None = TARGET, high: int = 150) -> int:
        """Re-read rows, those with some keys or all; each comes in its own batch."""
        chosen = None if keys is None else frozenset((key,) for key in keys)
        batches = iter([batch(row) for row in rows])
        watermark = replace(WATERMARK, high=high)
        return self.sink.replace(self.epoch, TARGET, chosen, GivenRows(batches, lambda: watermark), before)

    def events(self, target: Target = TARGET) -> list[Event]:
        """Return the events of a changelog, in order."""
        found = [_event(target, row) for row in self.store.read(target)]
        return sorted(found, key=lambda event: (event.lsn, event.seq, str(event.row)))

    def rows(self, target: Target = TARGET) -> list[Row]:
        """Return the rows of a mirror, or those that a changelog yields."""
        if self.sink.mode == "mirror":
            return sorted((_row(target, row) for row in self.store.read(target)), key=str)
        held: dict[str | None, Row] = {}
        for event in self.events(target):
            assert event.op in "tdr" or event.row[0] not in held, "a row is inserted twice"
            if event.op == "t":
                held.clear()
            elif event.op == "d":
                held.pop(event.row[0], None)
            else:
                held[event.row[0]] = event.row
        return sorted(held.values(), key=str)


def _row(target: Target, values: Mapping[str, Any]) -> Row:
    cells = [values.get(column.name) for column in target.table.columns]
    return tuple(None if cell is None else str(cell) for cell in cells)


def _event(target: Target, values: Mapping[str, Any]) -> Event:
    """Return an event from the values that readers get for positions, JSON, arrays, and missing values."""
    lsn, before, unchanged = values["_commit_lsn"], values.get("_before"), values.get("_unchanged")
    return Event(
        values["_op"],
        lsn if isinstance(lsn, int) else parse_lsn(lsn),
        int(values["_seq"]),
        _row(target, values),
        json.loads(before) if isinstance(before, str) else before,
        None if unchanged is None else tuple(json.loads(unchanged) if isinstance(unchanged, str) else unchanged),
    )


def begin(store: SinkUnderTest, mode: Mode, chunks: Sequence[Chunk] = (WHOLE,), pipeline: str = "p") -> Begun:
    """Start a pipeline with one table."""
    sink = store.sink(mode, pipeline)
    sink.prepare([TARGET], chunks, IDENTITY, 100)
    return Begun(store, sink, sink.take_epoch("test"))


def refuse() -> Watermark:
    """Fail at the end of a read."""
    raise GateClosed("no marker", "Try again.")
