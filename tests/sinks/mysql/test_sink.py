"""The MySQL sink, on a real server: the contract of all sinks, its sessions and tables, and the remains of crashes."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import (
    Failpoint,
    ForeignTable,
    LimitExceeded,
    ServerNotReady,
    TargetConflict,
    ValueRefused,
)
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.sinks.mysql import session as mysql_session
from airflow_cdc_provider.engine.sinks.mysql.address import Address
from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink
from local_servers.mariadb import MariadbServer
from tests.conftest import MYSQL
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
from tests.sinks.mysql.prepared_sink import prepared, query, rows, stage
from tests.support.given_rows import GivenRows
from tests.support.mysql_store import MysqlStore


@pytest.fixture
def store(mariadb: MariadbServer) -> MysqlStore:
    return MysqlStore(mariadb)


class TestProtocol(ProtocolContract):
    """The contract of the protocol on MySQL."""


class TestMirror(MirrorContract):
    """The contract of mirrors on MySQL."""


class TestChangelog(ChangelogContract):
    """The contract of changelogs on MySQL."""


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
    """TRUNCATE and all DDL would commit the changes so far; a unit that breaks off leaves everything as it was."""
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
        sink.write_chunk(epoch, TARGET, chunk, ORIGIN, GivenRows([batch], lambda: WATERMARK))
    assert rows(mariadb) == [(1, "a", "1.00")]
    monkeypatch.delenv(VARIABLE)
    assert sink.write_chunk(epoch, TARGET, chunk, ORIGIN, GivenRows([batch], lambda: WATERMARK)) == 1
    assert rows(mariadb) == [(5, "read", "7.00")]


def test_a_unique_index_of_the_user_s_refuses_and_merges_nothing(mariadb: MariadbServer) -> None:
    """ON DUPLICATE KEY UPDATE would overwrite the row that has the value."""
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
    """LOAD DATA LOCAL would truncate it with only a warning."""
    sink, epoch = prepared(mariadb)
    with pytest.raises(LimitExceeded, match=r"'amount' of public.Ord ers has the value 'NaN'"):
        stage(sink, epoch, [upsert("1", "a", "NaN")])
    query(mariadb, "ALTER TABLE `copy`.`Ord ers` MODIFY note VARCHAR(3)")
    batch = pa.RecordBatch.from_arrays([text("5"), text("long"), text("7")], names=["id", "note", "amount"])
    with pytest.raises(ValueRefused, match="note"):
        sink.write_chunk(epoch, TARGET, Chunk(LABEL, 0, None, None), ORIGIN, GivenRows([batch], lambda: WATERMARK))
    with pytest.raises(ValueRefused, match="note"):
        sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "long", "1")], index=1)])
    assert rows(mariadb) == []


def test_what_a_session_means_does_not_depend_on_the_server_s_settings(mariadb: MariadbServer) -> None:
    """With these settings, values would be truncated without a warning, and whole statements refused or canceled."""
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
        with pytest.raises(ValueRefused, match="1 values were changed"):
            sink.write_chunk(epoch, TARGET, Chunk(LABEL, 0, None, None), ORIGIN, GivenRows([batch], lambda: WATERMARK))
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
    """Comparisons with texts would use floating point numbers, and also delete the rows of the neighbors."""
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
    sink.write_chunk(epoch, target, chunk, ORIGIN, GivenRows([read(every, "chunk")], lambda: WATERMARK))
    half = every[::2]
    sink.replace(epoch, target, frozenset(half), GivenRows([read(half, "again")], lambda: WATERMARK), target)
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
    """The error names both types and the statement; wider types pass."""
    query(mariadb, "CREATE DATABASE `copy`")
    query(mariadb, "CREATE TABLE `copy`.`Ord ers` (id int PRIMARY KEY, note varchar(20), amount decimal(20,2))")
    query(mariadb, "ALTER TABLE `copy`.`Ord ers` CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin")
    with pytest.raises(ForeignTable, match=r"column id is int, but must be BIGINT; column note is varchar\(20\)") as e:
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


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_names_may_have_any_characters(mariadb: MariadbServer, mode: str) -> None:
    names = ["id", "100%s", "%(a)s `%d`"]
    columns = tuple(replace(column, name=name) for column, name in zip(TABLE.columns, names, strict=True))
    target = Target(replace(TABLE, columns=columns), "100%s", "%d `%s`")
    sink = MysqlSink(mariadb.dsn, "p", mode)  # type: ignore[arg-type]
    sink.prepare([target], [Chunk(LABEL, 0, None, None)], IDENTITY, 100)
    epoch = sink.take_epoch("test")
    batch = pa.RecordBatch.from_arrays([text("1"), text("a%s"), text("1.00")], names=names)
    sink.write_chunk(epoch, target, Chunk(LABEL, 0, None, None), ORIGIN, GivenRows([batch], lambda: WATERMARK))
    for keys in None, frozenset({("1",)}):
        sink.replace(epoch, target, keys, GivenRows([batch], lambda: WATERMARK), target)
    found = pa.Table.from_batches(sink.rows(target)).to_pylist()
    kept = {"mirror": "r", "changelog": "rtrdr"}[mode]
    assert [event.get("_op", "r") for event in sorted(found, key=lambda event: int(event.get("_seq", 0)))] == [*kept]
    assert all(
        tuple(event[name] for name in names) == ("1", "a%s", "1.00")
        for event in found
        if event.get("_op") in (None, "r")
    )


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
    """With padding or without regard to case, distinct keys of the source would be equal."""
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
    if MYSQL:  # there is no such table at first
        return
    epoch = sink.take_epoch("test")
    cells = [text("1"), *[text("v" * 38)] * len(more)]
    batch = pa.RecordBatch.from_arrays(cells, names=[column.name for column in target.table.columns])
    columns = {"erased": pa.array([False])} | {f"c{n}": cell for n, cell in enumerate(cells)}
    query(mariadb, f"SET GLOBAL local_infile = {local}")
    try:
        with pytest.raises(LimitExceeded, match=r"a row of public\.Ord ers is larger"):
            sink.write_chunk(epoch, target, Chunk(LABEL, 0, None, None), ORIGIN, GivenRows([batch], lambda: WATERMARK))
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
