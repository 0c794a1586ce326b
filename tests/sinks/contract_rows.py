"""The guarantees of every sink for rows: mirrors and changelogs, and chunks that the driver commits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import (
    Fenced,
    ForeignTable,
    GateClosed,
    StreamFailed,
)
from airflow_cdc_provider.engine.core.record import ChunkRecord, Mode
from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.sinks.staged import MissingValues
from tests.sinks.begun_sink import (
    HALVES,
    IDENTITY,
    LABEL,
    NEW,
    OTHER,
    TABLE,
    TARGET,
    WATERMARK,
    WHOLE,
    Begun,
    Row,
    SinkUnderTest,
    batch,
    begin,
    change,
    refuse,
    text,
    upsert,
)
from tests.support.given_rows import GivenRows


class RowsContract:
    """The effect of chunks, units and re-reads on a target, if it is the same in both modes."""

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
        """Those with some keys stay until the stream has reached H; those of a whole table replace its chunks."""
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
            begun.sink.replace(begun.epoch, TARGET, None, GivenRows([batch(NEW)], refuse), TARGET)
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
    """Units with one row per key."""

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
        """The previous row is in the table or in an earlier piece, which may itself have moved; rows may swap keys."""
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
        """One row exists nowhere, and the origin of the other one does not exist; the table may be empty before."""
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
        # Staged again, the unit no longer holds the changes that the re-read has seen.
        begun.unit(100, 200, upsert("1", "a", "1.00"))
        assert begun.rows() == [("1", "a", "1.00"), NEW, ("9", "there", "9.00")]


class ChangelogContract(RowsContract):
    """Units with one event per change."""

    def test_two_keys_are_one_if_their_texts_are(self, begun: Begun) -> None:
        """The type is irrelevant: the stream delivers the other key."""
        begun.copy(WHOLE, ("1", "a", "1.00"))
        assert begun.reread(["1"], ("1", "b", "1.00"), ("01", "c", "1.00")) == 1
        assert begun.rows() == [("1", "b", "1.00")]

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
        """Its events would come after new ones."""
        begun.unit(100, 200, begun.put(*NEW, at=160))
        record = begun.record
        with pytest.raises(GateClosed, match="timeline"):
            begun.sink.restart(begun.epoch, [TARGET], IDENTITY, 150)
        assert begun.record == record
        begun.sink.drop()
        with pytest.raises(GateClosed, match="timeline"):
            begun.sink.prepare([TARGET], [WHOLE], IDENTITY, 150, ours=[LABEL])
        assert begun.sink.record() is None


class LakeContract:
    """Chunks that a task writes and that the driver commits later, many at once."""

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
        """It has continued under another epoch, or on another server."""
        copied = begun.write(WHOLE, NEW)
        assert copied is not None
        if error is Fenced:
            begun.sink.take_epoch("another")
        else:
            begun.sink.record_source(begun.epoch, {"timeline": 2})
        with pytest.raises(error):
            begun.sink.commit_chunks(begun.epoch, [copied])
        assert begun.record.unfinished == (WHOLE,)
        assert begun.rows() == []
