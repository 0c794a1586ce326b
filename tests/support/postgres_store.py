"""A Postgres database, for the contract of sinks."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.rows import dict_row

from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink
from airflow_cdc_provider.engine.sinks.staged import Staged
from tests.sinks.begun_sink import SinkUnderTest


class PostgresStore(SinkUnderTest):
    """An empty database of the server."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    def query(self, statement: str) -> list[dict[str, Any]]:
        with psycopg.connect(self.dsn, row_factory=dict_row) as connection:
            found = connection.execute(statement)  # type: ignore[call-overload]
            return list(found) if found.description else []

    def sink(self, mode: Mode, pipeline: str = "p") -> PostgresSink:
        return PostgresSink(self.dsn, pipeline, mode)

    def read(self, target: Target) -> list[dict[str, Any]]:
        return self.query(f'SELECT * FROM "{target.schema}"."{target.name}"')

    def names(self) -> set[str]:
        tables = "SELECT oid::regclass::text AS name FROM pg_class WHERE relnamespace >= 16384"
        return {row["name"] for row in self.query(f"{tables} UNION SELECT nspname FROM pg_namespace")}

    def staged(self) -> int:
        return sum("stage_" in name for name in self.names())

    def damage(self, staged: Staged) -> None:
        self.query(f"TRUNCATE airflow_cdc.{staged.relation}")

    def occupy(self, target: Target) -> None:
        self.query(f'CREATE SCHEMA "{target.schema}"')
        self.query(f'CREATE TABLE "{target.schema}"."{target.name}" AS SELECT 1::bigint AS id')

    def remove(self, target: Target) -> None:
        self.query(f'DROP TABLE IF EXISTS "{target.schema}"."{target.name}"')
