"""A source that is a copy of itself: a storage snapshot of the data directory, taken earlier and started later.

It has the same system identifier and, without archive recovery, the same timeline; its slots are as they were. Up to
the copy its log is the original's; from there on, other transactions stand at the same positions. As soon as it has
written more than the sink has applied, no position tells the difference.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import pytest

from airflow_cdc_provider.engine.core.errors import GateClosed
from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.sinks.postgres.record import PostgresRecord
from local_servers.postgres import PostgresServer
from tests.conftest import Databases, ServerMaker
from tests.protocol.repairs.scene import LOST, ROWS, TABLE, assert_healed, carry_out, refused
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow


@pytest.fixture
def server(make_server: ServerMaker) -> PostgresServer:
    """A source that is copied while it stands still, which has the same effect as a snapshot of its storage."""
    return make_server()


@pytest.fixture
def pipeline(server: PostgresServer, databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    """A pipeline whose stream has applied a change."""
    pair = Databases(server.dsn(), databases.target)
    under_test = PipelineUnderTest(tmp_path, pair, ["public.t"], pipeline="restored")
    under_test.source(TABLE, ROWS)
    under_test.provision()
    under_test.copy()
    advance(under_test, "streamed")
    return under_test


def advance(pipeline: PipelineUnderTest, body: str) -> None:
    """Change rows, and move the stream and the slot's ``restart_lsn`` past that."""
    pipeline.source(f"UPDATE public.t SET body = '{body}' WHERE id > 5", "SELECT pg_log_standby_snapshot()")
    pipeline.apply()


def take_copy(server: PostgresServer) -> Path:
    """Copy the data directory."""
    server.stop()
    copy = server.directory / "copy"
    shutil.copytree(server.data_directory, copy, symlinks=True)
    server.start()
    return copy


def restore(server: PostgresServer, copy: Path) -> None:
    """Put the copy in the place of the data directory."""
    server.stop("immediate")
    shutil.rmtree(server.data_directory)
    copy.rename(server.data_directory)
    for path in (server.data_directory, *server.data_directory.rglob("*")):
        server.account.own(path)
    server.start()


def fork(server: PostgresServer, pipeline: PipelineUnderTest, written: Literal["little", "much"]) -> None:
    """The sink applies what only the original has; then the copy takes its place, and other changes are made there."""
    copy = take_copy(server)
    advance(pipeline, "only in the original")
    advance(pipeline, "and once more")
    restore(server, copy)
    pipeline.source(*LOST)
    if written == "much":
        pipeline.source("SELECT pg_switch_wal()", *LOST[:1])
    ((flushed,),) = pipeline.source_rows("SELECT pg_current_wal_flush_lsn()::text")
    assert (parse_lsn(flushed) > pipeline.record.applied) is (written == "much")


def test_a_copy_that_is_behind_the_sink(server: PostgresServer, pipeline: PipelineUnderTest) -> None:
    fork(server, pipeline, "little")
    solution = refused(pipeline, GateClosed, "slot 'airflow_cdc_restored' has gone back|has been set back")
    carry_out(pipeline, solution)
    assert_healed(pipeline)


def test_a_copy_that_has_passed_the_sink(server: PostgresServer, pipeline: PipelineUnderTest) -> None:
    """The slot alone remembers: it stands where it was when the copy was taken, below where it had been seen."""
    fork(server, pipeline, "much")
    solution = refused(pipeline, GateClosed, "slot 'airflow_cdc_restored' has gone back .* restored from a copy")
    carry_out(pipeline, solution)
    assert_healed(pipeline)


def test_a_copy_without_that_memory_loses_changes_silently(
    server: PostgresServer, pipeline: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: with nothing recorded of the slot, the gate opens, and what the copy has written is skipped."""
    monkeypatch.setattr(PostgresRecord, "note_source", lambda *arguments: None)
    pipeline.target('UPDATE airflow_cdc.pipelines SET source = source || \'{"slot_seen": "0/0"}\'')
    fork(server, pipeline, "much")
    pipeline.source("SELECT pg_switch_wal()", "CREATE TABLE public.more ()")
    pipeline.apply()
    assert pipeline.source_rows("SELECT body FROM public.t WHERE id = 100") == [("lost",)]
    assert pipeline.target_rows("SELECT body FROM public.t WHERE id = 100") == []


def test_a_crash_is_not_taken_for_a_copy(server: PostgresServer, pipeline: PipelineUnderTest) -> None:
    """The slot's acknowledged position falls back after a crash, its ``restart_lsn`` does not."""
    for _ in range(2):
        advance(pipeline, "before the crash")
        pipeline.source("UPDATE public.t SET body = 'unsaved' WHERE id = 1")
        pipeline.apply()
        server.kill()
        server.start()
        advance(pipeline, "after the crash")
    pipeline.source(*LOST)
    assert_healed(pipeline)
