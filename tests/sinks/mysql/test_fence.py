"""Sessions and epochs of the MySQL sink: who may commit, which sessions are ended, and records that lack tables."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import pytest

from airflow_cdc_provider.engine.core.errors import (
    Blocked,
    CdcError,
    GateClosed,
    StreamFailed,
)
from airflow_cdc_provider.engine.sinks.mysql import record
from airflow_cdc_provider.engine.sinks.mysql import session as mysql_session
from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink
from local_servers.mariadb import MariadbServer
from tests.conftest import PIPELINE_ROLE
from tests.sinks.mysql.prepared_sink import alive, prepared, query


def test_a_commit_in_flight_finishes_before_the_epoch_is_taken(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit locks the epoch row, so a takeover waits; with a plain SELECT both would pass."""
    sink, epoch = prepared(mariadb)
    monkeypatch.setattr(mysql_session, "COMMIT_SECONDS", 0.2)
    with closing(mariadb.connect()) as commit, commit.cursor() as cursor:
        cursor.execute("START TRANSACTION")
        cursor.execute("SELECT epoch FROM airflow_cdc.pipelines WHERE pipeline = 'p' LOCK IN SHARE MODE")
        with pytest.raises(Blocked, match=r"Lock wait timeout.*root@(127\.0\.0\.1|localhost)"):
            sink.take_epoch("too early")
    assert sink.take_epoch("in time") > epoch


@pytest.mark.parametrize("part", ["", "stream"])
def test_a_session_that_never_commits_is_ended_when_the_epoch_is_taken(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """A halted process or a lost host would hold the epoch's row, or the lock of a change of tables, for hours."""
    sink, epoch = prepared(mariadb)
    monkeypatch.setattr(mysql_session, "COMMIT_SECONDS", 0.2)
    for hold in ("_fenced", "_alone"):
        paused = replace(sink, part=part)
        arguments = (epoch, "share") if hold == "_fenced" else (epoch,)
        with suppress(StreamFailed), getattr(paused, hold)(*arguments) as held:
            taken = sink.take_epoch("next")
            assert taken > epoch
            assert not alive(held[0] if isinstance(held, tuple) else held)
        epoch = taken
    assert query(mariadb, "SELECT COUNT(*) FROM airflow_cdc.sessions") == [(0,)]


def test_only_the_part_s_own_sessions_are_ended(mariadb: MariadbServer) -> None:
    sink, _ = prepared(mariadb)
    parts = [replace(sink, part=part) for part in ("snapshot-1", "snapshot-2", "stream", "")]
    others = [replace(sink, pipeline="q"), replace(sink, pipeline="pp", part="stream")]
    with ExitStack() as stack:
        stack.enter_context(suppress(CdcError))  # the errors of sessions that have been ended
        sessions = []
        for each in (*parts, *others):
            stack.enter_context(suppress(CdcError))
            sessions.append(stack.enter_context(each._session()))
        parts[0].end_sessions()
        assert [alive(session) for session in sessions] == [False, True, True, True, True, True]
        parts[-1].end_sessions()
        assert [alive(session) for session in sessions] == [False, False, False, False, True, True]


def test_sessions_of_others_that_cannot_be_seen_are_not_forgotten(mariadb: MariadbServer) -> None:
    """Another pipeline of another user may still be alive, and has to be found when its epoch is taken."""
    sink, _ = prepared(mariadb)
    ours = replace(sink, dsn=mariadb.dsn.replace("root", PIPELINE_ROLE))
    with replace(sink, pipeline="q")._session() as other:
        ours.end_sessions()
        assert query(mariadb, "SELECT pipeline FROM airflow_cdc.sessions") == [("q",)]
        assert alive(other)


def test_an_epoch_of_a_record_that_is_gone_is_refused(mariadb: MariadbServer) -> None:
    sink, _ = prepared(mariadb)
    sink.drop()
    with pytest.raises(GateClosed, match="no commit record of pipeline p anymore"):
        sink.take_epoch("late")
    query(mariadb, "DROP DATABASE airflow_cdc")
    with pytest.raises(GateClosed, match="no commit record of pipeline p anymore"):
        sink.take_epoch("late")


@pytest.mark.parametrize("created", range(len(record._RECORD_TABLES)))
def test_a_record_whose_tables_are_being_created_is_none_yet(mariadb: MariadbServer, created: int) -> None:
    """Another pipeline is creating it now, or died while doing so: each statement of DDL commits automatically."""
    query(mariadb, "CREATE DATABASE airflow_cdc")
    for name, body in list(record._RECORD_TABLES.items())[:created]:
        query(mariadb, f"CREATE TABLE airflow_cdc.{name} ({body})")
    assert MysqlSink(mariadb.dsn, "p", "mirror").record() is None
    sink, _ = prepared(mariadb)
    assert sink.record() is not None


@pytest.mark.parametrize("lost", record._RECORD_NAMES)
def test_a_record_that_has_lost_a_table_is_refused(mariadb: MariadbServer, lost: str) -> None:
    """This also applies to pipelines without a record: the first one would create the table again."""
    sink, _ = prepared(mariadb)
    query(mariadb, f"DROP TABLE airflow_cdc.{lost}")
    for each in (sink, replace(sink, pipeline="another")):
        with pytest.raises(GateClosed, match=f"is incomplete: it lacks {lost}$"):
            each.record()


def test_a_record_whose_tables_are_created_between_two_looks_is_whole(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_behind = record._left_behind

    def late(opened: mysql_session.Session, names: Collection[str]) -> bool:
        prepared(mariadb)
        return left_behind(opened, ["tables"])

    monkeypatch.setattr(record, "_left_behind", late)
    assert MysqlSink(mariadb.dsn, "p", "mirror").record() is not None
