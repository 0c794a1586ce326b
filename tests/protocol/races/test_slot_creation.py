"""Changes that happen while the creation of the slot waits for older transactions: Postgres ignores them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
import pytest

from airflow_cdc_provider.engine.core.errors import Blocked
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.sources.postgres.provision import slot
from tests.conftest import PIPELINE_ROLE, ServerMaker
from tests.protocol.races.scene import Make, await_waiting
from tests.support.databases import query_rows, transaction
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

CREATED = "SELECT 1 FROM pg_replication_slots WHERE database = current_database() AND confirmed_flush_lsn IS NOT NULL"
ROWS = "INSERT INTO public.t SELECT n, 'new' FROM generate_series({0}, {0} + 9) n"
WAITS = "wait_event = 'transactionid' AND query LIKE '%pg_create_logical_replication_slot%'"


def elsewhere(n: int) -> str:
    return f"INSERT INTO public.elsewhere VALUES ({n})"


@contextmanager
def creating(pipeline: PipelineUnderTest) -> Iterator[tuple[Future[Record], psycopg.Connection[Any]]]:
    """Yield the provisioning, with a table truncated while the slot is created, and a transaction that is open then."""
    dsn = pipeline.databases.source
    pipeline.source("CREATE TABLE public.elsewhere (id int)")
    with ThreadPoolExecutor(1) as pool, transaction(dsn, elsewhere(1)) as first:
        provisioned = pool.submit(pipeline.provision)
        await_waiting(dsn, f"{WAITS} AND {first.info.backend_pid} = ANY (pg_blocking_pids(pid))")
        with transaction(dsn, elsewhere(2)) as second:
            pipeline.source("TRUNCATE public.t")
            first.commit()
            await_waiting(dsn, f"{WAITS} AND {second.info.backend_pid} = ANY (pg_blocking_pids(pid))")
            # From the first change that may be streamed, Postgres keeps a snapshot that does not know of the truncate.
            with transaction(dsn, ROWS.format(1000)) as third:
                second.commit()
                assert await_condition(lambda: query_rows(dsn, CREATED) == [(1,)], SECONDS)
                yield provisioned, third


@pytest.mark.parametrize("version", ["15", "16", "16, may ask", "18"])
def test_a_table_is_truncated_while_the_slot_is_created(
    make_pipeline: Make, make_server: ServerMaker, request: pytest.FixtureRequest, version: str
) -> None:
    """Rows in the new file can be streamed, whether or not the role may write the record that this requires."""
    binaries = request.getfixturevalue("system_binaries") if version == "15" else None
    pipeline = make_pipeline(make_server(version[:2], binaries=binaries) if version != "16" else None)
    if version == "16, may ask":
        pipeline.source(f"GRANT EXECUTE ON FUNCTION pg_log_standby_snapshot() TO {PIPELINE_ROLE}")
    with creating(pipeline) as (provisioned, third):
        third.commit()
        provisioned.result(SECONDS)
    pipeline.source(ROWS.format(2000))
    pipeline.copy()
    pipeline.source(ROWS.format(3000), "UPDATE public.t SET body = 'changed' WHERE id >= 2000")
    pipeline.apply()
    pipeline.assert_equal()
    pipeline.assert_verified()


def test_who_is_in_the_way_is_named(make_pipeline: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that provisioning has created is removed again."""
    monkeypatch.setattr(slot, "create_slot", partial(slot.create_slot, timeout=5.0))
    pipeline = make_pipeline()
    with creating(pipeline) as (provisioned, third):
        with pytest.raises(Blocked, match=r"moving slot .* beyond its creation") as blocked:
            provisioned.result(SECONDS)
        assert f"session {third.info.backend_pid} of postgres" in str(blocked.value)
    assert pipeline.source_rows(CREATED) == []
    assert pipeline.source_rows("SELECT pubname FROM pg_publication") == []


def test_a_standby_that_has_gone_is_not_waited_for_without_end(
    make_pipeline: Make, make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres does not move a slot beyond the position of its synchronized standbys, and sets no time limit."""
    monkeypatch.setattr(slot, "create_slot", partial(slot.create_slot, timeout=5.0))
    pipeline = make_pipeline(make_server("18"))
    pipeline.source("SELECT pg_create_physical_replication_slot('standby', true)")
    pipeline.source("ALTER SYSTEM SET synchronized_standby_slots = 'standby'")
    pipeline.source("SELECT pg_reload_conf()")
    with creating(pipeline) as (provisioned, third):
        third.commit()
        with pytest.raises(Blocked, match=r"moving slot .* beyond its creation") as blocked:
            provisioned.result(SECONDS)
    assert "synchronized_standby_slots" in blocked.value.solution
    assert pipeline.source_rows(CREATED) == []
