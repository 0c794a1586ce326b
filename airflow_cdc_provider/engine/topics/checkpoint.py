"""Spark's checkpoint of a query, as far as the engine reads it: its id, and the offsets of its batches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import fsspec

from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.errors import StateUnwritable, StreamFailed
from airflow_cdc_provider.engine.topics.position import Found, Position
from airflow_cdc_provider.engine.topics.settings import Offsets

_VERSION = "v1"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder.

    :param url: as fsspec and Hadoop know it.
    """

    url: str

    @classmethod
    def of(cls, pipeline: Pipeline) -> Checkpoint:
        """The one of a pipeline over topics."""
        assert pipeline.topics is not None
        return cls(pipeline.topics.checkpoint or f"{pipeline.state.rstrip('/')}/checkpoint")

    def id(self) -> str | None:
        """What Spark has named the query; ``None`` where there is no checkpoint."""
        text = self._read("metadata")
        return None if text is None else str(json.loads(text)["id"])

    def find(self, position: Position) -> Found:
        """What stands there of a pipeline."""
        id_ = self.id()
        if id_ is None:
            return Found(None)
        last = position.applied - position.base - 1
        planned = self._numbers("offsets")
        offsets = self.offsets(last) if id_ == position.checkpoint and last in planned else None
        return Found(id_, max(self._numbers("commits"), default=-1), max(planned, default=-1), offsets)

    def offsets(self, batch: int) -> Offsets:
        """The offsets at which a batch ends.

        :raises StreamFailed: when they do not stand there as this Spark writes them.
        """
        found: dict[str, dict[str, int]] = json.loads(self._planned(batch)[2])
        return found

    def watermark(self, batch: int) -> int:
        """That of a batch, in milliseconds since 1970; 0 where a query has none.

        :raises StreamFailed: as :meth:`offsets`.
        """
        return int(json.loads(self._planned(batch)[1])["batchWatermarkMs"])

    def _planned(self, batch: int) -> list[str]:
        lines = (self._read(f"offsets/{batch}") or "").splitlines()
        if len(lines) != 3 or lines[0] != _VERSION:
            raise StreamFailed(
                f"{self.url}/offsets/{batch} is not written as Spark 4.2 does",
                "Run the pipeline with the version of Spark that has written its checkpoint.",
            )
        return lines

    def remove(self) -> None:
        """Remove it, if it is there."""
        system, path = self._place()
        try:
            if system.exists(path):
                system.rm(path, recursive=True)
        except Exception as e:  # object stores raise classes of their own
            raise self._unusable("removed", "", e) from e

    def _place(self) -> tuple[Any, str]:
        system, path = fsspec.core.url_to_fs(self.url)
        return system, str(path)

    def _read(self, name: str) -> str | None:
        system, path = self._place()
        try:
            return str(system.cat_file(f"{path}/{name}").decode())
        except FileNotFoundError:
            return None
        except Exception as e:  # as above
            raise self._unusable("read", name, e) from e

    def _numbers(self, folder: str) -> list[int]:
        system, path = self._place()
        try:
            names = [str(each).rpartition("/")[2] for each in system.ls(f"{path}/{folder}", detail=False, refresh=True)]
        except FileNotFoundError:
            return []
        except Exception as e:  # as above
            raise self._unusable("listed", folder, e) from e
        return [int(name) for name in names if name.isdigit()]

    def _unusable(self, what: str, name: str, error: Exception) -> StateUnwritable:
        return StateUnwritable(
            f"{self.url}/{name} cannot be {what}: {getattr(error, 'strerror', None) or error}",
            "Give the pipeline a checkpoint, by source.checkpoint or in its state, that Spark and we can write.",
        )
