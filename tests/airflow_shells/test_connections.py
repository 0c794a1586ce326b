"""Airflow's connections: as URIs, in tests of a connection, and in pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import psycopg2
import pytest

from tests.support.airflow_support import connection_json, write_pipeline

# isort: split
from airflow.providers.common.sql.operators.sql import SQLCheckOperator, SQLExecuteQueryOperator

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.hooks.cdc import load_pipeline
from airflow_cdc_provider.hooks.postgres_cdc import PostgresCdcHook
from tests.conftest import Databases, ServerMaker

pytestmark = pytest.mark.airflow


@pytest.mark.parametrize(
    ("connection", "uri"),
    [
        ("postgresql://cdc:pw@db:5433/shop", "postgresql://cdc:pw@db:5433/shop"),
        ("postgres-cdc://cdc@db/shop?sslmode=require", "postgresql://cdc@db/shop?sslmode=require"),
        (
            connection_json(conn_type="postgres", login="a@b", password="p:w/?#%", host="db", schema="we ird"),
            "postgresql://a%40b:p%3Aw%2F%3F%23%25@db/we%20ird",
        ),
        (
            connection_json(
                conn_type="postgres_cdc",
                host="db",
                schema="shop",
                extra={"sslmode": None, "connect_timeout": 5, "cursor": "dictcursor", "iam": True, "dbname": "x"},
            ),
            "postgresql://db/shop?connect_timeout=5",
        ),
        (
            connection_json(conn_type="postgres", host="/var/run/postgresql", schema="shop"),
            "postgresql:///shop?host=%2Fvar%2Frun%2Fpostgresql",
        ),
    ],
)
def test_the_uri_is_one_for_libpq(monkeypatch: pytest.MonkeyPatch, connection: str, uri: str) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", connection)

    assert PostgresCdcHook("shop_pg").get_uri() == uri


def test_a_missing_connection_and_one_of_another_type_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", "http://lake/")

    with pytest.raises(ConfigError, match="'nowhere' does not exist") as missing:
        PostgresCdcHook("nowhere").get_uri()
    with pytest.raises(ConfigError, match="of type 'http', not postgres_cdc or postgres"):
        PostgresCdcHook("lake").get_uri()

    assert "AIRFLOW_CONN_NOWHERE" in missing.value.solution


def test_a_good_server_is_described_in_sentences(monkeypatch: pytest.MonkeyPatch, databases: Databases) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", databases.source)

    passed, text = PostgresCdcHook("shop_pg").test_connection()

    assert passed, text
    assert "wal_level is logical." in text
    assert "Role postgres may use replication." in text
    assert "A replication slot is free" in text


def test_the_connection_works_as_a_session(monkeypatch: pytest.MonkeyPatch, databases: Databases) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", databases.source)

    connection = PostgresCdcHook("shop_pg").get_conn()

    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        assert cursor.fetchone() == (1,)
    connection.close()


def as_target(dsn: str) -> str:
    server = urlsplit(dsn)
    given = {"host": server.hostname, "port": server.port, "login": server.username, "schema": server.path[1:]}
    return connection_json(conn_type="postgres_cdc", **given, extra={"use": "target", "sslmode": "prefer"})


def test_operators_for_sql_use_the_connection(monkeypatch: pytest.MonkeyPatch, databases: Databases) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_DW_PG", as_target(databases.target))

    def run(*sql: str, **arguments: Any) -> Any:
        operator = SQLExecuteQueryOperator(task_id="sql", conn_id="dw_pg", sql=list(sql), **arguments)
        return operator.execute({})

    # A failed statement rolls back those before it, unless the task commits each of them.
    statements = "CREATE TABLE paid (id int, v text)", "INSERT INTO paid VALUES (%(id)s, %(v)s)", "SELECT * FROM paid"
    with pytest.raises(psycopg2.Error, match="division by zero"):
        run(statements[0], "SELECT 1 / 0")
    assert run(*statements, parameters={"id": 7, "v": "é"})[-1] == [(7, "é")]
    with pytest.raises(psycopg2.Error, match="division by zero"):
        run("DELETE FROM paid", "SELECT 1 / 0", autocommit=True)
    assert run("SELECT count(*) FROM paid") == [[(0,)]]
    assert run("SELECT current_database()", database="postgres") == [[("postgres",)]]
    SQLCheckOperator(task_id="check", conn_id="dw_pg", sql="SELECT count(*) = 0 FROM paid").execute({})


def test_a_target_is_tested_as_a_target(monkeypatch: pytest.MonkeyPatch, make_server: ServerMaker) -> None:
    server = make_server(settings={"wal_level": "replica", "max_replication_slots": "0"})
    monkeypatch.setenv("AIRFLOW_CONN_DW_PG", as_target(server.dsn()))

    passed, text = PostgresCdcHook("dw_pg").test_connection()

    assert passed, text
    assert "Schemas and tables can be created and written in the sink." in text
    assert "wal_level" not in text

    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE ROLE reader LOGIN")
    monkeypatch.setenv("AIRFLOW_CONN_DW_PG", as_target(server.dsn().replace("postgres@", "reader@")))

    passed, text = PostgresCdcHook("dw_pg").test_connection()

    assert not passed
    assert "role reader may not, in the sink: create schema airflow_cdc" in text


@pytest.mark.parametrize("conn_type", ["generic", "sqlite"])
@pytest.mark.parametrize("conn_id", ["shop_pg", "warehouse_pg"])
def test_a_connection_of_another_type_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, conn_id: str, conn_type: str
) -> None:
    for each in ("shop_pg", "warehouse_pg"):
        kind = conn_type if each == conn_id else "postgres"
        monkeypatch.setenv(f"AIRFLOW_CONN_{each.upper()}", connection_json(conn_type=kind, host="db", schema="shop"))

    with pytest.raises(ConfigError, match=rf"{conn_id}', named by \w+\.conn_id, is of type '{conn_type}'") as refused:
        load_pipeline(write_pipeline(tmp_path))

    assert f"`airflow connections add {conn_id} --conn-uri postgres-cdc://" in refused.value.solution
    assert ("stores `generic`" in refused.value.solution) is (conn_type == "generic")


def test_every_obstacle_on_a_server_is_named(monkeypatch: pytest.MonkeyPatch, make_server: ServerMaker) -> None:
    server = make_server(settings={"wal_level": "replica", "max_replication_slots": "0"})
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE ROLE reader LOGIN")
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", server.dsn().replace("postgres@", "reader@"))

    passed, text = PostgresCdcHook("shop_pg").test_connection()

    assert not passed
    assert "Run: ALTER SYSTEM SET wal_level = 'logical';" in text
    assert "ALTER ROLE reader WITH REPLICATION" in text
    assert "no replication slot is free" in text


def test_a_server_that_does_not_answer_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", "postgresql://cdc:secret@127.0.0.1:1/shop")

    passed, text = PostgresCdcHook("shop_pg").test_connection()

    assert not passed
    assert text.startswith("cannot connect to 127.0.0.1:1/shop")
    assert "secret" not in text


def test_a_pipeline_gets_its_connections_from_airflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", connection_json(conn_type="postgres", host="db", schema="shop"))
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE_PG", "postgres-cdc://cdc:secret@dw/dw")
    monkeypatch.setenv("SITE", "warehouse")
    monkeypatch.setenv("UNRELATED", "value")
    path = write_pipeline(tmp_path, **{"conn_id: warehouse_pg": 'conn_id: "${SITE}_pg"'})

    loaded = load_pipeline(path)

    assert loaded.pipeline.source.dsn == "postgresql://db/shop"
    assert loaded.pipeline.sink.dsn == "postgresql://cdc:secret@dw/dw"
    assert loaded.environment == {
        "AIRFLOW_CONN_SHOP_PG": "postgresql://db/shop",
        "AIRFLOW_CONN_WAREHOUSE_PG": "postgresql://cdc:secret@dw/dw",
        "SITE": "warehouse",
    }
    assert Pipeline.load(path, loaded.environment) == loaded.pipeline
    assert "secret" not in repr(loaded)


def test_a_connection_that_the_file_names_and_airflow_lacks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'shop_pg', named by source\.conn_id, does not exist"):
        load_pipeline(write_pipeline(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [("pipeline: [", "is not YAML"), ("- a list", "must be a mapping"), ("pipeline: shop\nsource: 1", "source")],
)
def test_a_broken_file_is_refused_with_the_engines_words(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_pipeline(write_pipeline(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_pipeline(tmp_path / "nowhere.yaml")
