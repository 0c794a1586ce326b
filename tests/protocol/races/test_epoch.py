"""Two runs at once: only the run with the latest epoch commits."""

from __future__ import annotations

import threading

import pytest

from airflow_cdc_provider.engine.core.errors import Fenced
from airflow_cdc_provider.engine.core.record import Watermark
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_task import copy_chunk
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_read import SnapshotReader
from airflow_cdc_provider.engine.sources.postgres.source import PostgresSource
from tests.protocol.races.scene import Make, await_waiting
from tests.support.engine_parts import chunk_task, copy_chunk_of
from tests.support.given_rows import GivenRows
from tests.support.patience import SECONDS

pytestmark = pytest.mark.slow


def test_an_old_epoch_commits_nothing(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    record = pipeline.provision()
    sink = sink_of(pipeline.pipeline)
    pipeline.copy(0)
    task = chunk_task(pipeline.pipeline, pipeline.chunk(1).chunk)
    assert sink.take_epoch("another") > record.epoch
    assert isinstance(copy_chunk(task), Fenced)
    assert pipeline.chunk(1).watermark is None
    with pytest.raises(Fenced):
        sink.commit(record.epoch, record.applied, record.applied + 1, [])
    with pytest.raises(Fenced):
        sink.replace(record.epoch, task.target, None, GivenRows([], pytest.fail), task.target)
    assert pipeline.record.applied == record.applied
    assert pipeline.target_rows("SELECT count(*) FROM public.t") == [(10,)]
    pipeline.copy(1)
    pipeline.apply()
    pipeline.assert_equal()


def test_a_run_that_is_overtaken_at_the_gate_does_not_begin(
    make_pipeline: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = make_pipeline()
    epoch, enter = pipeline.provision().epoch, PostgresSource.enter

    def overtaken(source: PostgresSource, part: str) -> None:
        enter(source, part)
        sink_of(pipeline.pipeline).take_epoch("another")

    monkeypatch.setattr(PostgresSource, "enter", overtaken)
    with pytest.raises(Fenced), run_part(pipeline.pipeline, "snapshot", epoch):
        pytest.fail("began")


def test_taking_over_waits_for_a_commit_in_flight(make_pipeline: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old writer's commit either precedes the new epoch, and counts, or never happens."""
    pipeline = make_pipeline()
    record = pipeline.provision()
    sink = sink_of(pipeline.pipeline)
    finish = SnapshotReader.finish
    taken: list[int] = []
    thread = threading.Thread(target=lambda: taken.append(sink.take_epoch("another")))

    def take_over(reader: SnapshotReader) -> Watermark:
        thread.start()
        await_waiting(
            pipeline.databases.target, "wait_event_type = 'Lock' AND query LIKE '%airflow_cdc.pipelines%FOR UPDATE'"
        )
        return finish(reader)

    monkeypatch.setattr(SnapshotReader, "finish", take_over)
    assert copy_chunk_of(pipeline.pipeline, pipeline.chunk(0).chunk) == 10
    thread.join(SECONDS)
    assert taken == [pipeline.record.epoch]
    assert taken != [record.epoch]
    assert pipeline.chunk(0).watermark is not None
    monkeypatch.setattr(SnapshotReader, "finish", finish)
    assert isinstance(copy_chunk_of(pipeline.pipeline, pipeline.chunk(1).chunk, record.epoch), Fenced)
