"""The benchmark of links: both ways are measured, by two processes, with what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import links
from benchmarks.links import Trips, free_address, least
from penstock.protocol.config import Config, LinksConfig
from penstock.protocol.validation import check
from penstock.services.links.curve import new_keys, write_keys


def test_it_prints_a_row_for_each_way_and_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "measure", lambda _, way, size, count: Trips(size + bool(way.link_keys), 2.0, 3.0))
    links.main(["--sizes", "20,40", "--rounds", "2", "--count", "7"])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 5
    assert re.fullmatch(r"socket file +20 +20 +2 +3", rows[1])
    assert re.fullmatch(r"TCP with keys +40 +41 +2 +3", rows[4])


@pytest.mark.parametrize("tcp", [False, True])
def test_round_trips_between_two_processes(tmp_path: Path, tcp: bool) -> None:
    way = LinksConfig()
    if tcp:
        write_keys(tmp_path / "k", new_keys())
        way = LinksConfig(tokenizer_address=free_address(), link_keys=str(tmp_path / "k"))
    found = links.measure(tmp_path, way, size=10, count=20)
    assert 0 < found.median <= found.high
    assert found.cpu >= 0


def test_the_least_is_of_each_figure() -> None:
    assert least([Trips(1.0, 9.0, 5.0), Trips(2.0, 8.0, 5.0)]) == Trips(1.0, 8.0, 5.0)


def test_the_address_is_one_that_an_option_may_be() -> None:
    check(Config(links=LinksConfig(tokenizer_address=free_address(), link_keys="k")))
