"""Messages that are skipped are left out, however many there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import DataFrame

from airflow_cdc_provider.engine.sources.kafka.skipped_messages import Skip, only, without
from tests.support.pipelines import SPARK_CONF
from tests.support.spark_jvm import local_session

pytestmark = pytest.mark.spark

MANY = 3000


@pytest.fixture(scope="module")
def raw() -> Iterator[DataFrame]:
    """Return messages with offsets 0 to 5,999 in each of two partitions."""
    with local_session(SPARK_CONF) as spark:
        yield spark.range(4 * MANY).selectExpr("'t' AS topic", "int(id % 2) AS partition", "id DIV 2 AS offset")


def places(frame: DataFrame) -> set[tuple[int, int]]:
    return {(row["partition"], row["offset"]) for row in frame.collect()}


def test_thousands_of_single_messages(raw: DataFrame) -> None:
    skips = [Skip("t", 0, offset, offset) for offset in range(0, 2 * MANY, 2)]
    assert places(without(raw, skips)) == {(0, n) for n in range(1, 2 * MANY, 2)} | {(1, n) for n in range(2 * MANY)}


def test_spans_and_single_messages_of_several_partitions(raw: DataFrame) -> None:
    skips = [Skip("t", 0, 5, 5, "five"), Skip("t", 0, 10, 2 * MANY, "end"), Skip("t", 1, 2, 2 * MANY, "rest")]
    assert places(without(raw, skips)) == {(0, n) for n in range(10) if n != 5} | {(1, 0), (1, 1)}
    causes = only(raw, skips).filter("partition = 0 AND offset < 11").select("cause").collect()
    assert [cause for (cause,) in causes] == ["five", "end"]


def test_a_topic_of_another_name_has_none(raw: DataFrame) -> None:
    assert without(raw, [Skip("other", 0, 0, 2 * MANY)]).count() == 4 * MANY
