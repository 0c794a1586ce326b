"""The steps of a files sink: at each the run dies, or is overtaken while halted; in the end each change exists once.

The places follow each other in one pipeline's life, while writers are active all the time. Steps outside the sink are
covered in ``test_failpoints.py``.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_cdc_provider.engine.sinks import files, lake
from tests.conftest import Databases
from tests.selection import Some
from tests.support.audited import AUDITED, LONG_PAUSE, writing
from tests.support.files_pipeline import FilesPipeline, assert_files_exactly_once
from tests.support.files_runs import finish, kill
from tests.support.sparkless import DONE, FAILED, SparklessRun

pytestmark = pytest.mark.slow


# Each with the pass at which it is armed: every step appends entries and links files.
BEGINNING = ("before-entry:1", "before-link:1", "after-link:2", "before-plan:1", "after-plan:1", "after-entry:1")


OWNING = ("before-epoch:1", "after-epoch:1", "before-entry:1", "after-entry:1", "before-manifest:1")


CHUNKS = (
    *("before-chunk-staged:1", "after-chunk-staged:1", "before-chunk-prepared:1", "before-chunk-commit:1"),
    *("after-chunk-commit:1", "before-entry:3", "after-entry:3", "before-link:9", "after-link:9"),
)


UNITS = (
    *("before-batch-staged:1", "after-batch-staged:1", "before-batch-commit:1", "in-batch-commit:1"),
    *("after-batch-commit:1", "before-manifest:3", "in-manifest:3", "after-manifest:3"),
)


REREADS = ("before-reread-commit:1", "after-reread-commit:1")


DDL = ("before-redefinition:1", "after-redefinition:1")


ELSEWHERE = {"before-step", "after-step", "before-compaction", "after-compaction"}


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> Iterator[FilesPipeline]:
    made = FilesPipeline(tmp_path, databases, ["public.t"])
    made.change(snapshot={"chunk_rows": 150})
    made.source(AUDITED)
    yield made
    for process in multiprocessing.active_children():
        process.kill()


def overtake(pipeline: FilesPipeline, place: str) -> None:
    name, _, number = place.partition(":")
    paused = SparklessRun(pipeline.file, f"{name}:pause:{number}")
    try:
        paused.await_pause()
        overtaking = SparklessRun(pipeline.file, takeover=True)
        assert (overtaking.wait(), overtaking.message) == (DONE, ""), place
    finally:
        paused.resume()
    assert paused.wait() in (DONE, FAILED), place
    assert "Traceback" not in paused.message, paused.message


def test_the_walk_passes_all_places() -> None:
    folders = [Path(package.__file__ or "").parent for package in (files, lake)]
    found = {
        name
        for folder in folders
        for file in folder.glob("*.py")
        for name in re.findall(r'\bfailpoint\("([^"]+)"\)', file.read_text(encoding="utf-8"))
    }
    walked = {place.partition(":")[0] for place in (*BEGINNING, *OWNING, *CHUNKS, *UNITS, *REREADS, *DDL)}
    assert found - ELSEWHERE <= walked


def test_runs_that_die_leave_nothing_out_and_nothing_twice(pipeline: FilesPipeline, some: Some) -> None:
    with writing(pipeline.databases.source, LONG_PAUSE):
        for place in some((*BEGINNING, *OWNING, *CHUNKS, *UNITS, *OWNING)):
            kill(pipeline, place)
        finish(pipeline)
    pipeline.apply()
    assert_files_exactly_once(pipeline, 10)
    pipeline.assert_verified()


@pytest.mark.parametrize("place", ["before-chunk-commit:2", "before-link:12"])
def test_a_run_that_is_overtaken_in_the_snapshot_adds_nothing(pipeline: FilesPipeline, place: str) -> None:
    with writing(pipeline.databases.source, LONG_PAUSE):
        overtake(pipeline, place)
        finish(pipeline)
    pipeline.apply()
    assert_files_exactly_once(pipeline, 10)
    pipeline.assert_verified()


@pytest.mark.thorough
def test_runs_that_are_overtaken_in_the_stream_add_nothing(pipeline: FilesPipeline) -> None:
    with writing(pipeline.databases.source, LONG_PAUSE):
        finish(pipeline)
        for place in ("after-batch-staged:1", "in-batch-commit:1", "before-link:3", "before-manifest:2", *OWNING[:3]):
            overtake(pipeline, place)
        finish(pipeline)
    pipeline.apply()
    assert_files_exactly_once(pipeline, 10)
    pipeline.assert_verified()


def test_re_reads_and_changes_of_schema_that_break_off_are_taken_up_again(pipeline: FilesPipeline) -> None:
    with writing(pipeline.databases.source, LONG_PAUSE):
        finish(pipeline)
        for place in REREADS:
            kill(pipeline, place, reread=["public.t"])
        finish(pipeline)
        for n, place in enumerate(DDL):
            pipeline.source(
                f"ALTER TABLE public.t ADD COLUMN more{n} int", f"UPDATE public.t SET more{n} = 7 WHERE id = 3"
            )
            kill(pipeline, place)
            finish(pipeline)
    pipeline.apply()
    pipeline.assert_verified()
