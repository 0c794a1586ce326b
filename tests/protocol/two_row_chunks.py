"""Pipelines that copy a table in chunks of two rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Databases
from tests.support.pipelines import PipelineUnderTest

Make = Callable[..., PipelineUnderTest]


@pytest.fixture
def make_pipeline(databases: Databases, tmp_path: Path) -> Make:
    """Return a factory of pipelines of some tables, in chunks of two rows."""

    def make(*tables: str, pair: Databases = databases, mode: str = "mirror") -> PipelineUnderTest:
        sections = {"sink": {"mode": mode}, "snapshot": {"chunk_rows": 2, "parallelism": 1}}
        return PipelineUnderTest(tmp_path, pair, tables or ["public.*"], **sections)

    return make
