"""A source that is a copy of itself: a storage snapshot of the data directory, taken earlier and started later.

It has the same system identifier and, without archive recovery, the same timeline; its slots are unchanged. Up to the
copy its log is the original's; after that, other transactions occupy the same positions. As soon as it has written more
than the sink has applied, no position shows the difference.
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
    """Run a source that is copied while it is stopped, which has the same effect as a snapshot of its storage."""
    return make_server()


@pytest.fixture
def pipeline(server: PostgresServer, databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    """Return a pipeline whose stream has applied a change."""
    pair = Databases(server.dsn(), databases.target)
    under_test = PipelineUnderTest(tmp_path, pair, ["public.t"], pipeline="restored")
    under_test.source(TABLE, ROWS)
    under_test.provision()
    under_test.copy()
    advance(under_test, "streamed")
    return under_test


def advance(pipeline: PipelineUnderTest, body: str) -> None:
    """Change rows, and advance the stream and the slot's ``restart_lsn`` past them."""
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
    """Replace the data directory with the copy."""
    server.stop("immediate")
    shutil.rmtree(server.data_directory)
    copy.rename(server.data_directory)
    for path in (server.data_directory, *server.data_directory.rglob("*")):
        server.account.own(path)
    server.start()


def fork(server: PostgresServer, pipeline: PipelineUnderTest, written: Literal["little", "much"]) -> None:
    """Apply changes that only the original has; then replace it with the copy, and make other changes there."""
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
    solution = refused(pipeline, GateClosed, "slot 'airflow_cdc_restored' is at .*, but was at|has been set back")
    carry_out(pipeline, solution)
    assert_healed(pipeline)


def test_a_copy_that_has_passed_the_sink(server: PostgresServer, pipeline: PipelineUnderTest) -> None:
    """Only the slot shows it: its position is the one from the time of the copy, lower than the one seen later."""
    fork(server, pipeline, "much")
    solution = refused(pipeline, GateClosed, "slot 'airflow_cdc_restored' is at .*, but was at .* restored from a copy")
    carry_out(pipeline, solution)
    assert_healed(pipeline)


def test_a_copy_without_that_memory_loses_changes_silently(
    server: PostgresServer, pipeline: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: with nothing recorded of the slot, the gate opens, and the copy's new changes are skipped."""
    monkeypatch.setattr(PostgresRecord, "record_source", lambda *arguments: None)
    pipeline.target('UPDATE airflow_cdc.pipelines SET source = source || \'{"slot_seen": "0/0"}\'')
    fork(server, pipeline, "much")
    pipeline.source("SELECT pg_switch_wal()", "CREATE TABLE public.more ()")
    pipeline.apply()
    assert pipeline.source_rows("SELECT body FROM public.t WHERE id = 100") == [("lost",)]
    assert pipeline.target_rows("SELECT body FROM public.t WHERE id = 100") == []


def test_a_crash_is_not_taken_for_a_copy(server: PostgresServer, pipeline: PipelineUnderTest) -> None:
    """The slot's acknowledged position falls back after a crash, but its ``restart_lsn`` does not."""
    for _ in range(2):
        advance(pipeline, "before the crash")
        pipeline.source("UPDATE public.t SET body = 'unsaved' WHERE id = 1")
        pipeline.apply()
        server.kill()
        server.start()
        advance(pipeline, "after the crash")
    pipeline.source(*LOST)
    assert_healed(pipeline)
