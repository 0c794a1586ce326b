"""Commands in this process, their errors, and the objects that they may have created."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine.commands import cli
from local_servers.postgres import PostgresServer
from tests.conftest import Databases, create_database, drop_database
from tests.support.databases import execute
from tests.support.pipelines import Outcome, PipelineUnderTest

TABLE = "CREATE TABLE public.t (id int PRIMARY KEY, body text)"


KEYLESS = "CREATE TABLE public.keyless (body text)"


ROWS = "INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 100) n"


SECRET = "s3cret-pa55word"


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> Iterator[PipelineUnderTest]:
    """Return a pipeline of a table with a hundred rows."""
    under_test = PipelineUnderTest(tmp_path, databases, ["public.t"], snapshot={"chunk_rows": 50})
    under_test.source(TABLE, ROWS)
    yield under_test
    under_test.end_commands()


@pytest.fixture(scope="module")
def untouched(source_server: PostgresServer, target_server: PostgresServer) -> Iterator[Databases]:
    """Return a pair of databases for all refusals: what is refused changes nothing."""
    name = f"refused{os.getpid()}"
    for server in (source_server, target_server):
        create_database(server, name)
    pair = Databases(source_server.dsn(name), target_server.dsn(name))
    execute(pair.source, TABLE, KEYLESS, ROWS)
    yield pair
    for server in (source_server, target_server):
        drop_database(server, name)


def footprint(pipeline: PipelineUnderTest) -> dict[str, Any]:
    """Return everything that a command may have created, on both sides and in the state."""
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


def assert_says_little(ended: Outcome) -> None:
    """Check that the output of Spark and its Python workers went to a file, which the command has named."""
    lines = [line for line in ended.stderr.splitlines() if not line.startswith(("snapshot ", "stream "))]
    assert len(lines) == 1, ended.stderr
    path = Path(lines[0].rpartition(" ")[2])
    assert path.stat().st_mode & 0o777 == 0o600


class CommandLine:
    """Runs commands in this process, with what they print."""

    def __init__(self, pipeline: PipelineUnderTest, capsys: pytest.CaptureFixture[str]) -> None:
        self.pipeline = pipeline
        self._capsys = capsys

    def main(self, command: str, *options: str) -> tuple[int, str, str]:
        """Return exit code and output of a command."""
        self._capsys.readouterr()
        code = cli.main([command, "--pipeline", str(self.pipeline.file), *options])
        return code, *self._capsys.readouterr()

    def run(self, command: str, *options: str, code: int = 0) -> str:
        """Run a command, check its exit code, and return its output."""
        found, out, err = self.main(command, *options)
        assert found == code, f"{command} {options}: {out[-2000:]}\n{err[-4000:]}"
        return out

    def json(self, command: str, *options: str, code: int = 0) -> Any:
        """Run a command with ``--json``, and return its object."""
        return json.loads(self.run(command, *options, "--json", code=code))


@pytest.fixture
def command_line(pipeline: PipelineUnderTest, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Return the commands of that pipeline."""
    return CommandLine(pipeline, capsys)


class Refusals(CommandLine):
    """Runs commands and checks how they fail."""

    def check(self, code: int, kind: str, message: str, *options: str, solution: str = "", command: str = "run") -> str:
        """Check that the command fails with this error, for people and programs, without a secret; return the text."""
        found, out, err = self.main(command, *options)
        assert found == code, (found, out, err)
        assert out == "" or command == "preflight"  # it reports its findings first
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
    """Return the checks; at the end, check that nothing has changed on either side."""
    pipeline = PipelineUnderTest(tmp_path, untouched, ["public.t"])
    before = footprint(pipeline)
    yield Refusals(pipeline, capsys)
    assert footprint(pipeline) == before
