"""The MySQL sink, on a real server: the contract of all sinks, its sessions and tables, and what a crash leaves."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pymysql
import pytest

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import (
    Blocked,
    CannotFollow,
    CdcError,
    Failpoint,
    ForeignTable,
    GateClosed,
    LimitExceeded,
    ServerNotReady,
    StagingLost,
    StreamFailed,
    TargetConflict,
    ValueRefused,
)
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.lsn import LOG_END
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.sinks.mysql import record
from airflow_cdc_provider.engine.sinks.mysql import redefinition as mysql_redefinition
from airflow_cdc_provider.engine.sinks.mysql import session as mysql_session
from airflow_cdc_provider.engine.sinks.mysql.address import Address
from airflow_cdc_provider.engine.sinks.mysql.session import Session
from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink
from airflow_cdc_provider.engine.sinks.staged import Staged, StagedPiece
from local_servers.mariadb import MariadbServer
from tests.conftest import MYSQL, PIPELINE_ROLE
from tests.sinks.begun_sink import (
    IDENTITY,
    LABEL,
    ORIGIN,
    TABLE,
    TARGET,
    WATERMARK,
    change,
    text,
    upsert,
)
from tests.sinks.contract import ProtocolContract
from tests.sinks.contract_rows import ChangelogContract, MirrorContract
from tests.support.mysql_store import MysqlStore


@pytest.fixture
def store(mariadb: MariadbServer) -> MysqlStore:
    return MysqlStore(mariadb)


class TestProtocol(ProtocolContract):
    """See :class:`ProtocolContract`."""


class TestMirror(MirrorContract):
    """See :class:`MirrorContract`."""


class TestChangelog(ChangelogContract):
    """See :class:`ChangelogContract`."""


def prepared(server: MariadbServer, mode: str = "mirror") -> tuple[MysqlSink, int]:
    """A sink at applied LSN 100 with one planned chunk, and the epoch of its first run."""
    sink = MysqlSink(server.dsn, "p", mode)  # type: ignore[arg-type]
    sink.prepare([TARGET], [Chunk(LABEL, 0, None, None)], IDENTITY, 100)
    return sink, sink.take_epoch("test")


def query(server: MariadbServer, statement: str) -> list[tuple[object, ...]]:
    with closing(server.connect()) as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())


def rows(server: MariadbServer) -> list[tuple[object, ...]]:
    return query(server, "SELECT id, note, CAST(amount AS CHAR) FROM `copy`.`Ord ers` ORDER BY id")


def piece(index: int, staged: tuple[Staged, ...]) -> StagedPiece:
    return StagedPiece("", "", index, 1, b"", staged, frozenset(), LOG_END)


def stage(sink: MysqlSink, epoch: int, effects: Sequence[Effect], index: int = 0) -> StagedPiece:
    return piece(index, sink.stage(epoch, f"test{index}", effects))


def test_a_commit_in_flight_finishes_before_the_epoch_is_taken(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch row is locked by the commit, so taking over waits; a plain SELECT would let both through."""
    sink, epoch = prepared(mariadb)
    monkeypatch.setattr(mysql_session, "COMMIT_SECONDS", 0.2)
    with closing(mariadb.connect()) as commit, commit.cursor() as cursor:
        cursor.execute("START TRANSACTION")
        cursor.execute("SELECT epoch FROM airflow_cdc.pipelines WHERE pipeline = 'p' LOCK IN SHARE MODE")
        with pytest.raises(Blocked, match=r"Lock wait timeout.*root@(127\.0\.0\.1|localhost)"):
            sink.take_epoch("too early")
    assert sink.take_epoch("in time") > epoch


@pytest.mark.parametrize("part", ["", "stream"])
def test_a_session_that_never_commits_is_ended_when_the_epoch_is_taken(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """A paused process or a lost host would hold the epoch's row, or the lock of a change of tables, for hours."""
    sink, epoch = prepared(mariadb)
    monkeypatch.setattr(mysql_session, "COMMIT_SECONDS", 0.2)
    for hold in ("_fenced", "_alone"):
        paused = replace(sink, part=part)
        arguments = (epoch, "share") if hold == "_fenced" else (epoch,)
        with suppress(StreamFailed), getattr(paused, hold)(*arguments) as held:
            taken = sink.take_epoch("next")
            assert taken > epoch
            assert not alive(held[0] if isinstance(held, tuple) else held)
        epoch = taken
    assert query(mariadb, "SELECT COUNT(*) FROM airflow_cdc.sessions") == [(0,)]


def test_only_the_part_s_own_sessions_are_ended(mariadb: MariadbServer) -> None:
    sink, _ = prepared(mariadb)
    parts = [replace(sink, part=part) for part in ("snapshot-1", "snapshot-2", "stream", "")]
    others = [replace(sink, pipeline="q"), replace(sink, pipeline="pp", part="stream")]
    with ExitStack() as stack:
        stack.enter_context(suppress(CdcError))  # what becomes of sessions that have been ended
        sessions = []
        for each in (*parts, *others):
            stack.enter_context(suppress(CdcError))
            sessions.append(stack.enter_context(each._session()))
        parts[0].end_sessions()
        assert [alive(session) for session in sessions] == [False, True, True, True, True, True]
        parts[-1].end_sessions()
        assert [alive(session) for session in sessions] == [False, False, False, False, True, True]


def alive(session: Session) -> bool:
    try:
        session.run("SELECT 1")
    except pymysql.MySQLError:
        return False
    return True


def test_a_crash_of_the_server_loses_nothing_that_was_staged_or_committed(server_directory: Path) -> None:
    with MariadbServer.create(server_directory / "crashed", programs=MYSQL) as server:
        sink, epoch = prepared(server)
        sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1")])])
        unit = [stage(sink, epoch, [upsert("2", "b", "2")])]
        server.restart("kill")
        assert sink.record().applied == 200  # type: ignore[union-attr]
        sink.commit(epoch, 200, 300, unit)
        assert rows(server) == [(1, "a", "1.00"), (2, "b", "2.00")]


def test_nothing_in_a_unit_commits_before_its_end(mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRUNCATE, and all DDL, would commit what is there so far; a unit that breaks off leaves everything as it was."""
    sink, epoch = prepared(mariadb)
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1"), upsert("2", "b", "2")])])
    emptied = Effect(LABEL, True, upsert("9", "new", "9").rows)
    unit = [stage(sink, epoch, [upsert("3", "c", "3"), emptied])]
    monkeypatch.setenv(VARIABLE, "in-batch-commit:error")
    with pytest.raises(Failpoint):
        sink.commit(epoch, 200, 300, unit)
    assert rows(mariadb) == [(1, "a", "1.00"), (2, "b", "2.00")]
    assert sink.record().applied == 200  # type: ignore[union-attr]
    monkeypatch.delenv(VARIABLE)
    sink.commit(epoch, 200, 300, unit)
    assert rows(mariadb) == [(9, "new", "9.00")]


def test_a_chunk_that_replaces_what_is_there_breaks_off_as_if_it_had_never_begun(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, epoch = prepared(mariadb)
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1")])])
    batch = pa.RecordBatch.from_arrays([text("5"), text("read"), text("7")], names=["id", "note", "amount"])
    chunk = Chunk(LABEL, 0, None, None)
    monkeypatch.setenv(VARIABLE, "before-chunk-commit:error")
    with pytest.raises(Failpoint):
        sink.write_chunk(epoch, TARGET, chunk, ORIGIN, iter([batch]), lambda: WATERMARK)
    assert rows(mariadb) == [(1, "a", "1.00")]
    monkeypatch.delenv(VARIABLE)
    assert sink.write_chunk(epoch, TARGET, chunk, ORIGIN, iter([batch]), lambda: WATERMARK) == 1
    assert rows(mariadb) == [(5, "read", "7.00")]


def test_a_unique_index_of_the_user_s_refuses_and_merges_nothing(mariadb: MariadbServer) -> None:
    """ON DUPLICATE KEY UPDATE would write over the row that has the value."""
    sink, epoch = prepared(mariadb)
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1"), upsert("2", "b", "2")])])
    query(mariadb, "ALTER TABLE `copy`.`Ord ers` ADD UNIQUE (amount)")
    for index, key in enumerate(("2", "3"), 1):
        with pytest.raises(TargetConflict, match=r"Duplicate entry '1\.00'"):
            sink.commit(epoch, 200, 300, [stage(sink, epoch, [upsert(key, "c", "1")], index)])
    assert rows(mariadb) == [(1, "a", "1.00"), (2, "b", "2.00")]


def test_rows_are_inserted_where_files_cannot_be_loaded(mariadb: MariadbServer) -> None:
    query(mariadb, "SET GLOBAL local_infile = OFF")
    try:
        sink, epoch = prepared(mariadb)
        awkward = 'it\'s \\ "quoted", %s\nnext\t;\U0001f600'
        sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", awkward, None), upsert("2", None, "2")])])
        assert rows(mariadb) == [(1, awkward, None), (2, None, "2.00")]
    finally:
        query(mariadb, "SET GLOBAL local_infile = ON")


def test_a_value_that_the_target_cannot_hold_is_refused_and_not_changed(mariadb: MariadbServer) -> None:
    """LOAD DATA LOCAL would cut it, and only warn."""
    sink, epoch = prepared(mariadb)
    with pytest.raises(LimitExceeded, match=r"'amount' of public.Ord ers has the value 'NaN'"):
        stage(sink, epoch, [upsert("1", "a", "NaN")])
    query(mariadb, "ALTER TABLE `copy`.`Ord ers` MODIFY note VARCHAR(3)")
    batch = pa.RecordBatch.from_arrays([text("5"), text("long"), text("7")], names=["id", "note", "amount"])
    with pytest.raises(ValueRefused, match="note"):
        sink.write_chunk(epoch, TARGET, Chunk(LABEL, 0, None, None), ORIGIN, iter([batch]), lambda: WATERMARK)
    with pytest.raises(ValueRefused, match="note"):
        sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "long", "1")], index=1)])
    assert rows(mariadb) == []


def test_what_a_session_means_does_not_depend_on_the_server_s_settings(mariadb: MariadbServer) -> None:
    """With these a value was cut without a warning, and whole statements were refused or broken off."""
    theirs = (
        {"max_execution_time": 1}
        if MYSQL
        else {"max_statement_time": 0.001, "idle_transaction_timeout": 1, "idle_write_transaction_timeout": 1}
    )
    harsh = {
        "max_error_count": 0,
        "sql_notes": 0,
        "wait_timeout": 1,
        "net_read_timeout": 1,
        "net_write_timeout": 1,
        "sql_safe_updates": 1,
        **theirs,
    }
    sink, epoch = prepared(mariadb)
    query(mariadb, "ALTER TABLE `copy`.`Ord ers` MODIFY note VARCHAR(3)")
    before = query(mariadb, f"SELECT {', '.join(f'@@GLOBAL.{name}' for name in harsh)}")[0]
    query(mariadb, "SET " + ", ".join(f"GLOBAL {name} = {value}" for name, value in harsh.items()))
    try:
        with sink._session() as opened:
            assert opened.rows(f"SELECT {', '.join(f'@@SESSION.{name}' for name in harsh)}") == [
                (0, 1, 28800, 3600, 3600, 0, *[0] * len(theirs))
            ]
        batch = pa.RecordBatch.from_arrays([text("5"), text("long"), text("7")], names=["id", "note", "amount"])
        with pytest.raises(ValueRefused, match="1 values changed"):
            sink.write_chunk(epoch, TARGET, Chunk(LABEL, 0, None, None), ORIGIN, iter([batch]), lambda: WATERMARK)
    finally:
        restored = ", ".join(f"GLOBAL {name} = {value}" for name, value in zip(harsh, before, strict=True))
        query(mariadb, f"SET {restored}")
    assert rows(mariadb) == []


def test_rows_come_back_as_postgres_writes_them(mariadb: MariadbServer) -> None:
    sink, epoch = prepared(mariadb)
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1.5"), upsert("2", None, "-0.25")])])
    (batch,) = sink.rows(TARGET)
    assert batch.to_pylist() == [
        {"id": "1", "note": "a", "amount": "1.50"},
        {"id": "2", "note": None, "amount": "-0.25"},
    ]
    (found,) = sink.rows(TARGET, [("2",), ("7",)])
    assert found.column("id").to_pylist() == ["2"]


@pytest.mark.parametrize(("kind", "first", "width"), [("numeric(30,0)", 10**20, 1), ("bigint", 1 << 60, 2)])
def test_keys_of_many_digits_are_not_taken_for_their_neighbours(
    mariadb: MariadbServer, kind: str, first: int, width: int
) -> None:
    """Compared with texts they would be floating point numbers, and the neighbours' rows deleted with theirs."""
    names = [f"k{n}" for n in range(width)]
    columns = [Column(name, kind, 0, None, True, True, attnum=n) for n, name in enumerate(names, 1)]
    columns.append(Column("note", "text", 25, None, False, True, attnum=width + 1))
    target = Target(replace(TABLE, columns=tuple(columns), key=tuple(names)), TARGET.schema, TARGET.name)
    sink = MysqlSink(mariadb.dsn, "p", "mirror")
    sink.prepare([target], [Chunk(LABEL, 0, None, None)], IDENTITY, 100)
    epoch = sink.take_epoch("test")

    def read(keys: Sequence[tuple[str, ...]], note: str) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(
            [*(text(*part) for part in zip(*keys, strict=True)), text(*[note] * len(keys))], names=[*names, "note"]
        )

    every = [(str(first + n), *["-1"] * (width - 1)) for n in range(500)]
    chunk = Chunk(LABEL, 0, None, None)
    sink.write_chunk(epoch, target, chunk, ORIGIN, iter([read(every, "chunk")]), lambda: WATERMARK)
    half = every[::2]
    sink.replace(epoch, target, frozenset(half), iter([read(half, "again")]), lambda: WATERMARK, target)
    found = pa.Table.from_batches(sink.rows(target)).to_pylist()
    assert sorted((row["k0"], row["note"]) for row in found) == [
        (key[0], "chunk" if n % 2 else "again") for n, key in enumerate(every)
    ]
    found = pa.Table.from_batches(sink.rows(target, half)).to_pylist()
    assert sorted(tuple(row[name] for name in names) for row in found) == half


def test_a_table_that_lacks_columns_is_refused(mariadb: MariadbServer) -> None:
    query(mariadb, "CREATE DATABASE `copy`")
    query(mariadb, "CREATE TABLE `copy`.`Ord ers` (id bigint PRIMARY KEY)")
    with pytest.raises(ForeignTable, match=r"column note is missing.*column amount is missing"):
        prepared(mariadb)


def test_a_table_with_narrower_types_is_refused_until_it_is_altered(mariadb: MariadbServer) -> None:
    """With both types and the statement; wider ones pass."""
    query(mariadb, "CREATE DATABASE `copy`")
    query(mariadb, "CREATE TABLE `copy`.`Ord ers` (id int PRIMARY KEY, note varchar(20), amount decimal(20,2))")
    query(mariadb, "ALTER TABLE `copy`.`Ord ers` CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin")
    with pytest.raises(
        ForeignTable, match=r"column id is int, and has to be BIGINT; column note is varchar\(20\)"
    ) as e:
        prepared(mariadb)
    assert "column amount" not in e.value.message
    statement = e.value.solution[e.value.solution.index("ALTER TABLE") :].rstrip(";")
    query(mariadb, statement)
    prepared(mariadb)


def test_events_come_back_as_postgres_writes_them(mariadb: MariadbServer) -> None:
    sink, epoch = prepared(mariadb, "changelog")
    old = {"old_kind": "K", "b0": "1", "b1": None, "b2": None}
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [change("u", "2", None, "5", unchanged='{"note"}', **old)])])
    (batch,) = sink.rows(TARGET)
    (told,) = batch.to_pylist()
    names = ("_op", "_commit_lsn", "_seq", "id", "_before", "_unchanged")
    assert [told[name] for name in names] == ["u", "0/A0", told["_seq"], "2", '{"id": "1"}', "{note}"]
    assert query(mariadb, "SELECT CAST(_commit_ts AS CHAR) FROM `copy`.`Ord ers`") == [("1970-01-01 00:00:00.000000",)]


def test_rows_that_are_read_aside_are_of_no_use_once_a_unit_has_passed(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is applied to the table that they would replace, and is not among them."""
    sink, epoch = prepared(mariadb)
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1")])])
    wider = replace(TABLE, columns=(*TABLE.columns, Column("more", "date", 1082, None, False, True, attnum=4)))
    after = Target(wider, TARGET.schema, TARGET.name)
    batch = pa.RecordBatch.from_arrays(
        [text("5"), text("read"), text("7"), text("2000-01-01")], names=["id", "note", "amount", "more"]
    )
    unit = [stage(sink, epoch, [upsert("2", "b", "2")], index=1)]

    def pass_by(place: str) -> None:
        if place == "after-aside":
            assert sink.commit(epoch, 200, 300, unit)

    monkeypatch.setattr(mysql_redefinition, "failpoint", pass_by)
    with pytest.raises(StreamFailed, match="0/C8 to 0/12C"):
        sink.replace(epoch, after, None, iter([batch]), lambda: WATERMARK, TARGET)
    assert rows(mariadb) == [(1, "a", "1.00"), (2, "b", "2.00")]
    monkeypatch.undo()
    assert sink.replace(epoch, after, None, iter([batch]), lambda: WATERMARK, TARGET) == 1
    assert rows(mariadb) == [(5, "read", "7.00")]
    assert sink.record().targets == (after,)  # type: ignore[union-attr]


WIDER = Target(
    replace(TABLE, columns=(*TABLE.columns, Column("more", "date", 1082, None, False, True, attnum=4))),
    TARGET.schema,
    TARGET.name,
)
"""The target under a definition for which it is made anew."""


def read_anew(*keys: str) -> Iterator[pa.RecordBatch]:
    columns = [text(*keys), text(*["read"] * len(keys)), text(*["7"] * len(keys)), text(*["2000-01-01"] * len(keys))]
    yield pa.RecordBatch.from_arrays(columns, names=["id", "note", "amount", "more"])


def tables_aside(server: MariadbServer) -> int:
    found = "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = 'airflow_cdc'"
    return int(str(query(server, rf"{found} AND table_name LIKE 'aside\_%'")[0][0]))


@pytest.mark.parametrize("before", [TARGET, None])
def test_a_table_filled_aside_that_is_gone_takes_no_place(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch, before: Target | None
) -> None:
    """Its rows would stand in the record as read, and be nowhere."""
    sink, epoch = prepared(mariadb)
    if before is None:
        sink.forget(epoch, [LABEL])
        query(mariadb, "DROP TABLE `copy`.`Ord ers`")
    else:
        sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1")])])

    def sweep(place: str) -> None:
        if place == "after-aside":
            sink.sweep(epoch)

    recorded = sink.record()
    monkeypatch.setattr(mysql_redefinition, "failpoint", sweep)
    with pytest.raises(StagingLost, match=r"aside_.* is gone"):
        sink.replace(epoch, WIDER, None, read_anew("5"), lambda: WATERMARK, before)
    assert sink.record() == recorded
    monkeypatch.undo()
    sink.replace(epoch, WIDER, None, read_anew("5"), lambda: WATERMARK, before)
    assert rows(mariadb) == [(5, "read", "7.00")]


def test_a_trigger_made_while_a_table_is_read_aside_is_named(mariadb: MariadbServer) -> None:
    sink, epoch = prepared(mariadb)
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1")])])

    def reading() -> Iterator[pa.RecordBatch]:
        query(mariadb, "CREATE TRIGGER `copy`.mine BEFORE INSERT ON `copy`.`Ord ers` FOR EACH ROW SET @x = 1")
        yield from read_anew("5")

    with pytest.raises(CannotFollow, match="would be lost: mine"):
        sink.replace(epoch, WIDER, None, reading(), lambda: WATERMARK, TARGET)
    assert rows(mariadb) == [(1, "a", "1.00")]
    assert query(mariadb, "SELECT * FROM airflow_cdc.pending") == []
    query(mariadb, "DROP TRIGGER `copy`.mine")
    sink.replace(epoch, WIDER, None, read_anew("5"), lambda: WATERMARK, TARGET)
    assert rows(mariadb) == [(5, "read", "7.00")]


def broken_off(sink: MysqlSink, epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange that has been announced, and not been done."""
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1")])])
    monkeypatch.setenv(VARIABLE, "before-exchange:error")
    with pytest.raises(Failpoint):
        sink.replace(epoch, WIDER, None, read_anew("5"), lambda: WATERMARK, TARGET)
    monkeypatch.delenv(VARIABLE)


def test_what_keeps_an_announced_exchange_from_being_done_is_named(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, epoch = prepared(mariadb)
    broken_off(sink, epoch, monkeypatch)
    query(mariadb, "CREATE TRIGGER `copy`.mine BEFORE INSERT ON `copy`.`Ord ers` FOR EACH ROW SET @x = 1")
    with pytest.raises(CannotFollow, match=r"copy\.Ord ers cannot make room .*[Tt]rigger") as refused:
        sink.take_epoch("next")
    assert "a trigger on copy.Ord ers" in refused.value.solution
    query(mariadb, "DROP TRIGGER `copy`.mine")
    sink.take_epoch("next")
    assert rows(mariadb) == [(5, "read", "7.00")]
    assert tables_aside(mariadb) == 0


def test_a_foreign_key_from_elsewhere_to_a_table_made_anew_is_named(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes with the old table, which nobody can drop then."""
    sink, epoch = prepared(mariadb)
    broken_off(sink, epoch, monkeypatch)
    query(mariadb, "CREATE DATABASE child")
    query(mariadb, "CREATE TABLE child.k (n bigint, FOREIGN KEY (n) REFERENCES `copy`.`Ord ers` (id)) ENGINE=InnoDB")
    try:
        for _ in range(2):
            with pytest.raises(TargetConflict, match=r"airflow_cdc\.aside_\w+_old, which was copy\.Ord ers"):
                sink.take_epoch("next")
    finally:
        query(mariadb, "DROP TABLE child.k")  # which keeps the databases from being dropped
    sink.take_epoch("next")
    assert rows(mariadb) == [(5, "read", "7.00")]
    assert tables_aside(mariadb) == 0
    assert sink.record().targets == (WIDER,)  # type: ignore[union-attr]


@pytest.mark.parametrize("place", ["before-exchange", "after-exchange"])
def test_a_table_that_is_about_to_take_its_place_is_not_missing(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It is recorded as read already; whoever asks after a crash may be the first to come."""
    sink = MysqlSink(mariadb.dsn, "p", "mirror")
    sink.prepare([], [], IDENTITY, 100)
    epoch = sink.take_epoch("test")
    monkeypatch.setenv(VARIABLE, f"{place}:error")
    with pytest.raises(Failpoint):
        sink.replace(epoch, WIDER, None, read_anew("5"), lambda: WATERMARK, None)
    monkeypatch.delenv(VARIABLE)
    if place == "before-exchange":
        query(mariadb, "DROP DATABASE `copy`")  # made for it, and empty as yet
    record = sink.record()
    assert record is not None
    assert record.targets == (WIDER,)
    assert sink.missing(record.targets) == ()
    assert rows(mariadb) == [(5, "read", "7.00")]


@pytest.mark.parametrize("place", ["after-alteration", "before-default-dropped"])
def test_an_alteration_that_breaks_off_leaves_no_default(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """By it rows from before get the new column's value; events without values are not to have it, nor later ones."""
    sink, epoch = prepared(mariadb, "changelog")
    batch = pa.RecordBatch.from_arrays([text("1"), text("a"), text("1")], names=["id", "note", "amount"])
    sink.write_chunk(epoch, TARGET, Chunk(LABEL, 0, None, None), ORIGIN, iter([batch]), lambda: WATERMARK)
    sink.replace(epoch, TARGET, None, iter([batch]), lambda: WATERMARK, TARGET)
    extra = Column("extra", "text", 25, None, False, True, attnum=4, missing="given")
    after = Target(replace(TABLE, columns=(*TABLE.columns, extra)), TARGET.schema, TARGET.name)
    monkeypatch.setenv(VARIABLE, f"{place}:error")
    with pytest.raises(Failpoint):
        sink.redefine(epoch, TARGET, after)
    monkeypatch.delenv(VARIABLE)
    epoch = sink.take_epoch("next")
    assert sink.record().targets == (after,)  # type: ignore[union-attr]
    sink.replace(epoch, after, frozenset({("1",)}), iter([]), lambda: WATERMARK, after)
    query(mariadb, "INSERT INTO `copy`.`Ord ers` (_op, _commit_lsn, _seq) VALUES ('r', 999, 1)")
    assert query(mariadb, "SELECT _op, id, extra FROM `copy`.`Ord ers` ORDER BY _commit_lsn, _seq") == [
        ("r", 1, "given"),
        ("t", None, None),
        ("r", 1, "given"),
        ("d", 1, None),
        ("r", None, None),
    ]


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_names_may_have_any_characters(mariadb: MariadbServer, mode: str) -> None:
    names = ["id", "100%s", "%(a)s `%d`"]
    columns = tuple(replace(column, name=name) for column, name in zip(TABLE.columns, names, strict=True))
    target = Target(replace(TABLE, columns=columns), "100%s", "%d `%s`")
    sink = MysqlSink(mariadb.dsn, "p", mode)  # type: ignore[arg-type]
    sink.prepare([target], [Chunk(LABEL, 0, None, None)], IDENTITY, 100)
    epoch = sink.take_epoch("test")
    batch = pa.RecordBatch.from_arrays([text("1"), text("a%s"), text("1.00")], names=names)
    sink.write_chunk(epoch, target, Chunk(LABEL, 0, None, None), ORIGIN, iter([batch]), lambda: WATERMARK)
    for keys in None, frozenset({("1",)}):
        sink.replace(epoch, target, keys, iter([batch]), lambda: WATERMARK, target)
    found = pa.Table.from_batches(sink.rows(target)).to_pylist()
    kept = {"mirror": "r", "changelog": "rtrdr"}[mode]
    assert [event.get("_op", "r") for event in sorted(found, key=lambda event: int(event.get("_seq", 0)))] == [*kept]
    assert all(
        tuple(event[name] for name in names) == ("1", "a%s", "1.00")
        for event in found
        if event.get("_op") in (None, "r")
    )


def test_sessions_of_others_that_cannot_be_seen_are_not_forgotten(mariadb: MariadbServer) -> None:
    """Another pipeline of another user may still be alive, and has to be found when its epoch is taken."""
    sink, _ = prepared(mariadb)
    ours = replace(sink, dsn=mariadb.dsn.replace("root", PIPELINE_ROLE))
    with replace(sink, pipeline="q")._session() as other:
        ours.end_sessions()
        assert query(mariadb, "SELECT pipeline FROM airflow_cdc.sessions") == [("q",)]
        assert alive(other)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (
            "id varchar(768) COLLATE utf8mb4_bin NOT NULL PRIMARY KEY, note longtext",
            "collation utf8mb4_bin of column id",
        ),
        (
            "id varchar(768) COLLATE {collation} NOT NULL PRIMARY KEY, note longtext CHARACTER SET utf8mb3",
            "character set utf8mb3 of column note",
        ),
    ],
)
def test_a_table_in_which_texts_would_be_others_is_refused(mariadb: MariadbServer, column: str, said: str) -> None:
    """Without padding and regard to case, keys of the source would be one."""
    columns = (replace(TABLE.columns[0], type="text"), TABLE.columns[1])
    target = Target(replace(TABLE, columns=columns), TARGET.schema, TARGET.name)
    query(mariadb, "CREATE DATABASE `copy`")
    sink = MysqlSink(mariadb.dsn, "p", "mirror")
    with sink._session() as opened:
        collation = opened.collation
    column = column.format(collation=collation)
    query(mariadb, f"CREATE TABLE `copy`.`Ord ers` ({column}) ENGINE=InnoDB CHARACTER SET utf8mb4")
    with pytest.raises(ForeignTable, match=said):
        sink.prepare([target], [Chunk(LABEL, 0, None, None)], IDENTITY, 100)
    query(mariadb, f"ALTER TABLE `copy`.`Ord ers` CONVERT TO CHARACTER SET utf8mb4 COLLATE {collation}")
    sink.prepare([target], [Chunk(LABEL, 0, None, None)], IDENTITY, 100)


def test_an_epoch_of_a_record_that_is_gone_is_refused(mariadb: MariadbServer) -> None:
    sink, _ = prepared(mariadb)
    sink.drop()
    with pytest.raises(GateClosed, match="no commit record of pipeline p any more"):
        sink.take_epoch("late")
    query(mariadb, "DROP DATABASE airflow_cdc")
    with pytest.raises(GateClosed, match="no commit record of pipeline p any more"):
        sink.take_epoch("late")


@pytest.mark.parametrize("created", range(len(record._RECORD_TABLES)))
def test_a_record_whose_tables_are_being_created_is_none_yet(mariadb: MariadbServer, created: int) -> None:
    """By another pipeline right now, or by one that died at it: each statement of DDL commits by itself."""
    query(mariadb, "CREATE DATABASE airflow_cdc")
    for name, body in list(record._RECORD_TABLES.items())[:created]:
        query(mariadb, f"CREATE TABLE airflow_cdc.{name} ({body})")
    assert MysqlSink(mariadb.dsn, "p", "mirror").record() is None
    sink, _ = prepared(mariadb)
    assert sink.record() is not None


@pytest.mark.parametrize("lost", record._RECORD_NAMES)
def test_a_record_that_has_lost_a_table_is_refused(mariadb: MariadbServer, lost: str) -> None:
    """Also to pipelines that have none yet: the first would make the table anew."""
    sink, _ = prepared(mariadb)
    query(mariadb, f"DROP TABLE airflow_cdc.{lost}")
    for each in (sink, replace(sink, pipeline="another")):
        with pytest.raises(GateClosed, match=f"not whole: it lacks {lost}$"):
            each.record()


def test_a_record_whose_tables_are_created_between_two_looks_is_whole(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_behind = record._left_behind

    def late(opened: mysql_session.Session, names: Collection[str]) -> bool:
        prepared(mariadb)
        return left_behind(opened, ["tables"])

    monkeypatch.setattr(record, "_left_behind", late)
    assert MysqlSink(mariadb.dsn, "p", "mirror").record() is not None


@pytest.mark.parametrize(
    ("version", "mariadb", "taken"),
    [
        ("10.5.9-MariaDB", True, False),
        ("10.6.0-MariaDB", True, True),
        ("11.4.2-MariaDB-log", True, True),
        ("8.0.16", False, False),
        ("8.0.17", False, True),
        ("8.4.0-commercial", False, True),
        ("unknown", False, False),
    ],
)
def test_a_server_that_lacks_what_a_session_needs_is_refused(version: str, mariadb: bool, taken: bool) -> None:
    with nullcontext() if taken else pytest.raises(ServerNotReady, match=re.escape(version)):
        mysql_session.require_version(version, mariadb)


@pytest.mark.parametrize("local", ["ON", "OFF"])
@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_row_that_is_larger_than_a_page_takes_is_refused_by_name(
    mariadb: MariadbServer, mode: str, local: str
) -> None:
    more = [Column(f"c{n}", "text", 25, None, False, True, attnum=n + 2) for n in range(230)]
    target = Target(replace(TABLE, columns=(TABLE.columns[0], *more)), TARGET.schema, TARGET.name)
    sink = MysqlSink(mariadb.dsn, "p", mode)  # type: ignore[arg-type]
    with pytest.raises(LimitExceeded, match=r"a row of public\.Ord ers is larger") if MYSQL else nullcontext():
        sink.prepare([target], [Chunk(LABEL, 0, None, None)], IDENTITY, 100)
    if MYSQL:  # there is no such table to begin with
        return
    epoch = sink.take_epoch("test")
    cells = [text("1"), *[text("v" * 38)] * len(more)]
    batch = pa.RecordBatch.from_arrays(cells, names=[column.name for column in target.table.columns])
    columns = {"erased": pa.array([False])} | {f"c{n}": cell for n, cell in enumerate(cells)}
    query(mariadb, f"SET GLOBAL local_infile = {local}")
    try:
        with pytest.raises(LimitExceeded, match=r"a row of public\.Ord ers is larger"):
            sink.write_chunk(epoch, target, Chunk(LABEL, 0, None, None), ORIGIN, iter([batch]), lambda: WATERMARK)
        if mode == "mirror":
            with pytest.raises(LimitExceeded, match=r"a row of public\.Ord ers is larger"):
                stage(sink, epoch, [Effect(LABEL, False, pa.table(columns))])
    finally:
        query(mariadb, "SET GLOBAL local_infile = ON")


def test_a_connection_whose_other_end_is_gone_is_noticed(mariadb: MariadbServer) -> None:
    with closing(Address.parse(mariadb.dsn).connect()) as connection:
        options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        found = [connection._sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in options]
        assert connection._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert found == [15, 5, 3]
