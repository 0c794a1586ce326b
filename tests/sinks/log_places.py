"""Places of a log, and processes that append to it at the same time."""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_cdc_provider.engine.sinks.lake.storage import Storage

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.sinks.test_record_log"])


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    found = Storage(str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}")
    yield found
    found.remove()
