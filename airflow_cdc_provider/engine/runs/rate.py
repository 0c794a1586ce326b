"""How many rows a second a job has brought in lately."""

from __future__ import annotations

import threading
import time
from collections import deque

WINDOW_SECONDS = 10.0
_LEAST_SECONDS = 1.0


class Rate:
    """Rows a second over the last ten seconds, from a count that only grows."""

    def __init__(self) -> None:
        self._seen = deque([(time.monotonic(), 0)])
        self._lock = threading.Lock()

    def of(self, count: int) -> int:
        """Return the rate; to be asked every few seconds.

        :param count: rows since the job began.
        """
        now = time.monotonic()
        with self._lock:
            self._seen.append((now, count))
            while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_SECONDS:
                self._seen.popleft()
            since, before = self._seen[0]
        return round((count - before) / max(now - since, _LEAST_SECONDS))
