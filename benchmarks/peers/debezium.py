"""Debezium's engine in a program that only counts: as it brings changes, or made into JSON first.

All settings that have to do with speed are its defaults. Its jars are fetched from Maven Central when it is first
asked for; the program, beside this file, is compiled by the JDK each time that it runs.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from airflow_cdc_provider.demo.jars import HOME, fetch
from airflow_cdc_provider.engine.errors import CdcError
from benchmarks.backlog import PUBLICATION, Backlog, drop_slot, walsender_start
from benchmarks.lab import Lab
from benchmarks.report import WrongResult, check

COUNT, JSON, SNAPSHOT = "debezium-count", "debezium-json", "debezium-snapshot"
VERSION = "3.2.0.Final"

_PROGRAM = Path(__file__).with_name("Counter.java")
_LOG_CHARACTERS = 2000


class JdkMissing(CdcError):
    """There is no Java compiler."""


@dataclass(frozen=True)
class Counter:
    """A program that counts; it begins with a line, and tells number and sum of keys by others."""

    case: str
    process: subprocess.Popen[str]
    log: Path

    def line(self) -> str:
        """What it tells next.

        :raises WrongResult: when it ends instead.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise WrongResult(f"{self.case} ended: {self.log.read_text(errors='replace')[-_LOG_CHARACTERS:]}")
        return line.strip()


def fetch_jars() -> str:
    """Java's class path, with jars that are fetched if need be.

    :raises JarsMissing: when they cannot be.
    :raises JdkMissing: when nothing could compile what needs them.
    """
    if shutil.which("javac") is None:
        raise JdkMissing("There is no javac on this machine.", "Install a JDK of Java 17 or newer.")
    home = HOME / f"debezium-{VERSION}"
    for name in ("debezium-embedded", "debezium-connector-postgres"):
        jars = fetch(f"io.debezium:{name}:{VERSION}", home)
    return ":".join(map(str, jars))


def drain(backlog: Backlog, case: str) -> float:
    """Read a backlog; the seconds from the start of its walsender until the last change is counted."""
    with backlog.slot() as slot, _counting(backlog.lab, case, backlog.database, slot, "no_data", backlog.changes) as it:
        it.line()
        found = it.line()
        seconds = time.time() - walsender_start(backlog.dsn, slot)
    check(f"{backlog.changes} {backlog.keys}", found, f"{case}: changes, sum of keys")
    return seconds


def snapshot(lab: Lab, database: str, rows: int, keys: int) -> float:
    """Read tables; the seconds from the start of the engine until the last row is counted."""
    slot = f"debezium_{database}"
    with _counting(lab, SNAPSHOT, database, slot, "initial_only", rows) as counter:
        counter.line()
        started = time.monotonic()
        found = counter.line()
        seconds = time.monotonic() - started
    drop_slot(lab.source.dsn(database), slot)
    check(f"{rows} {keys}", found, f"{SNAPSHOT}: rows, sum of keys")
    return seconds


@contextmanager
def _counting(lab: Lab, case: str, database: str, slot: str, mode: str, wanted: int) -> Iterator[Counter]:
    path = lab.directory / f"{slot}.properties"
    properties = _properties(lab.source.dsn(database), slot, mode)
    path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()).replace("\\", "\\\\"))
    format_ = "json" if case == JSON else "count"
    command = ["java", "-cp", fetch_jars(), str(_PROGRAM), str(path), format_, str(wanted)]
    log = path.with_suffix(".log")
    with (
        log.open("w") as err,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True, cwd=lab.directory
        ) as process,
    ):
        try:
            yield Counter(case, process, log)
        finally:
            process.kill()


def _properties(dsn: str, slot: str, mode: str) -> Mapping[str, str]:
    parts = urlsplit(dsn)
    return {
        "name": slot,
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": PUBLICATION,
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": mode,
        "topic.prefix": "bench",
        "table.include.list": r"public\..*",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        "converter.schemas.enable": "false",
        "database.hostname": str(parts.hostname),
        "database.port": str(parts.port),
        "database.user": str(parts.username),
        "database.password": "none",
        "database.dbname": parts.path.removeprefix("/"),
    }
