"""The columns that queries over messages return, and whether they keep state; Spark alone, without a broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.core.errors import ConfigError, ConnectionFailed, SparkUnusable
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sources.kafka import message_view
from airflow_cdc_provider.engine.sources.kafka.query import QueryResult, output_of, query_result, result
from airflow_cdc_provider.engine.sources.kafka.settings import topic_settings
from airflow_cdc_provider.engine.sources.kafka.spark_failures import spark_failure
from tests.support.pipeline_files import document
from tests.support.pipelines import SPARK_CONF
from tests.support.spark_jvm import local_session

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SOURCE = {
    "type": "kafka",
    "brokers": "nowhere:1",
    "topics": ["t"],
    "columns": "id BIGINT NOT NULL, at TIMESTAMP, tags ARRAY<STRING>, value DECIMAL(9, 2)",
    "table": "public.t",
    "key": ["id"],
    "watermark": {"column": "at", "delay": "1 second"},
}


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_session({**SPARK_CONF, "spark.log.level": "ERROR"}) as spark:
        spark.range(1).selectExpr("id", "'one' AS name").createOrReplaceTempView("names")
        yield spark


def shape(spark: SparkSession, sql: str, mode: str = "mirror", **source: Any) -> QueryResult:
    return query_result(spark, pipeline(sql, mode, **source))


def pipeline(sql: str, mode: str = "mirror", **source: Any) -> Pipeline:
    given = {name: value for name, value in {**SOURCE, "sql": sql, **source}.items() if value is not None}
    return Pipeline.parse(document(source=given, sink__mode=mode))


@pytest.mark.parametrize(
    ("sql", "stateful"),
    [
        ("SELECT id, value * 2 AS twice FROM messages WHERE value > 1", False),
        ("SELECT id, explode(tags) AS tag FROM messages", False),
        ("WITH few AS (SELECT * FROM messages WHERE id < 9) SELECT id FROM few WHERE id > 1", False),
        ("SELECT m.id, name FROM messages m JOIN names USING (id)", False),
        ("SELECT id, count(*) AS n FROM messages GROUP BY id", True),
        ("SELECT DISTINCT id FROM messages", True),
        ("SELECT id, window.start AS at FROM messages GROUP BY id, window(at, '2 seconds')", True),
    ],
)
def test_a_query_keeps_state_if_a_row_depends_on_others(spark: SparkSession, sql: str, stateful: bool) -> None:
    assert shape(spark, sql, "changelog", key=None, output="update").stateful is stateful


def test_columns_have_the_types_that_sinks_know(spark: SparkSession) -> None:
    sql = """SELECT id, value, at, CAST(at AS DATE) AS day, CAST(id AS TINYINT) AS tiny, id > 1 AS flag, 1.5D AS d,
             CAST('x' AS BINARY) AS data, to_json(tags) AS tags, CAST(at AS TIMESTAMP_NTZ) AS local FROM messages"""
    table = shape(spark, sql).table
    assert {column.name: column.type for column in table.columns} == {
        "id": "bigint",
        "value": "numeric(9,2)",
        "at": "timestamp with time zone",
        "day": "date",
        "tiny": "smallint",
        "flag": "boolean",
        "d": "double precision",
        "data": "bytea",
        "tags": "text",
        "local": "timestamp without time zone",
    }
    assert (table.label, table.key) == ("public.t", ("id",))


@pytest.mark.parametrize(
    ("sql", "source", "said"),
    [
        ("SELEC id", {}, "source.sql"),
        ("SELECT id, tags FROM messages", {}, "array"),
        ("SELECT id, id FROM messages", {}, "several columns"),
        ("SELECT id FROM messages", {"key": ["at"]}, "no column at"),
        ("SELECT id FROM messages", {"key": None}, "source.key"),
        ("SELECT id FROM messages", {"format": "debezium"}, "_op"),
        ("SELECT id, count(*) AS n FROM messages GROUP BY id", {"output": "append"}, "watermark"),
        (
            "SELECT a.id FROM messages a JOIN messages b ON a.id = b.id AND a.at = b.at",
            {"output": "append"},
            "more than once",
        ),
        ("SELECT id FROM messages UNION ALL SELECT id FROM messages", {}, "more than once"),
        ("WITH m AS (SELECT * FROM messages) SELECT id FROM m UNION ALL SELECT id FROM m", {}, "more than once"),
        ("WITH m AS (SELECT * FROM messages) SELECT id FROM m UNION ALL SELECT id FROM messages", {}, "more than once"),
        ("SELECT id FROM messages WHERE id IN (SELECT id FROM messages)", {}, "source.sql"),
    ],
)
def test_what_cannot_be_says_why(spark: SparkSession, sql: str, source: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as told:
        shape(spark, sql, **source)
    assert said in told.value.message


@pytest.mark.parametrize(
    ("sql", "source", "said"),
    [
        ("SELECT /*+ REPARTITION(4) */ id, value FROM messages", {}, "redistributes"),
        ("SELECT id, value FROM messages DISTRIBUTE BY id", {}, "redistributes"),
        ("SELECT /*+ REBALANCE */ id, value FROM messages", {}, "redistributes"),
        ("SELECT DISTINCT id, value FROM messages", {}, "value"),
        ("SELECT id, value, count(*) AS n FROM messages GROUP BY id, value", {}, "value"),
        ("SELECT id, count(*) AS n FROM messages GROUP BY id, window(at, '2 seconds')", {}, "window"),
    ],
)
def test_a_query_that_loses_the_order_of_messages_is_refused(
    spark: SparkSession, sql: str, source: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        shape(spark, sql, **source)
    assert shape(spark, sql, "changelog", key=None, output="update").table.key == ()


@pytest.mark.parametrize(
    ("sql", "key"),
    [
        ("SELECT /*+ COALESCE(1) */ id, value FROM messages", ["id"]),
        (
            "SELECT /*+ BROADCAST(g) */ m.id, n FROM messages m"
            " JOIN (SELECT id, count(*) AS n FROM names GROUP BY id) g USING (id)",
            ["id"],
        ),
        ("SELECT DISTINCT id, value FROM messages", ["value", "id"]),
        (
            "SELECT s.id AS k, s.f AS f, s.n FROM (SELECT id, window.start AS f, count(*) AS n FROM messages"
            " GROUP BY id, window(at, '2 seconds')) s WHERE n > 1",
            ["k", "f"],
        ),
    ],
)
def test_groups_and_what_is_broadcast_keep_the_last_row_of_a_key(spark: SparkSession, sql: str, key: list[str]) -> None:
    assert shape(spark, sql, key=key).table.key


def test_a_spark_that_lacks_what_its_configuration_names_is_told_as_that(spark: SparkSession) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.catalog.spark_catalog", "no.such.Catalog")
    with pytest.raises(SparkUnusable, match=r"spark_catalog.*no\.such\.Catalog") as told:
        shape(session, "SELECT id FROM messages")
    assert "class path" in told.value.solution


def test_names_with_dots_are_names(spark: SparkSession) -> None:
    columns = "`a.b` BIGINT NOT NULL, `t.at` TIMESTAMP"
    found = shape(
        spark, "SELECT * FROM messages", columns=columns, key=["a.b"], watermark={"column": "t.at", "delay": "1 second"}
    )
    assert [column.name for column in found.table.columns][:2] == ["a.b", "t.at"]


def test_windows_are_told_to_logs_when_they_are_closed() -> None:
    sql = "SELECT id FROM messages"
    assert output_of(pipeline(sql)) == "update"
    assert output_of(pipeline(sql, "changelog")) == "append"
    assert output_of(pipeline(sql, "changelog", output="update")) == "update"


@pytest.mark.parametrize(
    ("source", "value"),
    [({}, None), ({}, b"[]"), ({"format": "avro", "registry": "http://nowhere:1"}, b"{}")],
)
def test_no_condition_of_the_query_passes_over_a_bad_message(
    spark: SparkSession, source: dict[str, Any], value: bytes | None
) -> None:
    """Spark combines conditions, and evaluates the most selective ones first, such as the presence of the id."""
    topics = topic_settings(pipeline("SELECT id FROM messages WHERE id > 1 AND _topic = 't'", **source))
    assert topics is not None
    columns = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp"
    raw = spark.createDataFrame([(None, value, "t", 0, 5, None)], columns)
    with pytest.raises(PySparkException) as told:
        result(spark, topics, raw).collect()
    bad = message_view.bad_record(str(told.value))
    assert bad is not None
    assert "message 5 of t[0]" in bad.message


def test_what_the_registry_says_reaches_the_driver(spark: SparkSession) -> None:
    topics = topic_settings(pipeline("SELECT id FROM messages", format="avro", registry="http://127.0.0.1:1"))
    assert topics is not None
    columns = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp"
    raw = spark.createDataFrame([(None, b"\x00\x00\x00\x00\x07x", "t", 0, 5, None)], columns)
    with pytest.raises(PySparkException) as told:
        result(spark, topics, raw).collect()
    error = spark_failure(str(told.value))
    assert isinstance(error, ConnectionFailed)
    assert "schema registry http://127.0.0.1:1: cannot get schema 7" in error.message
