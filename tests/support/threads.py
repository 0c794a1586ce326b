"""Threads that a test starts and stops, and whose failures it does not miss."""

from __future__ import annotations

import threading
from abc import abstractmethod


class Stoppable(threading.Thread):
    """Works until it is stopped, and keeps what has ended it before."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._halt = threading.Event()
        self.failure: BaseException | None = None

    @abstractmethod
    def work(self) -> None:
        """Work until ``_halt`` is set."""

    def run(self) -> None:
        try:
            self.work()
        except BaseException as e:  # what pytest.fail() raises is no Exception
            self.failure = e

    def stop(self) -> None:
        """Wait until it has ended after what it is at; raise what has ended it before."""
        self._halt.set()
        self.join()
        if self.failure is not None:
            raise self.failure
