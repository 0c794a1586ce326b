"""State and checkpoint, which may be lost."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from airflow_cdc_provider.engine.buffer import Position
from airflow_cdc_provider.engine.errors import (
    GateClosed,
)
from airflow_cdc_provider.engine.run import run_part
from airflow_cdc_provider.engine.state import State
from airflow_cdc_provider.engine.stream import StreamJob
from tests.pipelines import PipelineUnderTest
from tests.repairs.scene import DROP_SLOT, LOST, Make, Mode, assert_healed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_state_that_is_gone(make_pipeline: Make, mode: Mode) -> None:
    pipeline = make_pipeline(mode)
    pipeline.source(*LOST)
    shutil.rmtree(pipeline.state)
    assert_healed(pipeline)


def test_a_checkpoint_is_kept_only_if_the_record_bears_it_out(make_pipeline: Make) -> None:
    """It is a cursor: one ahead of the record would skip what has never been applied, so it is made anew."""
    pipeline = make_pipeline()
    with run_part(pipeline.pipeline, "snapshot-0", None) as (run, record):
        job = StreamJob(None, run, record, lambda progress: None)  # type: ignore[arg-type]
        for ahead, block, committed, kept in (
            (0, 0, True, True),
            (0, 0, False, True),
            (-8, 0, True, True),
            (-8, 0, False, False),
            (8, 0, True, False),
            (8, 0, False, False),
            (0, 1, True, False),
        ):
            checkpoint = write_checkpoint(pipeline, Position(record.applied + ahead, block), committed)
            job._discard_foreign_checkpoint()
            assert checkpoint.exists() is kept, (ahead, block, committed)
        for torn in ("metadata", "offsets/6", "offsets/7", "commits/7"):
            for content_left in ("", "v1", "v1\n{", "\0" * 20, "[]"):
                checkpoint = write_checkpoint(pipeline, Position(record.applied), True)
                (checkpoint / torn).write_text(content_left)
                job._discard_foreign_checkpoint()
                assert not checkpoint.exists(), (torn, content_left)
        for lacking in ({7}, {6}, {6, 5}, {5}, {7, 6, 5}):  # with the last but one, all that Spark reads is there
            checkpoint = write_checkpoint(pipeline, Position(record.applied), True)
            (checkpoint / "offsets" / "5").write_text((checkpoint / "offsets" / "6").read_text())
            for batch in lacking:
                (checkpoint / "offsets" / str(batch)).unlink()
            job._discard_foreign_checkpoint()
            assert checkpoint.exists() is (lacking == {5}), lacking


def write_checkpoint(pipeline: PipelineUnderTest, position: Position, committed: bool) -> Path:
    """A checkpoint as Spark leaves it after some batches; gives its directory."""
    checkpoint = pipeline.state / "checkpoint"
    State(pipeline.pipeline.state).remove("checkpoint")
    for folder in ("offsets", "commits"):
        (checkpoint / folder).mkdir(parents=True)
    (checkpoint / "metadata").write_text('{"id":"5a1e"}')
    for batch in (6, 7):
        (checkpoint / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{json.dumps(position.to_json())}")
        if batch == 6 or committed:
            (checkpoint / "commits" / str(batch)).write_text("v1\n{}")
    return checkpoint


class _Unstoppable:
    """A query of Spark that does not end when it is told to."""

    isActive = True

    def stop(self) -> None:
        raise PySparkException("the query did not end within its time limit")


def test_a_query_that_does_not_stop_hides_no_error(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    drop_slot = DROP_SLOT.format(slot=pipeline.pipeline.source.slot)
    with suppress(GateClosed), run_part(pipeline.pipeline, "stream", None) as (run, record):
        job = StreamJob(None, run, record, lambda progress: None)  # type: ignore[arg-type]
        pipeline.source(drop_slot)
        with pytest.raises(GateClosed, match="no longer exists"):
            job._follow(_Unstoppable(), None)  # type: ignore[arg-type]
