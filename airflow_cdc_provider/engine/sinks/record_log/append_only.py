"""What sinks that only append, events of a changelog, have in common."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from airflow_cdc_provider.engine.core.record import Target


class AppendOnly:
    """What the engine asks of a sink and a changelog does not need: its events are found by the source's keys alone."""

    def check_condition(self, target: Target, where: str) -> None:
        """See :meth:`.contract.Sink.check_condition`: there is nothing that could judge it."""

    def matching_keys(self, target: Target, where: str) -> frozenset[tuple[str, ...]]:
        """See :meth:`.contract.Sink.matching_keys`: none."""
        return frozenset()

    def members(
        self, target: Target, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]
    ) -> Sequence[tuple[int, int]]:
        """See :meth:`.contract.Sink.members`: the keys of a changelog are one if their texts are."""
        places = {member: place for place, member in enumerate(members)}
        texts = zip(*(column.to_pylist() for column in keys), strict=True)
        return [(n, places[text]) for n, text in enumerate(texts) if text in places]


def only(target: Target, keys: frozenset[tuple[str, ...]], batch: pa.RecordBatch) -> pa.RecordBatch:
    """Leave out rows that the source has found under another text of a key. The stream brings these rows."""
    names = [column.name for column in target.table.columns]
    found = zip(*(batch.column(names.index(name)).to_pylist() for name in target.table.key), strict=True)
    return batch.filter(pa.array([key in keys for key in found], pa.bool_()))
