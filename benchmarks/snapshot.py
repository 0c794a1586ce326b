"""The snapshot: chunks copied by Spark tasks, against one psql that writes into another.

Both write into an empty table whose primary key is in place. Planning the chunks
is not measured; taking snapshots, locks, markers and commits of chunks is.
"""

from __future__ import annotations

import subprocess
import time

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.run import run_part
from airflow_cdc_provider.engine.snapshot import choose_chunks, copy_chunks
from benchmarks.lab import TABLE_DDL, Lab, create_database, drop_database, execute, fill
from benchmarks.report import Series, check, tell

COPY = "copy | copy"
_WARM_ROWS = 20_000


def measure(lab: Lab, rows: int, repeat: int) -> list[Series]:
    """Run both cases, one after the other in every repeat, so that the machine's moods fall on both."""
    _measure(lab, "snapshot_warm", min(rows, _WARM_ROWS), 1)
    return _measure(lab, "snapshot", rows, repeat)


def _measure(lab: Lab, database: str, rows: int, repeat: int) -> list[Series]:
    create_database(lab.source, database)
    dsn = lab.source.dsn(database)
    execute(dsn, TABLE_DDL)
    fill(dsn, 1, rows)
    execute(dsn, "VACUUM ANALYZE public.t")
    copied, ours = [], []
    for _ in range(repeat):
        copied.append(_copy(lab, database))
        tell(COPY, rows, copied[-1])
        ours.append(_chunks(lab, database, rows))
        tell("snapshot", rows, ours[-1])
    drop_database(lab.source, database)
    return [Series(COPY, rows, tuple(copied)), Series("snapshot", rows, tuple(ours), COPY)]


def _copy(lab: Lab, database: str) -> float:
    """One ``COPY TO STDOUT`` piped into one ``COPY FROM STDIN``."""
    create_database(lab.target, database)
    target = lab.target.dsn(database)
    execute(target, TABLE_DDL)
    lab.settle()
    psql = [str(lab.source.binaries / "psql"), "--no-psqlrc", "--quiet", "--command"]
    started = time.monotonic()
    with subprocess.Popen(
        [*psql, "COPY (SELECT * FROM public.t) TO STDOUT", lab.source.dsn(database)], stdout=subprocess.PIPE
    ) as reader:
        writer = subprocess.run([*psql, "COPY public.t FROM STDIN", target], stdin=reader.stdout, check=False)
    seconds = time.monotonic() - started
    check((0, 0), (reader.returncode, writer.returncode), f"{COPY}: exit codes")
    lab.check_equal(database, database, f"{COPY}: rows and checksum")
    drop_database(lab.target, database)
    return seconds


def _chunks(lab: Lab, database: str, rows: int) -> float:
    """The chunk copy of a provisioned pipeline."""
    create_database(lab.target, database)
    pipeline = lab.pipeline(database, database)
    commands.provision(pipeline)
    with run_part(pipeline, "snapshot", None) as (run, record):
        lab.settle()
        started = time.monotonic()
        progress = copy_chunks(lab.spark, run, record, choose_chunks(record), lambda progress: None)
        seconds = time.monotonic() - started
    check(rows, progress.rows, "snapshot: rows copied")
    lab.check_equal(database, database, "snapshot: rows and checksum")
    commands.drop(pipeline)
    drop_database(lab.target, database)
    return seconds
