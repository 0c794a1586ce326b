"""Flink SQL's regular join of three tables that Flink CDC captures, in a Flink cluster within one JVM.

Each table has its own slot. The connector delivers upserts (``changelog-mode``), so that the tables keep their replica
identity, as they do for a view; Flink then keeps the last row of each key. The state is in RocksDB, with an incremental
checkpoint every ten seconds into a local folder. The join collects changes for up to a second (``mini-batch``), and the
JDBC sink writes up to 5,000 rows at a time, which the driver rewrites into multi-row inserts. All other settings that
affect speed have their defaults.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from airflow_cdc_provider.engine.core.waiting import await_condition
from benchmarks.backlog import drop_slot
from benchmarks.lab import Lab, execute
from benchmarks.peers.counter import class_path, compiled, counting
from benchmarks.peers.flink import OPTIONS, VERSION
from benchmarks.report import WrongResult

FLINK_JOIN = "Flink SQL"
WIDE = "public.wide"

_PROGRAM = "FlinkJoin"
_INTERVAL, _PATIENCE = 10, 120.0
_FLINK_VERSION = "1.20.1"
_JDBC_VERSION = "3.3.0-1.20"
_OF_FLINK = (
    "flink-clients",
    "flink-connector-base",
    "flink-table-runtime",
    "flink-table-api-java-bridge",
    "flink-table-planner-loader",
    "flink-statebackend-rocksdb",
)
_PACKAGES = (
    f"org.apache.flink:flink-connector-postgres-cdc:{VERSION}",
    *(f"org.apache.flink:{name}:{_FLINK_VERSION}" for name in _OF_FLINK),
    *(f"org.apache.flink:flink-connector-jdbc-{name}:{_JDBC_VERSION}" for name in ("core", "postgres")),
    # It precedes the connector's own driver, 42.7.3, on the class path. That one confirms positions on its own (pgjdbc
    # issue 3138), also those that no checkpoint contains yet, so that changes were lost when the process was killed.
    "org.postgresql:postgresql:42.6.2",
)
_COLUMNS = {
    "customers": "id BIGINT, name STRING, city STRING",
    "products": "id BIGINT, title STRING",
    "orders": "id BIGINT, customer_id BIGINT, product_id BIGINT, qty BIGINT, price DECIMAL(10, 2), status STRING",
}
_WIDE = (
    "id BIGINT, customer_id BIGINT, customer BIGINT, product_id BIGINT, product BIGINT, status {text},"
    " amount DECIMAL(30, 2), name {text}, city {text}, title {text}"
)


def fetch_jars() -> str:
    """Return Java's class path, see :func:`.class_path`."""
    return class_path(f"flink-sql-{VERSION}", _PACKAGES)


def prepare(lab: Lab, source: str, target: str) -> None:
    """Compile the program, and create a publication of each table of a source and the wide table of a target.

    :param source, target: DSNs of the databases.
    """
    compiled(lab, _PROGRAM, fetch_jars())
    execute(source, *(f"CREATE PUBLICATION flink_{table} FOR TABLE public.{table}" for table in _COLUMNS))
    execute(target, f"CREATE TABLE {WIDE} ({_WIDE.format(text='text')}, PRIMARY KEY (id))")


@contextmanager
def joining(lab: Lab, database: str, select: str) -> Iterator[int]:
    """Run the join, return the id of its process, and kill it at the end.

    It continues from its newest checkpoint if there is one.

    :param database: name of the databases at source and target.
    """
    settings = {
        "parallelism.default": str(lab.cores),
        "taskmanager.memory.managed.size": "1g",
        "heartbeat.timeout": "10 min",  # the process is paused meanwhile
        "restart-strategy.type": "none",
        "state.backend.type": "rocksdb",
        "execution.checkpointing.incremental": "true",
        "execution.checkpointing.interval": f"{_INTERVAL} s",
        "execution.checkpointing.dir": f"file://{folder(lab)}",
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        "table.exec.mini-batch.enabled": "true",
        "table.exec.mini-batch.allow-latency": "1 s",
        "table.exec.mini-batch.size": "5000",
    }
    if found := checkpoint(lab):
        settings |= {"execution.state-recovery.path": f"file://{found}"}
    statements = [
        *(_source(lab, database, table) for table in _COLUMNS),
        _sink(lab, database),
        f"INSERT INTO wide SELECT * FROM ({select.replace('public.', '')}) AS joined",
    ]
    with counting(lab, _PROGRAM, fetch_jars(), settings, *statements, options=(*OPTIONS, "-Xmx4g")) as program:
        yield program.process.pid


def discard(lab: Lab, source: str) -> None:
    """Drop the slots, and remove all checkpoints."""
    for table in _COLUMNS:
        drop_slot(source, f"flink_{table}")
    shutil.rmtree(folder(lab))


def folder(lab: Lab) -> Path:
    """Return the folder of all checkpoints."""
    return lab.directory / "checkpoints"


def checkpoint(lab: Lab) -> Path | None:
    """Return the folder of the newest checkpoint that is complete."""
    found = list(folder(lab).glob("*/chk-*/_metadata"))
    return max(found, key=lambda path: path.stat().st_mtime).parent if found else None


def state_bytes(lab: Lab) -> int:
    """Wait for a checkpoint of everything until now; return its size, with the files that it shares with earlier ones.

    :raises WrongResult: if there is none in time.
    """
    began = time.time() + _INTERVAL
    if not await_condition(lambda: _completed(lab) > began, _PATIENCE, 0.1):
        raise WrongResult(f"{FLINK_JOIN}: no checkpoint within {_PATIENCE:.0f} s")
    newest = checkpoint(lab)
    assert newest is not None
    return sum(path.stat().st_size for part in (newest, newest.parent / "shared") for path in part.rglob("*"))


def _completed(lab: Lab) -> float:
    """Return when the newest checkpoint was complete."""
    newest = checkpoint(lab)
    return (newest / "_metadata").stat().st_mtime if newest else 0.0


def _source(lab: Lab, database: str, table: str) -> str:
    parts = urlsplit(lab.source.dsn(database))
    options = {
        "connector": "postgres-cdc",
        "hostname": parts.hostname,
        "port": parts.port,
        "username": parts.username,
        "password": "none",
        "database-name": database,
        "schema-name": "public",
        "table-name": table,
        "slot.name": f"flink_{table}",
        "decoding.plugin.name": "pgoutput",
        "scan.incremental.snapshot.enabled": "true",
        "changelog-mode": "upsert",
        "debezium.publication.name": f"flink_{table}",
        "debezium.publication.autocreate.mode": "disabled",
    }
    return _create(table, _COLUMNS[table], options)


def _sink(lab: Lab, database: str) -> str:
    parts = urlsplit(lab.target.dsn(database))
    options = {
        "connector": "jdbc",
        "url": f"jdbc:postgresql://{parts.netloc.partition('@')[2]}/{database}?reWriteBatchedInserts=true",
        "username": parts.username,
        "password": "none",
        "table-name": WIDE,
        "sink.buffer-flush.max-rows": "5000",
    }
    return _create("wide", _WIDE.format(text="STRING"), options)


def _create(table: str, columns: str, options: Mapping[str, object]) -> str:
    given = ", ".join(f"'{name}' = '{value}'" for name, value in options.items())
    return f"CREATE TABLE {table} ({columns}, PRIMARY KEY (id) NOT ENFORCED) WITH ({given})"
