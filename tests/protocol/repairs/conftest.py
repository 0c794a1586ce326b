"""The pipeline of the tests of repairs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from local_servers.postgres import PostgresServer
from tests.conftest import Databases
from tests.protocol.repairs.scene import ROWS, TABLE, Make, Mode
from tests.support.pipelines import PipelineUnderTest


@pytest.fixture
def make_pipeline(databases: Databases, tmp_path: Path) -> Iterator[Make]:
    """Return a factory of pipelines of ``public.t`` whose snapshot is done and whose stream has applied a change."""
    made: list[PipelineUnderTest] = []

    def make(mode: Mode = "mirror", server: PostgresServer | None = None) -> PipelineUnderTest:
        pair = databases if server is None else Databases(server.dsn(), databases.target)
        settings = {"sink": {"mode": mode}, "snapshot": {"chunk_rows": 10}}
        pipeline = PipelineUnderTest(tmp_path, pair, ["public.t"], **settings)
        pipeline.source(TABLE, ROWS)
        pipeline.provision()
        pipeline.copy()
        pipeline.source("UPDATE public.t SET body = 'streamed' WHERE id = 1")
        pipeline.apply()
        made.append(pipeline)
        return pipeline

    yield make
    for pipeline in made:
        pipeline.end_commands()
