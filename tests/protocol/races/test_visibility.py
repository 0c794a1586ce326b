"""The interleavings in which rows are lost, doubled or stale, each reproduced on real servers.

Postgres commits in steps. It writes the commit record, may wait for a synchronous standby, and only then do other
snapshots see the commit, although logical decoding has already delivered it. An asynchronous commit is the reverse: it
is visible before it is durable. Chunks are read in their own snapshots in between. Every test here fails if its rule is
broken. Most tests run the engine's parts in this process, because only then can a test control what happens between two
parts. Tests with the command line cover what Spark adds.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from airflow_cdc_provider.engine.core.errors import Blocked
from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.sources.postgres.provision import slot
from local_servers.postgres import PostgresServer
from tests.conftest import PIPELINE_ROLE, ServerMaker
from tests.protocol.races.scene import Make, Mode, await_waiting, events
from tests.support.databases import execute, transaction
from tests.support.patience import SECONDS
from tests.support.standby import WITHOUT_STANDBY, commits_that_wait

pytestmark = pytest.mark.slow


@pytest.fixture
def standby_source(make_server: ServerMaker) -> PostgresServer:
    """Run a source whose synchronous standby does not exist, so sessions that request it wait."""
    return make_server(settings=WITHOUT_STANDBY)


def test_a_commit_that_is_visible_only_after_the_chunk_was_read(
    standby_source: PostgresServer, make_pipeline: Make
) -> None:
    """The commit precedes H in the log and is not in the chunk: only the transaction's visibility shows it."""
    pipeline = make_pipeline(standby_source)
    pipeline.provision()
    changes = (
        "INSERT INTO public.t VALUES (100, 'inserted', 'x')",
        "UPDATE public.t SET body = 'updated' WHERE id = 3",
        "DELETE FROM public.t WHERE id = 15",
    )
    with commits_that_wait(standby_source, *changes) as release:
        written = parse_lsn(str(pipeline.source_rows("SELECT pg_current_wal_lsn()::text")[0][0]))
        pipeline.copy()
        assert pipeline.record.high > written
        assert pipeline.target_rows("SELECT count(*), max(body) FROM public.t WHERE id IN (3, 15, 100)") == [
            (2, "row 3")
        ]
        # The stream delivers them before the source itself shows them.
        pipeline.apply()
        found = "SELECT id, body FROM public.t WHERE id IN (3, 15, 100) ORDER BY id"
        assert pipeline.target_rows(found) == [(3, "updated"), (100, "inserted")]
        assert pipeline.source_rows(found) == [(3, "row 3"), (15, "row 15")]
        release()
    pipeline.assert_equal()


def test_a_commit_that_waits_across_slot_and_barrier(standby_source: PostgresServer, make_pipeline: Make) -> None:
    """Its commit record precedes the slot, so it is not streamed; chunks must not be read before it is visible."""
    pipeline = make_pipeline(standby_source)
    pipeline.source(f"GRANT pg_monitor TO {PIPELINE_ROLE}")  # without it, a role cannot see what sessions wait for
    names = pipeline.pipeline.source
    change = "UPDATE public.t SET body = 'updated' WHERE id = 3"
    with commits_that_wait(standby_source, change) as release:
        for step in (
            lambda: slot.create_slot(source, names.slot, timeout=0.5),
            lambda: slot.barrier(source, timeout=0.5),
        ):
            with connected(names.dsn) as source, pytest.raises(Blocked, match="SyncRep") as blocked:
                step()
            assert "standby" in blocked.value.solution
        assert pipeline.source_rows("SELECT slot_name FROM pg_replication_slots") == []
        with ThreadPoolExecutor(1) as pool:
            provisioned = pool.submit(pipeline.provision)
            await_waiting(
                pipeline.databases.source,
                "wait_event_type = 'Lock' AND query LIKE '%pg_create_logical_replication_slot%'",
            )
            release()
            provisioned.result(SECONDS)
    pipeline.copy()
    pipeline.source("UPDATE public.t SET body = 'later' WHERE id = 4")
    pipeline.apply()
    assert pipeline.target_rows("SELECT body FROM public.t WHERE id = 3") == [("updated",)]
    pipeline.assert_equal()


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_transaction_that_is_open_across_chunks(make_pipeline: Make, mode: Mode) -> None:
    pipeline = make_pipeline(mode=mode)
    pipeline.provision()
    dsn = pipeline.databases.source
    with transaction(dsn, "UPDATE public.t SET body = 'open' WHERE id IN (2, 12)") as open_:
        pipeline.copy(0)
        open_.execute("DELETE FROM public.t WHERE id IN (3, 13)")
        open_.execute("INSERT INTO public.t VALUES (-1, 'open', NULL), (101, 'open', NULL)")
        # A younger transaction ends first, so that ids alone do not show what a snapshot sees.
        pipeline.source("UPDATE public.t SET body = 'closed' WHERE id IN (4, 14)")
        pipeline.copy(1)
        open_.commit()
    pipeline.apply()
    pipeline.assert_verified()
    if mode == "mirror":
        pipeline.assert_equal()
        return
    # The second chunk has seen the closed transaction, the first has not; neither has seen the open one.
    assert sorted(event[:2] for event in events(pipeline)) == [
        ("d", 3),
        ("d", 13),
        ("i", -1),
        ("i", 101),
        ("u", 2),
        ("u", 4),
        ("u", 12),
    ]
    assert pipeline.target_rows("SELECT count(*) FROM public.t WHERE _op = 'r'") == [(20,)]


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_transaction_that_ends_between_two_chunks(make_pipeline: Make, mode: Mode) -> None:
    """The first chunk's snapshot lists it as running, although its id is lower than those of ended transactions."""
    pipeline = make_pipeline(mode=mode)
    pipeline.provision()
    with transaction(pipeline.databases.source, "UPDATE public.t SET body = 'open' WHERE id IN (2, 12)") as open_:
        pipeline.source("UPDATE public.t SET body = 'closed' WHERE id IN (4, 14)")
        pipeline.copy(0)
        open_.commit()
    pipeline.copy(1)
    pipeline.apply()
    pipeline.assert_verified()
    if mode == "mirror":
        pipeline.assert_equal()
    else:
        assert [event[:2] for event in events(pipeline)] == [("u", 2)]


def test_a_transaction_that_is_open_across_the_barrier(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    names = pipeline.pipeline.source
    with transaction(pipeline.databases.source, "UPDATE public.t SET body = 'open' WHERE id = 2") as open_:
        for step in (
            lambda: slot.create_slot(source, names.slot, timeout=0.5),
            lambda: slot.barrier(source, timeout=0.5),
        ):
            with connected(names.dsn) as source, pytest.raises(Blocked, match=f"session {open_.info.backend_pid} "):
                step()
        with ThreadPoolExecutor(1) as pool:
            provisioned = pool.submit(pipeline.provision)
            await_waiting(
                pipeline.databases.source,
                "wait_event_type = 'Lock' AND query LIKE '%pg_create_logical_replication_slot%'",
            )
            open_.execute("INSERT INTO public.t VALUES (50, 'open', NULL)")
            open_.commit()
            provisioned.result(SECONDS)
    pipeline.copy()
    pipeline.apply()
    assert pipeline.target_rows("SELECT count(*) FROM public.t WHERE body = 'open'") == [(2,)]
    pipeline.assert_equal()


def test_a_prepared_transaction_is_named(make_pipeline: Make) -> None:
    """It belongs to no session, so that only its own catalog shows it."""
    pipeline = make_pipeline()
    names = pipeline.pipeline.source
    with psycopg.connect(pipeline.databases.source, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("UPDATE public.t SET body = 'prepared' WHERE id = 2")
        connection.execute(f"PREPARE TRANSACTION '{pipeline.name}'".encode())
    with connected(names.dsn) as source, pytest.raises(Blocked, match=f"prepared transaction '{pipeline.name}'"):
        slot.barrier(source, timeout=0.5)
    execute(pipeline.databases.source, f"COMMIT PREPARED '{pipeline.name}'")
    pipeline.provision()
    pipeline.copy()
    assert pipeline.target_rows("SELECT body FROM public.t WHERE id = 2") == [("prepared",)]
