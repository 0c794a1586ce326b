"""The events in a test of an outage: traffic, the outage, and checks of the pipeline."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import psycopg
import pytest

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.slots import emit_marker
from tests.support.databases import execute, query_rows
from tests.support.engine_parts import copy_chunk_of
from tests.support.network import Network
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.proxy import Proxy
from tests.support.streaming import Streaming

if TYPE_CHECKING:
    from tests.protocol.outages.conftest import Pair

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
FULL = "too many clients|connection slots are reserved"
LONG = {"strategy": "fixed-delay", "attempts": 3, "delay": "1 hour"}


def copied(pipeline: PipelineUnderTest) -> PipelineUnderTest:
    """Provision a pipeline and copy its chunks."""
    pipeline.provision()
    copy_all(pipeline)
    return pipeline


def copy_all(pipeline: PipelineUnderTest) -> None:
    for chunk in pipeline.record.unfinished:
        assert not isinstance(copy_chunk_of(pipeline.pipeline, chunk), CdcError)


class Traffic:
    """Transfers between the accounts of two tables of the source, and a reader of the target that sums them up."""

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
            with contextlib.suppress(psycopg.Error):  # the server is down, or has no free connections
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
    """Write a marker at the server itself, regardless of the pipeline's path to it."""
    with connected(pipeline.databases.source) as source:
        return emit_marker(source, "test")


def applied(pipeline: PipelineUnderTest) -> int:
    """Return the LSN that the sink has applied, queried at the server itself."""
    ((lsn,),) = query_rows(pipeline.databases.target, "SELECT applied_lsn - '0/0'::pg_lsn FROM airflow_cdc.pipelines")
    return int(lsn)


def assert_equal(pipeline: PipelineUnderTest) -> None:
    for table in ("a", "b", "filler"):
        pipeline.assert_equal(f"public.{table}")


@dataclass(frozen=True)
class Scene:
    """The surroundings of an outage."""

    pair: Pair
    pipeline: PipelineUnderTest
    stream: Streaming
    monkeypatch: pytest.MonkeyPatch
    network: Network | None = None

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


def frozen(scene: Scene) -> AbstractContextManager[None]:
    """Freeze a proxy: it keeps its sockets open and forwards nothing, and never again on old connections."""
    proxy: Proxy = scene.pipeline.proxy  # type: ignore[attr-defined]
    return proxy.frozen()


def halted(side: str) -> Outage:
    """Halt all processes of a server; the kernel still answers for them."""

    @contextmanager
    def outage(scene: Scene) -> Iterator[None]:
        server = scene.pair.servers[side]
        assert server._process is not None
        family = [psutil.Process(server._process.pid)]
        family += family[0].children(recursive=True)
        for process in family:
            process.suspend()
        try:
            yield
        finally:  # the server also serves other tests
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    return outage


def dropped(scene: Scene) -> AbstractContextManager[None]:
    """Drop packets in both directions."""
    assert scene.network is not None
    return scene.network.unplugged()


@contextmanager
def read_only(scene: Scene) -> Iterator[None]:
    change = f"ALTER DATABASE {scene.database} {{}} default_transaction_read_only"
    execute(scene.pair.target.dsn(), change.format("SET") + " = on")
    yield
    execute(scene.pair.target.dsn(), change.format("RESET"))


def small_tablespace(pair: Pair) -> str:
    """Return the option of CREATE DATABASE that puts a database on the target's small disk."""
    if pair.disk is None:
        pytest.skip("only root can mount a small disk")
    with contextlib.suppress(psycopg.errors.DuplicateObject):
        execute(pair.target.dsn(), f"CREATE TABLESPACE small LOCATION '{pair.disk}'")
    return "TABLESPACE small"


def locked(table: str) -> Outage:
    """Lock a target table against writes in another transaction."""

    @contextmanager
    def outage(scene: Scene) -> Iterator[None]:
        with psycopg.connect(scene.pipeline.databases.target, application_name="careless") as session:
            session.execute(f"LOCK TABLE {table} IN SHARE MODE".encode())
            yield

    return outage


@dataclass(frozen=True)
class Case:
    """An outage, a pattern of its complaint, and whether the pipeline connects through a proxy or another network."""

    outage: Outage
    pattern: str
    through: str = ""
    network: bool = False
