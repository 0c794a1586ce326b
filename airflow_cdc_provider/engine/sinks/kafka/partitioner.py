"""Chooses the partition of a key like Kafka's own producers: by murmur2 of its bytes.

After ``org.apache.kafka.common.utils.Utils.murmur2`` and ``BuiltInPartitioner``. Consumers can join topics with the
same partitioning, independent of their producers.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_SEED = 0x9747B28C
_M = np.uint32(0x5BD1E995)


def partitions(keys: pa.Array, count: int) -> NDArray[np.int32]:
    """Return the partitions of keys; 0 for null keys.

    :param keys: of type ``large_binary``.
    :param count: number of partitions of the topic.
    """
    result = np.zeros(len(keys), dtype=np.int32)
    if count == 1 or not len(keys):
        return result
    lengths = pc.fill_null(pc.binary_length(keys), -1).to_numpy(zero_copy_only=False)
    for length in np.unique(lengths[lengths >= 0]):
        rows = np.flatnonzero(lengths == length)
        _, _, joined = keys.take(pa.array(rows)).buffers()
        content = np.frombuffer(joined or b"", dtype=np.uint8, count=len(rows) * int(length))
        result[rows] = (_murmur2(content.reshape(len(rows), int(length))) & np.uint32(0x7FFFFFFF)) % np.uint32(count)
    return result


def _murmur2(content: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the hashes of the rows of a matrix of bytes."""
    count, length = content.shape
    words = length // 4
    h = np.full(count, _SEED ^ length, dtype=np.uint32)
    k = np.ascontiguousarray(content[:, : 4 * words]).view("<u4")
    for i in range(words):
        word = k[:, i] * _M
        word ^= word >> np.uint32(24)
        h = (h * _M) ^ (word * _M)
    rest = content[:, 4 * words :].astype(np.uint32)
    for i in range(rest.shape[1]):
        h ^= rest[:, i] << np.uint32(8 * i)
    if rest.shape[1]:
        h *= _M
    h ^= h >> np.uint32(13)
    h *= _M
    return h ^ (h >> np.uint32(15))
