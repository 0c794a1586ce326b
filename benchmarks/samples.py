"""Samples a stream under load: memory, retained log, lag."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from benchmarks.lab import query
from benchmarks.lag import Lag
from benchmarks.live import Live
from benchmarks.processes import memory_of
from benchmarks.report import check
from benchmarks.writer import Writer

_MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """One sample; sizes are in bytes.

    :param at: seconds since the first sample.
    :param behind: largest lag in seconds since the previous sample.
    :param retained: log that the slot keeps.
    :param lag: log that the sink has not applied.
    :param driver: resident memory of the command's process.
    :param jvm: resident memory of the JVM next to it.
    :param workers: resident memory of the Python workers.
    :param reader: resident memory of the slot's reader.
    :param written: changes committed at the source since the start.
    """

    at: float
    behind: float
    retained: int
    lag: int
    driver: int
    jvm: int
    workers: int
    reader: int
    written: int


def samples(
    scene: Live, command: subprocess.Popen[bytes], writer: Writer, lag: Lag, seconds: float, interval: float
) -> Iterator[Sample]:
    """Take a sample every ``interval`` seconds for some time.

    :raises WrongResult: if the stream or the writer has ended.
    """
    pipeline, began = scene.pipeline, time.monotonic()
    text = (
        "SELECT pg_wal_lsn_diff(pg_current_wal_flush_lsn(), restart_lsn)::bigint, pg_current_wal_flush_lsn()::text"
        " FROM pg_replication_slots WHERE slot_name = %s"
    )
    while (at := time.monotonic() - began) < seconds:
        scene.check_running(command)
        check((None, None), (writer.failure, lag.failure), "failures of the writer and of the lag tracker")
        applied = existing_record(pipeline).applied
        retained, flushed = query(pipeline.source.dsn, text, pipeline.source.slot)
        sizes, missing = memory_of(command.pid), max(0, parse_lsn(str(flushed)) - applied)
        sample = Sample(
            round(at, 1), round(lag.worst(), 2), int(str(retained)), missing, **sizes, written=writer.changes
        )
        yield sample
        print(f"{at:.0f} s, {sample.written:,} changes, {sample.behind:.1f} s behind", file=sys.stderr)
        time.sleep(min(interval, max(0.0, seconds - at)))
