"""Changes of a key that the log does not contain: under REPLICA IDENTITY FULL, and of collations.

By the key that the pipeline knows, distinct rows of the source would be one, and the later row would replace the other.
The loss would be permanent if the change is undone before a process has noticed it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CannotFollow
from airflow_cdc_provider.engine.postgres import replication
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.postgres.reading import reread_requests
from airflow_cdc_provider.engine.sources.postgres.reading.read_barriers import Barriers
from airflow_cdc_provider.engine.sources.postgres.reading.reread import reread_as_defined
from airflow_cdc_provider.engine.sources.postgres.stream.inline_staging import InlineStaging
from airflow_cdc_provider.engine.sources.postgres.stream.unit_writer import UnitWriter
from airflow_cdc_provider.engine.sources.postgres.wal import wal_reader
from airflow_cdc_provider.engine.state.files import State
from tests.conftest import Databases, ServerMaker, create_database
from tests.support.databases import transaction
from tests.support.pipelines import PipelineUnderTest
from tests.support.streaming import Streaming

pytestmark = pytest.mark.slow

TABLE = "CREATE TABLE public.t (id int PRIMARY KEY, a int NOT NULL, w text); ALTER TABLE public.t REPLICA IDENTITY FULL"
ROWS = "INSERT INTO public.t SELECT n, n, 'w' || n FROM generate_series(1, 12) n"
OTHER_KEY = "ALTER TABLE public.t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, a)"
TWIN = ("INSERT INTO public.t VALUES (1, 99, 'twin')", "UPDATE public.t SET w = 'changed' WHERE a IN (2, 99)")
BACK = ("DELETE FROM public.t WHERE a = 99", "ALTER TABLE public.t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id)")

Play = Callable[..., None]


@pytest.fixture(params=["before the stream", "while it looks"])
def play(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Execute statements at the source and apply them, optionally after the stream has read the catalog."""

    def applying(pipeline: PipelineUnderTest, *statements: str) -> None:
        if request.param == "before the stream":
            pipeline.source(*statements)
            pipeline.apply()
            return
        open_replication, left = replication.open_replication, list(statements)

        def late(*arguments: str) -> object:
            pipeline.source(*left)
            left.clear()
            return open_replication(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(wal_reader, "open_replication", late)
            pipeline.apply()
        pipeline.apply()

    return applying


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    """Return a mirror that has streamed a change."""
    return streaming(PipelineUnderTest(tmp_path, databases, ["public.t"]), TABLE, ROWS)


def streaming(pipeline: PipelineUnderTest, *statements: str) -> PipelineUnderTest:
    pipeline.source(*statements)
    pipeline.provision()
    pipeline.copy()
    pipeline.source("UPDATE public.t SET w = 'streamed' WHERE w = 'w3'")
    pipeline.apply()
    return pipeline


def test_another_key_under_full_identity(pipeline: PipelineUnderTest, play: Play) -> None:
    before = pipeline.target_rows("SELECT * FROM public.t ORDER BY id")
    with pytest.raises(CannotFollow, match=r"key of public\.t was \(id\), is \(id, a\)"):
        play(pipeline, OTHER_KEY, *TWIN)
    assert pipeline.target_rows("SELECT * FROM public.t ORDER BY id") == before
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    pipeline.source("DELETE FROM public.t WHERE a = 1", "INSERT INTO public.t VALUES (2, 98, 'twin')")
    pipeline.apply()
    pipeline.assert_equal(order="1, 2")


def test_another_key_that_is_taken_back_at_once(pipeline: PipelineUnderTest, play: Play) -> None:
    play(pipeline, OTHER_KEY, *TWIN, *BACK)
    pipeline.assert_equal()


def test_another_key_that_is_taken_back_when_the_pipeline_has_stopped(pipeline: PipelineUnderTest, play: Play) -> None:
    with pytest.raises(CannotFollow, match=r"key of public\.t"):
        play(pipeline, OTHER_KEY, *TWIN)
    play(pipeline, *BACK)
    pipeline.assert_equal()


def test_another_key_of_a_table_that_is_renamed(pipeline: PipelineUnderTest, play: Play) -> None:
    before = pipeline.target_rows("SELECT * FROM public.t ORDER BY id")
    with pytest.raises(CannotFollow, match=r"public\.t has been renamed"):
        play(pipeline, OTHER_KEY, *TWIN, "ALTER TABLE public.t RENAME TO u")
    assert pipeline.target_rows("SELECT * FROM public.t ORDER BY id") == before
    pipeline.source("ALTER TABLE public.u RENAME TO t", *BACK)
    pipeline.apply()
    pipeline.assert_equal()


def test_another_key_of_a_table_that_is_dropped(databases: Databases, tmp_path: Path, play: Play) -> None:
    """Its target stays as it is forever, so distinct rows must not be merged in it; other tables continue."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.*"])
    streaming(pipeline, "CREATE TABLE public.other (id int PRIMARY KEY)", TABLE, ROWS)
    before = pipeline.target_rows("SELECT * FROM public.t ORDER BY id")
    with pytest.raises(CannotFollow, match=r"public\.t has been dropped"):
        play(pipeline, OTHER_KEY, *TWIN, "INSERT INTO public.other VALUES (1)", "DROP TABLE public.t")
    pipeline.provision()
    pipeline.apply()
    pipeline.assert_equal("public.other")
    assert pipeline.target_rows("SELECT * FROM public.t ORDER BY id") == before


def test_another_key_while_a_request_for_the_table_waits(
    pipeline: PipelineUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    """The request concerns the table as it is now, so there is nothing to refuse."""
    pipeline.source("CREATE TABLE public.other (id int)")
    with transaction(pipeline.databases.source, "INSERT INTO public.other VALUES (1)") as session:
        stream = Streaming(pipeline)
        reread_requests.request(pipeline.pipeline, ["public.t"], None)
        stream.until(lambda: bool(pipeline.marker()) and "waits for" in str(stream.waiting), "the wait")
        pipeline.source(OTHER_KEY, *TWIN)
        stream.until(lambda: "stream is blocked: reading public.t" in caplog.text, "the unit that waits, too")
        session.commit()
    stream.until(
        lambda: bool(pipeline.marker()) and not State(pipeline.pipeline.state).names("requests"), "the request's end"
    )
    stream.end()
    assert stream.attempts == 1
    pipeline.assert_equal(order="1, 2")


def test_a_key_of_partitions_that_is_made_anew(databases: Databases, tmp_path: Path, play: Play) -> None:
    partitions = """
        CREATE TABLE public.t (id int PRIMARY KEY, a int NOT NULL, w text) PARTITION BY RANGE (id);
        CREATE TABLE public.t1 PARTITION OF public.t FOR VALUES FROM (1) TO (100);
        ALTER TABLE public.t1 REPLICA IDENTITY FULL
    """
    pipeline = streaming(PipelineUnderTest(tmp_path, databases, ["public.t"]), partitions, ROWS)
    play(pipeline, OTHER_KEY, *TWIN, *BACK)
    pipeline.assert_equal()


@pytest.fixture
def collated(make_server: ServerMaker, system_binaries: Path) -> Databases:
    """Return databases of one server that has a case-insensitive collation."""
    server = make_server(binaries=system_binaries)
    for name in ("collated", "collated_target"):
        create_database(server, name)
    return Databases(server.dsn("collated"), server.dsn("collated_target"))


def test_what_was_found_is_forgotten_when_the_record_has_it(pipeline: PipelineUnderTest) -> None:
    """A key that had changed at one check, and has been re-read in its current form, causes no further refusal."""
    with run_part(pipeline.pipeline, "stream", None) as (run, record), connected(pipeline.databases.source) as source:
        writer = UnitWriter(run, record, InlineStaging())
        writer.check_catalog(source)
        pipeline.source(OTHER_KEY)
        assert list(writer.check_catalog(source)) == ["public.t"]
        assert not writer.done(writer.applied)
        pipeline.source("ALTER TABLE public.t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id)")
        reread_as_defined(run, "public.t", Barriers())
        writer.record = existing_record(pipeline.pipeline)
        assert writer.check_catalog(source) == {}
        assert writer.done(writer.applied)


NOCASE = "CREATE COLLATION public.nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
KEYS = {
    "primary key": "CREATE TABLE public.t (k text COLLATE public.nocase PRIMARY KEY, w text)",
    "index": """
        CREATE TABLE public.t (k text COLLATE public.nocase NOT NULL, w text);
        CREATE UNIQUE INDEX t_k ON public.t (k);
        ALTER TABLE public.t REPLICA IDENTITY USING INDEX t_k
    """,
}


@pytest.mark.parametrize("key", KEYS)
def test_a_collation_of_the_key_that_is_taken_back(collated: Databases, tmp_path: Path, play: Play, key: str) -> None:
    """A row deleted meanwhile would be mistaken for another row that the key's collation considers equal."""
    pipeline = PipelineUnderTest(tmp_path, collated, ["public.t"])
    pipeline.target(NOCASE)
    streaming(pipeline, NOCASE, KEYS[key], "INSERT INTO public.t VALUES ('a', 'w1'), ('b', 'w3')")
    play(
        pipeline,
        'ALTER TABLE public.t ALTER k TYPE text COLLATE "C"',
        "INSERT INTO public.t VALUES ('A', 'another')",
        "DELETE FROM public.t WHERE k = 'A'",
        "ALTER TABLE public.t ALTER k TYPE text COLLATE public.nocase",
    )
    pipeline.assert_equal()


def test_another_collation_of_the_key(collated: Databases, tmp_path: Path, play: Play) -> None:
    """By the old collation two rows would be equal; the table's file stays, so only the catalog shows the change."""
    pipeline = PipelineUnderTest(tmp_path, collated, ["public.t"], snapshot={"chunk_rows": 3})
    pipeline.target(NOCASE)
    streaming(
        pipeline,
        NOCASE,
        KEYS["primary key"],
        "INSERT INTO public.t SELECT chr(96 + n), 'w' || n FROM generate_series(1, 12) n",
    )
    file = "SELECT pg_relation_filenode('public.t')"
    before = pipeline.source_rows(file)
    play(
        pipeline,
        "UPDATE public.t SET w = 'before' WHERE k IN ('A', 'L')",
        'ALTER TABLE public.t ALTER k TYPE text COLLATE "C"',
        "INSERT INTO public.t VALUES ('A', 'another'), ('Z', 'new')",
        "DELETE FROM public.t WHERE k = 'l'",
    )
    assert pipeline.source_rows(file) == before
    order = 'k COLLATE "C"'
    pipeline.assert_equal(order=order)
    pipeline.source("UPDATE public.t SET w = 'after' WHERE k = 'a'")
    pipeline.apply()
    pipeline.assert_equal(order=order)
