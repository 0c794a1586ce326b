"""What a piece of the log does to a table: the columns that say so, beside those of the table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

COUNT = "count"
ERASED = "erased"
FRESH = "fresh"
MISSING = "missing"
OP = "op"
UNCHANGED = "unchanged"
OLD_KIND = "old_kind"


@dataclass(frozen=True)
class Effect:
    """What a piece does to one table.

    :param label: the source table.
    :param truncate: the table is emptied first.
    :param rows: in mirror mode one row a key: ``erased`` (bool), ``c0`` … the captured columns as text,
        and where values were not sent ``missing`` (text, an int[] of column indices) and ``o0`` … the key
        under which the sink has them. For a mirror without a key one row a distinct row: ``count``, the copies to
        add or, if negative, to remove, and ``c0`` …. In changelog mode one row a change: ``op``, ``commit_lsn``,
        ``seq``, ``xid``, ``commit_ts`` (microseconds since 1970), ``c0`` …, and where there are any ``unchanged``
        (text, a text[] of names), ``old_kind`` and ``b0`` … the old row or key.
    :param fresh: of a mirror with a key, True for each of the rows at whose key none stood before, as far as the log
        tells: a hint, since a mirror may hold what the log does not know of. ``None`` where nothing is known.
    """

    label: str
    truncate: bool
    rows: pa.Table
    fresh: NDArray[np.bool_] | None = None
