"""Partitions of keys are the same as those of Kafka's own producers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_cdc_provider.engine.sinks.kafka.partitioner import partitions


# The hashes are those in Kafka's own UtilsTest.
@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        ("21", -973932308),
        ("foobar", -790332482),
        ("a-little-bit-long-string", -985981536),
        ("a-little-bit-longer-string", -1486304829),
        ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        ("abc", 479470107),
    ],
)
def test_a_key_goes_where_kafka_s_producers_send_it(key: str, hashed: int) -> None:
    for count in (1, 2, 7, 50, 2**31 - 1):
        assert partitions(pa.array([key.encode()], pa.large_binary()), count).tolist() == [
            (hashed & 0x7FFFFFFF) % count
        ]


@given(st.lists(st.one_of(st.none(), st.binary(max_size=40)), max_size=30), st.integers(1, 100))
def test_a_key_goes_to_its_partition_whatever_comes_with_it(keys: list[bytes | None], count: int) -> None:
    found = partitions(pa.array(keys, pa.large_binary()), count)
    alone = [int(partitions(pa.array([key], pa.large_binary()), count)[0]) for key in keys]
    assert found.tolist() == alone
    assert np.all((found >= 0) & (found < count))
    assert [int(p) for p, key in zip(found, keys, strict=True) if key is None] == [0] * keys.count(None)
