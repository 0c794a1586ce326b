"""Pipelines whose interleavings a test chooses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from local_servers.postgres import PostgresServer
from tests.conftest import Databases
from tests.protocol.races.scene import ROWS, TABLE, Make, Mode
from tests.support.pipelines import PipelineUnderTest


@pytest.fixture
def make_pipeline(databases: Databases, tmp_path: Path) -> Iterator[Make]:
    """Return a factory of pipelines of ``public.t``, whose twenty rows form two chunks: up to 10, and from 11 on.

    The source is a database of the session's server, or of the test's own server.
    """
    made: list[PipelineUnderTest] = []

    def make(server: PostgresServer | None = None, mode: Mode = "mirror") -> PipelineUnderTest:
        pair = databases if server is None else Databases(server.dsn(), databases.target)
        pipeline = PipelineUnderTest(
            tmp_path, pair, ["public.t"], sink={"mode": mode}, snapshot={"chunk_rows": 10, "parallelism": 1}
        )
        pipeline.source(TABLE, ROWS)
        made.append(pipeline)
        return pipeline

    yield make
    for pipeline in made:
        pipeline.end_commands()
