"""Barriers: the transactions that a re-read has to see, and the check whether new snapshots of the source see them.

A re-read must see all transactions that the stream has passed. It must also see those that the stream will not bring
because the table was not published yet. While an older transaction is open, that is unknown; the re-read stays pending,
and the stream need not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from airflow_cdc_provider.engine.core.errors import OlderTransactions
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.connection import Connection, scalar
from airflow_cdc_provider.engine.postgres.slots import blockers, visible_in_current

PATIENCE_SECONDS = 5.0
"""Seconds for which a command that has nothing else to do waits for older transactions."""

_GRACE_SECONDS = 1.0
_KEPT = 1 << 20
_SOLUTION = "It goes on when they have ended. End those that are forgotten (COMMIT, ROLLBACK or ROLLBACK PREPARED)."


class Barriers:
    """The barriers of the re-reads that a job has begun, by table.

    A barrier is a transaction id. Transactions that the stream had passed, or that began before the table was
    published, are older. The ids that the stream passes while the barrier is up are kept until a snapshot has seen
    them.

    :param patience: seconds that each check waits; the first check of a barrier waits as long as short transactions
        take.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self._patience = patience
        self._grace = _GRACE_SECONDS
        self._shares_grace = False
        self._up: dict[str, tuple[int, Mapping[int, str] | None]] = {}
        self._unseen = np.zeros(0, dtype=np.uint32)

    def passed(self, xids: npt.NDArray[np.uint32]) -> None:
        """Keep the ids of transactions that the stream has passed."""
        if self._up:
            self._unseen = np.concatenate([self._unseen, xids])
        if self._unseen.size > _KEPT:  # there was no check for a long time; later barriers are beyond all of them
            self._up, self._unseen = {}, self._unseen[:0]

    def pending(self, label: str) -> bool:
        """Return whether a re-read of the table has had to wait."""
        return label in self._up

    @contextmanager
    def reading(self, label: str) -> Iterator[None]:
        """Read a table again in the block; its barrier stays up only if the re-read has to wait."""
        waits = False
        try:
            yield
        except OlderTransactions:
            waits = True
            raise
        finally:
            if not waits:
                self.lift(label)

    @contextmanager
    def one_grace(self) -> Iterator[None]:
        """Wait for short transactions only once, however many barriers are put up meanwhile."""
        self._shares_grace = True
        try:
            yield
        finally:
            self._shares_grace, self._grace = False, _GRACE_SECONDS

    def lift(self, label: str) -> None:
        """Remove a barrier; the next one is put up at the transactions of that time."""
        self._up.pop(label, None)
        if not self._up:
            self._unseen = self._unseen[:0]

    def put_up(self, source: Connection, label: str, published: Mapping[int, str] | None = None) -> None:
        """Put up the barrier of a re-read unless it is up, and check it.

        :param source: in autocommit, so that each check takes a new snapshot.
        :param published: the catalog entries that publish the table, if they may have changed: new entries need a new
            barrier.
        :raises OlderTransactions: naming those that have to end first.
        """
        if label in self._up and published in (None, self._up[label][1]):
            self._check(source, label, self._patience)
            return
        failpoint("before-barrier")
        self._up[label] = scalar(source, "SELECT pg_current_xact_id()::text::bigint"), published
        try:
            self._check(source, label, max(self._patience, self._grace))
        except OlderTransactions:
            if self._shares_grace:
                self._grace = 0.0
            raise

    def check(self, source: Connection, label: str) -> None:
        """Check that new snapshots see all transactions below the barrier of a re-read, if one is up.

        :raises OlderTransactions: naming those that have to end first.
        """
        if label in self._up:
            self._check(source, label, self._patience)

    def _check(self, source: Connection, label: str, patience: float) -> None:
        barrier, _ = self._up[label]
        running = frozenset[int]()

        def seen() -> bool:
            nonlocal running
            snapshot = visible_in_current(source)
            self._unseen = self._unseen[~snapshot.visible(self._unseen)]
            running = snapshot.xip
            return snapshot.xmin >= barrier and not self._unseen.size

        if not await_condition(seen, patience):
            older = {xid for xid in running if xid < barrier or (xid & 0xFFFFFFFF) in self._unseen}
            raise OlderTransactions(f"reading {label} again waits for: {blockers(source, older)}", _SOLUTION)
        failpoint("after-barrier")


def require_visible(source: Connection, label: str, xids: npt.NDArray[np.uint32]) -> None:
    """Check that new snapshots see some transactions that the stream has delivered.

    :raises OlderTransactions: naming those that they do not see.
    """
    if not await_condition(lambda: bool(visible_in_current(source).visible(xids).all()), _GRACE_SECONDS):
        snapshot = visible_in_current(source)
        unseen = set(xids[~snapshot.visible(xids)].tolist())
        raise OlderTransactions(
            f"reading rows of {label} again waits for transactions that are committed and not visible, as while they"
            f" wait for a synchronous standby: {blockers(source, unseen)}",
            "It goes on when they are visible: bring the standby back, or change synchronous_standby_names.",
        )
