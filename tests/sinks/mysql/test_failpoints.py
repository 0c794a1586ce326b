"""A tour of the steps of the MySQL sink: at each a run dies, or is overtaken while halted; then another continues.

:mod:`tests.protocol.test_failpoints` works in the same way, and also covers the steps that do not depend on the sink.
    The difference here is DDL, which commits automatically: each step of an alteration or an exchange of tables is a
    separate place.
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
from tests.support.audited import AUDITED, LONG_PAUSE, assert_exactly_once, writing
from tests.support.mysql import MysqlPipeline
from tests.support.sparkless import DONE, FAILED, SparklessRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EVERY = {
    name
    for folder in (mysql, transactional)
    for path in Path(folder.__path__[0]).glob("*.py")
    for name in re.findall(r'\bfailpoint\("([^"]+)"\)', path.read_text(encoding="utf-8"))
}
# Omitted places have nothing between them and a neighboring one, or have no counterpart.
LEFT_OUT = {
    *("after-restart", "before-epoch", "after-epoch", "after-plan", "before-redefinition", "after-redefinition"),
    *("before-chunk-staged", "after-chunk-staged", "before-chunk-prepared", "before-batch-commit"),
    *("after-batch-staged", "after-piece-applied", "after-batch-commit", "after-reread-commit"),
}
VIEWS = {name for name in EVERY if "-view-" in name}
"""Places of the upkeep of views, which :mod:`.test_view_steps` walks."""
PLACES = sorted(EVERY - LEFT_OUT - VIEWS)
# An exchange makes room for a definition that only a new read can fill; in a mirror, an alteration follows one.
ALTERED = ("before-alteration", "after-alteration", "before-default-dropped")
EXCHANGED = ("after-aside", "before-exchange", "after-exchange")
FOLLOWED = "ALTER TABLE public.t ADD COLUMN more int DEFAULT 7"
READ_AGAIN = (
    "ALTER TABLE public.t ALTER COLUMN body TYPE varchar(100) USING body || '!',"
    " ADD COLUMN n uuid DEFAULT gen_random_uuid()"
)


@pytest.fixture
def pipelines(databases: Databases, mariadb: MariadbServer, tmp_path: Path) -> Iterator[list[MysqlPipeline]]:
    """Yield a mirror and a changelog of ``public.t``, in three chunks; in the end none of their runs is left."""
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
    """Prepare failpoints at which DDL is followed: a table that is copied and streamed, and has since been changed."""
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
    """Return the arguments that make a run reach failpoints on paths that only a re-read takes."""
    return {"reread": ("public.t",)} if "reread" in place else {}


def chosen(pipelines: list[MysqlPipeline], place: str) -> list[MysqlPipeline]:
    """Return the pipelines that pass the place, and whose outcome the audit trail can predict."""
    return pipelines[:1] if rereads(place) or place in EXCHANGED else pipelines


def check(pipelines: list[MysqlPipeline]) -> None:
    """Bring all up to date; check that the mirror equals the source and that the changelog has everything once."""
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
    # Fail at the second chunk, so that one exists that must stay as it is.
    armed = f"{place}:kill:2" if "-chunk-" in place else f"{place}:kill"
    prepare(walked, place)
    with writing(pipelines[0].databases.source, LONG_PAUSE):
        broken = [SparklessRun(pipeline.file, armed, **rereads(place)) for pipeline in walked]
        ended = [(run.wait(), run.message) for run in broken]
        assert all(code == -9 for code, _ in ended), ended
        again = [SparklessRun(pipeline.file) for pipeline in walked]
        assert [(run.wait(), run.message) for run in again] == [(DONE, "")] * len(walked)
    check(walked)


@pytest.mark.parametrize("place", ["before-plan", "before-chunk-commit", "in-batch-commit", *ALTERED, *EXCHANGED])
def test_a_run_that_is_overtaken_there(pipelines: list[MysqlPipeline], place: str) -> None:
    """What it does after waking up must do no harm: it is fenced, or has nothing left to do."""
    pipeline = pipelines[0 if rereads(place) or place in EXCHANGED else 1]
    prepare([pipeline], place)
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
    check([pipeline])
