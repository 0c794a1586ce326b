"""That one run at a time writes to a pipeline's sinks: its epoch, and who else is alive."""

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

_CLOCK_SECONDS = 10.0  # clocks of hosts may differ by so much


def refuse_second_writer(state: State, epoch: int, part: str | None, takeover: bool) -> None:
    """Refuse to go on while another process works on the pipeline.

    :param epoch: the pipeline's; a process of an earlier one has been overtaken, and the sink refuses what it does.
    :param part: look only at this part of the run; ``None`` for all.
    :raises SecondWriter: naming the other process.
    """
    for beat in read_heartbeats(state):
        working = beat.alive and beat.owner != Owner.this() and beat.epoch >= epoch
        if working and part in (None, beat.part) and not takeover and not submission.given_up(state, beat.submission):
            ahead = beat.at - time.time()
            if ahead > _CLOCK_SECONDS and beat.owner.lives is None:
                raise ClockDiffers(
                    f"the last heartbeat of {beat.owner} ({beat.part}, epoch {beat.epoch}) is {ahead:.0f} s in the"
                    " future: the clock of that host or of this one is wrong, so nobody can tell whether it is alive",
                    "Set the clocks of both hosts (NTP), then try again. If that process has ended, take over with"
                    " --takeover.",
                )
            raise SecondWriter(
                f"{beat.owner} is working on this pipeline ({beat.part}, epoch {beat.epoch},"
                f" last heartbeat {time.time() - beat.at:.0f} s ago)",
                "Wait for it, end it with `airflow-cdc stop`, or take over with --takeover.",
            )


def take_epoch(pipeline: Pipeline, state: State, takeover: bool) -> int:
    """Become the pipeline's only writer, and end what an earlier run has left on the slot.

    :returns: the epoch. What the record says afterwards may be another's already: see :func:`require_epoch`.
    :raises SecondWriter: when another run is alive and ``takeover`` is not set, or somebody else reads from the slot.
    :raises Fenced: when another run takes over at once.
    :raises GateClosed: when the source is a standby.
    """
    record = existing_record(pipeline)
    refuse_second_writer(state, record.epoch, None, takeover)
    return attached(pipeline).take_epoch(record, commit_record_of(pipeline), str(Owner.this()))


def require_epoch(record: Record, epoch: int) -> None:
    """Refuse to go on under an epoch that is no longer the pipeline's.

    :raises Fenced: when another run has taken over.
    """
    if record.epoch != epoch:
        raise Fenced.by("the pipeline is at", record.epoch, epoch)


def require_latest(state: State, epoch: int) -> None:
    """Refuse to go on when a job of a later epoch has left a heartbeat: for when the record cannot be asked.

    :raises Fenced: when another run has taken over.
    """
    for beat in read_heartbeats(state):
        if beat.epoch > epoch:
            raise Fenced.by(f"{beat.owner} works under", beat.epoch, epoch)
