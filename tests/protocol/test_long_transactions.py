"""Transactions that stay open on the source for long: re-reads wait for them, the stream waits only if it must."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CannotFollow, OlderTransactions
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.postgres.reading import read_barriers, reread, reread_requests
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_job import reread_changed
from airflow_cdc_provider.engine.sources.postgres.stream.unit_writer import UnitWriter
from airflow_cdc_provider.engine.state.files import State
from tests.conftest import PIPELINE_ROLE, Databases, ServerMaker
from tests.support.databases import execute, transaction
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.standby import WITHOUT_STANDBY, commits_that_wait
from tests.support.streaming import Streaming

pytestmark = pytest.mark.slow

TABLES = (
    "CREATE TABLE public.t (id int PRIMARY KEY, a int)",
    "INSERT INTO public.t SELECT n, n FROM generate_series(1, 20) n",
    "CREATE TABLE public.other (id int)",
)
ELSEWHERE = "INSERT INTO public.other VALUES (1)"


def streamed(pipeline: PipelineUnderTest) -> PipelineUnderTest:
    """Create tables, copy them, and let the stream pass H."""
    pipeline.source(*TABLES)
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    return pipeline


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> Iterator[PipelineUnderTest]:
    """Return a pipeline that streams ``public.t``; ``public.other`` is not part of it."""
    made = PipelineUnderTest(tmp_path, databases, ["public.t"])
    yield streamed(made)
    made.end_commands()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record how long, in seconds, each check for older transactions was ready to wait."""
    found: list[float] = []
    original = read_barriers.await_condition

    def noted(condition: object, timeout: float) -> bool:
        found.append(timeout)
        return original(condition, timeout)  # type: ignore[arg-type]

    monkeypatch.setattr(read_barriers, "await_condition", noted)
    return found


def pass_units(pipeline: PipelineUnderTest, stream: Streaming, units: int) -> None:
    """Let the stream apply some units, one after the other, and check the target after each."""
    for _ in range(units):
        pipeline.source("UPDATE public.t SET a = a + 1 WHERE id <= 10")
        marker = pipeline.marker()
        stream.until(lambda: pipeline.record.applied >= marker, "the next unit")  # noqa: B023
        pipeline.assert_equal()


def requested(pipeline: PipelineUnderTest) -> list[str]:
    return State(pipeline.pipeline.state).names("requests")


@pytest.mark.parametrize("where", [None, "id > 5"])
def test_the_stream_goes_on_while_a_request_waits(
    pipeline: PipelineUnderTest, waits: list[float], where: str | None
) -> None:
    high = pipeline.record.high
    with transaction(pipeline.databases.source, ELSEWHERE, "INSERT INTO public.t VALUES (100, 0)") as session:
        stream = Streaming(pipeline)
        reread_requests.request(pipeline.pipeline, ["public.t"], where)
        pass_units(pipeline, stream, 5)
        assert requested(pipeline), "it stays requested"
        assert pipeline.record.high == high
        assert sum(wait > 0 for wait in waits) == 1, "short transactions are waited for when it is taken, and once"
        assert waits.count(0.0) >= 4
        assert stream.waiting is not None
        assert re.fullmatch(
            rf"reading public\.t again waits for: session {session.info.backend_pid} of postgres"
            r" \([^;]+, transaction open since [^;]+\)",
            stream.waiting,
        )
        session.commit()
    pass_units(pipeline, stream, 2)
    assert requested(pipeline) == []
    assert stream.waiting is None
    stream.end()
    assert stream.attempts == 1
    assert len(pipeline.record.chunks) == 1 or where


def test_the_stream_goes_on_while_a_change_of_schema_waits(pipeline: PipelineUnderTest, waits: list[float]) -> None:
    """Rows are recomputed without events; the catalog shows it, and the table has to be re-read."""
    with transaction(pipeline.databases.source, ELSEWHERE) as session:
        pipeline.source("ALTER TABLE public.t ALTER a TYPE int USING a + 1000")
        stream = Streaming(pipeline)
        for n in range(5):
            pipeline.source(f"INSERT INTO public.t VALUES ({1000 + n}, {n})")
            marker = pipeline.marker()
            stream.until(lambda: pipeline.record.applied >= marker, "the next unit")  # noqa: B023
            assert pipeline.target_rows("SELECT count(*), min(a) FROM public.t") == [(21 + n, 0)]
        assert sum(wait > 0 for wait in waits) == 1
        session.commit()
    stream.until(lambda: pipeline.source_rows("SELECT * FROM public.t ORDER BY 1")
                 == pipeline.target_rows("SELECT * FROM public.t ORDER BY 1"), "the table as it is now")  # fmt: skip
    stream.end()
    assert stream.attempts == 1


ALTER = ("ALTER TABLE public.t ALTER a TYPE bigint", "INSERT INTO public.t VALUES (200, 5000000000)")


def test_a_unit_that_needs_a_re_read_waits_and_fails_not(
    pipeline: PipelineUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    with transaction(pipeline.databases.source, ELSEWHERE) as session:
        stream = Streaming(pipeline)
        pipeline.source("UPDATE public.t SET a = -1", *ALTER)
        marker = pipeline.marker()
        message = f"reading public.t again waits for: session {session.info.backend_pid} of postgres"
        stream.until(lambda: message in caplog.text, "the wait")
        assert pipeline.target_rows("SELECT DISTINCT a FROM public.t") == [(-1,)], "what comes before is applied"
        stream.end()  # after a request to stop, it no longer waits
        assert stream.attempts == 1
        stream = Streaming(pipeline)
        caplog.clear()
        stream.until(lambda: message in caplog.text, "the wait")
        session.commit()
    stream.until(lambda: pipeline.record.applied >= marker, "the end")
    stream.end()
    assert stream.attempts == 1
    pipeline.assert_equal()


def test_a_run_that_waits_is_overtaken(pipeline: PipelineUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    with transaction(pipeline.databases.source, ELSEWHERE):
        stream = Streaming(pipeline)
        pipeline.source(*ALTER)
        stream.until(lambda: "reading public.t again waits for" in caplog.text, "the wait")
        pipeline.target("UPDATE airflow_cdc.pipelines SET epoch = epoch + 1")
        stream.join(SECONDS)
    assert type(stream.failure).__name__ == "Fenced"


def test_what_the_stream_passes_while_a_request_waits_is_seen_by_the_read(
    make_server: ServerMaker, tmp_path: Path, databases: Databases
) -> None:
    """A commit that waits for a standby is streamed but invisible: a read now would undo the row."""
    server = make_server(settings=WITHOUT_STANDBY)
    execute(server.dsn(), f"GRANT pg_monitor TO {PIPELINE_ROLE}")  # to see what sessions wait for
    pipeline = streamed(PipelineUnderTest(tmp_path, Databases(server.dsn(), databases.target), ["public.t"]))
    row = "SELECT a FROM public.t WHERE id = 1"
    with transaction(pipeline.databases.source, ELSEWHERE) as long:
        stream = Streaming(pipeline)
        reread_requests.request(pipeline.pipeline, ["public.t"], None)
        stream.until(lambda: "reading public.t again waits for" in str(stream.waiting), "the wait")
        with commits_that_wait(server, "UPDATE public.t SET a = 7777 WHERE id = 1") as release:
            stream.until(lambda: pipeline.target_rows(row) == [(7777,)], "the commit that waits")
            assert pipeline.source_rows(row) == [(1,)]
            long.rollback()
            stream.until(
                lambda: bool(pipeline.marker()) and "SyncRep" in str(stream.waiting), "the wait for that commit"
            )
            assert requested(pipeline)
            assert pipeline.target_rows(row) == [(7777,)]
            release()
    stream.until(lambda: bool(pipeline.marker()) and requested(pipeline) == [], "the read")
    stream.end()
    pipeline.assert_equal()


def test_a_snapshot_waits_too(databases: Databases, tmp_path: Path) -> None:
    """If a table's definition changes before its chunk is read, it is read whole, which needs a barrier."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source(*TABLES)
    record = pipeline.provision()
    pipeline.source("ALTER TABLE public.t ADD b int DEFAULT 7")
    with ThreadPoolExecutor(1) as pool, run_part(pipeline.pipeline, "snapshot-0", None) as (run, _):
        with transaction(databases.source, ELSEWHERE) as session:
            read = pool.submit(reread_changed, run, record.targets[0])
            assert await_condition(lambda: "waiting" in run.progress, SECONDS)
            assert f"session {session.info.backend_pid} " in run.progress["waiting"]
            assert not read.done()
            session.commit()
        assert read.result(SECONDS) == 20
        assert "waiting" not in run.progress
    pipeline.apply()
    pipeline.assert_equal()


WAITS = "reading public.t again waits for"
RULES = {
    "columns": ({"table": "public.t", "columns": ["id", "a"]}, {"table": "public.t", "columns": ["id"]}),
    "where": ({"table": "public.t", "where": "id > 1"}, {"table": "public.t", "where": "id > 5"}),
}


@pytest.fixture(params=["columns", "where"])
def ruled(databases: Databases, tmp_path: Path, request: pytest.FixtureRequest) -> PipelineUnderTest:
    """Return a pipeline that streams some columns or rows of ``public.t``."""
    return streamed(PipelineUnderTest(tmp_path, databases, [RULES[request.param][0]]))


def change_rule(pipeline: PipelineUnderTest) -> None:
    """Change the rule in the file, and request the table by that rule."""
    (after,) = [after for before, after in RULES.values() if [before] == pipeline.document["source"]["tables"]]
    pipeline.change(source={"tables": [after]})
    reread_requests.request(pipeline.pipeline, ["public.t"], None)


def assert_by_rule(pipeline: PipelineUnderTest) -> None:
    (rule,) = pipeline.document["source"]["tables"]
    columns = ", ".join(rule.get("columns", ["id", "a"]))
    assert pipeline.target_rows("SELECT * FROM public.t ORDER BY 1") == pipeline.source_rows(
        f"SELECT {columns} FROM public.t WHERE {rule.get('where', 'true')} ORDER BY 1"
    )


def test_changes_while_a_request_for_another_rule_waits(
    ruled: PipelineUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    """The table is already published by the new rule: its changes have columns, or rows, that are not recorded."""
    with transaction(ruled.databases.source, ELSEWHERE) as session:
        stream = Streaming(ruled)
        change_rule(ruled)
        stream.until(lambda: bool(ruled.marker()) and WAITS in str(stream.waiting), "the wait")
        ruled.source("UPDATE public.t SET a = a + 1 WHERE id IN (1, 3, 7)")
        marker = ruled.marker()
        if "columns" in ruled.document["source"]["tables"][0]:
            stream.until(lambda: "stream is blocked: reading public.t" in caplog.text, "the unit that waits, too")
        else:
            stream.until(lambda: ruled.record.applied >= marker, "the unit")
        session.commit()
    stream.until(lambda: bool(ruled.marker()) and ruled.record.applied >= marker and not requested(ruled), "the read")
    stream.end()
    assert stream.attempts == 1
    assert_by_rule(ruled)


def test_older_transactions_end_between_a_request_and_the_look_at_the_catalog(
    ruled: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check finds the publication altered, and no older transaction that the request would have to wait for."""
    late: list[bool] = []
    apply = UnitWriter._apply_catalog_changes
    with transaction(ruled.databases.source, ELSEWHERE) as session:

        def applied(writer: UnitWriter) -> str | None:
            with connected(ruled.pipeline.source.dsn) as source:
                writer.check_catalog(source)  # as at a heartbeat
            pending = writer._pending
            if pending is not None and writer.applied >= pending.marker and requested(ruled) and not late:
                late.append(writer.barriers.pending("public.t"))
                session.commit()
            return apply(writer)

        monkeypatch.setattr(UnitWriter, "_apply_catalog_changes", applied)
        stream = Streaming(ruled)
        change_rule(ruled)
        stream.until(lambda: bool(ruled.marker()) and not requested(ruled), "the read")
    stream.end()
    assert late == [True]
    assert_by_rule(ruled)


@pytest.fixture
def two(databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    """Return a pipeline that streams ``public.t`` and ``public.u``."""
    made = PipelineUnderTest(tmp_path, databases, ["public.t", "public.u"])
    made.source("CREATE TABLE public.u (id int PRIMARY KEY, a int NOT NULL)", "INSERT INTO public.u VALUES (1, 1)")
    made.source(*TABLES)
    made.provision()
    made.copy()
    made.copy(table="public.u")
    made.apply()
    return made


def test_a_refusal_does_not_wait_for_another_table(two: PipelineUnderTest) -> None:
    two.source(
        "ALTER TABLE public.t ALTER a TYPE int USING a + 1000",
        "ALTER TABLE public.u DROP CONSTRAINT u_pkey, ADD PRIMARY KEY (id, a)",
    )
    with transaction(two.databases.source, ELSEWHERE):
        stream = Streaming(two)
        with pytest.raises(CannotFollow, match=r"the key of public\.u was"):
            stream.until(lambda: not two.marker(), "the refusal")


def test_short_transactions_are_waited_for_once_for_all_tables(two: PipelineUnderTest, waits: list[float]) -> None:
    with transaction(two.databases.source, ELSEWHERE) as session:
        stream = Streaming(two)
        reread_requests.request(two.pipeline, ["public.t", "public.u"], None)
        stream.until(lambda: bool(two.marker()) and "reading public.u" in str(stream.waiting), "the wait")
        assert sum(wait > 0 for wait in waits) == 1
        session.commit()
    stream.until(lambda: bool(two.marker()) and not requested(two), "the read")
    stream.end()


def test_rows_that_have_been_read_again_are_not_read_once_more(two: PipelineUnderTest) -> None:
    """Another table turns out to have a new definition, and has to wait for older transactions."""
    two.source("ALTER TABLE public.u ADD b int")
    with transaction(two.databases.source, ELSEWHERE), run_part(two.pipeline, "stream", None) as (run, record):
        keys = {label: frozenset({("1",)}) for label in ("public.t", "public.u")}
        changed = reread.read_keys_again(run, record, keys, np.zeros(0, np.uint32))
    assert changed == ("public.u",)


@pytest.mark.timeout(900)
def test_a_snapshot_that_waits_is_asked_to_stop(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source(*TABLES)
    record = pipeline.provision()
    pipeline.source("ALTER TABLE public.t ADD b int")
    with run_part(pipeline.pipeline, "snapshot-0", None) as (run, _):
        with transaction(pipeline.databases.source, ELSEWHERE):
            run.ask_to_stop()
            with pytest.raises(OlderTransactions):
                reread_changed(run, record.targets[0])
        assert reread_changed(run, record.targets[0]) == 20


@pytest.mark.thorough
@pytest.mark.spark
def test_the_command_says_what_it_waits_for(pipeline: PipelineUnderTest) -> None:
    pipeline.change(stream={"restart": {"strategy": "none"}})
    with transaction(pipeline.databases.source, ELSEWHERE) as session:
        stream = pipeline.start("stream")
        pipeline.await_applied(stream)
        pipeline.source(*ALTER)
        marker = pipeline.marker()
        stream.until(lambda: bool(commands.status(pipeline.pipeline)["waiting"]), "the wait")
        found = commands.status(pipeline.pipeline)
        assert f"session {session.info.backend_pid} of postgres" in found["waiting"]
        assert (found["state"], found["restart"], found["last_error"]) == ("streaming", None, None)
        assert f"\nwaiting  {found['waiting']}\n" in pipeline.run("status").stdout
        session.commit()
    stream.until(lambda: pipeline.record.applied >= marker, "the end")
    stream.until(lambda: commands.status(pipeline.pipeline)["waiting"] is None, "the end of the wait")
    pipeline.assert_equal()
    stream.terminate()
    assert stream.wait().code == 0
