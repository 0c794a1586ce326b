"""Which messages of a unit are to blame for its failure, found by trying parts of it.

A unit is cut in halves, and those that fail are cut again, until single messages are left that fail by themselves. It
takes about twice the logarithm of the unit's size in tries for each, and reads about three units for the first. A part
that fails whereas both its halves do not has no single message to blame: its messages do not go together, as with a sum
that becomes too large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.sources.kafka.settings import Offsets

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Messages of a unit.

    :param ranges: topic, partition, first offset and the one behind the last; a partition has at most one.
    """

    ranges: tuple[tuple[str, str, int, int], ...]

    @classmethod
    def between(cls, start: Offsets, end: Offsets) -> Part:
        """All messages between offsets; of partitions that ``start`` does not have, from the first one on."""
        found = (
            (topic, p, start.get(topic, {}).get(p, 0), offset)
            for topic, partitions in sorted(end.items())
            for p, offset in sorted(partitions.items(), key=lambda each: int(each[0]))
        )
        return cls(tuple(each for each in found if each[2] < each[3]))

    @property
    def size(self) -> int:
        """Offsets that it has, of which some may hold no message."""
        return sum(end - begin for *_, begin, end in self.ranges)

    @property
    def start(self) -> Offsets:
        """Its first offsets."""
        return self._offsets(2)

    @property
    def end(self) -> Offsets:
        """The offsets behind its last ones."""
        return self._offsets(3)

    @property
    def place(self) -> str:
        """Where its messages are, for people."""
        return ", ".join(f"{topic}[{p}] {begin}-{end - 1}" for topic, p, begin, end in self.ranges)

    def cut(self, size: int) -> tuple[Part, Part]:
        """Cut it in two parts, of which the first has so many messages."""
        left, first, second = size, [], []
        for topic, p, begin, end in self.ranges:
            cut = begin + min(left, end - begin)
            left -= cut - begin
            first += [(topic, p, begin, cut)] if cut > begin else []
            second += [(topic, p, cut, end)] if cut < end else []
        return Part(tuple(first)), Part(tuple(second))

    def _offsets(self, place: int) -> Offsets:
        found: dict[str, dict[str, int]] = {}
        for each in self.ranges:
            found.setdefault(each[0], {})[each[1]] = int(each[place])
        return found


@dataclass(frozen=True)
class Culprit:
    """A single message that fails by itself, or messages that do so together, and what with."""

    part: Part
    error: CdcError


def culprits(part: Part, attempt: Callable[[Part], CdcError | None]) -> Iterator[Culprit]:
    """Find what in a part fails, one after the other; nothing when the whole part passes.

    :param attempt: tries a part; returns what it is refused for, ``None`` if it is not, and raises anything else.
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


def tipping(part: Part, attempt: Callable[[Part], T | None]) -> tuple[Part, T] | None:
    """Find a message with which a part begins to fail: up to it the part fails, and without it does not.

    :param attempt: see :func:`culprits`.
    :returns: the message, and what the part fails of up to it; ``None`` when the whole part passes.
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
