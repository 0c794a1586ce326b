"""Values of messages: they are preserved, or their message is a bad record."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sources.kafka import message_view
from airflow_cdc_provider.engine.sources.kafka.column_lineage import Lineage
from airflow_cdc_provider.engine.sources.kafka.query import lineage_in, result
from airflow_cdc_provider.engine.sources.kafka.settings import TopicSettings, topic_settings
from tests.support.pipeline_files import document
from tests.support.pipelines import SPARK_CONF
from tests.support.spark_jvm import local_session

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

COLUMNS = (
    "id STRING, d DECIMAL(12, 4), whole DECIMAL(38, 0), dbl DOUBLE, f FLOAT, tiny TINYINT, big BIGINT, day DATE,"
    " at TIMESTAMP, local TIMESTAMP_NTZ, data BINARY, ok BOOLEAN, some ARRAY<DECIMAL(4, 1)>, part STRUCT<x: FLOAT>"
)
PLACEHOLDER = "__debezium_unavailable_value"
CODES = list(PLACEHOLDER.encode())
WITH_AWAY = (
    "id INT NOT NULL, n INT, body STRING NOT NULL, data BINARY, amount DECIMAL(9, 2), texts ARRAY<STRING>,"
    " numbers ARRAY<BIGINT>, pairs MAP<STRING, STRING>, doc STRING, at TIMESTAMP"
)
AWAY: Mapping[str, Any] = {
    "body": PLACEHOLDER,
    "data": base64.b64encode(PLACEHOLDER.encode()).decode(),
    "amount": PLACEHOLDER,
    "texts": [PLACEHOLDER],
    "numbers": CODES,
    "pairs": {PLACEHOLDER: PLACEHOLDER},
    "doc": CODES,
    "at": None,
}
KEPT: Mapping[bytes, Mapping[str, Any]] = {
    b' {"id": "\\ud83d\\ude00 \\\\ud800 \xc3\xa9"}\n': {"id": "😀 \\ud800 é"},
    b'{"id": 1.50}': {"id": "1.50"},
    b'{"id": 12345678901234567890.123}': {"id": "12345678901234567890.123"},
    b'{"id": {"a": [1.10, "1.5", true]}}': {"id": '{"a":[1.10,"1.5",true]}'},
    b'{"d": 1.1234, "whole": 12345678901234567890123456789012345678}': {
        "d": Decimal("1.1234"),
        "whole": Decimal("12345678901234567890123456789012345678"),
    },
    b'{"d": "-0.50000000"}': {"d": Decimal("-0.5000")},
    b'{"d": 125e-3, "whole": 1.5e1}': {"d": Decimal("0.1250"), "whole": Decimal(15)},
    b'{"dbl": 0.1, "f": 0.1}': {"dbl": 0.1, "f": pytest.approx(0.1)},
    b'{"dbl": 0.10000000000000001, "f": 0.100000001}': {"dbl": 0.1, "f": pytest.approx(0.1)},
    b'{"dbl": 9007199254740992, "f": 16777216}': {"dbl": 9007199254740992.0, "f": 16777216.0},
    b'{"dbl": 1.7976931348623157e308, "f": 0.10000000149011612}': {
        "dbl": 1.7976931348623157e308,
        "f": pytest.approx(0.1),
    },
    b'{"dbl": 0e-400, "f": -0.0}': {"dbl": 0.0, "f": 0.0},
    b'{"dbl": "-Infinity"}': {"dbl": float("-inf")},
    b'{"dbl": Infinity}': {"dbl": float("inf")},
    b'{"tiny": -128, "big": 9223372036854775807}': {"tiny": -128, "big": 9223372036854775807},
    b'{"day": "2024-02-29"}': {"day": date(2024, 2, 29)},
    b'{"at": "2024-05-01T10:00:00.123456000+02:00"}': {"at": datetime(2024, 5, 1, 8, 0, 0, 123456, UTC)},
    b'{"local": "2024-05-01 10:00:00.5"}': {"local": datetime(2024, 5, 1, 10, 0, 0, 500000)},
    b'{"data": "AP8=", "ok": true, "some": [1.5, null], "part": {"x": 1e2}}': {
        "data": b"\x00\xff",
        "ok": True,
        "some": [Decimal("1.5"), None],
        "part": {"x": 100.0},
    },
}
BAD = {
    "trailing": [
        b'{"id":"two1"}{"id":"two2"}',
        b'{"id":"trail"} xyz',
        b'{"id":"a"},{"id":"b"}',
        b'{"id":"a"}],"x":[1',
    ],
    "encoding": [
        b'{"id":"latin","s":"caf\xe9"}',
        rb'{"id":"a\ud800b"}',
        rb'{"id":"a\uDC00b"}',
        b'{"id":"\xed\xa0\x80"}',
    ],
    "decimals": [b'{"d":1.123456}', b'{"d":"1.12345"}', b'{"d":1e-5}', b'{"whole":0.5}', b'{"some":[1.55]}'],
    "floats": [
        b'{"dbl":1e400}',
        b'{"dbl":-1e400}',
        b'{"dbl":1e-400}',
        b'{"dbl":9007199254740993}',
        b'{"dbl":9007199254740993.0}',
        b'{"dbl":0.1234567890123456789}',
        b'{"f":16777217}',
        b'{"f":0.1234567891}',
        b'{"f":1e39}',
        b'{"part":{"x":16777217}}',
    ],
    "times": [
        b'{"day":"2024-05-01T23:00:00Z"}',
        b'{"at":"2024-05-01T10:00:00.123456789Z"}',
        b'{"at":"10:00"}',
        b'{"local":"2024-05-01T10:00:00Z"}',
    ],
    "": [
        b"",
        b"null",
        b"[]",
        b'[{"id":"a"},{"id":"b"}]',
        b'{"d":123456789.1}',
        b'{"tiny":200}',
        b'{"big":1.0}',
        b'{"big":9223372036854775808}',
        b'{"day":19000}',
        b'{"day":"2024"}',
        b'{"at":1714557600000}',
        b'{"at":1714557600}',
        b'{"local":1.5}',
        b'{"day":"2024-02-30"}',
        b'{"data":"!"}',
        b'{"ok":1}',
        b'{"dbl":"x"}',
        b'{"dbl":{"a":1}}',
    ],
}


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_session({**SPARK_CONF, "spark.log.level": "ERROR"}) as spark:
        yield spark


def source_of(columns: str | None = COLUMNS, **source: Any) -> TopicSettings:
    section = {"type": "kafka", "brokers": "nowhere:1", "topics": ["t"], "table": "public.t", **source}
    section |= {} if columns is None else {"columns": columns}
    found = topic_settings(Pipeline.parse(document(source=section, sink__mode="changelog")))
    assert found is not None
    return found


def raw(spark: SparkSession, values: Sequence[bytes | None]) -> DataFrame:
    """Return messages as Spark reads them from a topic."""
    rows = [(None, None if value is None else bytearray(value), n) for n, value in enumerate(values)]
    kinds = {"topic": f.lit("t"), "partition": f.lit(0), "timestamp": f.current_timestamp()}
    return spark.createDataFrame(rows, "key binary, value binary, offset bigint").withColumns(kinds)


def test_values_are_kept_as_they_are(spark: SparkSession) -> None:
    for found in (message_view.readable, message_view.required):
        rows = found(raw(spark, list(KEPT)), source_of()).collect()
        told = [{name: v for name, v in row.asDict(True).items() if v is not None and name[0] != "_"} for row in rows]
        aware = [{n: v.astimezone(UTC) if n == "at" else v for n, v in each.items()} for each in told]
        assert [{n: bytes(v) if n == "data" else v for n, v in each.items()} for each in aware] == list(KEPT.values())


def test_what_would_be_changed_is_a_bad_record_unless_it_is_let(spark: SparkSession) -> None:
    values = [value for group in BAD.values() for value in group]
    strict = source_of()
    assert message_view.readable(raw(spark, values), strict).collect() == []
    troubled = message_view.dead_letter_rows(raw(spark, values), strict, Lineage(), frozenset()).collect()
    assert [bytes(row.value) for row in troubled] == values
    lenient = source_of(bad_records={"lenient": [name for name in BAD if name]})
    taken = {row._offset for row in message_view.readable(raw(spark, values), lenient).select("_offset").collect()}
    assert {values[n] for n in taken} == {value for name in BAD if name for value in BAD[name]}
    one = source_of(bad_records={"lenient": ["decimals"]})
    taken = {row._offset for row in message_view.readable(raw(spark, values), one).select("_offset").collect()}
    assert {values[n] for n in taken} == set(BAD["decimals"])


def test_the_column_is_named_whose_value_would_be_changed(spark: SparkSession) -> None:
    with pytest.raises(Exception, match="bad record") as told:
        message_view.required(raw(spark, [b'{"d":1.123456}']), source_of()).collect()
    found = message_view.bad_record(str(told.value))
    assert found is not None
    assert "the value of d does not fit DECIMAL(12,4)" in found.message


def test_numbers_stand_for_times_where_their_unit_is_said(spark: SparkSession) -> None:
    columns = "at TIMESTAMP, local TIMESTAMP_NTZ, day DATE, s TIMESTAMP"
    units = {"at": "milliseconds", "local": "microseconds", "day": "days", "s": "seconds"}
    good = {"at": 1714557600001, "local": 1714557600000001, "day": -1, "s": "1714557600"}
    bad = [{"at": 1714557600.5}, {"at": "2024-05-01T10:00:00Z"}, {"local": 10**18}, {"day": 2**31}, {"s": 10**18}]
    values = [json.dumps(each).encode() for each in (good, *bad)]
    (row,) = message_view.readable(raw(spark, values), source_of(columns, epochs=units)).collect()
    assert row.at.astimezone(UTC) == datetime(2024, 5, 1, 10, 0, 0, 1000, UTC)
    assert row.local == datetime(2024, 5, 1, 10, 0, 0, 1)
    assert row.day == date(1969, 12, 31)
    assert row.s.astimezone(UTC) == datetime(2024, 5, 1, 10, tzinfo=UTC)
    for wrong in ({"at": "days"}, {"day": "seconds"}, {"other": "days"}):
        with pytest.raises(ConfigError, match=r"source\.epochs"):
            message_view.columns_of(source_of(columns, epochs=wrong))


def test_values_are_taken_as_a_whole(spark: SparkSession) -> None:
    values = [b'{"id"', "Käse".encode(), b"\xff\x00", None, b""]
    section = {
        "columns": None,
        "value": "text",
        "sql": "SELECT value, _offset AS n FROM messages WHERE value LIKE '%\"%'",
    }
    texts = source_of(**section)
    rows = message_view.readable(raw(spark, values), texts).select("value", "_offset").collect()
    assert [(row.value, row._offset) for row in rows] == [('{"id"', 0), ("Käse", 1), ("", 4)]
    assert message_view.dead_letter_rows(raw(spark, values), texts, Lineage(), frozenset()).count() == 2
    assert [row.value for row in result(spark, texts, raw(spark, values[:2])).collect()] == ['{"id"']
    lenient = source_of(**section, bad_records={"lenient": ["encoding"]})
    assert message_view.readable(raw(spark, values[2:3]), lenient).collect()[0].value == "\ufffd\x00"
    data = message_view.readable(raw(spark, values), source_of(columns=None, value="bytes")).collect()
    assert [bytes(row.value) for row in data] == [value for value in values if value is not None]


@pytest.mark.thorough
def test_what_a_message_leaves_out_is_known_in_every_form_and_never_computed_with(spark: SparkSession) -> None:
    away = {"op": "u", "before": None, "after": {"id": 1, "n": 2, **AWAY}, "source": {"unchanged": ["at"]}}
    had = {"op": "u", "before": {"id": 2, "body": "had"}, "after": {"id": 2, "n": 2, "body": PLACEHOLDER}}
    read = {"op": "r", "before": None, "after": {"id": 3, "body": PLACEHOLDER}}
    events = [json.dumps(each).encode() for each in (away, {"payload": away}, had, read)]

    def rows(sql: str = "", **source: Any) -> list[dict[str, Any]]:
        section = source_of(WITH_AWAY, format="debezium", sql=sql or "SELECT * FROM messages", **source)
        found = result(spark, section, raw(spark, events), None).collect()
        return [row.asDict() for row in found]

    first, second, third, fourth = rows()
    assert first["_unchanged"] == second["_unchanged"] == list(AWAY)
    assert all(first[name] is None for name in AWAY)
    assert (third["_unchanged"], third["body"]) == (None, "had")
    assert (fourth["_unchanged"], fourth["body"]) == (None, PLACEHOLDER)

    renamed = rows("SELECT id, body AS text, n + 1 AS more, _op, _unchanged FROM messages WHERE id < 3")
    assert [each["_unchanged"] for each in renamed] == [["text"], ["text"], None]
    for sql in (
        "SELECT id, upper(body) AS body, _op, _unchanged FROM messages",
        "SELECT id, n, _op, _unchanged FROM messages WHERE body <> ''",
        "SELECT id, body, _op FROM messages",
        "WITH m AS (SELECT id, body, _op, _unchanged FROM messages) SELECT * FROM m",
        "SELECT id, max(body) AS body FROM messages GROUP BY id",
    ):
        with pytest.raises(Exception, match="it omits the unchanged value of body"):
            rows(sql)
        bury = {"bad_records": {"dead_letter": "x"}}
        assert {each["id"] for each in rows(sql, **bury)} == {2, 3}
        section = source_of(WITH_AWAY, format="debezium", sql=sql, **bury)
        assert (
            message_view.dead_letter_rows(raw(spark, events), section, lineage_in(spark, section), frozenset()).count()
            == 2
        )
    assert len(rows("SELECT id, n, _op FROM messages")) == 4
