"""Outages of either server, each made to happen while writers write, readers read and the pipeline works.

All follow one script: the stream works, the outage begins, the stream waits and says for what, the outage ends, the
stream goes on by itself, and source and target are equal. Meanwhile a reader of the target asks all the time for a sum
over two tables that every transaction leaves as it is. The stream is the engine's own, with its restarts, but without
Spark's scheduler; one test runs the command itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from airflow_cdc_provider.demo.servers import PostgresServer, await_condition
from airflow_cdc_provider.engine import commands, connection, liveness, reading
from airflow_cdc_provider.engine.attempts import keep_trying
from airflow_cdc_provider.engine.connection import connected
from airflow_cdc_provider.engine.errors import (
    CdcError,
    ConnectionFailed,
    Fenced,
    GateClosed,
    SlotBudgetExceeded,
)
from airflow_cdc_provider.engine.run import Run, run_part
from airflow_cdc_provider.engine.sinks import postgres_record
from airflow_cdc_provider.engine.sinks.base import Record
from airflow_cdc_provider.engine.slot import drop_slot, emit_marker, read_slot, reader_name
from airflow_cdc_provider.engine.state import read_heartbeats
from tests.conftest import PIPELINE_ROLE, Databases, create_database, create_roles
from tests.pipelines import PipelineUnderTest, copy_chunk_of, execute, follow_log, query_rows
from tests.proxy import Proxy

pytestmark = pytest.mark.slow

SECONDS = 90.0
ACCOUNTS = 200
TOTAL = 2 * ACCOUNTS * 100
SCHEMA = (
    "CREATE TABLE public.a (id int PRIMARY KEY, balance int NOT NULL)",
    "CREATE TABLE public.b (id int PRIMARY KEY, balance int NOT NULL)",
    f"INSERT INTO public.a SELECT n, 100 FROM generate_series(1, {ACCOUNTS}) n",
    f"INSERT INTO public.b SELECT n, 100 FROM generate_series(1, {ACCOUNTS}) n",
    "CREATE TABLE public.filler (id int PRIMARY KEY, body text)",
)
QUICK = {"strategy": "fixed-delay", "attempts": 300, "delay": "200 ms"}
LONG = {"strategy": "fixed-delay", "attempts": 3, "delay": "1 hour"}

_numbers = itertools.count(1)


@dataclass
class Pair:
    """Two servers that are shared by this module's tests, each of which leaves them running."""

    source: PostgresServer
    target: PostgresServer
    disk: Path | None

    @property
    def servers(self) -> dict[str, PostgresServer]:
        return {"source": self.source, "target": self.target}


@pytest.fixture(scope="module")
def pair(server_directory: Path) -> Iterator[Pair]:
    """A source and a target of Postgres 18, the target with a small disk of its own where root may mount one."""
    settings = {"fsync": "off", "wal_sender_timeout": "3s", "max_connections": "30", "max_replication_slots": "60"}
    disk = server_directory / "disk"
    disk.mkdir()
    small = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=777", "tmpfs", str(disk)], capture_output=True)
    try:
        with contextlib.ExitStack() as stack:
            source, target = (
                stack.enter_context(PostgresServer.create(server_directory / f"outage-{name}", "18", settings))
                for name in ("source", "target")
            )
            for server in (source, target):
                create_roles(server)
            target.account.own(disk)
            yield Pair(source, target, disk if small.returncode == 0 else None)
    finally:
        if small.returncode == 0:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def make(pair: Pair, tmp_path: Path) -> Iterator[Callable[..., PipelineUnderTest]]:
    """Makes a pipeline over two new databases; ``source`` and ``target`` may be other ways to the same servers."""
    proxies: list[Proxy] = []
    made: list[PipelineUnderTest] = []

    def make(
        restart: dict[str, Any] = QUICK, through: str = "", tablespace: str = "", **stream: Any
    ) -> PipelineUnderTest:
        name = f"o{os.getpid()}_{next(_numbers)}"
        create_database(pair.source, name)
        execute(
            pair.target.dsn(),
            f"CREATE DATABASE {name} {tablespace}",
            f"GRANT CREATE ON DATABASE {name} TO {PIPELINE_ROLE}",
        )
        pipeline = PipelineUnderTest(
            tmp_path,
            Databases(pair.source.dsn(name), pair.target.dsn(name)),
            ["public.a", "public.b", "public.filler"],
            stream={"restart": restart, **stream},
            snapshot={"chunk_rows": 100, "parallelism": 1},
        )
        if through:
            server = pair.servers[through]
            proxies.append(Proxy(server.port))
            dsn = server.dsn(name, PIPELINE_ROLE).replace(f":{server.port}/", f":{proxies[-1].port}/")
            pipeline.change(**{"source" if through == "source" else "sink": {"dsn": dsn}})
            pipeline.proxy = proxies[-1]  # type: ignore[attr-defined]
        pipeline.source(*SCHEMA)
        made.append(pipeline)
        return pipeline

    yield make
    for pipeline in made:
        pipeline.end_commands()
    for proxy in proxies:
        proxy.close()
    for server in pair.servers.values():
        server.start()
    for pipeline in made:
        with connected(pair.source.dsn()) as source:
            names = pipeline.pipeline.source
            drop_slot(source, names.slot, reader_name(names.dsn, names.slot))


def copied(pipeline: PipelineUnderTest) -> PipelineUnderTest:
    """Provision a pipeline and copy its chunks."""
    pipeline.provision()
    copy_all(pipeline)
    return pipeline


def copy_all(pipeline: PipelineUnderTest) -> None:
    for chunk in pipeline.record.unfinished:
        assert not isinstance(copy_chunk_of(pipeline.pipeline, chunk), CdcError)


class Streaming(threading.Thread):
    """What the command ``stream`` does, in a thread: the run, and in it attempt after attempt."""

    def __init__(self, pipeline: PipelineUnderTest) -> None:
        super().__init__(name="streaming", daemon=True)
        self._pipeline = pipeline.pipeline
        self.run_: Run | None = None
        self.attempts = 0
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with run_part(self._pipeline, "stream", None) as (run, record):
                self.run_ = run
                keep_trying(run, record, self._attempt)
        except BaseException as e:
            self.failure = e

    def _attempt(self, record: Record) -> None:
        self.attempts += 1
        assert self.run_ is not None
        follow_log(self.run_, record, None)

    @property
    def restart(self) -> dict[str, Any] | None:
        """What the stream says while it waits."""
        return None if self.run_ is None else self.run_.progress.get("restart")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a state; what has ended the stream fails the test."""
        found = await_condition(lambda: self.failure is not None or condition(), SECONDS)
        if self.failure is not None:
            raise self.failure
        assert found, f"{what} did not come: {self.restart}"

    def await_trouble(self, pattern: str) -> dict[str, Any]:
        """Wait until the stream waits for the next attempt, because of an error whose message has the pattern."""
        seen: list[dict[str, Any]] = []

        def waits() -> bool:
            restart = self.restart
            if restart is not None:
                seen.append(restart)
            return restart is not None and re.search(pattern, restart["error"]["message"]) is not None

        try:
            self.until(waits, f"trouble with {pattern}")
        except AssertionError as e:
            raise AssertionError(f"{e}; seen: { {each['error']['message'] for each in seen} }") from e
        return seen[-1]

    def end(self) -> None:
        """Stop as ``stop`` does, and raise what had ended the stream before."""
        if self.run_ is not None:
            self.run_.ask_to_stop()
        self.join(SECONDS)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure


class Traffic:
    """Transfers between the accounts of two tables of the source, and a reader of the target who adds them up."""

    def __init__(self, pipeline: PipelineUnderTest) -> None:
        self._databases = pipeline.databases
        self._halt = threading.Event()
        self.transfers = self.reads = 0
        self.wrong: list[Any] = []
        self._threads = [
            threading.Thread(target=self._loop, args=[work], daemon=True) for work in (self._write, self._read)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._halt.set()
        for thread in self._threads:
            thread.join(SECONDS)
        assert self.wrong == []

    def _loop(self, work: Callable[[], None]) -> None:
        while not self._halt.is_set():
            with contextlib.suppress(psycopg.Error):  # the server is down, or full
                work()
            self._halt.wait(0.05)

    def _write(self) -> None:
        with psycopg.connect(self._databases.source, connect_timeout=2) as connection:
            while not self._halt.wait(0.01):
                with connection.transaction():
                    amount, key = 1 + self.transfers % 7, 1 + self.transfers * 37 % ACCOUNTS
                    connection.execute("UPDATE public.a SET balance = balance - %s WHERE id = %s", [amount, key])
                    connection.execute("UPDATE public.b SET balance = balance + %s WHERE id = %s", [amount, key])
                self.transfers += 1

    def _read(self) -> None:
        query = "SELECT (SELECT sum(balance) FROM public.a) + (SELECT sum(balance) FROM public.b)"
        with psycopg.connect(self._databases.target, autocommit=True, connect_timeout=2) as connection:
            while not self._halt.wait(0.01):
                found = connection.execute(query.encode()).fetchone()
                self.reads += 1
                if found != (TOTAL,):
                    self.wrong.append(found)


def marker(pipeline: PipelineUnderTest) -> int:
    """A marker that is written at the server itself, whatever way the pipeline takes to it."""
    with connected(pipeline.databases.source) as source:
        return emit_marker(source, "test")


def applied(pipeline: PipelineUnderTest) -> int:
    """The LSN that the sink has applied, asked of the server itself."""
    ((lsn,),) = query_rows(pipeline.databases.target, "SELECT applied_lsn - '0/0'::pg_lsn FROM airflow_cdc.pipelines")
    return int(lsn)


def assert_equal(pipeline: PipelineUnderTest) -> None:
    for table in ("a", "b", "filler"):
        pipeline.assert_equal(f"public.{table}")


# -- the outages -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """Where an outage happens."""

    pair: Pair
    pipeline: PipelineUnderTest
    stream: Streaming
    monkeypatch: pytest.MonkeyPatch

    @property
    def database(self) -> str:
        return self.pipeline.name


Outage = Callable[[Scene], AbstractContextManager[None]]


def stopped(side: str, mode: Any) -> Outage:
    @contextmanager
    def outage(scene: Scene) -> Iterator[None]:
        scene.pair.servers[side].stop(mode)
        yield
        scene.pair.servers[side].start()

    return outage


@contextmanager
def read_only(scene: Scene) -> Iterator[None]:
    change = f"ALTER DATABASE {scene.database} {{}} default_transaction_read_only"
    execute(scene.pair.target.dsn(), change.format("SET") + " = on")
    yield
    execute(scene.pair.target.dsn(), change.format("RESET"))


FULL = "too many clients|connection slots are reserved"


def full(side: str) -> Outage:
    """All connections of a server are taken, after those of the pipeline have been ended."""

    @contextmanager
    def outage(scene: Scene) -> Iterator[None]:
        dsn = scene.pair.servers[side].dsn()
        with contextlib.ExitStack() as stack:
            others = "backend_type IN ('client backend', 'walsender') AND application_name LIKE 'airflow-cdc%'"
            first = stack.enter_context(psycopg.connect(dsn, autocommit=True, application_name="guest"))
            with contextlib.suppress(psycopg.OperationalError):
                while True:
                    stack.enter_context(psycopg.connect(dsn, application_name="guest"))
            while scene.stream.restart is None or not re.search(FULL, scene.stream.restart["error"]["message"]):
                first.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}".encode())
                with contextlib.suppress(psycopg.OperationalError):
                    stack.enter_context(psycopg.connect(dsn, application_name="guest"))
            yield

    return outage


@contextmanager
def disk_full(scene: Scene) -> Iterator[None]:
    assert scene.pair.disk is not None
    scene.pipeline.source(
        "INSERT INTO public.filler SELECT n, (SELECT string_agg(md5(n::text || i), '') FROM generate_series(1, 60) i)"
        " FROM generate_series(1, 12000) n"
    )
    yield
    subprocess.run(["mount", "-o", "remount,size=300m", str(scene.pair.disk)], check=True)


@contextmanager
def locked(scene: Scene) -> Iterator[None]:
    with psycopg.connect(scene.pipeline.databases.target, application_name="careless") as session:
        session.execute("LOCK TABLE public.a IN SHARE MODE")
        yield


def frozen(scene: Scene) -> AbstractContextManager[None]:
    """A proxy keeps its sockets open and forwards nothing, on old connections for ever."""
    proxy: Proxy = scene.pipeline.proxy  # type: ignore[attr-defined]
    return proxy.frozen()


def halted(side: str, which: Callable[[psutil.Process], bool] = lambda process: True) -> Outage:
    """Processes of a server are stopped: the kernel goes on to answer for them."""

    @contextmanager
    def outage(scene: Scene) -> Iterator[None]:
        server = scene.pair.servers[side]
        assert server._process is not None
        family = [psutil.Process(server._process.pid)]
        family += family[0].children(recursive=True)
        chosen = [process for process in family if which(process)]
        assert chosen
        for process in chosen:
            process.suspend()
        try:
            yield
        finally:  # the server serves the other tests too
            for process in chosen:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    return outage


def is_walsender(process: psutil.Process) -> bool:
    return "walsender" in " ".join(process.cmdline())


@dataclass(frozen=True)
class Case:
    """An outage, a pattern of the complaint, and where the pipeline's way leads through a proxy."""

    outage: Outage
    pattern: str
    through: str = ""


SILENT = "sent nothing for 3 seconds"
CUT = "server closed the connection|SSL SYSCALL|no answer|timeout expired"
CASES = {
    "the target is shut down": Case(stopped("target", "fast"), "Connection refused"),
    "the target crashes": Case(stopped("target", "immediate"), "Connection refused"),
    "the source is shut down": Case(stopped("source", "fast"), "Connection refused"),
    "the source crashes": Case(stopped("source", "immediate"), "Connection refused"),
    "the target is read-only": Case(read_only, "read-only transaction"),
    "the target is out of connections": Case(full("target"), FULL),
    "the source is out of connections": Case(full("source"), FULL),
    "the target's disk is full": Case(disk_full, "No space left on device"),
    "a lock on a target table": Case(
        locked, r"lock timeout.*session \d+ of postgres \(careless.*ShareLock on public.a"
    ),
    "half-open connections to the source": Case(frozen, SILENT, "source"),
    "half-open connections to the target": Case(frozen, CUT, "target"),
    "the walsender hangs": Case(halted("source", is_walsender), SILENT),
    "the source hangs": Case(halted("source"), SILENT),
    "the target hangs": Case(halted("target"), CUT),
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeouts of production, shortened."""
    monkeypatch.setattr(liveness, "SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(liveness, "ANSWER_SECONDS", 2)
    monkeypatch.setattr(postgres_record, "LOCK_SECONDS", 1.0)
    monkeypatch.setitem(connection._TRANSPORT, "connect_timeout", "2")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("title", CASES)
def test_the_stream_survives(
    pair: Pair, make: Callable[..., PipelineUnderTest], monkeypatch: pytest.MonkeyPatch, title: str
) -> None:
    case = CASES[title]
    tablespace = ""
    if case.outage is disk_full:
        if pair.disk is None:
            pytest.skip("only root can mount a small disk")
        with contextlib.suppress(psycopg.errors.DuplicateObject):
            execute(pair.target.dsn(), f"CREATE TABLESPACE small LOCATION '{pair.disk}'")
        tablespace = "TABLESPACE small"
    pipeline = copied(make(through=case.through, tablespace=tablespace))
    with Traffic(pipeline) as traffic:
        stream = Streaming(pipeline)
        first = marker(pipeline)
        stream.until(lambda: applied(pipeline) >= first, "the first marker")
        with case.outage(Scene(pair, pipeline, stream, monkeypatch)):
            trouble = stream.await_trouble(case.pattern)
            assert trouble["attempt"] >= 1
            assert trouble["of"] == 300
            before = stream.attempts
        transfers = traffic.transfers
        assert await_condition(lambda: traffic.transfers > transfers, SECONDS)
        last = marker(pipeline)
        stream.until(lambda: applied(pipeline) >= last, "the last marker")
        assert stream.attempts > before
        assert stream.restart is None
    end = marker(pipeline)
    stream.until(lambda: applied(pipeline) >= end, "the end")
    stream.end()
    assert traffic.transfers > 0
    assert traffic.reads > 0
    assert_equal(pipeline)


# -- what is said and done meanwhile -----------------------------------------------------------------------


def test_status_stop_and_the_heartbeat_while_the_stream_waits(
    pair: Pair, make: Callable[..., PipelineUnderTest]
) -> None:
    pipeline = copied(make(restart=LONG))
    stream = Streaming(pipeline)
    first = marker(pipeline)
    stream.until(lambda: applied(pipeline) >= first, "the first marker")
    assert commands.status(pipeline.pipeline)["state"] == "streaming"
    pair.target.stop("immediate")
    trouble = stream.await_trouble("onnect")
    found = commands.status(pipeline.pipeline)
    assert found["state"] == "restarting"
    assert found["restart"] == trouble
    assert (trouble["attempt"], trouble["of"]) == (1, 3)
    assert 3500 < trouble["next_attempt_at"] - time.time() <= 3600
    assert found["last_error"] == trouble["error"]
    assert found["unreachable"].keys() == {"sink"}
    assert found["slot"]["retained_bytes"] > 0
    shown = pipeline.run("status").stdout
    assert "restarting" in shown
    assert "restart  attempt 1 of 3 in" in shown
    assert pipeline.json("status")["restart"]["error"]["message"] == trouble["error"]["message"]
    assert stream.run_ is not None
    (beat,) = [beat for beat in read_heartbeats(stream.run_.state) if beat.part == "stream"]
    assert await_condition(lambda: read_heartbeats(stream.run_.state)[-1].at > beat.at, SECONDS)  # type: ignore[union-attr]
    assert commands.stop(pipeline.pipeline) == {"asked": ["stream"]}
    stream.join(SECONDS)
    assert not stream.is_alive()
    assert stream.failure is None
    assert stream.attempts == 1
    with pytest.raises(ConnectionFailed):
        commands.status(pipeline.pipeline)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_server_that_is_down_at_the_start_ends_the_command(
    pair: Pair, make: Callable[..., PipelineUnderTest], side: str
) -> None:
    """Nobody waits for what may be a wrong address; who starts commands starts this one again."""
    pipeline = copied(make())
    pair.servers[side].stop("immediate")
    with pytest.raises(ConnectionFailed, match="Connection refused"):
        Streaming(pipeline).end()
    pair.servers[side].start()
    stream = Streaming(pipeline)
    end = marker(pipeline)
    stream.until(lambda: applied(pipeline) >= end, "the end")
    stream.end()


def test_attempts_that_are_used_up(pair: Pair, make: Callable[..., PipelineUnderTest]) -> None:
    pipeline = copied(make(restart={"attempts": 2, "delay": "10 ms"}))
    stream = Streaming(pipeline)
    first = marker(pipeline)
    stream.until(lambda: applied(pipeline) >= first, "the first marker")
    pair.target.stop("immediate")
    stream.join(SECONDS)
    assert isinstance(stream.failure, ConnectionFailed)
    assert stream.attempts == 1  # the two others did not get beyond the record
    pair.target.start()
    assert commands.status(pipeline.pipeline)["state"] == "failed"


@pytest.mark.parametrize("error", [GateClosed, Fenced])
def test_what_is_refused_is_not_tried_again(
    pair: Pair, make: Callable[..., PipelineUnderTest], error: type[CdcError]
) -> None:
    pipeline = copied(make(restart={"delay": "1 second"}))
    stream = Streaming(pipeline)
    first = marker(pipeline)
    stream.until(lambda: applied(pipeline) >= first, "the first marker")
    pair.source.stop("fast")
    stream.await_trouble("")
    if error is Fenced:
        pipeline.target("UPDATE airflow_cdc.pipelines SET epoch = epoch + 1")
    else:
        pipeline.target('UPDATE airflow_cdc.pipelines SET source = source || \'{"system": "1"}\'')
    pair.source.start()
    stream.join(SECONDS)
    assert isinstance(stream.failure, error)


SETTINGS = (
    "statement_timeout",
    "lock_timeout",
    "idle_in_transaction_session_timeout",
    "transaction_timeout",
    "idle_session_timeout",
)


def test_timeouts_of_role_and_database_do_not_reach_us(pair: Pair, make: Callable[..., PipelineUnderTest]) -> None:
    """A read of a locked table, and a commit into one, take longer than any of the timeouts."""
    pipeline = make(restart={"strategy": "none"})
    names = {}
    for side, server in pair.servers.items():
        role = f"hurried_{side}_{pipeline.name}"
        execute(server.dsn(), f"CREATE ROLE {role} LOGIN SUPERUSER REPLICATION")
        for setting in SETTINGS:
            execute(server.dsn(), f"ALTER ROLE {role} SET {setting} = '300ms'")
            execute(server.dsn(), f"ALTER DATABASE {pipeline.name} SET {setting} = '300ms'")
        names[side] = server.dsn(pipeline.name, role)
    pipeline.change(source={"dsn": names["source"]}, sink={"dsn": names["target"]})
    pipeline.source("INSERT INTO public.filler VALUES (1, 'x')")
    pipeline.provision()
    with kept_waiting(pair.source.dsn(pipeline.name)):
        copying = threading.Thread(target=copy_all, args=[pipeline])
        copying.start()
    copying.join(SECONDS)
    stream = Streaming(pipeline)
    with kept_waiting(pair.target.dsn(pipeline.name)):
        pipeline.source("UPDATE public.filler SET body = 'y'")
    end = marker(pipeline)
    stream.until(lambda: applied(pipeline) >= end, "the end")
    stream.end()
    assert stream.attempts == 1
    assert_equal(pipeline)


@contextmanager
def kept_waiting(dsn: str) -> Iterator[None]:
    """Hold a lock on the filler until one of our transactions has waited for it for a second."""
    waits = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE 'airflow-cdc%'"
        " AND clock_timestamp() - xact_start > interval '1 second'"
    )
    with psycopg.connect(dsn, options="-c idle_in_transaction_session_timeout=0 -c transaction_timeout=0") as session:
        session.execute(b"LOCK TABLE public.filler IN ACCESS EXCLUSIVE MODE")
        yield
        assert await_condition(lambda: query_rows(dsn, waits) == [(1,)], SECONDS)


# -- the slot's budget -------------------------------------------------------------------------------------


def overflow(pipeline: PipelineUnderTest) -> None:
    """Write more log than the budget of these tests."""
    pipeline.source("SELECT pg_logical_emit_message(false, 'test', repeat('x', 1000000)) FROM generate_series(1, 3)")


@pytest.mark.parametrize("action", ["warn", "stop", "drop-slot"])
def test_the_budget_is_kept_while_the_target_is_down(
    pair: Pair, make: Callable[..., PipelineUnderTest], action: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = copied(make(restart=QUICK | {"attempts": 10_000}, max_retained_wal="2MiB", on_max_retained_wal=action))
    stream = Streaming(pipeline)
    first = marker(pipeline)
    stream.until(lambda: applied(pipeline) >= first, "the first marker")
    pair.target.stop("immediate")
    stream.await_trouble("Connection refused")
    overflow(pipeline)
    slot = pipeline.pipeline.source.slot
    if action == "warn":
        stream.until(lambda: "of stream.max_retained_wal (2.0 MiB)" in caplog.text, "the warning")
        budget = commands.status(pipeline.pipeline)["slot"]["budget"]
        assert budget == {"max_retained_bytes": 2 << 20, "action": "warn", "level": "exceeded"}
        assert "of 2.0 MiB (beyond the budget)" in pipeline.run("status").stdout
        pair.target.start()
        end = marker(pipeline)
        stream.until(lambda: applied(pipeline) >= end, "the end")
        stream.end()
        return
    stream.join(SECONDS)
    assert isinstance(stream.failure, SlotBudgetExceeded)
    assert "stream.max_retained_wal is 2.0 MiB" in stream.failure.message
    with connected(pair.source.dsn()) as source:
        assert (read_slot(source, slot) is None) == (action == "drop-slot")


# -- the snapshot ------------------------------------------------------------------------------------------


@contextmanager
def backend_gone(scene: Scene) -> Iterator[None]:
    execute(
        scene.pair.source.dsn(),
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'airflow-cdc read'",
    )
    yield


@contextmanager
def sink_gone(scene: Scene) -> Iterator[None]:
    execute(
        scene.pair.target.dsn(),
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'airflow-cdc sink%'",
    )
    yield


SNAPSHOT_CASES = {
    "the source crashes": Case(stopped("source", "immediate"), "airflow-cdc|connection|terminat"),
    "the target crashes": Case(stopped("target", "immediate"), "connection"),
    "a reader is ended": Case(backend_gone, "terminating connection|no COPY in progress|server closed"),
    "a writer is ended": Case(sink_gone, "terminating connection|server closed|already closed"),
    "half-open connections to the source": Case(
        frozen, "given no answer for 2 seconds, and the server does not", "source"
    ),
    "half-open connections to the target": Case(frozen, "server closed the connection|already closed", "target"),
    "the source hangs": Case(halted("source"), "given no answer for 2 seconds, and the server does not answer"),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("title", SNAPSHOT_CASES)
def test_the_snapshot_survives(
    pair: Pair, make: Callable[..., PipelineUnderTest], monkeypatch: pytest.MonkeyPatch, title: str
) -> None:
    """The outage comes when the second chunk is about to be read; the first one stays as it is."""
    case = SNAPSHOT_CASES[title]
    pipeline = make(through=case.through)
    pipeline.provision()
    errors: list[CdcError] = []
    chunks = itertools.count()

    def attempt(run: Run, record: Record) -> None:
        for chunk in record.unfinished:
            result = copy_chunk_of(run.pipeline, chunk, run.epoch)
            if isinstance(result, CdcError):
                errors.append(result)
                raise result

    with contextlib.ExitStack() as outage, run_part(pipeline.pipeline, "snapshot-0", None) as (run, record):
        scene = Scene(pair, pipeline, None, monkeypatch)  # type: ignore[arg-type]

        def strike(name: str) -> None:
            if name == "before-chunk-read" and next(chunks) == 1:
                outage.enter_context(case.outage(scene))

        monkeypatch.setattr(reading, "failpoint", strike)
        monkeypatch.setattr(Run, "wait", lambda run, seconds: outage.close())
        first = pipeline.finished_chunks()
        keep_trying(run, record, lambda record: attempt(run, record))
    assert first == {}
    assert 1 <= len(errors) <= 4
    assert re.search(case.pattern, errors[0].message)
    assert not pipeline.record.unfinished
    pipeline.apply()
    assert_equal(pipeline)


# -- the command -------------------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_command_goes_on(pair: Pair, make: Callable[..., PipelineUnderTest]) -> None:
    """One process outlives crashes of the source and of the target, and ends in good order while it waits."""
    pipeline = copied(make(restart={"attempts": 100, "delay": "500 ms"}))
    with Traffic(pipeline) as traffic:
        command = pipeline.start("stream")

        def caught_up() -> None:
            lsn = marker(pipeline)
            command.until(lambda: applied(pipeline) >= lsn, "the stream at the marker")

        def waits() -> bool:
            return bool(commands.status(pipeline.pipeline)["state"] == "restarting")

        caught_up()
        pid = command.process.pid
        for server in (pair.source, pair.target):
            server.stop("immediate")
            command.until(waits, "the wait")
            server.start()
            caught_up()
        assert traffic.transfers > 0
    caught_up()
    assert_equal(pipeline)
    assert command.process.pid == pid
    assert [job["part"] for job in commands.status(pipeline.pipeline)["jobs"]] == ["stream"]
    pair.target.stop("immediate")
    command.until(waits, "the last wait")
    command.terminate()
    outcome = command.wait()
    assert outcome.code == 0, outcome.stderr[-3000:]
    assert "Attempt 1 of 100 begins in 0.5 s." in outcome.stderr
