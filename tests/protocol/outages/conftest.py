"""Two servers for outages, and pipelines over them."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine.postgres import connection, dead_connections
from airflow_cdc_provider.engine.postgres.connection import connected
from airflow_cdc_provider.engine.postgres.slots import reader_name
from airflow_cdc_provider.engine.sinks.postgres import fence as postgres_fence
from airflow_cdc_provider.engine.sources.postgres.provision.slot import drop_slot
from local_servers.postgres import PostgresServer
from tests.conftest import PIPELINE_ROLE, Databases, create_database, create_roles
from tests.protocol.outages.scene import QUICK, SCHEMA
from tests.support.databases import execute
from tests.support.network import Network
from tests.support.pipelines import PipelineUnderTest
from tests.support.proxy import Proxy

_numbers = itertools.count(1)


@dataclass
class Pair:
    """Two servers that the tests of outages share; each test leaves them running."""

    source: PostgresServer
    target: PostgresServer
    disk: Path | None

    @property
    def servers(self) -> dict[str, PostgresServer]:
        return {"source": self.source, "target": self.target}


@pytest.fixture(scope="session")
def pair(server_directory: Path) -> Iterator[Pair]:
    """Run a source and a target of Postgres 18; if root may mount one, the target has its own small disk."""
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
    """Return a factory of pipelines over two new databases; ``source`` and ``target`` may be proxies of the servers."""
    proxies: list[Proxy] = []
    made: list[PipelineUnderTest] = []

    def make(
        restart: dict[str, Any] = QUICK,
        through: str = "",
        tablespace: str = "",
        network: Network | None = None,
        **stream: Any,
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
            proxies.append(Proxy(server.port, network and network.listener()))
            address = f"@{proxies[-1].host}:{proxies[-1].port}/"
            dsn = server.dsn(name, PIPELINE_ROLE).replace(f"@127.0.0.1:{server.port}/", address)
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


@pytest.fixture
def network() -> Iterator[Network]:
    """Return a network whose packets can be dropped."""
    made = Network()
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the timeouts of production, shortened."""
    monkeypatch.setattr(dead_connections, "SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(dead_connections, "ANSWER_SECONDS", 2)
    monkeypatch.setattr(postgres_fence, "LOCK_SECONDS", 1.0)
    monkeypatch.setitem(connection._TRANSPORT, "connect_timeout", "2")
    for name in ("idle", "interval"):
        monkeypatch.setitem(connection._TRANSPORT, f"keepalives_{name}", "1")
