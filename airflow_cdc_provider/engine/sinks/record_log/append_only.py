"""Shared code of sinks that only append events of a changelog."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from airflow_cdc_provider.engine.core.record import Target


class AppendOnly:
    """Methods of a sink that a changelog does not need, because its events are found only by the source's keys."""

    def check_condition(self, target: Target, where: str) -> None:
        """Accept any condition, because the sink cannot evaluate it."""

    def matching_keys(self, target: Target, where: str) -> frozenset[tuple[str, ...]]:
        """Return no keys."""
        return frozenset()

    def members(
        self, target: Target, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]
    ) -> Sequence[tuple[int, int]]:
        """Match keys against the keys of re-reads by their texts."""
        places = {member: place for place, member in enumerate(members)}
        texts = zip(*(column.to_pylist() for column in keys), strict=True)
        return [(n, places[text]) for n, text in enumerate(texts) if text in places]


def only(target: Target, keys: frozenset[tuple[str, ...]], batch: pa.RecordBatch) -> pa.RecordBatch:
    """Remove rows that the source has found under another text of a key; the stream delivers these rows."""
    names = [column.name for column in target.table.columns]
    found = zip(*(batch.column(names.index(name)).to_pylist() for name in target.table.key), strict=True)
    return batch.filter(pa.array([key in keys for key in found], pa.bool_()))
