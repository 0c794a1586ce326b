"""Locks of other sessions on tables of the source: rewrites, open DDL. Checks and commands do not wait forever.

The catalog can be read whatever is locked. An operation on a table reports who holds the lock, and a job survives.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import TableLocked
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres import connection
from airflow_cdc_provider.engine.postgres.connection import connected, rows
from airflow_cdc_provider.engine.postgres.slots import emit_marker
from airflow_cdc_provider.engine.runs.progress import StreamProgress
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.runs.view_work import ViewWork
from airflow_cdc_provider.engine.sources.postgres.catalog.catalog import _LEAVES
from airflow_cdc_provider.engine.sources.postgres.catalog.publication import published_oids
from airflow_cdc_provider.engine.sources.postgres.provision import provisioning
from airflow_cdc_provider.engine.sources.postgres.reading import reread
from airflow_cdc_provider.engine.sources.postgres.stream import stream_job
from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob
from tests.conftest import Databases, ServerMaker
from tests.support.databases import execute, transaction
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.streaming import Streaming

pytestmark = pytest.mark.slow

TREE = """
CREATE TABLE public.t (id int PRIMARY KEY, body text) PARTITION BY RANGE (id);
CREATE TABLE public.a PARTITION OF public.t FOR VALUES FROM (0) TO (100);
CREATE TABLE public.b PARTITION OF public.t FOR VALUES FROM (100) TO (200) PARTITION BY RANGE (id);
CREATE TABLE public.b_1 PARTITION OF public.b FOR VALUES FROM (100) TO (150);
INSERT INTO public.t SELECT i * 10, 'row ' || i FROM generate_series(1, 14) i
"""
OTHER = "CREATE TABLE public.other (id int PRIMARY KEY); INSERT INTO public.other VALUES (1)"
DDL = "ALTER TABLE public.a ADD CHECK (id IS NOT NULL)"
HASTE: dict[str, Any] = {"stream": {"heartbeat": "100 ms"}}
HELD = r"session \d+ of postgres .*AccessExclusiveLock on public\.a"


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connection, reread):
        monkeypatch.setattr(module, "CONTROL_LOCK_SECONDS", 0.2)


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t", "public.other"], **HASTE)
    return copied(pipeline)


def copied(pipeline: PipelineUnderTest) -> PipelineUnderTest:
    pipeline.source(TREE, OTHER)
    pipeline.provision()
    pipeline.copy_tables()
    pipeline.apply()
    return pipeline


class Query:
    """A query of Spark that has nothing to do."""

    isActive = True

    def exception(self) -> None:
        return None

    def stop(self) -> None:
        return None


class Watch(threading.Thread):
    """The watches over a stream in its job: gate, budget, checks of the catalog, heartbeats."""

    def __init__(self, pipeline: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch, until: int | None = None) -> None:
        super().__init__(daemon=True)
        self._until = until
        self.progress: StreamProgress | None = None
        self._pipeline = pipeline.pipeline
        self._marks = 0
        self._ready = threading.Event()
        monkeypatch.setattr(stream_job, "emit_marker", self._emit)
        self.start()
        assert self._ready.wait(SECONDS)

    def run(self) -> None:
        with run_part(self._pipeline, "stream", None) as (self.run_, record):
            self._ready.set()
            job = StreamJob(None, self.run_, record, self._report)  # type: ignore[arg-type]
            job._follow(Query(), self._until, ViewWork(self.run_))  # type: ignore[arg-type]

    def _emit(self, *arguments: Any) -> int:
        self._marks += 1
        return emit_marker(*arguments)

    def _report(self, progress: StreamProgress) -> None:
        self.progress = progress

    def await_beats(self) -> None:
        seen = self._marks
        assert await_condition(lambda: self._marks >= seen + 3, SECONDS / 4), "it stands still"

    @property
    def waiting(self) -> str | None:
        return self.progress and self.progress.waiting

    def end(self) -> None:
        self.run_.ask_to_stop()
        self.join(SECONDS / 4)
        assert not self.is_alive(), "it does not stop"


def test_a_look_at_the_catalog_waits_for_nobody(pipeline: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    with transaction(pipeline.databases.source, DDL, "LOCK TABLE public.t, public.other"):
        watch = Watch(pipeline, monkeypatch)
        watch.await_beats()
        assert watch.waiting is None
        watch.end()


def test_what_a_look_has_to_ask_of_a_table_is_asked_again(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server evaluates a condition on the rows under a lock; until then, the stream does not count as caught up."""
    tables = [{"table": "public.t", "where": "id > 10"}, "public.other"]
    pipeline = copied(PipelineUnderTest(tmp_path, databases, tables, **HASTE))
    with transaction(databases.source, DDL):
        watch = Watch(pipeline, monkeypatch, until=0)
        watch.await_beats()
        assert re.search(HELD, watch.waiting or "")
        assert watch.is_alive()
    watch.join(SECONDS)
    assert not watch.is_alive()
    assert watch.waiting is None


COMMANDS: dict[str, Callable[[PipelineUnderTest], Any]] = {
    "preflight": lambda p: commands.preflight(p.pipeline),
    "provision": lambda p: commands.provision(p.pipeline),
    "resnapshot": lambda p: commands.resnapshot(p.pipeline, tables=["public.t"]),
    "some rows": lambda p: commands.resnapshot(p.pipeline, tables=["public.t"], where="id < 50"),
    "over": lambda p: provisioning.start_over(p.pipeline, takeover=False),
    "verify": lambda p: commands.verify(p.pipeline),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_whom_it_has_waited_for(pipeline: PipelineUnderTest, command: str) -> None:
    with transaction(pipeline.databases.source, DDL), pytest.raises(TableLocked, match=HELD):
        COMMANDS[command](pipeline)
    COMMANDS[command](pipeline)
    pipeline.copy_tables()
    pipeline.apply()
    pipeline.assert_verified()


def test_a_first_run_says_so_too(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source(TREE)
    with transaction(databases.source, DDL), pytest.raises(TableLocked, match=HELD):
        pipeline.provision()
    pipeline.provision()


def test_a_prepared_transaction_is_named(databases: Databases, tmp_path: Path, make_server: ServerMaker) -> None:
    server = make_server("18", settings={"max_prepared_transactions": "2"})
    pair = Databases(server.dsn(), databases.target)
    pipeline = PipelineUnderTest(tmp_path, pair, ["public.t"], pipeline="prepared")
    pipeline.source(TREE, f"BEGIN; {DDL}; PREPARE TRANSACTION 'left'")
    with pytest.raises(TableLocked, match=r"prepared transaction 'left': AccessExclusiveLock on public\.a"):
        pipeline.provision()
    pipeline.source("COMMIT PREPARED 'left'")
    pipeline.provision()


ATTACH = "CREATE TABLE public.c PARTITION OF public.t FOR VALUES FROM (200) TO (300)"
RETYPE = "ALTER TABLE public.t ALTER body TYPE text COLLATE \"C\" USING body || '!'"


def test_a_tree_that_is_to_be_read_again_waits_and_the_stream_goes_on(pipeline: PipelineUnderTest) -> None:
    pipeline.source(ATTACH, "INSERT INTO public.t VALUES (250, 'new')")
    with transaction(pipeline.databases.source, DDL):
        streaming = Streaming(pipeline)
        streaming.until(lambda: re.search(HELD, streaming.waiting or "") is not None, "what it waits for")
        pipeline.source("INSERT INTO public.other VALUES (2)")
        streaming.until(lambda: len(pipeline.target_rows("SELECT FROM public.other")) == 2, "other data")
    streaming.until(lambda: len(pipeline.target_rows("SELECT FROM public.t")) == 15, "the re-read")
    streaming.end()
    assert streaming.attempts == 1
    pipeline.assert_equal()


@pytest.mark.parametrize("stop", [True, False])
def test_a_unit_that_needs_a_locked_table_stands_still(pipeline: PipelineUnderTest, stop: bool) -> None:
    pipeline.source(RETYPE, "INSERT INTO public.t VALUES (15, 'new')")
    with transaction(pipeline.databases.source, "SELECT", "LOCK TABLE public.a") as others:
        streaming = Streaming(pipeline)
        streaming.until(lambda: re.search(HELD, streaming.waiting or "") is not None, "what it waits for")
        if stop:
            streaming.end()
        others.commit()
    if not stop:
        streaming.until(lambda: len(pipeline.target_rows("SELECT FROM public.t")) == 15, "the re-read")
        streaming.end()
    assert streaming.attempts == 1
    pipeline.apply()
    pipeline.assert_equal()


def test_keys_that_cannot_be_placed_while_their_table_is_locked(
    databases: Databases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their type has another name, so the whole table is re-read; before that, the server evaluates its rule."""
    rule = {"table": "public.t", "where": "n > 0"}
    pipeline = PipelineUnderTest(tmp_path, databases, [rule], snapshot={"chunk_rows": 3}, **HASTE)
    pipeline.source(
        "CREATE TYPE public.mood AS ENUM ('a', 'b', 'c', 'd', 'e', 'f', 'g')",
        "CREATE TABLE public.t (n int, id public.mood, body text, PRIMARY KEY (n, id))",
        "INSERT INTO public.t SELECT 1, m::public.mood, m FROM unnest('{a,b,c,d,e,f,g}'::text[]) m",
    )
    pipeline.provision()
    pipeline.copy_tables(0)
    pipeline.source("UPDATE public.t SET body = 'x' WHERE id = 'e'")
    pipeline.copy_tables(1, 2)
    pipeline.source("ALTER TYPE public.mood RENAME TO feeling", "UPDATE public.t SET body = 'y' WHERE id = 'f'")
    with transaction(databases.source, "SELECT", "LOCK TABLE public.t") as others:
        streaming = Streaming(pipeline)
        streaming.until(lambda: "stream is blocked" in caplog.text, "the unit that waits")
        others.commit()
    query = "SELECT body FROM public.t WHERE id::text = 'f'"
    streaming.until(lambda: pipeline.target_rows(query) == [("y",)], "the re-read")
    streaming.end()
    assert streaming.attempts == 1


PUBLICATIONS = {
    "leaves": "FOR TABLE public.a, public.b_1",
    "root": "FOR TABLE public.t",
    "branch": "FOR TABLE public.b, ONLY public.plain",
    "inheritance": "FOR TABLE public.plain",
    "all": "FOR ALL TABLES",
    "schema": "FOR TABLES IN SCHEMA public, attic",
    "none": "",
}
REST = """
CREATE TABLE public.plain (id int PRIMARY KEY);
CREATE TABLE public.heir () INHERITS (public.plain);
CREATE UNLOGGED TABLE public.unlogged (id int);
CREATE VIEW public.seen AS SELECT FROM public.t;
CREATE SCHEMA attic;
CREATE TABLE attic.c PARTITION OF public.t FOR VALUES FROM (200) TO (300)
"""


@pytest.mark.parametrize("version", ["the system's", "16", "18"])
def test_what_is_read_without_locks_is_what_postgres_says(
    make_server: ServerMaker, request: pytest.FixtureRequest, version: str
) -> None:
    if version == "the system's":
        server = make_server(binaries=request.getfixturevalue("system_binaries"))
    else:
        server = make_server(version)
    execute(server.dsn(), TREE, REST)
    detaching = "ALTER TABLE public.t DETACH PARTITION public.a CONCURRENTLY"
    with connected(server.dsn()) as source:
        for name, tables in PUBLICATIONS.items():
            execute(server.dsn(), f'CREATE PUBLICATION "{name}" {tables}')
        for ddl in ("SELECT", detaching, f"{detaching.replace('CONCURRENTLY', 'FINALIZE')}"):
            if ddl == detaching:  # it stays half done
                with transaction(server.dsn(), "SELECT FROM public.t"), pytest.raises(psycopg.errors.LockNotAvailable):
                    execute(server.dsn(), "SET lock_timeout = '200ms'", ddl)
            else:
                execute(server.dsn(), ddl)
            roots = dict(rows(source, "SELECT oid::int8, relname FROM pg_class WHERE relkind = 'p'"))
            trees = "SELECT r, relid::oid::int8 FROM unnest(%s::int8[]) r, pg_partition_tree(r::oid) WHERE isleaf"
            assert sorted(rows(source, _LEAVES, [list(roots)])) == sorted(rows(source, trees, [list(roots)]))
            for name in PUBLICATIONS:
                query = (
                    "SELECT relid::int8 FROM pg_get_publication_tables(%s) JOIN pg_class c ON c.oid = relid"
                    " WHERE relkind = 'r'"
                )
                assert published_oids(source, name) == {oid for (oid,) in rows(source, query, [name])}, (name, ddl)
