"""Fixtures that every test can use: Postgres servers, and fresh databases on them.

Two servers live as long as the test run. A test that stops, kills or configures
a server makes its own with ``make_server``.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg
import pymysql
import pytest
from hypothesis import HealthCheck, settings
from psycopg import sql

from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.kafka.cluster import Cluster
from airflow_cdc_provider.engine.spark.python_interpreter import python_for_spark
from local_servers.kafka import KafkaServer
from local_servers.mariadb import MariadbServer, Programs
from local_servers.postgres import PostgresServer
from tests.support.class_archive import write_archive
from tests.support.hdfs import HdfsCluster
from tests.support.hostile import ENVIRONMENT, connect_unharmed
from tests.support.kafka_server import clear, close_clients, make_broker
from tests.support.schema_registry import registry_at
from tests.support.spark_jvm import end_jvm, reset_jvm

pytest_plugins = ["tests.selection"]
pytest.register_assert_rewrite("tests.sinks.begun_sink", "tests.sinks.contract", "tests.sinks.contract_rows")

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep Spark's logs, of this process and of those that tests start, in a temporary directory."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state-home"))


# The tests crash processes, never the machine, so what the page cache holds is safe.
SESSION_SETTINGS: Mapping[str, str] = {
    "fsync": "off",
    "jit": "off",  # servers of the system have it: it takes longer than the queries
    "max_connections": "100",
    "max_replication_slots": "30",
    "max_wal_senders": "30",
    "shared_buffers": "32MB",
}

MARIADB_SETTINGS: Mapping[str, str] = {"innodb_flush_log_at_trx_commit": "0", "innodb_buffer_pool_size": "64M"}
MYSQL = Programs.mysql(os.environ["MYSQLD"]) if "MYSQLD" in os.environ else None
"""The MySQL server to be tried instead of MariaDB."""
# What docs/sinks/mysql.md lists.
MARIADB_PRIVILEGES = "SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, ALTER, INDEX, TRIGGER"
SYSTEM_DATABASES = ("mysql", "sys", "information_schema", "performance_schema")

# What the pipelines under test run as: no superuser, and no owner of anything but what they create. Only its owner
# can publish a table, so what a test's superuser creates goes to an owner of which the pipeline's role is a member.
PIPELINE_ROLE = "cdc"
ROLES = f"CREATE ROLE app; CREATE ROLE {PIPELINE_ROLE} LOGIN REPLICATION IN ROLE app;"
OWNERSHIP = f"""
GRANT CREATE ON SCHEMA public TO {PIPELINE_ROLE};
CREATE FUNCTION public.hand_over() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog
AS $$
DECLARE made record;
BEGIN
    FOR made IN SELECT * FROM pg_event_trigger_ddl_commands() d
        WHERE schema_name IS DISTINCT FROM 'pg_temp' AND NOT in_extension AND 'postgres'::regrole
            IN (SELECT relowner FROM pg_class WHERE oid = d.objid AND d.object_type = 'table'
                UNION ALL SELECT nspowner FROM pg_namespace WHERE oid = d.objid AND d.object_type = 'schema')
    LOOP
        EXECUTE format('ALTER %s %s OWNER TO app', made.object_type, made.object_identity);
    END LOOP;
END $$;
CREATE EVENT TRIGGER hand_over ON ddl_command_end
    WHEN TAG IN ('CREATE SCHEMA', 'CREATE TABLE', 'CREATE TABLE AS', 'SELECT INTO') EXECUTE FUNCTION hand_over();
"""

ServerMaker = Callable[..., PostgresServer]

_numbers = itertools.count(1)

_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 8 << 30


def _work_in_memory() -> None:
    """Keep temporary files in memory if there is much of it: writing them to the disk took a fifth of the time."""
    if "TMPDIR" in os.environ or not _MEMORY.is_dir():
        return
    if min(shutil.disk_usage(_MEMORY).free, psutil.virtual_memory().available - _ROOM_BYTES) >= _ROOM_BYTES:
        os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)


def pytest_configure(config: pytest.Config) -> None:
    """Keep Airflow, which makes its home when it is imported, out of the user's; set the environment against libpq."""
    _work_in_memory()
    home = tempfile.TemporaryDirectory(prefix="cdc-airflow-")
    config.add_cleanup(home.cleanup)
    os.environ["AIRFLOW_HOME"] = home.name
    os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
    os.environ |= ENVIRONMENT
    psycopg.connect = connect_unharmed  # type: ignore[assignment]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """See to it that Spark starts soon."""
    if item.get_closest_marker("spark"):
        write_archive()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what has failed and how: a run that is cut off never comes to its summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed ({report.when}):\n{report.longreprtext}", flush=True)


@dataclass(frozen=True)
class Databases:
    """The URIs of a test's two databases, as the superuser that a test's own statements need.

    Pipelines run as :data:`PIPELINE_ROLE`. It may create a schema or a publication in both databases, and owns what the
    superuser creates, because it is a member of the new owner's role. This is the setup of ``docs/production.md`` in
    which a pipeline creates its own publication: it has no privilege of a superuser, and no test needs an
    administrator's publication. ``test_privileges.py`` shows which single grants suffice.
    """

    source: str
    target: str

    @property
    def pipeline_source(self) -> str:
        """The source as the pipeline's role."""
        return as_pipeline_role(self.source)

    @property
    def pipeline_target(self) -> str:
        """The target as the pipeline's role."""
        return as_pipeline_role(self.target)


def as_pipeline_role(dsn: str) -> str:
    """Return a superuser's URI with the pipeline's role in its place."""
    return dsn.replace("//postgres@", f"//{PIPELINE_ROLE}@")


@pytest.fixture(scope="session", autouse=True)
def jvm() -> Iterator[None]:
    """End the JVM that the Spark sessions of all modules share: a new one costs ten seconds of a core."""
    yield
    end_jvm()


@pytest.fixture(scope="module", autouse=True)
def spark_environment() -> Iterator[None]:
    """Check that a module leaves no other Spark to the next one.

    If the Python that a session chose stayed in the environment, commands that are started later would run with it.
    """
    before = {name: os.environ.get(name) for name in python_for_spark()}
    yield
    reset_jvm()
    assert {name: os.environ.get(name) for name in before} == before


@pytest.fixture(scope="module", autouse=True)
def kafka_clients() -> Iterator[None]:
    """Close the clients of Kafka that the pipelines of a module have left."""
    yield
    close_clients()


@pytest.fixture(scope="session")
def server_directory() -> Iterator[Path]:
    """Create a directory that an unprivileged user can enter; pytest's own directories are closed to others."""
    directory = Path(tempfile.mkdtemp(prefix="cdc-test-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def source_server(server_directory: Path) -> Iterator[PostgresServer]:
    """Start the session's source: Postgres 16 with logical decoding."""
    with PostgresServer.create(server_directory / "source", settings=SESSION_SETTINGS) as server:
        create_roles(server)
        yield server


@pytest.fixture(scope="session")
def target_server(server_directory: Path) -> Iterator[PostgresServer]:
    """Start the session's target: Postgres 16."""
    with PostgresServer.create(server_directory / "target", settings=SESSION_SETTINGS) as server:
        create_roles(server)
        yield server


@pytest.fixture(scope="session")
def mariadb_server(server_directory: Path) -> Iterator[MariadbServer]:
    """Start the session's other target: MariaDB from the system's package, or the MySQL named in the environment."""
    if MYSQL is None and shutil.which("mariadbd", path="/usr/sbin:/usr/bin") is None:
        pytest.skip("no MariaDB server package of the system")
    with MariadbServer.create(server_directory / "mariadb", MARIADB_SETTINGS, MYSQL) as server:
        with closing(server.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE USER {PIPELINE_ROLE}@'127.0.0.1'")
            for name in ("airflow_cdc", "copy", "mirror", "changelog"):
                cursor.execute(f"GRANT {MARIADB_PRIVILEGES} ON `{name}`.* TO {PIPELINE_ROLE}@'127.0.0.1'")
        yield server


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    """Start the session's HDFS."""
    with HdfsCluster.started(tmp_path_factory.mktemp("hdfs")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kafka_server(server_directory: Path) -> Iterator[KafkaServer]:
    """Start the Kafka broker of the process."""
    with make_broker(server_directory / "kafka") as server:
        yield server


@pytest.fixture(scope="module")
def kafka(kafka_server: KafkaServer) -> Iterator[KafkaServer]:
    """Return that broker, without topics, whatever the module before has done to it."""
    kafka_server.start()
    yield kafka_server
    kafka_server.start()
    clear(Cluster(kafka_server.brokers))


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the schema registry of the process, and return its URL."""
    with registry_at(tmp_path_factory.mktemp("registry")) as url:
        yield url


@pytest.fixture
def mariadb(mariadb_server: MariadbServer) -> Iterator[MariadbServer]:
    """Return that server; databases that the test creates are dropped at the end."""
    yield mariadb_server
    with closing(mariadb_server.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION lock_wait_timeout = 20")
        cursor.execute("SELECT id FROM information_schema.processlist WHERE user IN ('root', 'cdc')")
        for (number,) in cursor.fetchall():
            if number != connection.thread_id():
                with suppress(pymysql.MySQLError):
                    cursor.execute(f"KILL {number}")
        cursor.execute("SELECT schema_name FROM information_schema.schemata")
        for (name,) in cursor.fetchall():
            if name not in SYSTEM_DATABASES:
                cursor.execute(f"DROP DATABASE `{name}`")


@pytest.fixture
def make_server(server_directory: Path) -> Iterator[ServerMaker]:
    """Return a function that starts a server for this test.

    It takes the arguments of ``PostgresServer.create``, without the directory.
    """
    servers: list[PostgresServer] = []

    def make(
        version: str = "16", settings: Mapping[str, str] | None = None, binaries: Path | None = None
    ) -> PostgresServer:
        directory = server_directory / f"server{next(_numbers)}"
        server = PostgresServer.create(directory, version, {"fsync": "off", "jit": "off", **(settings or {})}, binaries)
        servers.append(server)
        server.start()
        create_roles(server)
        return server

    yield make
    for server in servers:
        server.remove()


@pytest.fixture(scope="session")
def system_binaries() -> Path:
    """Return the newest Postgres of the system's packages, with the extensions and collations that the wheel lacks."""
    installed = Path("/usr/lib/postgresql").glob("*/bin/postgres")
    newest = max(installed, key=lambda path: int(path.parts[4]), default=None)
    if newest is None:
        pytest.skip("no Postgres server package of the system")
    return newest.parent


@pytest.fixture
def databases(source_server: PostgresServer, target_server: PostgresServer) -> Iterator[Databases]:
    """Create an empty pair of databases, and drop it with the source's slots at the end."""
    name = f"t{os.getpid()}_{next(_numbers)}"
    for server in (source_server, target_server):
        create_database(server, name)
    yield Databases(source_server.dsn(name), target_server.dsn(name))
    for server in (source_server, target_server):
        drop_database(server, name)


def create_roles(server: PostgresServer) -> None:
    """Create the pipeline's role, for the database ``postgres`` and those that are created later."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"{ROLES} GRANT CREATE ON DATABASE postgres TO {PIPELINE_ROLE}")
    for name in ("postgres", "template1"):
        with psycopg.connect(server.dsn(name), autocommit=True) as connection:
            connection.execute(OWNERSHIP)


def create_database(server: PostgresServer, name: str) -> None:
    """Create an empty database, in which the pipeline's role may create schemas and publications."""
    database = sql.Identifier(name)
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {} STRATEGY file_copy").format(database))
        connection.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(database, sql.Identifier(PIPELINE_ROLE)))


def drop_database(server: PostgresServer, name: str) -> None:
    """Drop a database with everything that would hold it: sessions, prepared transactions, slots."""
    with psycopg.connect(server.dsn(name), autocommit=True) as connection:
        prepared = connection.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
        for (gid,) in prepared.fetchall():
            connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        idle = "SELECT bool_and(NOT active) IS NOT FALSE FROM pg_replication_slots WHERE database = %s"
        await_condition(lambda: connection.execute(idle, [name]).fetchone() == (True,), seconds=10)
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s", [name]
        )
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
