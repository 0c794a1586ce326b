"""The hashes of a query's rows that executors compute, compared with the rows as texts: the sums must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pytest

from airflow_cdc_provider.engine.comparison.fetched_side import RowSide, mirror_rows
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column, Table
from airflow_cdc_provider.engine.sources.kafka.query import QueryResult
from airflow_cdc_provider.engine.sources.kafka.replay import _at_last, summed
from airflow_cdc_provider.engine.sources.kafka.staging_task import HASHES, TopicHashes, TopicTexts
from airflow_cdc_provider.engine.sources.kafka.verify import _way_of

BUCKETS = 64
NAMES = ("a", "b", "v")
TABLE = Table(
    1, "public", "t", tuple(Column(name, "text", 25, None, False, True) for name in NAMES), (), "d", None, (), "r"
)

Row = tuple[str | None, ...]
ROWS: Sequence[Row] = [(str(n % 5), f"{n % 3} {{x}}", None if n % 4 == 0 else f'"{n}"') for n in range(40)]


def batches(rows: Sequence[Row]) -> list[pa.RecordBatch]:
    columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
    whole = pa.RecordBatch.from_arrays(columns, names=["c0", "c1", "c2"])
    return [whole.slice(start, 7) for start in range(0, len(rows), 7)]


@pytest.mark.parametrize("key", [(), ("a",), ("a", "b"), ("b", "a"), ("b",)])
@pytest.mark.parametrize("tasks", [[], [ROWS], [ROWS[:13], ROWS[13:], [("0", "0 {x}", "last")]]])
def test_hashes_add_up_to_what_the_texts_do(key: tuple[str, ...], tasks: Sequence[Sequence[Row]]) -> None:
    table = replace(TABLE, key=key)
    target = Target(table, "public", "t")
    hashed = [made for rows in tasks for made in TopicHashes(table)(iter(batches(rows)))]
    fields = [field.split() for field in HASHES.split(", ")]
    schema = pa.schema([(name, pa.string() if kind == "string" else pa.int64()) for name, kind in fields])
    sums = summed(pa.Table.from_batches(hashed, schema), bool(key), BUCKETS)

    texts = [made for rows in tasks for made in TopicTexts(table, bool(key))(iter(batches(rows)))]
    names = pa.schema([(name, pa.string()) for name in ("c0", "c1", "c2", "_op")])
    last = _at_last(pa.Table.from_batches(texts, names), table, bool(key))
    side = RowSide(target, lambda target, keys: iter(last), mirror_rows)
    assert sums == side.scan(BUCKETS)
    assert sum(count for count, *_ in sums.values()) == sum(batch.num_rows for batch in last)


def test_only_rows_that_messages_tell_as_a_whole_are_hashed() -> None:
    whole = QueryResult(replace(TABLE, key=("a",)), stateful=False, has_ops=False)
    ways = {
        "whole": _way_of("mirror", "update", whole),
        "told": _way_of("mirror", "update", replace(whole, has_ops=True)),
        "partial": _way_of("mirror", "update", replace(whole, partial=True)),
        "closing": _way_of("mirror", "append", replace(whole, stateful=True)),
    }
    assert [name for name, way in ways.items() if way is not None and way.hashed] == ["whole"]
