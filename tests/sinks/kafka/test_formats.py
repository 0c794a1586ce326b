"""The form of messages, and that reading them yields the original texts."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import ConfigCompatibilityLevel, SchemaRegistryClient, ServerConfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.errors import CannotFollow, LimitExceeded, TargetConflict
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.kafka.schema_registry import Registry
from airflow_cdc_provider.engine.sinks.kafka import events
from airflow_cdc_provider.engine.sinks.kafka.formats.avro import AvroFormat
from airflow_cdc_provider.engine.sinks.kafka.formats.debezium import UNAVAILABLE, DebeziumFormat
from airflow_cdc_provider.engine.sinks.kafka.formats.plain import Format, PlainFormat

TEXT = pa.large_string()
TOPIC = "shop.public.t"

_digits = st.text("0123456789", min_size=1, max_size=30)
_clocks = st.builds(
    lambda h, m, s, f: f"{h:02}:{m:02}:{s:02}" + (f".{f:06}".rstrip("0") if f else ""),
    st.integers(0, 23),
    st.integers(0, 59),
    st.integers(0, 59),
    st.integers(0, 999_999),
)
_years = st.one_of(st.integers(1, 9999), st.integers(1900, 2100))
_dates = st.builds(lambda y, m, d: f"{y:04}-{m:02}-{d:02}", _years, st.integers(1, 12), st.integers(1, 28))
_eras = st.sampled_from(["", "", "", " BC"])
_endless = st.sampled_from(["infinity", "-infinity"])


def _number(whole: str, fraction: str, negative: bool) -> str:
    text = (whole.lstrip("0") or "0") + (f".{fraction}" if fraction else "")
    return f"-{text}" if negative and text.strip("0.") else text


def _scaled(scale: int, width: int) -> st.SearchStrategy[str]:
    whole = st.text("0123456789", min_size=1, max_size=width)
    return st.builds(_number, whole, st.text("0123456789", min_size=scale, max_size=scale), st.booleans())


def _milli(clock: str) -> str:
    whole, _, fraction = clock.partition(".")
    kept = fraction[:3].rstrip("0")
    return f"{whole}.{kept}" if kept else whole


# By type: texts as Postgres writes them.
KINDS: Mapping[str, st.SearchStrategy[str]] = {
    "boolean": st.sampled_from(["t", "f"]),
    "smallint": st.integers(-(2**15), 2**15 - 1).map(str),
    "integer": st.integers(-(2**31), 2**31 - 1).map(str),
    "bigint": st.integers(-(2**63), 2**63 - 1).map(str),
    "real": st.sampled_from(["0", "-0", "0.1", "1.5e+20", "3.4028235e+38", "1e-45", "NaN", "Infinity", "-Infinity"]),
    "double precision": st.sampled_from(["0", "0.1", "1e+300", "-1.7976931348623157e+308", "NaN", "-Infinity"]),
    "numeric(30,5)": _scaled(5, 25),
    "numeric": st.integers(0, 20).flatmap(lambda scale: _scaled(scale, 30)),
    "text": st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])),
    "character varying(20)": st.text('a"\\\n\t\u2028{}', max_size=20),
    "date": st.one_of(_endless, st.builds(lambda d, e: d + e, _dates, _eras)),
    "timestamp without time zone": st.one_of(
        _endless, st.builds(lambda d, t, e: f"{d} {t}{e}", _dates, _clocks, _eras)
    ),
    "timestamp(3) without time zone": st.builds(lambda d, t: f"{d} {_milli(t)}", _dates, _clocks),
    "timestamp with time zone": st.one_of(
        _endless, st.builds(lambda d, t, e: f"{d} {t}+00{e}", _dates, _clocks, _eras)
    ),
    "time without time zone": st.one_of(st.just("24:00:00"), _clocks),
    "time(0) without time zone": _clocks.map(lambda clock: clock.partition(".")[0]),
    "time with time zone": _clocks.map(lambda clock: f"{clock}+05:30"),
    "bytea": st.binary(max_size=20).map(lambda data: f"\\x{data.hex()}"),
    "jsonb": st.sampled_from(['{"a": [1, null, "\\""]}', "[]", "null"]),
    "uuid": st.uuids().map(str),
    "integer[]": st.sampled_from(["{1,NULL,3}", "{}"]),
    "interval": st.sampled_from(["1 mon -2 days", "00:00:00.5"]),
}


def column(name: str, kind: str) -> Column:
    return Column(name, kind, 0, None, name == "id", True)


def target(*columns: Column) -> Target:
    table = Table(7, "public", "t", columns, ("id",), "d", None, (Leaf(7, "public", "t"),), "r")
    return Target(table, "public", "t")


ALL = target(column("id", "bigint"), *(column(f"c {n} ü", kind) for n, kind in enumerate(KINDS)))
SMALL = target(column("id", "integer"), column("note", "text"), column("price", "numeric(10,2)"))


def table(target: Target, *changes: Mapping[str, Any]) -> pa.Table:
    """Return changes as in an effect: ``op``, ``new``, and, if present, ``kind``, ``old``, ``unchanged``."""
    width = range(len(target.table.columns))
    columns: dict[str, Any] = {"op": pa.array([c["op"] for c in changes])}
    numbers = {"commit_lsn": 160, "xid": 20, "commit_ts": 1_700_000_000_123_456}
    columns |= {name: pa.array([number] * len(changes)) for name, number in numbers.items()}
    columns["seq"] = pa.array(range(1, len(changes) + 1))
    columns |= {f"c{i}": pa.array([c["new"][i] if c.get("new") else None for c in changes], TEXT) for i in width}
    if any("unchanged" in c for c in changes):
        columns["unchanged"] = pa.array([c.get("unchanged") for c in changes], TEXT)
    if any("old" in c for c in changes):
        columns["old_kind"] = pa.array([c.get("kind") for c in changes], pa.string())
        columns |= {f"b{i}": pa.array([c["old"][i] if "old" in c else None for c in changes], TEXT) for i in width}
    return pa.table(columns)


def round_trip(format_: Format, target: Target, rows: pa.Table) -> list[dict[str, Any]]:
    made = format_.encode(target, TOPIC, events.settled(target, rows))
    keys, values = (made.column(name).combine_chunks() for name in ("key", "value"))
    return format_.decode(target, keys, values).to_pylist()


def messages(format_: Format, target: Target, rows: pa.Table) -> list[tuple[Any, Any]]:
    """Return keys and values, as JSON."""
    made = format_.encode(target, TOPIC, events.settled(target, rows)).to_pylist()
    return [tuple(m[name] and json.loads(m[name]) for name in ("key", "value")) for m in made]


FORMATS: Mapping[str, Format] = {
    "json": PlainFormat(),
    "debezium": DebeziumFormat("shop", "db"),
    "precise": DebeziumFormat("shop", "db", "precise"),
    "schemas": DebeziumFormat("shop", "db", "precise", schemas=True, tombstones=False),
}


@pytest.fixture(scope="module", params=[*FORMATS, pytest.param("avro", marks=pytest.mark.slow)])
def format_(request: pytest.FixtureRequest) -> Format:
    if request.param == "avro":
        return AvroFormat(Registry(request.getfixturevalue("registry")), "shop", "db", "precise")
    return FORMATS[request.param]


def _rows() -> st.SearchStrategy[list[list[str | None]]]:
    return st.lists(st.tuples(*(st.none() | texts for texts in KINDS.values())).map(list), min_size=1, max_size=4)


@pytest.mark.lengthy
@given(rows=_rows(), old=_rows())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_all_values_come_back_as_they_were(
    format_: Format, rows: list[list[str | None]], old: list[list[str | None]]
) -> None:
    changes = [{"op": "i", "new": [str(n), *row]} for n, row in enumerate(rows)]
    changes += [
        {"op": "u", "new": ["9", *row], "kind": "O", "old": ["9", *before]}
        for row, before in zip(rows, old, strict=False)
    ]
    changes += [{"op": "d", "new": ["8", *[None] * len(KINDS)], "kind": "O", "old": ["8", *before]} for before in old]
    names = [each.name for each in ALL.table.columns]
    found = round_trip(format_, ALL, table(ALL, *changes))
    assert [[event[name] for name in names] for event in found if event["_op"] != "d"] == [
        c["new"] for c in changes if c["op"] != "d"
    ]
    assert [json.loads(event["_before"]) for event in found if event["_before"]] == [
        dict(zip(names, c["old"], strict=True))
        for c in changes
        if "old" in c  # type: ignore[arg-type]
    ]
    assert [(e["_op"], e["_commit_lsn"], e["_seq"]) for e in found] == [
        (c["op"], "0/A0", str(n)) for n, c in enumerate(changes, 1)
    ]


MOVE = {"op": "u", "new": ["2", None, "5.00"], "unchanged": "{note}", "kind": "K", "old": ["1", None, None]}
DELETE = {"op": "d", "new": ["3", None, None], "kind": "K", "old": ["3", None, None]}
TRUNCATE: dict[str, Any] = {"op": "t"}


def test_a_row_that_gets_another_key_is_deleted_and_inserted(format_: Format) -> None:
    found = round_trip(format_, SMALL, table(SMALL, MOVE, DELETE, TRUNCATE))
    assert [(e["_op"], e["id"], e["price"], e["_seq"], e["_unchanged"]) for e in found] == [
        ("d", "1", None, "1", None),
        ("i", "2", "5.00", "1", "{note}"),
        ("d", "3", None, "2", None),
        ("t", None, None, "3", None),
    ]
    assert found[1]["note"] is None
    assert [event["_before"] and json.loads(event["_before"])["id"] for event in found] == ["1", None, "3", None]


def test_changes_of_nothing_but_columns_are_left_alone() -> None:
    rows = table(SMALL, {"op": "u", "new": ["1", "b", "1.00"], "kind": "O", "old": ["1", "a", "1.00"]}, DELETE)
    assert events.settled(SMALL, rows).equals(rows)


def test_tombstones_follow_deletes_and_truncates_go_everywhere() -> None:
    rows = events.settled(SMALL, table(SMALL, MOVE, DELETE, TRUNCATE))
    for tombstones, expected in ((True, [1, 0, 1, 1, 0, 1]), (False, [1, 1, 1, 1])):
        made = replace(DebeziumFormat("shop"), tombstones=tombstones).encode(SMALL, TOPIC, rows).to_pylist()
        assert [int(m["value"] is not None) for m in made] == expected
        assert [m["everywhere"] for m in made] == [False] * (len(expected) - 1) + [True]
        assert made[-1]["key"] is None


def test_plain_json() -> None:
    new = {"op": "i", "new": ["1", 'a "b"\n', "5.00"]}
    (insert, moved_from, moved_to, deleted, truncated) = messages(
        PlainFormat(), SMALL, table(SMALL, new, MOVE, DELETE, TRUNCATE)
    )
    place = {"_commit_lsn": 160, "_xid": 20, "_commit_ts": "2023-11-14T22:13:20.123456Z"}
    assert insert == ({"id": 1}, {"id": 1, "note": 'a "b"\n', "price": "5.00", "_op": "i", "_seq": 1, **place})
    none = {"note": None, "price": None}
    assert moved_from == ({"id": 1}, {"id": 1, **none, "_op": "d", "_seq": 2, **place, "_before": {"id": 1}})
    row = {"id": 2, "note": None, "price": "5.00"}
    assert moved_to == ({"id": 2}, {**row, "_op": "i", "_seq": 2, **place, "_unchanged": ["note"]})
    assert deleted == ({"id": 3}, {"id": 3, **none, "_op": "d", "_seq": 3, **place, "_before": {"id": 3}})
    assert truncated == (None, {"id": None, **none, "_op": "t", "_seq": 4, **place})


def _envelope(envelope: dict[str, Any]) -> dict[str, Any]:
    """Return an envelope without fields that differ from run to run."""
    for name in ("ts_ms", "ts_us", "ts_ns"):
        assert envelope.pop(name) > 1_700_000_000_000
    assert envelope["source"].pop("version")
    return envelope


def test_debezium_json() -> None:
    new = {"op": "i", "new": ["1", "a", "5.00"]}
    found = messages(DebeziumFormat("shop", "db"), SMALL, table(SMALL, new, MOVE, DELETE, TRUNCATE))
    source = {
        "connector": "postgresql",
        "name": "shop",
        "ts_ms": 1_700_000_000_123,
        "ts_us": 1_700_000_000_123_456,
        "ts_ns": 1_700_000_000_123_456_000,
        "snapshot": "false",
        "db": "db",
        "sequence": '["160","1"]',
        "schema": "public",
        "table": "t",
        "txId": 20,
        "lsn": 160,
        "xmin": None,
    }
    rest = {"transaction": None}
    second, third = ({**source, "sequence": f'["160","{n}"]'} for n in (2, 3))
    assert [(key, value and _envelope(value)) for key, value in found] == [
        (
            {"id": 1},
            {"before": None, "after": {"id": 1, "note": "a", "price": "5.00"}, "source": source, "op": "c", **rest},
        ),
        (
            {"id": 1},
            {"before": {"id": 1, "note": None, "price": None}, "after": None, "source": second, "op": "d", **rest},
        ),
        ({"id": 1}, None),
        (
            {"id": 2},
            {
                "before": None,
                "after": {"id": 2, "note": UNAVAILABLE, "price": "5.00"},
                "source": {**second, "unchanged": ["note"]},
                "op": "c",
                **rest,
            },
        ),
        (
            {"id": 3},
            {"before": {"id": 3, "note": None, "price": None}, "after": None, "source": third, "op": "d", **rest},
        ),
        ({"id": 3}, None),
        (None, {"before": None, "after": None, "source": {**source, "sequence": '["160","4"]'}, "op": "t", **rest}),
    ]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("date", "2024-02-29", 19782),
        ("date", "0044-03-15 BC", -735160),
        ("timestamp without time zone", "2024-01-01 00:00:00.25", 1_704_067_200_250_000),
        ("timestamp(3) without time zone", "2024-01-01 00:00:00.25", 1_704_067_200_250),
        ("timestamp with time zone", "2024-01-01 00:00:00.25+00", "2024-01-01T00:00:00.250000Z"),
        ("time without time zone", "24:00:00", 86_400_000_000),
        ("time(3) without time zone", "00:00:01.5", 1500),
        ("bytea", "\\x00ff", "AP8="),
        ("numeric(10,2)", "-1.28", "gA=="),
        ("numeric", "1.280", {"scale": 3, "value": "BQA="}),
        ("double precision", "NaN", "NaN"),
        ("real", "1e+20", 1e20),
        ("boolean", "f", False),
        ("uuid", "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000001"),
    ],
)
def test_values_are_encoded_as_debezium_does(kind: str, text: str, value: Any) -> None:
    one = target(column("id", "integer"), column("v", kind))
    ((_, envelope),) = messages(
        DebeziumFormat("shop", "db", "precise"), one, table(one, {"op": "i", "new": ["1", text]})
    )
    assert envelope["after"]["v"] == value


def test_a_schema_says_what_each_column_is() -> None:
    format_ = DebeziumFormat("shop", "db", "precise", schemas=True)
    ((key, value),) = messages(format_, SMALL, table(SMALL, {"op": "i", "new": ["1", "a", "5.00"]}))
    assert key["schema"]["fields"] == [{"type": "int32", "optional": False, "field": "id"}]
    assert value["schema"]["name"] == f"{TOPIC}.Envelope"
    after = next(f for f in value["schema"]["fields"] if f["field"] == "after")
    assert [(f["field"], f["type"], f["optional"], f.get("name")) for f in after["fields"]] == [
        ("id", "int32", False, None),
        ("note", "string", True, None),
        ("price", "bytes", True, "org.apache.kafka.connect.data.Decimal"),
    ]
    assert value["payload"]["op"] == "c"


def test_messages_of_before_a_change_of_columns_are_read(format_: Format) -> None:
    older = target(column("id", "integer"), column("gone", "text"), column("note", "text"))
    newer = target(column("id", "integer"), column("note", "text"), column("more", "integer"))
    made = format_.encode(older, TOPIC + ".evolved", table(older, {"op": "i", "new": ["1", "x", "a"]}))
    keys, values = (made.column(name).combine_chunks() for name in ("key", "value"))
    (event,) = format_.decode(newer, keys, values).to_pylist()
    assert (event["id"], event["note"], event["more"]) == ("1", "a", None)


def test_what_kafka_connect_cannot_hold_is_refused() -> None:
    one = target(column("id", "integer"), column("v", "numeric"))
    for text in ("NaN", "Infinity"):
        with pytest.raises(LimitExceeded, match=text):
            messages(DebeziumFormat("shop", "db", "precise"), one, table(one, {"op": "i", "new": ["1", text]}))
    far = target(column("id", "integer"), column("v", "timestamp without time zone"))
    with pytest.raises(LimitExceeded, match="294276"):
        messages(DebeziumFormat("shop"), far, table(far, {"op": "i", "new": ["1", "294276-12-31 23:59:59"]}))


@pytest.mark.parametrize("value", [b"no json", b"{}", b'{"source": 3, "op": "c"}', b"\x00\x00"])
def test_messages_that_are_not_ours_are_refused(format_: Format, value: bytes) -> None:
    with pytest.raises(TargetConflict, match="format"):
        format_.decode(SMALL, pa.array([None], pa.large_binary()), pa.array([value], pa.large_binary()))


# -- the schema registry -----------------------------------------------------------------------------


@pytest.mark.slow
def test_avro_is_in_confluents_wire_format_under_the_topics_subjects(registry: str) -> None:
    format_ = AvroFormat(Registry(registry), "shop", "db")
    made = format_.encode(SMALL, "wire", table(SMALL, {"op": "i", "new": ["1", "a", "5.00"]})).to_pylist()
    client = SchemaRegistryClient({"url": registry})
    for name in ("key", "value"):
        magic, number = struct.unpack_from(">bI", made[0][name])
        latest = client.get_latest_version(f"wire-{name}")
        assert (magic, number) == (0, latest.schema_id)
        schema = json.loads(client.get_schema(number).schema_str)
        assert schema["connect.name"] == f"wire.{'Key' if name == 'key' else 'Envelope'}"
        assert schema["type"] == "record"


@pytest.mark.slow
def test_a_schema_that_the_registry_refuses_stops_before_anything_is_written(registry: str) -> None:
    format_ = AvroFormat(Registry(registry), "shop", "db")
    format_.encode(SMALL, "strict", table(SMALL, {"op": "i", "new": ["1", "a", "5.00"]}))
    SchemaRegistryClient({"url": registry}).set_config("strict-value", ServerConfig(ConfigCompatibilityLevel.BACKWARD))
    other = target(column("id", "integer"), column("note", "integer"), column("price", "numeric(10,2)"))
    with pytest.raises(CannotFollow, match="strict-value"):
        format_.encode(other, "strict", table(other, {"op": "i", "new": ["1", "7", "5.00"]}))
