"""The source fails over to a standby, or its address moves: followed if nothing is missing, otherwise refused.

A promoted standby is on another timeline. It continues the slot only if the slot was synchronized to it (Postgres 17
and newer). It continues the sink only if everything that was applied, and every chunk's H, precedes the point where it
left the old timeline. Everything after that point existed only on the old primary.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import psycopg
import pytest
from psycopg import pq

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CdcError, GateClosed, StreamFailed
from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres import replication
from airflow_cdc_provider.engine.postgres.connection import Connection, connected
from airflow_cdc_provider.engine.postgres.timeline import Switch, left_at, parse_history, read_history
from airflow_cdc_provider.engine.runs.restarting import keep_trying
from airflow_cdc_provider.engine.runs.run import Run, run_part
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_read import SnapshotReader
from airflow_cdc_provider.engine.sources.postgres.stream.sink_fanout import SinkFanout
from airflow_cdc_provider.engine.sources.postgres.stream.spark_source import SlotStreamReader
from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob
from airflow_cdc_provider.engine.sources.postgres.wal import wal_reader
from local_servers.postgres import PostgresServer
from local_servers.process import find_free_port
from tests.conftest import Databases, ServerMaker
from tests.protocol.repairs.scene import LOST, ROWS, TABLE, assert_healed, carry_out, content, refused
from tests.support.databases import execute, query_rows
from tests.support.engine_parts import apply_stream, chunk_task, follow_log
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.proxy import Proxy

pytestmark = pytest.mark.slow


@pytest.fixture
def primary(make_server: ServerMaker) -> PostgresServer:
    """Run a Postgres 18 that keeps the log for a standby."""
    server = make_server("18")
    execute(server.dsn(), "SELECT pg_create_physical_replication_slot('standby', true)")
    return server


@pytest.fixture
def standby(primary: PostgresServer, server_directory: Path) -> Iterator[PostgresServer]:
    """Return a running standby of the primary."""
    directory = server_directory / f"standby{primary.port}"
    directory.mkdir()
    primary.account.own(directory)
    server = PostgresServer(directory, primary.binaries, find_free_port(), primary.account)
    subprocess.run(
        [primary.binaries / "pg_basebackup", "-d", primary.dsn(), "-D", server.data_directory, "-c", "fast", "-N"],
        check=True,
        capture_output=True,
        **primary.account.popen_arguments(),
    )
    settings = f"""
port = {server.port}
primary_conninfo = '{primary.dsn()}'
primary_slot_name = 'standby'
hot_standby_feedback = on
wal_receiver_status_interval = 1
wal_retrieve_retry_interval = 100
"""
    with (server.data_directory / "postgresql.conf").open("a") as file:
        file.write(settings)
    (server.data_directory / "standby.signal").touch()
    primary.account.own(server.data_directory / "standby.signal")
    server.start()
    yield server
    server.remove()


@pytest.fixture
def pipeline(primary: PostgresServer, databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    """Return a changelog whose stream has applied a change."""
    pair = Databases(primary.dsn(), databases.target)
    under_test = PipelineUnderTest(tmp_path, pair, ["public.t"], sink={"mode": "changelog"}, pipeline="failover")
    under_test.source(TABLE, ROWS)
    under_test.provision()
    under_test.copy()
    under_test.source("UPDATE public.t SET body = 'streamed' WHERE id = 1")
    under_test.apply()
    return under_test


def synchronise(pipeline: PipelineUnderTest, standby: PostgresServer) -> None:
    """Synchronize the slot to the standby, as a worker there does from time to time.

    The standby adopts a slot only at a position from which it can decode, so the stream has to advance to there.
    """
    condition = f"FROM pg_replication_slots WHERE slot_name = '{pipeline.pipeline.source.slot}'"
    primary, positions = pipeline.databases.source, f"SELECT restart_lsn, confirmed_flush_lsn {condition}"
    with psycopg.connect(standby.dsn(), autocommit=True) as connection:

        def done() -> bool:
            # Up to a record of running transactions and no further: a marker would start its own transaction.
            ((running,),) = pipeline.source_rows("SELECT pg_log_standby_snapshot()::text")
            apply_stream(pipeline.pipeline, parse_lsn(running))
            await_replay(pipeline, standby)
            connection.execute("SELECT pg_sync_replication_slots()")
            here = query_rows(standby.dsn(), f"{positions} AND synced AND NOT temporary")
            return here == query_rows(primary, positions)

        assert await_condition(done, SECONDS)


def await_replay(pipeline: PipelineUnderTest, standby: PostgresServer) -> None:
    """Wait until the standby has all of the primary's log."""
    ((end,),) = pipeline.source_rows("SELECT pg_current_wal_flush_lsn()::text")
    replayed = f"SELECT pg_last_wal_replay_lsn() >= '{end}'"
    assert await_condition(lambda: query_rows(standby.dsn(), replayed) == [(True,)], SECONDS)


def fail_over(pipeline: PipelineUnderTest, primary: PostgresServer, standby: PostgresServer) -> None:
    """Kill the primary, promote the standby, and use it as the pipeline's source from now on."""
    primary.kill()
    execute(standby.dsn(), "SELECT pg_promote()")
    move(pipeline, standby)


def move(pipeline: PipelineUnderTest, server: PostgresServer) -> None:
    """Point the pipeline at another server."""
    pipeline.databases = Databases(server.dsn(), pipeline.databases.target)
    pipeline.change(source={"dsn": server.dsn()})


def test_a_failover_with_the_slot(
    pipeline: PipelineUnderTest, primary: PostgresServer, standby: PostgresServer
) -> None:
    """The stream continues where it was on the old timeline, and so does the filter of re-read rows."""
    slot = pipeline.pipeline.source.slot
    assert pipeline.source_rows(f"SELECT failover FROM pg_replication_slots WHERE slot_name = '{slot}'") == [(True,)]
    synchronise(pipeline, standby)
    pipeline.source("UPDATE public.t SET body = 'read again' WHERE id IN (2, 12)")
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    pipeline.source("UPDATE public.t SET body = 'not yet streamed' WHERE id IN (3, 13)")
    await_replay(pipeline, standby)
    record = pipeline.record
    assert record.applied < record.high
    assert record.identity["timeline"] == 1

    move(pipeline, standby)
    with pytest.raises(GateClosed, match="is a standby"):
        apply_stream(pipeline.pipeline, record.applied)
    fail_over(pipeline, primary, standby)
    pipeline.source(*LOST)
    pipeline.apply()
    pipeline.assert_verified()
    assert pipeline.record.identity["timeline"] == 2
    assert [switch.timeline for switch in read_history(standby.dsn(), 2)] == [1]
    # Each change occurs once, and re-read changes do not occur.
    changes = pipeline.target_rows("SELECT id FROM public.t WHERE _op = 'u' AND body <> 'streamed' ORDER BY 1")
    assert [key for (key,) in changes] == [2, 3, 13]
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    assert_healed(pipeline)


def without_slot(pipeline: PipelineUnderTest, standby: PostgresServer) -> None:
    await_replay(pipeline, standby)


def applied_more(pipeline: PipelineUnderTest, standby: PostgresServer) -> None:
    """Apply changes in the sink that the standby has not received, and then kill the primary."""
    synchronise(pipeline, standby)
    standby.stop()
    pipeline.source("UPDATE public.t SET body = 'only on the old primary' WHERE id = 7")
    pipeline.apply()


def read_more(pipeline: PipelineUnderTest, standby: PostgresServer) -> None:
    """Re-read rows that the standby has not received, and apply nothing afterwards."""
    synchronise(pipeline, standby)
    standby.stop()
    pipeline.source("UPDATE public.t SET body = 'only on the old primary' WHERE id = 7")
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])


def made_on_the_standby(pipeline: PipelineUnderTest, standby: PostgresServer) -> None:
    """Give the standby its own slot of that name, for which the primary keeps no rows of the catalog."""
    slot = pipeline.pipeline.source.slot
    execute(standby.dsn(), "ALTER SYSTEM SET hot_standby_feedback = off", "SELECT pg_reload_conf()")
    kept = "SELECT catalog_xmin FROM pg_replication_slots WHERE slot_name = 'standby'"
    assert await_condition(lambda: pipeline.source_rows(kept) == [(None,)], SECONDS)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(execute, standby.dsn(), f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
        assert await_condition(
            lambda: bool(pipeline.source_rows("SELECT pg_log_standby_snapshot()")) and made.done(), SECONDS
        )
        made.result()
    remove = f"SELECT pg_drop_replication_slot('{slot}')"  # otherwise the primary's slot would keep them
    pipeline.source(remove, "CREATE TABLE public.x ()", "DROP TABLE public.x", "VACUUM pg_catalog.pg_class")
    why = f"SELECT invalidation_reason FROM pg_replication_slots WHERE slot_name = '{slot}'"
    assert await_condition(lambda: query_rows(standby.dsn(), why) == [("rows_removed",)], SECONDS)


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (without_slot, "a standby without the slot has been promoted"),
        (made_on_the_standby, r"has lost the log it needs \(wal_status = lost, rows_removed\)"),
        (applied_more, r"timeline 1, of which the sink has .*, was left at"),
        (read_more, r"timeline 1, of which the sink has .*, was left at"),
    ],
    ids=["slot not synchronized", "slot of the standby's own", "sink ahead of the switch", "read ahead of the switch"],
)
def test_a_failover_that_leaves_something_behind(
    pipeline: PipelineUnderTest,
    primary: PostgresServer,
    standby: PostgresServer,
    before: Callable[[PipelineUnderTest, PostgresServer], None],
    words: str,
) -> None:
    before(pipeline, standby)
    primary.kill()
    standby.start()
    fail_over(pipeline, primary, standby)
    # The log of the new timeline passes the sink's position, so positions alone show nothing.
    pipeline.source(*LOST, "SELECT pg_switch_wal()", "CREATE TABLE public.x ()")
    ((end,),) = pipeline.source_rows("SELECT pg_current_wal_flush_lsn()::text")
    assert parse_lsn(end) > max(pipeline.record.applied, pipeline.record.high)
    solution = refused(pipeline, GateClosed, words)
    carry_out(pipeline, solution)
    assert_healed(pipeline)


@pytest.fixture
def address(pipeline: PipelineUnderTest, primary: PostgresServer) -> Iterator[Proxy]:
    """Return a proxy by which the pipeline reaches the primary, until it is moved."""
    proxy = Proxy(primary.port)
    through = pipeline.pipeline.source.dsn.replace(f":{primary.port}/", f":{proxy.port}/")
    restart = {"strategy": "fixed-delay", "delay": "100 ms"}
    pipeline.change(source={"dsn": through}, stream={"restart": restart})
    yield proxy
    proxy.close()


def stream_through(
    pipeline: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch, strike: Callable[[], None]
) -> list[CdcError]:
    """Stream like the job, with an event between the gate and the replication connection; return its errors."""
    pipeline.change(stream={"heartbeat": "1 minute"})  # until then, nothing else finds that the source has gone
    errors: list[CdcError] = []
    open_replication, check_catalog = replication.open_replication, SinkFanout.check_catalog
    watching = Event()

    def checked(sinks: SinkFanout, source: Connection) -> None:
        check_catalog(sinks, source)
        watching.set()

    def struck(dsn: str, application: str) -> pq.PGconn:
        if not errors:
            assert watching.wait(SECONDS)
            strike()
        return open_replication(dsn, application)

    def attempt(run: Run, record: Record) -> None:
        try:
            follow_log(run, record, record.applied + 1)
        except CdcError as e:
            errors.append(e)
            raise

    with monkeypatch.context() as patch, run_part(pipeline.pipeline, "stream", None) as (run, record):
        patch.setattr(wal_reader, "open_replication", struck)
        patch.setattr(SinkFanout, "check_catalog", checked)
        keep_trying(run, record, lambda record: attempt(run, record))
    return errors


def test_an_address_that_moves_to_the_promoted_standby_after_the_gate(
    pipeline: PipelineUnderTest,
    primary: PostgresServer,
    standby: PostgresServer,
    address: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stream does not start on a timeline other than the gate's; the gate then finds that it may."""
    synchronise(pipeline, standby)
    read = chunk_task(pipeline.pipeline, pipeline.chunk(0).chunk).read
    pipeline.source(*LOST)
    await_replay(pipeline, standby)

    def promote() -> None:
        primary.kill()
        execute(standby.dsn(), "SELECT pg_promote()")
        pipeline.databases = Databases(standby.dsn(), pipeline.databases.target)
        address.lead_to(standby.port)

    (error,) = stream_through(pipeline, monkeypatch, promote)
    assert isinstance(error, StreamFailed)
    assert "leads to another server" in error.message
    assert "timeline 2" in error.message
    assert pipeline.record.identity["timeline"] == 2
    reader = SnapshotReader(read)  # for a task that was planned earlier
    with pytest.raises(StreamFailed, match="timeline 2"):
        list(reader.batches())
    reader.close()
    assert_healed(pipeline)


def test_an_address_that_moves_to_another_cluster_after_the_gate(
    pipeline: PipelineUnderTest, address: Proxy, make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a table, a publication and a slot of the same names: nothing arrives from it, including its positions."""
    other, names = make_server("18"), pipeline.pipeline.source
    execute(
        other.dsn(),
        TABLE,
        ROWS,
        f"CREATE PUBLICATION {names.publication} FOR TABLE ONLY public.t",
        f"SELECT pg_create_logical_replication_slot('{names.slot}', 'pgoutput')",
        *LOST,
    )
    before = content(pipeline), pipeline.record.applied
    with pytest.raises(GateClosed, match="is not the one that the sink was filled from"):
        stream_through(pipeline, monkeypatch, lambda: address.lead_to(other.port))
    assert (content(pipeline), pipeline.record.applied) == before


def test_an_address_that_moves_after_the_reader_has_connected(
    pipeline: PipelineUnderTest, primary: PostgresServer, standby: PostgresServer, address: Proxy
) -> None:
    """The old primary stays alive, as in a partition. The new one's answers do not cover the old one's changes."""
    synchronise(pipeline, standby)
    with run_part(pipeline.pipeline, "stream", None) as (run, record):
        job = StreamJob(None, run, record, lambda progress: None)  # type: ignore[arg-type]
        reader = SlotStreamReader(job._source_options())
        try:
            reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())  # connects
            execute(standby.dsn(), "SELECT pg_promote()")
            address.lead_to(standby.port)
            with connected(run.pipeline.source.dsn) as source, pytest.raises(StreamFailed, match="timeline 2"):
                job._gate(source)
            with run_part(pipeline.pipeline, "snapshot-0", run.epoch) as (_, seen):
                assert seen.identity["timeline"] == 1, "that of the stream's reader"
        finally:
            reader.stop()
    pipeline.source("UPDATE public.t SET body = 'on the old primary' WHERE id = 12")
    pipeline.databases = Databases(standby.dsn(), pipeline.databases.target)
    pipeline.source(*LOST)
    pipeline.apply()
    assert pipeline.record.identity["timeline"] == 2
    pipeline.assert_verified()


def test_a_slot_that_is_moved_after_the_gate(
    pipeline: PipelineUnderTest, address: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres would move the start forward to the slot's position, and everything in between would never arrive."""
    slot = pipeline.pipeline.source.slot
    advance = f"SELECT pg_replication_slot_advance('{slot}', pg_current_wal_flush_lsn())"
    before = content(pipeline)
    with pytest.raises(GateClosed, match="has been acknowledged up to"):
        stream_through(pipeline, monkeypatch, lambda: pipeline.source(*LOST, advance))
    assert content(pipeline) == before


def test_a_history_file() -> None:
    text = "1\t0/3000158\tno recovery target specified\n\n# a comment\n3\t2/A0\tbefore 2000-01-01 00:00:00+00\n"
    history = parse_history(text)
    assert history == (Switch(1, 0x3000158), Switch(3, 0x2000000A0))
    assert [left_at(history, timeline) for timeline in (1, 2, 3)] == [0x3000158, None, 0x2000000A0]
    with pytest.raises(ValueError, match="invalid literal"):
        parse_history("no history\n")


def test_a_history_that_the_server_does_not_have(databases: Databases) -> None:
    with pytest.raises(StreamFailed, match="history of timeline 7"):
        read_history(databases.source, 7)
