"""A TCP proxy that can break connections in a way that TCP does not notice."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Proxy:
    """Forwards connections on ``port`` to another port of this machine, unless it is frozen.

    A connection that was open while the proxy was frozen stays open but is never forwarded again, like one that has
    lost its entry in a router's table.

    :param silent_at: bytes from a client with which a connection goes silent: it does not forward them, nor anything
        after them.
    """

    def __init__(self, target: int, listener: socket.socket | None = None, silent_at: bytes | None = None) -> None:
        self._target = target
        self._silent_at = silent_at
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()
        self._frozen = threading.Event()
        self._closed = threading.Event()
        self._pairs: list[_Pair] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed.is_set():
                client, _ = self._listener.accept()
                self._pairs.append(_Pair(client, self._target, self._frozen, self._silent_at))

    def lead_to(self, target: int) -> None:
        """Forward new connections to another port; open ones are unaffected, as when a virtual address moves."""
        self._target = target

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Forward nothing, on old connections and on new ones."""
        for pair in self._pairs:
            pair.dead.set()
        self._frozen.set()
        yield
        for pair in self._pairs:
            pair.dead.set()
        self._frozen.clear()

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for pair in self._pairs:
            pair.close()


class _Pair:
    """Two sockets, and a thread that copies bytes between them until it is stopped."""

    def __init__(
        self, client: socket.socket, target: int, frozen: threading.Event, silent_at: bytes | None = None
    ) -> None:
        self.dead = threading.Event()
        self._silent_at = silent_at
        self._sockets = [client]
        if not frozen.is_set():
            with contextlib.suppress(OSError):
                self._sockets.append(socket.create_connection(("127.0.0.1", target)))
                threading.Thread(target=self._carry, daemon=True).start()
                return
            client.close()

    def _carry(self) -> None:
        other = dict(zip(self._sockets, reversed(self._sockets), strict=True))
        with contextlib.suppress(OSError, ValueError):
            while not self.dead.is_set():
                ready, _, _ = select.select(self._sockets, [], [], 0.1)
                for each in ready if not self.dead.is_set() else []:
                    data = each.recv(1 << 16)
                    if not data:
                        self.close()
                        return
                    if self._silent_at is not None and self._silent_at in data:
                        self.dead.set()
                        break
                    other[each].sendall(data)
            return
        self.close()

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
