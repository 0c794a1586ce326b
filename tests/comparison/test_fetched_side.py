"""The comparison with a target that only returns rows, against the comparison that both servers compute."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg2 import sql

from airflow_cdc_provider.engine.comparison import compare as comparison
from airflow_cdc_provider.engine.comparison.compare import TableResult
from airflow_cdc_provider.engine.comparison.fetched_side import row_sides
from airflow_cdc_provider.engine.comparison.hash_sums import add_up, first_hash, hashes_of
from airflow_cdc_provider.engine.comparison.side import RowKey
from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.postgres.array_text import array_elements, array_texts
from airflow_cdc_provider.engine.postgres.column_text import text_of
from airflow_cdc_provider.engine.postgres.connection import connected, rows
from tests.comparison.two_sides import session
from tests.conftest import Databases
from tests.support.damages import DAMAGES, TYPES_DDL, TYPES_ROWS, Session, found

__all__ = ["session"]

TEXTS = st.lists(st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1)
HASHES = st.integers(-(1 << 63), (1 << 63) - 1)
EVENTS = """
    CREATE TABLE public.t_log (_op "char", _commit_lsn pg_lsn, _seq bigint, _before jsonb, _unchanged text[], id int,
        body text, note text)
"""


def fetched(
    session: Session, extra: Sequence[str], target: Target, keys: Sequence[RowKey] | None
) -> Iterator[pa.RecordBatch]:
    """Return a target's rows like a sink does, in batches of two; all of them, as sinks may do for a changelog."""
    columns = [text_of(column) for column in target.table.columns] + [
        sql.SQL("{}::text").format(sql.Identifier(name)) for name in extra
    ]
    names = [*(column.name for column in target.table.columns), *extra]
    query = sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(columns), sql.Identifier(target.schema, target.name))
    read = rows(session.target, query)
    for start in range(0, len(read), 2):
        page = read[start : start + 2]
        yield pa.RecordBatch.from_arrays(
            [pa.array(values, pa.string()) for values in zip(*page, strict=True)], names=names
        )


def compare(
    session: Session,
    target: Target,
    live: comparison.Live | None = None,
    mode: Mode = "mirror",
    extra: Sequence[str] = (),
) -> TableResult:
    read = partial(fetched, session, extra)
    (result,) = comparison.compare(
        session.source, [target], lambda source, target: row_sides(source, target, mode, read), live
    )
    return result


class Standing:
    """A stream that has applied everything."""

    def passed(self, lsn: int, timeout: float) -> bool:
        return True


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=40), st.sampled_from([pa.string(), pa.large_string()]))
def test_arrays_have_the_text_that_postgres_gives_them(
    databases: Databases, values: list[list[str | None]], kind: pa.DataType
) -> None:
    width = max(map(len, values))
    padded = [[*row, *[None] * (width - len(row))] for row in values]
    texts = array_texts([pa.array(column, kind) for column in zip(*padded, strict=True)]).to_pylist()
    with connected(databases.source, writes=True) as connection:
        for row, text in zip(padded, texts, strict=True):
            assert rows(connection, "SELECT %s::text[]::text", [row]) == [(text,)]
            if None not in row:
                assert array_elements(text) == tuple(row)


def test_equal_tables(session: Session) -> None:
    session.both(TYPES_DDL, TYPES_ROWS)
    assert compare(session, session.pair()) == TableResult("public.t", 4, 4, True, (), 0, 0)
    assert compare(session, session.pair(), Standing()).equal


def test_every_damage_is_found(session: Session) -> None:
    session.both(TYPES_DDL, TYPES_ROWS)
    for damage, differences in DAMAGES.items():
        rows(session.target, "BEGIN")
        rows(session.target, "SET LOCAL search_path = public, pg_catalog")
        rows(session.target, damage)
        assert found(compare(session, session.pair())) == differences, damage
        assert found(compare(session, session.pair(), Standing())) == differences, damage
        rows(session.target, "ROLLBACK")


def test_a_changelog_adds_up_to_its_rows(session: Session) -> None:
    rows(session.source, "CREATE TABLE public.t (id int PRIMARY KEY, body text, note text)")
    rows(session.source, "INSERT INTO public.t VALUES (1, 'one', NULL), (5, 'kept', 'new'), (7, 'late', '')")
    rows(session.target, EVENTS)
    rows(
        session.target,
        """INSERT INTO public.t_log VALUES
        ('i', '0/10', 1, NULL, NULL, 9, 'gone', NULL), ('t', '0/20', 1, NULL, NULL, NULL, NULL, NULL),
        ('r', '0/30', NULL, NULL, NULL, 1, 'one', NULL), ('r', '0/30', NULL, NULL, NULL, 2, 'two', NULL),
        ('r', '0/30', NULL, NULL, NULL, 3, 'kept', 'old'),
        ('d', '0/40', 1, '{"id": "2"}', NULL, NULL, NULL, NULL),
        ('u', '0/50', 1, '{"id": "3"}', '{body}', 5, NULL, 'new'),
        ('i', '0/60', 1, NULL, NULL, 7, 'early', ''), ('u', '0/60', 2, NULL, NULL, 7, 'late', ''),
        ('u', '0/60', 3, NULL, '{body,note}', 7, NULL, NULL)""",
    )
    (target,) = [Target(session.pair().table, "public", "t_log")]
    meta = ("_op", "_commit_lsn", "_seq", "_before", "_unchanged")
    assert compare(session, target, None, "changelog", meta) == TableResult("public.t", 3, 3, True, (), 0, 0)
    assert compare(session, target, Standing(), "changelog", meta).equal
    rows(session.target, "UPDATE public.t_log SET body = 'other' WHERE _commit_lsn = '0/60' AND _seq = 2")
    rows(session.target, "DELETE FROM public.t_log WHERE id = 1")
    assert found(compare(session, target, None, "changelog", meta)) == {("different", "7"), ("missing", "1")}


def test_sources_in_other_encodings_hash_alike(session: Session, databases: Databases) -> None:
    rows(session.source, "CREATE DATABASE latin TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'")
    try:
        with connected(databases.source.rpartition("/")[0] + "/latin", writes=True) as source:
            latin = Session(source, session.target)
            latin.both("CREATE TABLE public.t (id text PRIMARY KEY)", "INSERT INTO public.t VALUES ('ö'), ('a')")
            assert compare(latin, latin.pair()).equal
    finally:
        rows(session.source, "DROP DATABASE latin")


@given(st.lists(st.lists(st.tuples(HASHES, HASHES, HASHES))), st.sampled_from([1, 4, 1024]))
def test_sums_are_exact_and_of_their_buckets(parts: list[list[tuple[int, int, int]]], buckets: int) -> None:
    found: dict[int, list[int]] = {}
    expected: dict[int, list[int]] = {}
    for part in parts:
        hashes = np.array(part, np.int64).reshape(-1, 3)
        add_up(found, hashes[:, 0], hashes[:, 1:], buckets)
        for key, *row in part:
            total = expected.setdefault(key % buckets, [0, 0, 0])
            expected[key % buckets] = [had + more for had, more in zip(total, (1, *row), strict=True)]
    assert found == expected


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_hashes_are_the_halves_of_md5(texts: list[str]) -> None:
    halves = [struct.unpack(">qq", hashlib.md5(text.encode()).digest()) for text in texts]
    assert [tuple(pair) for pair in hashes_of(texts).tolist()] == halves
    assert [first_hash(text) for text in texts] == [first for first, _ in halves]
