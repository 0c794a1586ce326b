"""Shares one poll of a server among all its watchers in a triggerer.

However many sensors and asset watchers observe the slots of a server, the server is queried only once per interval,
over one permanent connection. The interval is the smallest one of the watchers. A watcher never gets a result that is
older than the watcher itself: when watchers join, the server is queried immediately, but at most four times a second. A
poll begins with its first watcher and ends with its last. Each poll runs its queries in its own thread, so that a
server that hangs blocks neither the event loop nor other polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

T = TypeVar("T")
Result_co = TypeVar("Result_co", covariant=True)

GATHER_SECONDS = 0.25
"""Minimum number of seconds between two queries, however many watchers join in the meantime."""


class Reader(Protocol[Result_co]):
    """The queries of a poll; both methods are called in the poll's thread."""

    def read(self) -> Result_co:
        """Query once, and connect if necessary."""

    def close(self) -> None:
        """Close the connection."""


@dataclass(frozen=True)
class _PollResult(Generic[T]):
    """The result of a query: a value, or an error.

    :param at: time when the query began, in monotonic seconds.
    """

    at: float
    value: T | None = None
    error: Exception | None = None


class Watcher(Generic[T]):
    """A watcher's view of a poll.

    :param interval: maximum number of seconds between two queries.
    """

    def __init__(self, poll: Poll[T], interval: float) -> None:
        self._poll = poll
        self.interval = interval
        self.seen = time.monotonic()
        """Time in monotonic seconds; only queries that began later are new."""

    async def next(self, after: float = 0.0) -> T:
        """Return the next result, of a query that began after the last one and after the watcher joined.

        :param after: monotonic seconds; the query must also have begun after this time, and is made immediately.
        :raises Exception: if the query failed.
        """
        self.seen = max(self.seen, after)
        self._poll.wanted.set()
        while (look := self._poll.latest) is None or look.at <= self.seen:
            await asyncio.shield(self._poll.coming)
        self.seen = look.at
        if look.error is not None:
            raise look.error
        return look.value  # type: ignore[return-value]


class Poll(Generic[T]):
    """Regular queries for a set of watchers.

    :param reader: makes the queries.
    """

    _running: ClassVar[dict[tuple[asyncio.AbstractEventLoop, Hashable], Poll[Any]]] = {}

    def __init__(self, reader: Reader[T]) -> None:
        self._reader = reader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cdc-poll")
        self._watches: set[Watcher[T]] = set()
        self.wanted = asyncio.Event()
        self.latest: _PollResult[T] | None = None
        self.coming: asyncio.Future[_PollResult[T]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="cdc-poll")

    @classmethod
    @asynccontextmanager
    async def watch(cls, key: Hashable, reader: Callable[[], Reader[T]], interval: float) -> AsyncIterator[Watcher[T]]:
        """Join the poll of a key, or begin it.

        :param key: the key of the poll; within an event loop there is one poll for each key.
        :param reader: creates the reader if the poll begins.
        :param interval: maximum number of seconds between two queries.
        """
        place = (asyncio.get_running_loop(), key)
        poll = cls._running.get(place)
        if poll is None:
            poll = cls._running[place] = cls(reader())
        watch = Watcher(poll, interval)
        poll._watches.add(watch)
        poll.wanted.set()
        try:
            yield watch
        finally:
            poll._watches.remove(watch)
            if not poll._watches:
                del cls._running[place]
                poll._end()

    def _end(self) -> None:
        self._task.cancel()
        # This runs after a query in progress, so that two threads never use the connection.
        self._thread.submit(self._reader.close)
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        # The loop checks for watchers, because wait_for of Python 3.11 may swallow the cancellation.
        while self._watches:
            began = time.monotonic()
            try:
                look = _PollResult(began, value=await loop.run_in_executor(self._thread, self._reader.read))
            except Exception as e:
                look = _PollResult(began, error=e)
            self.latest, awaited, self.coming = look, self.coming, loop.create_future()
            awaited.set_result(look)
            await self._pause(began)

    async def _pause(self, began: float) -> None:
        """Sleep until the next query is due, which is earlier if a watcher joins."""
        while (left := began + self._gap(began) - time.monotonic()) > 0:
            self.wanted.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wanted.wait(), left)

    def _gap(self, began: float) -> float:
        """Return the seconds from one query to the next."""
        wanted = [watch.interval for watch in self._watches]
        wanted += [GATHER_SECONDS for watch in self._watches if watch.seen > began]
        return min(wanted, default=0.0)
