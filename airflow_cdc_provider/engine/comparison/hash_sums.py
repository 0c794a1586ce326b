"""Sums of the hashes of rows by buckets of their keys, used for the first comparison of two sides.

The hashes are the halves of the MD5 sum of a text in UTF-8; :func:`.postgres_side.shipped_hash` computes the same on
the source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def hashes_of(texts: Iterable[str]) -> NDArray[np.int64]:
    """Return the two hashes of each text, one row for each text."""
    return np.frombuffer(b"".join(map(_digest, texts)), ">i8").astype(np.int64).reshape(-1, 2)


def first_hash(text: str) -> int:
    """Return the first hash of one text."""
    return int.from_bytes(_digest(text)[:8], "big", signed=True)


def _digest(text: str) -> bytes:
    return hashlib.md5(text.encode(), usedforsecurity=False).digest()


def add_up(found: dict[int, list[int]], keys: NDArray[np.int64], contents: NDArray[np.int64], buckets: int) -> None:
    """Add rows to the sums of the buckets of their keys.

    :param found: for each bucket the number of its rows, and the sums of both hashes of their contents; updated.
    :param keys: the first hash of each row's key.
    :param contents: the hashes of each row's content, as :func:`hashes_of` returns them.
    :param buckets: number of buckets, a power of two.
    """
    bucket = keys & (buckets - 1)
    order = np.argsort(bucket)
    ordered = contents[order]
    names, starts, counts = np.unique(bucket[order], return_index=True, return_counts=True)
    # The halves are added separately, because the sum of many whole hashes exceeds an int64.
    high, low = (np.add.reduceat(half, starts) for half in (ordered >> 32, ordered & 0xFFFFFFFF))
    sums = zip(names.tolist(), counts.tolist(), high.tolist(), low.tolist(), strict=True)
    for name, count, high_sums, low_sums in sums:
        total = found.setdefault(name, [0, 0, 0])
        total[0] += count
        for i in (0, 1):
            total[1 + i] += (high_sums[i] << 32) + low_sums[i]
