"""A run of a pipeline: who may write, under which epoch, and that it is alive.

One run owns the epoch and hands it to its parts. A part beats its heart in the
state location; a second writer is refused while that heart beats, and fenced by
the epoch in any case.
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
from dataclasses import asdict, dataclass, field, replace
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
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.signals import ending_gracefully
from airflow_cdc_provider.engine.core.typed_json import as_type
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
    STOP_FILE,
    as_recorded,
    is_of_later_run,
    record_error,
)
from airflow_cdc_provider.engine.runs.single_writer import refuse_second_writer, require_epoch, take_epoch
from airflow_cdc_provider.engine.runs.source import attached
from airflow_cdc_provider.engine.sinks.contract import Sink
from airflow_cdc_provider.engine.state import submission
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import (
    STALE_SECONDS,
    STREAM,
    Heartbeat,
    Owner,
    forget_heartbeats,
    write_heartbeat,
)
from airflow_cdc_provider.engine.state.history import History
from airflow_cdc_provider.engine.state.location import refuse_others

_log = logging.getLogger(__name__)
_BEAT_SECONDS = 2.0
KILL_SECONDS = 4.0
"""So long a job that is to be killed may take to end its unit."""


def budget_of(pipeline: Pipeline) -> Budget:
    """The slot's budget that a pipeline file sets."""
    return Budget(pipeline.stream.max_retained_wal, pipeline.stream.on_max_retained_wal)


@dataclass
class _Vitals:
    """What the branches of a part have in common."""

    progress: dict[str, Any] = field(default_factory=dict)
    began_with: str | int | None = None
    beat_lost: CdcError | None = None


class Run:
    """A part of a run while it works; see :func:`run_part`.

    :ivar commit_record: of all its sinks.
    :ivar depot: the sink in which pieces of the log are deposited that are too large to pass through Spark.
    :ivar branches: for each sink the part as if it worked for that alone; itself, if it has one.
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
        self.depot = sink_of(pipeline.branches[0], part)
        self.branches: tuple[Run, ...] = (self,)
        if len(pipeline.sinks) > 1:
            self.branches = tuple(self._branch(branch) for branch in pipeline.branches)

    def _branch(self, pipeline: Pipeline) -> Run:
        branch = copy(self)
        branch.pipeline, branch.commit_record, branch.branches = pipeline, sink_of(pipeline, self.part), (branch,)
        return branch

    @property
    def sink(self) -> Sink:
        """The sink of a branch."""
        return cast(Sink, self.commit_record)

    @property
    def progress(self) -> dict[str, Any]:
        """What the part has done, see ``status``; the same for all branches."""
        return self._vitals.progress

    @progress.setter
    def progress(self, progress: dict[str, Any]) -> None:
        self._vitals.progress = progress
        if self._vitals.began_with is None:
            self._vitals.began_with = self.committed

    @property
    def committed(self) -> str | int | None:
        """What the part says that it has committed: a stream's position, a snapshot's chunks; nothing before that."""
        found: str | int | None = self.progress.get("applied_lsn", self.progress.get("finished"))
        return found

    @property
    def stopping(self) -> bool:
        """Whether the part has been asked to end, by a signal or by ``airflow-cdc stop``."""
        return self._stop.is_set()

    def wait(self, seconds: float) -> None:
        """Wait, but not longer than until the part is asked to end."""
        self._stop.wait(seconds)

    def ask_to_stop(self) -> None:
        """Let the part end after its current unit."""
        self._stop.set()

    def read_from(self, source: SourceSettings) -> None:
        """Work by other settings of the source from now on: the file has been edited meanwhile."""
        for run in {self, *self.branches}:
            run.pipeline = replace(run.pipeline, source=source)
            run.source = attached(run.pipeline)

    def name_application(self, application: str, ui: str | None) -> None:
        """Say from now on which Spark application the part is, and at which address its web UI is."""
        self._application, self._ui = application, ui

    def look_at_slot(self) -> SlotState | None:
        """Look how far the slot is; ``None`` when there is none, or the source cannot be reached."""
        found = self.source.look_at_slot()
        if found is not None:
            self.lag.see(found)
        return found

    def report(self) -> dict[str, Any]:
        """The progress of the part, see ``status``."""
        progressed = self.committed != self._vitals.began_with
        progress = {**self.progress, **self.lag.as_dict(), "restarts": self.restarts, "progressed": progressed}
        if "changes" in progress:  # a stream is idle for most of its time, and its rate of before says nothing then
            progress["rows_per_second"] = self._rate.of(progress["changes"])
        return progress

    def beat(self, ended: bool = False) -> None:
        """Write the heartbeat and look for a request to stop."""
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
        if asdict(owner) in (self.state.read_sound(STOP_FILE, _owners) or ()):
            self._stop.set()
        if self._submission is not None:
            asked = submission.askers(self.state, self._submission)
            if asked:
                self._stop.set()
            if asked & submission.KILLERS and self._unwanted_since is None:
                self._unwanted_since = time.monotonic()
        self._beaten = time.monotonic()

    def check(self) -> None:
        """Raise what the heartbeat's thread ran into."""
        if self._vitals.beat_lost is not None:
            raise self._vitals.beat_lost

    def try_beat(self) -> None:
        """Beat if the state lets us. While others still take the part for alive, a failure is nothing to end it for."""
        try:
            self.beat()
        except Exception as e:  # whatever a file system of fsspec raises
            if time.monotonic() - self._beaten < STALE_SECONDS:
                _log.warning("%s: no heartbeat: %s", self.part, e)
                return
            # Raised by check(), in the thread that works.
            self._vitals.beat_lost = StateUnwritable(
                f"the heartbeat could not be written to {self.state.url} for {STALE_SECONDS:g} seconds: {e}",
                "Check the state location.",
            )

    def keep_beating(self) -> None:
        """Beat until the part ends; runs in a thread."""
        while self._vitals.beat_lost is None and not self._ended.wait(_BEAT_SECONDS):
            self.try_beat()
            since = self._unwanted_since
            if since is not None and time.monotonic() - since >= KILL_SECONDS and not self._ended.is_set():
                self._abandon()
            if self.history.due:
                self.remember()

    def _abandon(self) -> None:
        """End this process, whatever it is at. On a cluster nobody else can be relied on to do it."""
        error = StreamFailed(
            f"{self.part} was broken off {KILL_SECONDS:g} seconds after it had been asked to end",
            "Start again: what has been committed stays.",
        )
        # Also when the state keeps it waiting.
        threading.Timer(KILL_SECONDS, os._exit, [int(ExitCode.FAILED)]).start()
        try:
            submission.end(self.state, self._submission or "", error=submission.as_outcome(error))
        finally:
            os._exit(ExitCode.FAILED)

    def remember(self) -> None:
        """Write what has been done since the last time into the history."""
        self.history.sample(self.report())
        self.history.write()

    def record_error(self, error: CdcError) -> None:
        """Leave an error where ``status`` and Airflow find it; the part itself may go on."""
        self.history.error(error)
        error.noted = True
        if not is_of_later_run(self.state, self.epoch, error):
            self.state.write(ERROR_FILE, as_recorded(error, self.part))

    def end(self) -> None:
        """Stop beating."""
        self._ended.set()


@contextmanager
def run_part(pipeline: Pipeline, part: str, epoch: int | None, takeover: bool = False) -> Iterator[tuple[Run, Record]]:
    """Work on a pipeline: through the gate, under an epoch, with a heart that beats.

    :param part: name of the part of the run.
    :param epoch: the epoch of the run this is a part of; ``None`` to take a new one.
    :raises SecondWriter: when another process works on it.
    :raises Fenced: when ``epoch`` is no longer the pipeline's.
    :raises GateClosed: when the source cannot continue the sink's record.
    :raises ConfigError: when it is to serve metrics, and cannot; or when the state is that of another pipeline.
    """
    require_client(pipeline)
    state = State(pipeline.state)
    refuse_others(state, pipeline.name)
    existing_record(pipeline)  # without one there is no state yet, in which an error could be left
    try:
        record = _enter(pipeline, state, part, epoch, takeover)
    except (SecondWriter, Fenced):
        raise  # the state is the other run's
    except CdcError as e:
        record_error(state, part, e)
        raise
    run = Run(pipeline, state, part, record.epoch, Lag(record.applied, record.advanced))
    with _signals(run), serving(pipeline, part, run.epoch, run.report) as run.metrics_port:
        state.remove(ERROR_FILE)
        forget_heartbeats(state, record.epoch, "snapshot-")
        run.beat()
        thread = threading.Thread(target=run.keep_beating, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield run, record
            # While a restart is waited for, a server is out of reach.
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
            with contextlib.suppress(CdcError):  # the part's own error, if any, says more
                run.beat(ended=True)


def _enter(pipeline: Pipeline, state: State, part: str, epoch: int | None, takeover: bool) -> Record:
    """Take or check the epoch, pass the gate, and return the record."""
    record = existing_record(pipeline)
    if epoch is None:
        epoch = take_epoch(pipeline, state, takeover)
        record = existing_record(pipeline)  # the run that was taken over may have committed until then
    else:
        refuse_second_writer(state, epoch, part, takeover)
    require_epoch(record, epoch)
    attached(pipeline).enter(part)
    return existing_record(pipeline)


def rejoin(run: Run) -> Record:
    """Go on with a run whose connections broke: fence and gate as at a start, under the epoch that it has.

    What the broken connections have left on the servers is ended, as nobody knows when these notice, and has
    committed, or never will, before the record is read.

    :returns: the commit record.
    :raises Blocked: when they cannot be ended.
    :raises Fenced: when another run has taken the epoch meanwhile.
    :raises GateClosed: when the source cannot continue the sink's record.
    """
    pipeline = run.pipeline
    if existing_record(pipeline).epoch == run.epoch:
        run.commit_record.end_sessions()
    record = _enter(pipeline, run.state, run.part, run.epoch, takeover=True)
    if run.part == STREAM:
        run.source.end_readers(partial(run.commit_record.fenced, run.epoch))
    return record


def _owners(values: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = as_type(values["owners"], list[dict[str, Any]], "owners")
    return found


@contextmanager
def _signals(run: Run) -> Iterator[None]:
    """Let signals stop the part gracefully; only the main thread can say so where no command listens to them."""
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
