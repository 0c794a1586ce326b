"""Which chunks of a pipeline's tables are finished, which are being copied, and which are still to come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from airflow_cdc_provider.engine.state.files import Heartbeat

Place: TypeAlias = tuple[str, int]
"""A chunk: the label of its table, and its index there."""
Range: TypeAlias = tuple[str, int, int]
"""Chunks of a table that follow each other: its label, the first index and the last."""


def ranges(places: Iterable[Place]) -> list[Range]:
    """Put chunks that follow each other together."""
    found: list[Range] = []
    for table, index in sorted(places):
        if found and found[-1][0] == table and found[-1][2] == index - 1:
            found[-1] = table, found[-1][1], index
        else:
            found.append((table, index, index))
    return found


def places(ranges: Iterable[Sequence[Any]]) -> set[Place]:
    """The chunks that :func:`ranges` has put together."""
    return {(table, index) for table, first, last in ranges for index in range(first, last + 1)}


def chunk_grid(planned: Mapping[Place, tuple[bool, int]], beats: Collection[Heartbeat]) -> list[dict[str, Any]]:
    """How far the tables are, chunk by chunk.

    :param planned: all chunks, in order: whether they are finished, and their rows.
    :param beats: heartbeats of the jobs that have worked on them since that was so.
    :returns: ``table``, ``chunks``, ``finished``, ``rows`` and, as pairs of the first and the last index of chunks that
        follow each other, ``finished_chunks`` and ``running_chunks``.
    """
    told = places(r for beat in beats for r in beat.progress.get("finished_chunks", ()))
    running = places(r for beat in beats if beat.alive for r in beat.progress.get("running_chunks", ()))
    tables: dict[str, list[Place]] = defaultdict(list)
    for place in planned:
        tables[place[0]].append(place)
    result = []
    for table, chunks in tables.items():
        finished = {chunk for chunk in chunks if planned[chunk][0] or chunk in told}
        result.append(
            {
                "table": table,
                "chunks": len(chunks),
                "finished": len(finished),
                "rows": sum(planned[chunk][1] for chunk in chunks),
                "finished_chunks": [[first, last] for _, first, last in ranges(finished)],
                "running_chunks": [[first, last] for _, first, last in ranges(running.intersection(chunks) - finished)],
            }
        )
    return result
