"""Finds the messages that make a unit fail, by trying parts of it.

A unit is halved, and halves that fail are halved again, until single messages remain that fail alone. For each message
this takes about twice the logarithm of the unit's size in tries, and the first one reads about three times the unit. If
a part fails but neither half does, no single message is at fault: its messages fail together, as with a sum that
becomes too large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.sources.kafka.settings import Offsets

T = TypeVar("T")


@dataclass(frozen=True)
class UnitMessages:
    """Messages of a unit.

    :param ranges: topic, partition, first offset, and the offset after the last message; one entry at most per
        partition.
    """

    ranges: tuple[tuple[str, str, int, int], ...]

    @classmethod
    def between(cls, start: Offsets, end: Offsets) -> UnitMessages:
        """Return all messages between offsets; if ``start`` lacks a partition, from its first message."""
        found = (
            (topic, p, start.get(topic, {}).get(p, 0), offset)
            for topic, partitions in sorted(end.items())
            for p, offset in sorted(partitions.items(), key=lambda each: int(each[0]))
        )
        return cls(tuple(each for each in found if each[2] < each[3]))

    @property
    def size(self) -> int:
        """Return the number of offsets; some may hold no message."""
        return sum(end - begin for *_, begin, end in self.ranges)

    @property
    def start(self) -> Offsets:
        """Return the first offsets."""
        return self._offsets(2)

    @property
    def end(self) -> Offsets:
        """Return the offsets after the last messages."""
        return self._offsets(3)

    @property
    def place(self) -> str:
        """Return the location of the messages, for people."""
        return ", ".join(f"{topic}[{p}] {begin}-{end - 1}" for topic, p, begin, end in self.ranges)

    def cut(self, size: int) -> tuple[UnitMessages, UnitMessages]:
        """Cut the part in two, the first with ``size`` messages."""
        left, first, second = size, [], []
        for topic, p, begin, end in self.ranges:
            cut = begin + min(left, end - begin)
            left -= cut - begin
            first += [(topic, p, begin, cut)] if cut > begin else []
            second += [(topic, p, cut, end)] if cut < end else []
        return UnitMessages(tuple(first)), UnitMessages(tuple(second))

    def _offsets(self, place: int) -> Offsets:
        found: dict[str, dict[str, int]] = {}
        for each in self.ranges:
            found.setdefault(each[0], {})[each[1]] = int(each[place])
        return found


@dataclass(frozen=True)
class Culprit:
    """A single message that fails alone, or messages that fail together, with the error."""

    part: UnitMessages
    error: CdcError


def culprits(part: UnitMessages, attempt: Callable[[UnitMessages], CdcError | None]) -> Iterator[Culprit]:
    """Yield the failures in a part, one after the other; nothing if the whole part passes.

    :param attempt: tries a part; returns the error if it is refused, ``None`` if it passes, and raises anything else.
    """
    error = attempt(part)
    if error is None:
        return
    alone = True
    for half in part.cut(part.size // 2) if part.size > 1 else ():
        for each in culprits(half, attempt):
            alone = False
            yield each
    if alone:
        yield Culprit(part, error)


def first_failing_message(
    part: UnitMessages, attempt: Callable[[UnitMessages], T | None]
) -> tuple[UnitMessages, T] | None:
    """Find a message at which a part begins to fail: the part fails with it, but not if it ends before it.

    :param attempt: see :func:`culprits`.
    :returns: the message, and the failure of the part up to it; ``None`` if the whole part passes.
    """
    failure = attempt(part)
    if failure is None:
        return None
    passes, fails = 0, part.size
    while fails - passes > 1:
        middle = (passes + fails) // 2
        tried = attempt(part.cut(middle)[0])
        if tried is None:
            passes = middle
        else:
            fails, failure = middle, tried
    return part.cut(passes)[1].cut(1)[0], failure
