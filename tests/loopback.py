"""An HTTP server on 127.0.0.1 that misbehaves as it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Answer:
    """How one request is answered; the defaults are good manners."""

    status: int = 0  #: another status than 200 or 206, and no content
    stops_after: int | None = None  #: bytes, then the connection is cut
    knows_range: bool = True
    pause: float = 0.0  #: seconds before each piece
    piece: int = 1 << 16


@dataclass
class Loopback:
    files: dict[str, bytes]
    script: list[Answer] = field(default_factory=list)  #: one answer a request; when they are used up, good manners
    asked: list[tuple[str, str | None]] = field(default_factory=list)  #: path and Range of every request
    port: int = 0

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"


@contextmanager
def serving(files: dict[str, bytes], *script: Answer) -> Iterator[Loopback]:
    world = Loopback(dict(files), list(script))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            world.asked.append((self.path, wanted))
            answer = world.script.pop(0) if world.script else Answer()
            content = world.files.get(self.path.lstrip("/"))
            if answer.status or content is None:
                self.send_error(answer.status or 404)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and answer.knows_range else 0
            if start and start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            sent = content[start:][: answer.stops_after]
            for at in range(0, len(sent), answer.piece):
                time.sleep(answer.pause)
                self.wfile.write(sent[at : at + answer.piece])
                self.wfile.flush()

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    world.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield world
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
