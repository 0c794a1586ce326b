"""The Postgres sink, on a real server: the contract of all sinks, its sessions, and the remains of crashes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import LiteralString, get_args

import numpy as np
import psycopg
import psycopg2.extensions
import pyarrow as pa
import pytest

from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import Blocked, Fenced, GateClosed, StagingLost, StreamFailed
from airflow_cdc_provider.engine.core.record import Mode
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.sinks.postgres import fence as postgres_fence
from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink
from airflow_cdc_provider.engine.sinks.staged import StagedPiece
from airflow_cdc_provider.engine.sources.postgres.stream.pipelined_commit import PipelinedCommit
from tests.conftest import Databases, ServerMaker
from tests.sinks.begun_sink import LABEL, WHOLE, begin, refuse, upsert
from tests.sinks.contract import ProtocolContract
from tests.sinks.contract_rows import ChangelogContract, MirrorContract
from tests.support.postgres_store import PostgresStore


@pytest.fixture
def store(database: str) -> Iterator[PostgresStore]:
    made = PostgresStore(database)
    yield made
    made.query("DROP SCHEMA IF EXISTS airflow_cdc, copy CASCADE")


class TestProtocol(ProtocolContract):
    """The contract of the protocol on Postgres."""


class TestMirror(MirrorContract):
    """The contract of mirrors on Postgres."""


class TestChangelog(ChangelogContract):
    """The contract of changelogs on Postgres."""


@pytest.mark.parametrize("lock", ["FOR KEY SHARE", "FOR SHARE", "FOR NO KEY UPDATE"])
def test_a_commit_in_flight_finishes_before_the_epoch_is_taken(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, lock: LiteralString
) -> None:
    """The commit locks the epoch row, so a takeover waits; with a plain SELECT both would pass."""
    begun = begin(store, "mirror")
    monkeypatch.setattr(postgres_fence, "COMMIT_SECONDS", 0.2)
    with psycopg.connect(store.dsn) as commit:
        commit.execute(f"SELECT epoch FROM airflow_cdc.pipelines WHERE pipeline = 'p' {lock}")
        with pytest.raises(Exception, match="lock timeout"):
            begun.sink.take_epoch("too early")
    assert begun.sink.take_epoch("in time") > begun.epoch


@pytest.mark.parametrize("mode", get_args(Mode))
def test_a_unit_is_applied_while_the_rest_of_it_is_staged(
    store: PostgresStore, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is invisible before its end, and a chunk or another run has to wait for it."""
    begun = begin(store, mode)
    monkeypatch.setattr(postgres_fence, "LOCK_SECONDS", 0.2)

    def pieces() -> Iterator[StagedPiece]:
        yield begun.piece(begun.put("1", "a", "1.00"))
        assert begun.rows() == []
        with pytest.raises(Blocked):
            begun.copy(WHOLE, ("3", "c", "3.00"))
        yield begun.piece(begun.put("2", "b", "2.00"), index=1)
        assert begun.rows() == []
        assert begun.record.applied == 100

    assert begun.sink.commit_as_staged(begun.epoch, 100, 200, pieces())
    assert begun.rows() == [("1", "a", "1.00"), ("2", "b", "2.00")]
    assert begun.record.applied == 200
    assert begun.store.staged() == 0
    assert not begun.sink.commit_as_staged(begun.epoch, 100, 200, iter([begun.piece(begun.put("1", "stale", "0.00"))]))
    assert begun.store.staged() == 0


def test_a_unit_that_is_called_off_leaves_nothing_applied(store: PostgresStore) -> None:
    begun = begin(store, "mirror")
    piece = begun.piece(begun.put("1", "a", "1.00"))

    def pieces() -> Iterator[StagedPiece]:
        yield piece
        refuse()

    with pytest.raises(GateClosed):
        begun.sink.commit_as_staged(begun.epoch, 100, 200, pieces())
    assert begun.rows() == []
    assert begun.record.applied == 100
    assert begun.sink.commit(begun.epoch, 100, 200, [piece])
    assert begun.rows() == [("1", "a", "1.00")]


@pytest.mark.lengthy
def test_a_unit_for_which_others_wait_does_not_wait_for_them(store: PostgresStore) -> None:
    """A session that alters the target waits for the unit; staging the next piece would wait behind that session."""
    begun = begin(store, "mirror")
    pieces = [begun.piece(begun.put("1", "a", "1.00"))]
    waiting = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"

    def commit(_: StagedPiece, unit: Iterator[StagedPiece]) -> None:
        begun.sink.commit_as_staged(begun.epoch, 100, 200, unit)

    with (
        psycopg.connect(store.dsn, autocommit=True) as watch,
        ThreadPoolExecutor(2) as pool,
        PipelinedCommit(lambda _: True, commit) as commit,
    ):
        commit.on_staged(pieces[0])
        applied = "SELECT FROM pg_locks WHERE relation = 'copy.\"Ord ers\"'::regclass AND mode = 'RowExclusiveLock'"
        assert await_condition(lambda: watch.execute(applied).fetchone() is not None, 60)
        altering = pool.submit(store.query, 'ALTER TABLE copy."Ord ers" ADD COLUMN theirs int')
        assert await_condition(lambda: watch.execute(waiting, ["ALTER%"]).fetchone() is not None, 60)
        staging = pool.submit(lambda: begun.piece(begun.put("2", "b", "2.00"), index=1))
        pieces.append(staging.result(60))
        altering.result(60)
        commit.on_staged(pieces[1])
        assert not commit.finish(pieces)
    assert begun.rows() == []
    assert begun.sink.commit(begun.epoch, 100, 200, pieces)
    assert begun.rows() == [("1", "a", "1.00"), ("2", "b", "2.00")]


def test_a_unit_in_the_midst_of_which_another_run_takes_over_is_not_there(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = begin(store, "mirror")
    monkeypatch.setattr(postgres_fence, "COMMIT_SECONDS", 0.2)

    def pieces() -> Iterator[StagedPiece]:
        yield begun.piece(begun.put("1", "zombie", "1.00"))
        assert begun.sink.take_epoch("another") > begun.epoch
        with pytest.raises(Fenced):
            begun.piece(begun.put("2", "zombie", "2.00"), index=1)

    with pytest.raises(StreamFailed, match=r"server closed the connection|terminating connection"):
        begun.sink.commit_as_staged(begun.epoch, 100, 200, pieces())
    assert begun.rows() == []
    assert begun.record.applied == 100


def test_a_session_that_never_commits_is_ended_when_the_epoch_is_taken(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A halted process or a lost host would hold the epoch's row for hours."""
    begun = begin(store, "mirror")
    monkeypatch.setattr(postgres_fence, "COMMIT_SECONDS", 0.2)
    with psycopg.connect(store.dsn, application_name="airflow-cdc sink p") as paused:
        paused.execute("SELECT epoch FROM airflow_cdc.pipelines WHERE pipeline = 'p' FOR SHARE")
        assert begun.sink.take_epoch("next") > begun.epoch
        with pytest.raises(psycopg.OperationalError):
            paused.execute("SELECT 1")


def test_only_the_part_s_own_sessions_are_ended(databases: Databases) -> None:
    """The DSN may have any application name; the server truncates long names, and has other databases."""
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
    """Open a session like those of the sink's transactions, and leave it open."""
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
    """A backend that is terminated during its commit still commits: the commit is either read, or never happens."""
    server = make_server(settings={"fsync": "on", "commit_delay": "100000", "commit_siblings": "0"})
    begun = begin(PostgresStore(server.dsn()), "mirror")

    def end_and_read() -> int:
        begun.sink.end_sessions()
        return begun.record.applied

    with (
        psycopg.connect(server.dsn(), autocommit=True) as watch,
        closing(connect_as(begun.sink)) as zombie,
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
        assert begun.record.applied == seen


def test_staging_that_a_crash_emptied_is_noticed(make_server: ServerMaker) -> None:
    server = make_server()
    begun = begin(PostgresStore(server.dsn()), "mirror")
    unit = [begun.piece(upsert("1", "a", "1.00"))]
    server.stop("immediate")
    server.start()
    with pytest.raises(StagingLost):
        begun.sink.commit(begun.epoch, 100, 200, unit)
    assert begun.rows() == []
    assert begun.record.applied == 100


@pytest.mark.parametrize("known", [None, "7"], ids=["as the log tells", "but for one"])
def test_rows_that_should_be_new_are_inserted_and_others_replaced(databases: Databases, known: str | None) -> None:
    """Whatever the log says about a key that the mirror has, the unit is applied."""
    begun = begin(PostgresStore(databases.target), "mirror")
    if known is not None:
        begun.unit(100, 150, upsert(known, "old", "1.00"))
    keys = [str(n) for n in range(2000)]
    cells = {"c0": keys, "c1": ["new"] * 2000, "c2": ["2.00"] * 2000}
    erased = {"erased": pa.array([False] * 2000)}
    fresh = np.array([n % 2 == 1 for n in range(2000)])
    rows = pa.table(erased | {name: pa.array(texts, pa.large_string()) for name, texts in cells.items()})
    (staged,) = begun.piece(Effect(LABEL, False, rows, fresh)).tables
    assert "fresh" in staged.columns
    begun.unit(begun.record.applied, 200, Effect(LABEL, False, rows, fresh))
    assert begun.rows() == sorted((key, "new", "2.00") for key in keys)


def test_new_rows_that_need_what_the_unit_changes_before_them(databases: Databases) -> None:
    """Inserting them first would violate a constraint that the rows satisfy in their order."""
    begun = begin(PostgresStore(databases.target), "mirror")
    begun.unit(100, 150, upsert("0", "wanted", "1.00"))
    with psycopg.connect(databases.target) as connection:
        connection.execute('ALTER TABLE copy."Ord ers" ADD EXCLUDE USING btree (note WITH =)')
    keys = [str(n) for n in range(1500)]
    names = ["free", *(f"n{key}" for key in keys[1:-1]), "wanted"]
    columns = {"c0": keys, "c1": names, "c2": ["2.00"] * 1500}
    rows = pa.table({name: pa.array(texts, pa.large_string()) for name, texts in columns.items()})
    rows = rows.append_column("erased", pa.array([False] * 1500))
    begun.unit(begun.record.applied, 200, Effect(LABEL, False, rows, np.arange(1500) > 0))
    assert begun.rows() == sorted((key, name, "2.00") for key, name in zip(keys, names, strict=True))
