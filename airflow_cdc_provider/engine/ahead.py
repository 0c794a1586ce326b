"""A unit is applied while the rest of it is still being staged.

Its pieces are staged on all cores, and then brought into their tables in order, on one. A sink that takes them one by
one (:class:`.base.Eager`) begins with the first while the others are staged, in the transaction that is committed once
all are. So it is done with a unit of which nothing else is to be asked. What turns out to be none is taken back, and
committed as it is when all of it is known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Self

from airflow_cdc_provider.engine.sinks.base import StagedPiece


class _CalledOffError(Exception):
    """The unit is not to be committed here."""


class Ahead:
    """A unit that is staged just now.

    :param plain: whether nothing else is to be asked before a piece is applied.
    :param commit: commits pieces as they come; is called in a thread of its own with the first and all of them.
    """

    def __init__(
        self,
        plain: Callable[[StagedPiece], bool],
        commit: Callable[[StagedPiece, Iterator[StagedPiece]], object],
    ) -> None:
        self._plain = plain
        self._commit = commit
        self._changed = threading.Condition()
        self._heard: dict[int, StagedPiece] = {}
        self._whole: int | None = None
        self._called_off = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.call_off()

    def hear(self, message: object) -> None:
        """Learn what a task has to say of its piece; in any thread, and in any order."""
        with self._changed:
            if self._called_off:
                return
            if isinstance(message, StagedPiece) and self._plain(message):
                self._heard[message.index] = message
                if self._thread is None and 0 in self._heard:
                    self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
                    self._thread.start()
            else:
                self._called_off = True
            self._changed.notify_all()

    def commit(self, unit: Sequence[StagedPiece]) -> bool:
        """Commit the unit, whose pieces are all staged now.

        :returns: false when it has been called off; what was applied of it is taken back then.
        :raises Exception: what it failed with.
        """
        with self._changed:
            heard = not self._called_off and self._heard == dict(enumerate(unit))
            if heard:
                self._whole = len(unit)
                self._changed.notify_all()
        if self._thread is None or not heard:
            self.call_off()
            return False
        self._thread.join()
        self._called_off = True  # what is staged in place of it is another unit
        if self._failure is not None:
            raise self._failure
        return True

    def call_off(self) -> None:
        """Take back what has been applied, unless it is committed: afterwards the sink holds no lock of it."""
        with self._changed:
            self._called_off = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with suppress(_CalledOffError):
                self._commit(self._heard[0], self._pieces())
        except BaseException as e:
            self._failure = e

    def _pieces(self) -> Iterator[StagedPiece]:
        for index in count():
            piece = self._next(index)
            if piece is None:
                return
            yield piece

    def _next(self, index: int) -> StagedPiece | None:
        """Wait for a piece; ``None`` when the unit has no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._called_off or index in self._heard or index == self._whole)
            if self._called_off:
                raise _CalledOffError
            return None if index == self._whole else self._heard[index]
