"""The two-phase protocol of the Delta sink, on real tables: staging, commit, fencing, and what a crash leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import deltalake
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.chunks import Chunk
from airflow_cdc_provider.engine.effects import Effect
from airflow_cdc_provider.engine.errors import (
    ConfigError,
    Failpoint,
    Fenced,
    ForeignTable,
    GateClosed,
    LimitExceeded,
    StagingLost,
    StreamFailed,
    TargetConflict,
    UncapturableTable,
)
from airflow_cdc_provider.engine.failpoint import VARIABLE
from airflow_cdc_provider.engine.origin import Origin
from airflow_cdc_provider.engine.sinks.base import (
    CopiedChunk,
    MissingValues,
    RowsNeeded,
    Staged,
    StagedPiece,
    Target,
    Watermark,
)
from airflow_cdc_provider.engine.sinks.delta import spark as delta_spark
from airflow_cdc_provider.engine.sinks.delta.maintenance import maintain
from airflow_cdc_provider.engine.sinks.delta.settings import DeltaSettings
from airflow_cdc_provider.engine.sinks.delta.sink import DeltaSink
from airflow_cdc_provider.engine.sinks.lake.room import FIRST_READ
from airflow_cdc_provider.engine.stage import END
from airflow_cdc_provider.engine.visibility import Snapshot
from tests.delta_spark import delta_session
from tests.test_postgres_sink import IDENTITY, LABEL, ORIGIN, TABLE, TARGET, WATERMARK, text, upsert

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

CHUNK = Chunk(LABEL, 0, None, None)
NAMES = ["id", "note", "amount"]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with delta_session() as session:
        yield session


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "the lake"


def opened(root: Path, mode: str = "mirror", pipeline: str = "p", **settings: object) -> DeltaSink:
    sink = DeltaSettings(str(root), mode=mode, **settings).open(pipeline)  # type: ignore[arg-type]
    assert isinstance(sink, DeltaSink)
    return sink


def prepared(root: Path, mode: str = "mirror", **settings: object) -> tuple[DeltaSink, int]:
    """A sink at applied LSN 100 with one planned chunk, and the epoch of its first run."""
    sink = opened(root, mode, **settings)
    sink.prepare([TARGET], [CHUNK], IDENTITY, 100)
    return sink, sink.take_epoch("test")


def rows(
    spark: SparkSession, root: Path, columns: str = "id, note, CAST(amount AS STRING)"
) -> list[tuple[object, ...]]:
    found = spark.sql(f"SELECT {columns} FROM delta.`{root}/copy/Ord ers` ORDER BY ALL").collect()
    return [tuple(row) for row in found]


def batch(*rows: Sequence[str | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([text(*column) for column in zip(*rows, strict=True)], names=NAMES)


def copy(sink: DeltaSink, epoch: int, chunk: Chunk, *rows: Sequence[str | None], origin: Origin = ORIGIN) -> int | None:
    written = sink.write_chunk(epoch, TARGET, chunk, origin, iter([batch(*rows)]), lambda: WATERMARK)
    return None if written is None else sink.commit_chunks(epoch, [CopiedChunk(TARGET, chunk, origin, written)])[0]


def piece(index: int, staged: tuple[Staged, ...]) -> StagedPiece:
    return StagedPiece("", "", index, 1, b"", staged, frozenset(), END)


def stage(sink: DeltaSink, epoch: int, effects: Sequence[Effect], index: int = 0) -> StagedPiece:
    return piece(index, sink.stage(epoch, f"test{index}", effects))


def staged_files(root: Path) -> int:
    return sum(1 for _ in (root / "_airflow_cdc").rglob("*.parquet"))


def versions(spark: SparkSession, root: Path) -> int:
    return spark.sql(f"DESCRIBE HISTORY delta.`{root}/copy/Ord ers`").count()


def test_a_chunk_is_committed_once_with_its_watermark(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root)
    assert sink.missing([TARGET]) == ()
    assert copy(sink, epoch, CHUNK, ("1", "a", "1.50"), ("2", "", None), ("3", None, "-3")) == 3
    assert copy(sink, epoch, CHUNK, ("1", "a", "1.50")) is None
    assert rows(spark, root) == [(1, "a", "1.50"), (2, "", None), (3, None, "-3.00")]
    record = sink.record()
    assert record is not None
    assert (record.unfinished, record.high, record.applied, record.consistent) == ((), 150, 100, False)
    assert record.chunks[0].watermark == WATERMARK
    assert record.targets == (TARGET,)
    assert staged_files(root) == 0


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_chunks_are_committed_together_and_each_once(spark: SparkSession, root: Path, mode: str) -> None:
    sink = opened(root, mode)
    chunks = [Chunk(LABEL, 0, None, ("10",)), Chunk(LABEL, 1, ("10",), ("20",)), Chunk(LABEL, 2, ("20",), None)]
    sink.prepare([TARGET], chunks, IDENTITY, 100)
    epoch = sink.take_epoch("test")
    copied = [
        CopiedChunk(
            TARGET, chunk, ORIGIN, sink.write_chunk(epoch, TARGET, chunk, ORIGIN, iter([rows]), lambda: WATERMARK)
        )
        for chunk, rows in zip(chunks, (batch((key, "x", None)) for key in ("1", "11", "21")), strict=True)
    ]
    assert sink.commit_chunks(epoch, copied[:1]) == [1]
    before = versions(spark, root)
    assert sink.commit_chunks(epoch, copied) == [None, 1, 1]
    assert versions(spark, root) == before + 1
    assert sink.commit_chunks(epoch, copied) == [None, None, None]
    assert rows(spark, root, "id") == [(1,), (11,), (21,)]
    record = sink.record()
    assert record is not None
    assert record.unfinished == ()
    assert staged_files(root) == 0


def test_a_table_that_another_process_has_begun_to_make_is_awaited(
    spark: SparkSession, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, epoch = prepared(root)
    begun = root / "copy" / "Ord ers"
    begun.mkdir(parents=True)
    (begun / "first.parquet").touch()
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        (begun / "first.parquet").unlink()

    monkeypatch.setattr(delta_spark, "time", SimpleNamespace(sleep=pause))
    assert copy(sink, epoch, CHUNK, ("1", "a", "1.50")) == 1
    assert len(pauses) == 1


def test_a_chunk_is_refused_that_comes_from_where_the_pipeline_is_no_longer(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root)
    written = sink.write_chunk(epoch, TARGET, CHUNK, ORIGIN, iter([]), lambda: WATERMARK)
    sink.note_source(epoch, {"timeline": 2})
    with pytest.raises(StreamFailed, match=r"timeline 1.* gone on to .*timeline 2"):
        sink.commit_chunks(epoch, [CopiedChunk(TARGET, CHUNK, ORIGIN, written)])
    assert sink.record().unfinished  # type: ignore[union-attr]


def test_units_are_applied_in_order_and_once(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root)
    assert sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1")])])
    assert staged_files(root) == 0
    assert not sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "stale", "0")])])
    assert staged_files(root) == 0
    with pytest.raises(GateClosed, match="0/12C"):
        sink.commit(epoch, 300, 400, [stage(sink, epoch, [upsert("1", "ahead", "0")])])
    assert rows(spark, root) == [(1, "a", "1.00")]
    assert sink.record().applied == 200  # type: ignore[union-attr]


def test_pieces_of_a_unit_are_applied_by_their_index_in_one_commit(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root)
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("8", "before", "1")])])
    before = versions(spark, root)
    gone = pa.table({"erased": pa.array([True]), "c0": text("2"), "c1": text(None), "c2": text(None)})
    pieces = [
        stage(sink, epoch, [Effect(LABEL, False, gone), upsert("1", "last", "9")], index=2),
        stage(sink, epoch, [upsert("1", "first", "1"), upsert("2", "x", "2")], index=0),
        stage(sink, epoch, [Effect(LABEL, True, gone.slice(0, 0)), upsert("3", "kept", "3")], index=1),
    ]
    sink.commit(epoch, 200, 300, pieces)
    assert rows(spark, root) == [(1, "last", "9.00"), (3, "kept", "3.00")]
    assert versions(spark, root) == before + 1
    sink.commit(epoch, 300, 400, [stage(sink, epoch, [Effect(LABEL, True, gone.slice(0, 0))])])
    assert rows(spark, root) == []


def test_values_that_were_not_sent_come_from_the_row_at_its_origin(spark: SparkSession, root: Path) -> None:
    """In the table, or in an earlier piece, whose own may have come from elsewhere."""
    sink, epoch = prepared(root)
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "long", "1"), upsert("2", "other", "2")])])
    moved = pa.table(
        {
            "erased": pa.array([True, False, False]),
            "c0": text("1", "5", "2"),
            "c1": text(None, None, None),
            "c2": text(None, "7", "8"),
            "missing": pa.array([None, "{1}", "{1}"]),
            "o0": text(None, "1", "2"),
        }
    )
    again = pa.table(
        {
            "erased": pa.array([True, False, False]),
            "c0": text("5", "6", "2"),
            "c1": text(None, None, "new"),
            "c2": text(None, None, "9"),
            "missing": pa.array([None, "{1,2}", None]),
            "o0": text(None, "5", None),
        }
    )
    last = again.slice(0, 0)
    pieces = [
        stage(sink, epoch, [Effect(LABEL, False, moved)], 0),
        stage(sink, epoch, [Effect(LABEL, False, again)], 1),
        stage(sink, epoch, [Effect(LABEL, False, last), upsert("9", "sent", "9")], 2),
    ]
    before = versions(spark, root)
    sink.commit(epoch, 200, 300, pieces)
    assert rows(spark, root) == [(2, "new", "9.00"), (6, "long", "7.00"), (9, "sent", "9.00")]
    assert versions(spark, root) == before + 1


def test_values_that_nobody_has_are_asked_for_and_nothing_is_applied(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root)
    copy(sink, epoch, CHUNK, ("9", "there", "9"))
    columns = {"erased": pa.array([False]), "c0": text("5"), "c1": text(None), "c2": text("7")}
    unknown = pa.table(columns | {"missing": pa.array(["{1}"]), "o0": text(None)})
    unit = [stage(sink, epoch, [upsert("1", "a", "1"), Effect(LABEL, False, unknown)])]
    with pytest.raises(MissingValues) as missing:
        sink.commit(epoch, 100, 200, unit)
    assert missing.value.keys == {LABEL: frozenset({("5",)})}
    assert rows(spark, root) == [(9, "there", "9.00")]
    later = Watermark(Snapshot(10, 12, frozenset({11})), 160)
    read = iter([batch(("5", "read", "7"))])
    sink.replace(epoch, TARGET, frozenset({("5",), ("9",)}), read, lambda: later, TARGET)
    assert [c.keys for c in sink.record().chunks] == [None, frozenset({("5",), ("9",)})]  # type: ignore[union-attr]
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1")], index=1)])
    assert rows(spark, root) == [(1, "a", "1.00"), (5, "read", "7.00")]
    assert [c.keys for c in sink.record().chunks] == [None]  # type: ignore[union-attr]


def test_values_that_nobody_has_are_asked_for_before_there_is_a_table(spark: SparkSession, root: Path) -> None:
    sink = opened(root)
    sink.prepare([TARGET], [], IDENTITY, 100)
    epoch = sink.take_epoch("test")
    columns = {"erased": pa.array([False]), "c0": text("5"), "c1": text(None), "c2": text("7")}
    unknown = pa.table(columns | {"missing": pa.array(["{1}"]), "o0": text("5")})
    with pytest.raises(MissingValues) as missing:
        sink.commit(epoch, 100, 200, [stage(sink, epoch, [Effect(LABEL, False, unknown)])])
    assert missing.value.keys == {LABEL: frozenset({("5",)})}
    later = Watermark(Snapshot(10, 12, frozenset({11})), 160)
    sink.replace(epoch, TARGET, missing.value.keys[LABEL], iter([batch(("5", "read", "7"))]), lambda: later, TARGET)
    assert rows(spark, root) == [(5, "read", "7.00")]


def test_an_old_epoch_commits_nothing(spark: SparkSession, root: Path) -> None:
    sink, old = prepared(root)
    unit = [stage(sink, old, [upsert("1", "zombie", "1")])]
    written = sink.write_chunk(old, TARGET, CHUNK, ORIGIN, iter([]), lambda: WATERMARK)
    new = sink.take_epoch("another")
    with pytest.raises(Fenced):
        sink.commit(old, 100, 200, unit)
    with pytest.raises(Fenced):
        sink.commit_chunks(old, [CopiedChunk(TARGET, CHUNK, ORIGIN, written)])
    with pytest.raises(Fenced):
        sink.write_chunk(old, TARGET, CHUNK, ORIGIN, iter([]), lambda: WATERMARK)
    with pytest.raises(Fenced):
        sink.stage(old, "late", [upsert("1", "zombie", "1")])
    with pytest.raises(Fenced):
        sink.replace(old, TARGET, None, iter([]), lambda: WATERMARK, TARGET)
    sink.sweep(old)
    assert staged_files(root) > 0
    sink.sweep(new)
    assert staged_files(root) == 0
    assert new > old
    assert not (root / "copy").exists()


@pytest.mark.parametrize("place", ["before-table-written", "after-table-written", "after-step"])
def test_what_has_been_decided_is_done_by_the_next_run(
    spark: SparkSession, root: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Of the unit that a run leaves in the middle, in a mirror by MERGE and in a changelog by an append."""
    for mode in ("mirror", "changelog"):
        sink, epoch = prepared(root / mode, mode)
        copy(sink, epoch, CHUNK, ("1", "a", "1"))
        effect = upsert("1", "b", "2") if mode == "mirror" else Effect(LABEL, False, events("i", "2"))
        unit = [stage(sink, epoch, [effect])]
        with monkeypatch.context() as armed:
            armed.setenv(VARIABLE, f"{place}:error")
            with pytest.raises(Failpoint):
                sink.commit(epoch, 100, 200, unit)
        assert sink.record().applied == 100  # type: ignore[union-attr]
        new = sink.take_epoch("next")
        assert sink.record().applied == 200  # type: ignore[union-attr]
        sink.sweep(new)
        with pytest.raises(Fenced):
            sink.commit(epoch, 100, 200, unit)
        assert sink.commit(new, 100, 200, unit) is False
        columns = "id, note" if mode == "mirror" else "_op, id"
        expected = [(1, "b")] if mode == "mirror" else [("i", 2), ("r", 1)]
        assert rows(spark, root / mode, columns) == expected


def test_a_run_that_was_overtaken_in_the_middle_does_nothing_when_it_wakes_up(
    spark: SparkSession, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has decided a unit, and sleeps before it writes; others do so for it, and go on."""
    sink, epoch = prepared(root)
    copy(sink, epoch, CHUNK, ("1", "a", "1"))
    unit = [stage(sink, epoch, [upsert("1", "b", "2")])]
    with monkeypatch.context() as armed:
        armed.setenv(VARIABLE, "before-table-written:error")
        with pytest.raises(Failpoint):
            sink.commit(epoch, 100, 200, unit)
    sleeper = sink._log.head()
    new = sink.take_epoch("next")
    sink.commit(new, 200, 300, [stage(sink, new, [upsert("1", "c", "3")], 1)])
    before = versions(spark, root)
    assert sleeper is not None
    sink._roll_forward(sleeper)
    assert rows(spark, root) == [(1, "c", "3.00")]
    assert versions(spark, root) == before
    assert sink.record().applied == 300  # type: ignore[union-attr]


def test_staged_files_that_are_gone_are_noticed(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root)
    unit = [stage(sink, epoch, [upsert("1", "a", "1")])]
    sink.sweep(epoch)
    with pytest.raises(StagingLost):
        sink.commit(epoch, 100, 200, unit)
    assert sink.record().applied == 100  # type: ignore[union-attr]


def test_tables_that_cannot_be_targets_are_refused(spark: SparkSession, root: Path) -> None:
    spark.sql(f"CREATE TABLE delta.`{root}/copy/Ord ers` (id BIGINT) USING delta")
    with pytest.raises(ForeignTable, match="note STRING"):
        prepared(root)
    spark.sql(f"INSERT INTO delta.`{root}/copy/Ord ers` VALUES (1)")
    with pytest.raises(ForeignTable, match="Ord ers exists and has rows"):
        prepared(root)
    table = {**TABLE.to_dict(), "key": ()}
    with pytest.raises(UncapturableTable, match="no key"):
        opened(root).prepare([Target(type(TABLE).from_dict(table), "copy", "x")], [], IDENTITY, 100)
    column = {**table["columns"][0], "name": "NOTE"}
    table = {**TABLE.to_dict(), "columns": [*TABLE.to_dict()["columns"], column]}
    with pytest.raises(UncapturableTable, match="columns note and NOTE"):
        opened(root).prepare([Target(type(TABLE).from_dict(table), "copy", "x")], [], IDENTITY, 100)
    with pytest.raises(ConfigError, match="no column day"):
        opened(root, partition_by=((LABEL, ("day",)),)).prepare([TARGET], [], IDENTITY, 100)
    assert sink_tables(root) == ["Ord ers"]


@pytest.mark.parametrize("name", ["..", "a/b: 50%"])
def test_names_that_are_paths_are_folders_of_the_lake(spark: SparkSession, root: Path, name: str) -> None:
    target = Target(replace(TABLE, schema=name, name=name), name, name)
    label, chunk = target.table.label, Chunk(target.table.label, 0, None, None)
    sink = opened(root)
    sink.prepare([target], [chunk], IDENTITY, 100)
    epoch = sink.take_epoch("test")
    written = sink.write_chunk(epoch, target, chunk, ORIGIN, iter([batch(("1", "a", "1"))]), lambda: WATERMARK)
    assert written is not None
    assert sink.commit_chunks(epoch, [CopiedChunk(target, chunk, ORIGIN, written)]) == [1]
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [replace(upsert("2", "b", "2"), label=label)])])
    found = [key for rows_ in sink.rows(target) for key in rows_.column(0).to_pylist()]
    assert sorted(found) == ["1", "2"]
    assert sink.missing([target]) == ()
    assert [path.name for path in root.parent.iterdir()] == [root.name]
    logs = [path.relative_to(root) for path in root.rglob("_delta_log")]
    assert [len(log.parts) for log in logs] == [3], "the schema, the table, its log"


def sink_tables(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "copy").iterdir())


def test_a_value_without_a_place_is_refused_before_anything_is_applied(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root)
    with pytest.raises(LimitExceeded, match=r"NaN of public\.Ord ers\.amount"):
        stage(sink, epoch, [upsert("1", "a", "NaN")])


def test_a_constraint_of_the_target_stops_the_pipeline_until_it_is_gone(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root)
    copy(sink, epoch, CHUNK, ("1", "a", "1"))
    spark.sql(f"ALTER TABLE delta.`{root}/copy/Ord ers` ADD CONSTRAINT small CHECK (amount < 5)")
    unit = [stage(sink, epoch, [upsert("2", "b", "7")])]
    with pytest.raises(TargetConflict, match="small"):
        sink.commit(epoch, 100, 200, unit)
    spark.sql(f"ALTER TABLE delta.`{root}/copy/Ord ers` DROP CONSTRAINT small")
    sink.take_epoch("again")
    assert sink.record().applied == 200  # type: ignore[union-attr]
    assert rows(spark, root, "id") == [(1,), (2,)]


def events(op: str, key: str) -> pa.Table:
    return pa.table(
        {
            "op": [op],
            "commit_lsn": pa.array([160]),
            "seq": pa.array([1]),
            "xid": pa.array([20]),
            "commit_ts": pa.array([0]),
            "c0": text(key),
            "c1": text(None),
            "c2": text("5"),
        }
    )


def test_a_changelog_keeps_every_change_and_says_what_was_read_again(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root, "changelog")
    copy(sink, epoch, CHUNK, ("1", "a", "1"))
    change = pa.table(
        {
            "op": ["u", "d"],
            "commit_lsn": pa.array([160, 160]),
            "seq": pa.array([1, 2]),
            "xid": pa.array([20, 20]),
            "commit_ts": pa.array([0, 0]),
            "c0": text("2", "2"),
            "c1": text(None, None),
            "c2": text("5", None),
            "unchanged": pa.array(['{"note"}', None]),
            "old_kind": pa.array(["K", "K"]),
            "b0": text("1", "2"),
            "b1": text(None, None),
            "b2": text(None, None),
        }
    )
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [Effect(LABEL, False, change)])])
    sink.replace(epoch, TARGET, frozenset({("1",)}), iter([batch(("1", "a", "1"))]), lambda: WATERMARK, TARGET)
    sink.replace(epoch, TARGET, None, iter([batch(("1", "a", "1"))]), lambda: WATERMARK, TARGET)
    columns = "_commit_lsn, _seq, _op, id, note, _before, _unchanged"
    assert rows(spark, root, columns) == [
        (100, FIRST_READ, "r", 1, "a", None, None),
        (160, 1, "u", 2, None, '{"id": "1"}', ["note"]),
        (160, 2, "d", 2, None, '{"id": "2"}', None),
        (200, FIRST_READ, "d", 1, None, '{"id": "1"}', None),
        (200, FIRST_READ + 1, "r", 1, "a", None, None),
        (200, FIRST_READ + 2, "t", None, None, None, None),
        (200, FIRST_READ + 3, "r", 1, "a", None, None),
    ]
    assert rows(spark, root, "count(_commit_ts)") == [(4,)]
    read = [tuple(row.values()) for found in sink.rows(TARGET) for row in found.to_pylist()]
    assert ("2", None, "5.00", "u", "0/A0", "1", '{"id": "1"}', "{note}") in read
    assert len(read) == 7


def test_rows_are_read_as_postgres_writes_them(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root)
    copy(sink, epoch, CHUNK, ("1", "a", "1.50"), ("2", "", None), ("3", "ü", "-3"))
    read = [tuple(row.values()) for found in sink.rows(TARGET) for row in found.to_pylist()]
    assert sorted(read) == [("1", "a", "1.50"), ("2", "", None), ("3", "ü", "-3.00")]
    read = [tuple(row.values()) for found in sink.rows(TARGET, [("3",), ("4",)]) for row in found.to_pylist()]
    assert read == [("3", "ü", "-3.00")]
    assert sink.matching_keys(TARGET, "amount > 0") == frozenset({("1",)})
    with pytest.raises(ConfigError, match="nowhere"):
        sink.check_condition(TARGET, "nowhere > 0")
    assert staged_files(root) == 0


def test_files_are_joined_while_units_come(spark: SparkSession, root: Path) -> None:
    """OPTIMIZE and MERGE want the same files; whoever comes second begins again."""
    sink, epoch = prepared(root)
    copy(sink, epoch, CHUNK, *((str(n), "a", "0") for n in range(20)))
    for n in range(2):
        sink.commit(epoch, 100 + n, 101 + n, [stage(sink, epoch, [upsert(str(n), "b", str(n))])])
    with ThreadPoolExecutor(1) as pool:
        maintained = pool.submit(maintain, sink, [LABEL])
        for n in range(2, 5):
            unit = [stage(sink, epoch, [upsert(str(n), "b", str(n)), upsert("9", "b", str(n))])]
            assert sink.commit(epoch, 100 + n, 101 + n, unit)
    assert [each.table for each in maintained.result()] == [LABEL]
    assert sum(each.removed for each in (*maintained.result(), *maintain(sink))) > 1
    assert rows(spark, root, "count(*), sum(amount), count_if(note = 'b')") == [(20, 14, 6)]
    with pytest.raises(TargetConflict, match=r"(?i)retention"):
        maintain(sink, retained_hours=0)


def test_tables_that_other_readers_of_delta_can_read(spark: SparkSession, root: Path) -> None:
    """Without what they do not know yet: columns with identities, and deletion vectors."""
    plain = (("delta.columnMapping.mode", "none"),)
    sink, epoch = prepared(root, deletion_vectors=False, properties=plain, partition_by=((LABEL, ("note",)),))
    copy(sink, epoch, CHUNK, ("1", "a", "1.50"), ("2", "b", None))
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("2", "a", "2"), upsert("3", "c", "3")])])
    table = deltalake.DeltaTable(root / "copy" / "Ord ers")
    found = table.to_pyarrow_table().sort_by("id").to_pylist()
    assert [tuple(map(str, row.values())) for row in found] == [
        ("1", "a", "1.50"),
        ("2", "a", "2.00"),
        ("3", "c", "3.00"),
    ]
    assert table.metadata().partition_columns == ["note"]
    application = f"p/{sink.identity()['store']}"
    assert table.transaction_version(application) == sink._log.head().number - 1  # type: ignore[union-attr]
    columns = tuple(replace(column, attnum=n) for n, column in enumerate(TABLE.columns, 1))
    before, after = (replace(TARGET, table=replace(TABLE, columns=kept)) for kept in (columns, columns[:2]))
    with pytest.raises(RowsNeeded, match="drop amount"):
        sink.redefine(epoch, before, after)


def test_a_column_takes_the_name_that_another_has_given_up(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root)
    copy(sink, epoch, CHUNK, ("1", "a", "1.50"))
    numbered = [replace(column, attnum=n) for n, column in enumerate(TABLE.columns, 1)]
    before = replace(TARGET, table=replace(TABLE, columns=tuple(numbered)))
    numbered[1] = replace(numbered[1], name="remark")
    note = replace(numbered[1], name="note", attnum=4, missing="new")
    sink.redefine(epoch, before, replace(TARGET, table=replace(TABLE, columns=(*numbered, note))))
    assert rows(spark, root, "id, remark, note") == [(1, "a", "new")]


def test_dropping_leaves_the_target_tables(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root)
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1")])])
    stage(sink, epoch, [upsert("2", "b", "2")])
    sink.drop()
    assert sink.record() is None
    assert staged_files(root) == 0
    assert rows(spark, root) == [(1, "a", "1.00")]
