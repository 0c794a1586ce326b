"""Sessions with Postgres have the settings that preserve values, or are refused."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from psycopg import pq

from airflow_cdc_provider.engine.core.errors import CdcError, ConnectionFailed, LoginRefused, Retry, UnsafeSession
from airflow_cdc_provider.engine.postgres.connection import connect, connected, connection_failure, rows
from airflow_cdc_provider.engine.postgres.replication import execute, open_replication
from airflow_cdc_provider.engine.postgres.session_settings import REQUIRED
from airflow_cdc_provider.engine.sources.postgres.reading.read_sessions import ArrowSession, CopySession
from airflow_cdc_provider.hooks.postgres_cdc import PostgresCdcHook
from local_servers.postgres import PostgresServer
from tests.conftest import Databases
from tests.support.hostile import ENVIRONMENT
from tests.support.pipelines import PipelineUnderTest
from tests.support.sparkless import DONE, SparklessRun

_SHOWN = "SELECT " + ", ".join(f"pg_catalog.current_setting('{name}')" for name in REQUIRED)
_VALUES = (
    "SELECT timestamptz '2021-07-04 05:06:07+00' || '', date '2021-07-04' || '', interval '1 day 2 hours' || '',"
    " (float8 '0.1' + float8 '0.2') || '', (bytea '\\x00ff')::text, octet_length(convert_to('é', 'UTF8')) || ''"
)
_AS_TEXT = ("2021-07-04 05:06:07+00", "2021-07-04", "1 day 02:00:00", "0.30000000000000004", r"\x00ff", "2")


def _by_psycopg2(dsn: str, query: str) -> tuple[str, ...]:
    with connected(dsn) as connection:
        return rows(connection, query)[0]


def _by_copy(dsn: str, query: str) -> tuple[str, ...]:
    session = CopySession(dsn, {})
    try:
        return session.execute(query) or ()
    finally:
        session.close()


def _by_adbc(dsn: str, query: str) -> tuple[str, ...]:
    session = ArrowSession(dsn, {})
    try:
        return session.execute(query) or ()
    finally:
        session.close()


def _by_replication(dsn: str, query: str) -> tuple[str, ...]:
    connection = open_replication(dsn, "test")
    try:
        result = execute(connection, query)
        assert result is not None
        assert result.status == pq.ExecStatus.TUPLES_OK, connection.error_message
        return tuple((result.get_value(0, column) or b"").decode() for column in range(result.nfields))
    finally:
        connection.finish()


_WAYS = {"psycopg2": _by_psycopg2, "copy": _by_copy, "adbc": _by_adbc, "replication": _by_replication}
ways = pytest.mark.parametrize("asked", _WAYS.values(), ids=_WAYS)
Way = Callable[[str, str], tuple[str, ...]]


def test_the_suite_runs_in_a_hostile_environment(databases: Databases) -> None:
    """Without the engine's settings, a session has those of the environment."""
    connection = pq.PGconn.connect(databases.source.encode())
    assert connection.parameter_status(b"client_encoding") == ENVIRONMENT["PGCLIENTENCODING"].encode()
    assert connection.parameter_status(b"TimeZone") == ENVIRONMENT["PGTZ"].encode()
    assert connection.parameter_status(b"DateStyle") == ENVIRONMENT["PGDATESTYLE"].encode()
    assert connection.parameter_status(b"standard_conforming_strings") == b"off"
    connection.finish()


@ways
@pytest.mark.parametrize(
    "query",
    ["", "?client_encoding=LATIN1", "?options=-c%20TimeZone%3DAsia/Tokyo%20-c%20client_encoding%3DLATIN1"],
    ids=["environment", "encoding", "options"],
)
def test_what_decides_values_is_not_overridden(databases: Databases, asked: Way, query: str) -> None:
    """The environment and the DSN do not override the settings, whatever opens the session."""
    dsn = databases.pipeline_source + query
    assert asked(dsn, _SHOWN) == tuple(REQUIRED.values())
    assert asked(dsn, _VALUES) == _AS_TEXT


def test_sessions_of_a_connection_of_airflow_have_the_settings(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks and the triggerer open their sessions with Airflow's connection."""
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", databases.pipeline_source + "?client_encoding=LATIN1")
    connection = connect(PostgresCdcHook("shop").get_uri())
    assert rows(connection, _SHOWN) == [tuple(REQUIRED.values())]
    connection.close()


@pytest.mark.parametrize("key", ["", "?client_encoding=LATIN1"], ids=["environment", "dsn"])
def test_text_and_time_arrive_as_they_are(databases: Databases, tmp_path: Path, key: str) -> None:
    """They pass through snapshot and stream, to a target that is read without a pipeline."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.change(
        source={"dsn": databases.pipeline_source + key}, sink={"dsn": databases.pipeline_target + key, "schema": "copy"}
    )
    rows_before = [(1, "é", "2021-07-04 05:06:07+00"), (2, "Ã¶ € 漢", "1900-01-02 03:04:05.000006+00")]
    rows_after = [(3, "ö Ã©", "2021-07-04 05:06:07+00"), (4, "€", "2021-12-11 10:09:08+00")]
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, v text, at timestamptz)", *map(_insert, rows_before))
    pipeline.provision()
    pipeline.copy()
    pipeline.source(*map(_insert, rows_after))
    assert SparklessRun(pipeline.file).wait() == DONE
    found = pipeline.target_rows("SELECT id, v, at::text FROM copy.t ORDER BY id")
    assert found == rows_before + rows_after
    pipeline.assert_verified()


def _insert(values: tuple[int, str, str]) -> str:
    return "INSERT INTO public.t VALUES ({}, '{}', '{}')".format(*values)


# -- settings that are still overridden ----------------------------------------------------------------


@contextmanager
def pooler(target: int, *, drop: bytes) -> Iterator[int]:
    """Run a proxy like PgBouncer with ignored parameters: it drops startup parameters, and the backend's id differs."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=_pass_on, args=[client, target, drop], daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _pass_on(client: socket.socket, target: int, drop: bytes) -> None:
    with suppress(OSError), client, socket.create_connection(("127.0.0.1", target)) as server:
        packet = client.recv(1 << 16)
        while int.from_bytes(packet[4:8], "big") in (80877103, 80877104):  # encryption is refused
            client.sendall(b"N")
            packet = client.recv(1 << 16)
        fields = packet[8:-2].split(b"\0")
        kept = [
            part
            for name, value in zip(fields[::2], fields[1::2], strict=True)
            if name != drop
            for part in (name, value)
        ]
        body = packet[4:8] + b"\0".join(kept) + b"\0\0"
        server.sendall((len(body) + 4).to_bytes(4, "big") + body)
        threading.Thread(target=_carry, args=[client, server], daemon=True).start()
        while answer := server.recv(1 << 16):
            at = answer.find(b"K\0\0\0\x0c")  # BackendKeyData
            if at >= 0:
                answer = answer[: at + 5] + b"\0\0\0\1" + answer[at + 9 :]
            client.sendall(answer)


def _carry(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@ways
def test_a_pooler_that_drops_settings_is_named(databases: Databases, source_server: PostgresServer, asked: Way) -> None:
    """Values would be altered, so nothing is read."""
    with pooler(source_server.port, drop=b"options") as port:
        dsn = databases.pipeline_source.replace(f":{source_server.port}/", f":{port}/")
        with pytest.raises(UnsafeSession, match="extra_float_digits is '1', not '3'") as refused:
            asked(dsn, "SELECT 1")
    assert "pooler" in refused.value.solution
    assert refused.value.retry is Retry.FAIL
    assert pickle.loads(pickle.dumps(refused.value)).message == refused.value.message


def test_a_pooler_that_passes_settings_on_is_borne(databases: Databases, source_server: PostgresServer) -> None:
    """No more than that is required of it."""
    with pooler(source_server.port, drop=b"none") as port:
        dsn = databases.pipeline_source.replace(f":{source_server.port}/", f":{port}/")
        assert _by_psycopg2(dsn, _SHOWN) == tuple(REQUIRED.values())


def test_a_session_that_the_server_changes_is_refused(make_server: Callable[..., PostgresServer]) -> None:
    """An event trigger runs after all settings that a session makes at its start."""
    server = make_server("18")
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION public.greet() RETURNS event_trigger LANGUAGE plpgsql AS"
            " $$ BEGIN PERFORM set_config('bytea_output', 'escape', false); END $$"
        )
        connection.execute("CREATE EVENT TRIGGER greet ON login EXECUTE FUNCTION public.greet()")
    with pytest.raises(UnsafeSession, match="bytea_output is 'escape', not 'hex'") as refused:
        _by_psycopg2(server.dsn(), "SELECT 1")
    assert "event trigger" in refused.value.solution


# -- logins ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(server_directory: Path) -> Iterator[PostgresServer]:
    """Run a server that requires passwords, and has a role that may not log in."""
    with PostgresServer.create(server_directory / "guarded") as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("CREATE ROLE reader LOGIN REPLICATION PASSWORD 'right'")
            connection.execute("CREATE ROLE group_only PASSWORD 'right'")
        hba = server.data_directory / "pg_hba.conf"
        hba.write_text(
            "host all reader,group_only,nobody 127.0.0.1/32 scram-sha-256\n"
            "host all excluded 127.0.0.1/32 reject\n"
            "host all postgres 127.0.0.1/32 trust\n"
        )
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("SELECT pg_reload_conf()")
        yield server


@ways
@pytest.mark.parametrize(
    ("login", "database", "message", "remedy"),
    [
        ("reader:wrong", "postgres", "password authentication failed", "password"),
        ("reader", "postgres", "no password supplied", "password"),
        ("nobody:right", "postgres", "password authentication failed", "password"),
        ("postgres:any", "absent", 'database "absent" does not exist', "database"),
        ("group_only:right", "postgres", "not permitted to log in", "LOGIN"),
        ("excluded:right", "postgres", "pg_hba.conf rejects", "pg_hba.conf"),
        ("stranger:right", "postgres", "no pg_hba.conf entry", "pg_hba.conf"),
    ],
)
def test_a_refused_login_is_not_tried_again(
    guarded: PostgresServer, asked: Way, login: str, database: str, message: str, remedy: str
) -> None:
    """Its remedy differs from that for a server that does not answer."""
    dsn = guarded.dsn(database).replace("postgres@", f"{login}@", 1)
    with pytest.raises(LoginRefused, match=message) as refused:
        asked(dsn, "SELECT 1")
    assert refused.value.retry is Retry.FAIL
    assert remedy in refused.value.solution
    assert "reachable" not in refused.value.solution
    assert "right" not in refused.value.message
    assert "wrong" not in refused.value.message


def test_of_several_servers_another_may_come_back(guarded: PostgresServer) -> None:
    """A refusal is not final while another server is down; but the addresses of one server are all tried."""
    for hosts, kind in (("127.0.0.1:1,127.0.0.1", ConnectionFailed), ("localhost", LoginRefused)):
        with pytest.raises(ConnectionFailed, match="failed") as failed:
            _by_psycopg2(guarded.dsn().replace("postgres@127.0.0.1", f"reader:wrong@{hosts}", 1), "SELECT 1")
        assert type(failed.value) is kind


def test_a_missing_role_is_told(databases: Databases) -> None:
    """Such a server requires no password."""
    with pytest.raises(LoginRefused, match='role "absent" does not exist') as refused:
        _by_psycopg2(databases.source.replace("postgres@", "absent@"), "SELECT 1")
    assert "create the role" in refused.value.solution


@ways
def test_a_server_that_is_not_there_may_come_back(asked: Way) -> None:
    """So the connection is retried."""
    with pytest.raises(ConnectionFailed, match="Connection refused") as failed:
        asked("postgresql://u@127.0.0.1:1/d", "SELECT 1")
    error: CdcError = failed.value
    assert not isinstance(error, LoginRefused)
    assert error.retry is Retry.RETRY


def test_a_server_without_a_free_connection_may_have_one_soon(databases: Databases) -> None:
    """So this is retried, too."""
    with psycopg.connect(databases.source, autocommit=True) as admin:
        admin.execute("CREATE ROLE crowded LOGIN CONNECTION LIMIT 0")
        with pytest.raises(ConnectionFailed, match="too many connections") as failed:
            _by_psycopg2(databases.source.replace("postgres@", "crowded@"), "SELECT 1")
        admin.execute("DROP ROLE crowded")
    assert failed.value.retry is Retry.RETRY


def test_an_unknown_time_zone_of_the_environment_is_named(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server refuses the start; there is nothing else to try."""
    monkeypatch.setenv("PGTZ", "Mars/Phobos")
    with pytest.raises(LoginRefused, match="Mars/Phobos") as refused:
        _by_psycopg2(databases.source, "SELECT 1")
    assert "PGTZ" in refused.value.solution


@pytest.mark.parametrize(
    "said",
    [
        'FATAL:  LDAP authentication failed for user "u"',
        "SSL SYSCALL error: Connection reset by peer\nFATAL:  no pg_hba.conf entry for host, user, no encryption",
    ],
)
def test_what_looks_like_a_refusal_and_may_be_an_outage_is_tried_again(said: str) -> None:
    """The service behind a server's logins may be down; after a broken TLS connection, libpq retries without TLS."""
    error = connection_failure("postgresql://u@h/d", "connect", said)
    assert error.retry is Retry.RETRY
