"""The progress of a pipeline's tables by chunk: finished, being copied, or still to be copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from airflow_cdc_provider.engine.core.chunk_ranges import ChunkIndex, places, ranges
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat


def chunk_grid(planned: Mapping[ChunkIndex, tuple[bool, int]], beats: Collection[Heartbeat]) -> list[dict[str, Any]]:
    """Return the progress of the tables, chunk by chunk.

    :param planned: all chunks in order, with whether they are finished, and their rows.
    :param beats: heartbeats of the jobs that have worked on the chunks since ``planned`` was read.
    :returns: for each table ``table``, ``chunks``, ``finished`` and ``rows``, also ``finished_chunks`` and
        ``running_chunks`` as pairs of the first and the last index of consecutive chunks.
    """
    reported = places(r for beat in beats for r in beat.progress.get("finished_chunks", ()))
    running = places(r for beat in beats if beat.alive for r in beat.progress.get("running_chunks", ()))
    tables: dict[str, list[ChunkIndex]] = defaultdict(list)
    for place in planned:
        tables[place[0]].append(place)
    result = []
    for table, chunks in tables.items():
        finished = {chunk for chunk in chunks if planned[chunk][0] or chunk in reported}
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
