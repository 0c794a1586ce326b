"""The comparison of source and target, on two servers."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_cdc_provider.engine.comparison import compare as comparison
from airflow_cdc_provider.engine.comparison.compare import TableResult
from airflow_cdc_provider.engine.core.errors import MissingPrivilege, StreamFailed, UnknownTable
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.connection import Connection, connect, connected, rows, scalar
from local_servers.postgres import PostgresServer
from tests.comparison.two_sides import Scripted, session
from tests.conftest import Databases, ServerMaker, drop_database
from tests.support.damages import DAMAGES, TYPES_DDL, TYPES_ROWS, Session, compare, found

__all__ = ["session"]


def test_types(session: Session) -> None:
    session.both(TYPES_DDL, TYPES_ROWS)
    result = session.compare()
    assert result == TableResult("public.t", 4, 4, True, (), 0, 0)


def test_each_damage_is_found(session: Session) -> None:
    session.both(TYPES_DDL, TYPES_ROWS)
    rows(session.target, "SET search_path = public")
    for damage, differences in DAMAGES.items():
        rows(session.target, damage)
        result = session.compare()
        assert found(result) == differences, damage
        assert not result.equal
        assert result.difference_count == len(differences)
        assert result.source_rows == 4
        assert result.target_rows == scalar(session.target, "SELECT count(*) FROM t")
        rows(session.target, f"TRUNCATE t; {TYPES_ROWS}")
    assert session.compare().equal


def test_versions_of_postgres_agree(session: Session, make_server: ServerMaker) -> None:
    with connected(make_server("18").dsn(), writes=True) as newer:
        across = Session(session.source, newer)
        across.both(TYPES_DDL, TYPES_ROWS)
        assert across.compare().equal
        rows(newer, "UPDATE public.t SET posix = 'y' WHERE posix = 'x'")
        assert found(across.compare()) == {("different", "a    ", "1")}


def test_empty_tables(session: Session) -> None:
    session.both("CREATE TABLE public.t (id int PRIMARY KEY, v text)")
    assert session.compare() == TableResult("public.t", 0, 0, True, (), 0)


def test_many_rows_and_a_capped_list(session: Session) -> None:
    session.both(
        "CREATE TABLE public.t (id bigint PRIMARY KEY, v text, n numeric)",
        "INSERT INTO public.t SELECT i, md5(i::text), i / 7.0 FROM generate_series(1, 100000) i",
    )
    progress: list[tuple[str, int, int]] = []
    (result,) = compare(session.source, session.target, [session.pair()], None, lambda *report: progress.append(report))
    assert result == TableResult("public.t", 100_000, 100_000, True, (), 0)
    buckets = progress[0][2]
    assert progress == [("public.t", 0, buckets), ("public.t", buckets, buckets), ("public.t", buckets, buckets)]

    rows(session.target, "UPDATE public.t SET v = 'x' WHERE id = 77777")
    assert found(session.compare()) == {("different", "77777")}

    rows(session.target, "DELETE FROM public.t WHERE id % 25 = 0")
    rows(session.target, "UPDATE public.t SET n = n + 1 WHERE id % 50 = 1")
    rows(session.target, "INSERT INTO public.t SELECT i, '', 0 FROM generate_series(100001, 100500) i")
    result = session.compare()
    assert (result.source_rows, result.target_rows) == (100_000, 96_500)
    assert result.difference_count == 4000 + 2000 + 500 + 1
    assert len(result.differences) == len(found(result)) == comparison.NAMED
    assert {difference.kind for difference in result.differences} == {"missing", "extra", "different"}
    assert not result.equal


def test_leaves_condition_and_odd_names(session: Session) -> None:
    root, copy = '"We %s ird"."Sel""ect {}"', '"We %s ird"."copy %"'
    session.both('CREATE SCHEMA "We %s ird"')
    columns = '("i %d" int PRIMARY KEY, "a{}""b" text) PARTITION BY RANGE ("i %d")'
    rows(session.source, f"CREATE TABLE {root} {columns}")
    for low in (0, 100, 200):
        leaf = f'"We %s ird"."p%{low}" PARTITION OF {root} FOR VALUES FROM ({low}) TO ({low + 100})'
        rows(session.source, f"CREATE TABLE {leaf}")
    rows(session.source, f"INSERT INTO {root} SELECT i, 'v%s' || i FROM generate_series(0, 299) i")
    rows(session.target, f'CREATE TABLE {copy} ("a{{}}""b" text, "i %d" int PRIMARY KEY, more int)')
    rows(session.target, f"INSERT INTO {copy} SELECT 'v%s' || i, i FROM generate_series(100, 299) i")
    pair = session.pair('"We %s ird"."Sel""ect {}"', "copy %", where='"i %d" >= 100 -- all that is new')
    assert session.compare(pair).equal
    rows(session.target, f'DELETE FROM {copy} WHERE "i %d" = 250')
    result = session.compare(pair)
    assert [(d.key, d.kind) for d in result.differences] == [({"i %d": "250"}, "missing")]
    assert found(session.compare(pair, Scripted(lambda: None))) == {("missing", "250")}


def test_text_stands_for_a_type_that_the_target_lacks(session: Session) -> None:
    rows(session.source, "CREATE TYPE public.mood AS ENUM ('sad', 'fine')")
    rows(session.source, "CREATE DOMAIN public.short AS char(3)")
    rows(session.source, "CREATE TABLE public.t (m public.mood, s public.short, c public.mood[], PRIMARY KEY (m, s))")
    rows(session.target, "CREATE TABLE public.t (m text, s text, c text, PRIMARY KEY (m, s))")
    rows(session.source, "INSERT INTO public.t VALUES ('sad', 'a', '{fine}'), ('fine', 'b', NULL)")
    rows(session.target, "INSERT INTO public.t VALUES ('sad', 'a  ', '{fine}'), ('fine', 'b  ', NULL)")
    assert session.compare().equal
    rows(session.target, "UPDATE public.t SET c = '{sad}' WHERE m = 'sad'")
    assert found(session.compare()) == {("different", "sad", "a  ")}
    assert found(session.compare(live=Scripted(lambda: None))) == {("different", "sad", "a  ")}


def test_encodings_may_differ(session: Session, databases: Databases, target_server: PostgresServer) -> None:
    with connected(target_server.dsn(), writes=True) as admin:
        rows(admin, "CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    try:
        with connected(target_server.dsn("latin"), writes=True) as latin:
            western = Session(session.source, latin)
            western.both("CREATE TABLE public.t (id text PRIMARY KEY, v text)")
            western.both("INSERT INTO public.t VALUES ('ä', 'größer'), ('ö', 'x'), ('a', 'y')")
            assert western.compare().equal
            rows(latin, "UPDATE public.t SET v = 'é' WHERE id = 'ö'")
            assert found(western.compare()) == {("different", "ö")}
    finally:
        drop_database(target_server, "latin")


def test_copies_of_a_row_are_a_difference(session: Session) -> None:
    rows(session.source, "CREATE TABLE public.t (id int PRIMARY KEY, v text)")
    rows(session.target, "CREATE TABLE public.t (id int, v text)")
    session.both("INSERT INTO public.t VALUES (1, 'a'), (2, 'b')")
    rows(session.target, "INSERT INTO public.t VALUES (2, 'b')")
    for live in (None, Scripted(lambda: None)):
        result = session.compare(live=live)
        assert (result.source_rows, result.target_rows) == (2, 3)
        assert found(result) == {("different", "2")}


def test_the_result_as_json(two_rows: Session) -> None:
    rows(two_rows.target, "DELETE FROM public.t WHERE id = 2")
    assert json.loads(json.dumps(two_rows.compare().as_dict())) == {
        "table": "public.t",
        "source_rows": 2,
        "target_rows": 1,
        "equal": False,
        "differences": [{"key": {"id": "2"}, "kind": "missing"}],
        "unsettled": 0,
        "difference_count": 1,
    }


def test_a_target_that_is_not_there(session: Session) -> None:
    rows(session.source, "CREATE TABLE public.t (id int PRIMARY KEY, v text)")
    with pytest.raises(UnknownTable, match=r"target table public\.t of public\.t does not exist"):
        session.compare()
    rows(session.target, "CREATE TABLE public.t (id int PRIMARY KEY)")
    with pytest.raises(UnknownTable, match="has no column v"):
        session.compare()


def test_hidden_rows_are_an_error(session: Session, databases: Databases) -> None:
    session.both("CREATE TABLE public.t (id int PRIMARY KEY)", "INSERT INTO public.t VALUES (1), (2)")
    pair = session.pair()
    role = f"reader_{random.SystemRandom().randrange(10**9)}"
    rows(session.source, f"CREATE ROLE {role} LOGIN")
    try:
        rows(session.source, f"GRANT SELECT ON public.t TO {role}")
        rows(session.source, f"CREATE POLICY partial ON public.t TO {role} USING (id = 1)")
        rows(session.source, "ALTER TABLE public.t ENABLE ROW LEVEL SECURITY")
        with connected(databases.source.replace("postgres@", f"{role}@"), writes=True) as reader:
            with pytest.raises(MissingPrivilege, match="row-level security"):
                compare(reader, session.target, [pair], None)
            assert scalar(reader, "SELECT 1") == 1  # the connection is still good
    finally:
        rows(session.source, f"DROP OWNED BY {role}")
        rows(session.source, f"DROP ROLE {role}")


def test_a_failure_on_one_side_ends_the_other(session: Session) -> None:
    rows(session.source, "CREATE TABLE public.t (id int PRIMARY KEY, v text)")
    rows(session.source, "INSERT INTO public.t VALUES (1, 'a')")
    rows(session.target, "CREATE VIEW public.slow AS SELECT 1 AS id, pg_sleep(3600)::text AS v")
    rows(session.target, "CREATE TABLE public.t (id int PRIMARY KEY, v text)")
    pair = session.pair(where="1 / (id - 1) > 0")
    with pytest.raises(Exception, match="division by zero"):
        session.compare(Target(pair.table, "public", "slow"))


def test_a_side_that_begins_late_is_broken_off_too() -> None:
    """The other side has failed before the canceled side had started."""
    told, begun, broken_off = threading.Event(), threading.Event(), threading.Event()

    def cancel() -> None:
        (broken_off if begun.is_set() else told).set()

    def ask(side: Any) -> None:
        if side is sides.source:
            raise ValueError("the source fails")
        told.wait()
        begun.set()
        broken_off.wait()

    sides: Any = SimpleNamespace(source=SimpleNamespace(cancel=lambda: None), target=SimpleNamespace(cancel=cancel))
    with pytest.raises(ValueError, match="the source fails"):
        comparison._both(sides, ask)


@pytest.fixture
def two_rows(session: Session) -> Session:
    session.both("CREATE TABLE public.t (id int PRIMARY KEY, v int)", "INSERT INTO public.t VALUES (1, 0), (2, 0)")
    return session


def test_lag_counts_only_without_a_stream(two_rows: Session) -> None:
    rows(two_rows.source, "UPDATE public.t SET v = 1 WHERE id = 1")
    rows(two_rows.source, "INSERT INTO public.t VALUES (3, 3)")
    result = two_rows.compare()
    assert found(result) == {("different", "1"), ("missing", "3")}
    assert (result.source_rows, result.target_rows) == (3, 2)

    apply = iter(["SELECT", "UPDATE public.t SET v = 1 WHERE id = 1; INSERT INTO public.t VALUES (3, 3)"])
    live = Scripted(lambda: rows(two_rows.target, next(apply)))
    assert two_rows.compare(live=live) == TableResult("public.t", 3, 3, True, (), 0)
    assert len(live.asked) == 2


def test_a_difference_must_last_two_rounds(two_rows: Session) -> None:
    rows(two_rows.target, "UPDATE public.t SET v = 1 WHERE id = 1")
    rows(two_rows.target, "DELETE FROM public.t WHERE id = 2")
    rows(two_rows.target, "INSERT INTO public.t VALUES (3, 0)")
    live = Scripted(lambda: None)
    result = two_rows.compare(live=live)
    assert found(result) == {("different", "1"), ("missing", "2"), ("extra", "3")}
    assert (result.source_rows, result.target_rows, result.unsettled) == (2, 2, 0)
    assert len(live.asked) == 3  # at the start, and once per round
    assert live.asked == sorted(live.asked)

    # Seen in the first round, gone in the second.
    steps = iter(["SELECT", "SELECT", "UPDATE public.t SET v = 0 WHERE id = 1"])
    healing = Scripted(lambda: rows(two_rows.target, next(steps)))
    assert found(two_rows.compare(live=healing)) == {("missing", "2"), ("extra", "3")}
    assert len(healing.asked) == 3


def test_a_change_there_and_back_is_no_rest(two_rows: Session) -> None:
    """The source shows v = 0 at every read, and the target always the 1 in between."""
    rows(two_rows.target, "UPDATE public.t SET v = 1 WHERE id = 1")

    def flip() -> None:
        for value in (1, 0):
            rows(two_rows.source, f"UPDATE public.t SET v = {value} WHERE id = 1")

    live = Scripted(flip)
    assert two_rows.compare(live=live) == TableResult("public.t", 2, 2, True, (), 1)
    assert len(live.asked) == 1 + comparison.ROUNDS


def test_a_stalled_stream_fails(two_rows: Session) -> None:
    with pytest.raises(StreamFailed, match="did not reach") as failure:
        two_rows.compare(live=Scripted(lambda: None, answer=False))
    assert "airflow-cdc status" in failure.value.solution


@dataclass
class Subscription:
    """Postgres's own logical replication in the role of the stream."""

    source: Connection
    name: str

    def passed(self, lsn: int, timeout: float) -> bool:
        query = (
            "SELECT coalesce(bool_and(replay_lsn >= %s), false) FROM pg_stat_replication WHERE application_name = %s"
        )
        return await_condition(
            lambda: bool(scalar(self.source, query, (format_lsn(lsn), self.name))), timeout, interval=0.01
        )


@contextmanager
def subscribed(session: Session, databases: Databases) -> Iterator[Subscription]:
    name = f"sub_{random.SystemRandom().randrange(10**9)}"
    rows(session.source, "CREATE PUBLICATION pub FOR TABLE public.t")
    rows(session.target, f"CREATE SUBSCRIPTION {name} CONNECTION '{databases.source}' PUBLICATION pub")
    try:
        state = "SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel"
        assert await_condition(lambda: bool(scalar(session.target, state)), 30)
        with connected(databases.source, writes=True) as watching:
            yield Subscription(watching, name)
    finally:
        rows(session.target, f"DROP SUBSCRIPTION {name}")


@contextmanager
def writing(dsn: str) -> Iterator[list[int]]:
    """Change rows 1 to 300 as fast as one session can, and yield the number of transactions."""
    stop = threading.Event()
    transactions = [0]

    def write() -> None:
        draw = random.Random(1)
        connection = connect(dsn, writes=True)
        while not stop.is_set():
            key = draw.randint(1, 300)
            rows(connection, f"UPDATE public.t SET n = n + 1 WHERE id = {key}")
            rows(connection, "UPDATE public.t SET flag = NOT flag WHERE id <= 3")
            rows(connection, f"DELETE FROM public.t WHERE id = {key}")
            rows(connection, f"INSERT INTO public.t VALUES ({key}, {key}, true)")
            transactions[0] += 4
        connection.close()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield transactions
    finally:
        stop.set()
        thread.join()


def test_no_false_difference_while_rows_change(session: Session, databases: Databases) -> None:
    session.both("CREATE TABLE public.t (id int PRIMARY KEY, n int, flag bool)")
    rows(session.source, "INSERT INTO public.t SELECT i, 0, false FROM generate_series(1, 20000) i")
    with subscribed(session, databases) as live, writing(databases.source) as transactions:
        for _ in range(5):
            result = session.compare(live=live)
            assert result.differences == ()
            assert result.equal
            assert result.source_rows == result.target_rows
            assert result.unsettled <= 3
        rows(session.target, "UPDATE public.t SET n = -1 WHERE id = 5000")
        rows(session.target, "DELETE FROM public.t WHERE id = 6000")
        rows(session.target, "INSERT INTO public.t VALUES (30000, 0, false)")
        result = session.compare(live=live)
        assert found(result) == {("different", "5000"), ("missing", "6000"), ("extra", "30000")}
        assert result.source_rows == result.target_rows
        assert not result.equal
        assert transactions[0] > 100
