"""Series of a scrape, their sums, and a server that is asked for them."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from benchmarks.samples import read_samples, scrape, total

TEXT = (
    "# HELP penstock_unfinished_requests of them\n# TYPE penstock_unfinished_requests gauge\n"
    'penstock_unfinished_requests{api="0"} 2.0\npenstock_unfinished_requests{api="1"} 1.0\n'
    "penstock_engine_drafts_total 3e2\npenstock_engine_drafts 7\nprocess_cpu_seconds_total 1.5\n"
)


def test_series_by_name_and_labels() -> None:
    assert [(sample.name, sample.labels, sample.value) for sample in read_samples(TEXT)] == [
        ("penstock_unfinished_requests", {"api": "0"}, 2.0), ("penstock_unfinished_requests", {"api": "1"}, 1.0),
        ("penstock_engine_drafts_total", {}, 300.0), ("penstock_engine_drafts", {}, 7.0),
        ("process_cpu_seconds_total", {}, 1.5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [("unfinished_requests", 3), ("engine_drafts_total", 300), ("engine_drafts", 7), ("engine", 0)]
)
def test_a_total_is_over_the_labels_and_of_one_name(name: str, value: float) -> None:
    assert total(read_samples(TEXT), name) == value


def test_a_total_is_over_the_series_with_these_labels() -> None:
    assert total(read_samples(TEXT), "unfinished_requests", api="0") == 2
    assert total(read_samples(TEXT), "unfinished_requests", api="2") == 0


def test_a_server_is_asked() -> None:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(TEXT.encode())

        def log_message(self, *words: object) -> None:
            """Nothing of it."""

    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        found = scrape(f"http://127.0.0.1:{server.server_port}")
        thread.join()
    assert found == read_samples(TEXT)


def test_nobody_there_is_an_error_of_the_system() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_port
    with pytest.raises(OSError):
        scrape(f"http://127.0.0.1:{port}")
