"""A run of a pipeline: its epoch, which permits it to write, and its heartbeat, which shows that it is alive.

One run owns the epoch and passes it to its parts. Each part writes a heartbeat into the state location. A second writer
is refused while there are heartbeats, and is fenced by the epoch in any case.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, cast

from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    ExitCode,
    Fenced,
    SecondWriter,
    StateUnwritable,
    StreamFailed,
)
from airflow_cdc_provider.engine.core.piece_store import PieceStore
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.signals import ending_gracefully
from airflow_cdc_provider.engine.pipeline.kinds import SourceSettings
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.slot_budget import Budget, BudgetWatch
from airflow_cdc_provider.engine.postgres.slots import SlotState
from airflow_cdc_provider.engine.runs.commit_records import commit_record_of, existing_record, sink_of
from airflow_cdc_provider.engine.runs.lag import Lag
from airflow_cdc_provider.engine.runs.metrics import require_client, serving
from airflow_cdc_provider.engine.runs.rate import Rate
from airflow_cdc_provider.engine.runs.run_errors import (
    ERROR_FILE,
    as_recorded,
    is_of_later_run,
    record_error,
    stop_requested,
)
from airflow_cdc_provider.engine.runs.single_writer import refuse_second_writer, require_epoch, take_epoch
from airflow_cdc_provider.engine.runs.source import attached
from airflow_cdc_provider.engine.runs.table_activity import TableActivity
from airflow_cdc_provider.engine.sinks.contract import Sink
from airflow_cdc_provider.engine.state import submission
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import (
    STALE_SECONDS,
    STREAM,
    Heartbeat,
    Owner,
    forget_heartbeats,
    read_heartbeat,
    write_heartbeat,
)
from airflow_cdc_provider.engine.state.history import History
from airflow_cdc_provider.engine.state.location import refuse_others

_log = logging.getLogger(__name__)
_BEAT_SECONDS = 2.0
KILL_SECONDS = 4.0
"""Seconds that a job gets to finish its unit before it is killed."""


def budget_of(pipeline: Pipeline) -> Budget:
    """Return the slot's budget that a pipeline file sets."""
    return Budget(pipeline.stream.max_retained_wal, pipeline.stream.on_max_retained_wal)


@dataclass
class _Vitals:
    """The data that the branches of a part share."""

    progress: dict[str, Any] = field(default_factory=dict)
    views: list[dict[str, Any]] = field(default_factory=list)
    began_with: str | int | None = None
    beat_lost: CdcError | None = None


class Run:
    """A part of a run while it works; see :func:`run_part`.

    :ivar commit_record: the commit record of all its sinks.
    :ivar piece_store: the first sink, which stores pieces of the log that are too large to pass through Spark.
    :ivar branches: for each sink the part with that sink alone; the part itself if it has only one.
    """

    def __init__(self, pipeline: Pipeline, state: State, part: str, epoch: int, lag: Lag | None = None) -> None:
        self.pipeline = pipeline
        self.state = state
        self.part = part
        self.epoch = epoch
        self.commit_record = commit_record_of(pipeline, part)
        self.source = attached(pipeline)
        self.budget = BudgetWatch(budget_of(pipeline), self.source.slot)
        self.history = History(state, part, epoch)
        self.lag = lag or Lag()
        self.activity = TableActivity()
        self._rate = Rate()
        self._vitals = _Vitals()
        self.restarts = 0
        self.metrics_port: int | None = None
        self._application: str | None = None
        self._ui: str | None = None
        self._submission = os.environ.get(submission.VARIABLE)
        self._unwanted_since: float | None = None
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._beaten = 0.0
        self.piece_store: PieceStore = sink_of(pipeline.branches[0], part)
        self.branches: tuple[Run, ...] = (self,)
        if len(pipeline.sinks) > 1:
            self.branches = tuple(self._branch(branch) for branch in pipeline.branches)

    def _branch(self, pipeline: Pipeline) -> Run:
        branch = copy(self)
        branch.pipeline, branch.commit_record, branch.branches = pipeline, sink_of(pipeline, self.part), (branch,)
        return branch

    @property
    def sink(self) -> Sink:
        """Return the sink of a branch."""
        return cast(Sink, self.commit_record)

    @property
    def progress(self) -> dict[str, Any]:
        """Return the work that the part has done, see ``status``; it is the same for all branches."""
        return self._vitals.progress

    @progress.setter
    def progress(self, progress: dict[str, Any]) -> None:
        self._vitals.progress = progress
        if self._vitals.began_with is None:
            self._vitals.began_with = self.committed

    @property
    def views(self) -> list[dict[str, Any]]:
        """Return the states of the views as last read, see :func:`.view_states`; the same for all branches."""
        return self._vitals.views

    @views.setter
    def views(self, views: list[dict[str, Any]]) -> None:
        self._vitals.views = views

    @property
    def committed(self) -> str | int | None:
        """Return the part's committed work: a stream's position, a snapshot's number of chunks, or ``None`` so far."""
        found: str | int | None = self.progress.get("applied_lsn", self.progress.get("finished"))
        return found

    @property
    def stopping(self) -> bool:
        """Return whether the part has been asked to end, by a signal or by ``airflow-cdc stop``."""
        return self._stop.is_set()

    def wait(self, seconds: float) -> None:
        """Wait for some seconds, or until the part is asked to end."""
        self._stop.wait(seconds)

    def ask_to_stop(self) -> None:
        """Ask the part to end after its current unit."""
        self._stop.set()

    def read_from(self, source: SourceSettings) -> None:
        """Use other settings of the source from now on, because the file has been edited in the meantime."""
        for run in {self, *self.branches}:
            run.pipeline = replace(run.pipeline, source=source)
            run.source = attached(run.pipeline)

    def name_application(self, application: str, ui: str | None) -> None:
        """Set the Spark application of the part and the address of its web UI, which heartbeats then contain."""
        self._application, self._ui = application, ui

    def look_at_slot(self) -> SlotState | None:
        """Read and record the slot's state; ``None`` if there is no slot, or the source cannot be reached."""
        found = self.source.look_at_slot()
        if found is not None:
            self.lag.observe_slot(found)
        return found

    def report(self) -> dict[str, Any]:
        """Return the progress of the part, see ``status``."""
        progressed = self.committed != self._vitals.began_with
        progress = {**self.progress, **self.lag.as_dict(), "restarts": self.restarts, "progressed": progressed}
        if "changes" in progress:  # a stream is idle most of the time, so its average rate is meaningless
            progress["rows_per_second"] = self._rate.of(progress["changes"])
        activity = self.activity.as_dict()
        return progress | ({"views": self.views} if self.views else {}) | ({"activity": activity} if activity else {})

    def beat(self, ended: bool = False) -> None:
        """Write the heartbeat, and check for a request to stop."""
        owner = Owner.this()
        heartbeat = Heartbeat(
            owner,
            self.part,
            self.epoch,
            time.time(),
            ended,
            self.report(),
            self._submission,
            self._application,
            self._ui,
        )
        write_heartbeat(self.state, heartbeat)
        if stop_requested(self.state, owner):
            self._stop.set()
        if self._submission is not None:
            asked = submission.askers(self.state, self._submission)
            if asked:
                self._stop.set()
            if asked & submission.KILLERS and self._unwanted_since is None:
                self._unwanted_since = time.monotonic()
        self._beaten = time.monotonic()

    def check(self) -> None:
        """Raise the error of the heartbeat's thread, if there is one."""
        if self._vitals.beat_lost is not None:
            raise self._vitals.beat_lost

    def try_beat(self) -> None:
        """Write the heartbeat if possible; a failure does not end the part while others still consider it alive."""
        try:
            self.beat()
        except Exception as e:  # any error of a file system of fsspec
            if time.monotonic() - self._beaten < STALE_SECONDS:
                _log.warning("%s: no heartbeat: %s", self.part, e)
                return
            # Raised by check(), in the thread that works.
            self._vitals.beat_lost = StateUnwritable(
                f"the heartbeat could not be written to {self.state.url} for {STALE_SECONDS:g} seconds: {e}",
                "Check the state location.",
            )

    def keep_beating(self) -> None:
        """Write heartbeats until the part ends; runs in a thread."""
        while self._vitals.beat_lost is None and not self._ended.wait(_BEAT_SECONDS):
            self.try_beat()
            since = self._unwanted_since
            if since is not None and time.monotonic() - since >= KILL_SECONDS and not self._ended.is_set():
                self._abandon()
            if self.history.due:
                self.remember()

    def _abandon(self) -> None:
        """End this process immediately, because on a cluster no other process can be relied on to do it."""
        error = StreamFailed(
            f"{self.part} was ended {KILL_SECONDS:g} seconds after it had been asked to end",
            "Start the pipeline again; committed data remains.",
        )
        # End the process even if the state does not respond.
        threading.Timer(KILL_SECONDS, os._exit, [int(ExitCode.FAILED)]).start()
        try:
            submission.end(self.state, self._submission or "", error=submission.as_outcome(error))
        finally:
            os._exit(ExitCode.FAILED)

    def remember(self) -> None:
        """Write the progress since the last time into the history."""
        self.history.sample(self.report())
        self.history.write()

    def record_error(self, error: CdcError) -> None:
        """Write an error into the state for ``status`` and Airflow; the part itself may continue."""
        self.history.error(error)
        error.noted = True
        if not is_of_later_run(self.state, self.epoch, error):
            self.state.write(ERROR_FILE, as_recorded(error, self.part))

    def end(self) -> None:
        """Stop writing heartbeats."""
        self._ended.set()


@contextmanager
def run_part(pipeline: Pipeline, part: str, epoch: int | None, takeover: bool = False) -> Iterator[tuple[Run, Record]]:
    """Work on a pipeline during the block: pass the gate, hold an epoch, and write heartbeats.

    :param part: name of the part of the run.
    :param epoch: the epoch of the run that the part belongs to; ``None`` to take a new one.
    :raises SecondWriter: if another process works on the pipeline.
    :raises Fenced: if ``epoch`` is no longer the pipeline's.
    :raises GateClosed: if the source cannot continue the sink's record.
    :raises ConfigError: if metrics are configured but cannot be served, or if the state belongs to another pipeline.
    """
    require_client(pipeline)
    state = State(pipeline.state)
    refuse_others(state, pipeline.name)
    existing_record(pipeline)  # without a record there is no state yet that could store an error
    try:
        record = _enter(pipeline, state, part, epoch, takeover)
    except (SecondWriter, Fenced):
        raise  # the state belongs to the other run
    except CdcError as e:
        record_error(state, part, e)
        raise
    run = Run(pipeline, state, part, record.epoch, Lag(record.applied, record.advanced))
    with _signals(run), serving(pipeline, part, run.epoch, run.report) as run.metrics_port:
        state.remove(ERROR_FILE)
        forget_heartbeats(state, record.epoch, "snapshot-")
        if (former := read_heartbeat(state, part)) is not None:
            run.activity.resume(former.progress.get("activity", {}))
        run.beat()
        thread = threading.Thread(target=run.keep_beating, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield run, record
            # If the part is waiting for a restart, a server is unreachable.
            if part == STREAM and "restart" not in run.progress:
                run.source.leave(run.epoch, [branch.sink for branch in run.branches])
        except CdcError as e:
            cause = submission.cause_of(e)
            run.record_error(cause)
            raise cause from (None if cause is e else e)
        finally:
            run.end()
            thread.join()
            run.remember()
            with contextlib.suppress(CdcError):  # the part's own error, if any, matters more
                run.beat(ended=True)


def _enter(pipeline: Pipeline, state: State, part: str, epoch: int | None, takeover: bool) -> Record:
    """Take or check the epoch, pass the gate, and return the record."""
    record = existing_record(pipeline)
    if epoch is None:
        epoch = take_epoch(pipeline, state, takeover)
        record = existing_record(pipeline)  # the run that lost its epoch may have committed until then
    else:
        refuse_second_writer(state, epoch, part, takeover)
    require_epoch(record, epoch)
    attached(pipeline).enter(part)
    record = existing_record(pipeline)
    require_epoch(record, epoch)  # another run may have taken it meanwhile
    return record


def rejoin(run: Run) -> Record:
    """Continue a run whose connections broke: pass fence and gate as at a start, under the same epoch.

    The sessions of the broken connections are ended, because servers may notice the break late. Thus before the record
    is read, these sessions have either committed or never will.

    :returns: the commit record.
    :raises Blocked: if the sessions cannot be ended.
    :raises Fenced: if another run has taken the epoch in the meantime.
    :raises GateClosed: if the source cannot continue the sink's record.
    """
    pipeline = run.pipeline
    if existing_record(pipeline).epoch == run.epoch:
        run.commit_record.end_sessions()
    record = _enter(pipeline, run.state, run.part, run.epoch, takeover=True)
    if run.part == STREAM:
        run.source.end_readers(partial(run.commit_record.fenced, run.epoch))
    return record


@contextmanager
def _signals(run: Run) -> Iterator[None]:
    """Let signals stop the part gracefully; without a command that handles them, only the main thread can do so."""
    with ending_gracefully(run.ask_to_stop) as listening:
        if listening or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            run.ask_to_stop()

        previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
