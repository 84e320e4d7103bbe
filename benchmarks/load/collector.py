"""A collector that takes traces and keeps none: `python -m benchmarks.load.collector PORT`.

It answers every export at once. Says where it listens, and at the end of its input how many exports and bytes it took.
"""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Sink(ThreadingHTTPServer):
    """Counts what it takes."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Export)
        self.exports = 0
        self.bytes = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Export(BaseHTTPRequestHandler):
    """One export, read and forgotten."""

    protocol_version = "HTTP/1.1"
    server: Sink

    def do_POST(self) -> None:
        size = len(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.exports += 1
        self.server.bytes += size
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def main() -> int:
    sink = Sink(int(sys.argv[1]) if len(sys.argv) > 1 else 4318)
    threading.Thread(target=sink.serve_forever, daemon=True).start()
    print(sink.url, flush=True)
    sys.stdin.read()
    print(f"{sink.exports} exports, {sink.bytes} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
