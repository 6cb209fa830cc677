"""A stand-in for a server: it answers every GET alike."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import MappingProxyType


@contextmanager
def answering(
    body: str | bytes, status: int = 200, key: str | None = None, headers: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """Its address; with `key`, whoever does not send it as a bearer token is told 401."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = key is None or self.headers.get("Authorization") == f"Bearer {key}"
            self.send_response(status if allowed else 401)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
