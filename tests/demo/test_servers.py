"""The demo's parts: servers that crash and come back, a shop under change."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import psycopg
import pytest

from airflow_cdc_provider.engine.core.waiting import await_condition
from demo import shop, shop_writers
from local_servers import postgres
from local_servers.postgres import PostgresServer, find_binaries
from local_servers.process import Account, ServerError, find_free_port, start_guard
from tests.conftest import Databases, ServerMaker


def scalar(dsn: str, query: str) -> object:
    """Return the single value that ``query`` yields."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]


def write(dsn: str, statement: str) -> None:
    """Run and commit one statement."""
    with psycopg.connect(dsn) as connection:
        connection.execute(statement)


@pytest.mark.parametrize("version", ["16", "18"])
def test_a_server_of_the_wheel_decodes_logically(make_server: ServerMaker, version: str) -> None:
    server = make_server(version)

    assert str(scalar(server.dsn(), "SHOW server_version")).split(".")[0] == version
    assert scalar(server.dsn(), "SHOW wal_level") == "logical"
    assert scalar(server.dsn(), "SHOW server_encoding") == "UTF8"
    assert scalar(server.dsn(), "SHOW listen_addresses") == "127.0.0.1"
    assert scalar(server.dsn(), "SELECT pg_create_logical_replication_slot('s', 'pgoutput') IS NOT NULL") is True


def test_a_server_of_the_system_starts_from_its_binaries(make_server: ServerMaker, system_binaries: Path) -> None:
    server = make_server(binaries=system_binaries)

    assert scalar(server.dsn(), "SELECT count(*) > 0 FROM pg_available_extensions WHERE name = 'hstore'") is True


def test_settings_override_the_defaults(make_server: ServerMaker) -> None:
    server = make_server(settings={"wal_level": "replica", "application_name": "it's"})

    assert scalar(server.dsn(), "SHOW wal_level") == "replica"
    assert scalar(server.dsn(), "SHOW max_prepared_transactions") == "10"


def test_restart_keeps_port_and_data(make_server: ServerMaker) -> None:
    server = make_server()
    write(server.dsn(), "CREATE TABLE kept AS SELECT 1 AS n")
    before = server.dsn()

    server.restart()

    assert server.dsn() == before
    assert scalar(before, "SELECT n FROM kept") == 1


@pytest.mark.slow
def test_kill_ends_every_process_and_a_start_recovers(make_server: ServerMaker) -> None:
    server = make_server()
    write(server.dsn(), "CREATE TABLE kept AS SELECT 1 AS n")
    sleeper = psycopg.connect(server.dsn())
    backend = sleeper.info.backend_pid

    server.kill()

    assert not server.running
    assert not psutil.pid_exists(backend)
    with pytest.raises(psycopg.OperationalError):
        sleeper.execute("SELECT 1")
    server.start()
    assert scalar(server.dsn(), "SELECT n FROM kept") == 1


@pytest.mark.slow
def test_a_fast_stop_does_not_wait_forever_for_a_stuck_walsender(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "STOP_SECONDS", 1.0)
    server = make_server()
    assert server._process is not None
    walsender = psycopg.connect(server.dsn() + "?replication=database", autocommit=True)
    psutil.Process(walsender.info.backend_pid).suspend()

    server.stop("fast")

    assert not server.running


def test_a_start_that_fails_shows_the_log(server_directory: Path) -> None:
    server = PostgresServer.create(server_directory / "broken", settings={"shared_buffers": "many"})

    with pytest.raises(ServerError, match=r'invalid value for parameter "shared_buffers"'):
        server.start()

    assert not server.running
    server.remove()
    assert not server.directory.exists()


def test_another_server_on_the_port_is_noticed(source_server: PostgresServer, server_directory: Path) -> None:
    server = PostgresServer.create(server_directory / "shadowed")
    server.port = source_server.port

    with pytest.raises(ServerError, match="has its data in"):
        server.check_identity()

    server.remove()


def test_a_used_directory_is_refused(server_directory: Path) -> None:
    used = server_directory / "used"
    used.mkdir()
    (used / "precious").touch()

    with pytest.raises(ServerError, match="not empty"):
        PostgresServer.create(used)


def test_missing_binaries_name_the_remedy() -> None:
    with pytest.raises(ServerError, match="Postgres 9") as caught:
        find_binaries("9")

    assert "postgresql-9" in caught.value.solution


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts servers as another user")
@pytest.mark.slow
def test_a_closed_directory_is_refused_for_data_and_copied_for_binaries(server_directory: Path) -> None:
    closed = server_directory / "closed"
    closed.mkdir(mode=0o700)
    install = find_binaries("16").parent
    wheel = closed / install.parent.name
    shutil.copytree(install, wheel / install.name, symlinks=True)
    shutil.copytree(install.parent.with_name(f"{wheel.name}.libs"), closed / f"{wheel.name}.libs", symlinks=True)

    with pytest.raises(ServerError, match="cannot be reached by the user nobody"):
        PostgresServer.create(closed / "data")
    with PostgresServer.create(server_directory / "open", binaries=wheel / install.name / "bin") as server:
        assert server.directory in server.binaries.parents
        assert scalar(server.dsn(), "SELECT 1") == 1


@pytest.mark.lengthy
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_plain_user_runs_a_server_as_himself(server_directory: Path) -> None:
    account = Account.choose()
    packages = [Path(postgres.__file__).parents[1], Path(psycopg.__file__).parents[1]]
    interpreters = [Path(sys.executable), Path(f"/usr/bin/python3.{sys.version_info.minor}")]
    open_to_all = [each for each in interpreters if each.exists() and account.can_enter(each.resolve().parent)]
    if not open_to_all or not all(map(account.can_enter, packages)):
        pytest.skip("the interpreter or the packages lie where a plain user cannot read")
    home = server_directory / "plain"
    home.mkdir()
    account.own(home)
    code = f"""
        from pathlib import Path
        from local_servers.postgres import PostgresServer
        with PostgresServer.create(Path({str(home / "server")!r}), settings={{"fsync": "off"}}) as server:
            print(server.running)
    """

    done = subprocess.run(
        [str(open_to_all[0]), "-c", textwrap.dedent(code)],
        cwd=home,
        env={"PYTHONPATH": os.pathsep.join(map(str, packages))},
        capture_output=True,
        text=True,
        check=False,
        **account.popen_arguments(),
    )

    assert done.stdout == "True\n", done.stderr


def test_a_server_stops_when_its_owner_is_killed(server_directory: Path) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from local_servers.postgres import PostgresServer
        server = PostgresServer.create(Path({str(server_directory / "orphan")!r}), settings={{"fsync": "off"}})
        server.start()
        print(server._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """

    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, check=False)

    assert done.returncode == -signal.SIGKILL
    assert await_condition(lambda: not psutil.pid_exists(int(done.stdout)), seconds=15)


def test_free_ports_do_not_follow_the_seed_of_random() -> None:
    assert len({find_free_port() for _ in range(5)}) > 1


def test_databases_come_in_fresh_pairs(databases: Databases) -> None:
    write(databases.source, "CREATE TABLE t AS SELECT 1 AS n")

    assert scalar(databases.target, "SELECT to_regclass('t') IS NULL") is True
    assert scalar(databases.source, "SELECT pg_create_logical_replication_slot('left_behind', 'pgoutput')::text") != ""
    with psycopg.connect(databases.source) as connection:
        connection.execute("BEGIN")
        connection.execute("INSERT INTO t VALUES (2)")
        connection.execute("PREPARE TRANSACTION 'left behind'")


def test_the_databases_of_an_earlier_test_left_nothing(source_server: PostgresServer, databases: Databases) -> None:
    assert scalar(source_server.dsn(), "SELECT count(*) FROM pg_replication_slots") == 0
    assert scalar(databases.source, "SELECT count(*) FROM pg_prepared_xacts") == 0


def fill_shop(dsn: str) -> int:
    """Fill the shop at a hundredth of its size."""
    with psycopg.connect(dsn) as connection:
        shop.create_schema(connection)
    return shop.load(dsn, scale=0.01)


def test_the_shop_has_out_of_line_bodies_and_is_the_same_each_time(databases: Databases) -> None:
    assert fill_shop(databases.source) == fill_shop(databases.target) == 10_000

    assert scalar(databases.source, "SELECT count(*) FROM shop.events WHERE pg_column_size(body) > 8000") == 30
    for table in shop.TABLE_NAMES:
        digest = f"SELECT md5(string_agg(t::text, '' ORDER BY t::text)) FROM {table} t"
        assert scalar(databases.source, digest) == scalar(databases.target, digest)


def test_what_has_the_mark_ends_with_us_wherever_it_is(tmp_path: Path) -> None:
    mark = f"CDC_TEST_MARK={tmp_path} [a-z]*"
    name, value = mark.split("=")
    marked, other = (
        subprocess.Popen(["sleep", "600"], env={**os.environ, name: text}, start_new_session=True)
        for text in (value, f"{value} and more")
    )
    guard = start_guard(-marked.pid, signals=(), mark=mark)
    assert guard.stdin is not None
    guard.stdin.close()  # like the death of this process

    assert marked.wait(60) == -signal.SIGKILL
    assert guard.wait(60) is not None
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.slow
def test_writers_make_every_kind_of_change(make_server: ServerMaker, system_binaries: Path) -> None:
    dsn = make_server(binaries=system_binaries).dsn()
    fill_shop(dsn)
    write(dsn, "SELECT pg_create_logical_replication_slot('kinds', 'test_decoding')")

    with shop_writers.Writers(dsn, rate=200) as writers:
        assert await_condition(lambda: writers.transactions >= 1000, seconds=60)
    assert not writers.running

    with psycopg.connect(dsn) as connection:
        changes = connection.execute("SELECT data FROM pg_logical_slot_get_changes('kinds', NULL, NULL)")
        decoded = [str(data) for (data,) in changes]
    # A few find nothing to change, because the row that they chose is gone.
    assert sum(line.startswith("COMMIT") for line in decoded) > 0.9 * writers.transactions
    for table in shop.TABLE_NAMES:
        for kind in ("INSERT", "UPDATE: old-key", "UPDATE", "DELETE"):
            if (table, kind) != ("shop.orders", "UPDATE: old-key"):
                assert any(line.startswith(f"table {table}: {kind}") for line in decoded), (table, kind)
    unchanged = [line for line in decoded if "unchanged-toast-datum" in line]
    assert any("old-key" in line for line in unchanged)
    assert any("old-key" not in line for line in unchanged)


@pytest.mark.slow
def test_writers_report_why_they_stopped(make_server: ServerMaker) -> None:
    server = make_server()
    fill_shop(server.dsn())
    writers = shop_writers.Writers(server.dsn())
    writers.start()
    assert await_condition(lambda: writers.transactions > 0, seconds=30)

    server.kill()
    assert await_condition(lambda: not writers.running, seconds=30)

    with pytest.raises(shop_writers.WritersFailed, match="server closed the connection"):
        writers.stop()
