"""TLS: servers that require it, a private authority, and client certificates.

Each kind of connection uses another driver with its own libpq: psycopg2 for control queries and COPY, psycopg for
replication, ADBC for reads.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from urllib.parse import quote, urlencode

import adbc_driver_manager
import adbc_driver_postgresql.dbapi as adbc
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands import cli
from airflow_cdc_provider.engine.core.errors import ConnectionFailed, StreamFailed
from airflow_cdc_provider.engine.postgres.connection import connect, connected, session_dsn
from airflow_cdc_provider.engine.postgres.replication import open_replication
from airflow_cdc_provider.engine.postgres.slots import emit_marker
from airflow_cdc_provider.engine.sources.postgres.wal.pgoutput import decode
from airflow_cdc_provider.engine.sources.postgres.wal.wal_buffer import Position
from local_servers.postgres import PostgresServer
from tests.conftest import PIPELINE_ROLE, SESSION_SETTINGS, Databases, create_database, create_roles
from tests.support.airflow_support import connection_json
from tests.support.certificates import Authority
from tests.support.databases import execute
from tests.support.pipelines import PipelineUnderTest
from tests.support.slot_reading import reader_naps, slot_reader

pytestmark = pytest.mark.slow


# Only the tests use the superuser; every other role has to present a certificate.
ACCESS = f"hostssl all postgres all trust\nhostssl all {PIPELINE_ROLE} all cert\n"


SETTINGS = {"ssl": "on", "ssl_ca_file": "ca.pem", "ssl_cert_file": "server.pem", "ssl_key_file": "server.key"}


SETTINGS |= {"log_connections": "on"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("tls") / "ours")
    authority.issue("server", "localhost")
    authority.issue("client", PIPELINE_ROLE)
    return authority


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture(scope="module")
def server(server_directory: Path, system_binaries: Path, authority: Authority) -> Iterator[PostgresServer]:
    server = PostgresServer.create(
        server_directory / "tls", settings={**SESSION_SETTINGS, **SETTINGS}, binaries=system_binaries
    )
    for name in ("ca.pem", "server.pem", "server.key"):
        shutil.copy(authority.directory / name, server.data_directory / name)
        server.account.own(server.data_directory / name)
    (server.data_directory / "pg_hba.conf").write_text(ACCESS)
    with server:
        create_roles(server)
        for name in ("shop", "dw"):
            create_database(server, name)
        execute(server.dsn("shop"), "CREATE TABLE public.t (id int PRIMARY KEY, body text)")
        yield server


def secured(server: PostgresServer, database: str, host: str = "localhost", **parameters: Path | str) -> str:
    """Return a DSN of the pipeline's role that checks the server's certificate and name."""
    query = urlencode({"sslmode": "verify-full", **parameters}, quote_via=quote)
    return f"postgresql://{PIPELINE_ROLE}@{host}:{server.port}/{database}?{query}"


@pytest.fixture
def files(authority: Authority) -> dict[str, Path | str]:
    """Return the correct parameters."""
    return {
        "sslrootcert": authority.directory / "ca.pem",
        "sslcert": authority.directory / "client.pem",
        "sslkey": authority.directory / "client.key",
    }


@pytest.fixture
def pipeline(server: PostgresServer, files: Mapping[str, Path | str], tmp_path: Path) -> PipelineUnderTest:
    pair = Databases(server.dsn("shop"), server.dsn("dw"))
    dsns = {side: {"dsn": secured(server, name, **files)} for side, name in (("source", "shop"), ("sink", "dw"))}
    return PipelineUnderTest(tmp_path, pair, ["public.t"], **dsns)


def test_every_connection_is_encrypted_and_checked(pipeline: PipelineUnderTest, server: PostgresServer) -> None:
    seen = len(server.log_file.read_text())
    pipeline.source("INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 20) n")
    commands.preflight(pipeline.pipeline)
    pipeline.provision()
    pipeline.copy()
    pipeline.source("UPDATE public.t SET body = 'changed' WHERE id < 4")
    pipeline.apply()
    pipeline.assert_verified()
    pipeline.assert_equal()
    assert commands.status(pipeline.pipeline)["consistent"]
    commands.drop(pipeline.pipeline)

    logged = server.log_file.read_text()[seen:]
    ours = re.findall(rf"^.*connection authorized: user={PIPELINE_ROLE} .*$", logged, re.MULTILINE)
    assert all("SSL enabled" in line for line in ours)
    kinds = set(re.findall(r"application_name=(airflow-cdc.*?) SSL", "\n".join(ours)))
    name = pipeline.name
    assert kinds >= {"airflow-cdc", "airflow-cdc preflight", "airflow-cdc read", f"airflow-cdc sink {name}"}
    assert any(
        "replication connection authorized" in line and f"airflow-cdc airflow_cdc_{name} SSL" in line for line in ours
    )


def test_the_log_does_not_come_record_by_record(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walsender encrypts each message separately, and libpq reads one per call; that would be 6,000 sleeps."""
    create_database(server, "records")
    dsn = f"{server.dsn('records')}?sslmode=require"
    naps = reader_naps(monkeypatch)
    rows = "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 50000) i"
    with slot_reader(dsn, rows) as (reader, start), connected(dsn, writes=True) as source:
        end = reader.reach(emit_marker(source, "test"))
        pieces = reader.take(Position(start), end)
    assert sum(len(c.op) for piece in pieces for c in decode(piece)) == 50000
    assert len(naps) < 600


def test_a_stream_that_the_server_ends_says_why(server: PostgresServer) -> None:
    """This also holds if one read finds the end of the connection and its reason."""
    create_database(server, "ended")
    dsn = f"{server.dsn('ended')}?sslmode=require"
    with slot_reader(dsn) as (reader, _), connected(dsn, writes=True) as source:
        with reader._changed, source.cursor() as cursor:  # messages that arrive meanwhile are read afterwards
            cursor.execute("SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots WHERE active")
        with pytest.raises(StreamFailed, match="terminating connection"):
            reader.reach(1 << 60)


def test_sensor_and_hook(
    server: PostgresServer, files: Mapping[str, Path | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_cdc_provider.hooks.postgres_cdc import PostgresCdcHook
    from airflow_cdc_provider.triggers.readers import SlotsReader

    fields = {
        "conn_type": "postgres_cdc",
        "host": "localhost",
        "port": server.port,
        "login": PIPELINE_ROLE,
        "schema": "shop",
    }
    extra = {name: str(value) for name, value in files.items()} | {"sslmode": "verify-full"}
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", connection_json(**fields, extra=extra))

    passed, text = PostgresCdcHook("shop_pg").test_connection()

    assert passed, text
    with closing(SlotsReader(PostgresCdcHook("shop_pg").get_uri())) as reader:
        assert "none" not in reader.read().states


def by_adbc(dsn: str) -> object:
    try:
        return adbc.connect(session_dsn(dsn, "airflow-cdc read"))
    except adbc_driver_manager.Error as e:  # the engine's connection before it has reported the error
        raise ConnectionFailed(str(e), "") from e


DRIVERS: dict[str, Callable[[str], object]] = {
    "psycopg2": connect,
    "psycopg": lambda dsn: open_replication(dsn, "airflow-cdc"),
    "adbc": by_adbc,
}


# The error in the DSN: the message of libpq, and the text of the solution.
WRONG = {
    "authority": ("certificate verify failed", "sslrootcert"),
    "host": ("does not match host name", "verify-ca"),
    "file": ("does not exist", "sslrootcert"),
    "no certificate": ("requires a valid client certificate|certificate required", "sslcert"),
    "no encryption": ("no encryption", "sslmode"),
}


def wrong_dsn(case: str, server: PostgresServer, files: dict[str, Path | str], other: Authority) -> str:
    host = "127.0.0.1" if case == "host" else "localhost"
    if case == "authority":
        files["sslrootcert"] = other.directory / "ca.pem"
    if case == "file":
        files["sslrootcert"] = other.directory / "none.pem"
    if case == "no certificate":
        del files["sslcert"], files["sslkey"]
    if case == "no encryption":
        files["sslmode"] = "disable"
    return secured(server, "shop", host, **files)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(
    case: str, driver: str, server: PostgresServer, files: dict[str, Path | str], other: Authority
) -> None:
    message, solution = WRONG[case]
    with pytest.raises(ConnectionFailed, match=message) as refused:
        DRIVERS[driver](wrong_dsn(case, server, files, other))
    if driver != "adbc":
        assert solution in refused.value.solution


@pytest.mark.parametrize("side", ["source", "sink"])
@pytest.mark.parametrize("case", ["authority", "host"])
def test_the_command_says_so(
    case: str,
    side: str,
    pipeline: PipelineUnderTest,
    server: PostgresServer,
    files: dict[str, Path | str],
    other: Authority,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipeline.change(**{side: {"dsn": wrong_dsn(case, server, files, other)}})
    assert cli.main(["run", "--pipeline", str(pipeline.file)]) == 1
    message, solution = WRONG[case]
    printed = capsys.readouterr().err
    assert message in printed
    assert solution in printed
