"""Debezium's engine in a program that only counts changes, as objects or serialized as JSON.

All settings that affect speed have their defaults. Its JVM is new in each run, or, if warm, has drained the same
backlog before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from urllib.parse import urlsplit

from benchmarks.backlog import PUBLICATION, Backlog, drop_slot, walsender_start
from benchmarks.lab import Lab
from benchmarks.peers.counter import class_path, counting
from benchmarks.report import check

COUNT, JSON, SNAPSHOT = "debezium-count", "debezium-json", "debezium-snapshot"
WARM = "debezium-warm"
"""The case :data:`COUNT` in a JVM that has already done it once."""
VERSION = "3.2.0.Final"
_PACKAGES = tuple(f"io.debezium:{name}:{VERSION}" for name in ("debezium-embedded", "debezium-connector-postgres"))
_PROGRAM = "DebeziumCounter"


def fetch_jars() -> str:
    """Return Java's class path, see :func:`.class_path`."""
    return class_path(f"debezium-{VERSION}", _PACKAGES)


def drain(backlog: Backlog, case: str) -> float:
    """Read a backlog and return the seconds from the start of its walsender until the last change is counted."""
    jars, wanted = fetch_jars(), str(backlog.changes)
    with ExitStack() as closing:
        slots = [closing.enter_context(backlog.slot()) for _ in range(2 if case == WARM else 1)]
        properties = _properties(backlog.dsn, "no_data")
        form = "json" if case == JSON else "count"
        counter = closing.enter_context(counting(backlog.lab, _PROGRAM, jars, properties, form, wanted, *slots))
        for _ in slots:
            counter.line()
            check(f"{backlog.changes} {backlog.keys}", counter.line(), f"{case}: changes, sum of keys")
        return time.time() - walsender_start(backlog.dsn, slots[-1])


def snapshot(lab: Lab, database: str, rows: int, keys: int) -> float:
    """Read tables and return the seconds from the start of the engine until the last row is counted.

    :param keys: expected sum of all keys.
    """
    slot = f"debezium_{database}"
    properties = _properties(lab.source.dsn(database), "initial_only")
    with counting(lab, _PROGRAM, fetch_jars(), properties, "count", str(rows), slot) as counter:
        counter.line()
        started = time.monotonic()
        found = counter.line()
        seconds = time.monotonic() - started
    drop_slot(lab.source.dsn(database), slot)
    check(f"{rows} {keys}", found, f"{SNAPSHOT}: rows, sum of keys")
    return seconds


def _properties(dsn: str, mode: str) -> Mapping[str, str]:
    parts = urlsplit(dsn)
    return {
        "name": "counter",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
        "plugin.name": "pgoutput",
        "publication.name": PUBLICATION,
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": mode,
        "topic.prefix": "bench",
        "table.include.list": r"public\..*",
        "converter.schemas.enable": "false",
        "database.hostname": str(parts.hostname),
        "database.port": str(parts.port),
        "database.user": str(parts.username),
        "database.password": "none",
        "database.dbname": parts.path.removeprefix("/"),
    }
