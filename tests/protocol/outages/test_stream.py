"""Outages of either server while writers write, readers read and the pipeline works.

All tests follow one script: the stream works, the outage begins, the stream waits and reports why, and the outage ends.
The stream then continues automatically, and source and target are equal. Meanwhile a reader of the target repeatedly
queries a sum over two tables that no transaction changes. The stream is the engine's own, with its restarts, but
without Spark's scheduler; one test runs the command itself.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import psycopg
import pytest
from psycopg import pq

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.waiting import await_condition
from tests.protocol.outages.conftest import Pair
from tests.protocol.outages.scene import (
    FULL,
    SECONDS,
    Case,
    Outage,
    Scene,
    Traffic,
    applied,
    assert_equal,
    copied,
    dropped,
    frozen,
    halted,
    locked,
    marker,
    read_only,
    small_tablespace,
    stopped,
)
from tests.support.databases import execute, query_rows
from tests.support.pipelines import PipelineUnderTest
from tests.support.streaming import Streaming

pytestmark = pytest.mark.slow


def full(side: str) -> Outage:
    """Take all connections of a server, after ending those of the pipeline."""

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
def standby(scene: Scene) -> Iterator[None]:
    """Bring the target back as a standby, and promote it."""
    server = scene.pair.target
    server.stop("fast")
    signal = server.data_directory / "standby.signal"
    signal.touch()
    server.account.own(signal)
    server.start()
    try:
        yield
    finally:
        execute(server.dsn(), "SELECT pg_promote()")


@contextmanager
def no_walsender(scene: Scene) -> Iterator[None]:
    """Let other readers take all walsenders of the source."""
    conninfo = f"{scene.pair.source.dsn()}?replication=true&application_name=guest"
    ours = "SELECT pg_terminate_backend(pid) FROM pg_stat_replication WHERE application_name <> 'guest'"
    guests = [pq.PGconn.connect(conninfo.encode())]
    while guests[-1].status == pq.ConnStatus.OK:
        guests.append(pq.PGconn.connect(conninfo.encode()))
    while scene.stream.restart is None or "max_wal_senders" not in scene.stream.restart["error"]["message"]:
        execute(scene.pair.source.dsn(), ours)
        guests.append(pq.PGconn.connect(conninfo.encode()))
    yield
    for guest in guests:
        guest.finish()


@contextmanager
def walsender_halted(scene: Scene) -> Iterator[None]:
    """Halt the walsender while it waits; a walsender that is halted at work looks the same as a busy one."""
    waits = "wait_event_type IN ('Activity', 'Client')"
    query = f"SELECT pid, {waits} FROM pg_stat_activity WHERE backend_type = 'walsender'"
    stopped: list[psutil.Process] = []

    def at_rest() -> bool:
        while stopped:
            stopped.pop().resume()
        ((pid, _),) = query_rows(scene.pair.source.dsn(), query)
        stopped.append(psutil.Process(pid))
        stopped[0].suspend()
        return query_rows(scene.pair.source.dsn(), query) == [(pid, True)]

    try:
        assert await_condition(at_rest, SECONDS)
        yield
    finally:  # the server also serves other tests
        with contextlib.suppress(psutil.NoSuchProcess):
            stopped[0].resume()


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
        locked("public.a"), r"lock timeout.*session \d+ of postgres \(careless.*ShareLock on public.a"
    ),
    "half-open connections to the source": Case(frozen, SILENT, "source"),
    "half-open connections to the target": Case(frozen, CUT, "target"),
    "the walsender hangs": Case(walsender_halted, SILENT),
    "the source hangs": Case(halted("source"), SILENT),
    "packets to the source are lost": Case(dropped, f"{SILENT}|timeout expired", "source", network=True),
    "packets to the target are lost": Case(dropped, f"{CUT}|timed out", "target", network=True),
    "the target is a standby": Case(standby, r"is a standby: cannot execute .* in a read-only transaction"),
    "the source is out of walsenders": Case(no_walsender, "max_wal_senders"),
    "the target hangs": Case(halted("target"), CUT),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("title", CASES)
def test_the_stream_survives(
    pair: Pair,
    make: Callable[..., PipelineUnderTest],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    title: str,
) -> None:
    case = CASES[title]
    tablespace = ""
    network = request.getfixturevalue("network") if case.network else None
    if case.outage is disk_full:
        tablespace = small_tablespace(pair)
    pipeline = copied(make(through=case.through, tablespace=tablespace, network=network))
    with Traffic(pipeline) as traffic:
        stream = Streaming(pipeline)
        first = marker(pipeline)
        stream.until(lambda: applied(pipeline) >= first, "the first marker")
        with case.outage(Scene(pair, pipeline, stream, monkeypatch, network)):
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


@pytest.mark.thorough
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_command_goes_on(pair: Pair, make: Callable[..., PipelineUnderTest]) -> None:
    """One process survives crashes of the source and of the target, and ends in good order while it waits."""
    pipeline = copied(make(restart={"attempts": 100, "delay": "500 ms"}))
    with Traffic(pipeline) as traffic:
        command = pipeline.start("stream")

        def caught_up() -> None:
            lsn = marker(pipeline)
            command.until(lambda: applied(pipeline) >= lsn and not waits(), "the stream at the marker")

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
