"""Visibility of transactions in an MVCC snapshot: the rule that combines snapshot and stream.

``pg_current_snapshot()`` returns ``xmin:xmax:xip_list`` in 64-bit transaction ids. Every id below xmin is visible, and
every id from xmax on is invisible. Ids in between are visible unless the list names them as in progress. pgoutput
identifies transactions by the low 32 bits of the same ids, so the comparison is modulo 2^32. The slot's
``catalog_xmin`` keeps all ids that are compared within 2^31 of each other.

Both sides have top-level ids only: the snapshot lists no subtransactions, and pgoutput sends the top-level id. On a
standby the list is empty by design, so chunks are read on the primary only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Snapshot:
    """An MVCC snapshot of a Postgres primary.

    :param xmin: lowest transaction id that was still in progress (64 bits).
    :param xmax: first transaction id that was not yet assigned when the snapshot was taken (64 bits).
    :param xip: ids in ``[xmin, xmax)`` that were in progress.
    """

    xmin: int
    xmax: int
    xip: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Parse the text of ``pg_current_snapshot()``, for example ``10:20:10,14``.

        :raises ValueError: if ``text`` does not have that form.
        """
        xmin, xmax, xip = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(int(x) for x in xip.split(",") if x))

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(str(x) for x in sorted(self.xip))}"

    def visible(self, xids: npt.ArrayLike | Iterable[int]) -> npt.NDArray[np.bool_]:
        """Return for each 32-bit transaction id whether the snapshot sees it.

        :param xids: ids of *committed* transactions as pgoutput sends them (low 32 bits).
        :returns: booleans of the same shape.
        """
        import numpy as np  # late: where Dags are parsed, records are only plain data

        low = np.asarray(xids, dtype=np.int64) & _MASK
        distance = (low - (self.xmax & _MASK)) & _MASK
        seen: npt.NDArray[np.bool_] = distance >= 1 << 31
        if self.xip:
            running = np.fromiter((x & _MASK for x in self.xip), dtype=np.int64, count=len(self.xip))
            seen &= ~np.isin(low, running)
        return seen
