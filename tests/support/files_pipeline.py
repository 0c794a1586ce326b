"""Pipelines into files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb

from airflow_cdc_provider.engine.sinks.lake.storage import Storage
from tests.conftest import Databases
from tests.support.audited import assert_all_changes
from tests.support.pipelines import PipelineUnderTest


class FilesPipeline(PipelineUnderTest):
    """A pipeline into files, which DuckDB reads."""

    def __init__(self, directory: Path, databases: Databases, tables: list[Any], **sink: Any) -> None:
        self.root = directory / "lake"
        super().__init__(directory, databases, tables, snapshot={"chunk_rows": 800})
        self.document["sink"] = {"type": "files", "path": str(self.root), **sink}
        self.database = duckdb.connect()
        self.change(stream={"max_batch_bytes": "256KiB"})

    def read(self, query: str, table: str = "public/t") -> list[tuple[Any, ...]]:
        """Query the files on a table's list, as ``t``."""
        paths = (Storage(self.document["sink"]["path"]).read(f"_manifest/{table}.txt") or b"").decode().splitlines()
        if self.pipeline.sink.format == "json":  # type: ignore[attr-defined]
            relation = f"read_json({paths}, format = 'newline_delimited', union_by_name = true)"
        else:
            relation = f"read_parquet({paths}, union_by_name = true)"
        return self.database.sql(f"WITH t AS (FROM {relation}) {query}").fetchall()


def assert_files_exactly_once(pipeline: FilesPipeline, least: int = 100) -> None:
    """Check that snapshot rows and changes occur once, see :func:`tests.support.audited.assert_exactly_once`."""
    assert pipeline.read("SELECT id FROM t WHERE _op = 'r' GROUP BY 1 HAVING count(*) > 1") == []
    copied = sum(chunk.rows for chunk in pipeline.record.chunks)
    assert pipeline.read("SELECT count(*) FROM t WHERE _op = 'r'") == [(copied,)]
    assert_all_changes(pipeline, pipeline.read("SELECT _xid, _op, id FROM t WHERE _op <> 'r'"), least)
