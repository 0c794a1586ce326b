"""The chunk filter compared with the contents of each snapshot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from airflow_cdc_provider.engine.changes.key_halves import split
from airflow_cdc_provider.engine.changes.snapshot_filter import Visibility, keep, truncate_visibility
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from tests.support.change_events import MASK, NEAR_WRAP, Event, Row, changes_of, never


def test_a_table_without_a_key_is_filtered_too() -> None:
    row: Row = ("n", "1", "b", "m", "w")
    changes = changes_of([Event("i", row, xid=9), Event("u", row, frozenset(), row, "O", 10), Event("t", xid=11)])
    halves = split(changes, ())
    assert halves.row.tolist() == [0, 1]
    assert halves.key == ()
    assert keep(halves, changes.xid, never, [Snapshot(10, 10)]).tolist() == [False, True]


@st.composite
def snapshots_near(draw: st.DrawFn, base: int) -> Snapshot:
    xmax = base + draw(st.integers(0, 12))
    xip = draw(st.frozensets(st.integers(base - 3, xmax - 1), max_size=6)) if xmax > base - 3 else frozenset()
    return Snapshot(min(xip, default=xmax), xmax, xip)


def sees(snapshot: Snapshot, xid: int) -> bool:
    return xid < snapshot.xmin or (xid < snapshot.xmax and xid not in snapshot.xip)


@settings(deadline=None)
@given(data=st.data(), base=NEAR_WRAP, far=st.integers(-(1 << 31), (1 << 31) - 1))
def test_snapshots_compare_modulo_two_to_the_32(data: st.DataObject, base: int, far: int) -> None:
    snapshot = data.draw(snapshots_near(base))
    assert Snapshot.parse(str(snapshot)) == snapshot
    xids = [*range(base - 16, base + 16), max(snapshot.xmax + far, 3)]
    assert snapshot.visible([x & MASK for x in xids]).tolist() == [sees(snapshot, x) for x in xids]


@settings(deadline=None)
@given(data=st.data(), base=NEAR_WRAP)
def test_a_half_is_dropped_if_its_chunk_sees_it(data: st.DataObject, base: int) -> None:
    snapshots = data.draw(st.lists(snapshots_near(base), min_size=1, max_size=5))
    chunks = st.integers(0, len(snapshots) - 1)
    halves = data.draw(st.lists(st.tuples(st.integers(base - 16, base + 16), chunks), max_size=30))
    changes = changes_of([Event("i", (None, str(chunk), None, None, None), xid=xid) for xid, chunk in halves])
    asked: list[str] = []

    def chunk_of(key: Sequence[pa.Array]) -> NDArray[np.int64]:
        assert not asked
        asked.extend(key[0].to_pylist())
        return np.array(asked, dtype=np.int64)

    kept = keep(split(changes, (1,)), changes.xid, chunk_of, snapshots)
    assert kept.tolist() == [not sees(snapshots[chunk], xid) for xid, chunk in halves]
    matters = [0 < sum(sees(s, xid) for s in snapshots) < len(snapshots) for xid, _ in halves]
    assert asked == [str(chunk) for (_, chunk), some in zip(halves, matters, strict=True) if some]
    for xid, _ in halves:
        seen = {sees(s, xid) for s in snapshots}
        expected = Visibility.SOME if len(seen) == 2 else Visibility.ALL if seen == {True} else Visibility.NONE
        assert truncate_visibility(xid & MASK, snapshots) is expected
        without_chunks = Visibility.SOME if True in seen else Visibility.NONE
        assert truncate_visibility(xid & MASK, (), snapshots) is without_chunks


def test_a_key_outside_of_all_chunks_is_an_error() -> None:
    changes = changes_of([Event("i", (None, "1", None, None, None), xid=5)])
    with pytest.raises(ValueError, match="chunk_of"):
        keep(split(changes, (1,)), changes.xid, lambda _: np.array([-1]), [Snapshot(5, 5), Snapshot(6, 6)])
