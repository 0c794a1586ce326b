"""The word that a run is about to begin: it starts Spark, and has no epoch yet under which its heart could beat."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict

from airflow_cdc_provider.engine.core.errors import StateUnwritable
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner, heartbeat_of
from airflow_cdc_provider.engine.state.submission import VARIABLE

_FOLDER = "starting"
_SECONDS = 2.0

_log = logging.getLogger(__name__)


@contextmanager
def announced(state: State, part: str) -> Iterator[None]:
    """Say for the time of a block that a run is about to begin.

    :param part: what it begins with.
    :raises StateUnwritable: when that cannot be written at first.
    """
    over = threading.Event()
    file = f"{_FOLDER}/{part}-{os.getpid()}.json"

    def say() -> None:
        beat = Heartbeat(Owner.this(), part, 0, time.time(), False, {}, os.environ.get(VARIABLE))
        state.write(file, asdict(beat))

    def repeat() -> None:
        while not over.wait(_SECONDS):
            try:
                say()
            except StateUnwritable as e:
                _log.warning("%s: %s", part, e.message)

    for name, left in _all(state):
        if not left.alive:
            state.remove(name)
    made = state.is_made()
    say()
    thread = threading.Thread(target=repeat, name="announcement", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with suppress(StateUnwritable):
            state.remove(file)
            for folder in (_FOLDER,) if made else (_FOLDER, ""):  # a run that was refused leaves nothing of its own
                state.remove_empty(folder)


def announcements(state: State) -> list[Heartbeat]:
    """Return what the runs that are about to begin say of themselves: heartbeats without an epoch."""
    return [beat for _, beat in _all(state) if beat.alive]


def announcement_of(state: State, submission: str) -> Heartbeat | None:
    """Return what the job of a submission says before it has an epoch."""
    return next((beat for beat in announcements(state) if beat.submission == submission), None)


def _all(state: State) -> Iterator[tuple[str, Heartbeat]]:
    for name in state.names(_FOLDER):
        beat = state.read_sound(name, heartbeat_of)
        if beat is not None:
            yield name, beat
