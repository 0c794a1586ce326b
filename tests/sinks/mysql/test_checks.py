"""Preflight checks of a MySQL sink, and the reading of its section of the pipeline file."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import ConfigError, LoginRefused, Retry
from airflow_cdc_provider.engine.core.findings import Finding
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sinks.mysql.address import Address
from airflow_cdc_provider.engine.sinks.mysql.session import session
from local_servers.mariadb import MariadbServer, Programs
from tests.conftest import SYSTEM_DATABASES, Databases
from tests.support.mysql import MysqlPipeline, query


def parse(**sink: str) -> Pipeline:
    source = {"dsn": "postgresql://db/shop", "tables": ["a.b"]}
    document = {"pipeline": "p", "source": source, "sink": {"type": "mysql", **sink}, "state": "file:///s"}
    return Pipeline.parse(document, {"AIRFLOW_CONN_DW": "mysql://cdc:se%40cret@dw/"})


def findings(pipeline: MysqlPipeline) -> dict[str, Finding]:
    return {finding.check: finding for finding in preflight(pipeline.pipeline)}


def test_a_section_is_read_and_hides_its_password() -> None:
    for sink in parse(dsn="mysql://cdc:se%40cret@dw").sink, parse(conn_id="dw").sink:
        assert (sink.type, sink.mode, sink.schema) == ("mysql", "mirror", "{schema}")
        assert (sink.place, tuple(sink.secrets)) == ("dw:3306", ("se@cret",))
        assert "cret" not in repr(sink)
    assert Address.parse("mysql://cdc@h:1/?ssl_ca=/ca.pem").options == {"ssl_ca": "/ca.pem"}


@pytest.mark.parametrize(
    "dsn", ["postgresql://a@b/c", "mysql://b:1", "mysql://a:p@b:x/", "mysql://a:p@c@b", "mysql://a:p@b?x=y"]
)
def test_what_is_no_address_is_refused_without_being_shown(dsn: str) -> None:
    with pytest.raises(ConfigError, match=r"sink\.dsn: a text is not valid"):
        parse(dsn=dsn)


def test_a_target_that_is_fit_is_described_and_left_alone(
    databases: Databases, mariadb: MariadbServer, tmp_path: Path
) -> None:
    pipeline = MysqlPipeline(tmp_path, databases, mariadb, ["public.t"], sink={"schema": "copy"})
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, body text)")
    found = findings(pipeline)
    assert all(finding.ok for finding in found.values())
    assert {name for name, finding in found.items() if finding.warning} >= {"sink durability"}
    query(mariadb, "SET GLOBAL innodb_flush_log_at_trx_commit = 1")
    try:
        assert not findings(pipeline)["sink durability"].warning
    finally:
        query(mariadb, "SET GLOBAL innodb_flush_log_at_trx_commit = 0")
    assert "CREATE TABLE `copy`.`t` (\n  `id` INT NOT NULL,\n  `body` LONGTEXT" in found["sink tables"].message
    assert {name for (name,) in query(mariadb, "SHOW DATABASES")} == set(SYSTEM_DATABASES)


def test_tables_that_are_there_or_too_wide_are_told_of(
    databases: Databases, mariadb: MariadbServer, tmp_path: Path
) -> None:
    query(mariadb, "CREATE DATABASE `copy`")
    query(
        mariadb,
        "CREATE TABLE `copy`.t (id varchar(768) NOT NULL PRIMARY KEY) ENGINE=InnoDB CHARACTER SET utf8mb4"
        " COLLATE utf8mb4_general_ci",
    )
    pipeline = MysqlPipeline(tmp_path, databases, mariadb, ["public.t", "public.wide"], sink={"schema": "copy"})
    wide = ", ".join(f"c{n} text" for n in range(195))
    pipeline.source(
        "CREATE TABLE public.t (id text PRIMARY KEY)", f"CREATE TABLE public.wide (id int PRIMARY KEY, {wide})"
    )
    found = findings(pipeline)
    assert "collation utf8mb4_general_ci of column id" in found["target tables"].message
    assert found["sink rows"].warning
    assert "public.wide (195 such columns)" in found["sink rows"].message
    pipeline.source("ALTER TABLE public.wide DROP COLUMN c0")
    assert not findings(pipeline)["sink rows"].warning


def test_everything_that_is_amiss_is_named(databases: Databases, mariadb: MariadbServer, tmp_path: Path) -> None:
    query(mariadb, "CREATE DATABASE shop")
    query(mariadb, "CREATE TABLE shop.t (id int)")
    query(mariadb, "INSERT INTO shop.t VALUES (1)")
    query(mariadb, "DROP USER IF EXISTS other@'127.0.0.1'")
    query(mariadb, "CREATE USER other@'127.0.0.1'")
    query(mariadb, "GRANT SELECT, INSERT ON shop.* TO other@'127.0.0.1'")
    query(mariadb, "SET GLOBAL local_infile = OFF")
    try:
        pipeline = MysqlPipeline(tmp_path, databases, mariadb, ["public.t"], sink={"schema": "shop"})
        pipeline.change(sink={"dsn": mariadb.dsn.replace("root", "other")})
        pipeline.source('CREATE TABLE public.t (id int PRIMARY KEY, a text, "A" text)')
        found = findings(pipeline)
    finally:
        query(mariadb, "SET GLOBAL local_infile = ON")
        query(mariadb, "DROP USER other@'127.0.0.1'")
    assert {name for name, finding in found.items() if not finding.ok} == {
        "sink privileges",
        "sink tables",
        "target tables",
    }
    assert "on databases airflow_cdc, shop" in found["sink privileges"].message
    assert (
        "GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, ALTER, INDEX, TRIGGER ON `shop`.* TO 'other'@'127.0.0.1';"
        in str(
            found["sink privileges"].error.solution  # type: ignore[union-attr]
        )
    )
    assert "MySQL treats the names of its columns" in found["sink tables"].message
    assert "has rows that pipeline" in found["target tables"].message
    assert found["sink loading"].warning


@pytest.mark.parametrize("login", ["nobody_here:pw", "cdc:wrong"])
def test_a_refused_login_is_not_tried_again(mariadb: MariadbServer, login: str) -> None:
    dsn = f"mysql://{login}@127.0.0.1:{mariadb.port}/?ssl_mode=disabled"
    with pytest.raises(LoginRefused) as refused, session(Address.parse(dsn)):
        pass
    assert refused.value.retry is Retry.FAIL
    assert "wrong" not in refused.value.message


def test_a_server_that_is_away_is_named_without_the_password(databases: Databases, tmp_path: Path) -> None:
    from local_servers.process import find_free_port

    dead = MariadbServer(tmp_path, find_free_port(), None, {}, Programs((), ()))  # type: ignore[arg-type]
    pipeline = MysqlPipeline(tmp_path, databases, dead, ["public.t"])
    pipeline.change(sink={"dsn": f"mysql://cdc:secret@127.0.0.1:{dead.port}/"})
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY)")
    finding = findings(pipeline)["sink"]
    assert not finding.ok
    assert "cannot be reached" in finding.message
    assert "secret" not in finding.message


def test_what_stands_in_the_way_at_a_target_is_named(
    databases: Databases, mariadb: MariadbServer, tmp_path: Path
) -> None:
    query(mariadb, "CREATE DATABASE `copy`")
    made = "id int NOT NULL PRIMARY KEY, body longtext"
    cases = {
        "generated": ("TABLE", "(id int NOT NULL PRIMARY KEY, body longtext GENERATED ALWAYS AS ('x') STORED)"),
        "demanding": ("TABLE", f"({made}, theirs int NOT NULL)"),
        "viewed": ("VIEW", "AS SELECT 1 AS id, '' AS body FROM DUAL WHERE false"),
        "plain": ("TABLE", f"({made}, theirs int NOT NULL DEFAULT 1)"),
    }
    said = {
        "generated": "column body is generated",
        "demanding": "column theirs is not in the source, is NOT NULL",
        "viewed": "it is not a table but a view",
    }
    for name, (kind, definition) in cases.items():
        suffix = " CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin" if kind == "TABLE" else ""
        query(mariadb, f"CREATE {kind} `copy`.{name} {definition}{suffix}")
        pipeline = MysqlPipeline(tmp_path, databases, mariadb, [f"public.{name}"], sink={"schema": "copy"})
        pipeline.source(f"CREATE TABLE public.{name} (id int PRIMARY KEY, body text)")
        found = findings(pipeline)
        assert found["target tables"].ok == (name == "plain"), name
        assert said.get(name, "") in found["target tables"].message
        assert not found["target code"].warning
    query(mariadb, "CREATE TRIGGER `copy`.t BEFORE INSERT ON `copy`.plain FOR EACH ROW SET NEW.theirs = 2")
    code = findings(pipeline)["target code"]
    assert code.warning
    assert "copy.plain has the trigger t (definer " in code.message
