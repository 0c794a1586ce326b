"""Waiting for what nobody announces."""

from __future__ import annotations

import time
from collections.abc import Callable


def await_condition(condition: Callable[[], bool], seconds: float, interval: float = 0.1) -> bool:
    """Look again and again until a condition holds.

    :param seconds: for which to wait at most.
    :param interval: seconds between two looks.
    :returns: whether it held in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval)
    return True
