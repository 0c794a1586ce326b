"""Runs the reader of a slot alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.sources.postgres.wal import wal_reader
from airflow_cdc_provider.engine.sources.postgres.wal.wal_reader import WalReader


@contextmanager
def slot_reader(dsn: str, *waiting: str, **arguments: int) -> Iterator[tuple[WalReader, int]]:
    """Create a table, a publication and a slot, and yield a reader with the slot's consistent point.

    :param waiting: statements that are in the log before the reader starts.
    """
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, body text); CREATE PUBLICATION p FOR TABLE t")
        slot = f"s_{connection.info.dbname}"
        row = connection.execute("SELECT lsn::text FROM pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        start = parse_lsn(row.fetchone()[0])  # type: ignore[index]
        for statement in waiting:
            connection.execute(statement)
    reader = WalReader(dsn, slot, "p", start, **arguments)
    try:
        yield reader, start
    finally:
        reader.close()


def reader_naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds of each sleep of log readers from now on, measured, so including oversleeping."""
    monkeypatch.setattr(wal_reader, "_AWAKE_SECONDS", 0.0)
    naps: list[float] = []
    sleep = time.sleep

    def counted(seconds: float) -> None:
        if threading.current_thread().name == "wal-reader":
            naps.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", counted)
    return naps
