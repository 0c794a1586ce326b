"""Two runs of one pipeline: which of them may continue, and what a halted run does when it wakes up.

The other run is a separate process. A failpoint halts it with SIGSTOP at the dangerous places: with a unit staged, in
the sink's transaction, and with the unit committed but not acknowledged.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CannotFollow, ClockDiffers, Fenced, SecondWriter
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.runs.restarting import keep_trying
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sinks.postgres import fence as postgres_fence
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_task import copy_chunk
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import (
    STALE_SECONDS,
    Heartbeat,
    Owner,
    read_heartbeats,
    write_heartbeat,
)
from tests.conftest import Databases
from tests.support.engine_parts import chunk_task
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.sparkless import DONE, FAILED, SparklessRun

pytestmark = pytest.mark.slow

TABLE = "CREATE TABLE public.t (id int PRIMARY KEY, body text)"
ROWS = "INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 20) n"
ROOT = Path(__file__).parents[2]
STREAM = """
import sys
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from tests.support.pipelines import apply_stream
try:
    apply_stream(Pipeline.load(sys.argv[1]), int(sys.argv[2]))
except Exception as e:
    print(type(e).__name__)
"""


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    """Return a changelog whose snapshot is done, in which repeated changes would be visible."""
    under_test = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"mode": "changelog"})
    under_test.source(TABLE, ROWS)
    under_test.provision()
    under_test.copy()
    under_test.apply()
    return under_test


@pytest.fixture
def halted(pipeline: PipelineUnderTest, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """Return a stream that is halted at the failpoint in the fixture's parameter."""
    # Without empty units, the first unit, at which the stream is halted, is that of the change.
    pipeline.change(stream={"heartbeat": "10000 hours"})
    pipeline.source("UPDATE public.t SET body = 'changed' WHERE id <= 5")
    stream = subprocess.Popen(
        [sys.executable, "-c", STREAM, str(pipeline.file), str(pipeline.marker())],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "AIRFLOW_CDC_FAILPOINT": f"{request.param}:pause"},
        stdout=subprocess.PIPE,
        text=True,
    )
    process = psutil.Process(stream.pid)
    try:
        assert await_condition(lambda: process.status() == psutil.STATUS_STOPPED, SECONDS)
        yield stream
    finally:
        stream.kill()
        stream.communicate()


@pytest.mark.parametrize(
    ("halted", "committed", "end"),
    [
        ("before-batch-commit", False, "Fenced"),
        ("in-batch-commit", False, "StreamFailed"),  # its session has been ended, because it held the epoch's row
        ("after-batch-commit", True, "StreamFailed"),
    ],
    indirect=["halted"],
)
def test_a_run_that_is_halted_and_comes_back(
    pipeline: PipelineUnderTest,
    halted: subprocess.Popen[str],
    committed: bool,
    end: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is alive, so it blocks others until one takes over; then the sink refuses everything that it still does."""
    monkeypatch.setattr(postgres_fence, "COMMIT_SECONDS", 1.0)
    with pytest.raises(SecondWriter, match=f"process {halted.pid}") as refused:
        pipeline.apply()
    assert "--takeover" in refused.value.solution
    changed = "SELECT count(*) FROM public.t WHERE body = 'changed'"
    assert pipeline.target_rows(changed) == [(5 if committed else 0,)]

    commands.provision(pipeline.pipeline, takeover=True)
    # Once overtaken, it blocks no other run, although it is alive.
    pipeline.apply()
    assert pipeline.target_rows(changed) == [(5,)]
    pipeline.source("UPDATE public.t SET body = 'later' WHERE id = 1")
    pipeline.apply()

    halted.send_signal(signal.SIGCONT)
    said, _ = halted.communicate(timeout=SECONDS)
    assert said.strip() == end
    pipeline.apply()
    assert pipeline.target_rows(changed) == [(5,)]
    assert pipeline.target_rows("SELECT _op::text, body FROM public.t WHERE id = 1 ORDER BY _commit_lsn, _seq") == [
        ("r", "row 1"),
        ("u", "changed"),
        ("u", "later"),
    ]
    pipeline.assert_verified()


def test_two_first_runs_at_once(databases: Databases, tmp_path: Path) -> None:
    """Neither has an epoch yet. Each would consider the other's slot the remains of a failed attempt."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source(TABLE, ROWS)
    first = SparklessRun(pipeline.file, "after-barrier:pause")
    first.await_pause()
    second = SparklessRun(pipeline.file)
    assert second.wait() == FAILED
    assert second.message.startswith("SecondWriter: another command is making or removing the slot")
    first.resume()
    assert (first.wait(), first.message) == (DONE, "")
    pipeline.assert_equal()


@pytest.mark.parametrize(("age", "refused"), [(1.0, True), (STALE_SECONDS + 1, False)])
def test_a_heartbeat_of_another_host(pipeline: PipelineUnderTest, age: float, refused: bool) -> None:
    """Its process cannot be checked, so its age decides; a stale one is overtaken without a request."""
    state, epoch = State(pipeline.pipeline.state), pipeline.record.epoch
    elsewhere = dataclasses.replace(Owner.this(), host="elsewhere/1")
    write_heartbeat(state, Heartbeat(elsewhere, "stream", epoch, time.time() - age, False, {}))
    assert len(read_heartbeats(state)) == 1
    if refused:
        with pytest.raises(SecondWriter, match="elsewhere"):
            pipeline.apply()
        assert pipeline.record.epoch == epoch
        return
    pipeline.source("UPDATE public.t SET body = 'changed' WHERE id <= 5")
    pipeline.apply()
    assert pipeline.record.epoch > epoch
    pipeline.assert_verified()


def test_a_heartbeat_of_the_future(pipeline: PipelineUnderTest) -> None:
    """It shows clocks that differ, not a second writer."""
    state, epoch = State(pipeline.pipeline.state), pipeline.record.epoch
    elsewhere = dataclasses.replace(Owner.this(), host="elsewhere/1")
    write_heartbeat(state, Heartbeat(elsewhere, "stream", epoch, time.time() + 3600, False, {}))
    with pytest.raises(ClockDiffers, match=r"elsewhere.* is 3[56]\d\d s in the future") as refused:
        pipeline.apply()
    assert "--takeover" in refused.value.solution
    assert pipeline.record.epoch == epoch
    commands.provision(pipeline.pipeline, takeover=True)
    assert pipeline.record.epoch > epoch


def test_a_run_that_was_overtaken_hides_no_heartbeat(tmp_path: Path) -> None:
    """It writes its last line when it notices, and that line concerns a part that the later run has too."""
    state, elsewhere = State(f"file://{tmp_path}"), dataclasses.replace(Owner.this(), host="elsewhere/1")
    later = Heartbeat(Owner.this(), "stream", 8, time.time(), False, {"applied_lsn": "0/8"})
    overtaken = Heartbeat(elsewhere, "stream", 7, time.time(), True, {})
    for beat in (overtaken, later, overtaken):
        write_heartbeat(state, beat)
    assert read_heartbeats(state) == [later]
    # The epochs of another sink, by another clock, may be higher; so a dead run does not hide others either.
    for beat in (dataclasses.replace(later, ended=True), overtaken):
        write_heartbeat(state, beat)
    assert read_heartbeats(state) == [overtaken]


def test_what_a_run_that_has_taken_over_does_is_told_as_that(pipeline: PipelineUnderTest) -> None:
    """The earlier run may see a recreated publication before a commit fences it."""

    def overtaken(_: Record) -> None:
        commands.start_over(pipeline.pipeline, takeover=True)
        raise CannotFollow("the publication has been altered", "Read again.")

    with run_part(pipeline.pipeline, "stream", None) as (run, record), pytest.raises(Fenced, match="taken over"):
        keep_trying(run, record, overtaken)


def test_no_epoch_comes_twice(pipeline: PipelineUnderTest) -> None:
    """A run from before the pipeline was dropped, or its sink restored, commits nothing after it was recreated."""
    sink, backup = sink_of(pipeline.pipeline), pipeline.record
    lost = sink.take_epoch("a run that the backup does not know")
    pipeline.target(f"UPDATE airflow_cdc.pipelines SET epoch = {backup.epoch}")
    assert sink.take_epoch("the first run after it") > lost
    task = chunk_task(pipeline.pipeline, backup.chunks[0].chunk, lost)
    commands.drop(pipeline.pipeline)
    assert isinstance(copy_chunk(task), Fenced)
    pipeline.target("DROP TABLE public.t")
    record = pipeline.provision()
    assert record.epoch > lost
    assert isinstance(copy_chunk(task), Fenced)
    pipeline.copy()
    with pytest.raises(Fenced):
        sink.commit(lost, record.applied, record.applied + 1, [])
    pipeline.apply()
    pipeline.assert_verified()
