"""``pg_recvlogical`` to ``/dev/null``: the upper limit for one slot, set by the decoding of its walsender."""

from __future__ import annotations

import subprocess
import time

from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.slots import read_slot
from benchmarks.backlog import PUBLICATION, Backlog
from benchmarks.report import check

RECVLOGICAL = "pg_recvlogical"


def drain(backlog: Backlog) -> float:
    """Read a backlog and return the seconds from the start of the process to its end."""
    with backlog.slot() as slot:
        started = time.monotonic()
        done = subprocess.run(
            [
                str(backlog.lab.source.binaries / "pg_recvlogical"),
                f"--dbname={backlog.dsn}",
                f"--slot={slot}",
                "--start",
                "--no-loop",
                "--file=/dev/null",
                f"--endpos={format_lsn(backlog.end + 1)}",
                "--option=proto_version=1",
                f"--option=publication_names={PUBLICATION}",
                "--option=messages=true",
            ],
            check=False,
        )
        seconds = time.monotonic() - started
        check(0, done.returncode, f"{RECVLOGICAL}: exit code")
        with connected(backlog.dsn) as source:
            state = read_slot(source, slot)
        check(True, state is not None and state.confirmed_flush_lsn >= backlog.end, f"{RECVLOGICAL}: end reached")
    return seconds
