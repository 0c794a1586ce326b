"""Limits of MySQL that are checked before anything is created: columns, bytes of a row, and names."""

from __future__ import annotations

from pathlib import Path

import pymysql
import pytest

from airflow_cdc_provider.engine.core.effect import ERASED, MISSING
from airflow_cdc_provider.engine.core.errors import CannotFollow, CdcError, UncapturableTable
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.sinks.mysql import limits
from airflow_cdc_provider.engine.sinks.mysql.address import Address
from airflow_cdc_provider.engine.sinks.mysql.session import Session, session
from airflow_cdc_provider.engine.sinks.mysql.staging_tables import MysqlTableStatements
from airflow_cdc_provider.engine.sinks.mysql.table_definition import create_table, refuse_names
from local_servers.mariadb import MariadbServer
from tests.conftest import MYSQL, Databases
from tests.support.mysql import MysqlPipeline, query

COLLATION = "utf8mb4_nopad_bin"


def target(kind: str, count: int, key: str = "bigint") -> Target:
    columns = [Column("id", key, 0, None, True, True, attnum=1)]
    columns += [Column(f"c{n}", kind, 0, None, False, True, attnum=n + 2) for n in range(count)]
    leaf = Leaf(1, "public", "t")
    return Target(Table(1, "public", "t", tuple(columns), ("id",), "d", None, (leaf,), "r"), "copy", "t")


def is_taken(kind: str, count: int, key: str) -> bool:
    try:
        refuse_names(target(kind, count, key), "mirror", COLLATION)
    except UncapturableTable:
        return False
    return True


def make(opened: Session, wide: Target) -> None:
    """Create the table, and its largest possible staging table."""
    opened.run("DROP TABLE IF EXISTS copy.t, airflow_cdc.s")
    opened.run(create_table(wide, "mirror", COLLATION, "p"))
    staged = [ERASED, MISSING, *(f"c{n}" for n in range(len(wide.table.columns))), "o0"]
    MysqlTableStatements(opened, wide, "mirror").create_staging("s", staged)


@pytest.mark.slow
@pytest.mark.skipif(MYSQL is not None, reason="MariaDB counts exactly, MySQL is not refused what it might take")
@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *((kind, "bigint") for kind in ("bigint", "uuid", "text", "numeric(65,30)", "numeric(38,0)", "smallint")),
        *(("text", "text"), ("bytea", "bytea"), ("uuid", "uuid")),
    ],
)
def test_tables_are_refused_exactly_where_the_server_would(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch, kind: str, key: str
) -> None:
    """This applies to the table itself, or to the staging table next to it."""
    most = max(count for count in range(1, 1020) if is_taken(kind, count, key))
    query(mariadb, "CREATE DATABASE copy")
    query(mariadb, "CREATE DATABASE airflow_cdc")
    with session(Address.parse(mariadb.dsn)) as opened:
        make(opened, target(kind, most, key))
        monkeypatch.setattr(limits, "exceeded_limit", lambda *arguments: "")
        with pytest.raises((pymysql.MySQLError, CdcError)):
            make(opened, target(kind, most + 1, key))


@pytest.mark.parametrize("name", ["DB_ROW_ID", "db_trx_id", "FTS_DOC_ID", "x" * 65, "end "])
def test_names_that_innodb_has_of_its_own_are_refused(name: str) -> None:
    wide = target("text", 1)
    columns = (wide.table.columns[0], Column(name, "text", 25, None, False, True, attnum=2))
    named = Target(Table(1, "public", "t", columns, ("id",), "d", None, wide.table.leaves, "r"), "copy", "t")
    with pytest.raises(UncapturableTable, match=f"reserves the column {name}|not allow a name like {name!r}"):
        refuse_names(named, "mirror", COLLATION)


def test_ddl_that_brings_such_a_name_is_not_followed(
    databases: Databases, mariadb: MariadbServer, tmp_path: Path
) -> None:
    """It is refused by name, before anything of it is applied; once it is gone the stream continues."""
    pipeline = MysqlPipeline(tmp_path, databases, mariadb, ["public.t"], sink={"schema": "copy"})
    pipeline.source("CREATE TABLE t (id int PRIMARY KEY)")
    pipeline.provision()
    pipeline.copy()
    pipeline.source("INSERT INTO t VALUES (1)", "ALTER TABLE t ADD db_row_id int", "INSERT INTO t VALUES (2, 3)")
    with pytest.raises(CannotFollow, match="reserves the column db_row_id"):
        pipeline.apply()
    pipeline.source("ALTER TABLE t RENAME db_row_id TO n")
    pipeline.apply()
    assert pipeline.target_rows("SELECT id, n FROM copy.t ORDER BY id") == [(1, None), (2, 3)]
