"""SIGINT, SIGTERM and SIGHUP, at whatever moment they come to a command.

A part of a run ends its unit, and is told so (:func:`ending_gracefully`). Whatever else is at work is broken off by
:class:`SignalCame`. Both are seen to by a thread, too: Python handles signals between two steps of its main thread
only, which may wait for a server, or for Spark, meanwhile.

Imports nothing of weight: signals may come while the others are imported.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CANCEL_SECONDS = 1.0
"""After so long the statements are canceled for whose end the main thread waits."""
GIVE_UP_SECONDS = 15.0
"""After so long a command that has been broken off, and cleans up, is ended at once."""


class SignalCame(BaseException):
    """A signal has broken off what had no unit to end first.

    :ivar name: the signal's.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Heard:
    """What has been heard of signals in this process."""

    def __init__(self) -> None:
        self.installed = self.armed = False
        self.name: str | None = None
        self.raised = self.graceful = self.again = False
        self.over = False
        self.stops: list[Callable[[], None]] = []
        self.callbacks: list[Callable[[], None]] = []


_heard = _Heard()


@contextmanager
def listening(give_up: Callable[[str], int]) -> Iterator[None]:
    """Listen to signals for the time of a command; those that the process was started to ignore stay ignored.

    :param give_up: says, with the signal's name, that the command is ended at once; returns the exit code.
    """
    global _heard
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _heard = heard = _Heard()
    heard.installed = True
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before, unraisable = {number: signal.getsignal(number) for number in SIGNALS}, sys.unraisablehook
    sys.unraisablehook = partial(_swallowed, heard, unraisable)
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in SIGNALS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: _handle(heard, number, frame))
    threading.Thread(target=_watch, args=[heard, reader, give_up], name="signals", daemon=True).start()
    try:
        yield
    finally:
        heard.over = True
        sys.unraisablehook = unraisable
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()  # at which the thread ends
        _heard = _Heard()


def arm() -> None:
    """Let signals raise from now on, where that is caught.

    :raises SignalCame: when one has come before.
    """
    _heard.armed = True
    if _heard.name is not None and not _heard.raised:
        _heard.raised = True
        raise SignalCame(_heard.name)


@contextmanager
def deferred() -> Iterator[None]:
    """Let signals raise at the end of the block, in which something begins that nobody would end otherwise.

    :raises SignalCame: when one has come in the block.
    """
    armed, _heard.armed = _heard.armed, False
    try:
        yield
    finally:
        _heard.armed = armed
    if armed and not (_heard.stops or _heard.graceful or _heard.over):
        arm()


def close() -> str | None:
    """Heed no further signal, as the command has an outcome, which is about to be told.

    :returns: the name of the first signal that has come.
    """
    _heard.over = True
    return _heard.name


@contextmanager
def ending_gracefully(stop: Callable[[], None]) -> Iterator[bool]:
    """Let work end by itself when a signal comes in the block; at once if one has come before.

    :param stop: asks for it; called in any thread.
    :returns: whether signals are listened to.
    """
    heard = _heard
    heard.stops.append(stop)
    if heard.name is not None:
        heard.graceful = True
        stop()
    try:
        yield heard.installed
    finally:
        heard.stops.remove(stop)


def when_broken_off(callback: Callable[[], None]) -> None:
    """Call something when a signal breaks the command off, before that is raised."""
    _heard.callbacks.append(callback)


def _handle(heard: _Heard, number: int, frame: FrameType | None) -> None:
    heard.name = heard.name or signal.Signals(number).name
    if heard.stops:
        heard.graceful = True
        for stop in heard.stops:
            stop()
    elif heard.armed and not heard.over and not heard.raised:
        heard.raised = True
        for callback in heard.callbacks:
            callback()
        raise SignalCame(heard.name)


def _swallowed(heard: _Heard, otherwise: Callable[[Any], object], unraisable: Any) -> None:
    """Raise a signal again that came where Python ignores exceptions: in a callback, as at a fork, or a finalizer."""
    if isinstance(unraisable.exc_value, SignalCame):
        heard.again = True
    else:
        otherwise(unraisable)


def _watch(heard: _Heard, reader: socket.socket, give_up: Callable[[str], int]) -> None:
    """See to it that a signal is heeded, whatever the main thread waits for."""
    with reader:
        while (byte := reader.recv(1)) and byte[0] not in SIGNALS:
            pass
        if not byte:
            return
        heard.name = heard.name or signal.Signals(byte[0]).name
        since, canceled = time.monotonic(), False
        while not heard.over:
            for stop in list(heard.stops):
                heard.graceful = True
                stop()
            if heard.graceful:  # it takes its time
                break
            if heard.again:
                heard.again = heard.raised = False
                os.kill(os.getpid(), byte[0])
            passed = time.monotonic() - since
            if passed > CANCEL_SECONDS and not canceled and not heard.raised:
                canceled = True
                _cancel()
            if passed > GIVE_UP_SECONDS:
                heard.over = True
                code = give_up(heard.name)
                with suppress(OSError):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
            time.sleep(0.1)
        while reader.recv(4096):  # until the command ends, as further signals are written there
            pass


def _cancel() -> None:
    """Cancel the statements whose end is waited for, if there can be any."""
    liveness = sys.modules.get("airflow_cdc_provider.engine.postgres.dead_connections")
    if liveness is not None:
        liveness.cancel_all()
