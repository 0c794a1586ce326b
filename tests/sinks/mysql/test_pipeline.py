"""A pipeline into MariaDB from end to end: copies, changes, comparisons and re-reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_cdc_provider.engine import commands
from local_servers.mariadb import MariadbServer
from tests.conftest import Databases
from tests.support.audited import AUDITED, assert_exactly_once, await_transactions, writing
from tests.support.mysql import MysqlPipeline
from tests.support.sparkless import DONE, SparklessRun

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_table_under_change_is_copied_and_followed_exactly_once(
    databases: Databases, mariadb: MariadbServer, tmp_path: Path, mode: str
) -> None:
    pipeline = MysqlPipeline(
        tmp_path,
        databases,
        mariadb,
        ["public.t"],
        sink={"mode": mode, "schema": "copy"},
        snapshot={"chunk_rows": 800},
        stream={"max_batch_bytes": "256KiB"},
    )
    pipeline.source(AUDITED)
    with writing(databases.source) as writers:
        for _ in range(2):
            run = SparklessRun(pipeline.file)
            assert (run.wait(), run.message) == (DONE, "")
        await_transactions(writers, 20)  # the runs may be over before much is written
    pipeline.apply()
    if mode == "mirror":
        rows = "SELECT id, body, big FROM {}.t ORDER BY id"
        assert pipeline.target_rows(rows.format('"copy"')) == pipeline.source_rows(rows.format("public"))
    else:
        assert_exactly_once(pipeline, "copy.t", least=10)
    pipeline.assert_verified()
    ((last,),) = pipeline.source_rows("SELECT max(id) FROM public.t")
    pipeline.target(f"UPDATE copy.t SET body = 'spoilt' WHERE id = {last}")
    assert commands.verify(pipeline.pipeline)["equal"] is False
