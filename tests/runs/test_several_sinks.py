"""Several sinks fed from one slot: each has its own commit record, and the slot is acknowledged up to the slowest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError, Fenced, SecondWriter
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.sinks.all_records import SeveralRecords
from airflow_cdc_provider.engine.sinks.postgres import fence as postgres_fence
from airflow_cdc_provider.engine.sources.postgres.reading import reread_requests
from airflow_cdc_provider.engine.state import requests
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner, write_heartbeat
from local_servers.postgres import PostgresServer
from tests.conftest import Databases, as_pipeline_role, create_database
from tests.support.audited import AUDITED, assert_exactly_once, await_transactions, writing
from tests.support.databases import query_rows
from tests.support.engine_parts import copy_chunk_of
from tests.support.pipelines import PipelineUnderTest
from tests.support.sparkless import DONE, SparklessRun

OTHER = "other"


@pytest.fixture
def other(databases: Databases, target_server: PostgresServer) -> Iterator[str]:
    """Return a second, empty database on the target's server."""
    name = f"{databases.target.rpartition('/')[2]}_{OTHER}"
    create_database(target_server, name)
    yield target_server.dsn(name)
    with psycopg.connect(target_server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


class Fanned(PipelineUnderTest):
    """A pipeline with a mirror in the target database and a changelog in another."""

    def __init__(self, directory: Path, databases: Databases, other: str) -> None:
        self.other = other
        first = {"dsn": databases.pipeline_target}
        second = {"dsn": as_pipeline_role(other), "mode": "changelog"}
        super().__init__(
            directory, databases, ["public.t", "public.u"], sink=[first, second], snapshot={"chunk_rows": 800}
        )

    @property
    def branches(self) -> tuple[Pipeline, ...]:
        return self.pipeline.branches

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(map(existing_record, self.branches))

    def copy_all(self) -> None:
        for branch in self.branches:
            for chunk in existing_record(branch).unfinished:
                copied = copy_chunk_of(branch, chunk)
                assert not isinstance(copied, CdcError), copied

    def filled(self) -> None:
        """Provision and copy."""
        self.provision()
        self.copy_all()
        self.apply()

    def other_rows(self, query: str) -> list[tuple[object, ...]]:
        return query_rows(self.other, query)

    def log(self) -> PipelineUnderTest:
        """Return the changelog as a pipeline with this sink only."""
        alone = PipelineUnderTest(self.directory, replace(self.databases, target=self.other), ["public.t"])
        alone.change(
            **{key: value for key, value in self.document.items() if key != "sink"}, sink=self.document["sink"][1]
        )
        return alone


@pytest.fixture
def fanned(databases: Databases, other: str, tmp_path: Path) -> Fanned:
    pipeline = Fanned(tmp_path, databases, other)
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, v text)", "INSERT INTO public.t VALUES (1, 'a')")
    pipeline.source("CREATE TABLE public.u (id int PRIMARY KEY)")
    return pipeline


def test_all_get_everything_from_the_first_row_to_the_end(fanned: Fanned) -> None:
    fanned.filled()
    fanned.source("INSERT INTO public.t VALUES (2, 'b')", "UPDATE public.t SET v = 'c' WHERE id = 1")
    fanned.apply()
    fanned.assert_equal()
    events = "SELECT _op, id, v FROM public.t ORDER BY _commit_lsn, _seq"
    seen = [("r", 1, "a"), ("i", 2, "b"), ("u", 1, "c")]
    assert fanned.other_rows(events) == seen
    mirror, changelog = fanned.records
    assert mirror.applied == changelog.applied == fanned.record.applied
    assert mirror.epoch == changelog.epoch
    result = commands.verify(fanned.pipeline)
    assert result["equal"]
    assert {table["sink"].rpartition("/")[2] for table in result["tables"]} == {
        dsn.rpartition("/")[2] for dsn in (fanned.databases.target, fanned.other)
    }
    status = commands.status(fanned.pipeline)
    assert status["consistent"]
    assert [sink["consistent"] for sink in status["sinks"]] == [True, True]

    # One that is behind catches up: its changes are sent again, and those that have applied them leave them out.
    fanned.source("INSERT INTO public.t VALUES (3, 'd')")
    with pytest.raises(CdcError, match=f"sink .*_{OTHER}: .*read-only"):
        fanned_out_of_reach(fanned)
    ahead, behind = fanned.records
    assert ahead.applied > behind.applied == fanned.record.applied >= fanned.confirmed()
    fanned.source("INSERT INTO public.t VALUES (4, 'e')")
    fanned.apply()
    fanned.assert_equal()
    assert fanned.other_rows(events) == [*seen, ("i", 3, "d"), ("i", 4, "e")]
    assert len({record.applied for record in fanned.records}) == 1

    # A change of schema is followed by all.
    fanned.source("ALTER TABLE public.t ADD COLUMN w int", "INSERT INTO public.t VALUES (5, 'f', 7)")
    fanned.apply()
    fanned.assert_equal()
    assert fanned.other_rows("SELECT id, w FROM public.t WHERE _op = 'i' AND id = 5") == [(5, 7)]

    # A run that is overtaken is fenced from all.
    before = fanned.record.epoch
    commands.provision(fanned.pipeline)
    for branch in fanned.branches:
        with pytest.raises(Fenced), sink_of(branch).fenced(before):
            pass

    # Starting over is done for all.
    with psycopg.connect(fanned.databases.source, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot(%s)", [fanned.pipeline.source.slot])
    fanned.source("INSERT INTO public.t VALUES (6, 'g')")
    commands.start_over(fanned.pipeline)
    fanned.copy_all()
    fanned.apply()
    fanned.assert_equal()
    assert commands.verify(fanned.pipeline)["equal"]

    # Dropping removes all records.
    commands.drop(fanned.pipeline)
    for branch in fanned.branches:
        assert sink_of(branch).record() is None
    fanned.assert_equal()


def fanned_out_of_reach(fanned: Fanned) -> None:
    """Apply the stream while the second sink accepts no writes to its target."""
    with psycopg.connect(fanned.other, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS"
            " $$BEGIN RAISE EXCEPTION 'read-only' USING ERRCODE = '57P03'; END$$;"
            "CREATE TRIGGER refuse BEFORE INSERT ON public.t EXECUTE FUNCTION public.refuse()"
        )
        try:
            fanned.apply()
        finally:
            connection.execute("DROP TRIGGER refuse ON public.t; DROP FUNCTION public.refuse()")


def test_a_sink_that_joins_waits_for_the_end_of_a_live_stream(fanned: Fanned) -> None:
    both = fanned.document["sink"]
    fanned.change(sink=both[:1])
    fanned.filled()
    beat = Heartbeat(Owner("elsewhere", 1, 1), "stream", fanned.record.epoch, time.time(), False, {})
    write_heartbeat(State(fanned.pipeline.state), beat)
    fanned.source("INSERT INTO public.t VALUES (2, 'b')")
    fanned.change(sink=both)
    with pytest.raises(SecondWriter):
        commands.provision(fanned.pipeline)

    write_heartbeat(State(fanned.pipeline.state), replace(beat, ended=True))
    fanned.filled()
    fanned.source("DELETE FROM public.t WHERE id = 1")
    fanned.apply()
    fanned.assert_equal()
    assert fanned.other_rows("SELECT _op, id FROM public.t ORDER BY _commit_lsn, _seq, id") == [
        ("r", 1),
        ("r", 2),
        ("d", 1),
    ]


def test_tables_are_read_again_and_published_anew_for_all(fanned: Fanned) -> None:
    fanned.filled()
    fanned.target("DELETE FROM public.t")
    commands.resnapshot(fanned.pipeline, tables=["public.t"])
    fanned.apply()
    fanned.assert_equal()
    assert fanned.other_rows("SELECT _op FROM public.t ORDER BY _commit_lsn, _seq") == [("r",), ("t",), ("r",)]

    # Newly chosen columns are published once for all sinks.
    fanned.source("ALTER TABLE public.t ADD COLUMN w int")
    fanned.apply()
    fanned.change(source={"tables": [{"table": "public.t", "columns": ["id", "w"]}, "public.u"]})
    commands.resnapshot(fanned.pipeline, tables=["public.t"])
    fanned.source("INSERT INTO public.t VALUES (2, 'b', 7)")
    fanned.apply()
    assert fanned.target_rows("SELECT id, w FROM public.t ORDER BY 1") == [(1, None), (2, 7)]
    assert fanned.other_rows("SELECT id, w FROM public.t WHERE _op = 'i'") == [(2, 7)]


def test_what_waits_for_one_sink_is_not_repeated_in_the_others(fanned: Fanned, monkeypatch: pytest.MonkeyPatch) -> None:
    """The changelog has the re-read table, and the mirror waits for a lock: the changelog does not receive it again."""
    fanned.change(sink=fanned.document["sink"][::-1])
    fanned.filled()
    monkeypatch.setattr(postgres_fence, "LOCK_SECONDS", 0.2)
    reread_requests.request(fanned.pipeline, ["public.t"], None, name="asked")
    with psycopg.connect(fanned.databases.target) as locking:
        locking.execute("LOCK TABLE public.t IN SHARE MODE")
        for value in range(3):
            fanned.source(f"INSERT INTO public.u VALUES ({value})")
            fanned.apply()
        assert requests.waiting(State(fanned.pipeline.state), "asked")
    fanned.source("INSERT INTO public.u VALUES (3)")
    fanned.apply()
    assert requests.outcome(State(fanned.pipeline.state), "asked")
    assert fanned.other_rows("SELECT _op, count(*) FROM public.t GROUP BY 1 ORDER BY 1") == [("r", 2), ("t", 1)]


class SlowClock:
    """A sink that takes an epoch from a clock that advances by 550 ms meanwhile."""

    now = 1_000_000

    def __init__(self) -> None:
        self.epoch = 0

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        SlowClock.now += 550
        self.epoch = max(self.epoch + 1, SlowClock.now, at_least)
        return self.epoch


def test_sinks_that_take_their_time_agree_on_an_epoch() -> None:
    sinks = [SlowClock() for _ in range(3)]
    epoch = SeveralRecords(sinks).take_epoch("me")  # type: ignore[arg-type]
    assert {sink.epoch for sink in sinks} == {epoch}


def test_a_store_that_is_named_twice_is_refused(fanned: Fanned) -> None:
    first = fanned.document["sink"][0]
    fanned.change(sink=[first, {**first, "schema": "copy"}])
    with pytest.raises(ConfigError, match="is named twice"):
        commands.provision(fanned.pipeline)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    ["after-slot", "after-plan", "after-epoch", "after-chunk-commit", "before-batch-commit", "after-batch-commit"],
)
def test_a_run_that_is_killed_between_two_sinks(fanned: Fanned, place: str) -> None:
    fanned.source("DROP TABLE public.t", AUDITED)
    with writing(fanned.databases.source) as writers:
        assert SparklessRun(fanned.file, f"{place}:kill").wait() == -9
        await_transactions(writers, 50)
        run = SparklessRun(fanned.file, takeover=True)
        assert run.wait() == DONE, run.message
        await_transactions(writers, 100)  # the run may be over before much is written
    fanned.apply()
    fanned.assert_equal()
    assert_exactly_once(fanned.log())
