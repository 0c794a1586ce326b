"""Views of pipelines under change: runs fail, die or are overtaken at every step of a view, and at any moment.

Two tables are joined, and change all the time: keys, foreign keys, names, and rows that lose and gain partners. One
view has a row for each row of the first table and queues large changes, one is an aggregate that moves with every
unit, and one is refreshed only now and then.
"""

from __future__ import annotations

import multiprocessing
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

import airflow_cdc_provider
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.sinks.contract import KeepsViews
from tests.conftest import Databases
from tests.support.audited import AUDITED, LONG_PAUSE, writing
from tests.support.pipelines import PipelineUnderTest
from tests.support.sparkless import DONE, FAILED, SparklessRun
from tests.support.threads import Stoppable

pytestmark = pytest.mark.slow

SINKS = Path(airflow_cdc_provider.__file__).parent / "engine" / "sinks"
PLACES = sorted(
    name
    for name in {
        name
        for path in [*(SINKS / "transactional").glob("*.py"), *(SINKS / "postgres").glob("*.py")]
        for name in re.findall(r'\bfailpoint\("([^"]+)"\)', path.read_text(encoding="utf-8"))
    }
    if "-view" in name
)
GROUPED = (
    "CREATE TABLE public.g (id int PRIMARY KEY, name text)",
    "INSERT INTO public.g SELECT n, 'g' || n % 5 FROM generate_series(0, 29) n",
    "ALTER TABLE public.t ADD grp int DEFAULT 3",
    "UPDATE public.t SET grp = id % 31",
)
VIEWS = {
    "dwd.wide": {
        "sql": "SELECT t.id, t.body, length(t.big) AS size, g.name FROM public.t LEFT JOIN public.g ON g.id = t.grp",
        "max_rows": 60,
    },
    "dwd.names": {
        "sql": "SELECT g.name, count(*) AS n, sum(length(t.body)) AS size FROM public.g JOIN public.t ON t.grp = g.id"
        " GROUP BY g.name"
    },
    "dwd.groups": {
        "sql": "SELECT g.id, count(t.id) AS n FROM public.g LEFT JOIN public.t ON t.grp = g.id GROUP BY g.id",
        "refresh": "300 ms",
    },
}
STATEMENTS = (
    "UPDATE public.t SET grp = (%(a)s + id) %% 32 WHERE id BETWEEN %(a)s AND %(a)s + 5",
    "UPDATE public.t SET grp = NULL WHERE id = %(a)s",
    "UPDATE public.g SET name = 'g' || %(b)s %% 5 WHERE id = %(b)s",
    "DELETE FROM public.g WHERE id = %(b)s",
    "INSERT INTO public.g VALUES (%(b)s, 'new') ON CONFLICT DO NOTHING",
)


class Mover(Stoppable):
    """A session that keeps changing which rows are joined."""

    def __init__(self, dsn: str) -> None:
        super().__init__("mover")
        self._dsn = dsn

    def work(self) -> None:
        chance = random.Random(7)
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._halt.wait(LONG_PAUSE / 4):
                values = {"a": chance.randint(1, 2200), "b": chance.randint(0, 31)}
                connection.execute(chance.choice(STATEMENTS), values)


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> Iterator[PipelineUnderTest]:
    made = PipelineUnderTest(tmp_path, databases, ["public.t", "public.g"], sink={"views": VIEWS})
    made.source(AUDITED, *GROUPED)
    yield made
    made.end_commands()
    for process in multiprocessing.active_children():
        process.kill()


@contextmanager
def stopping(mover: Mover) -> Iterator[None]:
    """Let a session work during the block."""
    mover.start()
    try:
        yield
    finally:
        mover.stop()


@contextmanager
def changing(pipeline: PipelineUnderTest) -> Iterator[None]:
    """Change both tables during the block."""
    with writing(pipeline.databases.source, LONG_PAUSE), stopping(Mover(pipeline.databases.source)):
        yield


def compare(pipeline: PipelineUnderTest) -> int:
    """Compare the views that are up to date with their SELECTs, in one snapshot; return their number."""
    sink = sink_of(pipeline.pipeline)
    assert isinstance(sink, KeepsViews)
    compared = 0
    with psycopg.connect(pipeline.databases.target) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        ready = connection.execute(
            "SELECT settings ->> 'name', settings ->> 'sql' FROM airflow_cdc.views"
            " WHERE complete AND kept AND behind_lsn IS NULL AND relation = settings ->> 'name'"
        ).fetchall()
        for name, select in ready:
            for one, other in ((select, f"TABLE dwd.{name}"), (f"TABLE dwd.{name}", select)):
                wrong = connection.execute(f"SELECT * FROM ({one}) a EXCEPT ALL SELECT * FROM ({other}) b").fetchall()
                assert not wrong, (name, one[:9], wrong[:3])
            compared += 1
    return compared


def check(pipeline: PipelineUnderTest) -> None:
    """Bring everything up to date; check that mirror and views are right."""
    last = SparklessRun(pipeline.file)
    assert (last.wait(), last.message) == (DONE, "")
    assert compare(pipeline) == len(VIEWS)
    pipeline.assert_equal("public.t")
    pipeline.assert_verified()


def prepare(pipeline: PipelineUnderTest, place: str) -> None:
    """Build the views before failpoints that only built ones reach, and leave them something to do."""
    if place in ("after-view-anchors", "after-view-settled", "before-view-drained"):
        first = SparklessRun(pipeline.file)
        assert (first.wait(), first.message) == (DONE, "")
        pipeline.source("UPDATE public.t SET body = body || '!' WHERE id < 200")


@pytest.mark.parametrize("place", PLACES)
def test_runs_that_end_there(pipeline: PipelineUnderTest, place: str) -> None:
    prepare(pipeline, place)
    with changing(pipeline):
        failed = SparklessRun(pipeline.file, f"{place}:error")
        assert (failed.wait(), "Failpoint" in failed.message) == (FAILED, True), failed.message
        if place != "after-view-reconciled":
            killed = SparklessRun(pipeline.file, f"{place}:kill")
            assert (killed.wait(), killed.message) in ((-9, ""), (DONE, ""))
    check(pipeline)


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_is_overtaken_there(pipeline: PipelineUnderTest, place: str) -> None:
    prepare(pipeline, place)
    with changing(pipeline):
        paused = SparklessRun(pipeline.file, f"{place}:pause")
        paused.await_pause()
        second = SparklessRun(pipeline.file, takeover=True)
        assert (second.wait(), second.message) == (DONE, "")
        compared = compare(pipeline)
        assert compared
        paused.resume()
        assert paused.wait() == FAILED, paused.message
    check(pipeline)


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_commands_that_are_killed_while_readers_look(pipeline: PipelineUnderTest) -> None:
    """Readers of views and mirror in one snapshot find them equal, whatever dies."""
    with changing(pipeline):
        killed = pipeline.start("run", failpoint="before-view-built:kill:2")
        assert killed.wait().code == -9, killed.output()
        killed.kill()
        stream = pipeline.start("stream")
        stream.until(lambda: compare(pipeline) >= 2, "views that are built")
        for _ in range(20):
            pipeline.await_applied(stream)
            compare(pipeline)
        stream.kill()
        assert compare(pipeline)
        stream = pipeline.start("stream", failpoint="after-view-settled:kill:5")
        assert stream.wait().code == -9, stream.output()
        stream.kill()
        stream = pipeline.start("stream")
        pipeline.await_applied(stream)
        assert await_condition(lambda: compare(pipeline) == len(VIEWS), 60)
    pipeline.await_applied(stream)
    pipeline.run("stop")
    assert stream.wait().code == 0, stream.output()
    check(pipeline)
