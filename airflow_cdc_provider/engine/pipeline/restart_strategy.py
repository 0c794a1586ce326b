"""Decides whether and when a failed job is restarted: Flink's restart strategies, based on the failures so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Strategy: TypeAlias = Literal["fixed-delay", "failure-rate", "none"]


@dataclass(frozen=True)
class Failure:
    """A failure of a job.

    :param at: time of the failure, in seconds on any clock.
    :param progressed: whether anything has been committed since the previous failure.
    """

    at: float
    progressed: bool


@dataclass(frozen=True)
class Attempt:
    """The attempt that follows a failure.

    :param number: number of the failures that count, this one included; from 1.
    :param of: number of failures that are tolerated.
    :param delay: seconds to wait before the attempt.
    """

    number: int
    of: int
    delay: float


@dataclass(frozen=True)
class Restart:
    """A restart strategy; ``strategy`` determines which fields matter.

    :param attempts: ``fixed-delay``: number of successive failures without a commit in between that are tolerated. A
        stream that runs for months would use up a limit on all its failures.
    :param failures: ``failure-rate``: number of failures that are tolerated within ``interval``.
    :param interval: ``failure-rate``: seconds.
    :param delay: seconds between a failure and the next attempt.
    """

    strategy: Strategy = "fixed-delay"
    attempts: int = 20
    failures: int = 3
    interval: float = 300.0
    delay: float = 5.0

    def after(self, failures: Sequence[Failure]) -> Attempt | None:
        """Decide on the attempt after the last of some failures.

        :param failures: the failures in order; at least one.
        :returns: the next attempt; ``None`` to give up.
        """
        if self.strategy == "none":
            return None
        if self.strategy == "failure-rate":
            counted = sum(failures[-1].at - failure.at < self.interval for failure in failures)
            borne = self.failures
        else:
            counted = _in_a_row(failures)
            borne = self.attempts
        return Attempt(counted, borne, self.delay) if counted <= borne else None


def _in_a_row(failures: Sequence[Failure]) -> int:
    """Return the number of failures since the last progress; the first failure after it counts."""
    last = max((place for place, failure in enumerate(failures) if failure.progressed), default=0)
    return len(failures) - last
