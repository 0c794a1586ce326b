"""The command line: exit codes, what is said when something is wrong, and the shape of ``--json``.

What is refused is refused before anything is touched; so every refusal here is followed by a look at both sides. The
refusals run in this process, through the function behind the command, and what works runs as users run it.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_cdc_provider.engine.commands import cli
from airflow_cdc_provider.engine.core.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner, write_heartbeat
from airflow_cdc_provider.engine.state.history import read_history
from local_servers.postgres import PostgresServer
from local_servers.process import find_free_port
from tests.conftest import Databases, ServerMaker, create_database, drop_database
from tests.support.databases import execute, query_rows
from tests.support.pipelines import PipelineUnderTest
from tests.support.scrape import scrape

TABLE = "CREATE TABLE public.t (id int PRIMARY KEY, body text)"
KEYLESS = "CREATE TABLE public.keyless (body text)"
ROWS = "INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 100) n"
SECRET = "s3cret-pa55word"
LSN_KEYS = {"applied_lsn", "restart_lsn", "confirmed_flush_lsn"}


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> Iterator[PipelineUnderTest]:
    """A pipeline of a table with a hundred rows."""
    under_test = PipelineUnderTest(tmp_path, databases, ["public.t"], snapshot={"chunk_rows": 50})
    under_test.source(TABLE, ROWS)
    yield under_test
    under_test.end_commands()


@pytest.fixture(scope="module")
def untouched(source_server: PostgresServer, target_server: PostgresServer) -> Iterator[Databases]:
    """A pair of databases for all that is refused: what is refused changes nothing."""
    name = f"refused{os.getpid()}"
    for server in (source_server, target_server):
        create_database(server, name)
    pair = Databases(source_server.dsn(name), target_server.dsn(name))
    execute(pair.source, TABLE, KEYLESS, ROWS)
    yield pair
    for server in (source_server, target_server):
        drop_database(server, name)


def footprint(pipeline: PipelineUnderTest) -> dict[str, Any]:
    """Everything that a command may have made, on both sides and in the state."""
    tables = "SELECT schemaname, tablename FROM pg_tables WHERE schemaname !~ '^(pg_|information_schema)' ORDER BY 1, 2"
    schemas = "SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_(toast_)?temp' ORDER BY 1"
    return {
        "publications": pipeline.source_rows("SELECT pubname FROM pg_publication"),
        "slots": pipeline.source_rows(
            "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
        ),
        "source": pipeline.source_rows(tables),
        "target": pipeline.target_rows(tables),
        "schemas": (pipeline.source_rows(schemas), pipeline.target_rows(schemas)),
        "state": pipeline.state.exists(),
    }


class Refusals:
    """Runs commands in this process and checks how they fail."""

    def __init__(self, pipeline: PipelineUnderTest, capsys: pytest.CaptureFixture[str]) -> None:
        self.pipeline = pipeline
        self._capsys = capsys

    def main(self, command: str, *options: str) -> tuple[int, str, str]:
        """Exit code and output of a command."""
        self._capsys.readouterr()
        code = cli.main([command, "--pipeline", str(self.pipeline.file), *options])
        return code, *self._capsys.readouterr()

    def check(self, code: int, kind: str, message: str, *options: str, solution: str = "", command: str = "run") -> str:
        """The command fails as told, for people and for programs, and without a secret; its message is returned."""
        found, out, err = self.main(command, *options)
        assert found == code, (found, out, err)
        assert out == "" or command == "preflight"  # which says what it found before
        assert message in err, err
        assert "Traceback" not in err
        assert SECRET not in err
        said = err.strip().splitlines()
        assert len(said) <= 3, said
        assert all(line.strip() for line in said)

        found, out, err = self.main(command, "--json", *options)
        error = json.loads(out)
        assert found == code
        assert set(error) == {"error"}
        assert set(error["error"]) == {"kind", "message", "solution"}
        assert error["error"]["kind"] == kind
        assert message in error["error"]["message"]
        assert solution in error["error"]["solution"]
        assert error["error"]["solution"].endswith((".", ";", ")"))
        assert SECRET not in out + err
        return str(error["error"]["message"])


@pytest.fixture
def refusals(untouched: Databases, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Refusals]:
    """The checks; that nothing has changed on either side is checked at the end."""
    pipeline = PipelineUnderTest(tmp_path, untouched, ["public.t"])
    before = footprint(pipeline)
    yield Refusals(pipeline, capsys)
    assert footprint(pipeline) == before


# -- exit 2: the file is wrong -------------------------------------------------------------------------

WRONG_FILES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "unknown table": ({"source": {"tables": ["public.u"]}}, "UnknownTable", "public.u", "public.t"),
    "unknown glob": ({"source": {"tables": ["sales.*"]}}, "UnknownTable", "sales.*", "source.tables"),
    "malformed dsn": (
        {"source": {"dsn": f"postgresql//cdc:{SECRET}@db:x/shop"}},
        "ConfigError",
        "source.dsn",
        "postgresql://user@host:port/database",
    ),
    "dsn with a wrong port": (
        {"sink": {"dsn": f"postgresql://cdc:{SECRET}@db:port/dw"}},
        "ConfigError",
        "sink.dsn",
        "postgresql://user@host:port/database",
    ),
    "unknown key": ({"snapshot": {"chunk_row": 5}}, "ConfigError", "snapshot.chunk_row", "chunk_rows"),
    "unknown section": ({"streams": {"trigger": "1 s"}}, "ConfigError", "streams", "stream"),
    "wrong type": ({"snapshot": {"chunk_rows": "many"}}, "ConfigError", "chunk_rows", "whole number"),
    "wrong mode": ({"sink": {"mode": "miror"}}, "ConfigError", "'miror'", "mirror, changelog"),
    "wrong name": ({"pipeline": "Shop 1"}, "ConfigError", "pipeline", "a-z"),
    "unset variable": ({"source": {"dsn": "${NO_SUCH_DSN}"}}, "ConfigError", "NO_SUCH_DSN", "NO_SUCH_DSN"),
}


@pytest.mark.parametrize("case", WRONG_FILES.values(), ids=WRONG_FILES.keys())
def test_wrong_files(refusals: Refusals, case: tuple[dict[str, Any], str, str, str]) -> None:
    changes, kind, message, solution = case
    refusals.pipeline.change(**changes)
    for command in ("preflight", "run"):
        refusals.check(2, kind, message, solution=solution, command=command)


def test_keys_that_are_missing(refusals: Refusals) -> None:
    whole = refusals.pipeline.document
    for key in ("pipeline", "source", "sink", "state", "source.dsn", "source.tables", "sink.dsn"):
        refusals.pipeline.document = copy.deepcopy(whole)
        section, _, name = key.partition(".")
        if name:
            del refusals.pipeline.document[section][name]
        else:
            del refusals.pipeline.document[section]
        refusals.pipeline.change()
        refusals.check(2, "ConfigError", f"{key} is missing", solution=f"`{key}`")


def test_a_file_that_does_not_exist(refusals: Refusals) -> None:
    refusals.pipeline.file.unlink()
    refusals.check(2, "ConfigError", "pipeline.yaml")


def test_a_file_that_is_not_yaml(refusals: Refusals) -> None:
    refusals.pipeline.file.write_text("pipeline: [shop", encoding="utf-8")
    code, _, err = refusals.main("run", "--json")
    assert code == 2, err


def test_a_table_without_a_key(refusals: Refusals) -> None:
    refusals.pipeline.change(source={"tables": ["public.keyless"]})
    refusals.check(2, "UncapturableTable", "public.keyless has no key", solution="ADD PRIMARY KEY")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stream", "--until", "noon"), "noon"),
        (("stream", "--until", "lsn:12"), "lsn:12"),
        (("resnapshot",), "--table"),
        (("resnapshot", "--all", "--table", "public.t"), "--all"),
        (("drop",), "confirmation"),
    ],
    ids=" ".join,
)
def test_wrong_options(refusals: Refusals, arguments: tuple[str, ...], message: str) -> None:
    command, *options = arguments
    refusals.check(2, "ConfigError", message, *options, command=command)


def test_options_that_the_parser_refuses(refusals: Refusals) -> None:
    for arguments in (["fly"], ["snapshot", "--chunks", '[["public.t", 3, 2]]'], ["run", "--verbose"]):
        with pytest.raises(SystemExit) as exit_:
            refusals.main(arguments[0], *arguments[1:])
        assert exit_.value.code == 2


def test_the_commands_come_without_what_only_reads_need() -> None:
    """Each command, and each process of Spark that imports the engine, would pay for pandas and what comes with it."""
    loading = (
        "import sys; from airflow_cdc_provider.engine.commands import cli;"
        "print({'pandas', 'adbc_driver_postgresql'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", loading], text=True).strip() == "set()"


# -- exit 1: the environment fails ---------------------------------------------------------------------


@pytest.mark.parametrize("section", ["source", "sink"])
def test_a_server_that_cannot_be_reached(refusals: Refusals, section: str) -> None:
    port = find_free_port()
    refusals.pipeline.change(**{section: {"dsn": f"postgresql://cdc:{SECRET}@127.0.0.1:{port}/shop"}})
    refusals.check(1, "ConnectionFailed", f"127.0.0.1:{port}/shop", solution="reachable")


def test_a_wrong_wal_level(make_server: ServerMaker, refusals: Refusals) -> None:
    server = make_server(settings={"wal_level": "replica"})
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(TABLE)
    refusals.pipeline.change(source={"dsn": server.dsn()})
    refusals.check(1, "ServerNotReady", "wal_level", solution="ALTER SYSTEM SET wal_level = 'logical'")


def test_no_free_slot(make_server: ServerMaker, refusals: Refusals) -> None:
    server = make_server(settings={"max_replication_slots": "1"})
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(TABLE)
        connection.execute("SELECT pg_create_logical_replication_slot('others', 'pgoutput')")
    refusals.pipeline.change(source={"dsn": server.dsn()})
    refusals.check(1, "ServerNotReady", "no replication slot is free", solution="max_replication_slots")
    assert query_rows(server.dsn(), "SELECT slot_name FROM pg_replication_slots") == [("others",)]


@pytest.fixture
def role(untouched: Databases) -> Iterator[str]:
    """A role of the source that may log in and nothing else."""
    name = f"clerk{os.getpid()}"
    execute(untouched.source, f"CREATE ROLE {name} LOGIN")
    yield name
    execute(untouched.source, f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def test_missing_privileges(role: str, refusals: Refusals) -> None:
    pipeline = refusals.pipeline
    pipeline.change(source={"dsn": pipeline.databases.source.replace("postgres@", f"{role}@")})
    refusals.check(1, "MissingPrivilege", "replication", solution=f"ALTER ROLE {role} WITH REPLICATION")
    pipeline.source(f"ALTER ROLE {role} REPLICATION")
    refusals.check(1, "MissingPrivilege", "may not read public.t", solution="GRANT SELECT ON public.t")
    pipeline.source(f"GRANT SELECT ON public.t TO {role}")
    refusals.check(1, "MissingPrivilege", "does not own public.t", solution="CREATE PUBLICATION")


def test_a_state_that_cannot_be_written(refusals: Refusals) -> None:
    file = refusals.pipeline.directory / "file"
    file.write_text("not a directory", encoding="utf-8")
    refusals.pipeline.change(state=f"file://{file}/state")
    refusals.check(1, "StateUnwritable", str(file), solution="state")
    assert file.read_text(encoding="utf-8") == "not a directory"


# -- exit 3: refused to protect data -------------------------------------------------------------------


def test_a_sink_that_is_the_source(refusals: Refusals) -> None:
    # Another name of the same server must not hide it.
    dsn = refusals.pipeline.databases.source.replace("127.0.0.1", "localhost")
    refusals.pipeline.change(sink={"dsn": dsn})
    refusals.check(3, "SinkIsSource", "source", solution="sink")


def test_a_target_table_with_rows_of_others(pipeline: PipelineUnderTest, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.target(TABLE, "INSERT INTO public.t VALUES (1, 'theirs')")
    before = footprint(pipeline)
    Refusals(pipeline, capsys).check(3, "ForeignTable", "public.t", solution="sink.schema")
    assert footprint(pipeline) == before
    assert pipeline.target_rows("TABLE public.t") == [(1, "theirs")]


def test_commands_that_need_a_provisioned_pipeline(refusals: Refusals) -> None:
    for command, *options in (["snapshot"], ["stream"], ["verify"], ["resnapshot", "--all"]):
        refusals.check(3, "GateClosed", "no commit record", *options, solution="airflow-cdc provision", command=command)


def test_a_slot_of_others(pipeline: PipelineUnderTest, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.source(f"SELECT pg_create_logical_replication_slot('{pipeline.pipeline.source.slot}', 'pgoutput')")
    before = footprint(pipeline)
    Refusals(pipeline, capsys).check(3, "GateClosed", "exists", solution="pg_drop_replication_slot")
    assert footprint(pipeline) == before


def test_a_second_writer(pipeline: PipelineUnderTest, capsys: pytest.CaptureFixture[str]) -> None:
    provisioned = pipeline.provision()
    # The heart of another process beats: that of the one which started this, which is certainly alive.
    pid = os.getppid()
    started = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    other = Owner(Owner.this().host, pid, int(started))
    beat = Heartbeat(other, "stream", provisioned.epoch, 4_000_000_000.0, False, {})
    write_heartbeat(State(pipeline.pipeline.state), beat)
    before = footprint(pipeline)
    refusals = Refusals(pipeline, capsys)
    for command in ("provision", "snapshot", "stream", "run"):
        refusals.check(3, "SecondWriter", str(other.pid), solution="--takeover", command=command)
    refusals.check(3, "SecondWriter", str(other.pid), "--yes", command="drop")
    refusals.check(3, "SecondWriter", str(other.pid), "--all", command="resnapshot")
    assert footprint(pipeline) == before
    assert pipeline.record.epoch == provisioned.epoch
    code, out, err = refusals.main("provision", "--takeover", "--json")
    assert code == 0, err
    assert json.loads(out)["epoch"] > provisioned.epoch


# -- what works ----------------------------------------------------------------------------------------


def shape(value: Any, key: str = "") -> None:
    """LSNs are texts, whatever the command."""
    if isinstance(value, dict):
        for name, part in value.items():
            shape(part, name)
    elif isinstance(value, list):
        for part in value:
            shape(part)
    elif key in LSN_KEYS and value is not None:
        parse_lsn(value)


@pytest.mark.spark
def test_the_life_of_a_pipeline(pipeline: PipelineUnderTest) -> None:
    """Every command once, with the objects that programs rely on."""
    found = pipeline.json("preflight")
    assert set(found) == {"findings"}
    assert all({"check", "ok", "warning", "message"} <= set(finding) for finding in found["findings"])
    assert all(finding["ok"] for finding in found["findings"])

    new = pipeline.json("status")
    assert (new["state"], new["epoch"], new["applied_lsn"], new["slot"], new["tables"]) == ("new", None, None, None, [])

    provisioned = pipeline.json("provision")
    assert provisioned["tables"] == ["public.t"]
    assert provisioned["chunks"] == 2
    again = pipeline.json("provision")
    assert again["epoch"] > provisioned["epoch"]
    assert again == {**again, "chunks": 2, "applied_lsn": provisioned["applied_lsn"]}

    copied = pipeline.json("snapshot")
    assert (copied["chunks"], copied["finished"], copied["rows"]) == (2, 2, 100)
    assert pipeline.json("snapshot")["rows"] == 0

    pipeline.source("UPDATE public.t SET body = 'changed' WHERE id <= 10")
    end = pipeline.marker()
    streamed = pipeline.json("stream", "--until", f"lsn:{format_lsn(end)}")
    assert streamed["caught_up"] is True
    assert parse_lsn(streamed["applied_lsn"]) >= end
    assert (streamed["changes"], streamed["tables"]) == (10, {"public.t": 10})
    assert (streamed["lag_bytes"] >= 0, streamed["lag_seconds"] >= 0) == (True, True)
    assert pipeline.confirmed() >= end

    status = pipeline.json("status")
    assert set(status) >= {
        "pipeline",
        "state",
        "epoch",
        "consistent",
        "applied_lsn",
        "lag_bytes",
        "lag_seconds",
        "slot",
        "tables",
        "last_error",
    }
    assert set(status["slot"]) >= {"restart_lsn", "confirmed_flush_lsn", "retained_bytes", "wal_status", "active"}
    assert (status["pipeline"], status["state"], status["consistent"]) == (pipeline.name, "stopped", True)
    assert (status["last_error"], status["slot"]["active"]) == (None, False)
    assert status["tables"] == [
        {
            "table": "public.t",
            "chunks": 2,
            "finished": 2,
            "rows": 100,
            "finished_chunks": [[0, 1]],
            "running_chunks": [],
        }
    ]

    verified = pipeline.json("verify")
    assert verified["equal"] is True
    (table,) = verified["tables"]
    assert (table["table"], table["source_rows"], table["target_rows"]) == ("public.t", 100, 100)
    assert (table["equal"], table["differences"]) == (True, [])
    for result in (provisioned, copied, streamed, status, verified):
        shape(result)
    assert pipeline.json("stop") == {"asked": []}

    pipeline.target("UPDATE public.t SET body = 'damaged' WHERE id IN (3, 70)", "DELETE FROM public.t WHERE id = 5")
    damaged = pipeline.json("verify", code=4)
    differences = {(d["kind"], d["key"]["id"]) for d in damaged["tables"][0]["differences"]}
    assert differences == {("different", "3"), ("different", "70"), ("missing", "5")}
    told = pipeline.run("verify", code=4).stdout
    assert '{"id": "70"}' in told
    part = pipeline.json("resnapshot", "--table", "public.t", "--where", "id < 50")
    assert part == {"requested": None, "rows": 49, "tables": {"public.t": 49}}
    differences = [d["key"]["id"] for d in pipeline.json("verify", code=4)["tables"][0]["differences"]]
    assert differences == ["70"]
    assert pipeline.json("resnapshot", "--table", "public.t")["tables"] == {"public.t": 100}
    assert pipeline.json("verify")["equal"] is True

    unknown = pipeline.json("resnapshot", "--table", "public.u", code=2)
    assert "public.u" in unknown["error"]["message"]

    dropped = pipeline.json("drop", "--yes")
    assert dropped == {"dropped": pipeline.name, "left": []}
    after = footprint(pipeline)
    assert (after["publications"], after["slots"], after["state"]) == ([], [], False)
    assert sink_of(pipeline.pipeline).record() is None
    assert pipeline.target_rows("SELECT count(*) FROM public.t") == [(100,)]
    assert pipeline.json("drop", "--yes") == dropped


@pytest.mark.spark
def test_a_stream_and_how_it_ends(pipeline: PipelineUnderTest) -> None:
    """``stop`` and SIGTERM end a stream after its unit; in between it takes requests, and is the only writer."""
    port = find_free_port()
    pipeline.change(metrics={"prometheus": f"127.0.0.1:{port}"})
    pipeline.provision()
    pipeline.copy()
    stream = pipeline.start("stream", "--json")
    pipeline.source("INSERT INTO public.t VALUES (1000, 'streamed')")
    pipeline.await_applied(stream)
    stream.until(lambda: scrape(port).get(("changes_total", "stream,public.t")) == 1, "the change among the metrics")
    assert {"lag_bytes", "lag_seconds", "retained_wal_bytes", "batch_seconds"} <= {name for name, _ in scrape(port)}
    assert pipeline.target_rows("SELECT body FROM public.t WHERE id = 1000") == [("streamed",)]

    status = pipeline.json("status")
    assert status["state"] == "streaming"
    assert status["slot"]["active"] is True
    refused = pipeline.json("stream", code=3)
    assert refused["error"]["kind"] == "SecondWriter"
    assert str(stream.process.pid) in refused["error"]["message"]

    pipeline.target("UPDATE public.t SET body = 'damaged' WHERE id IN (7, 60)")
    requested = pipeline.json("resnapshot", "--table", "public.t", "--where", "id = 7")
    assert requested["rows"] is None
    assert requested["requested"] is not None
    repaired = "SELECT id, body FROM public.t WHERE id IN (7, 60) ORDER BY id"
    stream.until(lambda: pipeline.target_rows(repaired)[0] == (7, "row 7"), "the repair of a row")
    assert pipeline.target_rows(repaired)[1] == (60, "damaged")
    pipeline.json("resnapshot", "--table", "public.t")
    stream.until(lambda: pipeline.target_rows(repaired)[1] == (60, "row 60"), "the repair of the table")

    pipeline.source("UPDATE public.t SET body = 'last' WHERE id = 1000")
    pipeline.await_applied(stream)
    assert pipeline.json("stop") == {"asked": ["stream"]}
    ended = stream.wait()
    assert ended.code == 0, ended.stderr
    assert set(ended.json) == {"applied_lsn", "changes", "tables", "lag_bytes", "lag_seconds", "caught_up"}
    pipeline.assert_equal()

    # The request to stop was for that run, not for the next.
    stream = pipeline.start("stream", "--json")
    pipeline.source("DELETE FROM public.t WHERE id = 1000")
    pipeline.await_applied(stream)
    assert stream.running
    stream.terminate()
    ended = stream.wait()
    assert ended.code == 0, ended.stderr
    pipeline.assert_equal()
    assert pipeline.json("status")["state"] == "stopped"
    assert await_condition(lambda: not stream.processes(), 30), (
        stream.processes()
    )  # workers hear of the end from the JVM
    history = read_history(State(pipeline.pipeline.state))  # of both runs
    assert sum(batch["changes"] for batch in history["batches"]) == 3
    assert [parse_lsn(sample["applied_lsn"]) for sample in history["samples"]][-1] >= parse_lsn(
        history["batches"][-1]["end_lsn"]
    )
    assert history["errors"] == []


@pytest.mark.spark
@pytest.mark.thorough
def test_runs_and_a_transaction_larger_than_a_batch(pipeline: PipelineUnderTest) -> None:
    """The second run streams 20 MiB of one transaction in batches of 1 MiB, and reads no chunk again."""
    pipeline.change(stream={"max_batch_bytes": "1MiB"})
    first = pipeline.json("run")
    assert first["snapshot"]["rows"] == 100
    assert first["stream"]["caught_up"] is True
    chunks = pipeline.finished_chunks()
    pipeline.source(
        "UPDATE public.t SET body = 'before' WHERE id = 1",
        "INSERT INTO public.t SELECT n, repeat(md5(n::text), 32) FROM generate_series(1001, 21000) n",
        "UPDATE public.t SET body = 'after' WHERE id = 1",
    )
    second = pipeline.json("run")
    assert (second["snapshot"]["rows"], second["stream"]["caught_up"]) == (0, True)
    assert second["stream"]["changes"] == 20_002
    assert pipeline.finished_chunks() == chunks
    pipeline.assert_verified()
    pipeline.assert_equal(order="id")
