"""The effect of a piece of the log on a table, and the names of the columns that it has next to the table's own."""

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
    """The effect of a piece on one table.

    :param label: the source table.
    :param truncate: whether the table is emptied first.
    :param rows: the rows to apply; their columns depend on the mode.
        A mirror with a key has one row for each key: ``erased`` (bool) and ``c0`` …, the captured columns as text. If
        values were not sent, it also has ``missing`` (text, an int[] of column indices) and ``o0`` …, the key under
        which the sink has these values.
        A mirror without a key has one row for each distinct row: ``c0`` … and ``count``, the number of copies to add
        or, if negative, to remove.
        A changelog has one row for each change: ``op``, ``commit_lsn``, ``seq``, ``xid``, ``commit_ts`` (microseconds
        since 1970) and ``c0`` …. If there are any, it also has ``unchanged`` (text, a text[] of names), ``old_kind``
        and ``b0`` …, the old row or key.
    :param fresh: for a mirror with a key, True for each row whose key was not in use before, according to the log.
        This is a hint only, because a mirror may have rows that the log does not mention. ``None`` if unknown.
    """

    label: str
    truncate: bool
    rows: pa.Table
    fresh: NDArray[np.bool_] | None = None
