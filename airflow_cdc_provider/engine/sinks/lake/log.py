"""An append-only log of numbered entries, in a store without transactions: what a pipeline's record is made of.

Each entry is a file of its own, made only if it is absent; so of all who have read the same head, one appends, and the
others read again. Whoever appends says what follows from what the log holds. An overtaken run, whose epoch the log
does not hold any more, can therefore never append, however long it has slept between its look and its write.

Every ``SPAN``-th entry carries the contents of all before it, and these are removed, except for a span. Three things
make that safe:

* Entries are removed in their order. An entry counts, to who wrote it and to who reads it as the last one, only if the
  one before it, or it, is found in place afterwards: then its place had not been vacated.
* A log's first number is the time in microseconds. So the numbers of a log that is made anew, after the old one was
  dropped, are beyond all that a sleeper might still write to.
* An entry with contents counts only if the one before it is there, or it is the first of its log. Each entry names the
  one that it follows.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from airflow_cdc_provider.engine.core.errors import ConnectionFailed, GateClosed
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.sinks.lake.storage import Place
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents

SPAN = 50
"""So many entries stand between two that carry the contents."""

_HINT, _FIRST = "_last", "_first-"
_DIGITS = 20
_READINGS = 100
_ID_BYTES = 48


@dataclass(frozen=True)
class Entry:
    """An entry of the log.

    :param id: one that no other attempt to write an entry has.
    :param after: id of the entry before; ``None`` where the log begins.
    :param contents: those after the entry, if it carries them.
    :param dropped: whether the log ends with it.
    """

    id: str
    number: int
    after: str | None
    what: str
    at: float
    change: Change
    contents: Contents | None = None
    dropped: bool = False

    def to_bytes(self) -> bytes:
        """The entry's file. The id comes first, so that it can be told by the first bytes."""
        values: dict[str, Any] = {"id": self.id, "after": self.after, "what": self.what, "at": self.at}
        values["change"] = self.change.to_dict()
        if self.dropped:
            values["dropped"] = True
        if self.contents is not None:
            values["contents"] = self.contents
        return json.dumps(values, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, number: int, data: bytes) -> Entry:
        """Read what :meth:`to_bytes` wrote."""
        values = json.loads(data)
        return cls(**{**values, "number": number, "change": Change.from_dict(values["change"])})


@dataclass(frozen=True)
class Head:
    """The last entry of the log.

    :param contents: what the log holds.
    """

    id: str
    number: int
    contents: Contents = field(repr=False)
    dropped: bool = False


_heads: dict[Place, Head] = {}
"""By log the last head that this process has seen. It is where reading begins, and is looked at again."""


class Log:
    """The log in a folder.

    :param clock: seconds since 1970.
    """

    def __init__(self, place: Place, clock: Callable[[], float] = time.time) -> None:
        self._place = place
        self._clock = clock

    def head(self) -> Head | None:
        """The last entry; ``None`` when there is no log.

        :raises GateClosed: when entries are missing.
        :raises ConnectionFailed: when the log moves on faster than it can be read.
        """
        for attempt in range(_READINGS):
            start = _heads.get(self._place) if attempt == 0 else self._start()
            if start is None:
                if attempt:
                    return None
                continue
            head = self._follow(start)
            if self._stands(head):
                _heads[self._place] = head
                return None if head.dropped else head
        raise ConnectionFailed(
            f"the commit record in {self._place.url} moves on faster than it can be read",
            "Start again, with fewer parts of the pipeline at once, or nearer to the store.",
        )

    def begin(self, change: Change, what: str) -> Head | None:
        """Begin a log.

        :returns: its head; ``None`` when there is one already.
        """
        last = max(self._numbers(), default=0)
        if self.head() is not None:
            return None
        # Of two who begin after the same entry both try the same number.
        marker = f"{_FIRST}{last}"
        number = max(int(self._clock() * 1_000_000), last + 1)
        self._place.create(marker, str(number + -number % SPAN).encode())
        number = int(self._place.read(marker) or number + -number % SPAN)
        contents = change.apply({})
        entry = Entry(uuid.uuid4().hex, number, None, what, self._clock(), change, contents)
        failpoint("before-entry")
        if not self._place.create(_name(number), entry.to_bytes()):
            return None
        failpoint("after-entry")
        self._prune(number)  # what is left of another
        return Head(entry.id, number, contents)

    def append(self, head: Head, change: Change, what: str, dropped: bool = False) -> Head | None:
        """Append an entry after ``head``.

        :returns: the new head; ``None`` when another entry has been appended meanwhile, or the log is gone.
        """
        number, contents = head.number + 1, change.apply(head.contents)
        whole = number % SPAN == 0
        carried = contents if whole else None
        entry = Entry(uuid.uuid4().hex, number, head.id, what, self._clock(), change, carried, dropped)
        failpoint("before-entry")
        if not self._place.create(_name(number), entry.to_bytes()):
            return None
        failpoint("after-entry")
        if not self._is(head.number, head.id):
            self._place.remove(_name(number))
            return None
        found = Head(entry.id, number, contents, dropped)
        _heads[self._place] = found
        if whole:
            self._place.replace(_HINT, str(number).encode())
            self._prune(number - SPAN)
        return found

    def drop(self, head: Head) -> bool:
        """End the log, so that nobody appends any more, and remove it.

        :returns: whether it was; false when another entry has been appended meanwhile.
        """
        end = self.append(head, Change(), "dropped", dropped=True)
        if end is not None:
            self.clear()
        return end is not None

    def clear(self) -> None:
        """Remove a log that has ended, its last entry at last."""
        _heads.pop(self._place, None)
        entries = self._names()
        beside = [name for name in self._place.names() if name not in entries]
        for name in [*entries[:-1], *beside, *entries[-1:]]:
            self._place.remove(name)

    def entries(self) -> Iterator[Entry]:
        """The entries that are there, in order."""
        for name in self._names():
            data = self._place.read(name)
            if data is not None:
                yield Entry.from_bytes(int(name[:_DIGITS]), data)

    def _names(self) -> list[str]:
        names = self._place.names()
        return [name for name in names if name.endswith(".json") and name[:-5].isdigit() and len(name) == _DIGITS + 5]

    def _start(self) -> Head | None:
        """The last entry that carries the contents. What the hint says is tried first, and believed if it is so."""
        hint = self._place.read(_HINT)
        if hint is not None and hint.isdigit() and (found := self._whole(int(hint))) is not None:
            return found
        numbers = self._numbers()
        for number in reversed(numbers):
            if number % SPAN == 0 and (found := self._whole(number)) is not None:
                return found
        if len(numbers) > 1 and (data := self._place.read(_name(numbers[-1]))) is not None:
            last = Entry.from_bytes(numbers[-1], data)
            if not last.dropped and self._is(numbers[-2], last.after or ""):  # neither being removed nor a sleeper's
                raise self._torn(f"the entries before {_name(numbers[0])} are missing")
        return None

    def _numbers(self) -> list[int]:
        return [int(name[:_DIGITS]) for name in self._names()]

    def _torn(self, what: str) -> GateClosed:
        return GateClosed(
            f"the commit record in {self._place.url} is not whole: {what}",
            "Restore the folder from a backup. Without one, remove it, and follow the messages of"
            " `airflow-cdc provision`.",
        )

    def _whole(self, number: int) -> Head | None:
        data = self._place.read(_name(number))
        if data is None:
            return None
        entry = Entry.from_bytes(number, data)
        if entry.contents is None or not (entry.after is None or self._is(number - 1, entry.after)):
            return None
        return Head(entry.id, number, entry.contents, entry.dropped)

    def _follow(self, head: Head) -> Head:
        for number in itertools.count(head.number + 1):
            data = self._place.read(_name(number))
            if data is None:
                return head
            entry = Entry.from_bytes(number, data)
            if entry.after != head.id:
                raise self._torn(f"{_name(number)} does not follow {_name(head.number)}")
            head = Head(entry.id, number, entry.change.apply(head.contents), entry.dropped)
        raise AssertionError

    def _stands(self, head: Head) -> bool:
        return self._is(head.number, head.id)

    def _is(self, number: int, id_: str) -> bool:
        found = self._place.read(_name(number), _ID_BYTES)
        return found is not None and found.startswith(f'{{"id":"{id_}"'.encode())

    def _prune(self, before: int) -> None:
        """Remove the entries before a number, the oldest first."""
        for number in self._numbers():
            if number >= before:
                break
            self._place.remove(_name(number))
        self._place.remove_unfinished()


def _name(number: int) -> str:
    return f"{number:0{_DIGITS}d}.json"
