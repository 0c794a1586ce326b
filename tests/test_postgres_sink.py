"""The two-phase protocol of the Postgres sink, on a real server: staging, commit, fencing, and what a crash leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import psycopg
import psycopg2.extensions
import pyarrow as pa
import pytest

from airflow_cdc_provider.demo.servers import await_condition
from airflow_cdc_provider.engine.catalog import Column, Leaf, Table
from airflow_cdc_provider.engine.chunks import Chunk
from airflow_cdc_provider.engine.effects import Effect
from airflow_cdc_provider.engine.errors import Fenced, ForeignTable, GateClosed, StagingLost, StreamFailed
from airflow_cdc_provider.engine.origin import Origin
from airflow_cdc_provider.engine.sinks.base import MissingValues, Staged, StagedPiece, Target, Watermark
from airflow_cdc_provider.engine.sinks.postgres import record as postgres_record
from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink
from airflow_cdc_provider.engine.sinks.postgres.tables import FIRST_READ
from airflow_cdc_provider.engine.stage import END
from airflow_cdc_provider.engine.visibility import Snapshot
from tests.conftest import Databases, ServerMaker

TABLE = Table(
    oid=7,
    schema="public",
    name="Ord ers",
    columns=(
        Column("id", "bigint", 20, None, True, True),
        Column("note", "text", 25, None, False, True),
        Column("amount", "numeric(10,2)", 1700, None, False, True),
    ),
    key=("id",),
    replica_identity="d",
    where=None,
    leaves=(Leaf(7, "public", "Ord ers"),),
    kind="r",
)
TARGET = Target(TABLE, "copy", "Ord ers")
LABEL = TABLE.label
IDENTITY = {"system": "1", "timeline": 1, "database": 5}
ORIGIN = Origin.of(IDENTITY)
WATERMARK = Watermark(Snapshot(10, 12, frozenset({11})), 150)


def prepared(dsn: str, mode: str = "mirror") -> tuple[PostgresSink, int]:
    """A sink at applied LSN 100 with one planned chunk, and the epoch of its first run."""
    sink = PostgresSink(dsn, "p", mode)  # type: ignore[arg-type]
    sink.prepare([TARGET], [Chunk(LABEL, 0, None, None)], IDENTITY, 100)
    return sink, sink.take_epoch("test")


def rows(dsn: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute('SELECT id, note, amount::text FROM copy."Ord ers" ORDER BY id').fetchall()


def text(*values: str | None) -> pa.Array:
    return pa.array(values, pa.large_string())


def upsert(key: str, note: str | None, amount: str | None) -> Effect:
    columns = {"erased": pa.array([False]), "c0": text(key), "c1": text(note), "c2": text(amount)}
    return Effect(LABEL, False, pa.table(columns))


def piece(index: int, staged: tuple[Staged, ...]) -> StagedPiece:
    return StagedPiece("", "", index, 1, b"", staged, frozenset(), END)


def stage(sink: PostgresSink, epoch: int, effects: Sequence[Effect], index: int = 0) -> StagedPiece:
    return piece(index, sink.stage(epoch, f"test{index}", effects))


def staging_tables(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        query = "SELECT count(*) FROM pg_class WHERE relname LIKE 'stage_%' AND relkind = 'r'"
        return int(connection.execute(query).fetchone()[0])  # type: ignore[index]


def test_a_chunk_is_committed_once_with_its_watermark(databases: Databases) -> None:
    sink, epoch = prepared(databases.target)
    columns = [text("1", "2", "3"), text("a", "", None), text("1.50", None, "-3")]
    batch = pa.RecordBatch.from_arrays(columns, names=["id", "note", "amount"])
    chunk = Chunk(LABEL, 0, None, None)
    assert sink.write_chunk(epoch, TARGET, chunk, ORIGIN, iter([batch]), lambda: WATERMARK) == 3
    assert sink.write_chunk(epoch, TARGET, chunk, ORIGIN, iter([batch]), lambda: WATERMARK) is None
    assert rows(databases.target) == [(1, "a", "1.50"), (2, "", None), (3, None, "-3.00")]
    record = sink.record()
    assert record is not None
    assert (record.unfinished, record.high, record.applied, record.consistent) == ((), 150, 100, False)
    assert record.chunks[0].watermark == WATERMARK
    assert record.targets == (TARGET,)


def test_a_chunk_is_refused_that_comes_from_where_the_pipeline_is_no_longer(databases: Databases) -> None:
    """One part of a run has gone on to a promoted standby, and noted it; another still reads from the old primary."""
    sink, epoch = prepared(databases.target)
    sink.note_source(epoch, {"timeline": 2})
    with pytest.raises(StreamFailed, match=r"timeline 1.* gone on to .*timeline 2"):
        sink.write_chunk(epoch, TARGET, Chunk(LABEL, 0, None, None), ORIGIN, iter([]), lambda: WATERMARK)
    assert sink.record().unfinished  # type: ignore[union-attr]


def test_a_chunk_whose_read_fails_at_the_end_is_not_there(databases: Databases) -> None:
    sink, epoch = prepared(databases.target)
    batch = pa.RecordBatch.from_arrays([text("1"), text("a"), text(None)], names=["id", "note", "amount"])

    def broken() -> Watermark:
        raise GateClosed("no marker", "Try again.")

    with pytest.raises(GateClosed):
        sink.write_chunk(epoch, TARGET, Chunk(LABEL, 0, None, None), ORIGIN, iter([batch]), broken)
    assert rows(databases.target) == []
    assert sink.record().unfinished  # type: ignore[union-attr]


def test_units_are_applied_in_order_and_once(databases: Databases) -> None:
    sink, epoch = prepared(databases.target)
    first = stage(sink, epoch, [upsert("1", "a", "1")])
    assert sink.commit(epoch, 100, 200, [first])
    assert staging_tables(databases.target) == 0
    again = stage(sink, epoch, [upsert("1", "stale", "0")])
    assert not sink.commit(epoch, 100, 200, [again])
    assert staging_tables(databases.target) == 0
    with pytest.raises(GateClosed, match="0/12C"):
        sink.commit(epoch, 300, 400, [stage(sink, epoch, [upsert("1", "ahead", "0")])])
    assert rows(databases.target) == [(1, "a", "1.00")]
    assert sink.record().applied == 200  # type: ignore[union-attr]


def test_pieces_of_a_unit_are_applied_by_their_index(databases: Databases) -> None:
    sink, epoch = prepared(databases.target)
    gone = pa.table({"erased": pa.array([True]), "c0": text("2"), "c1": text(None), "c2": text(None)})
    pieces = [
        stage(sink, epoch, [Effect(LABEL, False, gone), upsert("1", "last", "9")], index=2),
        stage(sink, epoch, [upsert("1", "first", "1"), upsert("2", "x", "2")], index=0),
        stage(sink, epoch, [Effect(LABEL, True, gone.slice(0, 0)), upsert("3", "kept", "3")], index=1),
    ]
    sink.commit(epoch, 100, 200, pieces)
    assert rows(databases.target) == [(1, "last", "9.00"), (3, "kept", "3.00")]


def test_values_that_were_not_sent_come_from_the_row_at_its_origin(databases: Databases) -> None:
    sink, epoch = prepared(databases.target)
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
    sink.commit(epoch, 200, 300, [stage(sink, epoch, [Effect(LABEL, False, moved)])])
    assert rows(databases.target) == [(2, "other", "8.00"), (5, "long", "7.00")]


def test_values_that_nobody_has_are_asked_for_and_nothing_is_applied(databases: Databases) -> None:
    sink, epoch = prepared(databases.target)
    columns = {"erased": pa.array([False]), "c0": text("5"), "c1": text(None), "c2": text("7")}
    unknown = pa.table(columns | {"missing": pa.array(["{1}"]), "o0": text(None)})
    unit = [stage(sink, epoch, [upsert("1", "a", "1"), Effect(LABEL, False, unknown)])]
    with pytest.raises(MissingValues) as missing:
        sink.commit(epoch, 100, 200, unit)
    assert missing.value.keys == {LABEL: frozenset({("5",)})}
    assert rows(databases.target) == []
    batch = pa.RecordBatch.from_arrays([text("5"), text("read"), text("7")], names=["id", "note", "amount"])
    sink.replace(epoch, TARGET, frozenset({("5",)}), iter([batch]), lambda: WATERMARK, TARGET)
    record = sink.record()
    assert record is not None
    assert [c.keys for c in record.chunks] == [None, frozenset({("5",)})]
    # Staged anew, the unit no longer holds what the re-read has seen.
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1")], index=1)])
    assert rows(databases.target) == [(1, "a", "1.00"), (5, "read", "7.00")]
    assert [c.keys for c in sink.record().chunks] == [None]  # type: ignore[union-attr]


def test_an_old_epoch_commits_nothing(databases: Databases) -> None:
    sink, old = prepared(databases.target)
    unit = [stage(sink, old, [upsert("1", "zombie", "1")])]
    new = sink.take_epoch("another")
    with pytest.raises(Fenced):
        sink.commit(old, 100, 200, unit)
    with pytest.raises(Fenced):
        sink.write_chunk(old, TARGET, Chunk(LABEL, 0, None, None), ORIGIN, iter([]), lambda: WATERMARK)
    with pytest.raises(Fenced):
        sink.stage(old, "late", [upsert("1", "zombie", "1")])
    with pytest.raises(Fenced):
        sink.replace(old, TARGET, None, iter([]), lambda: WATERMARK, TARGET)
    sink.sweep(old)
    assert staging_tables(databases.target) == 1
    sink.sweep(new)
    assert staging_tables(databases.target) == 0
    assert new > old
    assert rows(databases.target) == []


def test_a_commit_in_flight_finishes_before_the_epoch_is_taken(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch row is locked by the commit, so taking over waits; a plain SELECT would let both through."""
    sink, epoch = prepared(databases.target)
    monkeypatch.setattr(postgres_record, "COMMIT_SECONDS", 0.2)
    with psycopg.connect(databases.target) as commit:
        commit.execute("SELECT epoch FROM airflow_cdc.pipelines WHERE pipeline = 'p' FOR SHARE")
        with pytest.raises(Exception, match="lock timeout"):
            sink.take_epoch("too early")
    assert sink.take_epoch("in time") > epoch


def test_a_session_that_never_commits_is_ended_when_the_epoch_is_taken(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused process or a lost host would hold the epoch's row for hours."""
    sink, epoch = prepared(databases.target)
    monkeypatch.setattr(postgres_record, "COMMIT_SECONDS", 0.2)
    with psycopg.connect(databases.target, application_name="airflow-cdc sink p") as paused:
        paused.execute("SELECT epoch FROM airflow_cdc.pipelines WHERE pipeline = 'p' FOR SHARE")
        assert sink.take_epoch("next") > epoch
        with pytest.raises(psycopg.OperationalError):
            paused.execute("SELECT 1")


def test_only_the_part_s_own_sessions_are_ended(databases: Databases) -> None:
    """Whatever name the DSN carries; the server cuts long names, and has other databases."""
    for pipeline in ("p", "p" * 40):
        dsn = f"{databases.target}?application_name=somebody"
        parts = [PostgresSink(dsn, pipeline, "mirror", part) for part in ("snapshot-1", "snapshot-2", "stream", "")]
        other = PostgresSink(databases.source, pipeline, "mirror", "stream")
        with ExitStack() as stack:
            sessions = [stack.enter_context(closing(connect_as(sink))) for sink in (*parts, other)]
            parts[0].end_sessions()
            assert [alive(session) for session in sessions] == [False, True, True, True, True]
            PostgresSink(dsn, "q", "mirror").end_sessions()
            assert [alive(session) for session in sessions] == [False, True, True, True, True]
            parts[-1].end_sessions()
            assert [alive(session) for session in sessions] == [False, False, False, False, True]


def connect_as(sink: PostgresSink) -> psycopg2.extensions.connection:
    """A session as the sink's transactions use it, left open."""
    with sink._transaction() as connection:
        name = connection.info.parameter_status("application_name")
    return psycopg2.connect(sink.dsn.partition("?")[0], application_name=name)


def alive(session: psycopg2.extensions.connection) -> bool:
    try:
        session.cursor().execute("SELECT 1")
    except psycopg2.Error:
        return False
    return True


def test_sessions_that_are_ended_can_commit_no_more(make_server: ServerMaker) -> None:
    """A backend that is told to end in the midst of its commit still commits: it is read, or never comes."""
    server = make_server(settings={"fsync": "on", "commit_delay": "100000", "commit_siblings": "0"})
    sink, _ = prepared(server.dsn())

    def end_and_read() -> int:
        sink.end_sessions()
        return sink.record().applied  # type: ignore[union-attr]

    with (
        psycopg.connect(server.dsn(), autocommit=True) as watch,
        closing(connect_as(sink)) as zombie,
        ThreadPoolExecutor(2) as pool,
    ):
        pid = zombie.info.backend_pid
        zombie.cursor().execute("UPDATE airflow_cdc.pipelines SET applied_lsn = '0/AAAA'")
        commit = pool.submit(zombie.commit)
        committing = "SELECT FROM pg_stat_activity WHERE pid = %s AND state = 'active' AND query = 'COMMIT'"
        assert await_condition(lambda: commit.done() or watch.execute(committing, [pid]).fetchone() is not None, 30)
        os.kill(pid, signal.SIGSTOP)
        try:
            read = pool.submit(end_and_read)
            waiting = "SELECT FROM pg_stat_activity WHERE wait_event = 'BackendTermination'"
            assert await_condition(lambda: read.done() or watch.execute(waiting).fetchone() is not None, 30)
        finally:
            os.kill(pid, signal.SIGCONT)
        seen = read.result()
        assert isinstance(commit.exception(), psycopg2.Error | None)
        assert sink.record().applied == seen  # type: ignore[union-attr]


def test_staging_that_a_crash_emptied_is_noticed(make_server: ServerMaker) -> None:
    server = make_server()
    sink, epoch = prepared(server.dsn())
    unit = [stage(sink, epoch, [upsert("1", "a", "1")])]
    server.restart("immediate")
    with pytest.raises(StagingLost):
        sink.commit(epoch, 100, 200, unit)
    assert rows(server.dsn()) == []
    assert sink.record().applied == 100  # type: ignore[union-attr]


def test_a_table_with_rows_of_others_is_refused(databases: Databases) -> None:
    with psycopg.connect(databases.target) as connection:
        connection.execute('CREATE SCHEMA copy; CREATE TABLE copy."Ord ers" (id bigint PRIMARY KEY)')
        connection.execute('INSERT INTO copy."Ord ers" VALUES (1)')
    with pytest.raises(ForeignTable, match="Ord ers"):
        prepared(databases.target)


def test_a_changelog_keeps_every_change_and_says_what_was_read_again(databases: Databases) -> None:
    sink, epoch = prepared(databases.target, "changelog")
    chunk = pa.RecordBatch.from_arrays([text("1"), text("a"), text("1")], names=["id", "note", "amount"])
    sink.write_chunk(epoch, TARGET, Chunk(LABEL, 0, None, None), ORIGIN, iter([chunk]), lambda: WATERMARK)
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
    sink.replace(epoch, TARGET, frozenset({("1",)}), iter([chunk]), lambda: WATERMARK, TARGET)
    with psycopg.connect(databases.target) as connection:
        found = connection.execute(
            'SELECT _op::text, _commit_lsn::text, _seq, id, note, _before, _unchanged FROM copy."Ord ers"'
            " ORDER BY _commit_lsn, _seq"
        ).fetchall()
    assert found == [
        ("r", "0/64", FIRST_READ, 1, "a", None, None),
        ("u", "0/A0", 1, 2, None, {"id": "1"}, ["note"]),
        ("d", "0/A0", 2, 2, None, {"id": "2"}, None),
        ("d", "0/C8", FIRST_READ, 1, None, {"id": "1"}, None),
        ("r", "0/C8", FIRST_READ + 1, 1, "a", None, None),
    ]


def test_dropping_leaves_the_target_tables(databases: Databases) -> None:
    sink, epoch = prepared(databases.target)
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1")])])
    stage(sink, epoch, [upsert("2", "b", "2")])
    sink.drop()
    assert sink.record() is None
    assert staging_tables(databases.target) == 0
    assert rows(databases.target) == [(1, "a", "1.00")]
