"""Changes in the form in which the decoder returns them, built from events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st
from numpy.typing import NDArray

from airflow_cdc_provider.engine.core.row_changes import Changes, Relation, RelationColumn

Row = tuple[str | None, ...]


COLUMNS = ("note", "k1", "big", "k2", "huge")


MASK = (1 << 32) - 1


NEAR_WRAP = st.sampled_from([1000, (1 << 31) - 4, (1 << 32) - 4, (1 << 33) - 4, 3 * (1 << 31) - 4])
"""Transaction ids around which others are drawn, so that some are close to the wraparound."""


@dataclass(frozen=True)
class Event:
    op: str
    new: Row | None = None
    unchanged: frozenset[int] = frozenset()
    old: Row | None = None
    old_kind: str = ""
    xid: int = 0


def changes_of(events: Sequence[Event]) -> Changes:
    columns = range(len(COLUMNS))
    nothing: Row = (None,) * len(COLUMNS)
    zeros = np.zeros(len(events), dtype=np.int64)

    def arrays(rows: Iterable[Row]) -> tuple[pa.Array, ...]:
        listed = list(rows)
        return tuple(pa.array([row[c] for row in listed], type=pa.large_string()) for c in columns)

    unchanged = {c: np.array([c in e.unchanged for e in events], dtype=np.bool_) for c in columns}
    return Changes(
        relation=Relation(1, "public", "t", "d", tuple(RelationColumn(name, 25, -1, False) for name in COLUMNS)),
        order=np.arange(len(events)),
        op=np.array([ord(e.op) for e in events], dtype=np.uint8),
        xid=np.array([e.xid & MASK for e in events], dtype=np.int64),
        commit_lsn=zeros,
        commit_ts=zeros,
        seq=zeros,
        new=arrays(
            tuple(None if c in e.unchanged else v for c, v in enumerate(e.new)) if e.new else nothing for e in events
        ),
        unchanged={c: flags for c, flags in unchanged.items() if flags.any()},
        old=arrays(e.old or nothing for e in events) if any(e.old for e in events) else None,
        old_kind=np.array([ord(e.old_kind or "\0") for e in events], dtype=np.uint8),
    )


def never(_: object) -> NDArray[np.int64]:
    raise AssertionError("this must not be called")
