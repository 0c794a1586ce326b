"""A mail server that keeps what it receives, for tests of notifications."""

from __future__ import annotations

import email
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from email.policy import default
from html import unescape


class _Session(socketserver.StreamRequestHandler):
    """A session of SMTP (RFC 5321) without extensions."""

    server: Mailbox

    def handle(self) -> None:
        self._answer(220)
        while command := self.rfile.readline().strip().upper():
            if command == b"DATA":
                self._answer(354)
                lines = list(iter(self.rfile.readline, b".\r\n"))
                self.server.messages.append(email.message_from_bytes(b"".join(lines), policy=default))
            self._answer(221 if command == b"QUIT" else 250)

    def _answer(self, code: int) -> None:
        self.wfile.write(b"%d ok\r\n" % code)


class Mailbox(socketserver.ThreadingTCPServer):
    """A server on a free port of this host."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Session)
        self.messages: list[Message] = []

    @property
    def port(self) -> int:
        """Return its port."""
        return int(self.server_address[1])

    def texts(self) -> dict[str, str]:
        """Return the texts of the received messages, which are HTML, by subject; the latest of each."""
        return {str(message["Subject"]): unescape(_text(message)) for message in self.messages}


def _text(message: Message) -> str:
    parts = (part.get_payload(decode=True) for part in message.walk() if not part.is_multipart())
    return "\n".join(part.decode() for part in parts if isinstance(part, bytes))


@contextmanager
def mailbox() -> Iterator[Mailbox]:
    """Run the server."""
    with Mailbox() as server:
        thread = threading.Thread(target=server.serve_forever, name="smtp", daemon=True)
        thread.start()
        yield server
        server.shutdown()
