"""Least privilege: pipelines run with the grants of the documentation, and preflight names each missing one.

The server is a plain one, without the roles that fixtures create for the other tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import ConnectionFailed, MissingPrivilege
from airflow_cdc_provider.engine.core.findings import Finding
from local_servers.postgres import PostgresServer
from tests.conftest import SESSION_SETTINGS, Databases, drop_database
from tests.support.databases import execute, query_rows
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

TABLES = (
    "CREATE SCHEMA types",
    "CREATE TYPE types.mood AS ENUM ('fair', 'foul')",
    "CREATE SCHEMA shop AUTHORIZATION shop_owner",
    "CREATE TABLE shop.orders (id int, mood types.mood, body text, PRIMARY KEY (id, mood))",
    "CREATE TABLE shop.customers (id int PRIMARY KEY, name text)",
    "ALTER TABLE shop.orders OWNER TO shop_owner",
    "ALTER TABLE shop.customers OWNER TO shop_owner",
    "INSERT INTO shop.orders SELECT n, 'fair', 'order ' || n FROM generate_series(1, 20) n",
    "INSERT INTO shop.customers SELECT n, 'customer ' || n FROM generate_series(1, 20) n",
    "GRANT USAGE ON SCHEMA types TO PUBLIC",
)
TYPES = TABLES[:2] + TABLES[-1:]


@pytest.fixture(scope="module")
def server(server_directory: Path) -> Iterator[PostgresServer]:
    with PostgresServer.create(server_directory / "privileges", settings=SESSION_SETTINGS) as server:
        execute(server.dsn(), "CREATE ROLE shop_owner")
        yield server


@contextmanager
def shop_databases(server: PostgresServer) -> Iterator[Databases]:
    """Return the databases ``shop`` and ``dw`` of the documentation, with two tables that the pipeline does not own."""
    execute(server.dsn(), "CREATE DATABASE shop", "CREATE DATABASE dw")
    pair = Databases(server.dsn("shop"), server.dsn("dw"))
    execute(pair.source, *TABLES)
    execute(pair.target, *TYPES)
    try:
        yield pair
    finally:
        for name in ("shop", "dw"):
            drop_database(server, name)
        execute(server.dsn(), "DROP ROLE IF EXISTS cdc", "DROP ROLE IF EXISTS cdc_log")


def pipeline_of(databases: Databases, directory: Path) -> PipelineUnderTest:
    """Return the pipeline ``shop`` of the documentation, as the role ``cdc``."""
    return PipelineUnderTest(directory, databases, ["shop.*"])


# -- the grants of the documentation -------------------------------------------------------------------


def documented() -> dict[str, list[str]]:
    """Return the statements of ``docs/production.md``, each block by the words of its first line, a comment."""
    text = (Path(__file__).parents[2] / "docs" / "production.md").read_text(encoding="utf-8")
    section = text.partition("## Roles and grants\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```sql\n-- ([^\n]*)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return {title: re.findall(r"\S[^;]*;", body) for title, body in blocks}


SOURCE_ROLE, READING = "on the source's server, once", "in the source's database"
TWO_ROLES = "on the source's server, once, for two roles instead of one"
SOURCES = (
    "in the source's database, if the role publishes the tables itself",
    "in the source's database otherwise, as the tables' owner or a superuser",
)
SINK_ROLE = "on the sink's server, once"
SINKS = (
    "in the sink's database, if the role creates the schemas",
    "in the sink's database, if an administrator creates the schemas",
    "in the sink's database, if an administrator creates the schemas and the tables",
)


@dataclass(frozen=True)
class Grants:
    """The titles of the documentation's blocks for a source and a sink; both are on one server, and have one role."""

    source: str
    sink: str

    def make(self, databases: Databases, roles: str = SOURCE_ROLE) -> None:
        blocks = documented()
        execute(databases.source, *blocks[roles], *blocks[READING], *blocks[self.source])
        if self.sink == SINKS[2]:  # an administrator chooses their definition
            kind = "id int, mood types.mood, body text, PRIMARY KEY (id, mood)"
            execute(databases.target, "CREATE SCHEMA shop", f"CREATE TABLE shop.orders ({kind})")
            execute(databases.target, "CREATE TABLE shop.customers (id int PRIMARY KEY, name text)")
        execute(databases.target, *blocks[self.sink])


@pytest.mark.parametrize(
    "grants", [Grants(SOURCES[0], SINKS[0]), Grants(SOURCES[1], SINKS[1]), Grants(SOURCES[1], SINKS[2])], ids=str
)
def test_the_whole_path_with_the_documented_grants(grants: Grants, server: PostgresServer, tmp_path: Path) -> None:
    with shop_databases(server) as databases:
        grants.make(databases)
        walk(grants, databases, pipeline_of(databases, tmp_path))


def test_the_whole_path_with_two_documented_roles(server: PostgresServer, tmp_path: Path) -> None:
    """Neither role can do the work of the other."""
    grants = Grants(SOURCES[1], SINKS[0])
    with shop_databases(server) as databases:
        grants.make(databases, TWO_ROLES)
        pipeline = pipeline_of(databases, tmp_path)
        pipeline.change(source={"replication_dsn": server.dsn("shop", "cdc_log")})
        walk(grants, databases, pipeline)


def walk(grants: Grants, databases: Databases, pipeline: PipelineUnderTest) -> None:
    powers = "SELECT rolsuper, rolcreaterole, rolcreatedb, rolbypassrls FROM pg_roles WHERE rolname = 'cdc'"
    assert query_rows(databases.source, powers) == [(False, False, False, False)]
    assert commands.preflight(pipeline.pipeline)["findings"]
    pipeline.provision()
    for table in ("shop.orders", "shop.customers"):
        pipeline.copy(table=table)
    pipeline.source("UPDATE shop.orders SET body = 'changed' WHERE id < 4", "DELETE FROM shop.customers WHERE id = 1")
    pipeline.apply()
    pipeline.source("INSERT INTO shop.customers VALUES (50, 'late')")
    assert commands.resnapshot(pipeline.pipeline, tables=["shop.customers"])["rows"] == 20
    pipeline.apply()
    pipeline.assert_verified()
    assert commands.status(pipeline.pipeline)["consistent"]
    assert query_rows(databases.target, "SELECT count(*) FROM pg_class WHERE relname LIKE 'stage%'") == [(0,)]
    commands.drop(pipeline.pipeline)

    left = "SELECT (SELECT count(*) FROM pg_replication_slots), (SELECT count(*) FROM pg_publication)"
    assert query_rows(databases.source, left) == [(0, int(grants.source == SOURCES[1]))]
    pipeline.assert_equal("shop.orders")


def test_all_blocks_of_the_documentation_are_tested() -> None:
    assert set(documented()) == {SOURCE_ROLE, TWO_ROLES, READING, SINK_ROLE, *SOURCES, *SINKS}


NEEDLESS = (
    "REVOKE EXECUTE ON FUNCTION pg_create_logical_replication_slot, pg_drop_replication_slot FROM PUBLIC",
    "REVOKE EXECUTE ON FUNCTION pg_logical_emit_message(boolean, text, text) FROM PUBLIC",
    "REVOKE CREATE ON SCHEMA public FROM PUBLIC",
    "REVOKE TEMPORARY ON DATABASE dw FROM PUBLIC",
)


def test_privileges_that_a_sink_does_not_need(server: PostgresServer, tmp_path: Path) -> None:
    """In changelog mode rows are appended, and tables of a mirror need only privileges on rows."""
    with shop_databases(server) as databases:
        Grants(SOURCES[1], SINKS[2]).make(databases)
        pipeline = pipeline_of(databases, tmp_path)
        execute(databases.target, *NEEDLESS)
        assert failures(pipeline) == []
        execute(databases.target, "REVOKE UPDATE, DELETE ON shop.orders, shop.customers FROM cdc")
        assert [finding.check for finding in failures(pipeline)] == ["sink privileges"]
        pipeline.change(sink={"mode": "changelog"})  # its privileges allow it, but not the keys of these tables
        assert "sink privileges" not in [finding.check for finding in failures(pipeline)]


# -- each privilege alone ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lack:
    """A privilege that is revoked.

    :param statements: statements that revoke it, run by the administrator of one side.
    :param check: the only check that fails then.
    :param names: text that its message contains.
    """

    statements: str
    check: str
    names: str
    grants: Grants = Grants(SOURCES[1], SINKS[2])

    @property
    def of_sink(self) -> bool:
        return self.check.startswith("sink")


OWNED, CREATING = Grants(SOURCES[0], SINKS[0]), Grants(SOURCES[1], SINKS[1])
LACKS = (
    Lack("REVOKE CONNECT ON DATABASE shop FROM PUBLIC", "source", "permission denied for database"),
    Lack("ALTER ROLE cdc NOREPLICATION", "replication", "cdc may not use replication"),
    Lack("REVOKE USAGE ON SCHEMA shop FROM cdc", "select", "may not use schema shop"),
    Lack("REVOKE USAGE ON SCHEMA types FROM PUBLIC", "select", "may not use schema types"),
    Lack("REVOKE SELECT ON shop.orders FROM cdc", "select", "may not read shop.orders"),
    Lack("REVOKE SELECT ON shop.orders FROM cdc; GRANT SELECT (id, mood, body) ON shop.orders TO cdc",
         "select", "may not read shop.orders"),
    Lack("REVOKE EXECUTE ON FUNCTION pg_logical_emit_message(boolean, text, text) FROM PUBLIC",
         "functions", "pg_logical_emit_message(boolean,text,text)"),
    Lack("REVOKE EXECUTE ON FUNCTION pg_control_system FROM PUBLIC", "functions", "pg_control_system()"),
    Lack("REVOKE EXECUTE ON FUNCTION pg_create_logical_replication_slot, pg_drop_replication_slot FROM PUBLIC",
         "functions", "pg_create_logical_replication_slot"),
    Lack("ALTER TABLE shop.orders ENABLE ROW LEVEL SECURITY", "row security", "hides rows of shop.orders"),
    Lack("DROP PUBLICATION airflow_cdc_shop", "publication", "does not own shop.customers, shop.orders"),
    Lack("ALTER PUBLICATION airflow_cdc_shop DROP TABLE shop.orders", "publication", "lacks shop.orders"),
    Lack("REVOKE CREATE ON DATABASE shop FROM cdc", "publication", "lacks CREATE on the database", OWNED),
    Lack("REVOKE shop_owner FROM cdc", "publication", "does not own shop.customers, shop.orders", OWNED),
    Lack("REVOKE CONNECT ON DATABASE dw FROM PUBLIC", "sink", "permission denied for database"),
    Lack("REVOKE EXECUTE ON FUNCTION pg_terminate_backend FROM PUBLIC", "sink functions", "pg_terminate_backend"),
    Lack("REVOKE CREATE ON DATABASE dw FROM cdc", "sink privileges", "create schema airflow_cdc", OWNED),
    Lack("REVOKE CREATE ON SCHEMA shop FROM cdc", "sink privileges", "create tables in schema shop", CREATING),
    Lack("REVOKE USAGE ON SCHEMA airflow_cdc FROM cdc", "sink privileges", "use schema airflow_cdc", CREATING),
    Lack("REVOKE USAGE ON SCHEMA shop FROM cdc", "sink privileges", "use schema shop"),
    *(Lack(f"REVOKE {privilege} ON shop.orders FROM cdc", "sink privileges", f"{privilege} shop.orders")
      for privilege in ("SELECT", "INSERT", "UPDATE", "DELETE")),
    Lack("ALTER TABLE shop.orders ENABLE ROW LEVEL SECURITY", "sink privileges", "see all rows of shop.orders"),
    Lack("CREATE TABLE airflow_cdc.chunks (pipeline text); GRANT SELECT ON airflow_cdc.chunks TO cdc",
         "sink privileges", "INSERT, UPDATE, DELETE airflow_cdc.chunks"),
)  # fmt: skip


# Undoes privileges that a case gives in another way than those that it revokes.
RESTORE = ("ALTER ROLE cdc NOBYPASSRLS", "ALTER TABLE IF EXISTS shop.orders DISABLE ROW LEVEL SECURITY")


@pytest.fixture(scope="module")
def granted(request: pytest.FixtureRequest, server: PostgresServer) -> Iterator[Databases]:
    """Return databases with the documented grants of the parameter, for all its cases: each undoes its changes."""
    with shop_databases(server) as databases:
        request.param.make(databases)
        yield databases


@pytest.mark.parametrize(
    ("granted", "lack"),
    [pytest.param(lack.grants, lack, id=f"{lack.check}: {lack.statements}") for lack in LACKS],
    indirect=["granted"],
)
def test_a_privilege_that_is_missing(granted: Databases, lack: Lack, tmp_path: Path) -> None:
    """Preflight has one finding, and the statement in its solution, run by an administrator, repairs it."""
    pipeline = pipeline_of(granted, tmp_path)
    dsn = granted.target if lack.of_sink else granted.source
    assert failures(pipeline) == []

    execute(dsn, *lack.statements.split("; "))
    (finding,) = failures(pipeline)
    assert (finding.check, type(finding.error)) == (lack.check, MissingPrivilege)
    assert lack.names in finding.message
    execute(dsn, *statements(finding))

    assert failures(pipeline) == []
    execute(dsn, *RESTORE)


def failures(pipeline: PipelineUnderTest) -> list[Finding]:
    return [finding for finding in preflight(pipeline.pipeline) if finding.error is not None]


def statements(finding: Finding) -> list[str]:
    """Return the SQL of a finding's solution, without alternatives."""
    assert finding.error is not None
    found = re.fullmatch(r".*?[Rr]un: (.*?;)( \(on .*| or let .*)?", finding.error.solution, re.DOTALL)
    assert found is not None, finding.error.solution
    return re.findall(r"\S[^;]*;", found[1])


def test_a_member_of_the_role_of_managed_services(server: PostgresServer, tmp_path: Path) -> None:
    """On Amazon RDS, roles replicate as members of a role, without the attribute: refusals have another reason."""
    with shop_databases(server) as databases:
        Grants(SOURCES[1], SINKS[2]).make(databases)
        pipeline = pipeline_of(databases, tmp_path)
        execute(databases.source, "ALTER ROLE cdc NOREPLICATION", "CREATE ROLE rds_replication")
        try:
            (finding,) = failures(pipeline)
            assert type(finding.error) is MissingPrivilege
            assert "GRANT rds_replication TO cdc" in finding.error.solution
            execute(databases.source, "GRANT rds_replication TO cdc")
            (finding,) = failures(pipeline)
            assert type(finding.error) is ConnectionFailed
            assert "replication" in finding.message
        finally:
            execute(databases.source, "DROP ROLE rds_replication")
