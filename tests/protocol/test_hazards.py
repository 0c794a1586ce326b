"""The hazards of Postgres around which the protocol is built: each hits a naive reader, and misses the engine.

A naive reader does what the documentation suggests and forgets one thing. Hazards that other test modules show with the
engine alone are not repeated here; ``docs/hazards.md`` lists all hazards with their tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import adbc_driver_postgresql.dbapi as adbc
import psycopg
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import Blocked, GateClosed
from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres import slots
from airflow_cdc_provider.engine.postgres.connection import connected, scalar, session_dsn
from airflow_cdc_provider.engine.sources.postgres.provision import provisioning, slot
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput import decode
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import Position
from airflow_cdc_provider.engine.sources.postgres.wal.wal_reader import WalReader
from local_servers.postgres import PostgresServer
from tests.conftest import PIPELINE_ROLE, Databases, ServerMaker
from tests.support.databases import execute, query_rows, transaction
from tests.support.hostile import connected_plainly
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.streaming import Streaming

pytestmark = pytest.mark.slow

TABLE = "CREATE TABLE public.t (id int PRIMARY KEY, body text)"
ROWS = "INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 20) n"

Make = Callable[..., PipelineUnderTest]


@pytest.fixture
def make_pipeline(databases: Databases, tmp_path: Path) -> Make:
    """Return a factory of pipelines of tables that the statements create; the source may be the test's own server."""

    def make(*statements: str, server: PostgresServer | None = None, **sections: Any) -> PipelineUnderTest:
        pair = databases if server is None else Databases(server.dsn(), databases.target)
        pipeline = PipelineUnderTest(tmp_path, pair, ["public.t"], **sections)
        pipeline.source(*statements)
        return pipeline

    return make


def running(pipeline: PipelineUnderTest) -> PipelineUnderTest:
    """Provision, copy and stream."""
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    return pipeline


@contextmanager
def naive_slot(dsn: str, publication: str, start: str = "0/0") -> Iterator[Callable[[], list[tuple[str | None, ...]]]]:
    """Create another slot, and yield a function that reads all rows that it streams, as texts of the new values."""
    name = f"naive_{dsn.rpartition('/')[2]}"
    execute(dsn, f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    try:

        def read() -> list[tuple[str | None, ...]]:
            with connected(dsn) as source:
                marker = slots.emit_marker(source, "naive")
            reader = WalReader(dsn, name, publication, parse_lsn(start))
            try:
                end = reader.reach(marker)
                pieces = reader.take(Position(parse_lsn(start)), end)
            finally:
                reader.close()
            columns = [changes for piece in pieces for changes in decode(piece)]
            return [row for c in columns for row in zip(*(column.to_pylist() for column in c.new), strict=True)]

        yield read
    finally:
        free = f"SELECT bool_and(NOT active) FROM pg_replication_slots WHERE slot_name = '{name}'"
        assert await_condition(lambda: query_rows(dsn, free) == [(True,)], SECONDS)
        execute(dsn, f"SELECT pg_drop_replication_slot('{name}')")


def await_reply(pipeline: PipelineUnderTest) -> None:
    """Wait until the reader of the pipeline's slot has sent a status message to the server."""
    ((now,),) = pipeline.source_rows("SELECT clock_timestamp()::text")
    replied = f"SELECT bool_or(reply_time > '{now}') FROM pg_stat_replication"
    assert await_condition(lambda: pipeline.source_rows(replied) == [(True,)], SECONDS)


# -- before the first chunk ----------------------------------------------------------------------------


def test_an_orphan_prepared_transaction_is_named_by_slot_and_barrier(make_pipeline: Make) -> None:
    """It has no session, so a search for sessions finds nothing to wait for."""
    pipeline = make_pipeline(TABLE, ROWS)
    names = pipeline.pipeline.source
    with psycopg.connect(names.dsn, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("UPDATE public.t SET body = 'prepared' WHERE id = 2")
        connection.execute(f"PREPARE TRANSACTION '{pipeline.name}'".encode())
    with connected(names.dsn) as source:
        for step in (lambda: slot.create_slot(source, names.slot, timeout=0.3), lambda: slot.barrier(source, 0.3)):
            with pytest.raises(Blocked, match=f"prepared transaction '{pipeline.name}' of ") as blocked:
                step()
            assert "ROLLBACK PREPARED" in blocked.value.solution
            assert "session" not in blocked.value.message.partition("waits for")[2]
        assert slots.read_slot(source, names.slot) is None
    pipeline.source(f"COMMIT PREPARED '{pipeline.name}'")
    running(pipeline).assert_equal()


def test_a_table_that_is_added_while_a_transaction_writes_to_it(make_pipeline: Make) -> None:
    """The stream leaves out rows that were written before the table was published, so chunks must wait."""
    pipeline = running(make_pipeline(TABLE, ROWS, "CREATE TABLE public.u (id int PRIMARY KEY, body text)"))
    dsn = pipeline.databases.source
    pipeline.change(source={"tables": ["public.t", "public.u"]})
    with (
        naive_slot(dsn, pipeline.pipeline.source.publication) as streamed,
        transaction(dsn, "INSERT INTO public.u VALUES (1, 'open')") as open_,
        ThreadPoolExecutor(1) as pool,
    ):
        added = pool.submit(pipeline.provision)
        published = "SELECT count(*) FROM pg_publication_tables WHERE tablename = 'u' AND pubname = '{}'"
        query = published.format(pipeline.pipeline.source.publication)
        assert await_condition(lambda: query_rows(dsn, query) == [(1,)], SECONDS)
        assert query_rows(dsn, "SELECT * FROM public.u") == []  # what a chunk would see now
        assert not added.done()
        open_.commit()
        added.result(SECONDS)
        assert ("1", "open") not in streamed()
    pipeline.copy(table="public.u")
    pipeline.apply()
    pipeline.assert_equal("public.u")


# -- reading -------------------------------------------------------------------------------------------


def test_a_rewrite_empties_the_table_for_older_snapshots(make_pipeline: Make) -> None:
    pipeline = make_pipeline(TABLE, ROWS)
    dsn = pipeline.databases.source
    rewrite = "ALTER TABLE public.t ALTER body TYPE varchar(100) USING body || '!'"
    with transaction(dsn, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SELECT pg_current_snapshot()") as naive:
        pipeline.source(rewrite)
        assert naive.execute("SELECT count(*) FROM public.t").fetchone() == (0,)
    # The engine locks first, see races/test_reads.
    with transaction(
        dsn,
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY",
        "LOCK TABLE ONLY public.t IN ACCESS SHARE MODE",
    ) as ours:
        ours.execute("SELECT pg_current_snapshot()")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            execute(f"{dsn}?options=-c%20lock_timeout%3D200ms", rewrite)
        assert ours.execute("SELECT count(*) FROM public.t").fetchone() == (20,)


def test_a_policy_hides_rows_from_the_read_and_not_from_the_stream(make_pipeline: Make) -> None:
    pipeline = make_pipeline(TABLE, "CREATE PUBLICATION naive FOR TABLE public.t")
    dsn, role = pipeline.databases.source, f"hidden_{pipeline.name}"
    with naive_slot(dsn, "naive") as streamed:
        pipeline.source(
            ROWS,
            f"CREATE ROLE {role} LOGIN",
            f"GRANT SELECT ON public.t TO {role}",
            "ALTER TABLE public.t ENABLE ROW LEVEL SECURITY",
            "CREATE POLICY even ON public.t USING (id % 2 = 0)",
        )
        try:
            reader = dsn.replace("postgres@", f"{role}@")
            assert query_rows(reader, "SELECT count(*) FROM public.t") == [(10,)]
            assert len(streamed()) == 20
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
                query_rows(f"{reader}?options=-c%20row_security%3Doff", "SELECT count(*) FROM public.t")
        finally:
            pipeline.source(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_a_database_whose_transactions_are_serializable(databases: Databases) -> None:
    """Concurrent commits of chunks would fail, and so would a fence that has to wait for another run's."""
    name = databases.source.rpartition("/")[2]
    execute(databases.source, f"ALTER DATABASE {name} SET default_transaction_isolation = serializable")
    with connected(databases.source) as connection, adbc.connect(session_dsn(databases.source, "test")) as reading:
        assert scalar(connection, "SHOW transaction_isolation") == "read committed"
        with reading.cursor() as cursor:
            cursor.execute("SELECT current_setting('transaction_isolation')")
            assert cursor.fetchone() == ("read committed",)


def test_settings_of_a_role_change_the_texts_of_the_stream(
    make_pipeline: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They also apply to a walsender: values would be rounded, and days interpreted as months."""
    columns = "id int PRIMARY KEY, f float8, d date, i interval, b bytea, z timestamptz"
    pipeline = make_pipeline(f"CREATE TABLE public.t ({columns})")
    role = f"settings_{pipeline.name}"
    settings = {
        "extra_float_digits": "0",
        "datestyle": "'SQL, DMY'",
        "intervalstyle": "sql_standard",
        "bytea_output": "escape",
        "timezone": "'Asia/Kolkata'",
    }
    values = r"0.1::float8 + 0.2, '2024-02-03', '1 day 2 hours -3 seconds', '\x00ff5c', '2024-02-03 04:05:06.789+00'"
    row = f"INSERT INTO public.t SELECT n, {values} FROM generate_series({{}}, {{}}) n"
    pipeline.source(
        f"CREATE ROLE {role} LOGIN REPLICATION IN ROLE {PIPELINE_ROLE}",
        *(f"ALTER ROLE {role} SET {name} = {value}" for name, value in settings.items()),
        "CREATE PUBLICATION naive FOR TABLE public.t",
    )
    try:
        dsn = pipeline.databases.source.replace("postgres@", f"{role}@")
        name = f"naive_{pipeline.name}"
        with connected_plainly(dsn, monkeypatch) as naive:
            naive.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')".encode())
            naive.execute(row.format(1, 1).encode())
            peek = f"SELECT string_agg(data, '') FROM pg_logical_slot_peek_binary_changes('{name}', NULL, NULL,"
            found = naive.execute(f"{peek} 'proto_version', '1', 'publication_names', 'naive')".encode()).fetchone()
            assert found is not None
            assert b"03/02/2024" in found[0]
            assert b"0.30000000000000004" not in found[0]
            naive.execute(f"SELECT pg_drop_replication_slot('{name}')".encode())
        pipeline.change(source={"dsn": dsn})
        running(pipeline)
        pipeline.source(row.format(2, 9))
        pipeline.apply()
        pipeline.assert_equal()
    finally:
        with contextlib.suppress(psycopg.errors.UndefinedObject):
            pipeline.source("DROP PUBLICATION naive")
        pipeline.source(f"REASSIGN OWNED BY {role} TO postgres", f"DROP OWNED BY {role}", f"DROP ROLE {role}")


# -- the log -------------------------------------------------------------------------------------------


def test_a_crash_gives_transaction_ids_out_again(make_server: ServerMaker) -> None:
    """An older snapshot would mistake the second transaction for the first. The engine flushes first, see races."""
    server = make_server(settings={"wal_writer_delay": "10s", "autovacuum": "off"})
    execute(server.dsn(), TABLE)
    insert = "INSERT INTO public.t VALUES ({}, 'x') RETURNING pg_current_xact_id()::text"
    with psycopg.connect(server.dsn(), autocommit=True, options="-c synchronous_commit=off") as connection:
        first = connection.execute(insert.format(1).encode()).fetchone()
        seen = connection.execute("SELECT count(*) FROM public.t").fetchone()
        server.kill()
    server.start()
    assert seen == (1,)
    assert query_rows(server.dsn(), "SELECT count(*) FROM public.t") == [(0,)]
    assert query_rows(server.dsn(), insert.format(2)) == [first]


def test_restart_lsn_follows_unless_a_prepared_transaction_holds_it(
    make_pipeline: Make, make_server: ServerMaker
) -> None:
    """It advances while a reader is connected; a transaction in another database holds it despite acknowledgments."""
    server = make_server(settings={"max_prepared_transactions": "2"})
    pipeline = running(make_pipeline(TABLE, ROWS, server=server))
    execute(server.dsn(), "CREATE DATABASE other")
    stream = Streaming(pipeline)

    def look() -> dict[str, Any]:
        execute(server.dsn(), "UPDATE public.t SET body = body || '+'")
        found: dict[str, Any] = commands.status(pipeline.pipeline)["slot"]
        return {name: parse_lsn(found[f"{name}_lsn"]) for name in ("restart", "confirmed_flush")} | found

    def followed(goal: int) -> bool:
        return await_condition(lambda: look()["restart"] >= goal, SECONDS, 0.5)

    assert followed(look()["confirmed_flush"])

    with psycopg.connect(server.dsn("other"), autocommit=True) as connection:
        for statement in (b"BEGIN", b"CREATE TABLE o ()", b"PREPARE TRANSACTION 'forgotten'"):
            connection.execute(statement)
    begun = pipeline.marker()
    stream.until(lambda: look()["confirmed_flush"] >= begun, "the marker")
    for _ in range(3):  # three of the server's records of running transactions, without waiting for them
        pipeline.source("SELECT pg_log_standby_snapshot()")
        goal = pipeline.marker()
        stream.until(lambda: look()["confirmed_flush"] >= goal, "the record")  # noqa: B023
    held = look()
    assert held["restart"] < begun < held["confirmed_flush"]
    assert held["retained_bytes"] >= held["confirmed_flush"] - begun

    execute(server.dsn("other"), "ROLLBACK PREPARED 'forgotten'")
    pipeline.source("SELECT pg_log_standby_snapshot()")
    assert followed(begun)
    end = pipeline.marker()
    stream.until(lambda: pipeline.record.applied >= end, "the end")
    stream.end()
    pipeline.assert_equal()


def test_the_insert_position_of_an_idle_server_is_never_reached(make_pipeline: Make, make_server: ServerMaker) -> None:
    """After a switch of segments it is behind a header that is never written, so it is not a position to wait for."""
    pipeline = running(make_pipeline(TABLE, ROWS, server=make_server(settings={"checkpoint_timeout": "1h"})))
    pipeline.source("SELECT pg_switch_wal()")
    ahead = "SELECT pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn(), pg_current_wal_insert_lsn()::text"
    ((is_ahead, insert),) = pipeline.source_rows(ahead)
    assert is_ahead
    names = pipeline.pipeline.source
    naive = WalReader(names.dsn, names.slot, names.publication, pipeline.record.applied)
    try:
        with ThreadPoolExecutor(1) as pool:
            reached = pool.submit(naive.reach, parse_lsn(insert))
            for _ in range(2):
                await_reply(pipeline)  # the server has been asked for its position, and has reported it
            assert not reached.done()
            pipeline.marker()
            reached.result(SECONDS)
    finally:
        naive.close()
    pipeline.source("SELECT pg_switch_wal()")
    pipeline.apply()  # up to a marker
    pipeline.assert_equal()


def test_a_start_beyond_the_end_of_the_log_is_accepted(make_pipeline: Make) -> None:
    """All that is committed until the log gets there is never sent. The engine refuses, see ``repairs``."""
    pipeline = make_pipeline(TABLE, "CREATE PUBLICATION naive FOR TABLE public.t")
    ((beyond,),) = pipeline.source_rows("SELECT (pg_current_wal_flush_lsn() + 4000000)::text")
    with naive_slot(pipeline.databases.source, "naive", beyond) as streamed:
        assert streamed() == []
        pipeline.source(ROWS, *["SELECT pg_logical_emit_message(false, 'x', repeat('x', 1000000))"] * 5)
        pipeline.source("INSERT INTO public.t VALUES (100, 'there')")
        assert streamed() == [("100", "there")]


def test_changes_are_skipped_while_a_publication_does_not_exist(make_pipeline: Make, make_server: ServerMaker) -> None:
    """From Postgres 18 on there is only a warning in the server's log. The engine refuses, see also ``repairs``."""
    server = make_server("18")
    execute(server.dsn(), TABLE, "CREATE PUBLICATION naive FOR TABLE public.t")
    with naive_slot(server.dsn(), "naive") as streamed:
        execute(
            server.dsn(),
            "INSERT INTO public.t VALUES (1, 'before')",
            "DROP PUBLICATION naive",
            "INSERT INTO public.t VALUES (2, 'between')",
            "CREATE PUBLICATION naive FOR TABLE public.t",
            "INSERT INTO public.t VALUES (3, 'after')",
        )
        assert [row[0] for row in streamed()] == ["1", "3"]
    pipeline = running(make_pipeline(server=server))
    name = pipeline.pipeline.source.publication
    pipeline.source(
        f"DROP PUBLICATION {name}",
        "INSERT INTO public.t VALUES (4, 'between')",
        f"CREATE PUBLICATION {name} FOR TABLE public.t",
        "INSERT INTO public.t VALUES (5, 'after')",
    )
    with pytest.raises(GateClosed, match="publication"):
        pipeline.apply()
    assert pipeline.target_rows("SELECT max(id) FROM public.t") == [(3,)]
    provisioning.start_over(pipeline.pipeline, takeover=False)
    pipeline.copy()
    pipeline.apply()
    pipeline.assert_equal()


def test_truncates_of_a_partition_are_not_published_by_way_of_the_root(make_pipeline: Make) -> None:
    """The engine publishes leaves, see test_gate."""
    pipeline = make_pipeline(
        "CREATE TABLE public.p (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE public.p1 PARTITION OF public.p FOR VALUES FROM (0) TO (100)",
        "CREATE PUBLICATION root FOR TABLE public.p WITH (publish_via_partition_root = true)",
        "CREATE PUBLICATION leaf FOR TABLE public.p1",
    )
    dsn, name = pipeline.databases.source, f"naive_{pipeline.name}"
    pipeline.source(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')", "TRUNCATE public.p1")
    peek = f"SELECT count(*) FROM pg_logical_slot_peek_binary_changes('{name}', NULL, NULL, 'proto_version', '1',"
    for publication, messages in (("root", 0), ("leaf", 1)):
        truncates = f"{peek} 'publication_names', '{publication}') WHERE get_byte(data, 0) = ascii('T')"
        assert query_rows(dsn, truncates) == [(messages,)], publication
    pipeline.source(f"SELECT pg_drop_replication_slot('{name}')")


def test_keepalives_acknowledge_nothing(make_pipeline: Make, make_server: ServerMaker) -> None:
    """T1 commits while T2 is open; both have been read, neither is applied, and status messages continue to be sent.

    psycopg2's replication cursor acknowledges T1 here, because T2 began before the last acknowledged position.
    """
    # Long enough for a busy machine, on which a process may not get its turn for a second.
    server = make_server(settings={"wal_sender_timeout": "4s"})
    pipeline = running(make_pipeline(TABLE, ROWS, server=server))
    names = pipeline.pipeline.source
    reader = WalReader(names.dsn, names.slot, names.publication, pipeline.record.applied)
    try:
        with transaction(names.dsn, "INSERT INTO public.t SELECT n, 'T2' FROM generate_series(1000, 1100) n") as t2:
            pipeline.source("INSERT INTO public.t VALUES (100, 'T0')")
            t0 = reader.reach(pipeline.marker())
            reader.committed(t0)
            assert await_condition(lambda: pipeline.confirmed() == t0.lsn, SECONDS)
            pipeline.source("INSERT INTO public.t VALUES (101, 'T1')")
            t2.commit()
        reader.reach(pipeline.marker())
        for _ in range(3):
            await_reply(pipeline)
            assert pipeline.confirmed() == t0.lsn
    finally:
        reader.close()


def test_a_key_of_another_index(make_pipeline: Make) -> None:
    """With REPLICA IDENTITY USING INDEX, a change of the primary key carries no old key, so the index is the key."""
    pipeline = make_pipeline(
        "CREATE TABLE public.t (id int PRIMARY KEY, code int NOT NULL CONSTRAINT other UNIQUE, body text)",
        "ALTER TABLE public.t REPLICA IDENTITY USING INDEX other",
        "INSERT INTO public.t SELECT n, 100 - n, 'row' FROM generate_series(1, 20) n",
        snapshot={"chunk_rows": 10},
    )
    pipeline.provision()
    changes = (
        "UPDATE public.t SET id = id + 50 WHERE id IN (2, 15)",
        "UPDATE public.t SET code = -id WHERE id IN (3, 16)",
    )
    with transaction(pipeline.databases.source, *changes) as open_:
        pipeline.copy(0)
        open_.commit()
    pipeline.copy(1)
    pipeline.source("DELETE FROM public.t WHERE id IN (52, 4)", "UPDATE public.t SET id = id - 50 WHERE id = 65")
    pipeline.apply()
    pipeline.assert_equal()


def test_a_truncate_empties_the_table_for_older_snapshots(make_pipeline: Make) -> None:
    """A reader of the target whose snapshot is older would see a hole. The engine deletes rows."""
    pipeline = running(make_pipeline(TABLE, ROWS))
    pipeline.target("CREATE TABLE public.naive AS TABLE public.t")
    begin = ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SELECT pg_current_snapshot()")
    with transaction(pipeline.databases.target, *begin) as reader:
        pipeline.target("TRUNCATE public.naive")
        assert reader.execute("SELECT count(*) FROM public.naive").fetchone() == (0,)
        pipeline.source("TRUNCATE public.t", "INSERT INTO public.t VALUES (1, 'after')")
        pipeline.apply()
        assert reader.execute("SELECT count(*), max(body) FROM public.t").fetchone() == (20, "row 9")
    pipeline.assert_equal()


def test_a_plain_select_does_not_fence(make_pipeline: Make) -> None:
    """The old writer reads its epoch, is overtaken, and commits. The engine locks the row, see races/test_epoch."""
    pipeline = make_pipeline()
    pipeline.target("CREATE TABLE public.epoch (epoch int)", "INSERT INTO public.epoch VALUES (1)", TABLE)
    for lock, landed in (("", True), (" FOR SHARE", False)):
        pipeline.target("UPDATE public.epoch SET epoch = 1", "TRUNCATE public.t")
        with (
            transaction(pipeline.databases.target, "SET lock_timeout = '5s'") as old,
            ThreadPoolExecutor(1) as pool,
        ):
            assert old.execute(f"SELECT epoch FROM public.epoch{lock}".encode()).fetchone() == (1,)
            overtaking = pool.submit(pipeline.target, "UPDATE public.epoch SET epoch = 2")
            overtaken = await_condition(overtaking.done, 1.0)
            old.execute("INSERT INTO public.t VALUES (1, 'of the old writer')")
            old.commit()
            overtaking.result(SECONDS)
        # It landed after the new epoch began, or earlier, and then the new writer knows of it.
        assert overtaken is landed
