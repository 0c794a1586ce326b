"""The command line in case of errors: exit codes and messages.

Refusals happen before anything is changed, so each of these tests also checks both sides afterwards. The commands run
in this process, through the function of the command line.
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

from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner, write_heartbeat
from local_servers.process import find_free_port
from tests.commands.command_line import SECRET, TABLE, Refusals, footprint, pipeline, refusals, untouched
from tests.conftest import Databases, ServerMaker
from tests.support.databases import execute, query_rows
from tests.support.pipelines import PipelineUnderTest

__all__ = ["pipeline", "refusals", "untouched"]

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
    """Otherwise each command, and each process of Spark with the engine, would load pandas and its dependencies."""
    loading = (
        "import sys; from airflow_cdc_provider.engine.commands import cli;"
        "print({'pandas', 'adbc_driver_postgresql'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", loading], text=True).strip() == "set()"


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
    """Return a role of the source that can only log in."""
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


@pytest.mark.lengthy
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
    # The heartbeat is that of another process: the parent of this one, which is certainly alive.
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
