"""Tables that join a running pipeline while the stream continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CannotFollow, ConfigError, Fenced, ForeignTable, StreamFailed
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.runs.run_errors import last_error
from airflow_cdc_provider.engine.sources.postgres.reading import reread, reread_requests
from airflow_cdc_provider.engine.sources.postgres.reading.read_barriers import Barriers
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import RESNAPSHOT, is_streaming
from tests.conftest import Databases
from tests.support.databases import transaction
from tests.support.engine_parts import apply_stream
from tests.support.pipelines import PipelineUnderTest
from tests.support.spark_streaming import SparkStreaming
from tests.support.sparkless import FAILED, SparklessRun

pytestmark = pytest.mark.slow

TABLE = "CREATE TABLE {} (id int PRIMARY KEY, body text)"
ROWS = "INSERT INTO {} SELECT n, 'row ' || n FROM generate_series(1, 10) n"


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    """Return a pipeline that streams ``public.t``, and does not know a table ``public.u``."""
    made = PipelineUnderTest(tmp_path, databases, ["public.t"])
    made.source(TABLE.format("public.t"), ROWS.format("public.t"))
    made.provision()
    made.copy()
    made.apply()
    made.source(TABLE.format("public.u"), ROWS.format("public.u"))
    return made


def join(pipeline: PipelineUnderTest, how: str, *rules: Any) -> None:
    """Add the new tables of the edited file to the pipeline, with or without a running stream."""
    running = pipeline.pipeline
    pipeline.change(source={"tables": ["public.t", *rules]})
    if how == "live":
        # This is what `resnapshot` leaves if a stream is running that has read the file before it was edited.
        reread_requests.request(pipeline.pipeline, ["public.u"], None)
        pipeline.source("UPDATE public.t SET body = 'wakes the stream'")
        apply_stream(running, pipeline.marker())
    elif how == "resnapshot":
        commands.resnapshot(pipeline.pipeline, tables=["public.u"])
    else:
        pipeline.provision()
        pipeline.copy(table="public.u")


@pytest.mark.parametrize("how", ["live", "resnapshot", "provision"])
@pytest.mark.parametrize("rule", ["public.u", "public.u*", {"table": "public.u", "columns": ["id"], "where": "id > 3"}])
def test_a_table_joins(pipeline: PipelineUnderTest, how: str, rule: Any) -> None:
    pipeline.source("UPDATE public.t SET body = 'before'")
    join(pipeline, how, rule)
    pipeline.source(
        "INSERT INTO public.u VALUES (20, 'new'), (2000, 'new')",
        "DELETE FROM public.u WHERE id = 5",
        "UPDATE public.u SET id = 60 WHERE id = 6",
        "UPDATE public.t SET body = 'after'",
    )
    pipeline.apply()
    pipeline.assert_equal()
    if isinstance(rule, str):
        pipeline.assert_equal("public.u")
    else:
        assert pipeline.target_rows("SELECT * FROM public.u ORDER BY id") == [
            (i,) for i in (4, 7, 8, 9, 10, 20, 60, 2000)
        ]


def test_what_is_open_while_a_table_joins(pipeline: PipelineUnderTest) -> None:
    """Rows that a transaction wrote before the table was published are never streamed: the read waits for it."""
    pipeline.change(source={"tables": ["public.t", "public.u"]})
    reread_requests.request(pipeline.pipeline, ["public.u"], None)
    with transaction(pipeline.databases.source, "INSERT INTO public.u VALUES (100, 'open')") as session:
        pipeline.source("UPDATE public.t SET body = 'goes on'")
        pipeline.apply()
        pipeline.assert_equal()
        assert len(pipeline.record.targets) == 1
        assert State(pipeline.pipeline.state).names("requests"), "it stays requested"
        session.commit()
    pipeline.apply()
    pipeline.assert_equal("public.u")


def test_a_table_that_cannot_join_does_not_stop_the_stream(pipeline: PipelineUnderTest) -> None:
    pipeline.target(TABLE.format("public.u"), ROWS.format("public.u"))
    pipeline.change(source={"tables": ["public.t", "public.u"]})
    with pytest.raises(ForeignTable):
        commands.resnapshot(pipeline.pipeline, tables=["public.u"])
    reread_requests.request(pipeline.pipeline, ["public.u"], None)
    pipeline.source("UPDATE public.t SET body = 'goes on'")
    pipeline.apply()
    pipeline.assert_equal()
    error = last_error(State(pipeline.pipeline.state))
    assert error is not None
    assert error["kind"] == "ForeignTable"
    pipeline.target("DROP TABLE public.u")
    commands.resnapshot(pipeline.pipeline, tables=["public.u"])
    pipeline.apply()
    pipeline.assert_equal("public.u")


UNREADABLE = {
    "TargetConflict": f"{TABLE.format('public.u')}; CREATE UNIQUE INDEX ON public.u ((left(body, 3)))",
    "ValueRefused": "CREATE DOMAIN public.short AS text CHECK (length(VALUE) < 6);"
    " CREATE TABLE public.u (id int PRIMARY KEY, body public.short)",
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_request_that_the_target_refuses_is_given_up(pipeline: PipelineUnderTest, kind: str) -> None:
    pipeline.target(UNREADABLE[kind])
    pipeline.change(source={"tables": ["public.t", "public.u"]})
    reread_requests.request(pipeline.pipeline, ["public.u"], None)
    pipeline.source("UPDATE public.t SET body = 'goes on'")
    pipeline.apply()
    pipeline.assert_equal()
    assert State(pipeline.pipeline.state).names("requests") == []
    error = last_error(State(pipeline.pipeline.state))
    assert error is not None
    assert error["kind"] == kind


LOSES_SESSIONS = (
    "CREATE FUNCTION public.lose() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS"
    " 'BEGIN PERFORM pg_catalog.pg_terminate_backend(pg_catalog.pg_backend_pid()); RETURN NULL; END'",
    "CREATE TRIGGER lose BEFORE INSERT ON public.t EXECUTE FUNCTION public.lose()",
)


def test_a_request_survives_a_lost_session(pipeline: PipelineUnderTest) -> None:
    """Otherwise the publication would differ from the record, and the stream would refuse to continue."""
    pipeline.change(source={"tables": [{"table": "public.t", "columns": ["id"]}]})
    reread_requests.request(pipeline.pipeline, ["public.t"], None)
    pipeline.target(*LOSES_SESSIONS)
    pipeline.source("INSERT INTO public.t VALUES (0, 'wakes the stream')")
    with pytest.raises(StreamFailed, match=r"sink .*server closed the connection"):
        pipeline.apply()
    pipeline.target("DROP FUNCTION public.lose CASCADE")
    pipeline.apply()
    assert State(pipeline.pipeline.state).names("requests") == []
    assert pipeline.target_rows("SELECT * FROM public.t ORDER BY id") == [(i,) for i in range(11)]


def test_requests_that_build_on_each_other(pipeline: PipelineUnderTest) -> None:
    pipeline.change(source={"tables": ["public.t", "public.u"]})
    reread_requests.request(pipeline.pipeline, ["public.u"], None)
    reread_requests.request(pipeline.pipeline, ["public.u"], "id > 3")
    pipeline.source("UPDATE public.t SET body = 'goes on'")
    pipeline.apply()
    assert last_error(State(pipeline.pipeline.state)) is None
    pipeline.assert_equal("public.u")


def test_a_table_that_joins_publishes_no_other_again(pipeline: PipelineUnderTest) -> None:
    publication = pipeline.pipeline.source.publication
    pipeline.source(f"ALTER PUBLICATION {publication} DROP TABLE public.t", "UPDATE public.t SET body = 'lost'")
    pipeline.change(source={"tables": ["public.t", "public.u"]})
    pipeline.provision()
    pipeline.copy(table="public.u")
    with pytest.raises(CannotFollow, match=r"public\.t is no longer in publication"):
        pipeline.apply()


def test_a_run_that_is_overtaken_adds_no_table(pipeline: PipelineUnderTest) -> None:
    """The other run has meanwhile passed changes of the table, which it does not know."""
    pipeline.change(source={"tables": ["public.t", "public.u"]})
    overtaken = SparklessRun(pipeline.file, "after-barrier:pause")
    overtaken.await_pause()
    pipeline.source("UPDATE public.u SET body = 'passed' WHERE id = 3")
    pipeline.apply()
    overtaken.resume()
    assert overtaken.wait() == FAILED
    assert overtaken.message.startswith("Fenced")
    assert len(pipeline.record.targets) == 1
    join(pipeline, "provision", "public.u")
    pipeline.apply()
    pipeline.assert_equal("public.u")


def test_a_run_that_is_overtaken_publishes_no_table(
    pipeline: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the other run, a table that this run publishes again would have been out of the publication for a while."""
    pipeline.change(source={"tables": ["public.t", "public.u"]})
    sink, defined = sink_of(pipeline.pipeline), reread._defined

    def overtaken(*arguments: Any) -> Any:
        sink.take_epoch("another")
        return defined(*arguments)

    with run_part(pipeline.pipeline, RESNAPSHOT, None) as (run, _), monkeypatch.context() as patch:
        patch.setattr(reread, "_defined", overtaken)
        with pytest.raises(Fenced):
            reread.reread_as_defined(run, "public.u", Barriers())
    assert pipeline.source_rows("SELECT tablename FROM pg_publication_tables") == [("t",)]


def test_a_table_that_the_file_does_not_name(pipeline: PipelineUnderTest) -> None:
    with pytest.raises(ConfigError, match=r"no table 'public\.u'"):
        commands.resnapshot(pipeline.pipeline, tables=["public.u"])


def test_a_rule_that_is_changed(pipeline: PipelineUnderTest) -> None:
    """Other columns and rows of a captured table are published again and re-read on request."""
    pipeline.change(source={"tables": ["public.t", "public.u"]})
    pipeline.provision()
    pipeline.copy(table="public.u")
    pipeline.apply()
    pipeline.change(source={"tables": ["public.t", {"table": "public.u", "columns": ["id"], "where": "id > 3"}]})
    commands.resnapshot(pipeline.pipeline, tables=["public.u"])
    pipeline.source("INSERT INTO public.u VALUES (0, 'out'), (50, 'in')")
    pipeline.apply()
    assert pipeline.target_rows("SELECT * FROM public.u ORDER BY id") == [(i,) for i in (*range(4, 11), 50)]
    with psycopg.connect(pipeline.databases.source) as connection:
        found = connection.execute("SELECT attnames::text[] FROM pg_publication_tables WHERE tablename = 'u'")
        assert found.fetchall() == [(["id"],)]


@pytest.mark.spark
def test_a_stream_that_goes_on(pipeline: PipelineUnderTest) -> None:
    """The command checks the catalog at heartbeats: DDL, tables that join, and a key that it cannot follow."""
    with SparkStreaming(pipeline) as stream:
        stream.until(lambda: is_streaming(State(pipeline.pipeline.state)), "its heartbeat")
        pipeline.source(
            "UPDATE public.t SET body = 'before'",
            "ALTER TABLE public.t ADD a int DEFAULT 7",
            "UPDATE public.t SET a = id WHERE id > 5",
            TABLE.format("public.v"),
        )
        pipeline.change(source={"tables": ["public.t", "public.u"]})
        assert commands.resnapshot(pipeline.pipeline, tables=["public.u"])["requested"]
        pipeline.change(source={"tables": ["public.t", "public.u", "public.v"]})
        assert commands.provision(pipeline.pipeline)["requested"]
        pipeline.source("INSERT INTO public.u VALUES (100, 'x')", "INSERT INTO public.v VALUES (1, 'y')")
        stream.until(lambda: len(pipeline.record.targets) == 3, "the tables that join")
        pipeline.source("ALTER TABLE public.u DROP body")  # no change of the table follows
        width = "SELECT count(*) FROM information_schema.columns WHERE table_name = 'u'"
        stream.until(lambda: pipeline.target_rows(width) == [(1,)], "the column's end")
        stream.await_applied()
        for table in ("public.t", "public.u", "public.v"):
            pipeline.assert_equal(table)
        pipeline.source(
            "UPDATE public.v SET body = 'last'",
            "ALTER TABLE public.v DROP CONSTRAINT v_pkey, ADD PRIMARY KEY (id, body)",
            "UPDATE public.t SET body = 'meanwhile'",
        )
        marker = pipeline.marker()
        failure = stream.failure()
        assert isinstance(failure, CannotFollow)
        assert failure.exit_code == 3
        assert "resnapshot --table 'public.v'" in failure.solution
        assert pipeline.confirmed() >= marker, "what could be applied is acknowledged"
        commands.resnapshot(pipeline.pipeline, tables=["public.v"])
        pipeline.apply()
        for table in ("public.t", "public.u", "public.v"):
            pipeline.assert_equal(table)
