"""Measures start-up: the time from starting a stream until the first change is applied, cold and in a warm session.

A cold start is the process ``airflow-cdc stream`` with its JVM; a change waits in the log when it starts. A warm start
is the stream job in a session that has already run one, like a job that restarts.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import psycopg

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.text_output import text_table
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.pipeline.settings import SnapshotSettings
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.slots import emit_marker
from airflow_cdc_provider.engine.runs.progress import StreamProgress
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.postgres.stream.stream_job import StreamJob
from benchmarks.lab import TABLE_DDL, create_database, execute, fill, laboratory
from benchmarks.live import CATCH_UP_SECONDS, Live, live
from benchmarks.report import check, spread

STARTUP = "startup"

_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class StartUp:
    """Seconds of each repeat until the slot's walsender has started, and until the first change is applied."""

    cold_connected: tuple[float, ...]
    cold: tuple[float, ...]
    warm: tuple[float, ...]

    name: ClassVar[str] = STARTUP
    faults: ClassVar[tuple[str, ...]] = ()

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {
            kind: {"seconds": [round(each, 3) for each in seconds], **spread(seconds, 2)}
            for kind, seconds in asdict(self).items()
        }

    def as_text(self) -> str:
        """Return a table with a row per kind."""
        found = self.as_json()
        body = [[kind, *(f"{found[kind][name]:.2f}" for name in ("median", "min", "max"))] for kind in found]
        return text_table(["seconds", "median", "min", "max"], body)


def measure(repeat: int) -> StartUp:
    """Start streams, one after the other.

    :raises WrongResult: if a change does not arrive, or source and target differ at the end.
    """
    with live({}) as scene:
        cold = [_cold(scene, row) for row in range(1, repeat + 1)]
        scene.check_equal(STARTUP)
    warm = _warm(repeat)
    return StartUp(tuple(connected_ for connected_, _ in cold), tuple(applied for _, applied in cold), warm)


def _cold(scene: Live, row: int) -> tuple[float, float]:
    source, target = scene.dsns
    fill(source, row, row)
    text = "SELECT extract(epoch FROM backend_start)::float8 FROM pg_stat_replication WHERE application_name = %s"
    with psycopg.connect(source, autocommit=True) as there, psycopg.connect(target, autocommit=True) as here:
        began, wall = time.monotonic(), time.time()
        with scene.stream():
            applied = await_condition(
                lambda: here.execute("SELECT FROM public.t WHERE id = %s", [row]).rowcount == 1,
                CATCH_UP_SECONDS,
                _POLL_SECONDS,
            )
            took = time.monotonic() - began
            check(True, applied, "the first change applied")
            ((connected_,),) = there.execute(text, [f"airflow-cdc {scene.pipeline.source.slot}"]).fetchall()
    return connected_ - wall, took


def _warm(repeat: int) -> tuple[float, ...]:
    with laboratory() as lab:
        create_database(lab.source, STARTUP)
        create_database(lab.target, STARTUP)
        dsn = lab.source.dsn(STARTUP)
        execute(dsn, TABLE_DDL)
        pipeline = replace(lab.pipeline(STARTUP, STARTUP), snapshot=SnapshotSettings(mode="never"))
        commands.provision(pipeline)
        took = []
        for row in range(1, repeat + 2):
            fill(dsn, row, row)
            with connected(dsn) as source:
                marker = emit_marker(source, STARTUP)
            began, applied = time.monotonic(), 0.0

            def see(progress: StreamProgress) -> None:
                nonlocal applied
                applied = applied or (time.monotonic() if progress.changes else 0.0)

            with run_part(pipeline, "stream", None) as (run, record):
                StreamJob(lab.spark, run, record, see).follow(marker)
            took.append(applied - began)
        lab.check_equal(STARTUP, STARTUP, STARTUP)
        commands.drop(pipeline)
    return tuple(took[1:])
