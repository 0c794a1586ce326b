"""Flink CDC's source for Postgres in a program that only counts changes, in a Flink cluster within its JVM.

One task reads, with a checkpoint every ten seconds; all other settings that affect speed have their defaults.
"""

from __future__ import annotations

import time
from urllib.parse import urlsplit

from benchmarks.backlog import PUBLICATION, Backlog, walsender_start
from benchmarks.peers.counter import class_path, counting
from benchmarks.report import check

FLINK = "flink-cdc"
VERSION = "3.5.0"
_FLINK_VERSION = "1.20.1"
_OF_FLINK = ("flink-clients", "flink-streaming-java", "flink-connector-base", "flink-table-runtime")
_PACKAGES = (
    f"org.apache.flink:flink-connector-postgres-cdc:{VERSION}",
    *(f"org.apache.flink:{name}:{_FLINK_VERSION}" for name in _OF_FLINK),
    f"org.apache.flink:flink-table-api-java-bridge:{_FLINK_VERSION}",
)
# Its serializers access classes that the JDK has since encapsulated.
OPTIONS = tuple(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in ("java.lang", "java.util", "java.time"))


def drain(backlog: Backlog) -> float:
    """Read a backlog and return the seconds from the start of its walsender until the last change is counted."""
    jars = class_path(f"flink-cdc-{VERSION}", _PACKAGES)
    parts = urlsplit(backlog.dsn)
    with backlog.slot() as slot:
        properties = {
            "host": str(parts.hostname),
            "port": str(parts.port),
            "user": str(parts.username),
            "database": backlog.database,
            "slot": slot,
            "publication": PUBLICATION,
        }
        wanted = str(backlog.changes)
        with counting(backlog.lab, "FlinkCounter", jars, properties, wanted, options=OPTIONS) as counter:
            counter.line()
            found = counter.line()
            seconds = time.time() - walsender_start(backlog.dsn, slot)
    check(f"{backlog.changes} {backlog.keys}", found, f"{FLINK}: changes, sum of keys")
    return seconds
