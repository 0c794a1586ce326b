"""Reads the reports of jobs from the pipelines' states, once for all users who look at the page at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from airflow_cdc_provider.engine.commands.attention import problem_in_state, starting
from airflow_cdc_provider.engine.core.errors import CdcError, StateUnwritable
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.run_errors import last_error
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, read_heartbeats
from airflow_cdc_provider.engine.state.history import HistoryEntries, read_history
from airflow_cdc_provider.engine.state.requests import read_requested
from airflow_cdc_provider.engine.state.stops import StopRequest, read_stops
from airflow_cdc_provider.engine.state.submission import Submission, read
from airflow_cdc_provider.engine.state.verification import Verification, read_verification
from airflow_cdc_provider.plugins.ledgers import Ledger, Ledgers
from airflow_cdc_provider.plugins.pipeline_files import PipelineFile

KEPT_SECONDS = 4.0
"""Seconds for which reports are reused for all users."""
# Object stores answer slowly, but accept many requests at a time.
_READERS = 8
_SOLUTION = "Give the API server access to the state location; for object stores, also install fsspec's package there."


@dataclass(frozen=True)
class PipelineReport:
    """The contents of a pipeline's state.

    :param error: the error that has ended the last run, or a later command.
    :param starting: whether a submitted job has no heartbeat yet.
    :param stop: the last request of a user to stop, if the last job was asked.
    :param ledger: tables with their chunks; read only for the page of one pipeline, as are the following.
    :param verified: the last comparison of each table.
    :param rereads: the tables that requests to read again name.
    :param submissions: those of the jobs of the heartbeats, by id.
    :param stops: the last requests of users to stop.
    :param unreadable: the reason why nothing else is known.
    """

    beats: tuple[Heartbeat, ...] = ()
    error: Mapping[str, Any] | None = None
    history: HistoryEntries | None = None
    ledger: Ledger | None = None
    starting: bool = False
    stop: StopRequest | None = None
    verified: Mapping[str, Verification] = field(default_factory=dict)
    rereads: frozenset[str] = frozenset()
    submissions: Mapping[str, Submission] = field(default_factory=dict)
    stops: Sequence[StopRequest] = ()
    unreadable: CdcError | None = None


def read_report(pipeline: Pipeline, ledgers: Ledgers | None = None) -> PipelineReport:
    """Read a pipeline's state.

    :param ledgers: if given, the ledger is read, too, which has an entry for each chunk.
    """
    try:
        with reading(pipeline) as state:
            beats = tuple(read_heartbeats(state))
            alive = any(beat.alive for beat in beats)
            stops = [] if alive and ledgers is None else read_stops(state)
            report = PipelineReport(
                beats,
                last_error(state) if alive else problem_in_state(state, beats),
                read_history(state),
                starting=not alive and bool(starting(state, beats)),
                stop=_last_stop(stops, beats),
            )
            if ledgers is None:
                return report
            jobs = (read(state, beat.submission) for beat in beats if beat.submission is not None)
            return replace(
                report,
                ledger=ledgers.of(state),
                verified=read_verification(state),
                rereads=read_requested(state),
                submissions={job.id: job for job in jobs if job is not None},
                stops=stops,
            )
    except CdcError as e:
        return PipelineReport(unreadable=e)


def _last_stop(stops: Sequence[StopRequest], beats: Sequence[Heartbeat]) -> StopRequest | None:
    latest = max(beats, key=lambda beat: beat.at, default=None)
    return next((stop for stop in reversed(stops) if latest is not None and stop.ended(latest)), None)


@contextmanager
def reading(pipeline: Pipeline) -> Iterator[State]:
    """Open a pipeline's state for reading in the block.

    :raises CdcError: for every error in the block.
    """
    try:
        yield State(pipeline.state)
    except CdcError:
        raise
    except Exception as e:  # any error of a file system of fsspec, or from files of another version
        raise StateUnwritable(f"the state {pipeline.state} cannot be read: {e}", _SOLUTION) from e


class Reports:
    """A cache of the reports of many pipelines, which are never older than some seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="report")
        self._read_at = -KEPT_SECONDS
        self._reports: dict[Path, PipelineReport] = {}

    def of(self, files: Sequence[PipelineFile]) -> Mapping[Path, PipelineReport]:
        """Return the reports of pipeline files; invalid files have an empty one."""
        paths = [file.path for file in files]
        with self._lock:
            if time.monotonic() - self._read_at > KEPT_SECONDS or self._reports.keys() != set(paths):
                self._reports = dict(zip(paths, self._pool.map(_report, files), strict=True))
                self._read_at = time.monotonic()
            return self._reports


def _report(file: PipelineFile) -> PipelineReport:
    return PipelineReport() if file.pipeline is None else read_report(file.pipeline)
