"""What a stream reports and does while it waits for a server, and what it does not wait for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands import cli
from airflow_cdc_provider.engine.core.errors import CdcError, ConnectionFailed, Fenced, GateClosed
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.state.heartbeat import read_heartbeats
from tests.conftest import PIPELINE_ROLE
from tests.protocol.outages.conftest import Pair
from tests.protocol.outages.scene import LONG, applied, assert_equal, copied, copy_all, marker
from tests.support.databases import execute, query_rows
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.streaming import Streaming

pytestmark = pytest.mark.slow


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
    # The next heartbeat reports it to other processes.
    stream.until(lambda: commands.status(pipeline.pipeline)["state"] == "restarting", "the status")
    found = commands.status(pipeline.pipeline)
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
    """The command does not wait, because the address may be wrong; its orchestrator starts it again."""
    pipeline = copied(make())
    pair.servers[side].stop("immediate")
    with pytest.raises(ConnectionFailed, match="Connection refused"):
        Streaming(pipeline).end()
    pair.servers[side].start()
    stream = Streaming(pipeline)
    end = marker(pipeline)
    stream.until(lambda: applied(pipeline) >= end, "the end")
    stream.end()


STRATEGIES: dict[str, dict[str, Any]] = {
    "fixed-delay": {"strategy": "fixed-delay", "attempts": 2, "delay": "10 ms"},
    "failure-rate": {"strategy": "failure-rate", "failures": 2, "interval": "1 hour", "delay": "10 ms"},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_attempts_that_are_used_up(pair: Pair, make: Callable[..., PipelineUnderTest], strategy: str) -> None:
    pipeline = copied(make(restart=STRATEGIES[strategy]))
    stream = Streaming(pipeline)
    first = marker(pipeline)
    stream.until(lambda: applied(pipeline) >= first, "the first marker")
    pair.target.stop("immediate")
    stream.join(SECONDS)
    assert isinstance(stream.failure, ConnectionFailed)
    assert stream.attempts == 1  # the other two did not get beyond the record
    pair.target.start()
    assert commands.status(pipeline.pipeline)["state"] == "needs attention"


def test_a_failure_rate_that_is_not_reached(pair: Pair, make: Callable[..., PipelineUnderTest]) -> None:
    """Several outages follow one another, each costs an attempt, and the stream continues after each."""
    pipeline = copied(make(restart=STRATEGIES["failure-rate"] | {"failures": 300, "delay": "200 ms"}))
    stream = Streaming(pipeline)
    first = marker(pipeline)
    stream.until(lambda: applied(pipeline) >= first, "the first marker")
    for server in (pair.target, pair.source):
        server.stop("immediate")
        trouble = stream.await_trouble("onnect")
        assert (trouble["attempt"] >= 1, trouble["of"]) == (True, 300)
        server.start()
        pipeline.source("INSERT INTO public.filler SELECT count(*), 'x' FROM public.filler")
        end = marker(pipeline)
        stream.until(lambda: applied(pipeline) >= end, "the end")  # noqa: B023
    stream.end()
    assert_equal(pipeline)


def test_a_source_that_is_read_only_by_default(pair: Pair, make: Callable[..., PipelineUnderTest]) -> None:
    """A pipeline with an existing publication writes nothing there except messages into the log, which are allowed."""
    pipeline = make(restart={"strategy": "none"})
    pipeline.provision()
    execute(pair.source.dsn(), f"ALTER DATABASE {pipeline.name} SET default_transaction_read_only = on")
    copy_all(pipeline)
    stream = Streaming(pipeline)
    pipeline.source("BEGIN READ WRITE; INSERT INTO public.filler VALUES (1, 'x'); COMMIT")
    end = marker(pipeline)
    stream.until(lambda: applied(pipeline) >= end, "the end")
    stream.end()
    assert stream.attempts == 1
    assert_equal(pipeline)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_server_that_is_read_only_from_the_start(
    pair: Pair, make: Callable[..., PipelineUnderTest], side: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = make()
    server = pair.servers[side]
    execute(server.dsn(), f"ALTER DATABASE {pipeline.name} SET default_transaction_read_only = on")
    assert cli.main(["provision", "--json", "--pipeline", str(pipeline.file)]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["kind"], "default_transaction_read_only = off" in error["solution"]) == ("ServerNotReady", True)
    execute(server.dsn(), f"ALTER DATABASE {pipeline.name} RESET default_transaction_read_only")
    stream = Streaming(copied(pipeline))
    end = marker(pipeline)
    stream.until(lambda: applied(pipeline) >= end, "the end")
    stream.end()
    assert_equal(pipeline)


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
        execute(server.dsn(), f"CREATE ROLE {role} LOGIN REPLICATION IN ROLE {PIPELINE_ROLE}")
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
