"""The environment of benchmarks: two Postgres servers, further servers on request, and a Spark session."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sinks.delta.settings import PACKAGE as DELTA
from airflow_cdc_provider.engine.sinks.delta.settings import DeltaSettings
from airflow_cdc_provider.engine.spark.session import spark_session
from benchmarks.report import check
from benchmarks.shapes import HUNDRED
from local_servers.jars import package_available
from local_servers.kafka import KafkaServer
from local_servers.mariadb import MariadbServer
from local_servers.postgres import PostgresServer

SCHEMA = "public"
TABLE = "t"

TABLE_DDL = HUNDRED.ddl(TABLE)
ROW = f"n, {HUNDRED.values}"

# The benchmarks measure copying, so a checkpoint must not slow down one case and spare another.
SERVER_SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "30min",
    "autovacuum": "off",
    "max_replication_slots": "200",
    "max_wal_senders": "200",
}


MARIADB_SETTINGS = {"innodb_buffer_pool_size": "512M"}

MARIADB, KAFKA = "mariadb", "kafka"
JDBC = "org.postgresql:postgresql:42.7.7"

# Some cases with packages work in the JVM, among them peers.
_ALL_COMPILERS = "-XX:TieredStopAtLevel=4"


@dataclass(frozen=True)
class Lab:
    """The servers, the session, and a directory for state and output.

    :param spark: a warm session; its start is not part of any figure.
    :param mariadb, kafka: present if requested.
    :param cores: number of tasks that the session runs at a time.
    """

    source: PostgresServer
    target: PostgresServer
    spark: SparkSession
    directory: Path
    mariadb: MariadbServer | None = None
    kafka: KafkaServer | None = None
    cores: int = 2

    def pipeline(self, name: str, database: str, sink: Mapping[str, Any] | None = None, **names: Any) -> Pipeline:
        """Return a pipeline from the source's ``database``.

        :param sink: by default a mirror in the target's database ``name``.
        :param names: further keys of its source; ``parallelism`` applies to the snapshot.
        """
        sink = sink or {"dsn": self.target.dsn(name)}
        return _pipeline(name, self.source.dsn(database), sink, self.directory, {}, 2, **names)

    def settle(self) -> None:
        """Flush to disk what earlier cases left in the servers' memory, and start Spark's Python workers.

        Spark stops idle workers after a minute, for example while a slow peer runs.
        """
        for server in (self.source, self.target):
            execute(server.dsn(), "CHECKPOINT")
        self.spark.range(0, self.cores, 1, self.cores).mapInArrow(_passed_on, "id long", barrier=True).collect()

    def check_equal(self, source: str, target: str, what: str, tables: Sequence[str] = (TABLE,)) -> None:
        """Compare tables in two databases.

        :raises WrongResult: if they differ.
        """
        for table in tables:
            check(
                checksum(self.source.dsn(source), table), checksum(self.target.dsn(target), table), f"{what}, {table}"
            )


@contextmanager
def laboratory(servers: Collection[str] = (), packages: Sequence[str] = (), cores: int = 2) -> Iterator[Lab]:
    """Start all servers and the session, and remove everything at the end.

    :param servers: any of :data:`MARIADB` and :data:`KAFKA`.
    :param packages: packages on Maven Central for Spark.
    :param cores: number of tasks that Spark runs at a time.
    :raises JarsMissing: if a package cannot be fetched.
    """
    directory = Path(tempfile.mkdtemp(prefix="cdc-bench-"))
    directory.chmod(0o755)  # servers of root run as another user
    try:
        with ExitStack() as started:
            for package in packages:
                started.enter_context(package_available(package))
            source, target = (
                started.enter_context(PostgresServer.create(directory / name, settings=SERVER_SETTINGS))
                for name in ("source", "target")
            )
            mariadb, kafka = (
                started.enter_context(kind.create(directory / name, settings)) if name in servers else None
                for name, kind, settings in ((MARIADB, MariadbServer, MARIADB_SETTINGS), (KAFKA, KafkaServer, None))
            )
            conf = {**(DeltaSettings("").spark_conf if DELTA in packages else {})}
            if packages:
                conf |= {"spark.jars.packages": ",".join(packages), "spark.driver.extraJavaOptions": _ALL_COMPILERS}
            bench = _pipeline("bench", source.dsn(), {"dsn": target.dsn()}, directory, conf, cores)
            spark = started.enter_context(spark_session(bench.spark_start, "benchmark"))
            yield Lab(source, target, spark, directory, mariadb, kafka, cores)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _pipeline(
    name: str,
    source: str,
    sink: Mapping[str, Any],
    directory: Path,
    conf: Mapping[str, str],
    cores: int,
    parallelism: int = 2,
    **names: Any,
) -> Pipeline:
    return Pipeline.parse(
        {
            "pipeline": name,
            "source": {"dsn": source, "tables": [f"{SCHEMA}.*"], **names},
            "sink": dict(sink),
            "state": f"file://{directory / 'state' / name}",
            "snapshot": {"parallelism": parallelism},
            "spark": {
                "master": f"local[{cores}]",
                "conf": {"spark.ui.enabled": "false", "spark.log.level": "ERROR", **conf},
            },
        }
    )


def _passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the batches unchanged, from a worker that has imported all modules that tasks of the engine need."""
    from airflow_cdc_provider.engine.sources.postgres.stream import spark_source, staging_task  # noqa: F401

    return batches


def execute(dsn: str, *statements: str) -> None:
    """Execute statements, each in its own transaction."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def query(dsn: str, text: str, *parameters: object) -> tuple[object, ...]:
    """Execute a query and return its first row."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(text.encode(), parameters).fetchone()
    assert row is not None, text
    return tuple(row)


def checksum(dsn: str, table: str = TABLE) -> tuple[object, ...]:
    """Return the number of rows and a sum of hashes over all their values."""
    return query(dsn, f"SELECT count(*), sum(hashtextextended(t::text, 0)) FROM public.{table} AS t")


def create_database(server: PostgresServer, name: str) -> None:
    """Create an empty database."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(name)))


def drop_database(server: PostgresServer, name: str) -> None:
    """Drop a database and end its open sessions."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def fill(dsn: str, first: int, last: int) -> None:
    """Insert the rows numbered from ``first`` to ``last``."""
    execute(dsn, HUNDRED.insert(TABLE, first, last))
