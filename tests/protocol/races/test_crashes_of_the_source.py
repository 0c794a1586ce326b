"""A crash of the source that undoes what a chunk has seen: a commit is visible before it is durable."""

from __future__ import annotations

import psycopg
import pytest

from airflow_cdc_provider.engine.core.errors import StreamFailed
from airflow_cdc_provider.engine.core.record import Watermark
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_read import SnapshotReader
from local_servers.postgres import PostgresServer
from tests.conftest import ServerMaker
from tests.protocol.races.scene import Make
from tests.support.engine_parts import copy_chunk_of

pytestmark = pytest.mark.slow

XID = "RETURNING pg_current_xact_id()::text"


@pytest.fixture
def asynchronous_source(make_server: ServerMaker) -> PostgresServer:
    """Run a source whose asynchronous commits stay in memory for as long as Postgres allows."""
    return make_server(settings={"wal_writer_delay": "10s", "autovacuum": "off"})


def commit_asynchronously(server: PostgresServer, statement: str) -> str:
    """Commit without waiting until the log is written, and return the transaction's id."""
    with psycopg.connect(server.dsn(), options="-c synchronous_commit=off", autocommit=True) as connection:
        ((xid,),) = connection.execute(f"{statement} {XID}".encode()).fetchall()
    return str(xid)


def test_a_crash_after_a_chunk_saw_an_asynchronous_commit(
    asynchronous_source: PostgresServer, make_pipeline: Make
) -> None:
    pipeline = make_pipeline(asynchronous_source)
    pipeline.provision()
    commit_asynchronously(asynchronous_source, "INSERT INTO public.t VALUES (100, 'asynchronous', NULL)")
    pipeline.copy()
    asynchronous_source.kill()
    asynchronous_source.start()
    # The chunk was accepted, so its marker must have made its contents durable.
    found = "SELECT body FROM public.t WHERE id = 100"
    assert pipeline.target_rows(found) == pipeline.source_rows(found) == [("asynchronous",)]
    pipeline.source("INSERT INTO public.t VALUES (101, 'next', NULL)")
    pipeline.apply()
    pipeline.assert_equal()


def test_a_crash_before_a_chunk_is_sealed(
    asynchronous_source: PostgresServer, make_pipeline: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk's contents are gone, and another transaction gets the id: its changes would be dropped."""
    pipeline = make_pipeline(asynchronous_source)
    pipeline.provision()
    finish = SnapshotReader.finish

    def crash(reader: SnapshotReader) -> Watermark:
        asynchronous_source.kill()
        return finish(reader)

    chunk = pipeline.chunk(1).chunk
    pipeline.marker()  # earlier ids are durable, so none of them is assigned again first
    xid = commit_asynchronously(asynchronous_source, "INSERT INTO public.t VALUES (100, 'phantom', NULL)")
    with monkeypatch.context() as patch:
        patch.setattr(SnapshotReader, "finish", crash)
        assert isinstance(copy_chunk_of(pipeline.pipeline, chunk), StreamFailed)
    assert pipeline.chunk(1).watermark is None
    assert pipeline.target_rows("SELECT count(*) FROM public.t") == [(0,)]

    asynchronous_source.start()
    assert pipeline.source_rows("SELECT count(*) FROM public.t WHERE id = 100") == [(0,)]
    again = pipeline.source_rows(f"INSERT INTO public.t VALUES (101, 'with the id of the phantom', NULL) {XID}")
    assert again == [(xid,)]
    pipeline.copy()
    pipeline.apply()
    pipeline.assert_equal()
