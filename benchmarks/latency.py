"""Measures latency: the time from a commit at the source until the row is visible in the mirror, at several rates.

``pgbench`` writes transactions of one row at a steady rate; their arrivals are random, as with independent clients. The
time of a commit is taken from its commit record. A poller reads new rows of the mirror every few milliseconds and notes
when it first saw each. All times come from the clock of one machine. A commit record is written before the commit
becomes visible, and a row is seen after it became visible, so no reported latency is too low.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psycopg

from airflow_cdc_provider.engine.core.text_output import text_table
from benchmarks.lab import ROW, SERVER_SETTINGS, execute
from benchmarks.live import CATCH_UP_SECONDS, MAX_BATCH_BYTES, Live, live
from benchmarks.processes import KINDS
from benchmarks.report import check, spread

LATENCY = "latency"
RATES = (10, 100, 1000, 5000)
TRIGGER = "100 milliseconds"
SHOWN = {"p50": 50, "p95": 95, "p99": 99, "max": 100}

_CLIENTS = 16
_POLL_SECONDS = 0.005
_WARM_RATE, _WARM_SECONDS = 500, 15.0


@dataclass(frozen=True)
class Window:
    """The measurement of one repeat at one rate.

    :param written: transactions committed per second.
    :param percentiles: latency in milliseconds, at every percent from 0 to 100.
    :param cpu: seconds of CPU time by kind, see :mod:`.processes`.
    """

    written: float
    percentiles: tuple[float, ...]
    cpu: dict[str, float]


@dataclass(frozen=True)
class Latency:
    """The windows of each rate, in transactions per second."""

    seconds: float
    windows: dict[int, tuple[Window, ...]]

    name: ClassVar[str] = LATENCY
    faults: ClassVar[tuple[str, ...]] = ()

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {
            "seconds": self.seconds,
            "trigger": TRIGGER,
            "rates": [
                {
                    "rate": rate,
                    "written": spread(each.written for each in windows),
                    "milliseconds": {
                        name: spread(each.percentiles[percent] for each in windows) for name, percent in SHOWN.items()
                    },
                    "windows": [asdict(each) for each in windows],
                }
                for rate, windows in self.windows.items()
            ],
        }

    def as_text(self) -> str:
        """Return a table with a row per rate."""
        body = []
        for each in self.as_json()["rates"]:
            shown = [f"{each['milliseconds'][name]['median']:,.0f}" for name in SHOWN]
            body.append([f"{each['rate']:,}", f"{each['written']['median']:,.0f}", *shown])
        return f"latency in milliseconds\n{text_table(['transactions/s', 'written/s', *SHOWN], body)}"


def measure(seconds: float, repeat: int, rates: Sequence[int] = RATES) -> Latency:
    """Write at each rate for some time, one after the other in every repeat.

    :raises WrongResult: if a row is missing, or source and target differ at the end.
    """
    stream = {"trigger": TRIGGER, "max_batch_bytes": MAX_BATCH_BYTES, "heartbeat": "5 seconds"}
    windows: dict[int, list[Window]] = {rate: [] for rate in rates}
    with live(stream, {**SERVER_SETTINGS, "track_commit_timestamp": "on"}) as scene:
        execute(scene.dsns[0], "CREATE SEQUENCE ids")
        script = scene.file.with_name("insert.sql")
        script.write_text(f"INSERT INTO public.t SELECT {' '.join(ROW.split())} FROM nextval('ids') AS n;\n")
        with scene.stream() as command:
            scene.catch_up()
            _window(scene, command, script, _WARM_RATE, min(_WARM_SECONDS, seconds))
            for _ in range(repeat):
                for rate in rates:
                    windows[rate].append(_window(scene, command, script, rate, seconds))
                    _tell(rate, windows[rate][-1])
        scene.check_equal(LATENCY)
    return Latency(seconds, {rate: tuple(found) for rate, found in windows.items()})


def _window(scene: Live, command: subprocess.Popen[bytes], script: Path, rate: int, seconds: float) -> Window:
    meter, (source, _) = scene.meter(command), scene.dsns
    before, began, first = meter.read(), time.monotonic(), _rows(source) + 1
    with subprocess.Popen(
        [
            str(scene.source.binaries / "pgbench"),
            "--no-vacuum",
            f"--file={script}",
            f"--rate={rate}",
            f"--time={round(seconds)}",
            f"--client={_CLIENTS}",
            "--protocol=prepared",
            "--random-seed=1",
            source,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as pgbench:
        seen = _watch(scene, pgbench, first)
    check(0, pgbench.returncode, f"{LATENCY}: exit code of pgbench")
    scene.check_running(command)
    committed = _commits(source, first)
    check(committed.keys(), seen.keys(), f"{LATENCY}: rows seen")
    took = [1000 * (seen[row] - at) for row, at in committed.items()]
    percentiles = np.percentile(took, range(101)) if took else np.zeros(101)
    times = max(committed.values()) - min(committed.values()) if len(took) > 1 else time.monotonic() - began
    return Window(round(len(took) / times, 1), tuple(percentiles.round(1).tolist()), meter.since(before))


def _watch(scene: Live, pgbench: subprocess.Popen[bytes], first: int) -> dict[int, float]:
    """Return when each row from ``first`` on was first seen in the mirror, in seconds since 1970, by key."""
    source, target = scene.dsns
    seen: dict[int, float] = {}
    low, last, deadline = first, None, float("inf")
    with psycopg.connect(target, autocommit=True, prepare_threshold=1) as mirror:
        while last is None or len(seen) < last - first + 1:
            if last is None and pgbench.poll() is not None:
                last, deadline = _rows(source), time.monotonic() + CATCH_UP_SECONDS
            check(True, time.monotonic() < deadline, f"{LATENCY}: all rows seen")
            found = mirror.execute("SELECT id FROM public.t WHERE id >= %s", [low]).fetchall()
            now = time.time()
            for (row,) in found:
                seen.setdefault(row, now)
            while low in seen:
                low += 1
            time.sleep(_POLL_SECONDS)
    return seen


def _rows(source: str) -> int:
    """Return the number of rows written, which is also the last key."""
    with psycopg.connect(source) as connection:
        row = connection.execute("SELECT count(*) FROM public.t").fetchone()
    assert row is not None
    return int(row[0])


def _commits(source: str, first: int) -> dict[int, float]:
    """Return the commit time, in seconds since 1970, of each row from ``first`` on, by key."""
    text = "SELECT id, extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8 FROM public.t WHERE id >= %s"
    with psycopg.connect(source) as connection:
        return dict(connection.execute(text, [first]).fetchall())


def _tell(rate: int, window: Window) -> None:
    shown = ", ".join(f"{name} {window.percentiles[percent]:,.0f} ms" for name, percent in SHOWN.items())
    print(f"{LATENCY}: {rate:,}/s asked, {window.written:,.0f}/s written; {shown}", file=sys.stderr)
    print(f"  CPU: {', '.join(f'{kind} {window.cpu[kind]:.1f} s' for kind in KINDS)}", file=sys.stderr)
