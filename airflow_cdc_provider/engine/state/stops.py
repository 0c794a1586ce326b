"""Who has asked a pipeline's jobs to stop, and when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from airflow_cdc_provider.engine.core.typed_json import as_type
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner

_FILE = "stopped.json"
_KEPT = 20


@dataclass(frozen=True)
class StopRequest:
    """A request of a user to end the jobs that were alive.

    :param at: seconds since 1970.
    :param by: the user.
    :param parts: the parts that were asked.
    :param owners: the processes of the jobs that were alive.
    """

    at: float
    by: str
    parts: list[str]
    owners: list[Owner]

    def ended(self, beat: Heartbeat) -> bool:
        """Return whether the job of a heartbeat was asked to end."""
        return beat.owner in self.owners


def note_stop(state: State, by: str, parts: Sequence[str], owners: Sequence[Owner]) -> None:
    """Add a request to those that are kept."""
    request = StopRequest(round(time.time(), 3), by, list(parts), list(owners))
    kept = [*read_stops(state), request][-_KEPT:]
    state.write(_FILE, {"requests": [asdict(each) for each in kept]})


def read_stops(state: State) -> list[StopRequest]:
    """Return the latest requests, oldest first."""
    return state.read_sound(_FILE, _as_requests) or []


def _as_requests(values: dict[str, Any]) -> list[StopRequest]:
    found: list[StopRequest] = as_type(values["requests"], list[StopRequest], "requests")
    return found
