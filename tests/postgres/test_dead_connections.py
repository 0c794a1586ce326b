"""Calls that cannot be interrupted: when they are given up, and when not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from airflow_cdc_provider.engine.core.errors import StreamFailed
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres import dead_connections
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.dead_connections import Calls, find_session_problem
from tests.conftest import Databases
from tests.support.proxy import Proxy


@pytest.fixture
def mute() -> Iterator[int]:
    """Return the port of a server that accepts connections but never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_connections, "SILENCE_SECONDS", 0.1)
    monkeypatch.setattr(dead_connections, "ANSWER_SECONDS", 1)


def test_a_call_to_a_dead_server_is_given_up_before_its_session_is_known(mute: int) -> None:
    calls, over = Calls(f"postgresql://127.0.0.1:{mute}/d"), threading.Event()
    with pytest.raises(StreamFailed, match="the server does not answer"):
        calls(over.wait)
    assert calls.over
    over.set()
    calls.end()


@pytest.mark.parametrize("error", [TimeoutError("its own"), ValueError("its own")])
def test_what_a_call_raises_is_raised(databases: Databases, error: Exception) -> None:
    calls = Calls(databases.source)

    def fail() -> None:
        raise error

    with pytest.raises(type(error), match="its own"):
        calls(fail)
    calls.end()


def test_a_long_call_to_a_server_that_answers_goes_on(databases: Databases) -> None:
    calls, over = Calls(databases.source), threading.Event()
    threading.Timer(1.0, over.set).start()
    assert calls(over.wait)
    calls.end()


def test_a_session_may_be_with_any_host_of_a_dsn(databases: Databases) -> None:
    there, here = (urlsplit(dsn) for dsn in (databases.target, databases.source))
    both = here._replace(netloc=f"{there.netloc},{here.netloc.rpartition('@')[2]}", path="/postgres").geturl()
    with connected(here._replace(path="/postgres").geturl()) as session:
        pid = session.info.backend_pid
        assert find_session_problem(both, pid) is None
    assert await_condition(lambda: find_session_problem(both, pid) == "the server does not know it", 60)


def test_every_host_of_a_dsn_has_its_port(databases: Databases, mute: int) -> None:
    address = databases.source.rpartition("@")[2]
    assert find_session_problem(f"postgresql://127.0.0.1:{mute},{address}", None) is None
    assert (
        find_session_problem(f"postgresql://127.0.0.1:{mute},127.0.0.1:{mute}/d", None) == "the server does not answer"
    )


def test_a_question_ends_if_the_server_falls_silent_during_it(databases: Databases) -> None:
    parts = urlsplit(databases.source)
    proxy = Proxy(parts.port or 5432, silent_at=b"pg_stat_activity")
    login = parts.netloc.rpartition("@")[0]
    dsn = parts._replace(netloc=f"{login}@{proxy.host}:{proxy.port}").geturl()
    with connected(databases.source) as session:
        assert find_session_problem(dsn, session.info.backend_pid) is None
    proxy.close()
    assert find_session_problem(dsn, 1) == "the server does not answer"
