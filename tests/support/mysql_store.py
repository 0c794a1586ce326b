"""A MySQL server, for the contract of sinks."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from pymysql.cursors import DictCursor

from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink
from airflow_cdc_provider.engine.sinks.staged import Staged
from local_servers.mariadb import MariadbServer
from tests.conftest import SYSTEM_DATABASES
from tests.sinks.begun_sink import (
    SinkUnderTest,
)


class MysqlStore(SinkUnderTest):
    """The server, with only its own databases."""

    def __init__(self, server: MariadbServer) -> None:
        self.server = server

    def query(self, statement: str) -> list[dict[str, Any]]:
        with closing(self.server.connect()) as connection, connection.cursor(DictCursor) as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def sink(self, mode: Mode, pipeline: str = "p") -> MysqlSink:
        return MysqlSink(self.server.dsn, pipeline, mode)

    def read(self, target: Target) -> list[dict[str, Any]]:
        return self.query(f"SELECT * FROM `{target.schema}`.`{target.name}`")

    def names(self) -> set[str]:
        tables = "SELECT CONCAT(table_schema, '.', table_name) AS name FROM information_schema.tables"
        others = f"WHERE table_schema NOT IN {SYSTEM_DATABASES}"
        return {
            row["name"]
            for row in self.query(f"{tables} {others} UNION SELECT schema_name FROM information_schema.schemata")
        }

    def staged(self) -> int:
        return sum(name.startswith("airflow_cdc.stage_") for name in self.names())

    def damage(self, staged: Staged) -> None:
        self.query(f"DELETE FROM airflow_cdc.{staged.relation}")

    def occupy(self, target: Target) -> None:
        self.query(f"CREATE DATABASE `{target.schema}`")
        self.query(f"CREATE TABLE `{target.schema}`.`{target.name}` AS SELECT 1 AS id")

    def remove(self, target: Target) -> None:
        self.query(f"DROP TABLE IF EXISTS `{target.schema}`.`{target.name}`")
