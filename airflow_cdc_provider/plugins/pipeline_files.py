"""The pipeline files that the page shows, found in the location ``[airflow_cdc] pipelines``."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError
from airflow_cdc_provider.engine.core.section import VARIABLE
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline

_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class PipelineFile:
    """A valid or invalid pipeline file.

    :param name: the pipeline's name, or the file's name if the file is invalid.
    :param pipeline: ``None`` if the file is invalid; source and sinks have no addresses.
    """

    path: Path
    name: str
    pipeline: Pipeline | None = None
    error: CdcError | None = None


def find_pipelines(place: str) -> list[PipelineFile]:
    """Find and read pipeline files.

    :param place: a folder, or a glob of files.
    :returns: the files sorted by name; a file is invalid if an earlier one has the same pipeline name.
    """
    return sorted(_unique(map(read_pipeline, _paths(place))), key=lambda file: (file.name, file.path))


def _paths(place: str) -> list[Path]:
    folder = Path(place)
    if folder.is_dir():
        return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    return sorted(path for path in map(Path, glob.glob(place, recursive=True)) if path.is_file())


def _unique(files: Iterable[PipelineFile]) -> Iterable[PipelineFile]:
    seen: dict[str, Path] = {}
    for file in files:
        first = seen.setdefault(file.name, file.path) if file.pipeline else file.path
        if first == file.path:
            yield file
        else:
            error = ConfigError(
                f"{file.path} and {first} have the same pipeline name {file.name!r}",
                "Give each pipeline a different name, because slot, publication and commit record are named after it.",
            )
            yield PipelineFile(file.path, file.path.stem, error=error)


def read_pipeline(path: Path) -> PipelineFile:
    """Read a pipeline file, unless it has not changed since the last time."""
    try:
        found = path.stat()
    except OSError:
        return _read(path, 0, 0)
    return _read(path, found.st_ctime_ns, found.st_size)


@lru_cache(maxsize=1024)
def _read(path: Path, changed: int, size: int) -> PipelineFile:
    try:
        pipeline = Pipeline.outline(path)  # the API server may not know the connections
        if unknown := VARIABLE.search(pipeline.state):
            raise ConfigError(
                f"state names the environment variable {unknown[1]}, which is not set",
                f"Set {unknown[1]} also for Airflow's API server, because the page CDC reads the state.",
            )
    except CdcError as e:
        return PipelineFile(path, path.stem, error=e)
    return PipelineFile(path, pipeline.name, pipeline)
