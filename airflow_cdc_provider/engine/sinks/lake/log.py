"""An append-only log of numbered entries, in a store without transactions; it holds a pipeline's record.

Each entry is a file that is created only if it is absent. If several processes have read the same head, only one can
append, and the others read again. The appending process derives its entry from the log's contents. An overtaken run,
whose epoch is no longer in the log, can therefore never append, however long it pauses between reading and writing.

Every ``SPAN``-th entry contains the accumulated contents. The entries before it are then removed, except for one span.
Three rules make this safe:

* Entries are removed in order. An entry counts, for its writer and for readers that find it last, only if the entry
  before it, or the entry itself, is still in place afterwards. Then its number had not been vacated.
* The first number of a log is the time in microseconds. So the numbers of a log that is recreated after a drop are
  greater than any number to which a delayed process may still write.
* An entry with contents counts only if the entry before it exists, or if it is the first of its log. Each entry names
  its predecessor.
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
from airflow_cdc_provider.engine.sinks.lake.storage import Storage
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents

SPAN = 50
"""Number of entries from one with contents to the next."""

_HINT, _FIRST = "_last", "_first-"
_DIGITS = 20
_READINGS = 100
_ID_BYTES = 48


@dataclass(frozen=True)
class Entry:
    """An entry of the log.

    :param id: an id that no other attempt to write an entry has.
    :param after: id of the entry before; ``None`` at the beginning of the log.
    :param contents: the contents after the entry, if it includes them.
    :param dropped: whether the log ends with this entry.
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
        """Return the entry's file, with the id first, so that the first bytes identify the entry."""
        values: dict[str, Any] = {"id": self.id, "after": self.after, "what": self.what, "at": self.at}
        values["change"] = self.change.to_dict()
        if self.dropped:
            values["dropped"] = True
        if self.contents is not None:
            values["contents"] = self.contents
        return json.dumps(values, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, number: int, data: bytes) -> Entry:
        """Return the entry from the bytes of :meth:`to_bytes`."""
        values = json.loads(data)
        return cls(**{**values, "number": number, "change": Change.from_dict(values["change"])})


@dataclass(frozen=True)
class Head:
    """The last entry of the log.

    :param contents: the contents of the log.
    """

    id: str
    number: int
    contents: Contents = field(repr=False)
    dropped: bool = False


_heads: dict[Storage, Head] = {}
"""By log, the last head that this process has seen. Reading begins there, and it is checked again."""


class Log:
    """The log in a folder.

    :param clock: returns seconds since 1970.
    """

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._clock = clock

    def head(self) -> Head | None:
        """Return the last entry; ``None`` if there is no log.

        :raises GateClosed: when entries are missing.
        :raises ConnectionFailed: when the log grows faster than it can be read.
        """
        for attempt in range(_READINGS):
            start = _heads.get(self._storage) if attempt == 0 else self._start()
            if start is None:
                if attempt:
                    return None
                continue
            head = self._follow(start)
            if self._is_current(head):
                _heads[self._storage] = head
                return None if head.dropped else head
        raise ConnectionFailed(
            f"could not read the commit record in {self._storage.url} because it grows faster than it can be read",
            "Start again with fewer concurrent parts of the pipeline, or closer to the store.",
        )

    def begin(self, change: Change, what: str) -> Head | None:
        """Begin a log.

        :returns: its head; ``None`` if a log exists already.
        """
        last = max(self._numbers(), default=0)
        if self.head() is not None:
            return None
        # Two processes that begin after the same entry try the same number.
        marker = f"{_FIRST}{last}"
        number = max(int(self._clock() * 1_000_000), last + 1)
        self._storage.create(marker, str(number + -number % SPAN).encode())
        number = int(self._storage.read(marker) or number + -number % SPAN)
        contents = change.apply({})
        entry = Entry(uuid.uuid4().hex, number, None, what, self._clock(), change, contents)
        failpoint("before-entry")
        if not self._storage.create(_name(number), entry.to_bytes()):
            return None
        failpoint("after-entry")
        self._prune(number)  # leftovers of another log
        return Head(entry.id, number, contents)

    def append(self, head: Head, change: Change, what: str, dropped: bool = False) -> Head | None:
        """Append an entry after ``head``.

        :returns: the new head; ``None`` if another entry has been appended meanwhile, or the log is gone.
        """
        number, contents = head.number + 1, change.apply(head.contents)
        whole = number % SPAN == 0
        carried = contents if whole else None
        entry = Entry(uuid.uuid4().hex, number, head.id, what, self._clock(), change, carried, dropped)
        failpoint("before-entry")
        if not self._storage.create(_name(number), entry.to_bytes()):
            return None
        failpoint("after-entry")
        if not self._is(head.number, head.id):
            self._storage.remove(_name(number))
            return None
        found = Head(entry.id, number, contents, dropped)
        _heads[self._storage] = found
        if whole:
            self._storage.replace(_HINT, str(number).encode())
            self._prune(number - SPAN)
        return found

    def drop(self, head: Head) -> bool:
        """End the log, so that no process can append anymore, and remove it.

        :returns: whether it was removed; false if another entry has been appended meanwhile.
        """
        end = self.append(head, Change(), "dropped", dropped=True)
        if end is not None:
            self.clear()
        return end is not None

    def clear(self) -> None:
        """Remove a log that has ended, with its last entry last."""
        _heads.pop(self._storage, None)
        entries = self._names()
        beside = [name for name in self._storage.names() if name not in entries]
        for name in [*entries[:-1], *beside, *entries[-1:]]:
            self._storage.remove(name)

    def entries(self) -> Iterator[Entry]:
        """Yield the existing entries, in order."""
        for name in self._names():
            data = self._storage.read(name)
            if data is not None:
                yield Entry.from_bytes(int(name[:_DIGITS]), data)

    def _names(self) -> list[str]:
        names = self._storage.names()
        return [name for name in names if name.endswith(".json") and name[:-5].isdigit() and len(name) == _DIGITS + 5]

    def _start(self) -> Head | None:
        """Return the last entry with contents. The hint is tried first, and used if it is right."""
        hint = self._storage.read(_HINT)
        if hint is not None and hint.isdigit() and (found := self._whole(int(hint))) is not None:
            return found
        numbers = self._numbers()
        for number in reversed(numbers):
            if number % SPAN == 0 and (found := self._whole(number)) is not None:
                return found
        if len(numbers) > 1 and (data := self._storage.read(_name(numbers[-1]))) is not None:
            last = Entry.from_bytes(numbers[-1], data)
            # The last entry is neither being removed nor written by a delayed process.
            if not last.dropped and self._is(numbers[-2], last.after or ""):
                raise self._torn(f"the entries before {_name(numbers[0])} are missing")
        return None

    def _numbers(self) -> list[int]:
        return [int(name[:_DIGITS]) for name in self._names()]

    def _torn(self, what: str) -> GateClosed:
        return GateClosed(
            f"the commit record in {self._storage.url} is incomplete: {what}",
            "Restore the folder from a backup. Without a backup, remove it, and follow the messages of"
            " `airflow-cdc provision`.",
        )

    def _whole(self, number: int) -> Head | None:
        data = self._storage.read(_name(number))
        if data is None:
            return None
        entry = Entry.from_bytes(number, data)
        if entry.contents is None or not (entry.after is None or self._is(number - 1, entry.after)):
            return None
        return Head(entry.id, number, entry.contents, entry.dropped)

    def _follow(self, head: Head) -> Head:
        for number in itertools.count(head.number + 1):
            data = self._storage.read(_name(number))
            if data is None:
                return head
            entry = Entry.from_bytes(number, data)
            if entry.after != head.id:
                raise self._torn(f"{_name(number)} does not follow {_name(head.number)}")
            head = Head(entry.id, number, entry.change.apply(head.contents), entry.dropped)
        raise AssertionError

    def _is_current(self, head: Head) -> bool:
        return self._is(head.number, head.id)

    def _is(self, number: int, id_: str) -> bool:
        found = self._storage.read(_name(number), _ID_BYTES)
        return found is not None and found.startswith(f'{{"id":"{id_}"'.encode())

    def _prune(self, before: int) -> None:
        """Remove the entries before a number, the oldest first."""
        for number in self._numbers():
            if number >= before:
                break
            self._storage.remove(_name(number))
        self._storage.remove_unfinished()


def _name(number: int) -> str:
    return f"{number:0{_DIGITS}d}.json"
