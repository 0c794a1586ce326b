"""Exchanges questions and answers between processes of one user on one machine, without leaving data on a disk.

Spark starts its worker processes itself, so that they have no pipes to each other. They connect through Unix sockets in
a directory that only this user can enter. The driver creates this directory, and removes it at the end. A connection
transfers one question and one answer, each preceded by its length.

A socket would transfer a piece of the log in dozens of portions, and for each of them the answering thread would have
to wait for its turn after the thread that reads the log. Therefore an answer is written to anonymous memory, and the
socket passes the file descriptor, which the other process maps. If the system has no such memory, the socket transfers
the bytes.
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
from selectors import EVENT_READ, DefaultSelector

_Bytes = bytes | bytearray | memoryview
_LENGTH = struct.Struct("<Q")
_MAPPED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # mapping all pages at once is cheaper
_LONG = 60  # a socket's path has at most 108 bytes, on some systems fewer


@contextmanager
def socket_directory() -> Iterator[str]:
    """Provide a directory for sockets during the block."""
    place = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="airflow-cdc-", dir=place if len(place) < _LONG else "/tmp") as directory:
        yield directory


class Answering:
    """A thread that answers questions one after the other; it ends with the process at the latest.

    :param answer: called in the thread with each question, and returns an answer in parts. If it raises an error, the
        thread ends and callers are refused.
    """

    def __init__(self, directory: str, name: str, answer: Callable[[bytearray], Sequence[_Bytes]]) -> None:
        self._answer = answer
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(os.path.join(directory, name))
        self._server.listen()
        self._wake_read, self._wake_write = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name=f"answering-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, even if the directory has been removed, as by a driver that ends before its reader."""
        self._wake_write.close()
        self._thread.join()

    def _run(self) -> None:
        # Shutting down a listening socket does not wake the thread on every system.
        with self._server as server, self._wake_read as woken, DefaultSelector() as selector:
            selector.register(server, EVENT_READ)
            selector.register(woken, EVENT_READ)
            while all(ready.fileobj is server for ready, _ in selector.select()):
                connection, _ = server.accept()
                with connection:
                    try:
                        question = _receive(connection)
                    except ConnectionError:
                        continue
                    answer = self._answer(question)
                    with suppress(ConnectionError):  # the caller has been ended
                        _give(connection, answer)


def ask(directory: str, name: str, question: bytes = b"") -> memoryview:
    """Ask the process that answers under a name.

    :raises OSError: if there is no such process, or if it ends before it has answered.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.path.join(directory, name))
        _send(client, question)
        return _take(client)


def _give(connection: socket.socket, answer: Sequence[_Bytes]) -> None:
    try:
        memory = os.memfd_create("airflow-cdc")
    except (AttributeError, OSError):  # the system has no such memory, or does not allow its use
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
        if part:  # after an empty message the other end may already have answered and closed the connection
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
