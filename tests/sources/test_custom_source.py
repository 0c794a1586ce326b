"""A source of another package: the example of ``docs/sources/custom.md``, installed like users do.

Its pipelines write to Postgres, in this process; once as a command with Spark.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core import failpoint
from airflow_cdc_provider.engine.core.errors import ConfigError, ConnectionFailed, Fenced, GateClosed
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.lsn import LOG_START
from airflow_cdc_provider.engine.core.stream_end import Ending
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.pipeline.registry import types
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.runs.progress import StreamProgress
from airflow_cdc_provider.engine.runs.run import Run, run_part
from airflow_cdc_provider.engine.sources.contract import source_of
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import STREAM
from tests.conftest import Databases
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "journal_source"
ROWS = "SELECT id, body FROM main.events ORDER BY id"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example with pip, without a network, and return the folder."""
    folder = tmp_path_factory.mktemp("journal_source")
    shutil.copytree(EXAMPLE, folder / "source")  # keep the files of the build out of our folder
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", folder / "site", folder / "source"]
    subprocess.run(command, check=True)
    return folder / "site"


class JournalUnderTest(PipelineUnderTest):
    """A pipeline from a journal."""

    @property
    def journal(self) -> Path:
        return self.directory / "app#1%20.db"

    def execute(self, *statements: str) -> None:
        """Execute statements at the source, and commit them."""
        with closing(sqlite3.connect(self.journal)) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    def write(self, *bodies: str) -> None:
        """Append rows."""
        for body in bodies:
            self.execute(f"INSERT INTO events (body, size) VALUES ('{body}', {len(body)})")

    def follow(self, until: str = "caught-up", epoch: int | None = None) -> StreamProgress:
        """Follow the journal in this process, like ``stream`` does once Spark has started."""
        source = source_of(self.pipeline)
        with run_part(self.pipeline, STREAM, epoch) as (run, record):
            follow, reached = source.follower(record, Ending.parse(until))
            done = follow(None, run, record, lambda progress: None)  # type: ignore[arg-type]
        assert reached(done)
        return done


@pytest.fixture
def pipeline(
    installed: Path, databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> JournalUnderTest:
    """Return a pipeline of a journal of three rows."""
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    made = JournalUnderTest(tmp_path, databases, [])
    made.document["source"] = {"type": "journal", "path": str(made.journal), "table": "events"}
    made.change()
    made.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, body TEXT, size INTEGER)")
    made.write("one", "two", "three")
    return made


def test_a_type_is_known_where_its_package_is_installed(pipeline: JournalUnderTest) -> None:
    assert "journal" in types("source")
    assert pipeline.pipeline.source.captured == ("events",)


def test_rows_come_once_and_in_units(pipeline: JournalUnderTest) -> None:
    pipeline.provision()
    assert (pipeline.follow().applied, pipeline.record.applied) == (3, 3)
    pipeline.write("four")
    done = pipeline.follow()
    assert (done.applied, done.changes, dict(done.tables)) == (4, 1, {"main.events": 1})
    assert pipeline.target_rows(ROWS) == [(1, "one"), (2, "two"), (3, "three"), (4, "four")]
    assert pipeline.follow().changes == 0
    assert pipeline.json("verify")["equal"]
    pipeline.target("UPDATE main.events SET body = 'damaged' WHERE id = 2")
    (table,) = pipeline.json("verify", code=4)["tables"]
    assert (table["equal"], table["source_rows"], table["target_rows"]) == (False, 4, 4)


def test_a_sink_that_has_a_unit_already_is_left_out(
    pipeline: JournalUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens after a crash between the commits of two sinks, with newer rows."""
    first = pipeline.document["sink"]
    pipeline.change(sink=[first, {**first, "dsn": pipeline.databases.pipeline_source, "schema": "second"}])
    pipeline.provision()
    monkeypatch.setattr(failpoint, "_passed", Counter())  # another test may have armed it in this process
    monkeypatch.setenv(VARIABLE, "before-batch-commit:error:2")
    with pytest.raises(Exception, match="before-batch-commit fired"):
        pipeline.follow()
    monkeypatch.delenv(VARIABLE)
    assert [existing_record(branch).applied for branch in pipeline.pipeline.branches] == [3, 0]
    pipeline.write("four")
    assert pipeline.follow().applied == 4
    assert [existing_record(branch).applied for branch in pipeline.pipeline.branches] == [4, 4]
    everything = [(1, "one"), (2, "two"), (3, "three"), (4, "four")]
    assert pipeline.target_rows(ROWS) == everything
    assert pipeline.source_rows(ROWS.replace("main.", "second.")) == everything


def test_a_run_that_was_overtaken_ends(pipeline: JournalUnderTest) -> None:
    epoch = pipeline.provision().epoch
    pipeline.provision()
    with pytest.raises(Fenced):
        pipeline.follow(epoch=epoch)
    assert pipeline.target_rows(ROWS) == []


def test_what_cannot_be_gone_on_with_is_refused(pipeline: JournalUnderTest) -> None:
    pipeline.provision()
    pipeline.follow()
    pipeline.execute("DELETE FROM events WHERE id > 1")
    with pytest.raises(GateClosed, match="ends at row 1, but the sink was filled from it up to 3"):
        commands.provision(pipeline.pipeline)
    pipeline.execute("CREATE TABLE others (id INTEGER PRIMARY KEY)")
    pipeline.change(source={"table": "others"})
    with pytest.raises(ConfigError, match="provisioned with"):
        commands.provision(pipeline.pipeline)
    pipeline.change(source={"table": "events"})
    pipeline.journal.unlink()
    with pytest.raises(ConnectionFailed, match="cannot be read"):
        commands.provision(pipeline.pipeline)


def test_a_pipeline_over_tables_is_not_dropped_by_that_of_a_journal(pipeline: JournalUnderTest) -> None:
    """Otherwise its slot would stay, and keep the log of its server."""
    sink = sink_of(pipeline.pipeline)
    sink.prepare([], [], {"source": "postgres", "mode": "mirror"}, LOG_START)
    with pytest.raises(ConfigError, match="has been provisioned with 'postgres'"):
        commands.drop(pipeline.pipeline)
    assert sink.record() is not None
    assert "'postgres'" in commands.status(pipeline.pipeline)["attention"]["message"]


def test_a_lost_record_of_a_pipeline_over_tables_is_told_by_its_copy(pipeline: JournalUnderTest) -> None:
    pipeline.provision()
    state = State(pipeline.pipeline.state)
    ledger = state.read("ledger.json")
    assert ledger is not None
    ledger["identity"]["source"] = "postgres"
    state.write("ledger.json", ledger)
    sink_of(pipeline.pipeline).drop()
    with pytest.raises(ConfigError, match="has been provisioned with 'postgres'"):
        commands.drop(pipeline.pipeline)
    assert state.read("ledger.json") == ledger


def test_a_file_of_before_is_noticed_at_every_start(pipeline: JournalUnderTest) -> None:
    """Otherwise its next rows would take numbers of rows that the sink already has, and never arrive."""
    epoch = pipeline.provision().epoch
    pipeline.follow(epoch=epoch)
    pipeline.execute("DELETE FROM events WHERE id > 1")
    with pytest.raises(GateClosed, match="ends at row 1"):
        pipeline.follow(epoch=epoch)
    with pytest.raises(GateClosed, match="ends at row 1"):
        pipeline.follow("forever", epoch)


@pytest.mark.parametrize("change", ["DROP COLUMN size", "ADD COLUMN more", "RENAME COLUMN body TO text"])
def test_a_table_that_is_not_what_it_was_is_told(pipeline: JournalUnderTest, change: str) -> None:
    pipeline.provision()
    pipeline.execute(f"ALTER TABLE events {change}")
    with pytest.raises(GateClosed, match="but the target was made for id, body, size"):
        pipeline.follow()
    pipeline.execute("DROP TABLE events")
    status = commands.status(pipeline.pipeline)
    assert "has no table events" in str(status)


def test_a_stream_that_waits_is_alive_and_ends_when_it_is_asked_to(pipeline: JournalUnderTest) -> None:
    """It also notices that another run has taken over."""
    epoch = pipeline.provision().epoch
    source = source_of(pipeline.pipeline)
    for end in ("stopped", "overtaken"):
        told: list[StreamProgress] = []
        with run_part(pipeline.pipeline, STREAM, epoch) as (run, record):
            follow, _ = source.follower(record, Ending.parse("forever"))

            def tell(
                progress: StreamProgress, run: Run = run, end: str = end, told: list[StreamProgress] = told
            ) -> None:
                told.append(progress)
                if len(told) == 3 and end == "stopped":
                    run.ask_to_stop()
                elif len(told) == 3:
                    run.commit_record.take_epoch("another")

            if end == "stopped":
                assert follow(None, run, record, tell).applied == 3  # type: ignore[arg-type]
            else:
                with pytest.raises(Fenced):
                    follow(None, run, record, tell)  # type: ignore[arg-type]
        assert len(told) >= 3


def test_rows_that_come_while_they_are_compared_are_no_difference(
    pipeline: JournalUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.provision()
    pipeline.follow()
    record = existing_record(pipeline.pipeline)
    pipeline.write("four")
    pipeline.follow()
    monkeypatch.setattr("cdc_journal.source.existing_record", lambda branch: record)
    assert source_of(pipeline.pipeline).verify(True, lambda *_: None)["equal"]


def test_a_changelog_is_refused(pipeline: JournalUnderTest) -> None:
    pipeline.change(sink={"mode": "changelog"})
    with pytest.raises(ConfigError, match="a journal does not fill a changelog"):
        commands.provision(pipeline.pipeline)


@pytest.mark.parametrize(
    "definition", ["id TEXT PRIMARY KEY", "id INTEGER", "a INTEGER, b INTEGER, PRIMARY KEY (a, b)"]
)
def test_a_table_that_is_no_journal_is_refused(pipeline: JournalUnderTest, definition: str) -> None:
    pipeline.execute("DROP TABLE events", f"CREATE TABLE events ({definition})")
    with pytest.raises(ConfigError, match="has no table events with an INTEGER PRIMARY KEY"):
        commands.provision(pipeline.pipeline)


def test_commands_for_tables_of_postgres_are_refused(pipeline: JournalUnderTest) -> None:
    pipeline.provision()
    with pytest.raises(ConfigError, match=r"reads tables of Postgres, and pipeline .* reads rows of a journal"):
        commands.resnapshot(pipeline.pipeline, tables=["main.events"])
    with pytest.raises(ConfigError, match="skip is for Kafka topics"):
        source_of(pipeline.pipeline).skip("t", 0, [(0, 0)], False)
    only = Pipeline.parse({**pipeline.document, "snapshot": {"mode": "only"}}, {})
    with pytest.raises(ConfigError, match="'only' is for tables of Postgres"):
        commands.run(only)


@pytest.mark.spark
def test_commands(pipeline: JournalUnderTest) -> None:
    """The commands run with Spark, which a source need not use, and find the source in their own processes."""
    ran = pipeline.json("run")
    assert ran["stream"]["tables"] == {"main.events": 3}
    status = pipeline.json("status")
    assert (status["last_row"], status["consistent"]) == (3, True)
    commands.drop(pipeline.pipeline)
    assert pipeline.target_rows(ROWS) == [(1, "one"), (2, "two"), (3, "three")]
