"""Handles SIGINT, SIGTERM and SIGHUP, whenever a command receives them.

A part of a run is asked to finish its unit and end (:func:`ending_gracefully`). All other work is interrupted by
:class:`SignalCame`. A thread takes care of both as well, because Python handles signals only between two steps of its
main thread, and that may be waiting for a server or for Spark.

This module has no heavy imports, because signals may arrive while other modules are being imported.
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
"""Seconds after which the statements that the main thread waits for are canceled."""
GIVE_UP_SECONDS = 15.0
"""Seconds after which an interrupted command that is still cleaning up is ended immediately."""


class SignalCame(BaseException):
    """The interruption of work that had no unit to finish first, by a signal.

    :ivar name: the signal's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Heard:
    """The signals that this process has received, and its reactions to them."""

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
    """Handle signals for the duration of a command; signals that the process was started to ignore remain ignored.

    :param give_up: called with the signal's name before the command is ended immediately; reports that, and returns
        the exit code.
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
        writer.close()  # ends the thread
        _heard = _Heard()


def arm() -> None:
    """Let signals raise :class:`SignalCame` from now on, which the caller catches.

    :raises SignalCame: if a signal has already been received.
    """
    _heard.armed = True
    if _heard.name is not None and not _heard.raised:
        _heard.raised = True
        raise SignalCame(_heard.name)


@contextmanager
def deferred() -> Iterator[None]:
    """Let signals raise only at the end of the block, which starts something that would otherwise never be ended.

    :raises SignalCame: if a signal was received in the block.
    """
    armed, _heard.armed = _heard.armed, False
    try:
        yield
    finally:
        _heard.armed = armed
    if armed and not (_heard.stops or _heard.graceful or _heard.over):
        arm()


def close() -> str | None:
    """Ignore further signals, because the command has a result, which is about to be reported.

    :returns: the name of the signal for which :class:`SignalCame` was raised, an exception that other code may have
        ignored; ``None`` if none was, or if the work has ended gracefully nevertheless.
    """
    _heard.over = True
    return _heard.name if _heard.raised and not _heard.graceful else None


@contextmanager
def ending_gracefully(stop: Callable[[], None]) -> Iterator[bool]:
    """Let work end gracefully if a signal is received in the block, or immediately if one has been received before.

    :param stop: asks the work to end; called in any thread.
    :returns: whether signals are handled.
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


def on_interrupt(callback: Callable[[], None]) -> None:
    """Register a function to call when a signal interrupts the command, before :class:`SignalCame` is raised."""
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
    """Repeat a signal that arrived where Python ignores exceptions: in a callback, as at a fork, or in a finalizer."""
    if isinstance(unraisable.exc_value, SignalCame):
        heard.again = True
    else:
        otherwise(unraisable)


def _watch(heard: _Heard, reader: socket.socket, give_up: Callable[[str], int]) -> None:
    """Make sure that a signal takes effect, whatever the main thread is waiting for."""
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
            if heard.graceful:  # the work takes the time that it needs
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
        while reader.recv(4096):  # discard further signals until the command ends
            pass


def _cancel() -> None:
    """Cancel the statements that the process waits for, if there can be any."""
    liveness = sys.modules.get("airflow_cdc_provider.engine.postgres.dead_connections")
    if hasattr(liveness, "cancel_all"):  # otherwise, it is being imported
        liveness.cancel_all()  # type: ignore[union-attr]
