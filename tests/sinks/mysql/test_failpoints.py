"""A walk over the steps of the MySQL sink: at each a run dies, or is overtaken while it stands still; then it goes on.

As in :mod:`tests.protocol.test_failpoints`, where the steps that do not depend on the sink are walked, too. What is
different here is DDL, which commits by itself: each step of an alteration or an exchange of tables is a place of its
own.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_cdc_provider.engine.sinks import mysql, transactional
from local_servers.mariadb import MariadbServer
from tests.conftest import Databases
from tests.support.audited import AUDITED, assert_exactly_once, writing
from tests.support.mysql import MysqlPipeline
from tests.support.sparkless import DONE, FAILED, SparklessRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EVERY = {
    name
    for folder in (mysql, transactional)
    for path in Path(folder.__path__[0]).glob("*.py")
    for name in re.findall(r'\bfailpoint\("([^"]+)"\)', path.read_text(encoding="utf-8"))
}
# Nothing is done between a step and the place before or after it that is left out; the others have no other side.
LEFT_OUT = {
    *("after-restart", "before-epoch", "after-epoch", "after-plan", "before-redefinition", "after-redefinition"),
    *("before-chunk-staged", "after-chunk-staged", "before-chunk-prepared", "before-batch-commit"),
    *("after-batch-staged", "after-piece-applied", "after-batch-commit", "after-reread-commit"),
}
PLACES = sorted(EVERY - LEFT_OUT)
# An exchange makes room for a definition that only a new read can fill; an alteration follows one in a mirror.
ALTERED = ("before-alteration", "after-alteration", "before-default-dropped")
EXCHANGED = ("after-aside", "before-exchange", "after-exchange")
FOLLOWED = "ALTER TABLE public.t ADD COLUMN more int DEFAULT 7"
READ_AGAIN = (
    "ALTER TABLE public.t ALTER COLUMN body TYPE varchar(100) USING body || '!',"
    " ADD COLUMN n uuid DEFAULT gen_random_uuid()"
)


@pytest.fixture
def pipelines(databases: Databases, mariadb: MariadbServer, tmp_path: Path) -> Iterator[list[MysqlPipeline]]:
    """A mirror and a changelog of ``public.t``, in three chunks; in the end no run of theirs is left."""
    made = []
    for mode in ("mirror", "changelog"):
        directory = tmp_path / mode
        directory.mkdir()
        pipeline = MysqlPipeline(
            directory,
            databases,
            mariadb,
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


def prepare(pipelines: list[MysqlPipeline], place: str) -> None:
    """For the places at which DDL is followed: a table that is copied and streamed, and has been changed since."""
    if place not in (*ALTERED, *EXCHANGED):
        return
    for pipeline in pipelines:
        assert SparklessRun(pipeline.file).wait() == DONE
    pipelines[0].source(
        "UPDATE public.t SET body = 'before' WHERE id = 3",
        READ_AGAIN if place in EXCHANGED else FOLLOWED,
        "UPDATE public.t SET body = 'after' WHERE id = 4",
    )


def rereads(place: str) -> dict[str, tuple[str, ...]]:
    """What a run is given to get to places that are on the way only when a table is to be read again."""
    return {"reread": ("public.t",)} if "reread" in place else {}


def chosen(pipelines: list[MysqlPipeline], place: str) -> list[MysqlPipeline]:
    """Those for which the place is on the way, and the audit trail knows what is to come of it."""
    return pipelines[:1] if rereads(place) or place in EXCHANGED else pipelines


def check(pipelines: list[MysqlPipeline]) -> None:
    """Bring all up to date; the mirror is the source, the changelog has everything once."""
    for pipeline in pipelines:
        pipeline.apply()
        if pipeline.pipeline.sink.mode == "mirror":
            names = "id, body, big"
            copies = pipeline.target_rows(f"SELECT {names} FROM mirror.t ORDER BY 1")
            assert copies == pipeline.source_rows(f"SELECT {names} FROM public.t ORDER BY 1")
        else:
            assert_exactly_once(pipeline, "changelog.t", least=10)
        pipeline.assert_verified()
    left = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'airflow_cdc'"
    assert pipelines[0].target_rows(f"{left} AND table_name REGEXP '^(stage|aside)_'") == []
    assert pipelines[0].target_rows("SELECT * FROM airflow_cdc.pending") == []


def test_every_place_is_walked_or_left_out_by_name() -> None:
    assert LEFT_OUT < EVERY
    assert {*ALTERED, *EXCHANGED} < set(PLACES)


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_is_killed_there(pipelines: list[MysqlPipeline], place: str) -> None:
    walked = chosen(pipelines, place)
    # Of chunks the second, so that there is one that must stay as it is.
    armed = f"{place}:kill:2" if "-chunk-" in place else f"{place}:kill"
    prepare(walked, place)
    with writing(pipelines[0].databases.source):
        broken = [SparklessRun(pipeline.file, armed, **rereads(place)) for pipeline in walked]
        ended = [(run.wait(), run.message) for run in broken]
        assert all(code == -9 for code, _ in ended), ended
        again = [SparklessRun(pipeline.file) for pipeline in walked]
        assert [(run.wait(), run.message) for run in again] == [(DONE, "")] * len(walked)
    check(walked)


@pytest.mark.parametrize("place", ["before-plan", "before-chunk-commit", "in-batch-commit", *ALTERED, *EXCHANGED])
def test_a_run_that_is_overtaken_there(pipelines: list[MysqlPipeline], place: str) -> None:
    """What it does when it wakes up must do no harm: it is fenced, or has nothing left to do."""
    pipeline = pipelines[0 if rereads(place) or place in EXCHANGED else 1]
    prepare([pipeline], place)
    with writing(pipeline.databases.source):
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
    check([pipeline])
