"""The slot's budget while a server is down."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CdcError, Fenced, SlotBudgetExceeded
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.slots import read_slot
from airflow_cdc_provider.engine.runs.restarting import keep_trying
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.postgres.provision import slot
from airflow_cdc_provider.engine.sources.postgres.provision.slot import drop_free_slot, end_walsender
from airflow_cdc_provider.engine.sources.postgres.wal.wal_reader import WalReader
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner, write_heartbeat
from tests.protocol.outages.conftest import Pair
from tests.protocol.outages.scene import QUICK, applied, copied, marker
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.spark_streaming import SparkStreaming
from tests.support.streaming import Streaming

pytestmark = pytest.mark.slow


def overflow(pipeline: PipelineUnderTest) -> None:
    """Write more log than the budget in these tests allows."""
    pipeline.source("SELECT pg_logical_emit_message(false, 'test', repeat('x', 1000000)) FROM generate_series(1, 3)")


@pytest.mark.parametrize("action", ["warn", "stop", "drop-slot"])
def test_the_budget_is_kept_while_the_target_is_down(
    pair: Pair, make: Callable[..., PipelineUnderTest], action: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = copied(make(restart=QUICK | {"attempts": 10_000}, max_retained_wal="2MiB", on_max_retained_wal=action))
    stream = Streaming(pipeline)
    first = marker(pipeline)
    stream.until(lambda: applied(pipeline) >= first, "the first marker")
    pair.target.stop("immediate")
    stream.await_trouble("Connection refused")
    overflow(pipeline)
    slot = pipeline.pipeline.source.slot
    if action == "warn":
        stream.until(lambda: "of stream.max_retained_wal (2.0 MiB)" in caplog.text, "the warning")
        budget = commands.status(pipeline.pipeline)["slot"]["budget"]
        assert budget == {"max_retained_bytes": 2 << 20, "action": "warn", "level": "exceeded"}
        assert "of 2.0 MiB (above the budget)" in pipeline.run("status").stdout
        pair.target.start()
        end = marker(pipeline)
        stream.until(lambda: applied(pipeline) >= end, "the end")
        stream.end()
        return
    stream.join(SECONDS)
    assert isinstance(stream.failure, SlotBudgetExceeded)
    assert "stream.max_retained_wal is 2.0 MiB" in stream.failure.message
    with connected(pair.source.dsn()) as source:
        assert (read_slot(source, slot) is None) == (action == "drop-slot")


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_stream_that_works_drops_its_slot_at_a_heartbeat(pair: Pair, make: Callable[..., PipelineUnderTest]) -> None:
    """Between two checkpoints, more is written than the budget allows."""
    pipeline = copied(make(max_retained_wal="2MiB", on_max_retained_wal="drop-slot"))
    with SparkStreaming(pipeline) as stream:
        first = marker(pipeline)
        stream.until(lambda: applied(pipeline) >= first, "the first marker")
        overflow(pipeline)
        failure = stream.failure()
    assert isinstance(failure, SlotBudgetExceeded)
    assert failure.exit_code == 3
    assert "stream.max_retained_wal is 2.0 MiB" in failure.message
    assert not has_slot(pair, pipeline)
    status = commands.status(pipeline.pipeline)
    assert (status["state"], status["last_error"]["kind"]) == ("needs attention", "SlotBudgetExceeded")


def beyond_the_budget(pipeline: PipelineUnderTest, before: Callable[[], None]) -> CdcError:
    """Return the error of a job that finds its slot beyond the budget after an event."""

    def attempt(record: Record) -> None:
        before()
        raise SlotBudgetExceeded("too much", "Drop it.")

    with pytest.raises(CdcError) as raised, run_part(pipeline.pipeline, "stream", None) as (run, record):
        keep_trying(run, record, attempt)
    return raised.value


def has_slot(pair: Pair, pipeline: PipelineUnderTest) -> bool:
    with connected(pair.source.dsn()) as source:
        return read_slot(source, pipeline.pipeline.source.slot) is not None


@pytest.mark.parametrize("sink", ["works", "is down"])
def test_a_run_that_was_overtaken_leaves_the_slot_alone(
    pair: Pair, make: Callable[..., PipelineUnderTest], sink: str
) -> None:
    pipeline = copied(make(on_max_retained_wal="drop-slot"))

    def overtaken() -> None:
        if sink == "works":
            pipeline.target("UPDATE airflow_cdc.pipelines SET epoch = epoch + 1")
        else:
            epoch = pipeline.record.epoch + 1
            beat = Heartbeat(Owner("elsewhere", 1, 1), "snapshot-0", epoch, time.time(), False, {})
            write_heartbeat(State(pipeline.pipeline.state), beat)
            pair.target.stop("immediate")

    assert isinstance(beyond_the_budget(pipeline, overtaken), Fenced)
    assert has_slot(pair, pipeline)


def test_nobody_takes_over_while_the_slot_is_dropped(
    pair: Pair, make: Callable[..., PipelineUnderTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = copied(make(on_max_retained_wal="drop-slot"))
    seen: list[int] = []

    def drop(*arguments: Any) -> None:
        monkeypatch.undo()
        with pytest.raises(psycopg.errors.LockNotAvailable):
            pipeline.target("SET lock_timeout = '200ms'; UPDATE airflow_cdc.pipelines SET epoch = epoch + 1")
        seen.append(1)
        drop_free_slot(*arguments)

    monkeypatch.setattr(slot, "drop_free_slot", drop)
    assert isinstance(beyond_the_budget(pipeline, lambda: None), SlotBudgetExceeded)
    assert seen
    assert not has_slot(pair, pipeline)


def test_a_run_that_is_overtaken_while_it_ends_its_reader_leaves_the_slot_alone(
    pair: Pair, make: Callable[..., PipelineUnderTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = copied(make(on_max_retained_wal="drop-slot"))

    def end(*arguments: Any) -> None:
        end_walsender(*arguments)
        pipeline.target("SET lock_timeout = '200ms'; UPDATE airflow_cdc.pipelines SET epoch = epoch + 1")

    monkeypatch.setattr(slot, "end_walsender", end)
    assert isinstance(beyond_the_budget(pipeline, lambda: None), Fenced)
    assert has_slot(pair, pipeline)


def test_a_run_that_is_overtaken_before_it_ends_its_reader_leaves_the_others_alone(
    pair: Pair, make: Callable[..., PipelineUnderTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs read under the pipeline's name."""
    pipeline = copied(make(on_max_retained_wal="drop-slot"))
    names, readers = pipeline.pipeline.source, list[WalReader]()

    def end(*arguments: Any) -> None:
        pipeline.target("UPDATE airflow_cdc.pipelines SET epoch = epoch + 1")
        readers.append(WalReader(names.dsn, names.slot, names.publication, pipeline.record.applied))
        end_walsender(*arguments)

    monkeypatch.setattr(slot, "end_walsender", end)
    try:
        assert isinstance(beyond_the_budget(pipeline, lambda: None), Fenced)
        with connected(pair.source.dsn()) as source:
            state = read_slot(source, names.slot)
        assert state is not None
        assert state.active
    finally:
        for reader in readers:
            reader.close()


def test_a_slot_that_cannot_be_dropped(pair: Pair, make: Callable[..., PipelineUnderTest]) -> None:
    pipeline = copied(make(on_max_retained_wal="drop-slot"))
    error = beyond_the_budget(pipeline, lambda: pair.source.stop("immediate"))
    assert isinstance(error, SlotBudgetExceeded)
    assert error.message.startswith("too much; it could not be dropped: ")
    assert "Connection refused" in error.message
    assert f"pg_drop_replication_slot('{pipeline.pipeline.source.slot}')" in error.solution
    pair.source.start()
    assert has_slot(pair, pipeline)
