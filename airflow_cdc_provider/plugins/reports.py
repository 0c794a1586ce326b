"""What the jobs of pipelines have left in their states, read once for all who look at the page at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_cdc_provider.engine.commands.attention import starting, trouble_in_state
from airflow_cdc_provider.engine.core.errors import CdcError, StateUnwritable
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.run_errors import last_error
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, read_heartbeats
from airflow_cdc_provider.engine.state.history import Entries, read_history
from airflow_cdc_provider.plugins.ledgers import Ledger, Ledgers
from airflow_cdc_provider.plugins.pipeline_files import PipelineFile

KEPT_SECONDS = 4.0
"""What has been read serves everybody for so long."""
# Object stores answer slowly, and many questions at a time.
_READERS = 8
_SOLUTION = "Give the API server what the state location needs: access, and for object stores fsspec's package."


@dataclass(frozen=True)
class Report:
    """What stands in a pipeline's state.

    :param error: what has ended the last run, or a command since.
    :param starting: whether a job has been submitted that has not sent a heartbeat yet.
    :param ledger: tables with their chunks; read for the page of one pipeline only.
    :param unreadable: why nothing else is known.
    """

    beats: tuple[Heartbeat, ...] = ()
    error: Mapping[str, Any] | None = None
    history: Entries | None = None
    ledger: Ledger | None = None
    starting: bool = False
    unreadable: CdcError | None = None


def read_report(pipeline: Pipeline, ledgers: Ledgers | None = None) -> Report:
    """Read a pipeline's state.

    :param ledgers: to have its ledger, too, which has an entry for each chunk.
    """
    try:
        with reading(pipeline) as state:
            beats = tuple(read_heartbeats(state))
            alive = any(beat.alive for beat in beats)
            return Report(
                beats,
                last_error(state) if alive else trouble_in_state(state, beats),
                read_history(state),
                ledgers.of(state) if ledgers is not None else None,
                not alive and bool(starting(state, beats)),
            )
    except CdcError as e:
        return Report(unreadable=e)


@contextmanager
def reading(pipeline: Pipeline) -> Iterator[State]:
    """A pipeline's state, to be read in the block.

    :raises CdcError: whatever goes wrong.
    """
    try:
        yield State(pipeline.state)
    except CdcError:
        raise
    except Exception as e:  # whatever a file system of fsspec raises, and what another version has left
        raise StateUnwritable(f"the state {pipeline.state} cannot be read: {e}", _SOLUTION) from e


class Reports:
    """The reports of many pipelines, none of them older than a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="report")
        self._read_at = -KEPT_SECONDS
        self._reports: dict[Path, Report] = {}

    def of(self, files: Sequence[PipelineFile]) -> Mapping[Path, Report]:
        """The reports of pipeline files; those that are wrong have an empty one."""
        paths = [file.path for file in files]
        with self._lock:
            if time.monotonic() - self._read_at > KEPT_SECONDS or self._reports.keys() != set(paths):
                self._reports = dict(zip(paths, self._pool.map(_report, files), strict=True))
                self._read_at = time.monotonic()
            return self._reports


def _report(file: PipelineFile) -> Report:
    return Report() if file.pipeline is None else read_report(file.pipeline)
