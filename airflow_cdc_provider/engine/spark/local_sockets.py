"""Questions and answers between the processes of one user on one machine, of which no trace stays on a disk.

Spark starts the processes that work for it, so that they have no pipe to each other. They meet at Unix sockets in a
directory that only this user can enter; the driver makes it, and removes it at the end. A connection carries one
question and one answer, each behind its length.

Through a socket a piece of the log would come in dozens of portions, for each of which the thread that answers has to
wait its turn beside the one that reads the log. So an answer is written to memory that has no name, and the socket
passes the file, which the other process maps; where the system has no such memory, the socket passes the bytes.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

_Bytes = bytes | bytearray | memoryview
_LENGTH = struct.Struct("<Q")
_MAPPED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # all pages at once are cheaper than one by one
_LONG = 60  # a socket's path has at most 108 bytes, on some systems fewer


@contextmanager
def meeting_place() -> Iterator[str]:
    """A directory for sockets, for a time."""
    place = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="airflow-cdc-", dir=place if len(place) < _LONG else "/tmp") as directory:
        yield directory


class Answering:
    """A thread that answers, one after the other; ends with the process, if not before.

    :param answer: called in the thread with each question, returns an answer in parts; what it raises ends the thread,
        and refuses whoever asks.
    """

    def __init__(self, directory: str, name: str, answer: Callable[[bytearray], Sequence[_Bytes]]) -> None:
        self._answer = answer
        self._path = os.path.join(directory, name)
        self._closing = False
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self._path)
        self._server.listen()
        self._thread = threading.Thread(target=self._run, name=f"answering-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        # To shut the socket down would not wake the thread on every system.
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:  # it may have ended itself
            client.connect(self._path)
        self._thread.join()

    def _run(self) -> None:
        with self._server as server:
            while True:
                connection, _ = server.accept()
                with connection:
                    if self._closing:
                        return
                    try:
                        question = _receive(connection)
                    except ConnectionError:
                        continue
                    answer = self._answer(question)
                    with suppress(ConnectionError):  # whoever asked has been ended
                        _give(connection, answer)


def ask(directory: str, name: str, question: bytes = b"") -> memoryview:
    """Ask the process that answers by a name.

    :raises OSError: when there is none, or it ends before it has answered.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.path.join(directory, name))
        _send(client, question)
        return _take(client)


def _give(connection: socket.socket, answer: Sequence[_Bytes]) -> None:
    try:
        memory = os.memfd_create("airflow-cdc")
    except (AttributeError, OSError):  # the system has no such memory, or does not let us have it
        _send(connection, *answer)
        return
    with open(memory, "wb") as file:
        file.writelines(answer)
        file.flush()
        socket.send_fds(connection, [_LENGTH.pack(file.tell())], [file.fileno()])


def _take(connection: socket.socket) -> memoryview:
    header, files, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    if len(header) < _LENGTH.size:
        raise ConnectionResetError("no answer came")
    (length,) = _LENGTH.unpack(header)
    if not files:
        return memoryview(_exactly(connection, length))
    try:
        return memoryview(mmap.mmap(files[0], length, _MAPPED, mmap.PROT_READ) if length else b"")
    finally:
        os.close(files[0])


def _send(connection: socket.socket, *parts: _Bytes) -> None:
    connection.sendall(_LENGTH.pack(sum(map(len, parts))))
    for part in parts:
        if part:  # after an empty message the other end may have answered and gone
            connection.sendall(part)


def _receive(connection: socket.socket) -> bytearray:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytearray:
    found = bytearray(length)
    left = memoryview(found)
    while left:
        count = connection.recv_into(left)
        if not count:
            raise ConnectionResetError(f"{len(left)} of {length} bytes did not come")
        left = left[count:]
    return found
