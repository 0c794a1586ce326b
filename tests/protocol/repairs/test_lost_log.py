"""A slot whose log is lost, or about to be lost."""

from __future__ import annotations

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import GateClosed
from airflow_cdc_provider.engine.core.waiting import await_condition
from tests.conftest import ServerMaker
from tests.protocol.repairs.scene import LOST, Make, assert_healed, carry_out, refused
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow


def write_log(pipeline: PipelineUnderTest, megabytes: int) -> None:
    """Write log that concerns no captured table, and let the server remove log that it need not keep."""
    for _ in range(megabytes):
        pipeline.source("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1 << 20))")
    pipeline.source("SELECT pg_switch_wal()", "CHECKPOINT")


def wal_status(pipeline: PipelineUnderTest) -> str:
    return str(commands.status(pipeline.pipeline)["slot"]["wal_status"])


@pytest.mark.parametrize(("version", "reason"), [("16", "wal_status = lost"), ("18", "wal_status = lost, wal_removed")])
def test_a_slot_that_has_lost_its_log(make_pipeline: Make, make_server: ServerMaker, version: str, reason: str) -> None:
    """Newer servers also report the reason."""
    settings = {"max_slot_wal_keep_size": "2MB", "min_wal_size": "32MB", "max_wal_size": "32MB"}
    pipeline = make_pipeline("changelog", make_server(version, settings))
    pipeline.source(*LOST)
    write_log(pipeline, 40)
    assert wal_status(pipeline) == "lost"
    solution = refused(pipeline, GateClosed, rf"has lost the log it needs \({reason}\)")
    assert "max_slot_wal_keep_size" in solution
    carry_out(pipeline, solution)
    assert_healed(pipeline)


def test_a_slot_that_is_about_to_lose_its_log(
    make_pipeline: Make, make_server: ServerMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost yet, if the stream continues in time: a warning is given, and the stream catches up."""
    server = make_server(settings={"max_slot_wal_keep_size": "1MB", "checkpoint_timeout": "1h", "max_wal_size": "4GB"})
    pipeline = make_pipeline("changelog", server)
    pipeline.source(*LOST)
    for _ in range(40):
        pipeline.source("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1 << 20))")
    assert wal_status(pipeline) == "unreserved"
    assert_healed(pipeline)
    assert "wal_status = unreserved" in caplog.text
    pipeline.source("SELECT pg_log_standby_snapshot()")
    pipeline.apply()
    assert wal_status(pipeline) == "reserved"


def test_a_slot_that_has_been_invalidated(make_pipeline: Make, make_server: ServerMaker) -> None:
    """Postgres 18 invalidates slots that have been idle for some time."""
    pipeline = make_pipeline("changelog", make_server("18", {"idle_replication_slot_timeout": "1s"}))
    pipeline.source(*LOST)
    query = f"SELECT invalidation_reason FROM pg_replication_slots WHERE slot_name = '{pipeline.pipeline.source.slot}'"

    def invalidated() -> bool:
        pipeline.source("CHECKPOINT")
        return pipeline.source_rows(query) == [("idle_timeout",)]

    assert await_condition(invalidated, SECONDS)
    solution = refused(pipeline, GateClosed, "lost, idle_timeout")
    assert "idle_replication_slot_timeout" in solution
    pipeline.source("ALTER SYSTEM SET idle_replication_slot_timeout = 0", "SELECT pg_reload_conf()")
    carry_out(pipeline, solution)
    assert_healed(pipeline)
