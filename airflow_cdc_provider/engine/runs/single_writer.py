"""Ensures that only one run at a time writes to a pipeline's sinks, using its epoch and the heartbeats of others."""

from __future__ import annotations

import time

from airflow_cdc_provider.engine.core.errors import (
    ClockDiffers,
    Fenced,
    SecondWriter,
)
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import commit_record_of, existing_record
from airflow_cdc_provider.engine.runs.source import attached
from airflow_cdc_provider.engine.state import submission
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import (
    Owner,
    read_heartbeats,
)

_CLOCK_SECONDS = 10.0  # tolerated difference between the clocks of hosts


def refuse_second_writer(state: State, epoch: int, part: str | None, takeover: bool) -> None:
    """Refuse to continue while another process works on the pipeline.

    :param epoch: the pipeline's epoch; processes of earlier epochs are ignored, because the sink refuses their work.
    :param part: the part of the run to check; ``None`` for all.
    :raises SecondWriter: if there is such a process; names it.
    """
    for beat in read_heartbeats(state):
        working = beat.alive and beat.owner != Owner.this() and beat.epoch >= epoch
        if working and part in (None, beat.part) and not takeover and not submission.given_up(state, beat.submission):
            ahead = beat.at - time.time()
            if ahead > _CLOCK_SECONDS and beat.owner.lives is None:
                raise ClockDiffers(
                    f"the last heartbeat of {beat.owner} ({beat.part}, epoch {beat.epoch}) is {ahead:.0f} s in the"
                    " future: the clock of that host or of this one is wrong, so it is unknown whether the process is"
                    " alive",
                    "Synchronize the clocks of both hosts (NTP), then try again. If that process has ended, take over"
                    " with --takeover.",
                )
            raise SecondWriter(
                f"{beat.owner} is working on this pipeline ({beat.part}, epoch {beat.epoch},"
                f" last heartbeat {time.time() - beat.at:.0f} s ago)",
                "Wait until it ends, end it with `airflow-cdc stop`, or take over with --takeover.",
            )


def take_epoch(pipeline: Pipeline, state: State, takeover: bool) -> int:
    """Become the pipeline's only writer, and end the readers that an earlier run has left on the slot.

    :returns: the epoch. Afterwards the record may already have the epoch of yet another run, see :func:`require_epoch`.
    :raises SecondWriter: if another run is alive and ``takeover`` is not set, or if a foreign session reads the slot.
    :raises Fenced: if another run takes over immediately.
    :raises GateClosed: if the source is a standby.
    """
    record = existing_record(pipeline)
    refuse_second_writer(state, record.epoch, None, takeover)
    return attached(pipeline).take_epoch(record, commit_record_of(pipeline), str(Owner.this()))


def require_epoch(record: Record, epoch: int) -> None:
    """Refuse to continue under an epoch that is no longer the pipeline's.

    :raises Fenced: if another run has taken over.
    """
    if record.epoch != epoch:
        raise Fenced.by("the pipeline is at", record.epoch, epoch)


def require_latest(state: State, epoch: int) -> None:
    """Refuse to continue if a job of a later epoch has left a heartbeat; used if the record cannot be reached.

    :raises Fenced: if another run has taken over.
    """
    for beat in read_heartbeats(state):
        if beat.epoch > epoch:
            raise Fenced.by(f"{beat.owner} works under", beat.epoch, epoch)
