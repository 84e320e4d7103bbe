"""What a single replica says to a crowd: replicas apart, on one host or two, are held to it."""

from __future__ import annotations

import pytest

from tests.e2e.chaos.crowd import Ask, Heard, calm, crowd
from tests.e2e.server import serving

STREAMS = 8
PLAIN = ("--dtype", "float32", "--cpu-threads", "1", "--max-num-seqs", "32", "--block-size", "4")


@pytest.fixture(scope="package")
def asks() -> list[Ask]:
    return crowd(STREAMS)


@pytest.fixture(scope="package")
def others() -> list[Ask]:
    """Of whose prompts no last block is anywhere before they are asked for the first time."""
    return crowd(STREAMS, "Then, one day, ")


@pytest.fixture(scope="package")
def single(tmp_path_factory: pytest.TempPathFactory, asks: list[Ask], others: list[Ask]) -> tuple[list[Heard], ...]:
    """What a single replica says to either."""
    with serving(tmp_path_factory.mktemp("alone"), *PLAIN) as server:
        return calm(server.url, asks), calm(server.url, others)


@pytest.fixture(scope="package")
def undisturbed(single: tuple[list[Heard], ...]) -> list[Heard]:
    return single[0]
