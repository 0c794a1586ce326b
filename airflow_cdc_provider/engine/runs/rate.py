"""Measures the number of rows per second that a job has recently written."""

from __future__ import annotations

import threading
import time
from collections import deque

WINDOW_SECONDS = 10.0
_LEAST_SECONDS = 1.0


class Rate:
    """The rows per second over the last ten seconds, computed from a count that only grows."""

    def __init__(self) -> None:
        self._seen = deque([(time.monotonic(), 0)])
        self._lock = threading.Lock()

    def of(self, count: int) -> int:
        """Return the rate; call this every few seconds.

        :param count: number of rows since the job began.
        """
        now = time.monotonic()
        with self._lock:
            self._seen.append((now, count))
            while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_SECONDS:
                self._seen.popleft()
            since, before = self._seen[0]
        return round((count - before) / max(now - since, _LEAST_SECONDS))
