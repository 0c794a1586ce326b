"""The Delta sink, on real tables: the contract of all sinks, commits of tables, and the remains of crashes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import (
    ConfigError,
    Failpoint,
    Fenced,
    ForeignTable,
    LimitExceeded,
    StreamFailed,
    TargetConflict,
    UncapturableTable,
)
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.lsn import LOG_END
from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.sinks.delta import spark_errors as delta_spark
from airflow_cdc_provider.engine.sinks.delta.maintenance import maintain
from airflow_cdc_provider.engine.sinks.delta.plugin import DeltaPlugin
from airflow_cdc_provider.engine.sinks.delta.settings import DeltaSettings
from airflow_cdc_provider.engine.sinks.delta.sink import DeltaSink
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk, RowsNeeded, Staged, StagedPiece
from tests.sinks.begun_sink import (
    IDENTITY,
    LABEL,
    ORIGIN,
    TABLE,
    TARGET,
    WATERMARK,
    WHOLE,
    Begun,
    SinkUnderTest,
    change,
    text,
    upsert,
)
from tests.sinks.contract import ProtocolContract
from tests.sinks.contract_rows import ChangelogContract, LakeContract, MirrorContract
from tests.support.delta_spark import delta_session
from tests.support.given_rows import GivenRows

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

NAMES = ["id", "note", "amount"]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with delta_session() as session:
        yield session


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "the lake"


class DeltaStore(SinkUnderTest):
    """A path without tables."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark = spark
        self.root = root

    def _place(self, target: Target) -> Path:
        return self.root / target.schema / target.name

    def sink(self, mode: Mode, pipeline: str = "p") -> DeltaSink:
        return opened(self.root, mode, pipeline)

    def read(self, target: Target) -> list[dict[str, Any]]:
        if not self._place(target).exists():
            return []
        return [row.asDict() for row in self.spark.sql(f"SELECT * FROM delta.`{self._place(target)}`").collect()]

    def names(self) -> set[str]:
        return {str(path) for path in self.root.rglob("*") if path.is_file()}

    def staged(self) -> int:
        return staged_files(self.root)

    def damage(self, staged: Staged) -> None:
        (self.root / "_airflow_cdc" / "p" / str(staged.relation)).unlink()

    def occupy(self, target: Target) -> None:
        self.spark.sql(f"CREATE TABLE delta.`{self._place(target)}` USING delta AS SELECT 1 AS id")

    def remove(self, target: Target) -> None:
        shutil.rmtree(self._place(target), ignore_errors=True)


def commits(store: SinkUnderTest) -> int:
    """Return the number of commits to the table since its creation."""
    assert isinstance(store, DeltaStore)
    return versions(store.spark, store.root) - 1


@pytest.fixture
def store(spark: SparkSession, root: Path) -> DeltaStore:
    return DeltaStore(spark, root)


@pytest.mark.thorough
class TestProtocol(ProtocolContract):
    """The contract of the protocol on Delta tables."""


class TestMirror(MirrorContract, LakeContract):
    """The contracts of mirrors and lakes on Delta tables; everything done at once is one commit of the table."""

    def test_chunks_are_committed_together_and_each_once(self, store: SinkUnderTest) -> None:
        super().test_chunks_are_committed_together_and_each_once(store)
        assert commits(store) == 2

    def test_pieces_of_a_unit_are_applied_by_their_index(self, begun: Begun) -> None:
        super().test_pieces_of_a_unit_are_applied_by_their_index(begun)
        assert commits(begun.store) == 4

    def test_values_that_were_not_sent_come_from_the_row_at_its_origin(self, begun: Begun) -> None:
        super().test_values_that_were_not_sent_come_from_the_row_at_its_origin(begun)
        assert commits(begun.store) == 2


@pytest.mark.thorough
class TestChangelog(ChangelogContract):
    """The contract of changelogs on Delta tables."""


def opened(root: Path, mode: str = "mirror", pipeline: str = "p", **settings: object) -> DeltaSink:
    made = DeltaSettings(str(root), mode=mode, **settings)  # type: ignore[arg-type]
    return DeltaPlugin().open(made, pipeline)


def prepared(root: Path, mode: str = "mirror", **settings: object) -> tuple[DeltaSink, int]:
    """Return a sink at applied LSN 100 with one planned chunk, and the epoch of its first run."""
    sink = opened(root, mode, **settings)
    sink.prepare([TARGET], [WHOLE], IDENTITY, 100)
    return sink, sink.take_epoch("test")


def rows(
    spark: SparkSession, root: Path, columns: str = "id, note, CAST(amount AS STRING)"
) -> list[tuple[object, ...]]:
    found = spark.sql(f"SELECT {columns} FROM delta.`{root}/copy/Ord ers` ORDER BY ALL").collect()
    return [tuple(row) for row in found]


def batch(*rows: Sequence[str | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([text(*column) for column in zip(*rows, strict=True)], names=NAMES)


def copy(sink: DeltaSink, epoch: int, chunk: Chunk, *rows: Sequence[str | None]) -> int | None:
    written = sink.write_chunk(epoch, TARGET, chunk, ORIGIN, GivenRows([batch(*rows)], lambda: WATERMARK))
    return None if written is None else sink.commit_chunks(epoch, [CopiedChunk(TARGET, chunk, ORIGIN, written)])[0]


def piece(index: int, staged: tuple[Staged, ...]) -> StagedPiece:
    return StagedPiece("", "", index, 1, b"", staged, frozenset(), LOG_END)


def stage(sink: DeltaSink, epoch: int, effects: Sequence[Effect], index: int = 0) -> StagedPiece:
    return piece(index, sink.stage(epoch, f"test{index}", effects))


def staged_files(root: Path) -> int:
    return sum(1 for _ in (root / "_airflow_cdc").rglob("*.parquet"))


def versions(spark: SparkSession, root: Path) -> int:
    return spark.sql(f"DESCRIBE HISTORY delta.`{root}/copy/Ord ers`").count()


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
    assert copy(sink, epoch, WHOLE, ("1", "a", "1.50")) == 1
    assert len(pauses) == 1


@pytest.mark.parametrize("place", ["before-table-written", "after-table-written", "after-step"])
def test_what_has_been_decided_is_done_by_the_next_run(
    spark: SparkSession, root: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A run leaves a unit half done, in a mirror by MERGE and in a changelog by an append."""
    for mode in ("mirror", "changelog"):
        sink, epoch = prepared(root / mode, mode)
        copy(sink, epoch, WHOLE, ("1", "a", "1"))
        effect = upsert("1", "b", "2") if mode == "mirror" else change("i", "2", None, "5")
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
    """It has decided a unit, and sleeps before it writes; other runs write for it, and continue."""
    sink, epoch = prepared(root)
    copy(sink, epoch, WHOLE, ("1", "a", "1"))
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
    written = sink.write_chunk(epoch, target, chunk, ORIGIN, GivenRows([batch(("1", "a", "1"))], lambda: WATERMARK))
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
    copy(sink, epoch, WHOLE, ("1", "a", "1"))
    spark.sql(f"ALTER TABLE delta.`{root}/copy/Ord ers` ADD CONSTRAINT small CHECK (amount < 5)")
    unit = [stage(sink, epoch, [upsert("2", "b", "7")])]
    with pytest.raises(TargetConflict, match="small"):
        sink.commit(epoch, 100, 200, unit)
    spark.sql(f"ALTER TABLE delta.`{root}/copy/Ord ers` DROP CONSTRAINT small")
    sink.take_epoch("again")
    assert sink.record().applied == 200  # type: ignore[union-attr]
    assert rows(spark, root, "id") == [(1,), (2,)]


def test_whatever_spark_fails_of_is_told_with_its_cause(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root)
    copy(sink, epoch, WHOLE, ("1", "a", "1"))
    refuse = "CHECK (id < 5 OR isnull(raise_error('on purpose')))"
    spark.sql(f"ALTER TABLE delta.`{root}/copy/Ord ers` ADD CONSTRAINT odd {refuse}")
    unit = [stage(sink, epoch, [upsert("7", "b", "7")])]
    steps: list[Callable[[], object]] = [lambda: sink.commit(epoch, 100, 200, unit), lambda: sink.take_epoch("again")]
    for step in steps:
        with pytest.raises(StreamFailed, match="on purpose SQLSTATE: P0001") as told:
            step()
        assert told.value.solution
    spark.sql(f"ALTER TABLE delta.`{root}/copy/Ord ers` DROP CONSTRAINT odd")
    epoch = sink.take_epoch("mended")
    assert sink.record().applied == 200  # type: ignore[union-attr]

    for file in (root / "copy" / "Ord ers").rglob("*.parquet"):
        file.write_bytes(b"no longer what it was")
        (file.parent / f".{file.name}.crc").unlink(missing_ok=True)
    unit = [stage(sink, epoch, [upsert("7", "c", "7")])]
    steps = [
        lambda: list(sink.rows(TARGET)),
        lambda: list(sink.rows(TARGET, [("1",)])),
        lambda: sink.matching_keys(TARGET, "id > 0"),
        lambda: sink.commit(epoch, 200, 300, unit),
    ]
    for step in steps:
        with pytest.raises(StreamFailed, match="is not a Parquet file") as damaged:
            step()
        assert damaged.value.solution


def test_events_are_read_as_postgres_writes_them(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root, "changelog")
    old = {"old_kind": "K", "b0": "1", "b1": None, "b2": None}
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [change("u", "2", None, "5", unchanged='{"note"}', **old)])])
    (told,) = (row for found in sink.rows(TARGET) for row in found.to_pylist())
    names = ("_op", "_commit_lsn", "id", "amount", "_before", "_unchanged")
    assert [told[name] for name in names] == ["u", "0/A0", "2", "5.00", '{"id": "1"}', "{note}"]
    assert rows(spark, root, "_commit_ts") == [(datetime(1970, 1, 1),)]


def test_rows_are_read_as_postgres_writes_them(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root)
    copy(sink, epoch, WHOLE, ("1", "a", "1.50"), ("2", "", None), ("3", "ü", "-3"))
    read = [tuple(row.values()) for found in sink.rows(TARGET) for row in found.to_pylist()]
    assert sorted(read) == [("1", "a", "1.50"), ("2", "", None), ("3", "ü", "-3.00")]
    read = [tuple(row.values()) for found in sink.rows(TARGET, [("3",), ("4",)]) for row in found.to_pylist()]
    assert read == [("3", "ü", "-3.00")]
    assert sink.matching_keys(TARGET, "amount > 0") == frozenset({("1",)})
    with pytest.raises(ConfigError, match="nowhere"):
        sink.check_condition(TARGET, "nowhere > 0")
    assert staged_files(root) == 0


@pytest.mark.thorough
def test_files_are_joined_while_units_come(spark: SparkSession, root: Path) -> None:
    """OPTIMIZE and MERGE need the same files; whichever commits second starts again."""
    sink, epoch = prepared(root)
    copy(sink, epoch, WHOLE, *((str(n), "a", "0") for n in range(20)))
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
    """The tables lack features that other readers do not support: columns with identities, and deletion vectors."""
    plain = (("delta.columnMapping.mode", "none"),)
    sink, epoch = prepared(root, deletion_vectors=False, properties=plain, partition_by=((LABEL, ("note",)),))
    copy(sink, epoch, WHOLE, ("1", "a", "1.50"), ("2", "b", None))
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
    with pytest.raises(RowsNeeded, match="drop amount"):
        sink.redefine(epoch, TARGET, replace(TARGET, table=replace(TABLE, columns=TABLE.columns[:2])))


def test_a_column_takes_the_name_that_another_has_given_up(spark: SparkSession, root: Path) -> None:
    sink, epoch = prepared(root)
    copy(sink, epoch, WHOLE, ("1", "a", "1.50"))
    key, note, amount = TABLE.columns
    columns = (key, replace(note, name="remark"), amount, replace(note, attnum=4, missing="new"))
    sink.redefine(epoch, TARGET, replace(TARGET, table=replace(TABLE, columns=columns)))
    assert rows(spark, root, "id, remark, note") == [(1, "a", "new")]
