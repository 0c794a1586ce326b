"""Measures sustained load: how many changes per second a stream follows for minutes, and what they cost.

Increasing rates are tried for a short time each, until the stream does not hold one: the target falls behind by more
than five seconds. The highest rate that was held is then written for minutes; if it is not held, the next lower one
follows. All of it runs against one stream in separate processes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from airflow_cdc_provider.engine.core.text_output import text_table
from benchmarks.lab import SERVER_SETTINGS
from benchmarks.lag import Lag
from benchmarks.live import MAX_BATCH_BYTES, Live, live
from benchmarks.processes import KINDS
from benchmarks.report import spread
from benchmarks.samples import Sample, samples
from benchmarks.writer import Writer

SUSTAINED = "sustained"
RATES = (1000, 2500, 5000, 10_000, 15_000, 20_000, 30_000, 40_000, 60_000, 80_000, 100_000)
BEHIND_SECONDS = 5.0
HELD = "held"
NOT_HELD = "the lowest rate is not held"

_PROBE_SECONDS = 30.0
_WRITTEN = 0.95
_MIB = 1 << 20


@dataclass(frozen=True)
class Load:
    """The changes written at one rate, and how well the stream kept up.

    :param rate: changes per second that the writer aimed at.
    :param cpu: seconds of CPU time by kind, see :mod:`.processes`.
    """

    rate: int
    seconds: float
    samples: tuple[Sample, ...]
    cpu: dict[str, float]

    @property
    def changes(self) -> int:
        """Return the number of changes written between the first sample and the last."""
        return self.samples[-1].written - self.samples[0].written

    @property
    def written(self) -> float:
        """Return the changes written per second."""
        return self.changes / (self.samples[-1].at - self.samples[0].at)

    @property
    def behind(self) -> float:
        """Return the largest lag in seconds."""
        return max(each.behind for each in self.samples)

    @property
    def verdict(self) -> str:
        """Return whether the rate was held; if not, whether the source or the stream was the limit."""
        if self.behind >= BEHIND_SECONDS:
            return "not followed"
        return HELD if self.written >= _WRITTEN * self.rate else "not written"

    @property
    def held(self) -> bool:
        """Return whether all changes were written and followed."""
        return self.verdict == HELD

    @property
    def cpu_per_million(self) -> dict[str, float]:
        """Return seconds of CPU time by kind per million changes."""
        return {kind: round(seconds / max(1, self.changes) * 1e6, 2) for kind, seconds in self.cpu.items()}

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        figures = {"written": round(self.written), "behind": self.behind, "verdict": self.verdict}
        cpu = {"cpu_per_million": self.cpu_per_million}
        return {"rate": self.rate, **figures, **cpu, "samples": [asdict(each) for each in self.samples]}


@dataclass(frozen=True)
class Sustained:
    """The search for the highest rate, and the long runs at that rate."""

    seconds: float
    probes: tuple[Load, ...]
    holds: tuple[Load, ...]

    name: ClassVar[str] = SUSTAINED

    @property
    def rate(self) -> int:
        """Return the highest rate that was held in all long runs, or 0 if there is none."""
        return 0 if self.faults else self.holds[-1].rate

    @property
    def faults(self) -> tuple[str, ...]:
        """Return a fault if no rate was held."""
        return () if self.holds and self.holds[-1].held else (NOT_HELD,)

    @property
    def steady(self) -> tuple[Load, ...]:
        """Return the long runs at the rate that was held."""
        return tuple(each for each in self.holds if each.held and each.rate == self.rate)

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        costs = [each.cpu_per_million for each in self.steady]
        return {
            "seconds": self.seconds,
            "bound": BEHIND_SECONDS,
            "rate": self.rate,
            "cpu_per_million": {kind: spread((cost[kind] for cost in costs), 2) for kind in KINDS if costs},
            "probes": [each.as_json() for each in self.probes],
            "holds": [each.as_json() for each in self.holds],
        }

    def as_text(self) -> str:
        """Return a table of every rate, and of the cost of the long runs."""
        body = [_row("probe", each) for each in self.probes] + [_row("hold", each) for each in self.holds]
        head = ["", "changes/s", "written/s", "s behind", "retained MiB", "", *KINDS]
        return f"CPU seconds a million changes by kind\n{text_table(head, body)}"


def _row(name: str, load: Load) -> list[str]:
    retained = max(each.retained for each in load.samples) / _MIB
    cost = [f"{load.cpu_per_million[kind]:.1f}" for kind in KINDS]
    figures = [f"{load.rate:,}", f"{load.written:,.0f}", f"{load.behind:.1f}", f"{retained:.0f}"]
    return [name, *figures, load.verdict, *cost]


def measure(seconds: float, repeat: int, rates: Sequence[int]) -> Sustained:
    """Search for the highest rate that the stream holds, and hold it.

    :param seconds: duration of each of the long runs.
    :param repeat: number of long runs.
    :raises WrongResult: if the stream ends early, or source and target differ at the end.
    """
    stream = {"trigger": "500 milliseconds", "max_batch_bytes": MAX_BATCH_BYTES, "heartbeat": "5 seconds"}
    settings = {name: value for name, value in SERVER_SETTINGS.items() if name != "autovacuum"}  # it runs for minutes
    with live(stream, settings) as scene:
        with scene.stream() as command:
            scene.catch_up()
            probe = min(_PROBE_SECONDS, seconds)
            _load(scene, command, min(rates), probe)  # a warm-up
            probes: list[Load] = []
            for rate in sorted(rates):
                probes.append(_load(scene, command, rate, probe))
                if not probes[-1].held:
                    break
            holds: list[Load] = []
            for rate in sorted((each.rate for each in probes if each.held), reverse=True):
                for _ in range(repeat):
                    holds.append(_load(scene, command, rate, seconds))
                    if not holds[-1].held:
                        break
                if holds[-1].held:
                    break
        scene.check_equal(SUSTAINED)
    return Sustained(seconds, tuple(probes), tuple(holds))


def _load(scene: Live, command: subprocess.Popen[bytes], rate: int, seconds: float) -> Load:
    """Write at a rate, and wait until all changes are applied."""
    print(f"{SUSTAINED}: {rate:,} changes a second", file=sys.stderr)
    meter = scene.meter(command)
    before = meter.read()
    with Lag(scene) as lag, Writer(scene.dsns[0], rate) as writer:
        found = tuple(samples(scene, command, writer, lag, seconds, min(2.0, seconds / 10)))
    scene.catch_up()
    return Load(rate, seconds, found, meter.since(before))
