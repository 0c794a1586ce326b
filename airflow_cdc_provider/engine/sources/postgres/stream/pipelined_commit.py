"""A unit is applied while the rest of it is still being staged.

Its pieces are staged on all cores, and then brought into their tables in order, on one. A sink that takes them one by
one (:class:`.contract.Eager`) begins with the first while the others are staged, in the transaction that is committed
once all are. So it is done with a unit of which nothing else is to be asked. What turns out to be none is taken back,
and committed when all of it is known.

Staging may have to wait for what the transaction has locked: whoever alters a target table waits for the transaction,
and whoever reads its columns, to stage a piece, behind them. So the wait for a piece has an end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Self

from airflow_cdc_provider.engine.sinks.staged import StagedPiece

_PATIENCE_SECONDS = 5.0


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
        self._committed = False
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.call_off()

    def hear(self, message: object) -> None:
        """Learn what a task has to say of its piece; in any thread, and in any order."""
        with self._changed:
            if self._called_off or self._whole is not None:
                return
            if isinstance(message, StagedPiece) and self._plain(message):
                # One that a task stages again may have been applied by now: what it returns is not what was heard.
                self._heard.setdefault(message.index, message)
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
        return self._committed

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
                self._committed = True
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
            known = self._changed.wait_for(
                lambda: self._called_off or index in self._heard or index == self._whole, _PATIENCE_SECONDS
            )
            if self._called_off or not known:
                self._called_off = True
                raise _CalledOffError
            return None if index == self._whole else self._heard[index]
