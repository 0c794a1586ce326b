"""The soak: sustained writes for minutes, and whether retained log and memory stay bounded.

The stream is the command ``airflow-cdc stream`` in processes of its own. Retained log cannot
be less than what is written until the server's next running-transactions record, some 15
seconds, which lets ``restart_lsn`` move.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
import psycopg
import yaml

from airflow_cdc_provider.demo.servers import PostgresServer, await_condition
from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.connection import connected
from airflow_cdc_provider.engine.lsn import parse_lsn
from airflow_cdc_provider.engine.run import existing_record
from airflow_cdc_provider.engine.slot import emit_marker
from airflow_cdc_provider.engine.table import text_table
from benchmarks.lab import ROW, TABLE_DDL, checksum, execute, query
from benchmarks.report import WrongResult, check

SOAK = "soak"
MAX_BATCH_BYTES = 16 << 20
KINDS = ("driver", "jvm", "workers")
"""The processes whose memory is looked at; see :class:`Sample`."""
JUDGED_SECONDS = 120.0
"""Shorter runs are not judged: a JVM that has just started grows, and little log is written."""
_BATCHES = 4
_GROWTH = 0.1
_TRANSACTION = 50
_KEYS = 20_000
_SECONDS = 180.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """One look at everything; sizes in bytes.

    :param at: seconds since the first marker was applied.
    :param retained: log that the slot keeps.
    :param lag: log that the sink has not applied.
    :param driver: resident memory of the command's own process.
    :param jvm: of the JVM beside it.
    :param workers: of the Python workers and the slot's reader.
    :param written: changes committed at the source so far.
    """

    at: float
    retained: int
    lag: int
    driver: int
    jvm: int
    workers: int
    written: int


@dataclass(frozen=True)
class Soak:
    """The samples of a run, and what they say. The first half is warm-up."""

    seconds: float
    samples: tuple[Sample, ...]

    @property
    def steady(self) -> tuple[Sample, ...]:
        """The samples after the warm-up."""
        return self.samples[len(self.samples) // 2 :]

    def growth(self, name: str) -> float:
        """By how many bytes a figure grew over the second half, by least squares."""
        points = [(each.at, getattr(each, name)) for each in self.steady]
        x, y = fmean(p[0] for p in points), fmean(p[1] for p in points)
        spread = sum((p[0] - x) ** 2 for p in points)
        slope = sum((p[0] - x) * (p[1] - y) for p in points) / spread if spread else 0.0
        return slope * (points[-1][0] - points[0][0])

    def allowed(self, name: str) -> float | None:
        """By how many bytes a figure may grow over the second half; ``None`` for any."""
        if name in KINDS:
            return _GROWTH * median(getattr(each, name) for each in self.steady)
        return MAX_BATCH_BYTES if name == "retained" else None

    @property
    def faults(self) -> tuple[str, ...]:
        """What was not bounded, with its figures; none for a run that is too short to tell."""
        if self.seconds < JUDGED_SECONDS:
            return ()
        found = []
        for name in ("retained", *KINDS):
            growth, allowed = self.growth(name), self.allowed(name)
            if allowed is not None and growth > allowed:
                found.append(
                    f"{name} grew by {growth / _MIB:,.1f} MiB over the second half of the run;"
                    f" {allowed / _MIB:,.1f} MiB are allowed"
                )
        peak = max(each.retained for each in self.steady)
        if peak > _BATCHES * MAX_BATCH_BYTES:
            found.append(
                f"the slot retained up to {peak / _MIB:,.1f} MiB; {_BATCHES} batches of {MAX_BATCH_BYTES // _MIB} MiB"
                " are allowed"
            )
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "case": SOAK,
            "seconds": round(self.seconds, 1),
            "changes": self.samples[-1].written,
            "faults": list(self.faults),
            "samples": [asdict(each) for each in self.samples],
        }

    def as_text(self) -> str:
        """The figures as a table, and the verdict."""
        body = []
        for name in ("retained", "lag", *KINDS):
            values = [getattr(each, name) / _MIB for each in self.steady]
            allowed = self.allowed(name)
            figures = (min(values), median(values), max(values), self.growth(name) / _MIB)
            limit = "" if allowed is None else f"{allowed / _MIB:,.1f}"
            body.append([name, *(f"{figure:,.1f}" for figure in figures), limit])
        verdict = "; ".join(self.faults) or "retained log and memory stayed within their bounds"
        if self.seconds < JUDGED_SECONDS:
            verdict = f"a run of less than {JUDGED_SECONDS:g} s is not judged"
        return "\n".join(
            [
                text_table(["MiB, second half", "min", "median", "max", "growth", "allowed"], body),
                f"{self.samples[-1].written:,} changes in {self.seconds:.0f} s; {verdict}",
            ]
        )


def measure(seconds: float, rate: int) -> Soak:
    """Write for some time while the stream runs, and take samples.

    :param rate: changes a second that are written, if the source can.
    :raises WrongResult: when the stream ends by itself, or source and target differ at the end.
    """
    directory = Path(tempfile.mkdtemp(prefix="cdc-soak-"))
    directory.chmod(0o755)  # root's servers run as another user
    try:
        with (
            PostgresServer.create(directory / "source", settings={"checkpoint_timeout": "30s"}) as source,
            PostgresServer.create(directory / "target") as target,
        ):
            execute(source.dsn(), TABLE_DDL)
            execute(target.dsn(), "CREATE DATABASE soak")
            return _soak(source.dsn(), target.dsn("soak"), directory, seconds, rate)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _soak(source: str, target: str, directory: Path, seconds: float, rate: int) -> Soak:
    file = directory / "pipeline.yaml"
    document = {
        "pipeline": SOAK,
        "source": {"dsn": source, "tables": ["public.t"]},
        "sink": {"dsn": target},
        "state": f"file://{directory / 'state'}",
        "snapshot": {"mode": "never"},
        "stream": {"trigger": "1 second", "max_batch_bytes": MAX_BATCH_BYTES, "heartbeat": "5 seconds"},
        "spark": {"conf": {"spark.ui.enabled": "false", "spark.driver.memory": "1g"}},
    }
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    pipeline = Pipeline.load(file)
    commands.provision(pipeline)

    def catch_up() -> None:
        with connected(source) as connection:
            marker = emit_marker(connection, SOAK)
        found = await_condition(lambda: existing_record(pipeline).applied >= marker, _SECONDS, 0.5)
        check(True, found, "the stream at the end of the log")

    with _stream(file, directory) as command:
        catch_up()
        with _Writer(source, rate) as writer:
            samples = list(_samples(pipeline, source, command, writer, seconds))
        catch_up()
        check(None, command.poll(), "exit code of the stream while it is needed")
    check(checksum(source), checksum(target), "rows and checksum")
    return Soak(seconds, tuple(samples))


@contextmanager
def _stream(file: Path, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    script = Path(sys.executable).with_name("airflow-cdc")
    with (directory / "stream.log").open("wb") as log:
        command = subprocess.Popen(
            [str(script), "stream", "--pipeline", str(file)], stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield command
        command.terminate()
        check(0, command.wait(_SECONDS), "exit code of the stream")
    except WrongResult:
        print((directory / "stream.log").read_text(errors="replace")[-4000:], file=sys.stderr)
        raise
    finally:
        for process in _session(command.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        command.wait()


def _session(pid: int) -> list[psutil.Process]:
    """The processes that a command has started; they leave its process group, but not its session."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == pid:
                found.append(process)
    return found


def _samples(
    pipeline: Pipeline, source: str, command: subprocess.Popen[bytes], writer: _Writer, seconds: float
) -> Iterator[Sample]:
    began = time.monotonic()
    interval = min(5.0, seconds / 10)
    text = (
        "SELECT pg_wal_lsn_diff(pg_current_wal_flush_lsn(), restart_lsn)::bigint, pg_current_wal_flush_lsn()::text"
        " FROM pg_replication_slots WHERE slot_name = %s"
    )
    while (at := time.monotonic() - began) < seconds:
        check((None, None), (command.poll(), writer.failure), "exit code of the stream and failure of the writer")
        applied = existing_record(pipeline).applied
        retained, flushed = query(source, text, pipeline.source.slot)
        sizes = {"driver": 0, "jvm": 0, "workers": 0}
        for process in _session(command.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                kind = "jvm" if process.name() == "java" else "driver" if process.pid == command.pid else "workers"
                sizes[kind] += process.memory_info().rss
        lag = max(0, parse_lsn(str(flushed)) - applied)
        yield Sample(round(at, 1), int(str(retained)), lag, **sizes, written=writer.changes)
        print(f"{SOAK}: {at:.0f} s, {writer.changes:,} changes, lag {lag / _MIB:.1f} MiB", file=sys.stderr)
        time.sleep(interval)


class _Writer(threading.Thread):
    """Inserts, updates and deletes on a bounded number of keys, in transactions of fifty, at a steady rate."""

    def __init__(self, dsn: str, rate: int) -> None:
        super().__init__(name="writer", daemon=True)
        self._dsn = dsn
        self._rate = rate
        self._halt = threading.Event()
        self.changes = 0
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self._write()
        except Exception as e:
            self.failure = e

    def _write(self) -> None:
        row = ROW.replace("%", "%%")
        upsert = f"""
            INSERT INTO public.t SELECT {row} FROM generate_series(%s::bigint, %s::bigint) AS n
            ON CONFLICT (id) DO UPDATE SET amount = t.amount + 1, note = md5(t.note), status = excluded.status
        """
        began, first = time.monotonic(), 1
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._halt.wait(max(0.0, self.changes / self._rate - (time.monotonic() - began))):
                with connection.transaction():
                    connection.execute(upsert.encode(), [first, first + _TRANSACTION - 2])
                    connection.execute("DELETE FROM public.t WHERE id = %s", [first])
                self.changes += _TRANSACTION
                first = 1 + (first + _TRANSACTION - 1) % _KEYS

    def __enter__(self) -> _Writer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._halt.set()
        self.join()
        check(None, self.failure, "failure of the writer")
