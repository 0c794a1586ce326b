"""Postgres's texts as typed Arrow arrays: the texts of a real server are reproduced letter by letter."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import sql

from airflow_cdc_provider.engine.core.errors import LimitExceeded
from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.postgres.typed_values import TEXT, arrow_type, to_texts, to_typed
from local_servers.postgres import PostgresServer

SETTINGS = "SET datestyle = 'ISO'; SET timezone = 'UTC'; SET extra_float_digits = 3; SET bytea_output = 'hex'"
PREPARED = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module")
def server(source_server: PostgresServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(source_server.dsn(), autocommit=True) as connection:
        connection.execute(SETTINGS)
        yield connection


def column(kind: str, builtin: bool = True, beneath: str | None = None) -> Column:
    return Column("c", kind, 0, None, False, builtin, beneath=beneath)


def assert_kept(server: psycopg.Connection, kind: str, literals: list[str | None]) -> pa.Array:
    """Check that the typed array holds the texts that the server writes for values, and reproduces them."""
    query = sql.SQL("SELECT v::{}::text FROM unnest(%s::text[]) WITH ORDINALITY AS u (v, n) ORDER BY n")
    texts = [text for (text,) in server.execute(query.format(sql.SQL(kind)), [literals]).fetchall()]
    if kind == "boolean":
        texts = [text and text[0] for text in texts]  # the cast to text is not the output function
    typed = to_typed(pa.array(texts, TEXT), arrow_type(column(kind)), "t.c")
    assert typed.type == arrow_type(column(kind))
    assert to_texts(typed).to_pylist() == texts
    assert to_texts(typed[1:]).to_pylist() == texts[1:]  # of a slice, whose buffers start before it
    return typed


EXTREMES = {
    "boolean": ["t", "f"],
    "smallint": ["-32768", "32767", "0"],
    "integer": ["-2147483648", "2147483647"],
    "bigint": ["-9223372036854775808", "9223372036854775807"],
    "real": ["NaN", "Infinity", "-Infinity", "-0", "0", "0.1", "1e-45", "3.4028235e38", "1e5", "1e6", "0.0001", "1e-5"],
    "double precision": [
        *("NaN", "Infinity", "-Infinity", "-0", "0.1", "5e-324", "1.7976931348623157e308", "1e20", "1e15", "1e14"),
        *("1e23", "123456789012345", "0.0001", "0.00001", "9007199254740993", "5e22", "4503599627370496.5"),
    ],
    "numeric(10,2)": ["0", "-0.01", "99999999.99", "12.5"],
    "numeric(38,0)": ["9" * 38, "-1", "0"],
    "numeric(38,38)": ["0." + "9" * 38, "-0." + "0" * 37 + "1"],
    "numeric": ["NaN", "1e1000", "1.500"],
    "date": ["0001-01-01", "9999-12-31", "1582-10-10", "2000-02-29"],
    "timestamp without time zone": [
        "0001-01-01",
        "9999-12-31 23:59:59.999999",
        "2000-01-01 10:00:00.100",
        "1899-12-31",
    ],
    "timestamp(3) with time zone": ["2021-10-31 02:30 Europe/Berlin", "0001-01-01 00:00+00", "2000-01-01 10:20:30.01"],
    "bytea": ["", "\\x", "\\x" + bytes(range(256)).hex()],
    "uuid": ["00000000-0000-0000-0000-000000000000"],
    "integer[]": ["{1,NULL,3}"],
    "interval": ["1 mon -2 days 03:04:05.678901"],
    "time without time zone": ["24:00"],
    "character(5)": ["a"],
}


@pytest.mark.parametrize("kind", EXTREMES)
def test_the_extremes_of_a_type(server: psycopg.Connection, kind: str) -> None:
    assert_kept(server, kind, [None, *EXTREMES[kind], None])


def test_types(server: psycopg.Connection) -> None:
    assert arrow_type(column("numeric(10,2)")) == pa.decimal128(10, 2)
    assert arrow_type(column("numeric(3,-2)")) == arrow_type(column("numeric(2,5)")) == TEXT
    assert arrow_type(column("numeric(39,2)")) == arrow_type(column("numeric")) == TEXT
    assert arrow_type(column("timestamp(0) with time zone")) == pa.timestamp("us", "UTC")
    assert arrow_type(column("jsonb")) == arrow_type(column("integer[]")) == TEXT
    assert arrow_type(column("public.mood", builtin=False)) == TEXT
    assert arrow_type(column("public.positive", builtin=False, beneath="integer")) == pa.int32()
    assert arrow_type(column("public.word", builtin=False, beneath='text COLLATE pg_catalog."C"')) == TEXT


def test_an_empty_array_and_one_of_nulls() -> None:
    for kind in map(arrow_type, map(column, EXTREMES)):
        for nulls in ([], [None, None]):
            assert to_texts(to_typed(pa.array(nulls, TEXT), kind, "t.c")).to_pylist() == nulls


@PREPARED
@given(st.lists(st.floats(width=64).map(repr), min_size=1, max_size=300))
def test_any_double(server: psycopg.Connection, values: list[str]) -> None:
    assert_kept(server, "double precision", list(values))


@PREPARED
@given(st.lists(st.floats(width=32).map(repr), min_size=1, max_size=300))
def test_any_real(server: psycopg.Connection, values: list[str]) -> None:
    assert_kept(server, "real", list(values))


@pytest.mark.lengthy
def test_floats_of_all_magnitudes(server: psycopg.Connection) -> None:
    """The numbers are arbitrary bits, or near powers of two and ten, where the shortest digits are hard to find."""
    random_ = random.Random(7)
    for kind, bits, letters in (("double precision", 64, "<Qd"), ("real", 32, "<If")):
        found = [random_.getrandbits(bits) for _ in range(20_000)]
        for number in [2.0**n for n in range(-149, 128)] + [10.0**n for n in range(-37, 39)]:
            centre = struct.unpack(letters[:2], struct.pack("<" + letters[2], number))[0]
            found += [centre - 2, centre - 1, centre, centre + 1, centre + 2]
        packed = (struct.pack(letters[:2], max(n, 0)) for n in found)
        assert_kept(server, kind, [repr(struct.unpack("<" + letters[2], each)[0]) for each in packed])
    integers = [random_.randint(2**22, 10**18) // 10 ** random_.randint(0, 9) for _ in range(20_000)]
    for kind in ("double precision", "real"):
        assert_kept(server, kind, [str(float(n)) for n in integers])


@PREPARED
@given(st.lists(st.decimals(-(10**20), 10**20, places=9), min_size=1, max_size=300))
def test_any_decimal(server: psycopg.Connection, values: list[object]) -> None:
    assert_kept(server, "numeric(38,9)", [str(value) for value in values])


@PREPARED
@given(st.lists(st.datetimes(), min_size=1, max_size=300))
def test_any_timestamp(server: psycopg.Connection, values: list[object]) -> None:
    for kind in ("timestamp without time zone", "timestamp with time zone", "date"):
        assert_kept(server, kind, [str(value) for value in values])


@PREPARED
@given(st.lists(st.none() | st.binary(), min_size=1, max_size=300))
def test_any_bytes(server: psycopg.Connection, values: list[bytes | None]) -> None:
    typed = assert_kept(server, "bytea", [None if value is None else f"\\x{value.hex()}" for value in values])
    assert typed.to_pylist() == values


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("date", "infinity"),
        ("date", "0044-03-15 BC"),
        ("date", "10000-01-01"),
        ("timestamp without time zone", "-infinity"),
        ("timestamp without time zone", "0044-03-15 00:00:00 BC"),
        ("timestamp with time zone", "0044-03-15 00:00:00+00 BC"),
        ("timestamp with time zone", "294276-12-31 23:59:59.999999+00"),
        ("numeric(10,2)", "NaN"),
    ],
)
def test_a_value_that_has_no_place_is_refused_by_name(kind: str, text: str) -> None:
    fine = {"numeric(10,2)": "2.50", "date": "2000-01-01"}.get(kind, "2000-01-01 00:00:00")
    fine += "+00" if kind == "timestamp with time zone" else ""
    with pytest.raises(LimitExceeded, match=r"the value .* of public\.t\.c cannot be stored") as caught:
        to_typed(pa.array([fine, text], TEXT), arrow_type(column(kind)), "public.t.c")
    assert text in caught.value.message
