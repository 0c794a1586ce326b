"""Losses of the state and of the checkpoint."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from airflow_cdc_provider.engine.core.errors import GateClosed
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.runs.view_work import ViewWork
from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob
from airflow_cdc_provider.engine.state.files import State
from tests.protocol.repairs.scene import DROP_SLOT, LOST, Make, Mode, assert_healed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_state_that_is_gone(make_pipeline: Make, mode: Mode) -> None:
    pipeline = make_pipeline(mode)
    pipeline.source(*LOST)
    shutil.rmtree(pipeline.state)
    assert_healed(pipeline)


def test_each_query_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    """Files that other queries leave or still write there do not matter; only those of later runs are kept."""
    state, root = State(f"file://{tmp_path}"), tmp_path / "checkpoint"
    first, second = (state.new_checkpoint(7) for _ in range(2))
    assert first != second
    assert first.startswith(f"file://{root}/7/")
    for left in ("7/before", "8/overtaken", "9/later", "offsets", "commits"):
        (root / left).mkdir(parents=True)
        (root / left / "0").write_text("v1")
    (root / "metadata").write_text("")  # as versions with one shared checkpoint left it
    state.new_checkpoint(8)
    assert [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()] == ["9/later/0"]


class _Unstoppable:
    """A query of Spark that ignores a request to stop."""

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
            job._follow(_Unstoppable(), None, ViewWork(run))  # type: ignore[arg-type]
