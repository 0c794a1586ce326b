"""The guarantees of every sink by :mod:`airflow_cdc_provider.engine.sinks.contract`, as tests that a sink inherits.

The test module of a sink has a fixture ``store``, which returns a :class:`SinkUnderTest`. For each mode that the sink
has, it has a class that inherits :class:`ProtocolContract`, :class:`MirrorContract` or :class:`ChangelogContract`. If
the driver commits its chunks, it also inherits :class:`LakeContract`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pyarrow as pa
import pytest

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import (
    Fenced,
    ForeignTable,
    GateClosed,
    SecondWriter,
    StagingLost,
    StreamFailed,
)
from airflow_cdc_provider.engine.core.record import ChunkRecord, Mode
from tests.sinks.begun_sink import (
    IDENTITY,
    LABEL,
    NEW,
    ORIGIN,
    OTHER,
    TARGET,
    WHOLE,
    Begun,
    SinkUnderTest,
    batch,
    begin,
    refuse,
)


class ProtocolContract:
    """What is committed, when, and under which epoch, and what is deposited; the same in both modes."""

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
            lambda: sink.record_source(old, {"timeline": 2}),
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
        """One part of a run has moved to a promoted standby, and recorded it; another still reads from the primary."""

        def failing() -> Iterator[pa.RecordBatch]:
            yield batch(NEW)
            refuse()

        with pytest.raises(GateClosed):
            begun.copy(WHOLE, NEW, finish=refuse)
        with pytest.raises(GateClosed):
            begun.copy(WHOLE, batches=failing())
        begun.sink.record_source(begun.epoch, {"timeline": 2})
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
        """Rows that were read after the staging hold changes that the unit would undo."""
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
        """A store without locks reports it at the end."""
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
        begun.sink.record_source(begun.epoch, {"timeline": 2, "publication": ["t"]})
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
