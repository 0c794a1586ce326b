"""Packs messages for staging: bytes with the partition, key and value of each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from airflow_cdc_provider.engine.sinks.kafka.formats.plain import arrays
from airflow_cdc_provider.engine.sinks.kafka.partitioner import partitions
from airflow_cdc_provider.engine.sinks.kafka.transactions import Batch

_SCHEMA = pa.schema({"partition": pa.int32(), "key": pa.large_binary(), "value": pa.large_binary()})
# Envelopes share most of their bytes. Compressed as one block, they take a tenth of the client's per-message
# compression.
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")
_ROWS = 10_000


def pack(messages: pa.Table, count: int) -> pa.Buffer:
    """Return messages for a topic as bytes, with the messages of each partition in order.

    :param messages: see :meth:`.plain.Format.encode`.
    :param count: number of partitions of the topic.
    """
    found = arrays(messages)
    number = np.arange(messages.num_rows)
    partition = partitions(found["key"], count)
    everywhere = np.flatnonzero(found["everywhere"].to_numpy(zero_copy_only=False))
    if everywhere.size and count > 1:
        alone = np.delete(number, everywhere)
        partition = np.concatenate([partition[alone], np.tile(np.arange(count, dtype=np.int32), everywhere.size)])
        number = np.concatenate([alone, np.repeat(everywhere, count)])
    order = np.lexsort((number, partition))
    places = pa.array(number[order])
    columns = [pa.array(partition[order]), *(found[name].take(places) for name in ("key", "value"))]
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, _SCHEMA, options=_COMPRESSED) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=_SCHEMA))
    return out.getvalue()


def unpack(topic: str, data: bytes | bytearray) -> Iterator[Batch]:
    """Yield the messages of :func:`pack` as batches of one partition each."""
    for rows in pa.ipc.open_stream(pa.py_buffer(data)):
        partition = rows.column("partition").to_numpy()
        edges = np.flatnonzero(np.diff(partition)) + 1
        for start, end in zip([0, *edges], [*edges, len(partition)], strict=True):
            for first in range(int(start), int(end), _ROWS):
                part = rows.slice(first, min(_ROWS, int(end) - first))
                yield Batch(topic, int(partition[first]), part.column("key"), part.column("value"))
