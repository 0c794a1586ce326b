"""Sinks without a database, which serve to measure everything that precedes one.

Both do their work in :meth:`stage`, on executors. :class:`.staging_task.StagingTask` calls no other method of a sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.sinks.files.row_format import writer
from airflow_cdc_provider.engine.sinks.staged import Staged


@dataclass(frozen=True)
class NoopSink:
    """Takes the net rows of a mirror and discards them."""

    mode: Literal["mirror"] = "mirror"

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """Count the rows."""
        return tuple(_staged(effect, None) for effect in effects)


@dataclass(frozen=True)
class ParquetSink:
    """Writes every change to Parquet like the files sink, one folder per table and one file per piece."""

    directory: Path
    mode: Literal["changelog"] = "changelog"

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """Write the rows."""
        staged = []
        for effect in effects:
            folder = self.directory / effect.label
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"{attempt}.parquet", "wb") as file:
                made = writer("parquet", file, effect.rows.schema)
                made.write(effect.rows)
                made.close()
            staged.append(_staged(effect, attempt))
        return tuple(staged)


def _staged(effect: Effect, relation: str | None) -> Staged:
    return Staged(effect.label, relation, effect.rows.num_rows, effect.truncate, tuple(effect.rows.column_names))
