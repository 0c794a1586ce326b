"""Order in the log, and how far the slot is acknowledged."""

from __future__ import annotations

import psycopg
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.sources.contract import source_of
from airflow_cdc_provider.engine.sources.postgres.recorded_slot import RecordedSlot
from airflow_cdc_provider.engine.spark.session import spark_session
from tests.commands.command_line import CommandLine
from tests.protocol.races.scene import Make, Mode, events
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow


def restart_follows(pipeline: PipelineUnderTest, lsn: int) -> None:
    """Wait until the slot needs no log before ``lsn``, which has been applied.

    It advances at the next record of running transactions, which the server writes from time to time. If an earlier
    record has not been acknowledged yet, however, the slot cannot adopt a later one.
    """

    def follows() -> bool:
        pipeline.source("SELECT pg_log_standby_snapshot()")
        pipeline.apply()
        return parse_lsn(commands.status(pipeline.pipeline)["slot"]["restart_lsn"]) >= lsn

    assert await_condition(follows, SECONDS)


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_rows_of_one_copy(make_pipeline: Make, mode: Mode) -> None:
    """They share the LSN of one record, so that only their number distinguishes them."""
    pipeline = make_pipeline(mode=mode)
    pipeline.provision()
    pipeline.copy()
    with psycopg.connect(pipeline.databases.source) as connection:
        with connection.cursor().copy("COPY public.t FROM STDIN") as copy:
            for key in range(1000, 0, -1):
                copy.write_row((1000 + key, f"copied {key}", None))
        connection.execute("UPDATE public.t SET body = 'and changed' WHERE id = 1500")
    pipeline.apply()
    pipeline.assert_verified()
    if mode == "mirror":
        pipeline.assert_equal()
        return
    keys = [event[1] for event in events(pipeline)]
    assert keys == [*range(2000, 1000, -1), 1500]
    assert pipeline.target_rows(
        "SELECT count(DISTINCT _commit_lsn), count(DISTINCT _seq) FROM public.t WHERE _op <> 'r'"
    ) == [(1, 1001)]


def test_a_stream_that_goes_on_while_another_run_is_checked(make_pipeline: Make) -> None:
    """The slot may be ahead of the record that was read before, or behind the one that is read after it."""
    pipeline = make_pipeline()
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()

    def goes_on() -> Record:
        before = existing_record(pipeline.pipeline)
        pipeline.source("UPDATE public.t SET body = body || '+' WHERE id = 1")
        restart_follows(pipeline, pipeline.marker())
        assert pipeline.confirmed() > before.applied
        record = existing_record(pipeline.pipeline)
        assert RecordedSlot.of(record.identity).seen > RecordedSlot.of(before.identity).seen
        return record

    def read() -> Record:
        record = goes_on()
        goes_on()
        return record

    source_of(pipeline.pipeline).require_continuation([read])
    pipeline.assert_equal()


def test_a_busy_table_beside_an_idle_captured_one(make_pipeline: Make) -> None:
    """The log of tables that are not captured is released from one bounded run to the next."""
    pipeline = make_pipeline()
    pipeline.source("CREATE TABLE public.busy (id int, body text)")
    pipeline.provision()
    pipeline.copy()
    retained, written = [], []
    for _ in range(2):
        start = pipeline.marker()
        pipeline.source("INSERT INTO public.busy SELECT n, repeat(md5(n::text), 20) FROM generate_series(1, 8000) n")
        end = pipeline.marker()
        pipeline.apply()
        restart_follows(pipeline, end)
        written.append(end - start)
        retained.append(commands.status(pipeline.pipeline)["slot"]["retained_bytes"])
    assert min(written) > 4 << 20
    assert max(retained) < min(written) / 4, (retained, written)


def test_the_slot_after_a_bounded_run(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    pipeline.provision()
    pipeline.copy()
    before = commands.status(pipeline.pipeline)["slot"]
    pipeline.source("UPDATE public.t SET body = 'changed'")
    change = pipeline.marker()
    pipeline.apply()
    after = commands.status(pipeline.pipeline)["slot"]
    assert parse_lsn(after["confirmed_flush_lsn"]) >= change
    assert parse_lsn(after["confirmed_flush_lsn"]) <= pipeline.record.applied
    assert parse_lsn(after["restart_lsn"]) >= parse_lsn(before["restart_lsn"])
    restart_follows(pipeline, change)


def test_nothing_is_acknowledged_before_the_first_unit(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    consistent = pipeline.provision().applied
    pipeline.source("UPDATE public.t SET body = 'changed'")
    pipeline.copy()
    assert pipeline.confirmed() <= consistent
    assert pipeline.record.applied == consistent


@pytest.mark.spark
def test_a_lost_slot_on_the_command_line(make_pipeline: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that would continue refuses with exit code 3; ``resnapshot --all`` and a stream repair it."""
    pipeline = make_pipeline()
    command_line = CommandLine(pipeline, capsys)
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    pipeline.source(
        "DELETE FROM public.t WHERE id = 3",
        f"SELECT pg_drop_replication_slot('{pipeline.pipeline.source.slot}')",
    )
    for command in ("stream", "run"):
        refused = command_line.json(command, code=3)["error"]
        assert refused["kind"] == "GateClosed"
        assert "resnapshot --all" in refused["solution"]
    assert pipeline.json("status", code=1)["slot"] is None  # as a process
    assert command_line.json("verify", code=4)["equal"] is False
    with spark_session(pipeline.pipeline.spark_start, "repair"):
        assert command_line.json("resnapshot", "--all")["rows"] == 19
        pipeline.source("INSERT INTO public.t VALUES (3, 'back', NULL)")
        assert command_line.json("stream", "--until", "caught-up")["caught_up"] is True
    assert command_line.json("status")["consistent"] is True
    pipeline.assert_equal()
