"""What is altered while the creation of the slot waits for older transactions: Postgres takes no notice of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from airflow_cdc_provider.demo.servers import await_condition
from tests.conftest import PIPELINE_ROLE
from tests.pipelines import query_rows, transaction
from tests.races.scene import SECONDS, Make, await_waiting

pytestmark = pytest.mark.slow

CREATED = "SELECT 1 FROM pg_replication_slots WHERE database = current_database() AND confirmed_flush_lsn IS NOT NULL"
WAITS = "wait_event = 'transactionid' AND query LIKE '%pg_create_logical_replication_slot%'"


def elsewhere(n: int) -> str:
    return f"INSERT INTO public.elsewhere VALUES ({n})"


@pytest.mark.parametrize("may_ask", [True, False])
def test_a_table_is_truncated_while_the_slot_is_created(make_pipeline: Make, may_ask: bool) -> None:
    """What goes into its new file can be streamed, whether the role may write the record that it takes or not."""
    rows = "INSERT INTO public.t SELECT n, 'new' FROM generate_series({0}, {0} + 9) n"
    pipeline = make_pipeline()
    dsn = pipeline.databases.source
    pipeline.source("CREATE TABLE public.elsewhere (id int)")
    if may_ask:
        pipeline.source(f"GRANT EXECUTE ON FUNCTION pg_log_standby_snapshot() TO {PIPELINE_ROLE}")
    with ThreadPoolExecutor(1) as pool, transaction(dsn, elsewhere(1)) as first:
        provisioned = pool.submit(pipeline.provision)
        await_waiting(dsn, f"{WAITS} AND {first.info.backend_pid} = ANY (pg_blocking_pids(pid))")
        with transaction(dsn, elsewhere(2)) as second:
            pipeline.source("TRUNCATE public.t")
            first.commit()
            await_waiting(dsn, f"{WAITS} AND {second.info.backend_pid} = ANY (pg_blocking_pids(pid))")
            # From the first change on that may be streamed, Postgres keeps the snapshot that knows nothing of it.
            with transaction(dsn, rows.format(1000)) as third:
                second.commit()
                assert await_condition(lambda: query_rows(dsn, CREATED) == [(1,)], SECONDS)
                third.commit()
        provisioned.result()
    pipeline.source(rows.format(2000))
    pipeline.copy()
    pipeline.source(rows.format(3000), "UPDATE public.t SET body = 'changed' WHERE id >= 2000")
    pipeline.apply()
    pipeline.assert_equal()
    pipeline.assert_verified()
