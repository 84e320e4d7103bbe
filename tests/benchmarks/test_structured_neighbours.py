"""What a stream notices of bombs: the parts of the measurement; its figures are not judged here."""

from __future__ import annotations

import json

from benchmarks import structured_neighbours as neighbours
from tests.e2e.server import Server, serving


def test_no_bomb_is_like_another() -> None:
    bodies = [json.dumps(neighbours.bomb(number)) for number in range(32)]
    assert len(set(bodies)) == 32


def test_gaps_are_summed_up() -> None:
    found = neighbours.summary([float(number) for number in range(200, 0, -1)])
    assert found == {"tokens": 200, "median_ms": 100.5, "p99_ms": 199.0, "max_ms": 200.0}


def test_a_stream_goes_on_among_bombs(tmp_path) -> None:
    with serving(tmp_path, "--grammar-compile-timeout", "0.2") as server:
        assert isinstance(server, Server)
        bombers = neighbours.Bombers(server.url)
        try:
            assert len(neighbours.gaps(server.url, 60)) > 20
        finally:
            bombers.stop()
        assert bombers.statuses
        assert set(bombers.statuses) <= {200, 400}
        assert server.get("/health/ready")
