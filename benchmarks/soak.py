"""The soak test: writes for minutes at a steady rate, and checks that retained log and memory stay bounded.

The stream is the command ``airflow-cdc stream`` in separate processes. The retained log includes at least what was
written since the server's last running-transactions record, which it writes every 15 seconds or so. Only such a record
lets ``restart_lsn`` move.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, ClassVar

from airflow_cdc_provider.engine.core.text_output import text_table
from benchmarks.lag import Lag
from benchmarks.live import MAX_BATCH_BYTES, live
from benchmarks.processes import ENGINE
from benchmarks.samples import Sample, samples
from benchmarks.writer import Writer

SOAK = "soak"
JUDGED_SECONDS = 120.0
"""Shorter runs are not judged, because a JVM grows after its start and little log is written."""
_BATCHES = 4
_GROWTH = 0.1
_MIB = 1 << 20


@dataclass(frozen=True)
class Soak:
    """The samples of a run and their verdict; the first half is warm-up."""

    seconds: float
    samples: tuple[Sample, ...]

    name: ClassVar[str] = SOAK

    @property
    def steady(self) -> tuple[Sample, ...]:
        """Return the samples after the warm-up."""
        return self.samples[len(self.samples) // 2 :]

    def growth(self, name: str) -> float:
        """Return the bytes by which a figure grew over the second half, fitted by least squares."""
        points = [(each.at, getattr(each, name)) for each in self.steady]
        x, y = fmean(p[0] for p in points), fmean(p[1] for p in points)
        spread = sum((p[0] - x) ** 2 for p in points)
        slope = sum((p[0] - x) * (p[1] - y) for p in points) / spread if spread else 0.0
        return slope * (points[-1][0] - points[0][0])

    def allowed(self, name: str) -> float | None:
        """Return the bytes by which a figure may grow over the second half, or ``None`` for no limit."""
        if name in ENGINE:
            return _GROWTH * median(getattr(each, name) for each in self.steady)
        return MAX_BATCH_BYTES if name == "retained" else None

    @property
    def faults(self) -> tuple[str, ...]:
        """Return the figures that exceeded their bounds; none for a run that is too short to judge."""
        if self.seconds < JUDGED_SECONDS:
            return ()
        found = []
        for name in ("retained", *ENGINE):
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

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {
            "seconds": round(self.seconds, 1),
            "changes": self.samples[-1].written,
            "faults": list(self.faults),
            "samples": [asdict(each) for each in self.samples],
        }

    def as_text(self) -> str:
        """Return the figures as a table, and the verdict."""
        body = []
        for name in ("retained", "lag", *ENGINE):
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

    :param rate: changes per second to write, if the source is fast enough.
    :raises WrongResult: if the stream ends early, or source and target differ at the end.
    """
    stream = {"trigger": "1 second", "max_batch_bytes": MAX_BATCH_BYTES, "heartbeat": "5 seconds"}
    with live(stream, {"checkpoint_timeout": "30s"}) as scene:
        with scene.stream() as command:
            scene.catch_up()
            with Lag(scene) as lag, Writer(scene.dsns[0], rate) as writer:
                found = tuple(samples(scene, command, writer, lag, seconds, min(5.0, seconds / 10)))
            scene.catch_up()
        scene.check_equal(SOAK)
    return Soak(seconds, found)
