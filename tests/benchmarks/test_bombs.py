"""What a stream notices of bombs: the parts of the measurement; its figures are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.bombs import KINDS, Bombers, bombs, deck, gaps, summary
from tests.e2e.server import serving


def test_no_bomb_is_like_another() -> None:
    bodies = [body for salt in (1, 2) for _, body in bombs(salt)]
    assert len(set(bodies)) == len(bodies)
    names = [name for name, _ in bombs(1)]
    assert len(set(names)) == len(names)
    assert json.loads(bodies[0])["seed"] == 1


def test_a_deck_has_all_kinds_in_an_order_of_its_own() -> None:
    bodies = [body for _, body in bombs(3)]
    dealt = deck(3)
    assert len(dealt) == len(set(dealt)) == KINDS
    assert set(dealt) == set(bodies)
    assert dealt != bodies


def test_gaps_are_summed_up() -> None:
    found = summary([float(number) for number in range(200, 0, -1)])
    assert found == {"tokens": 200, "median_ms": 100.5, "p99_ms": 199.0, "max_ms": 200.0}


def test_a_stream_goes_on_among_bombs(tmp_path: Path) -> None:
    with serving(tmp_path, "--grammar-compile-timeout", "0.2") as server:
        bombers = Bombers(server.url, [body for _, body in bombs(9)])
        try:
            assert gaps(server.url, 60), "how many there are is the machine's: deltas of a late stream are merged"
        finally:
            bombers.stop()
        assert bombers.statuses
        assert set(bombers.statuses) <= {200, 400}
        assert server.get("/health/ready")
