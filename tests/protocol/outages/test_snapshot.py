"""Outages of either server in the middle of a snapshot."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.runs.restarting import keep_trying
from airflow_cdc_provider.engine.runs.run import Run, run_part
from airflow_cdc_provider.engine.sources.postgres.reading import snapshot_read
from tests.protocol.outages.conftest import Pair
from tests.protocol.outages.scene import (
    FULL,
    Case,
    Outage,
    Scene,
    assert_equal,
    dropped,
    frozen,
    halted,
    locked,
    read_only,
    small_tablespace,
    stopped,
)
from tests.support.databases import execute, query_rows
from tests.support.engine_parts import copy_chunk_of
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow


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


def full(side: str) -> Outage:
    """Let other sessions take all connections of a server."""

    @contextmanager
    def outage(scene: Scene) -> Iterator[None]:
        with contextlib.ExitStack() as guests:
            with contextlib.suppress(psycopg.OperationalError):
                while True:
                    guests.enter_context(psycopg.connect(scene.pair.servers[side].dsn(), application_name="guest"))
            yield

    return outage


@contextmanager
def disk_full(scene: Scene) -> Iterator[None]:
    """Shrink the target's disk to its current contents."""
    assert scene.pair.disk is not None
    found = os.statvfs(scene.pair.disk)
    for blocks in (found.f_blocks - found.f_bfree, found.f_blocks):
        size = f"remount,size={blocks * found.f_bsize}"
        subprocess.run(["mount", "-o", size, str(scene.pair.disk)], check=True)
        if blocks != found.f_blocks:
            yield


# A chunk notices such an outage only if it needs a new connection.
BETWEEN_CHUNKS = {
    "the source is out of connections": Case(full("source"), FULL),
    "the target is out of connections": Case(full("target"), FULL),
}
SNAPSHOT_CASES = BETWEEN_CHUNKS | {
    "the source crashes": Case(stopped("source", "immediate"), "airflow-cdc|connection|terminat"),
    "the target crashes": Case(stopped("target", "immediate"), "connection"),
    "a reader is ended": Case(backend_gone, "terminating connection|no COPY in progress|server closed"),
    "a writer is ended": Case(sink_gone, "terminating connection|server closed"),
    "half-open connections to the source": Case(
        frozen, "given no answer for 2 seconds, and the server does not", "source"
    ),
    "half-open connections to the target": Case(
        frozen, "given no answer for 2 seconds, and the server does not", "target"
    ),
    "the source hangs": Case(halted("source"), "given no answer for 2 seconds, and the server does not answer"),
    "the target is read-only": Case(read_only, "read-only transaction"),
    "a lock on a target table": Case(locked("public.b"), "lock timeout"),
    "the target's disk is full": Case(disk_full, "No space left on device"),
    "packets to the source are lost": Case(
        dropped, "given no answer for 2 seconds, and the server does not", "source", network=True
    ),
    "packets to the target are lost": Case(
        dropped, "server closed the connection|timed out|no answer", "target", network=True
    ),
}


def assert_whole_chunks(pipeline: PipelineUnderTest) -> None:
    """Check that readers of the target see the rows of finished chunks only."""
    due = Counter[str]({"public.a": 0, "public.b": 0, "public.filler": 0})
    for (table, _), (*_, count) in pipeline.finished_chunks().items():
        due[table] += count
    assert {table: pipeline.target_rows(f"SELECT count(*) FROM {table}") for table in due} == {
        table: [(count,)] for table, count in due.items()
    }


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("title", SNAPSHOT_CASES)
def test_the_snapshot_survives(
    pair: Pair,
    make: Callable[..., PipelineUnderTest],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    title: str,
) -> None:
    """The outage happens just before the second chunk is read; the first chunk stays as it is."""
    case = SNAPSHOT_CASES[title]
    network = request.getfixturevalue("network") if case.network else None
    tablespace = small_tablespace(pair) if case.outage is disk_full else ""
    pipeline = make(through=case.through, tablespace=tablespace, network=network)
    pipeline.provision()
    errors: list[CdcError] = []
    chunks = itertools.count()

    def attempt(run: Run, record: Record) -> None:
        for chunk in record.unfinished:
            if title in BETWEEN_CHUNKS:
                strike("before-chunk-read")
            try:
                result = copy_chunk_of(run.pipeline, chunk, run.epoch)
            except CdcError as e:
                result = e
            if isinstance(result, CdcError):
                errors.append(result)
                raise result

    with contextlib.ExitStack() as outage, run_part(pipeline.pipeline, "snapshot-0", None) as (run, record):
        scene = Scene(pair, pipeline, None, monkeypatch, network)  # type: ignore[arg-type]

        def strike(name: str) -> None:
            if name == "before-chunk-read" and next(chunks) == 1:
                outage.enter_context(case.outage(scene))

        if title not in BETWEEN_CHUNKS:
            monkeypatch.setattr(snapshot_read, "failpoint", strike)

        def wait(run: Run, seconds: float) -> None:
            outage.close()
            assert_whole_chunks(pipeline)

        monkeypatch.setattr(Run, "wait", wait)
        first = pipeline.finished_chunks()
        keep_trying(run, record, lambda record: attempt(run, record))
    assert first == {}
    assert 1 <= len(errors) <= 4
    assert re.search(case.pattern, errors[0].message)
    assert not pipeline.record.unfinished
    pipeline.apply()
    assert_equal(pipeline)


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_command_goes_on(pair: Pair, make: Callable[..., PipelineUnderTest]) -> None:
    """The target crashes while a chunk is written; finished chunks stay, and the command succeeds."""
    pipeline = make(restart={"attempts": 100, "delay": "500 ms"})
    pipeline.provision()
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE 'airflow%'"
    with contextlib.suppress(psycopg.Error), psycopg.connect(pipeline.databases.target) as session:
        session.execute("LOCK TABLE public.b IN SHARE MODE")
        command = pipeline.start("snapshot")
        command.until(lambda: query_rows(pair.target.dsn(), waits) == [(1,)], "the chunk that waits")
        first = pipeline.finished_chunks()
        pair.target.stop("immediate")
    command.until(lambda: commands.status(pipeline.pipeline)["state"] == "restarting", "the wait")
    pair.target.start()
    outcome = command.wait()
    assert outcome.code == 0, outcome.stderr[-3000:]
    assert "Attempt 1 of 100 begins in 0.5 s." in outcome.stderr
    assert first
    assert pipeline.finished_chunks().items() > first.items()
    pipeline.apply()
    assert_equal(pipeline)
