"""Signals at all moments of commands, to the process alone and to its group, as terminals and service managers send
them.

A command that can be stopped ends with exit code 0; every other one reports in a sentence that it was interrupted. No
user sees a traceback, programs get one object, and nothing is left running.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import psycopg
import pytest

from airflow_cdc_provider.engine.commands import cli, dispatch
from airflow_cdc_provider.engine.core import signals
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.signals import SignalCame
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.state.files import State
from tests.commands.command_line import assert_says_little
from tests.conftest import Databases
from tests.support.databases import transaction
from tests.support.patience import SECONDS
from tests.support.pipelines import Command, Outcome, PipelineUnderTest

TABLE = "CREATE TABLE public.t (id int PRIMARY KEY, body text)"
ROWS = "INSERT INTO public.t SELECT n, 'row' FROM generate_series(1, 100) n"
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
SHAPES = {"stream": "caught_up", "snapshot": "finished", "run": "snapshot"}


@pytest.fixture(autouse=True)
def _heed_signals() -> Iterator[None]:
    """Let signals end child processes, even if the tests themselves were started to ignore them, as by ``nohup``."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> Iterator[PipelineUnderTest]:
    """Return a pipeline of one table, not provisioned."""
    under_test = PipelineUnderTest(tmp_path, databases, ["public.t"])
    under_test.source(TABLE, ROWS)
    yield under_test
    under_test.end_commands()


def send(command: Command, number: signal.Signals, to_group: bool) -> Outcome:
    """Send a signal, wait for the end, and check that the report is complete."""
    (os.killpg if to_group else os.kill)(command.process.pid, number)
    ended = command.wait()
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "Error" not in ended.stderr, ended.stderr
    assert await_condition(lambda: not command.processes(), SECONDS), command.processes()
    return ended


def check(name: str, ended: Outcome, number: signal.Signals) -> None:
    """Check the report of a command that a signal has ended."""
    if name in SHAPES:
        assert ended.code == 0, ended.stderr
        assert SHAPES[name] in ended.json
    else:
        assert ended.code == 1, ended.stderr
        error = json.loads(ended.stdout)["error"]
        assert (error["kind"], error["message"]) == ("Interrupted", f"interrupted by {number.name}")


def listens(command: Command) -> bool:
    """Return whether the command has started to catch SIGHUP, which Python does not do by default."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{command.process.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt"):
                return bool(int(line.split()[1], 16) & 1 << signal.SIGHUP - 1)
    return False


@pytest.fixture
def unanswered(databases: Databases, tmp_path: Path) -> Iterator[PipelineUnderTest]:
    """Return a pipeline between servers that accept connections and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dsn = f"postgresql://cdc@127.0.0.1:{silent.getsockname()[1]}/none"
        under_test = PipelineUnderTest(tmp_path, databases, ["public.t"], source={"dsn": dsn}, sink={"dsn": dsn})
        yield under_test
        under_test.end_commands()


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: str(number.name))
def test_while_modules_are_imported(unanswered: PipelineUnderTest, number: signal.Signals) -> None:
    """A signal that is late finds the command connecting, so that it cannot have ended before."""
    for name in ("stream", "verify"):
        command = unanswered.start(name, "--json")
        command.until(lambda command=command: listens(command), "its handlers")  # type: ignore[misc]
        check(name, send(command, number, to_group=True), number)
    command = unanswered.start("verify")
    command.until(lambda: listens(command), "its handlers")
    ended = send(command, number, to_group=False)
    said = ended.stderr.splitlines()
    assert said[0] == f"verify: interrupted by {number.name}"
    assert len(said) == 2
    assert not unanswered.state.exists()


@contextmanager
def waits(pipeline: PipelineUnderTest, where: str, kind: str) -> Iterator[Callable[[], bool]]:
    """Provide a function that returns whether a session of the pipeline's role waits for another one."""
    dsn = getattr(pipeline.databases, where)
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE usename = 'cdc' AND datname = current_database()"
        f" AND wait_event_type = 'Lock' AND wait_event = '{kind}'"
    )
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield lambda: connection.execute(query.encode()).fetchone() != (0,)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: str(number.name))
def test_while_a_server_is_waited_for(pipeline: PipelineUnderTest, number: signal.Signals) -> None:
    """Provisioning waits for older transactions, and verify for a lock, in calls that signals do not interrupt."""
    with transaction(pipeline.databases.source, "SELECT pg_current_xact_id()"):
        command = pipeline.start("provision", "--json")
        with waits(pipeline, "source", "transactionid") as waiting:
            command.until(waiting, "the wait for an older transaction")
        check("provision", send(command, number, to_group=number is signal.SIGINT), number)
    slots = f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{pipeline.pipeline.source.slot}'"
    assert await_condition(lambda: pipeline.source_rows(slots) == [(0,)], SECONDS)
    pipeline.provision()
    pipeline.copy()
    with transaction(pipeline.databases.target, "LOCK TABLE public.t IN ACCESS EXCLUSIVE MODE"):
        command = pipeline.start("verify", "--json")
        with waits(pipeline, "target", "relation") as waiting:
            command.until(waiting, "the wait for a lock")
        check("verify", send(command, number, to_group=number is signal.SIGINT), number)


def spark_log(command: Command) -> Callable[[], bool]:
    """Return a function that returns whether the command has started Spark's JVM."""
    folder = Path(os.environ["XDG_STATE_HOME"]) / "airflow-cdc" / "logs"
    return lambda: any(folder.glob(f"*-{command.process.pid}.log"))


@pytest.mark.spark
def test_while_spark_starts_and_while_it_works(pipeline: PipelineUnderTest) -> None:
    """The group includes Spark's JVM, which leaves the end to the driver."""
    command = pipeline.start("run", "--json")
    command.until(spark_log(command), "the start of Spark")
    check("run", send(command, signal.SIGINT, to_group=True), signal.SIGINT)
    assert not State(pipeline.pipeline.state).names("starting")

    command = pipeline.start("run")
    command.until(lambda: (pipeline.state / "jobs" / "stream.json").exists(), "the stream")
    ended = send(command, signal.SIGHUP, to_group=True)
    assert ended.code == 0, ended.stderr
    assert "100 rows copied, 0 changes applied, " in ended.stdout
    assert_says_little(ended)

    stream = pipeline.start("stream", "--json")
    pipeline.source("INSERT INTO public.t VALUES (1000)")
    pipeline.await_applied(stream)
    pipeline.source("INSERT INTO public.t SELECT n FROM generate_series(2000, 3000) n")
    ended = send(stream, signal.SIGTERM, to_group=True)
    assert (ended.code, ended.json["caught_up"]) == (0, False), ended.stderr
    assert pipeline.json("status")["state"] == "stopped"


def test_signals_that_were_ignored_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """``nohup`` requests this, and so do shells for background jobs."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.listening(lambda name: 1):
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_is_asked_to_stop_and_what_follows_as_well() -> None:
    asked: list[str] = []
    with signals.listening(lambda name: 1):
        with signals.ending_gracefully(lambda: asked.append("first")) as heard:
            assert heard
            signal.raise_signal(signal.SIGTERM)
        assert set(asked) == {"first"}
        with signals.ending_gracefully(lambda: asked.append("second")):
            assert "second" in asked
        assert signals.close() is None
    with signals.ending_gracefully(lambda: asked.append("third")) as heard:
        assert not heard
    assert "third" not in asked


def test_what_has_no_unit_is_broken_off() -> None:
    called: list[bool] = []
    with signals.listening(lambda name: 1):
        signals.arm()
        signals.on_interrupt(lambda: called.append(True))
        with pytest.raises(SignalCame, match="SIGINT"):
            signal.raise_signal(signal.SIGINT)
    assert called == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_begins_is_known_before_it_is_broken_off() -> None:
    known: list[bool] = []
    with signals.listening(lambda name: 1), pytest.raises(SignalCame, match="SIGTERM"):  # noqa: PT012
        signals.arm()
        with signals.deferred():
            signal.raise_signal(signal.SIGTERM)
            known.append(True)
    assert known == [True]


def test_what_begins_in_a_unit_ends_with_it() -> None:
    asked: list[str] = []
    with signals.listening(lambda name: 1):
        signals.arm()
        with signals.ending_gracefully(lambda: asked.append("stop")), signals.deferred():
            signal.raise_signal(signal.SIGTERM)
    assert "stop" in asked


def test_a_signal_before_anything_can_be_told_is_kept() -> None:
    with signals.listening(lambda name: 1):
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(SignalCame, match="SIGHUP"):
            signals.arm()


def test_a_signal_where_exceptions_are_ignored_comes_again() -> None:
    """Python ignores exceptions in a finalizer, or in a callback at a fork."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)
            deque(range(10))  # the handler runs

    with signals.listening(lambda name: 1), pytest.raises(SignalCame, match="SIGTERM"):  # noqa: PT012
        signals.arm()
        Finalized()
        Event().wait(SECONDS)


def test_a_signal_that_other_code_ignores_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: object, report: object) -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        raise ConfigError("something else fails", "Try something else.")

    monkeypatch.setattr(dispatch, "run_command", fail)
    assert cli.main(["verify", "--pipeline", "shop.yaml"]) == 1
    assert capsys.readouterr().err.startswith("verify: interrupted by SIGTERM\n")


def test_an_outcome_is_not_broken_off() -> None:
    with signals.listening(lambda name: 1):
        assert signals.close() is None
        signal.raise_signal(signal.SIGTERM)
