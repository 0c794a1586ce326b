"""The findings of preflight on real servers, and that it changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg2
import pytest

from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    ConfigError,
    ConnectionFailed,
    ForeignTable,
    GateClosed,
    MissingPrivilege,
    ServerNotReady,
    SinkIsSource,
    StateUnwritable,
    UncapturableTable,
    UnknownTable,
)
from airflow_cdc_provider.engine.core.findings import Finding, require
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import connected, rows, scalar
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve
from airflow_cdc_provider.engine.sources.postgres.catalog.publication import publication_sql, published_otherwise
from airflow_cdc_provider.engine.sources.postgres.provision import readiness
from local_servers.postgres import PostgresServer
from tests.conftest import Databases, ServerMaker

ORDERS = "CREATE SCHEMA shop; CREATE TABLE shop.orders (id int PRIMARY KEY, body text)"
RECORDS = """
CREATE SCHEMA airflow_cdc;
CREATE TABLE airflow_cdc.tables (pipeline text, source_table text, target_schema text, target_table text,
    definition jsonb);
"""


@pytest.fixture
def document(databases: Databases, tmp_path: Path) -> dict[str, Any]:
    """Return a pipeline file with a source that has the table shop.orders."""
    run(databases.source, ORDERS)
    return {
        "pipeline": "shop",
        "source": {"dsn": databases.source, "tables": ["shop.orders"], "slot": f"slot_of_{databases.source[-6:]}"},
        "sink": {"dsn": databases.target},
        "state": f"file://{tmp_path}/state/shop",
    }


@pytest.fixture
def role(source_server: PostgresServer, target_server: PostgresServer, databases: Databases) -> Iterator[str]:
    """Create a role that can only log in on both servers."""
    for server in (source_server, target_server):
        run(server.dsn(), "CREATE ROLE clerk LOGIN")
    yield "clerk"
    for server, dsn in ((source_server, databases.source), (target_server, databases.target)):
        run(dsn, "DROP OWNED BY clerk")
        run(server.dsn(), "DROP ROLE clerk")


def run(dsn: str, statement: str) -> None:
    with connected(dsn, writes=True) as connection:
        rows(connection, statement)


def as_role(dsn: str, role: str) -> str:
    return dsn.replace("postgres@", f"{role}@")


def check(document: dict[str, Any], **changes: Any) -> dict[str, Finding]:
    """Run preflight on the document with ``section__key`` replaced, and return the findings by their check."""
    changed = {key: dict(value) if isinstance(value, dict) else value for key, value in document.items()}
    for path, value in changes.items():
        section, _, key = path.partition("__")
        if key:
            changed[section][key] = value
        else:
            changed[section] = value
    findings = preflight(Pipeline.parse(changed))
    assert all(finding.ok == (finding.error is None) for finding in findings)
    assert len({finding.check for finding in findings}) == len(findings)
    return {finding.check: finding for finding in findings}


def refused(findings: dict[str, Finding], check: str, kind: type[CdcError]) -> CdcError:
    """Return the error of one check, which ``require`` raises as well."""
    error = findings[check].error
    assert type(error) is kind, findings
    assert error is not None
    assert error.message in findings[check].message
    with pytest.raises(kind):
        require(list(findings.values()))
    return error


def test_a_pipeline_that_can_run(document: dict[str, Any], databases: Databases, tmp_path: Path) -> None:
    findings = check(document)

    assert all(finding.ok for finding in findings.values()), findings
    require(list(findings.values()))
    assert findings["wal retention"].warning
    assert "max_slot_wal_keep_size is -1" in findings["wal retention"].message
    assert [name for name, finding in findings.items() if finding.warning] == ["wal retention"]
    assert all(finding.message.endswith((".", ").")) for finding in findings.values())
    assert list(tmp_path.iterdir()) == []
    for dsn, schemas in ((databases.source, {"shop"}), (databases.target, set())):
        with connected(dsn, writes=True) as connection:
            query = "SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_|^public$|^information_schema$'"
            assert {name for (name,) in rows(connection, query)} == schemas
            assert scalar(connection, "SELECT count(*) FROM pg_publication") == 0


def test_servers_that_cannot_be_reached(document: dict[str, Any]) -> None:
    nowhere = "postgresql://clerk:secret@127.0.0.1:1/shop"

    source = check(document, source__dsn=nowhere)
    sink = check(document, sink__dsn=nowhere)

    assert "secret" not in refused(source, "source", ConnectionFailed).message
    assert source["sink"].ok
    assert source["state"].ok
    refused(sink, "sink", ConnectionFailed)
    assert sink["tables"].ok


def test_a_source_that_is_not_set_up(make_server: ServerMaker, document: dict[str, Any]) -> None:
    """One run reports everything, so that the server has to be restarted only once."""
    settings = {
        "wal_level": "replica",
        "max_replication_slots": "0",
        "max_wal_senders": "0",
        "wal_sender_timeout": "1s",
    }
    server = make_server(settings=settings)
    run(server.dsn(), ORDERS)

    findings = check(document, source__dsn=server.dsn())

    assert "ALTER SYSTEM SET wal_level" in refused(findings, "wal_level", ServerNotReady).solution
    assert "max_replication_slots = 0" in refused(findings, "slot", ServerNotReady).message
    assert "max_wal_senders = 0" in refused(findings, "wal sender", ServerNotReady).message
    assert findings["wal_sender_timeout"].warning
    assert findings["tables"].ok

    server.stop()
    (server.data_directory / "standby.signal").touch()
    server.start()
    refused(check(document, source__dsn=server.dsn()), "primary", ServerNotReady)
    refused(check(document, sink__dsn=server.dsn()), "sink privileges", ServerNotReady)


def test_an_old_source_is_refused_before_anything_is_asked_of_it(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "MINIMUM_VERSION", 990000)

    findings = check(document)

    refused(findings, "version", ServerNotReady)
    assert set(findings) == {"source", "version", "sink", "sink functions", "identity", "state"}


def test_an_encoding_without_meaning(document: dict[str, Any], source_server: PostgresServer) -> None:
    run(source_server.dsn(), "CREATE DATABASE ascii ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")

    refused(check(document, source__dsn=source_server.dsn("ascii")), "encoding", ServerNotReady)

    run(source_server.dsn(), "DROP DATABASE ascii WITH (FORCE)")


def test_slots(document: dict[str, Any], databases: Databases) -> None:
    slot = document["source"]["slot"]
    run(databases.source, f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    assert check(document)["slot"].message == f"Slot {slot!r} exists."

    run(databases.source, f"SELECT pg_drop_replication_slot('{slot}')")
    run(databases.source, f"SELECT pg_create_physical_replication_slot('{slot}')")
    try:
        refused(check(document), "slot", GateClosed)
    finally:
        run(databases.source, f"SELECT pg_drop_replication_slot('{slot}')")


def test_tables(document: dict[str, Any], databases: Databases) -> None:
    run(databases.source, "CREATE TABLE shop.keyless (id int)")

    unknown = refused(check(document, source__tables=["shop.order"]), "tables", UnknownTable)
    assert "shop.orders" in unknown.solution
    assert unknown.exit_code == 2
    assert refused(check(document, source__tables=["shop.keyless"]), "tables", UncapturableTable).exit_code == 2


def test_a_role_without_privileges(document: dict[str, Any], databases: Databases, role: str) -> None:
    """Each remedy makes its check pass if an administrator runs it."""
    document["source"]["dsn"] = as_role(databases.source, role)
    document["sink"]["dsn"] = as_role(databases.target, role)
    rule = {"table": "shop.orders", "columns": ["id", "body"], "where": "id > 0"}
    run(databases.source, "ALTER TABLE shop.orders ENABLE ROW LEVEL SECURITY")

    findings = check(document)
    for name in ("replication", "select", "row security", "publication", "sink privileges"):
        solution = refused(findings, name, MissingPrivilege).solution
        dsn = databases.target if name.startswith("sink") else databases.source
        run(dsn, solution[solution.index(": ") + 2 :].partition("(on")[0].partition("or let")[0])

    findings = check(document)
    assert all(finding.ok for finding in findings.values()), findings
    assert findings["publication"].message == "Publication 'airflow_cdc_shop' exists and has all tables."

    different = refused(check(document, source__tables=[rule]), "publication", MissingPrivilege)
    assert "other columns or rows of shop.orders" in different.message
    run(databases.source, different.solution.partition(": ")[2])
    assert check(document, source__tables=[rule])["publication"].ok


READ_ONLY_LEVELS = ("SYSTEM", 'DATABASE "{}"', 'ROLE "Cd c"', 'ROLE "Cd c" IN DATABASE "{}"')


def test_servers_that_are_read_only_by_default(document: dict[str, Any], make_server: ServerMaker) -> None:
    """The remedy keeps the protection for all other roles."""
    server, names = make_server(), {"source": "Sh op", "sink": "D w"}
    run(server.dsn(), 'CREATE ROLE "Cd c" LOGIN REPLICATION')
    for side, name in names.items():
        run(server.dsn(), f'CREATE DATABASE "{name}" OWNER "Cd c"')
        document[side]["dsn"] = server.dsn(quote(name), "Cd%20c")
    run(document["source"]["dsn"], ORDERS)
    assert all(finding.ok for finding in check(document).values())

    writing = f"{server.dsn()}?options=-c%20default_transaction_read_only%3Doff"
    for level in READ_ONLY_LEVELS:
        statements = [f"ALTER {level.format(name)} {{}} default_transaction_read_only" for name in names.values()]
        for statement in statements:
            run(writing, statement.format("SET") + " = on")
        run(writing, "SELECT pg_reload_conf()")
        assert await_condition(lambda: sum(not finding.ok for finding in check(document).values()) == 2, 10), level
        findings = check(document)
        for name in ("publication", "sink privileges"):
            error = refused(findings, name, ServerNotReady)
            assert "default_transaction_read_only is on" in error.message
            run(writing, error.solution.partition(": ")[2])
        assert all(finding.ok for finding in check(document).values()), level
        for statement in statements:
            run(writing, statement.format("RESET"))
        for name in names.values():
            run(writing, f'ALTER ROLE "Cd c" IN DATABASE "{name}" RESET ALL')


def test_a_dsn_that_makes_transactions_read_only(document: dict[str, Any], databases: Databases) -> None:
    option = "?options=-c%20default_transaction_read_only%3Don"
    for side, name in (("source", "publication"), ("sink", "sink privileges")):
        error = refused(check(document, **{f"{side}__dsn": document[side]["dsn"] + option}), name, ServerNotReady)
        assert "Remove it from the options of the DSN" in error.solution


def test_a_read_only_source_whose_publication_is_there(document: dict[str, Any], databases: Databases) -> None:
    """Nothing has to be written there, unless tables are missing from it."""
    run(databases.source, "CREATE PUBLICATION airflow_cdc_shop FOR TABLE shop.orders")
    document["source"]["dsn"] += "?options=-c%20default_transaction_read_only%3Don"
    assert check(document)["publication"].ok

    run(databases.source, "CREATE TABLE shop.more (id int PRIMARY KEY)")
    refused(check(document, source__tables=["shop.*"]), "publication", ServerNotReady)


def test_publications_of_others(document: dict[str, Any], databases: Databases, role: str) -> None:
    run(databases.source, "CREATE TABLE shop.more (id int PRIMARY KEY)")
    run(databases.source, f"GRANT USAGE ON SCHEMA shop TO {role}; GRANT SELECT ON ALL TABLES IN SCHEMA shop TO {role}")
    run(databases.source, "CREATE PUBLICATION airflow_cdc_shop FOR TABLE shop.orders WITH (publish = 'insert')")
    tables = {"source__tables": ["shop.*"]}

    wrong = refused(check(document, **tables), "publication", ServerNotReady)
    run(databases.source, wrong.solution.partition(": ")[2])

    assert "tables will be added" in check(document, **tables)["publication"].message
    document["source"]["dsn"] = as_role(databases.source, role)
    run(databases.source, f"ALTER ROLE {role} REPLICATION")
    lacks = refused(check(document, **tables), "publication", MissingPrivilege)
    assert "lacks shop.more" in lacks.message
    run(databases.source, lacks.solution.partition(": ")[2])
    assert check(document, **tables)["publication"].ok

    run(databases.source, "DROP PUBLICATION airflow_cdc_shop; CREATE PUBLICATION airflow_cdc_shop FOR ALL TABLES")
    assert check(document, **tables)["publication"].ok


@pytest.mark.parametrize(
    ("published", "captured", "same"),
    [
        ("id > 0", "ID>0 -- positive", True),
        ("id > 0", "id > 1", False),
        ("id > 0", None, False),
        (None, "id > 0", False),
        ("id IN (1, 2)", "id = ANY (ARRAY[1, 2])", True),
        ("id > 0 AND body <> 'x'", "(id > 0) AND (body != 'x'::text)", True),
        ("id > 0 OR body <> 'x'", "id > 0 AND body <> 'x'", False),
    ],
)
def test_rows_that_a_publication_chooses(
    document: dict[str, Any], databases: Databases, published: str | None, captured: str | None, same: bool
) -> None:
    where = f" WHERE ({published})" if published else ""
    run(databases.source, "ALTER TABLE shop.orders REPLICA IDENTITY FULL")
    run(databases.source, f"CREATE PUBLICATION airflow_cdc_shop FOR TABLE ONLY shop.orders{where}")
    document["source"]["tables"] = [{"table": "shop.orders", **({"where": captured} if captured else {})}]
    found = check(document)["publication"]
    assert found.ok == same, found
    assert same or "other columns or rows of shop.orders" in found.message


def test_the_statement_for_a_publication(document: dict[str, Any], databases: Databases) -> None:
    run(
        databases.source,
        """
        CREATE TABLE shop.parts (id int PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE TABLE shop."Part 1" PARTITION OF shop.parts FOR VALUES FROM (0) TO (9);
        CREATE TABLE shop.part2 PARTITION OF shop.parts DEFAULT;
        CREATE TABLE shop.child () INHERITS (shop.orders);
        """,
    )
    document["source"]["tables"] = [
        {"table": "shop.orders", "columns": ["body", "id"], "where": "id % 2 = 1 -- odd"},
        "shop.parts",
    ]
    pipeline = Pipeline.parse(document)
    with connected(databases.source, writes=True) as connection:
        tables = resolve(connection, pipeline.source.tables)
        statement = publication_sql(connection, pipeline.source.publication, tables)
        assert statement == (
            'CREATE PUBLICATION "airflow_cdc_shop" FOR TABLE ONLY "shop"."orders" ("id", "body") '
            'WHERE (id % 2 = 1 -- odd\n), ONLY "shop"."Part 1", ONLY "shop"."part2" '
            "WITH (publish_via_partition_root = false);"
        )
        rows(connection, statement)
        published = rows(connection, "SELECT tablename FROM pg_publication_tables ORDER BY 1")
        assert published == [("Part 1",), ("orders",), ("part2",)]
        rows(connection, publication_sql(connection, 'no"thing', ()))
    assert check(document)["publication"].ok


def test_rules_of_columns_and_rows_need_postgres_15(document: dict[str, Any], databases: Databases) -> None:
    class Older:
        """A connection to a server that claims to be Postgres 14."""

        class info:
            server_version = 140011

        def __init__(self, connection: psycopg2.extensions.connection) -> None:
            self._connection = connection

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

    document["source"]["tables"] = [{"table": "shop.orders", "where": "id > 0"}]
    with connected(databases.source, writes=True) as connection:
        tables = resolve(connection, Pipeline.parse(document).source.tables)
        with pytest.raises(ConfigError, match="Postgres 15"):
            publication_sql(Older(connection), "p", tables)  # type: ignore[arg-type]


def test_a_sink_that_is_the_source(
    document: dict[str, Any], databases: Databases, source_server: PostgresServer
) -> None:
    other_name = databases.source.replace("127.0.0.1", "localhost")

    error = refused(check(document, sink__dsn=other_name), "identity", SinkIsSource)

    assert error.exit_code == 3
    assert check(document, sink__dsn=source_server.dsn())["identity"].ok


def test_target_tables(document: dict[str, Any], databases: Databases) -> None:
    run(databases.target, ORDERS)
    assert check(document)["target tables"].ok, "an empty table may be taken over"

    run(databases.target, "INSERT INTO shop.orders VALUES (1)")
    error = refused(check(document), "target tables", ForeignTable)
    assert error.exit_code == 3
    assert check(document, sink__schema="copy_of_{schema}")["target tables"].ok

    run(databases.target, RECORDS)
    with connected(databases.source) as source, connected(databases.target, writes=True) as target:
        (table,) = resolve(source, Pipeline.parse(document).source.tables)
        statement = "INSERT INTO airflow_cdc.tables VALUES ('shop', 'shop.orders', 'shop', 'orders', %s)"
        rows(target, statement, [json.dumps(table.to_dict())])
    assert check(document)["target tables"].ok
    assert (
        "belongs to pipeline 'shop'"
        in refused(check(document, pipeline="shop2"), "target tables", ForeignTable).message
    )


def test_targets_must_not_clash(document: dict[str, Any], databases: Databases) -> None:
    run(databases.source, "CREATE SCHEMA old; CREATE TABLE old.orders (id int PRIMARY KEY)")

    findings = check(document, source__tables=["*.orders"], sink__schema="copy")

    assert "copy.orders" in refused(findings, "targets", ConfigError).message


def test_state_locations(document: dict[str, Any], tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()

    for state in (f"file://{blocked}", f"file://{blocked}/below", "file:///proc/state", "nosuch://bucket/x"):
        refused(check(document, state=state), "state", StateUnwritable)
    refused(check(document, state=f"file://{tmp_path}"), "state", ConfigError)
    for state in (f"{tmp_path}/a b/c", "memory://somewhere/deep"):
        assert check(document, state=state)["state"].ok
    assert list(tmp_path.iterdir()) == [blocked]


@pytest.mark.parametrize("change", ["RENAME body TO text", "DROP body"])
def test_a_column_that_has_just_gone_is_not_what_a_publication_hides(
    document: dict[str, Any], databases: Databases, change: str
) -> None:
    run(databases.source, "CREATE PUBLICATION airflow_cdc_shop FOR TABLE ONLY shop.orders")
    pipeline = Pipeline.parse(document)
    with connected(databases.source, writes=True) as source:
        captured = resolve(source, pipeline.source.tables)
        run(databases.source, f"ALTER TABLE shop.orders {change}")
        assert published_otherwise(source, "airflow_cdc_shop", captured) == ([], [])
        run(databases.source, "ALTER PUBLICATION airflow_cdc_shop SET TABLE ONLY shop.orders (id)")
        hidden = resolve(source, pipeline.source.tables)
        _, different = published_otherwise(source, "airflow_cdc_shop", hidden)
        assert len(different) == len(hidden[0].columns) - 1
