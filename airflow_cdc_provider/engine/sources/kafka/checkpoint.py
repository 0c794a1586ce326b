"""Reads Spark's checkpoint of a query: its id, and the offsets of its batches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from airflow_cdc_provider.engine.core.errors import ConfigError, StateUnwritable, StreamFailed
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sources.kafka.position import FoundCheckpoint, RecordedTopics
from airflow_cdc_provider.engine.sources.kafka.settings import Offsets, topic_settings
from airflow_cdc_provider.engine.state.files import SPARKS
from airflow_cdc_provider.engine.state.private_files import make_folder

_VERSION = "v1"


@dataclass(frozen=True)
class Checkpoint:
    """The directory of a checkpoint.

    :param url: URL for fsspec and Hadoop.
    """

    url: str

    @classmethod
    def of(cls, pipeline: Pipeline) -> Checkpoint:
        """Return the checkpoint of a pipeline over topics; several pipelines may share a configured directory."""
        own = topic_settings(pipeline).checkpoint
        return cls(f"{own}/{pipeline.name}" if own else f"{pipeline.state.rstrip('/')}/checkpoint")

    def prepare(self) -> None:
        """Create a local directory before Spark does, because Spark would make it readable for everyone."""
        system, path = self._place()
        if isinstance(system, LocalFileSystem):
            try:
                make_folder(Path(path), Path(path).parent)
            except OSError as e:
                raise self._unusable("created", "", e) from e

    def id(self) -> str | None:
        """Return the id that Spark has given the query; ``None`` if there is no checkpoint."""
        text = self._read("metadata")
        return None if text is None else str(json.loads(text)["id"])

    def find(self, position: RecordedTopics) -> FoundCheckpoint:
        """Return what the checkpoint contains for a pipeline."""
        id_ = self.id()
        if id_ is None:
            return FoundCheckpoint(None)
        last = position.applied - position.base - 1
        planned = self._numbers("offsets")
        offsets = self.offsets(last) if id_ == position.checkpoint and last in planned else None
        return FoundCheckpoint(id_, max(self._numbers("commits"), default=-1), max(planned, default=-1), offsets)

    def offsets(self, batch: int) -> Offsets:
        """Return the offsets at which a batch ends.

        :raises StreamFailed: when they are not in the format of this version of Spark.
        """
        found: dict[str, dict[str, int]] = json.loads(self._planned(batch)[2])
        return found

    def watermark(self, batch: int) -> int:
        """Return the watermark of a batch, in milliseconds since 1970; 0 if the query has none.

        :raises StreamFailed: as :meth:`offsets`.
        """
        return int(json.loads(self._planned(batch)[1])["batchWatermarkMs"])

    def _planned(self, batch: int) -> list[str]:
        lines = (self._read(f"offsets/{batch}") or "").splitlines()
        if len(lines) != 3 or lines[0] != _VERSION:
            raise StreamFailed(
                f"{self.url}/offsets/{batch} is not in the format of Spark 4.2",
                "Run the pipeline with the Spark version that wrote its checkpoint.",
            )
        return lines

    def require_own(self) -> None:
        """Refuse a directory that contains files of other programs, because they would be removed with the checkpoint.

        :raises ConfigError: naming such a file.
        """
        strange = [name for name in sorted(self._names("")) if not SPARKS.fullmatch(name)]
        if strange:
            raise ConfigError(
                f"the checkpoint {self.url} must be a directory that only Spark uses, but contains {strange[0]}",
                "Set another directory in `source.checkpoint`, or move the other files away.",
            )

    def remove(self) -> None:
        """Remove the files that Spark writes, if they exist, and the directory if it is empty then."""
        system, path = self._place()
        try:
            for name in filter(SPARKS.fullmatch, self._names("")):
                system.rm(f"{path}/{name}", recursive=True)
            if system.exists(path) and not self._names(""):
                system.rmdir(path)
        except Exception as e:  # object stores raise their own classes
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
        return [int(name) for name in self._names(folder) if name.isdigit()]

    def _names(self, folder: str) -> set[str]:
        system, path = self._place()
        try:
            found = system.ls(f"{path}/{folder}".rstrip("/"), detail=False, refresh=True)
        except FileNotFoundError:
            return set()
        except Exception as e:  # as above
            raise self._unusable("listed", folder, e) from e
        return {str(each).rstrip("/").rpartition("/")[2] for each in found}

    def _unusable(self, what: str, name: str, error: Exception) -> StateUnwritable:
        return StateUnwritable(
            f"{self.url}/{name} cannot be {what}: {getattr(error, 'strerror', None) or error}",
            "Set a directory that Spark and the engine can write in `source.checkpoint`, or make the state writable.",
        )
