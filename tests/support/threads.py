"""Threads that a test starts and stops, and whose failures it reports."""

from __future__ import annotations

import threading
from abc import abstractmethod


class Stoppable(threading.Thread):
    """Works until it is stopped, and keeps the error that ended it before, if any."""

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
        except BaseException as e:  # pytest.fail() raises a BaseException
            self.failure = e

    def stop(self) -> None:
        """Wait until it has ended after its current step, and raise the error that ended it before, if any."""
        self._halt.set()
        self.join()
        if self.failure is not None:
            raise self.failure
