"""The poll that watchers of a server share, with a reader that only records when it was called."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from airflow_cdc_provider.triggers.poll import Poll, Watcher
from tests.support.patience import SECONDS


class Clock:
    """Records when it was called."""

    def __init__(self) -> None:
        self.looks: list[float] = []

    def read(self) -> float:
        """Read once."""
        self.looks.append(time.monotonic())
        return self.looks[-1]

    def close(self) -> None:
        """Do nothing, because there is nothing to close."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def join(clock: Clock) -> Callable[..., AbstractAsyncContextManager[Watcher[float]]]:
    """Join the clock's poll, whose next check is due later than any test takes."""
    return lambda interval=2 * SECONDS: Poll.watch("clock", lambda: clock, interval)


Join = Callable[..., AbstractAsyncContextManager[Watcher[float]]]


@pytest.mark.parametrize("turns", range(8))
def test_a_poll_ends_with_its_last_watcher_also_just_after_another_joined(join: Join, turns: int) -> None:
    """Its watchers join and leave a few turns of the loop apart."""

    async def wait() -> None:
        async with join() as watch:
            await watch.next()
            await watch.next()

    async def scenario() -> None:
        # A poll that continues keeps the loop to itself.
        signal.signal(signal.SIGALRM, lambda *_: sys.exit("the loop is frozen"))
        signal.alarm(10)
        waiting = [asyncio.create_task(wait())]
        await asyncio.sleep(0.1)
        (poll,) = Poll._running.values()
        waiting.append(asyncio.create_task(wait()))
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await asyncio.sleep(0.1)
        signal.alarm(0)
        assert poll._task.done()

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_who_joins_is_asked_for_at_once_and_many_together(clock: Clock, join: Join) -> None:
    async def arrive(delay: float) -> None:
        await asyncio.sleep(delay)
        came = time.monotonic()
        async with join() as watch:
            assert await watch.next() > came

    async def scenario() -> None:
        async with join() as watch:
            await watch.next()
            await asyncio.gather(*(arrive(n / 100) for n in range(50)))

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))

    assert 2 <= len(clock.looks) <= 10


def test_a_look_after_a_moment_is_made_at_once(clock: Clock, join: Join) -> None:
    async def scenario() -> None:
        async with join(math.inf) as watch:
            await watch.next()
            moment = time.monotonic()
            assert await watch.next(after=moment) > moment

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))

    assert len(clock.looks) == 2
