"""When a job that broke is begun again: Flink's restart strategies, decided from the failures so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Strategy: TypeAlias = Literal["fixed-delay", "failure-rate", "none"]


@dataclass(frozen=True)
class Failure:
    """A failure of a job.

    :param at: when, in seconds on any clock.
    :param progressed: whether anything has been committed since the failure before.
    """

    at: float
    progressed: bool


@dataclass(frozen=True)
class Attempt:
    """The attempt that follows a failure.

    :param number: of the failures that count, the one at hand included; from 1.
    :param of: how many failures are borne.
    :param delay: seconds to wait before.
    """

    number: int
    of: int
    delay: float


@dataclass(frozen=True)
class Restart:
    """A restart strategy; which fields matter depends on ``strategy``.

    :param attempts: ``fixed-delay``: failures that are borne without anything committed in between, since a stream of
        months would use up any other number.
    :param failures: ``failure-rate``: failures that are borne within ``interval``.
    :param interval: ``failure-rate``: seconds.
    :param delay: seconds between a failure and the next attempt.
    """

    strategy: Strategy = "fixed-delay"
    attempts: int = 20
    failures: int = 3
    interval: float = 300.0
    delay: float = 5.0

    def after(self, failures: Sequence[Failure]) -> Attempt | None:
        """Decide what follows the last of some failures.

        :param failures: in order; at least one.
        :returns: the next attempt; ``None`` when there is to be none.
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
    """How many failures there are since the last progress; the first after it is one."""
    last = max((place for place, failure in enumerate(failures) if failure.progressed), default=0)
    return len(failures) - last
