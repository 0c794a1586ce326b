"""Polls a condition until it holds or a timeout expires."""

from __future__ import annotations

import time
from collections.abc import Callable


def await_condition(condition: Callable[[], bool], seconds: float, interval: float = 0.1) -> bool:
    """Poll a condition until it holds.

    :param seconds: the maximum number of seconds to wait.
    :param interval: seconds between two polls.
    :returns: whether the condition held in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval)
    return True
