"""Announces a run that is about to begin: it is starting Spark, and has no epoch yet for a heartbeat."""

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
    """Announce during the block that a run is about to begin.

    :param part: the part that it begins with.
    :raises StateUnwritable: if the first announcement cannot be written.
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
            for folder in (_FOLDER,) if made else (_FOLDER, ""):  # a refused run leaves nothing behind
                state.remove_empty(folder)


def announcements(state: State) -> list[Heartbeat]:
    """Return the announcements of runs that are about to begin: heartbeats without an epoch."""
    return [beat for _, beat in _all(state) if beat.alive]


def announcement_of(state: State, submission: str) -> Heartbeat | None:
    """Return the announcement of the job of a submission, which has no epoch yet."""
    return next((beat for beat in announcements(state) if beat.submission == submission), None)


def _all(state: State) -> Iterator[tuple[str, Heartbeat]]:
    for name in state.names(_FOLDER):
        beat = state.read_sound(name, heartbeat_of)
        if beat is not None:
            yield name, beat
