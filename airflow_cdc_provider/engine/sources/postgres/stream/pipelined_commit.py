"""Pipelined commit: a unit is applied while the rest of it is still being staged.

The pieces of a unit are staged on all cores, and applied to their tables in order, on one core. A sink that takes them
one by one (:class:`.contract.Eager`) begins with the first while others are staged, in the transaction that is
committed once all are::

     tasks                  UnitWriter                PipelinedCommit        thread, one transaction of the sink
     -----                  ----------                ---------------        -----------------------------------
     stage piece 1          with pipelined_commits.begin(...) as pipelined
     stage piece 0 ---------- report_staged() ------> on_staged(0) --------> begin, apply piece 0
     stage piece 2 ---------- report_staged() ------> on_staged(1) --------> apply piece 1
                    <results of all tasks>            on_staged(2) --------> apply piece 2
                            pipelined.finish(unit) -> unit as reported?
                                                        yes ---------------> commit
                                                        no: cancel() ------> roll back
                            if not committed: Sink.commit(unit)

Only a unit about which nothing else has to be asked is committed this way. If something turns up, the transaction is
rolled back, and the unit is committed when all of it is known.

Staging may have to wait because of a lock that the transaction holds: a session that alters a target table waits for
the transaction, and a task that reads the table's columns to stage a piece waits behind that session. So the wait for a
piece has a timeout.

Gain: 2,000,000 updates on two cores took 8.2 s in place of 10.0 (``docs/performance.md``; benchmark case
``stream-mirror`` with updates).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import count
from typing import Self

from airflow_cdc_provider.engine.core.lsn import Lsn
from airflow_cdc_provider.engine.sinks.contract import Eager, Sink
from airflow_cdc_provider.engine.sinks.staged import StagedPiece
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import Position

PATIENCE_SECONDS = 5.0
"""Seconds to wait for the next piece before the commit is canceled."""


class PipelinedCommits:
    """Chooses for each unit of one sink whether its commit is pipelined.

    If a unit turns out to need more, the next one is not pipelined: such units often follow each other.
    """

    def __init__(self, sink: Sink, epoch: int) -> None:
        self._sink = sink
        self._epoch = epoch
        self._simple = True

    def begin(self, applied: Lsn, watched: Collection[str]) -> AbstractContextManager[PipelinedCommit | None]:
        """Begin a unit, which is a whole batch.

        :param applied: LSN after which the unit begins.
        :param watched: labels of tables whose definition has to be looked up before a change of theirs is applied.
        :returns: the commit; ``None`` if the sink cannot, or the unit before it was not simple.
        """
        sink, epoch = self._sink, self._epoch
        if not isinstance(sink, Eager):
            return nullcontext()
        tried, self._simple = self._simple, True

        def is_simple(piece: StagedPiece) -> bool:
            end = Position.from_json(json.loads(piece.end))
            asks = bool(piece.split_truncates) or any(staged.label in watched for staged in piece.tables)
            self._simple = self._simple and not asks and not end.block
            return tried and self._simple and end.lsn > applied

        def commit(first: StagedPiece, unit: Iterator[StagedPiece]) -> None:
            start, end = (Position.from_json(json.loads(text)).lsn for text in (first.start, first.end))
            sink.commit_as_staged(epoch, max(start, applied), end, unit)

        return PipelinedCommit(is_simple, commit, PATIENCE_SECONDS)


class _Canceled(Exception):
    """The unit is not to be committed here."""


class PipelinedCommit:
    """The commit of a unit that is being staged.

    :param is_simple: returns whether a piece can be applied without asking anything else.
    :param commit: commits pieces as they come; called in its own thread with the first piece and all of them.
    :param patience: seconds to wait for a piece.
    """

    def __init__(
        self,
        is_simple: Callable[[StagedPiece], bool],
        commit: Callable[[StagedPiece, Iterator[StagedPiece]], object],
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._is_simple = is_simple
        self._commit = commit
        self._patience = patience
        self._changed = threading.Condition()
        self._staged: dict[int, StagedPiece] = {}
        self._size: int | None = None
        self._canceled = False
        self._thread: threading.Thread | None = None
        self._committed = False
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def on_staged(self, message: object) -> None:
        """Take the message of a task about its piece; in any thread, and in any order."""
        with self._changed:
            if self._canceled or self._size is not None:
                return
            if isinstance(message, StagedPiece) and self._is_simple(message):
                # If a task stages its piece again, the first version may have been applied by now, so that stays.
                self._staged.setdefault(message.index, message)
                if self._thread is None and 0 in self._staged:
                    self._thread = threading.Thread(target=self._run, name="pipelined-commit", daemon=True)
                    self._thread.start()
            else:
                self._canceled = True
            self._changed.notify_all()

    def finish(self, unit: Sequence[StagedPiece]) -> bool:
        """Commit the unit, whose pieces are all staged now.

        :returns: false when it has been canceled; nothing of the unit is applied then.
        :raises Exception: what it failed with.
        """
        with self._changed:
            as_reported = not self._canceled and self._staged == dict(enumerate(unit))
            if as_reported:
                self._size = len(unit)
                self._changed.notify_all()
        if self._thread is None or not as_reported:
            self.cancel()
            return False
        self._thread.join()
        self._canceled = True  # whatever is staged in place of it is another unit
        if self._failure is not None:
            raise self._failure
        return self._committed

    def cancel(self) -> None:
        """Roll back what has been applied, unless it is committed; afterwards the sink holds no lock for it."""
        with self._changed:
            self._canceled = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with suppress(_Canceled):
                self._commit(self._staged[0], self._pieces())
                self._committed = True
        except BaseException as e:
            self._failure = e

    def _pieces(self) -> Iterator[StagedPiece]:
        for index in count():
            piece = self._await_piece(index)
            if piece is None:
                return
            yield piece

    def _await_piece(self, index: int) -> StagedPiece | None:
        """Wait for a piece; return ``None`` when the unit has no more."""
        with self._changed:
            known = self._changed.wait_for(
                lambda: self._canceled or index in self._staged or index == self._size, self._patience
            )
            if self._canceled or not known:
                self._canceled = True
                raise _Canceled
            return None if index == self._size else self._staged[index]
