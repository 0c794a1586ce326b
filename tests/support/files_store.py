"""A folder of files, for the contract of sinks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import fsspec
import pyarrow.parquet as pq

from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.sinks.files.data_file import folder_of
from airflow_cdc_provider.engine.sinks.files.sink import FilesSink
from airflow_cdc_provider.engine.sinks.staged import Staged
from tests.sinks import begun_sink
from tests.sinks.begun_sink import OTHER, SinkUnderTest
from tests.support.files_sink import (
    data_files,
    paths,
)


class FilesStore(SinkUnderTest):
    """A path without files; ``empty`` is a sink there."""

    def __init__(self, empty: FilesSink) -> None:
        self.empty = empty

    def sink(self, mode: Mode, pipeline: str = "p") -> FilesSink:
        assert mode == "changelog"
        return replace(self.empty, pipeline=pipeline)

    def read(self, target: Target) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in paths(self.empty, folder_of(target)):
            with fsspec.open(path) as file:
                if self.empty.format == "parquet":
                    found += pq.read_table(file).to_pylist()
                else:
                    found += [json.loads(line, parse_float=str) for line in file]
        return found

    def names(self) -> set[str]:
        return set(self.empty.root.files())

    def staged(self) -> int:
        named = {name for target in (begun_sink.TARGET, OTHER) for name in paths(self.empty, folder_of(target))}
        written = {self.empty.root.location(name) for name in data_files(self.empty)}
        return len(written - named)

    def damage(self, staged: Staged) -> None:
        self.empty.root.remove(data_files(self.empty)[0])

    def occupy(self, target: Target) -> None:
        self.empty.root.create(f"{folder_of(target)}/theirs.parquet", b"")

    def remove(self, target: Target) -> None:
        self.empty.root.remove(folder_of(target))
