"""Measures the seconds by which the target is behind."""

from __future__ import annotations

import threading
import time
from collections import deque

import psycopg

from airflow_cdc_provider.engine.core.lsn import parse_lsn
from benchmarks.live import Live
from benchmarks.report import check

_LOOK_SECONDS = 0.1


class Lag(threading.Thread):
    """Tracks the age of the oldest commit of the source that the target does not have yet.

    It reads the end of the source's log ten times a second. All that was committed before such a look is in the target
    as soon as the sink's applied LSN has reached the position that was read. So the lag is at most a tenth of a second
    too high.
    """

    def __init__(self, scene: Live) -> None:
        super().__init__(name="lag", daemon=True)
        self._dsns = scene.dsns
        self._halt = threading.Event()
        self._worst = 0.0
        self.failure: Exception | None = None

    def worst(self) -> float:
        """Return the largest lag in seconds since the last call."""
        worst, self._worst = self._worst, 0.0
        return worst

    def run(self) -> None:
        try:
            self._look()
        except Exception as e:
            self.failure = e

    def _look(self) -> None:
        looks: deque[tuple[float, int]] = deque()
        passed = time.monotonic()
        source, target = self._dsns
        with (
            psycopg.connect(source, autocommit=True, prepare_threshold=1) as there,
            psycopg.connect(target, autocommit=True, prepare_threshold=1) as here,
        ):
            while not self._halt.wait(_LOOK_SECONDS):
                looks.append((time.monotonic(), _lsn(there, "SELECT pg_current_wal_flush_lsn()::text")))
                applied = _lsn(here, "SELECT applied_lsn::text FROM airflow_cdc.pipelines")
                while looks and looks[0][1] <= applied:
                    passed, _ = looks.popleft()
                self._worst = max(self._worst, time.monotonic() - passed)

    def __enter__(self) -> Lag:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._halt.set()
        self.join()
        check(None, self.failure, "failure of the lag tracker")


def _lsn(connection: psycopg.Connection, text: str) -> int:
    row = connection.execute(text.encode()).fetchone()
    assert row is not None
    return parse_lsn(row[0])
