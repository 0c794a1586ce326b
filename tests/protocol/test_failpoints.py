"""A tour of all failpoints: at each the run fails, dies, or is overtaken while halted; then another run continues.

Writers are active all the time. A mirror and a changelog of the same table are made in parallel. In the end the mirror
equals the source, and the changelog holds each change once. The runs are processes without Spark; ``test_crashes.py``
kills runs with Spark at the places where it matters.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import airflow_cdc_provider
from airflow_cdc_provider.engine.core.errors import Failpoint
from airflow_cdc_provider.engine.core.failpoint import VARIABLE, failpoint
from tests.conftest import Databases
from tests.support.audited import AUDITED, LONG_PAUSE, assert_exactly_once, writing
from tests.support.pipelines import PipelineUnderTest
from tests.support.sparkless import DONE, FAILED, SparklessRun

pytestmark = pytest.mark.slow

ENGINE = Path(airflow_cdc_provider.__file__).parent / "engine"
WALKED_ELSEWHERE = [ENGINE / "sinks" / name for name in ("delta", "files", "kafka", "lake", "mysql")]
PLACES = sorted(
    {
        name
        for path in ENGINE.rglob("*.py")
        if not any(path.is_relative_to(sink) for sink in WALKED_ELSEWHERE)
        for name in re.findall(r'\bfailpoint\("([^"]+)"\)', path.read_text(encoding="utf-8"))
        if "-view" not in name
    }
)
# A run that follows one that ended there finds this work done.
ONCE = {"after-plan", "after-redefinition", "unit-cut"}
# The steps of the protocol, each with the failpoints before and after it.
STEPS = {
    "slot creation": ("before-slot", "after-slot"),
    "barrier": ("before-barrier", "after-barrier"),
    "plan written": ("before-plan", "after-plan"),
    "epoch taken": ("before-epoch", "after-epoch"),
    "chunk read": ("before-chunk-read", "after-chunk-read"),
    "chunk staged": ("before-chunk-staged", "after-chunk-staged"),
    "ledger prepared": ("before-chunk-prepared", "before-chunk-commit"),
    "sink commit": ("before-chunk-commit", "after-chunk-commit"),
    "ledger finished": ("before-ledger", "after-ledger"),
    "batch planned": ("before-batch-planned", "after-batch-planned"),
    "batch staged": ("before-batch-staged", "after-batch-staged"),
    "batch committed": ("before-batch-commit", "after-batch-commit"),
    "Spark commit": ("before-spark-commit", "before-acknowledgement"),
    "acknowledgement": ("before-acknowledgement", "after-acknowledgement"),
    "request left": ("after-request",),
    "request carried out": ("before-outcome", "after-outcome"),
}


@pytest.fixture
def pipelines(databases: Databases, tmp_path: Path) -> Iterator[list[PipelineUnderTest]]:
    """Yield a mirror and a changelog of ``public.t``, in three chunks; in the end none of their runs is left."""
    made = []
    for mode in ("mirror", "changelog"):
        directory = tmp_path / mode
        directory.mkdir()
        pipeline = PipelineUnderTest(
            directory,
            databases,
            ["public.t"],
            sink={"mode": mode, "schema": mode},
            snapshot={"chunk_rows": 800},
            stream={"max_batch_bytes": "256KiB"},
        )
        pipeline.name = f"{databases.source.rpartition('/')[2]}_{mode}"
        pipeline.change(pipeline=pipeline.name)
        made.append(pipeline)
    made[0].source(AUDITED)
    yield made
    for process in multiprocessing.active_children():
        process.kill()


def prepare(pipelines: list[PipelineUnderTest], place: str) -> None:
    """Prepare failpoints at which DDL is followed: a table that is copied and streamed, and then gains a column."""
    if place not in ("unit-cut", "before-redefinition", "after-redefinition"):
        return
    for pipeline in pipelines:
        assert SparklessRun(pipeline.file).wait() == DONE
    pipelines[0].source(
        "UPDATE public.t SET body = 'before' WHERE id = 3",
        "ALTER TABLE public.t ADD COLUMN more int DEFAULT 7",
        "UPDATE public.t SET body = 'after' WHERE id = 4",
    )


def rereads(place: str) -> dict[str, tuple[str, ...]]:
    """Return the arguments that make a run reach failpoints on paths that only a re-read takes."""
    if "reread" in place:
        return {"reread": ("public.t",)}
    return {"asked": ("public.t",)} if place.endswith(("-request", "-outcome")) else {}


def check(pipelines: list[PipelineUnderTest]) -> None:
    """Bring both up to date; check that the mirror equals the source and that the changelog has everything once."""
    for pipeline in pipelines:
        pipeline.apply()
        if pipeline.pipeline.sink.mode == "mirror":
            assert pipeline.target_rows("TABLE mirror.t ORDER BY 1") == pipeline.source_rows(
                "TABLE public.t ORDER BY 1"
            )
        else:
            assert_exactly_once(pipeline, "changelog.t", least=10)
        pipeline.assert_verified()


@pytest.mark.parametrize("step", STEPS)
def test_every_step_has_its_places(step: str) -> None:
    assert set(STEPS[step]) <= set(PLACES)


@pytest.mark.parametrize("place", PLACES)
def test_runs_that_end_there(pipelines: list[PipelineUnderTest], place: str) -> None:
    """The mirror's run ends by an error, and the next by its death; the changelog's run only by its death."""
    if rereads(place):
        del pipelines[1]  # a changelog records that rows are re-read; the audit trail does not know it
    mirror, again = pipelines[0], rereads(place)
    # Fail at the second chunk, so that one exists that must stay as it is.
    number = 2 if "-chunk-" in place else 1
    prepare(pipelines, place)
    with writing(mirror.databases.source, LONG_PAUSE):
        failed = SparklessRun(mirror.file, f"{place}:error:{number}", **again)
        assert (failed.wait(), "Failpoint" in failed.message) == (FAILED, True), failed.message
        armed = {pipeline.file: f"{place}:kill:{1 if pipeline is mirror else number}" for pipeline in pipelines}
        killed = [SparklessRun(file, failpoint, **again) for file, failpoint in armed.items()]
        codes = [-9 if pipeline is not mirror or place not in ONCE else DONE for pipeline in pipelines]
        assert [(run.wait(), run.message) for run in killed] == [(code, "") for code in codes]
        last = [SparklessRun(pipeline.file) for pipeline in pipelines]
        assert [(run.wait(), run.message) for run in last] == [(DONE, "")] * len(pipelines)
    check(pipelines)


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_is_overtaken_there(pipelines: list[PipelineUnderTest], place: str) -> None:
    """What it does after waking up must do no harm: it is fenced, or has nothing left to do."""
    del pipelines[0 if not rereads(place) else 1]
    (pipeline,) = pipelines
    prepare(pipelines, place)
    with writing(pipeline.databases.source, LONG_PAUSE):
        paused = SparklessRun(pipeline.file, f"{place}:pause:1", **rereads(place))
        try:
            paused.await_pause()
            overtaking = SparklessRun(pipeline.file, takeover=True)
            assert (overtaking.wait(), overtaking.message) == (DONE, "")
        finally:
            paused.resume()
        assert paused.wait() in (DONE, FAILED)
        assert "Traceback" not in paused.message, paused.message
        after = SparklessRun(pipeline.file)
        assert (after.wait(), after.message) == (DONE, "")
    check(pipelines)


def test_a_failpoint_fires_at_the_pass_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "here:error:3")
    failpoint("here")
    failpoint("elsewhere")
    failpoint("here")
    with pytest.raises(Failpoint, match="here"):
        failpoint("here")
    failpoint("here")
