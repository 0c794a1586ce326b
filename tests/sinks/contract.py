"""What every sink promises by :mod:`airflow_cdc_provider.engine.sinks.contract`, as tests that a sink inherits.

The module of a sink's tests has a fixture ``store``, which gives a :class:`SinkUnderTest`, and a class for each of
:class:`ProtocolContract`, :class:`MirrorContract` and :class:`ChangelogContract`, as far as the sink has these modes. A
store whose chunks are committed by the driver takes :class:`LakeContract` in, too.
"""

from __future__ import annotations

import itertools
import json
import pickle
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import (
    Fenced,
    ForeignTable,
    GateClosed,
    SecondWriter,
    StagingLost,
    StreamFailed,
)
from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.core.record import ChunkRecord, Mode, Record, Target, Watermark
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.postgres.server_identity import Origin
from airflow_cdc_provider.engine.sinks.contract import Sink
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk, MissingValues, Staged, StagedPiece
from airflow_cdc_provider.engine.sources.postgres.stream.staging_task import END

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
ORIGIN = Origin.of(IDENTITY)
WATERMARK = Watermark(Snapshot(10, 12, frozenset({11})), 150)

Row = tuple[str | None, ...]
NEW: Row = ("5", "read", "7.00")

_numbers = itertools.count(1)


class SinkUnderTest(ABC):
    """A store with nothing in it, and what the contract has to do with it beside the interface.

    :cvar moves_are_two: whether its changelogs have a row that gets another key as a delete and an insert.
    """

    moves_are_two = False

    @abstractmethod
    def sink(self, mode: Mode, pipeline: str = "p") -> Sink:
        """The place of a pipeline in the store."""

    @abstractmethod
    def read(self, target: Target) -> Sequence[Mapping[str, Any]]:
        """All that a target table holds, as its readers get it; a sink that has not made it yet holds nothing."""

    @abstractmethod
    def names(self) -> set[str]:
        """Names of all that is in the store: tables, schemas, files."""

    @abstractmethod
    def staged(self) -> int:
        """How much stands in the store that is staged."""

    @abstractmethod
    def damage(self, staged: Staged) -> None:
        """Take the rows away that are staged under a name, as a crash of the store would."""

    @abstractmethod
    def occupy(self, target: Target) -> None:
        """Make a target table that has rows of somebody else's."""

    @abstractmethod
    def remove(self, target: Target) -> None:
        """Remove a target table, as somebody might."""


def text(*values: str | None) -> pa.Array:
    return pa.array(values, pa.large_string())


def batch(*rows: Row) -> pa.RecordBatch:
    """Rows as they are read from the source."""
    columns = [text(*column) for column in zip(*rows, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=[f"f{n}" for n in range(len(columns))])


def upsert(*row: str | None, label: str = LABEL, **more: str | None) -> Effect:
    """A mirror's row."""
    return Effect(label, False, pa.table({"erased": pa.array([False])} | _cells(row, more)))


def change(op: str, *row: str | None, at: int = 160, label: str = LABEL, **more: str | None) -> Effect:
    """An event of a changelog."""
    numbers = {"commit_lsn": at, "seq": next(_numbers), "xid": 20, "commit_ts": 0}
    columns = {"op": pa.array([op])} | {name: pa.array([number]) for name, number in numbers.items()}
    return Effect(label, False, pa.table(columns | _cells(row, more)))


def _cells(row: Sequence[str | None], more: Mapping[str, str | None]) -> dict[str, pa.Array]:
    return {name: text(value) for name, value in ({f"c{n}": v for n, v in enumerate(row)} | dict(more)).items()}


@dataclass(frozen=True)
class Event:
    """An event as the readers of a changelog get it."""

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
        """The sink as it comes to another process."""
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
        origin: Origin = ORIGIN,
        finish: Callable[[], Watermark] = lambda: WATERMARK,
        batches: Iterator[pa.RecordBatch] | None = None,
        target: Target = TARGET,
    ) -> CopiedChunk | None:
        batches = iter([batch(*rows)] if rows else []) if batches is None else batches
        written = self.executor.write_chunk(self.epoch, target, chunk, origin, batches, finish)
        return None if written is None else CopiedChunk(target, chunk, origin, written)

    def copy(self, chunk: Chunk, *rows: Row, **how: Any) -> int | None:
        """Write a chunk and have it committed."""
        copied = self.write(chunk, *rows, **how)
        return None if copied is None else self.sink.commit_chunks(self.epoch, [copied])[0]

    def put(self, *row: str | None, at: int = 160, target: Target = TARGET) -> Effect:
        """A row that the source has inserted."""
        label = target.table.label
        return upsert(*row, label=label) if self.sink.mode == "mirror" else change("i", *row, at=at, label=label)

    def piece(self, *effects: Effect, index: int = 0, high: int = END) -> StagedPiece:
        staged = self.executor.stage(self.epoch, f"test{uuid.uuid4().hex}", effects)
        return StagedPiece("", "", index, len(effects), b"", staged, frozenset(), high)

    def unit(self, start: int, end: int, *effects: Effect) -> bool:
        """Stage a unit of one piece, and commit it."""
        return self.sink.commit(self.epoch, start, end, [self.piece(*effects)])

    def reread(self, keys: Sequence[str] | None, *rows: Row, before: Target | None = TARGET, high: int = 150) -> int:
        """Read rows again: those with some keys, or all."""
        chosen = None if keys is None else frozenset((key,) for key in keys)
        batches = iter([batch(*rows)] if rows else [])
        watermark = replace(WATERMARK, high=high)
        return self.sink.replace(self.epoch, TARGET, chosen, batches, lambda: watermark, before)

    def events(self, target: Target = TARGET) -> list[Event]:
        """A changelog, in its order."""
        found = [_event(target, row) for row in self.store.read(target)]
        return sorted(found, key=lambda event: (event.lsn, event.seq, str(event.row)))

    def rows(self, target: Target = TARGET) -> list[Row]:
        """The rows of a mirror, or those that a changelog adds up to."""
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
    """From what readers make of positions in the log, of JSON and arrays, and of values that are not there."""
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
    """Begin a pipeline with one table."""
    sink = store.sink(mode, pipeline)
    sink.prepare([TARGET], chunks, IDENTITY, 100)
    return Begun(store, sink, sink.take_epoch("test"))


def refuse() -> Watermark:
    """Fail at the end of a read."""
    raise GateClosed("no marker", "Try again.")


class ProtocolContract:
    """What is committed and when, and under which epoch, and what is deposited; the same in both modes."""

    mode: Mode = "mirror"

    @pytest.fixture
    def begun(self, store: SinkUnderTest) -> Begun:
        return begin(store, self.mode)

    def test_a_pipeline_begins_once_and_a_rehearsal_changes_nothing(self, store: SinkUnderTest) -> None:
        sink = store.sink(self.mode)
        before = store.names()
        sink.prepare([TARGET], [WHOLE], IDENTITY, 100, rehearsal=True)
        assert sink.record() is None
        assert store.names() == before
        begun = begin(store, self.mode)
        record = begun.record
        assert (record.epoch, record.applied, record.identity) == (begun.epoch, 100, IDENTITY)
        assert (record.targets, record.chunks) == ((TARGET,), (ChunkRecord(WHOLE),))
        assert sink.missing([TARGET]) == ()
        sink.restart(begun.epoch, [TARGET], {"slot": "other"}, 500, rehearsal=True)
        for rehearsal in (True, False):
            with pytest.raises(SecondWriter):
                sink.prepare([TARGET], [WHOLE], IDENTITY, 300, rehearsal=rehearsal)
        assert begun.record == record
        assert sink.identity() == store.sink(self.mode, "q").identity() != {}

    def test_a_table_with_rows_of_others_is_refused(self, store: SinkUnderTest) -> None:
        store.occupy(TARGET)
        before = store.names()
        with pytest.raises(ForeignTable, match="Ord ers"):
            begin(store, self.mode)
        assert store.sink(self.mode).record() is None
        assert store.names() == before

    def test_tables_join_and_leave(self, begun: Begun) -> None:
        sink, epoch = begun.sink, begun.epoch
        another = begun.store.sink(self.mode, "q")
        with pytest.raises(ForeignTable, match="'p'"):
            another.prepare([OTHER, TARGET], [], IDENTITY, 100)
        assert another.record() is None
        chunk = Chunk(OTHER.table.label, 0, None, None)
        for _ in range(2):
            sink.add(epoch, [OTHER], [chunk])
            assert begun.record.targets == (TARGET, OTHER)
            assert begun.record.unfinished == (WHOLE, chunk)
            sink.forget(epoch, [OTHER.table.label])
            assert (begun.record.targets, begun.record.unfinished) == ((TARGET,), (WHOLE,))
        begun.copy(WHOLE, NEW)
        sink.forget(epoch, [LABEL])
        assert begun.record.targets == begun.record.chunks == ()
        for add in (lambda: sink.add(epoch, [OTHER, TARGET], []), lambda: begun.reread(None, NEW, before=None)):
            with pytest.raises(ForeignTable, match="Ord ers"):
                add()
        assert begun.record.targets == begun.record.chunks == ()
        assert begun.rows() == [NEW]

    def test_an_epoch_is_above_all_before(self, begun: Begun) -> None:
        sink = begun.sink
        assert sink.take_epoch("next") > begun.epoch > 1_700_000_000_000
        far = 2 * begun.epoch
        assert sink.take_epoch("far", at_least=far) == begun.record.epoch == far
        assert sink.take_epoch("next") == far + 1
        sink.end_sessions()
        assert begun.record.epoch == far + 1

    def test_another_epoch_is_fenced_at_every_step(self, begun: Begun) -> None:
        sink, old = begun.sink, begun.epoch
        sink.deposit(old, "deposit", b"data")
        unit = [begun.piece(begun.put("1", "zombie", "1.00"))]
        staged = begun.store.staged()
        assert staged > 0
        new = sink.take_epoch("another")
        record = begun.record
        steps: list[Callable[[], object]] = [
            lambda: sink.add(old, [OTHER], []),
            lambda: sink.restart(old, [TARGET], {}, 0),
            lambda: sink.restart(old, [TARGET], {}, 0, rehearsal=True),
            lambda: sink.note_source(old, {"timeline": 2}),
            lambda: sink.forget(old, [LABEL]),
            lambda: sink.redefine(old, TARGET, TARGET),
            lambda: begun.copy(WHOLE, NEW),
            lambda: begun.reread(["5"], NEW),
            lambda: begun.reread(None, NEW),
            lambda: begun.piece(begun.put("1", "zombie", "1.00")),
            lambda: sink.commit(old, 100, 200, unit),
            lambda: sink.commit(old, 100, 200, []),
            lambda: sink.deposit(old, "late", b"data"),
            lambda: sink.fetch(old, "deposit", 4),
            lambda: sink.fenced(old).__enter__(),
        ]
        for step in steps:
            with pytest.raises(Fenced):
                step()
        sink.sweep(old)
        sink.discard(old)
        assert begun.record == record
        assert begun.store.staged() == staged
        sink.sweep(new)
        assert begun.store.staged() == 0
        assert begun.rows() == []

    def test_a_chunk_whose_read_fails_or_that_comes_from_elsewhere_is_not_there(self, begun: Begun) -> None:
        """One part of a run has gone on to a promoted standby, and noted it; another still reads from the primary."""

        def failing() -> Iterator[pa.RecordBatch]:
            yield batch(NEW)
            refuse()

        with pytest.raises(GateClosed):
            begun.copy(WHOLE, NEW, finish=refuse)
        with pytest.raises(GateClosed):
            begun.copy(WHOLE, batches=failing())
        begun.sink.note_source(begun.epoch, {"timeline": 2})
        with pytest.raises(StreamFailed, match=r"timeline 1.* gone on to .*timeline 2"):
            begun.copy(WHOLE, NEW)
        assert begun.rows() == []
        assert begun.record.unfinished == (WHOLE,)
        assert begun.copy(WHOLE, NEW, origin=replace(ORIGIN, timeline=2)) == 1
        assert begun.rows() == [NEW]

    def test_units_are_applied_in_order_and_once(self, begun: Begun) -> None:
        assert begun.unit(100, 200, begun.put("1", "a", "1.00"))
        assert begun.store.staged() == 0
        for start in (100, 150):
            assert not begun.unit(start, 200, begun.put("1", "stale", "0.00"))
            assert begun.store.staged() == 0
        with pytest.raises(GateClosed, match="0/12C"):
            begun.unit(300, 400, begun.put("1", "ahead", "0.00"))
        assert begun.sink.commit(begun.epoch, 200, 250, [])
        assert begun.rows() == [("1", "a", "1.00")]
        assert begun.record.applied == 250

    def test_what_is_noted_with_a_unit_changes_with_it_and_not_without(self, begun: Begun) -> None:
        before = begun.record.identity
        assert begun.sink.commit(begun.epoch, 100, 200, [], {"offsets": {"t": {"0": 5}}})
        assert begun.record.identity == {**before, "offsets": {"t": {"0": 5}}}
        assert not begun.sink.commit(begun.epoch, 100, 200, [], {"offsets": {"t": {"0": 4}}})
        assert begun.sink.commit(begun.epoch, 200, 250, [], {"offsets": {"t": {"0": 9}}})
        with pytest.raises(GateClosed):
            begun.sink.commit(begun.epoch, 200, 300, [], {"offsets": {}})
        assert begun.record.identity == {**before, "offsets": {"t": {"0": 9}}}

    def test_a_piece_that_was_staged_twice_counts_once(self, begun: Begun) -> None:
        """Its task was lost, and tried again."""
        begun.piece(begun.put("1", "a", "1.00"))
        staged = begun.store.staged()
        again = begun.piece(begun.put("1", "a", "1.00"))
        assert begun.store.staged() > staged > 0
        assert begun.sink.commit(begun.epoch, 100, 200, [again])
        begun.sink.sweep(begun.epoch)
        assert begun.store.staged() == 0
        assert begun.rows() == [("1", "a", "1.00")]

    def test_a_unit_whose_staging_is_gone_or_stale_is_refused(self, begun: Begun) -> None:
        """Rows that were read since it was staged hold changes that it would take back."""
        damaged = begun.piece(begun.put("1", "a", "1.00"), begun.put("2", "b", "2.00"))
        begun.store.damage(damaged.tables[1])
        swept = begun.piece(begun.put("1", "a", "1.00"))
        stale = begun.piece(begun.put("1", "a", "1.00"), high=140)
        begun.copy(WHOLE, NEW)
        refused = [damaged, stale]
        for piece in (*refused, swept):
            if piece is swept:
                begun.sink.sweep(begun.epoch)
            with pytest.raises(StagingLost):
                begun.sink.commit(begun.epoch, 100, 200, [piece])
        assert begun.rows() == [NEW]
        assert begun.record.applied == 100

    def test_nobody_takes_the_epoch_unnoticed_while_something_is_done_beside(self, begun: Begun) -> None:
        """A store without locks says so at the end."""
        noticed = overtaken = False
        with ThreadPoolExecutor(1) as pool:
            try:
                with begun.sink.fenced(begun.epoch):
                    taking = pool.submit(begun.sink.take_epoch, "another")
                    overtaken = bool(wait([taking], 0.5).done)
            except Fenced:
                noticed = True
        assert noticed or not overtaken
        assert taking.result() == begun.record.epoch > begun.epoch

    def test_values_of_the_source_are_noted(self, begun: Begun) -> None:
        begun.sink.note_source(begun.epoch, {"timeline": 2, "publication": ["t"]})
        assert begun.record.identity == IDENTITY | {"timeline": 2, "publication": ["t"]}

    def test_deposits_are_whole_or_lost(self, begun: Begun) -> None:
        sink, epoch = begun.sink, begun.epoch
        another = begun.store.sink(self.mode, "q")
        another.prepare([], [], IDENTITY, 100)
        theirs = another.take_epoch("test")
        another.deposit(theirs, "one", b"theirs")
        data = bytes(range(256)) * 13_000
        for name, deposit in (("one", data), ("two", bytearray(b"")), ("three", bytearray(b"three"))):
            sink.deposit(epoch, name, deposit)
        sink.sweep(epoch)
        for _ in range(2):
            assert begun.executor.fetch(epoch, "one", len(data)) == data
        assert begun.executor.fetch(epoch, "two", 0) == b""
        sink.discard(epoch, ["one"])
        for lost in (lambda: sink.fetch(epoch, "one", len(data)), lambda: sink.fetch(epoch, "three", 6)):
            with pytest.raises(StagingLost):
                lost()
        assert sink.fetch(epoch, "three", 5) == b"three"
        sink.discard(epoch)
        with pytest.raises(StagingLost):
            sink.fetch(epoch, "three", 5)
        sink.drop()
        assert another.fetch(theirs, "one", 6) == b"theirs"

    def test_dropping_leaves_the_target_tables(self, begun: Begun) -> None:
        begun.copy(WHOLE, NEW)
        begun.piece(begun.put("2", "b", "2.00"))
        begun.sink.deposit(begun.epoch, "deposit", b"data")
        begun.sink.drop()
        assert begun.sink.record() is None
        assert begun.store.staged() == 0
        assert begun.rows() == [NEW]
        begun.sink.drop()
        begun.store.remove(TARGET)
        again = begin(begun.store, self.mode)
        with pytest.raises(StagingLost):
            again.sink.fetch(again.epoch, "deposit", 4)


class RowsContract:
    """What chunks, units and re-reads make of a target, as far as it is the same in both modes."""

    mode: Mode

    @pytest.fixture
    def begun(self, store: SinkUnderTest) -> Begun:
        return begin(store, self.mode)

    def test_chunks_are_committed_once_with_their_watermarks(self, store: SinkUnderTest) -> None:
        begun = begin(store, self.mode, HALVES)
        rows: list[Row] = [("1", "a", "1.50"), ("2", "", None), ("3", None, "-3.00"), ("7", 'q"\\\n,\t', "0.00")]
        assert begun.copy(HALVES[0], *rows[:3]) == 3
        assert begun.copy(HALVES[0], *rows[:3]) is None
        assert begun.record.unfinished == HALVES[1:]
        assert begun.copy(HALVES[1], rows[3]) == 1
        assert begun.rows() == rows
        record = begun.record
        assert record.chunks == tuple(
            ChunkRecord(chunk, WATERMARK, count) for chunk, count in zip(HALVES, (3, 1), strict=True)
        )
        assert (record.high, record.applied, record.consistent) == (150, 100, False)
        assert store.staged() == 0

    def test_beginning_again_replaces_the_rows_when_they_are_read(self, begun: Begun) -> None:
        begun.unit(100, 200, begun.put("1", "a", "1.00"))
        begun.sink.restart(begun.epoch, [TARGET], IDENTITY | {"slot": "other"}, 500)
        record = begun.record
        assert (record.applied, record.identity["slot"], record.chunks) == (500, "other", (ChunkRecord(WHOLE),))
        assert begun.rows() == [("1", "a", "1.00")]
        assert begun.copy(WHOLE, NEW) == 1
        assert begun.rows() == [NEW]

    def test_the_targets_of_a_lost_record_are_taken_over_and_replaced(self, begun: Begun) -> None:
        begun.unit(100, 200, begun.put("1", "a", "1.00"))
        sink = begun.sink
        sink.drop()
        with pytest.raises(ForeignTable):
            sink.prepare([TARGET], [WHOLE], IDENTITY, 300)
        sink.prepare([TARGET], [WHOLE], IDENTITY, 300, ours=[LABEL])
        again = Begun(begun.store, sink, sink.take_epoch("again"))
        assert again.copy(WHOLE, NEW) == 1
        assert again.rows() == [NEW]

    def test_rows_are_read_again_beside_the_stream(self, begun: Begun) -> None:
        """Those with some keys, until the stream has come to H; those of a whole table, in place of its chunks."""
        begun.copy(WHOLE, ("1", "a", "1.00"), ("2", "b", "2.00"), ("3", "c", "3.00"))
        assert begun.reread(["1", "2", "4"], ("1", "new", None), ("7", "no member", None), high=260) == 1
        reread = frozenset({("1",), ("2",), ("4",)})
        assert [chunk.keys for chunk in begun.record.chunks] == [None, reread]
        assert begun.rows() == [("1", "new", None), ("3", "c", "3.00")]
        begun.unit(100, 200, begun.put("4", "d", "4.00"))
        assert [chunk.keys for chunk in begun.record.chunks] == [None, reread]
        begun.unit(200, 300, begun.put("6", "f", "6.00", at=260))
        assert [chunk.keys for chunk in begun.record.chunks] == [None]
        assert [row[0] for row in begun.rows()] == ["1", "3", "4", "6"]
        with pytest.raises(GateClosed):
            begun.sink.replace(begun.epoch, TARGET, None, iter([batch(NEW)]), refuse, TARGET)
        assert len(begun.rows()) == 4
        assert begun.reread(None, NEW, ("6", "f", "6.00"), high=360) == 2
        assert begun.rows() == [NEW, ("6", "f", "6.00")]
        assert begun.record.chunks == (ChunkRecord(WHOLE, replace(WATERMARK, high=360), 2),)

    def test_a_table_that_is_gone_is_missed_and_made_again(self, begun: Begun) -> None:
        begun.copy(WHOLE, ("1", "a", "1.00"))
        assert begun.sink.missing([TARGET]) == ()
        begun.store.remove(TARGET)
        assert begun.sink.missing([TARGET]) == (TARGET,)
        assert begun.reread(None, NEW) == 1
        assert begun.sink.missing([TARGET]) == ()
        begun.unit(100, 200, begun.put("6", "f", "6.00"))
        assert begun.rows() == [NEW, ("6", "f", "6.00")]
        begun.store.remove(TARGET)
        begun.sink.restart(begun.epoch, [TARGET], IDENTITY, 300)
        assert begun.copy(WHOLE, NEW) == 1
        assert begun.rows() == [NEW]

    def test_a_column_that_is_added_is_added(self, begun: Begun) -> None:
        begun.copy(WHOLE, NEW)
        more = Column("more", "text", 25, None, False, True, attnum=4)
        after = replace(TARGET, table=replace(TABLE, columns=(*TABLE.columns, more)))
        begun.sink.redefine(begun.epoch, TARGET, after)
        assert begun.record.targets == (after,)
        begun.unit(100, 200, begun.put("6", "f", "6.00", "more"))
        assert begun.rows(after) == [(*NEW, None), ("6", "f", "6.00", "more")]

    def test_a_table_joins_with_its_rows_and_a_unit_changes_both(self, begun: Begun) -> None:
        begun.sink.forget(begun.epoch, [LABEL])
        begun.store.remove(TARGET)
        assert begun.reread(None, NEW, before=None) == 1
        begun.sink.add(begun.epoch, [OTHER], [])
        begun.unit(100, 200, begun.put("1", "a", "1.00", target=OTHER), begun.put("6", "f", "6.00"))
        assert begun.rows() == [NEW, ("6", "f", "6.00")]
        assert begun.rows(OTHER) == [("1", "a", "1.00")]

    def test_keys_are_told_that_are_members(self, begun: Begun) -> None:
        found = begun.executor.members(TARGET, [("1",), ("5",)], [text("5", "7", "1", "5")])
        assert sorted(found) == [(0, 1), (2, 0), (3, 1)]


class MirrorContract(RowsContract):
    """Units as one row a key."""

    mode: Mode = "mirror"

    def test_pieces_of_a_unit_are_applied_by_their_index(self, begun: Begun) -> None:
        begun.copy(WHOLE, ("8", "before", "1.00"))
        gone = upsert("2", None, None).rows.set_column(0, "erased", pa.array([True]))
        pieces = [
            begun.piece(Effect(LABEL, False, gone), upsert("1", "last", "9.00"), index=2),
            begun.piece(upsert("1", "first", "1.00"), upsert("2", "x", "2.00"), index=0),
            begun.piece(Effect(LABEL, True, gone.slice(0, 0)), upsert("3", "kept", "3.00"), index=1),
        ]
        begun.sink.commit(begun.epoch, 100, 200, pieces)
        assert begun.rows() == [("1", "last", "9.00"), ("3", "kept", "3.00")]
        begun.unit(200, 300, Effect(LABEL, False, gone), Effect(LABEL, True, upsert("6", "new", None).rows))
        assert begun.rows() == [("6", "new", None)]
        begun.unit(300, 400, Effect(LABEL, True, gone.slice(0, 0)))
        assert begun.rows() == []

    def test_values_that_were_not_sent_come_from_the_row_at_its_origin(self, begun: Begun) -> None:
        """In the table, or in an earlier piece, whose own may have come from elsewhere; rows may swap their keys."""
        begun.copy(WHOLE, ("1", "long", "1.00"), ("2", "other", "2.00"), ("3", "three", "3.00"), ("4", "four", "4.00"))
        moved = {
            "erased": pa.array([True, False, False, False, False]),
            "c0": text("1", "5", "2", "3", "4"),
            "c1": text(None, None, None, None, None),
            "c2": text(None, "7.00", "8.00", "4.00", "3.00"),
            "missing": pa.array([None, "{1}", "{1}", "{1}", "{1}"]),
            "o0": text(None, "1", "2", "4", "3"),
        }
        again = {
            "erased": pa.array([True, False, False]),
            "c0": text("5", "6", "2"),
            "c1": text(None, None, "new"),
            "c2": text(None, None, "9.00"),
            "missing": pa.array([None, "{1,2}", None]),
            "o0": text(None, "5", None),
        }
        pieces = [begun.piece(Effect(LABEL, False, pa.table(rows)), index=n) for n, rows in enumerate((moved, again))]
        begun.sink.commit(begun.epoch, 100, 200, [*pieces, begun.piece(upsert("9", "sent", None), index=2)])
        assert begun.rows() == [
            ("2", "new", "9.00"),
            ("3", "four", "4.00"),
            ("4", "three", "3.00"),
            ("6", "long", "7.00"),
            ("9", "sent", None),
        ]

    def test_values_that_nobody_has_are_asked_for_and_nothing_is_applied(self, begun: Begun) -> None:
        """Of a row that is nowhere, and of one whose origin is not there; before there may be a table, too."""
        columns = {
            "erased": pa.array([False, False]),
            "c0": text("5", "6"),
            "c1": text(None, None),
            "c2": text("7.00", "8.00"),
            "missing": pa.array(["{1}", "{1}"]),
            "o0": text(None, "4"),
        }
        for _ in range(2):
            unit = [begun.piece(upsert("1", "a", "1.00"), Effect(LABEL, False, pa.table(columns)))]
            with pytest.raises(MissingValues) as missing:
                begun.sink.commit(begun.epoch, 100, 200, unit)
            assert missing.value.keys == {LABEL: frozenset({("5",), ("6",)})}
            if begun.record.unfinished:
                begun.copy(WHOLE, ("9", "there", "9.00"))
        assert begun.rows() == [("9", "there", "9.00")]
        assert begun.record.applied == 100
        begun.reread(["5", "6"], NEW)
        # Staged anew, the unit no longer holds what the re-read has seen.
        begun.unit(100, 200, upsert("1", "a", "1.00"))
        assert begun.rows() == [("1", "a", "1.00"), NEW, ("9", "there", "9.00")]


class ChangelogContract(RowsContract):
    """Units change by change."""

    mode: Mode = "changelog"

    def test_a_changelog_keeps_every_change_and_says_what_was_read_again(self, begun: Begun) -> None:
        first = ("1", "a", "1.00")
        begun.copy(WHOLE, first)
        old: dict[str, str | None] = {"old_kind": "K", "b1": None, "b2": None}
        moved = change("u", "2", None, "5.00", unchanged='{"note"}', b0="1", **old)
        gone = change("d", "2", None, None, b0="2", **old)
        whole = change("d", "3", None, None, old_kind="O", b0="3", b1='a "b"\n', b2=None)
        begun.unit(100, 200, moved, gone, whole)
        begun.reread(["1"], first)
        begun.reread(None, first)
        events = begun.events()
        move: list[tuple[Any, ...]] = [("u", 160, ("2", None, "5.00"), {"id": "1"}, ("note",))]
        if begun.store.moves_are_two:
            halves = ("d", 160, ("1", None, None), {"id": "1"}, None), ("i", 160, ("2", None, "5.00"), None, ("note",))
            move = list(halves)
        assert [(e.op, e.lsn, e.row, e.before, e.unchanged) for e in events] == [
            ("r", 100, first, None, None),
            *move,
            ("d", 160, ("2", None, None), {"id": "2"}, None),
            ("d", 160, ("3", None, None), {"id": "3", "note": 'a "b"\n', "amount": None}, None),
            ("d", 200, ("1", None, None), {"id": "1"}, None),
            ("r", 200, first, None, None),
            ("t", 200, (None, None, None), None, None),
            ("r", 200, first, None, None),
        ]
        assert len({(e.lsn, e.seq) for e in events}) == len(events) - (len(move) - 1)
        assert begun.sink.matching_keys(TARGET, "id = 1") == frozenset()

    def test_a_history_that_the_source_has_left_is_not_gone_on_with(self, begun: Begun) -> None:
        """Its events would stand behind new ones."""
        begun.unit(100, 200, begun.put(*NEW, at=160))
        record = begun.record
        with pytest.raises(GateClosed, match="history"):
            begun.sink.restart(begun.epoch, [TARGET], IDENTITY, 150)
        assert begun.record == record
        begun.sink.drop()
        with pytest.raises(GateClosed, match="history"):
            begun.sink.prepare([TARGET], [WHOLE], IDENTITY, 150, ours=[LABEL])
        assert begun.sink.record() is None


class LakeContract:
    """Chunks that a task writes and the driver commits later, for many at once."""

    mode: Mode

    def test_chunks_are_committed_together_and_each_once(self, store: SinkUnderTest) -> None:
        chunks = (Chunk(LABEL, 0, None, ("3",)), Chunk(LABEL, 1, ("3",), ("5",)), Chunk(LABEL, 2, ("5",), None))
        begun = begin(store, self.mode, chunks)
        copied = [begun.write(chunk, (key, "x", None)) for chunk, key in zip((*chunks, chunks[0]), "1471", strict=True)]
        first, second, third, again = [each for each in copied if each is not None]
        begun.sink.sweep(begun.epoch)
        assert begun.sink.commit_chunks(begun.epoch, [first]) == [1]
        assert begun.sink.commit_chunks(begun.epoch, [again, second, third]) == [None, 1, 1]
        assert begun.write(chunks[1], ("4", "x", None)) is None
        assert [row[0] for row in begun.rows()] == ["1", "4", "7"]
        assert begun.record.unfinished == ()
        assert store.staged() == 0

    @pytest.mark.parametrize("error", [Fenced, StreamFailed])
    def test_what_has_been_written_is_of_no_use_when_the_pipeline_has_gone_on(
        self, begun: Begun, error: type[Exception]
    ) -> None:
        """Under another epoch, or to another server."""
        copied = begun.write(WHOLE, NEW)
        assert copied is not None
        if error is Fenced:
            begun.sink.take_epoch("another")
        else:
            begun.sink.note_source(begun.epoch, {"timeline": 2})
        with pytest.raises(error):
            begun.sink.commit_chunks(begun.epoch, [copied])
        assert begun.record.unfinished == (WHOLE,)
        assert begun.rows() == []
