"""One poll of a server for all who watch it in a triggerer.

However many sensors and asset watchers look at the slots of a server, the server is asked once an
interval, the smallest that one of them wants, over one connection that is kept. Nobody is given a look from
before he came: for those who join it is asked at once, though not more than four times a second. A poll begins with its
first watcher and ends with its last. The queries run in a thread of the poll's own, so that a server
that hangs holds up neither the event loop nor the poll of another.
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
Read = TypeVar("Read", covariant=True)

GATHER_SECONDS = 0.25
"""From one look to the next, at least, however many join meanwhile."""


class Reader(Protocol[Read]):
    """What a poll asks; both methods are called in the poll's thread."""

    def read(self) -> Read:
        """Look once, connecting where that is needed."""

    def close(self) -> None:
        """Let the connection go."""


@dataclass(frozen=True)
class _Look(Generic[T]):
    """What a look brought: a value, or the error that stood in the way.

    :param at: monotonic seconds.
    """

    at: float
    value: T | None = None
    error: Exception | None = None


class Watch(Generic[T]):
    """A watcher's view of a poll.

    :param interval: seconds between two looks, at most.
    """

    def __init__(self, poll: Poll[T], interval: float) -> None:
        self._poll = poll
        self.interval = interval
        self.seen = time.monotonic()
        """Only looks that began later are news; monotonic seconds."""

    async def next(self, after: float = 0.0) -> T:
        """The next look, which began after the last one and after the watcher came.

        :param after: also after this, monotonic seconds: the look is made at once.
        :raises Exception: what stood in the way of the look.
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
    """Looks at intervals, for its watchers.

    :param reader: what is asked.
    """

    _running: ClassVar[dict[tuple[asyncio.AbstractEventLoop, Hashable], Poll[Any]]] = {}

    def __init__(self, reader: Reader[T]) -> None:
        self._reader = reader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cdc-poll")
        self._watches: set[Watch[T]] = set()
        self.wanted = asyncio.Event()
        self.latest: _Look[T] | None = None
        self.coming: asyncio.Future[_Look[T]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="cdc-poll")

    @classmethod
    @asynccontextmanager
    async def watch(cls, key: Hashable, reader: Callable[[], Reader[T]], interval: float) -> AsyncIterator[Watch[T]]:
        """Join the poll of a key, or begin it.

        :param key: what is polled; within an event loop there is one poll a key.
        :param reader: makes what is asked, if the poll begins.
        :param interval: seconds between two looks, at most.
        """
        place = (asyncio.get_running_loop(), key)
        poll = cls._running.get(place)
        if poll is None:
            poll = cls._running[place] = cls(reader())
        watch = Watch(poll, interval)
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
        # After a look that is under way: no connection is used by two threads.
        self._thread.submit(self._reader.close)
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        # Not for ever: wait_for of Python 3.11 may swallow the cancel.
        while self._watches:
            began = time.monotonic()
            try:
                look = _Look(began, value=await loop.run_in_executor(self._thread, self._reader.read))
            except Exception as e:
                look = _Look(began, error=e)
            self.latest, told, self.coming = look, self.coming, loop.create_future()
            told.set_result(look)
            await self._pause(began)

    async def _pause(self, began: float) -> None:
        """Sleep until the next look is due, which who joins wants earlier."""
        while (left := began + self._gap(began) - time.monotonic()) > 0:
            self.wanted.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wanted.wait(), left)

    def _gap(self, began: float) -> float:
        """Seconds from a look to the next."""
        wanted = [watch.interval for watch in self._watches]
        wanted += [GATHER_SECONDS for watch in self._watches if watch.seen > began]
        return min(wanted, default=0.0)
