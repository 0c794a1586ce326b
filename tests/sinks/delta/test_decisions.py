"""The decisions of the Delta sink and their results, on tables that only record steps: no Spark runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import (
    ConfigError,
    Failpoint,
    ForeignTable,
    LimitExceeded,
    StagingLost,
    StreamFailed,
    TargetConflict,
)
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.lsn import LOG_END
from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.sinks.delta.plugin import DeltaPlugin
from airflow_cdc_provider.engine.sinks.delta.settings import DeltaSettings
from airflow_cdc_provider.engine.sinks.delta.sink import DeltaSink
from airflow_cdc_provider.engine.sinks.delta.table_definition import Plan, Present, plan
from airflow_cdc_provider.engine.sinks.delta.table_layout import Layout
from airflow_cdc_provider.engine.sinks.delta.table_work import Alteration, TableWork
from airflow_cdc_provider.engine.sinks.lake import record
from airflow_cdc_provider.engine.sinks.lake.storage import Storage
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk, Staged, StagedPiece
from tests.sinks.begun_sink import IDENTITY, LABEL, ORIGIN, TABLE, TARGET, WATERMARK, WHOLE, upsert
from tests.support.files_sink import ID, column, table
from tests.support.given_rows import GivenRows

FIRST = f"{0:020}.json"


@dataclass
class NotedTable:
    """A folder with a log, in which completed steps are recorded."""

    place: Storage
    refuse: Callable[[], None]
    works: list[TableWork]

    def write(self, work: TableWork, application: str, number: int, is_open: Callable[[], bool]) -> None:
        if self.place.size("_delta_log") is None:
            if not work.create:
                raise AnalysisException("[DELTA_TABLE_NOT_FOUND] gone")
            self.place.replace(f"_delta_log/{FIRST}", b"")
        self.refuse()
        self.works.append(work)
        self.place.replace(f"_delta_log/{number:020}.json", b"")

    def exists(self) -> bool:
        return self.place.size("_delta_log") is not None

    def empty(self) -> bool:
        self.refuse()
        return False

    def properties(self) -> dict[str, str]:
        self.refuse()
        return {}


@dataclass(frozen=True)
class NotingSink(DeltaSink):
    """A sink whose tables only record steps.

    :param refusals: functions called before a table is written or read.
    :param works: the steps done so far.
    """

    refusals: list[Callable[[], None]] = field(default_factory=list, compare=False)
    works: list[TableWork] = field(default_factory=list, compare=False)

    def _table(self, target: Target) -> Any:
        def refuse() -> None:
            for refusal in self.refusals:
                refusal()

        return NotedTable(self.layout.place(target), refuse, self.works)

    def written(self) -> int:
        return len([name for name in (self.layout.place(TARGET) / "_delta_log").names() if name != FIRST])


@pytest.fixture
def sink(tmp_path: Path) -> NotingSink:
    root = Storage(str(tmp_path))
    made = NotingSink(root, "p", "mirror", Layout(root))
    made.prepare([TARGET], [WHOLE], IDENTITY, 100)
    return made


def unit(sink: DeltaSink, epoch: int, start: int, end: int, key: str = "1") -> bool:
    staged: Sequence[Staged] = sink.stage(epoch, f"test{start}", [upsert(key, "a", "1")])
    return sink.commit(epoch, start, end, [StagedPiece("", "", 0, 1, b"", tuple(staged), frozenset(), LOG_END)])


def applied(sink: DeltaSink) -> int:
    record = sink.record()
    assert record is not None
    return record.applied


def refusing(error: Exception) -> Callable[[], None]:
    def refuse() -> None:
        raise error

    return refuse


def drop_table(sink: NotingSink) -> None:
    sink.layout.place(TARGET).remove()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (AnalysisException("[UNRESOLVED_COLUMN] note"), TargetConflict),
        (PySparkException("[DELTA_VIOLATE_CONSTRAINT_WITH_VALUES] CHECK constraint small"), TargetConflict),
        (PySparkException("Job aborted due to stage failure: Connection reset"), StreamFailed),
    ],
)
def test_only_what_stands_in_the_way_asks_for_somebody(
    sink: NotingSink, error: Exception, expected: type[Exception]
) -> None:
    epoch = sink.take_epoch("me")
    sink.refusals.append(refusing(error))
    with pytest.raises(expected):
        unit(sink, epoch, 100, 200)
    sink.sweep(epoch)
    sink.refusals.clear()
    sink.end_sessions()
    assert (applied(sink), sink.written()) == (200, 1)


def test_what_another_process_of_the_run_has_done_meanwhile_is_no_failure(sink: NotingSink) -> None:
    """The other process has also removed the staged files, which are then found missing."""
    epoch = sink.take_epoch("me")

    def be_overtaken() -> None:
        head = sink.head()
        assert head is not None
        step = record_contents.step_of(head.contents)
        assert step is not None
        sink._log.append(head, record_contents.carried_out(step), "carried out")
        raise AnalysisException("[PATH_NOT_FOUND] staging")

    sink.refusals.append(be_overtaken)
    assert unit(sink, epoch, 100, 200)
    assert applied(sink) == 200


def test_a_step_whose_table_was_dropped_lets_the_next_run_say_what_helps(
    sink: NotingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = sink.take_epoch("me")
    assert unit(sink, epoch, 100, 200)
    with monkeypatch.context() as armed:
        armed.setenv(VARIABLE, "before-step:error")
        with pytest.raises(Failpoint):
            unit(sink, epoch, 200, 300)
    drop_table(sink)
    epoch = sink.take_epoch("next")
    assert applied(sink) == 300
    assert sink.missing([TARGET]) == (TARGET,)
    with pytest.raises(TargetConflict, match="no longer exists") as refused:
        unit(sink, epoch, 300, 400)
    assert "resnapshot --table" in refused.value.solution
    assert applied(sink) == 300
    sink.replace(epoch, TARGET, None, GivenRows([], lambda: WATERMARK), TARGET)
    assert sink.missing([TARGET]) == ()
    assert unit(sink, epoch, 300, 400)


def test_a_table_without_a_snapshot_that_was_dropped_is_not_made_again(tmp_path: Path) -> None:
    root = Storage(str(tmp_path))
    sink = NotingSink(root, "p", "mirror", Layout(root))
    sink.prepare([TARGET], [], IDENTITY, 100)
    epoch = sink.take_epoch("me")
    assert sink.missing([TARGET]) == ()
    assert unit(sink, epoch, 100, 200)
    drop_table(sink)
    assert sink.missing([TARGET]) == (TARGET,)
    with pytest.raises(TargetConflict, match="no longer exists"):
        unit(sink, epoch, 200, 300)
    sink.restart(epoch, [TARGET], IDENTITY, 300)
    assert sink.missing([TARGET]) == (), "it is made again with its rows"


def test_rows_that_are_read_by_key_before_any_others_make_the_table(tmp_path: Path) -> None:
    root = Storage(str(tmp_path))
    sink = NotingSink(root, "p", "mirror", Layout(root))
    sink.prepare([TARGET], [], IDENTITY, 100)
    epoch = sink.take_epoch("me")
    sink.replace(epoch, TARGET, frozenset({("1",)}), GivenRows([], lambda: WATERMARK), TARGET)
    assert sink.written() == 1
    drop_table(sink)
    assert sink.missing([TARGET]) == (TARGET,)


def test_nothing_that_was_staged_stays_when_it_is_in_the_tables(sink: NotingSink) -> None:
    epoch = sink.take_epoch("me")
    written = sink.write_chunk(epoch, TARGET, WHOLE, ORIGIN, GivenRows([], lambda: WATERMARK))
    assert written is not None
    assert sink.commit_chunks(epoch, [CopiedChunk(TARGET, WHOLE, ORIGIN, written)]) == [0]
    assert unit(sink, epoch, 100, 200)
    sink.replace(epoch, TARGET, None, GivenRows([], lambda: WATERMARK), TARGET)
    sink.replace(epoch, TARGET, frozenset({("1",)}), GivenRows([], lambda: WATERMARK), TARGET)
    assert sink.written() == 4
    assert not (sink._home / "staging").files()


A = column("a", "integer", 2)


INTS = {"id": "BIGINT", "a": "INT"}


def planned(
    *after: Column,
    before: Sequence[Column] = (ID, A),
    columns: Mapping[str, str] = INTS,
    mode: Mode = "mirror",
    **how: bool,
) -> Plan:
    old, new = (Target(table(*each), "public", "t") for each in (before, after))
    return plan(old, new, Present(columns, mapped=True), mode, how.get("rows_stay", True))


@pytest.mark.parametrize(("mode", "rows_stay"), [("mirror", True), ("changelog", True), ("changelog", False)])
def test_a_column_that_takes_the_name_which_another_has_given_up_is_added(mode: Mode, rows_stay: bool) -> None:
    found = planned(ID, column("B", "integer", 2), column("a", "text", 3), mode=mode, rows_stay=rows_stay)
    assert found.alterations == (Alteration("rename", "a", "B"), Alteration("add", "a", "STRING"))
    found = planned(
        ID,
        column("b", "numeric(9,2)", 2),
        before=(ID, column("a", "numeric(7,2)", 2)),
        mode=mode,
        columns={"id": "BIGINT", "a": "DECIMAL(7,2)"},
        rows_stay=rows_stay,
    )
    assert found.alterations == (Alteration("rename", "a", "b"), Alteration("widen", "b", "DECIMAL(9,2)"))


def test_what_added_columns_are_filled_with_is_looked_at_before_anything_is_decided() -> None:
    with pytest.raises(LimitExceeded, match=r"infinity of public\.t\.valid_to"):
        planned(ID, A, column("valid_to", "date", 3, "infinity"))
    with pytest.raises(LimitExceeded, match="NaN"):
        planned(ID, A, column("amount", "numeric(7,2)", 3, "NaN"))
    assert planned(ID, A, column("day", "date", 3, "2026-01-02")).values == {"day": "2026-01-02"}
    assert planned(ID, A, column("day", "date", 3, "infinity"), mode="changelog", rows_stay=False).values == {}


def test_a_table_that_has_not_been_made_is_redefined_without_it(sink: NotingSink) -> None:
    epoch = sink.take_epoch("me")
    after = replace(TARGET, table=replace(TABLE, columns=TABLE.columns[:2]))
    sink.redefine(epoch, TARGET, after)
    record = sink.record()
    assert record is not None
    assert record.targets == (after,)


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("enters", [True, False])
def test_a_step_is_left_to_the_process_that_has_decided_it_while_it_lives(
    sink: NotingSink, monkeypatch: pytest.MonkeyPatch, lives: bool, enters: bool
) -> None:
    """This also holds for a part that enters the run and checks whether the tables exist."""
    epoch = sink.take_epoch("me")
    sink.refusals.append(refusing(PySparkException("Connection reset")))
    with pytest.raises(StreamFailed):
        unit(sink, epoch, 100, 200)
    sink.refusals.clear()
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        head = sink.head()
        assert head is not None
        if lives:
            sink._roll_forward(head)  # as the other process does meanwhile

    # From here on this is another process than the one that made the decision.
    monkeypatch.setattr(record, "_decided", {})
    monkeypatch.setattr(record, "_PATIENCE", 1.0)
    clock = SimpleNamespace(monotonic=lambda: sum(looks), time=time.time, sleep=look)
    monkeypatch.setattr(record, "time", clock)
    patient = 1 if lives else round(1.0 / record._LOOK_SECONDS)
    if enters:
        assert sink.missing([TARGET]) == ()
        assert (applied(sink), len(looks)) == (200, patient)
    assert unit(sink, epoch, 200, 300)
    assert (applied(sink), len(looks)) == (300, patient)
    assert unit(sink, epoch, 300, 400)
    assert len(looks) == patient


def test_the_configuration_of_spark_is_not_shown(tmp_path: Path) -> None:
    settings = DeltaSettings(str(tmp_path)).with_spark({"spark.hadoop.fs.s3a.secret.key": "s3cret"})
    assert "s3cret" not in repr(DeltaPlugin().open(settings, "p"))


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_many_chunks_are_committed_in_few_steps_each_of_which_reads_its_files_at_once(
    tmp_path: Path, mode: Mode
) -> None:
    root = Storage(str(tmp_path))
    sink = NotingSink(root, "p", mode, Layout(root))
    bounds = [None, *((str(n),) for n in range(1, 70)), None]
    chunks = [Chunk(LABEL, n, *bounds[n : n + 2]) for n in range(70)]
    sink.prepare([TARGET], chunks, IDENTITY, 100)
    epoch = sink.take_epoch("me")
    written = [sink.write_chunk(epoch, TARGET, chunk, ORIGIN, GivenRows([], lambda: WATERMARK)) for chunk in chunks]
    copied = [CopiedChunk(TARGET, chunk, ORIGIN, each) for chunk, each in zip(chunks, written, strict=True)]
    assert sink.commit_chunks(epoch, copied) == [0] * 70
    assert [[len(part.files) for part in work.parts] for work in sink.works] == [[64], [6]]


@pytest.mark.parametrize("rows", [0, 2])
def test_a_chunk_whose_file_the_driver_does_not_find_is_not_decided(sink: NotingSink, rows: int) -> None:
    epoch = sink.take_epoch("me")
    names = [column.name for column in TABLE.columns]
    batch = pa.RecordBatch.from_arrays([pa.nulls(rows, pa.string())] * len(names), names=names)

    def written() -> Any:
        return sink.write_chunk(epoch, TARGET, WHOLE, ORIGIN, GivenRows([batch], lambda: WATERMARK))

    lost = written()
    sink._home.remove(lost.file)
    with pytest.raises(StagingLost, match="does not exist"):
        sink.commit_chunks(epoch, [CopiedChunk(TARGET, WHOLE, ORIGIN, lost)])
    assert sink.commit_chunks(epoch, [CopiedChunk(TARGET, WHOLE, ORIGIN, written())]) == [rows]


def test_what_spark_fails_with_before_anything_is_decided_is_tried_again(sink: NotingSink) -> None:
    epoch = sink.take_epoch("me")
    assert unit(sink, epoch, 100, 200)
    sink.refusals.append(refusing(PySparkException("Connection reset")))
    with pytest.raises(StreamFailed, match="Connection reset"):
        sink.redefine(epoch, TARGET, replace(TARGET, table=replace(TABLE, columns=TABLE.columns[:2])))
    sink.drop()
    with pytest.raises(StreamFailed, match="Connection reset"):
        sink.prepare([TARGET], [WHOLE], IDENTITY, 100)


def test_tables_that_a_catalog_takes_for_one_are_refused_whoever_brings_them(tmp_path: Path) -> None:
    """No earlier check finds it, as in ``resnapshot --all``; one pipeline or two with the same path have the tables."""
    root = Storage(str(tmp_path))
    one, other = (Target(replace(TABLE, name=name), "copy", name) for name in ("orders", "Orders"))
    layout = Layout(root, "unity")

    class Sink(NotingSink):
        def _check_target(self, *_: Any) -> None:
            pass

    sink = Sink(root, "p", "mirror", layout)
    with pytest.raises(ConfigError, match="would be one table"):
        sink.prepare([one, other], [], IDENTITY, 100)
    sink.prepare([one], [], IDENTITY, 100)
    epoch = sink.take_epoch("me")
    with pytest.raises(ConfigError, match="would be one table"):
        sink.add(epoch, [other], [])
    with pytest.raises(ConfigError, match="would be one table"):
        sink.replace(epoch, other, None, GivenRows([], lambda: WATERMARK), None)
    with pytest.raises(ConfigError, match="would be one table"):
        sink.restart(epoch, [one, other], IDENTITY, 100)
    with pytest.raises(ForeignTable, match="belongs to pipeline 'p'"):
        Sink(root, "q", "mirror", layout).prepare([other], [], IDENTITY, 100)
    sink.restart(epoch, [other], IDENTITY, 100)
