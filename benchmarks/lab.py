"""Where benchmarks run: two Postgres servers and a Spark session, all started for the purpose."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import sql
from pyspark.sql import SparkSession

from airflow_cdc_provider.demo.servers import PostgresServer
from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.session import spark_session
from benchmarks.report import check

SCHEMA = "public"
TABLE = "t"

# A row is about 100 bytes, as text and on the wire.
TABLE_DDL = """
CREATE TABLE public.t (
    id bigint PRIMARY KEY,
    customer int NOT NULL,
    status text NOT NULL,
    amount numeric(12, 2) NOT NULL,
    created_at timestamptz NOT NULL,
    note text,
    paid boolean NOT NULL,
    code text NOT NULL
)
"""
ROW = """
    n, (n * 31 % 100000)::int, (ARRAY['new', 'paid', 'sent', 'done'])[1 + n % 4], (n * 7919 % 1000003)::numeric / 100,
    timestamptz '2024-01-01 00:00+00' + n * interval '61 seconds', md5(n::text), n % 3 = 0, 'item-' || n % 5000
"""

# What is measured is the copying, so a checkpoint must not fall into one case and spare the other.
SERVER_SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "30min",
    "autovacuum": "off",
    "max_replication_slots": "40",
    "max_wal_senders": "40",
}


@dataclass(frozen=True)
class Lab:
    """The servers, the session, and a directory for state and output.

    :param spark: a warm session; its start is no part of any figure.
    """

    source: PostgresServer
    target: PostgresServer
    spark: SparkSession
    directory: Path

    def pipeline(self, name: str, database: str, **names: str) -> Pipeline:
        """A pipeline that mirrors the source's ``database`` into the target's database ``name``.

        :param names: further keys of its source.
        """
        return _pipeline(name, self.source.dsn(database), self.target.dsn(name), self.directory, **names)

    def settle(self) -> None:
        """Write out what earlier cases have left in the servers' memory."""
        for server in (self.source, self.target):
            execute(server.dsn(), "CHECKPOINT")

    def check_equal(self, source: str, target: str, what: str) -> None:
        """Compare the table in two databases.

        :raises WrongResult: when they differ.
        """
        check(checksum(self.source.dsn(source)), checksum(self.target.dsn(target)), what)


@contextmanager
def laboratory() -> Iterator[Lab]:
    """Start everything, and remove it at the end."""
    directory = Path(tempfile.mkdtemp(prefix="cdc-bench-"))
    directory.chmod(0o755)  # root's servers run as another user
    try:
        with (
            PostgresServer.create(directory / "source", settings=SERVER_SETTINGS) as source,
            PostgresServer.create(directory / "target", settings=SERVER_SETTINGS) as target,
            spark_session(_pipeline("bench", source.dsn(), target.dsn(), directory), "benchmark") as spark,
        ):
            yield Lab(source, target, spark, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _pipeline(name: str, source: str, target: str, directory: Path, **names: str) -> Pipeline:
    return Pipeline.parse(
        {
            "pipeline": name,
            "source": {"dsn": source, "tables": [f"{SCHEMA}.{TABLE}"], **names},
            "sink": {"dsn": target},
            "state": f"file://{directory / 'state' / name}",
            "stream": {"trigger": "0 seconds"},
            "spark": {"master": "local[2]", "conf": {"spark.ui.enabled": "false", "spark.log.level": "ERROR"}},
        }
    )


def execute(dsn: str, *statements: str) -> None:
    """Execute statements, each a transaction."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def query(dsn: str, text: str, *parameters: object) -> tuple[object, ...]:
    """Execute a query and return its first row."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(text.encode(), parameters).fetchone()
    assert row is not None, text
    return tuple(row)


def checksum(dsn: str) -> tuple[object, ...]:
    """Number of rows, and a sum of hashes over all their values."""
    return query(dsn, "SELECT count(*), sum(hashtextextended(t::text, 0)) FROM public.t")


def create_database(server: PostgresServer, name: str) -> None:
    """Create an empty database."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(name)))


def drop_database(server: PostgresServer, name: str) -> None:
    """Drop a database, with the sessions that are left in it."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def fill(dsn: str, first: int, last: int) -> None:
    """Insert the rows numbered from ``first`` to ``last``."""
    execute(dsn, f"INSERT INTO public.t SELECT {ROW} FROM generate_series({first}::bigint, {last}::bigint) AS n")
