"""A Delta mirror of three tables with views, for the tests of views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.lsn import LOG_END
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.runs.view_states import _state as state_of
from airflow_cdc_provider.engine.sinks.delta.plugin import DeltaPlugin
from airflow_cdc_provider.engine.sinks.delta.settings import DeltaSettings
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk, StagedPiece
from airflow_cdc_provider.engine.views.settings import ViewSettings
from tests.sinks.begun_sink import IDENTITY, ORIGIN, WATERMARK
from tests.sinks.view_cases import SETTINGS, TARGETS
from tests.support.given_rows import GivenRows

START = 100


class Lake:
    """A mirror of three tables, and views over it."""

    def __init__(
        self,
        root: Path,
        views: Sequence[ViewSettings] = SETTINGS,
        chunks: Sequence[Chunk] = (),
        targets: Sequence[Target] = TARGETS,
        **properties: str,
    ) -> None:
        self.root = root
        self.properties = tuple(properties.items())
        self.applied = START
        self.open(views)
        self.sink.prepare(targets, chunks, IDENTITY, START)
        self.start()

    def open(self, views: Sequence[ViewSettings]) -> None:
        """Read a pipeline file."""
        self.sink = DeltaPlugin().open(
            DeltaSettings(str(self.root), views=tuple(views), properties=self.properties), "p"
        )

    def start(self) -> None:
        """Begin a run."""
        self.epoch = self.sink.take_epoch("test")
        self.keeper = self.sink.view_keeper(self.epoch)

    def unit(self, *effects: Effect) -> None:
        staged = self.sink.stage(self.epoch, f"test{self.applied}", effects)
        piece = StagedPiece("", "", 0, 1, b"", staged, frozenset(), LOG_END)
        assert self.sink.commit(self.epoch, self.applied, self.applied + 10, [piece])
        self.applied += 10

    def copy(self, target: Target, chunk: Chunk, *given: tuple[str | None, ...]) -> None:
        names = [column.name for column in target.table.columns]
        columns = [pa.array(column, pa.large_string()) for column in zip(*given, strict=True)]
        batch = pa.RecordBatch.from_arrays(columns, names=names)
        watermark = replace(WATERMARK, high=self.applied)
        read = GivenRows([batch], lambda: watermark)
        written = self.sink.write_chunk(self.epoch, target, chunk, ORIGIN, read)
        assert self.sink.commit_chunks(self.epoch, [CopiedChunk(target, chunk, ORIGIN, written)]) == [len(given)]

    def work(self) -> None:
        """Do all steps."""
        while self.keeper.step(everything=True):
            pass

    def drain(self) -> None:
        """Bring all views up to date."""
        self.work()
        assert self.keeper.reached(self.applied)

    def verify(self) -> dict[str, int]:
        """Return the number of rows of each view, which equals its SELECT."""
        results = list(self.sink.compare_views())
        assert [result.differences for result in results] == [()] * len(results)
        return {result.view: result.rows for result in results}


def values(*keys: int, v: int = 1) -> dict[int, tuple[int | None, ...] | None]:
    return {key: (key, key % 3, v, key % 2) for key in keys}


def view(name: str) -> ViewSettings:
    return next(settings for settings in SETTINGS if settings.name == name)


JOINED = ViewSettings("dwd", "joined", "SELECT a.id, a.v, b.v AS bv FROM shop.a LEFT JOIN shop.b ON b.id = a.fk")


def rows(spark: SparkSession, lake: Lake, name: str = "joined") -> list[tuple[object, ...]]:
    return [tuple(row) for row in spark.sql(f"SELECT * FROM delta.`{lake.root}/dwd/{name}` ORDER BY ALL").collect()]


def versions(spark: SparkSession, lake: Lake, name: str) -> int:
    return spark.sql(f"DESCRIBE HISTORY delta.`{lake.root}/dwd/{name}`").count()


def states(lake: Lake) -> list[dict[str, Any]]:
    """Return the views as ``status`` shows them."""
    recorded = lake.sink.recorded_views()
    return [state_of(each.label, recorded.versions if recorded else (), each, recorded) for each in lake.sink.views]
