"""Closes half-open connections, so that callers fail instead of hanging forever.

TCP detects a peer that is gone. It does not detect a peer whose kernel still answers, such as a server that hangs or is
stopped, or a proxy that has lost the session. The duration of a statement is no indication either, because a read or a
commit may take hours. Therefore, if an answer has been outstanding for a while, the server is asked on a separate
connection whether it works and whether the session still exists. If not, the session's socket is shut down
(:func:`watch`). If the driver hides its socket, the call is abandoned in its thread and its caller gets an error
(:class:`Calls`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

import psycopg2
import psycopg2.extensions
from psycopg2.extensions import TRANSACTION_STATUS_ACTIVE

from airflow_cdc_provider.engine.core.errors import StreamFailed

SILENCE_SECONDS = 20.0
"""Seconds without an answer to a statement after which the watch asks the server."""

ANSWER_SECONDS = 10
"""Seconds that the server may take to answer."""

_SSL_REQUEST = struct.pack(">ii", 8, 80877103)

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Watched:
    connection: weakref.ref[psycopg2.extensions.connection]
    dsn: str = field(repr=False)
    pid: int
    busy_since: float | None = None
    questioned: bool = False


_watched: list[_Watched] = []
_troubles: weakref.WeakKeyDictionary[psycopg2.extensions.connection, str] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(connection: psycopg2.extensions.connection, dsn: str) -> None:
    """Watch a connection until it is closed or garbage-collected.

    :param dsn: libpq URI of its server.
    """
    global _thread
    with _lock:
        _watched.append(_Watched(weakref.ref(connection), dsn, connection.info.backend_pid))
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_keep_watching, name="liveness", daemon=True)
            _thread.start()


def _keep_watching() -> None:
    while True:
        time.sleep(SILENCE_SECONDS / 4)
        with _lock:
            _watched[:] = [each for each in _watched if _open(each) is not None]
            current = list(_watched)
        for each in current:
            _look(each, time.monotonic())


def _open(watched: _Watched) -> psycopg2.extensions.connection | None:
    connection = watched.connection()
    return None if connection is None or connection.closed else connection


def _look(watched: _Watched, now: float) -> None:
    connection = _open(watched)
    if connection is None or connection.info.transaction_status != TRANSACTION_STATUS_ACTIVE:
        watched.busy_since = None
    elif watched.busy_since is None:
        watched.busy_since = now
    elif now - watched.busy_since >= SILENCE_SECONDS and not watched.questioned:
        watched.questioned = True
        threading.Thread(
            target=_question, args=[watched, connection.info.host, connection.info.port], daemon=True
        ).start()


def _question(watched: _Watched, host: str, port: int) -> None:
    """Ask the server about a session, and cut it if it is half-open; runs in a thread because this may take long."""
    trouble = find_session_problem(watched.dsn, watched.pid, host, port)
    connection = _open(watched)
    if trouble is not None and connection is not None:
        _log.warning("session %d of %s:%s is cut because it does not answer, and %s", watched.pid, host, port, trouble)
        _troubles[connection] = _silence(watched.dsn, trouble)
        cut(connection)
    watched.busy_since, watched.questioned = None, False


def cut_reason(error: BaseException) -> str | None:
    """Return why the session of a driver's error was cut, or ``None`` if it was not cut."""
    connection = getattr(getattr(error, "cursor", None), "connection", None)
    return None if connection is None else _troubles.get(connection)


def find_session_problem(
    dsn: str, pid: int | None, host: str | None = None, port: int | None = None, idle: Collection[str] = ()
) -> str | None:
    """Ask a server whether it works, and whether it still has a session.

    :param pid: the session's backend; ``None`` to ask only whether the server answers.
    :param host: the server to ask if ``dsn`` names several; without it, the session may belong to any of them.
    :param idle: types of wait events in which the session must not be, because it would have answered before.
    :returns: the problem; ``None`` if there is none, or if a server cannot tell.
    """
    parameters = psycopg2.extensions.parse_dsn(dsn)
    hosts, ports = (host or parameters.get("host", "localhost")), str(port or parameters.get("port", 5432))
    addresses = zip(hosts.split(","), itertools.cycle(ports.split(",")), strict=False)
    answering = [(each, number) for each, number in addresses if _answers(each, int(number))]
    if not answering:
        return "the server does not answer"
    if pid is None:
        return None
    troubles = [_reported_problem(parameters | {"host": each, "port": number}, pid, idle) for each, number in answering]
    return None if None in troubles else troubles[0]


def _reported_problem(parameters: dict[str, str], pid: int, idle: Collection[str]) -> str | None:
    """Return the problem that a server reports for a session of this role in this database, or ``None``.

    It is also ``None`` if the server cannot tell.
    """
    # Accept the server whatever its state is now, for example as a standby.
    given = {"connect_timeout": str(ANSWER_SECONDS), "target_session_attrs": "any", "client_encoding": "UTF8"}
    target = psycopg2.extensions.make_dsn(**parameters | given)
    try:
        connection = psycopg2.connect(target, options="-c statement_timeout=10s")
    except psycopg2.Error:  # the server works, but has no free connection or no longer allows this role
        return None
    # This connection is not watched, and the server may stop answering during the question.
    deadline = threading.Timer(2 * ANSWER_SECONDS, cut, [connection])
    deadline.daemon = True
    deadline.start()
    try:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT wait_event_type FROM pg_stat_activity WHERE pid = %s"
                " AND datname = current_database() AND usename = session_user",
                [pid],
            )
            found = cursor.fetchone()
    except psycopg2.Error:
        return None
    finally:
        deadline.cancel()
        connection.close()
    if found is None:
        return "the server does not know it"
    return "the server has nothing to do for it" if found[0] in idle else None


def _answers(host: str, port: int) -> bool:
    """Return whether a Postgres server answers at all; the question whether it supports TLS needs no login."""
    path = f"{host}/.s.PGSQL.{port}" if host.startswith("/") else None
    try:
        with (
            socket.socket(socket.AF_UNIX) if path else socket.create_connection((host, port), ANSWER_SECONDS) as server
        ):
            server.settimeout(ANSWER_SECONDS)
            if path:
                server.connect(path)
            server.sendall(_SSL_REQUEST)
            return bool(server.recv(1))
    except OSError:
        return False


def cut(connection: psycopg2.extensions.connection) -> None:
    """Shut down the socket of a connection, so that a call that waits on it fails."""
    try:
        descriptor = os.dup(connection.fileno())
    except (psycopg2.Error, OSError):
        return  # closed in the meantime
    with socket.socket(fileno=descriptor) as shared:
        try:
            shared.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


def cancel_all() -> None:
    """Cancel the running statements of all watched connections."""
    with _lock:
        current = list(_watched)
    for each in current:
        connection = _open(each)
        if connection is not None and connection.info.transaction_status == TRANSACTION_STATUS_ACTIVE:
            with contextlib.suppress(psycopg2.Error):
                connection.cancel()


class Calls:
    """Calls in a separate thread into a driver whose calls can be neither interrupted nor timed out.

    :param dsn: libpq URI of the server that is called.
    :ivar over: whether no further call can be made, because one was abandoned or :meth:`end` was called.
    """

    def __init__(self, dsn: str) -> None:
        self.pid: int | None = None
        self.over = False
        self._dsn = dsn
        self._work: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        threading.Thread(target=self._make, name="driver calls", daemon=True).start()

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """Make a call and return its result.

        :raises StreamFailed: if the server owes an answer and is dead, or no longer knows the session's backend
            ``pid``.
        """
        future: Future[T] = Future()
        self._work.put((future, function, arguments))
        while not wait([future], SILENCE_SECONDS).done:
            trouble = find_session_problem(self._dsn, self.pid)
            if trouble is not None and not future.done():
                self.over = True
                raise StreamFailed(
                    _silence(self._dsn, trouble),
                    "Start the pipeline again; committed data remains, and the rest is repeated.",
                )
        return future.result()

    def _make(self) -> None:
        while (item := self._work.get()) is not None:
            future, function, arguments = item
            try:
                future.set_result(function(*arguments))
            except BaseException as e:
                future.set_exception(e)

    def end(self, last: Callable[[], None] | None = None) -> None:
        """End the thread; if its call was abandoned, it ends only when that call returns, which may never happen.

        :param last: a call to make before; its result is not awaited.
        """
        self.over = True
        if last is not None:
            self._work.put((Future(), last, ()))
        self._work.put(None)


def _silence(dsn: str, trouble: str) -> str:
    """Return the message about a session that is abandoned."""
    parameters = psycopg2.extensions.parse_dsn(dsn)
    server = f"{parameters.get('host', 'localhost')}:{parameters.get('port', 5432)}/{parameters.get('dbname', '')}"
    return f"a session of {server} has given no answer for {SILENCE_SECONDS:g} seconds, and {trouble}"
