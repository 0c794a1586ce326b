"""As much of Kubernetes as spark-submit needs to submit a driver: it stores all objects, and each pod succeeds."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Server(ThreadingHTTPServer):
    given: dict[str, Any]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        given["metadata"]["uid"] = "1"
        self.server.given[f"{given['kind']} {given['metadata']['name']}"] = given
        self._answer(201, given)

    do_PATCH = do_POST

    def do_GET(self) -> None:
        if "watch=" in self.path:
            self._answer(200, {})
        else:
            pod = self.server.given[f"Pod {self.path.rpartition('/')[2]}"]
            self._answer(200, pod | {"status": {"phase": "Succeeded"}})

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, code: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def kubernetes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield its address, and the objects that it received, by kind and name."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.given = {}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", server.given
        server.shutdown()
