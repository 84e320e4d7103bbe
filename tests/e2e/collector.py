"""A collector for tests, in a process of its own: takes OTLP over HTTP, decodes it with OpenTelemetry's own classes,
and gives back what it has got.

    POST /v1/traces   an ExportTraceServiceRequest
    GET /spans        all spans so far, as JSON
    POST /answers     {"status": 200, "delay": 0}: how exports are answered from now on
"""

from __future__ import annotations

import contextlib
import gzip
import json
import select
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

Span = dict[str, Any]


def plain(value: Any) -> Any:
    """An AnyValue."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(each) for each in value.array_value.values]
    return getattr(value, kind)


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: plain(pair.value) for pair in pairs}


def record(resource: Any, scope: Any, span: Any) -> Span:
    """A span as tests read it."""
    return {
        "resource": attributes(resource.attributes), "scope": scope.name,
        "trace": span.trace_id.hex(), "id": span.span_id.hex(), "parent": span.parent_span_id.hex(),
        "name": span.name, "kind": span.kind, "state": span.trace_state,
        "start": span.start_time_unix_nano, "end": span.end_time_unix_nano,
        "attributes": attributes(span.attributes), "error": span.status.code == 2, "message": span.status.message,
        "events": [{"name": event.name, "time": event.time_unix_nano, "attributes": attributes(event.attributes)}
                   for event in span.events],
        "links": [{"trace": link.trace_id.hex(), "id": link.span_id.hex()} for link in span.links],
    }  # fmt: skip


def decoded(body: bytes) -> list[Span]:
    """The spans of one export, each with its resource."""
    return [
        record(told.resource, scoped.scope, span)
        for told in ExportTraceServiceRequest.FromString(body).resource_spans
        for scoped in told.scope_spans
        for span in scoped.spans
    ]


class Store:
    """What has come, and how exports are answered."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.status = 200
        self.gate = threading.Event()
        self.gate.set()


def served(store: Store) -> type[BaseHTTPRequestHandler]:
    class Exchange(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(200, json.dumps(store.spans).encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/answers":
                wanted = json.loads(body)
                store.status = wanted.get("status", 200)
                (store.gate.clear if wanted.get("hang") else store.gate.set)()
                self.answer(200, b"{}")
                return
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            store.gate.wait()
            if store.status == 200:
                store.spans += decoded(body)
            with contextlib.suppress(ConnectionError):  # who was kept waiting may have given up
                self.answer(store.status, b"")

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Exchange


class Collector:
    """The process as a test sees it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def spans(self) -> list[Span]:
        with urllib.request.urlopen(self.url + "/spans", timeout=30) as answer:
            found: list[Span] = json.load(answer)
        return found

    def answers(self, **how: Any) -> None:
        request = urllib.request.Request(self.url + "/answers", json.dumps(how).encode(), method="POST")
        urllib.request.urlopen(request, timeout=30).close()

    def trace(self, trace: str, done: Callable[[list[Span]], bool], limit: float = 120.0) -> list[Span]:
        """The spans of one trace, once `done` holds of them."""
        deadline = time.monotonic() + limit
        while True:
            found = [span for span in self.spans() if span["trace"] == trace]
            if done(found):
                return found
            names = sorted((span["resource"]["service.name"], span["name"]) for span in found)
            assert time.monotonic() < deadline, f"the trace stayed at {names}"
            select.select([], [], [], 0.05)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that runs."""
    process = subprocess.Popen([sys.executable, "-m", "tests.e2e.collector"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Collector(process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), served(Store()))
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
