"""Prefill and decode apart on a virtual clock: what a first token, a handover and the prefill GPU wait for."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from penstock.services.bench.workload import Workload, arrivals
from tests.sim.timed_cluster import BLOCK, PART, Speed, TimedCluster

PROMPT = 8192
BUSY = arrivals(Workload(requests=16, rate=4.5))  # a prompt waits most of the time
SPEED = Speed()
COPY = PROMPT * SPEED.token_copy
PART_COPY = PART * BLOCK * SPEED.token_copy
HOPS = 12 * SPEED.hop  # of messages, and more than a handover takes


def run(folder: Path, due: list[float]) -> TimedCluster:
    found = TimedCluster(folder, output=24)
    found.run(due)
    return found


def handovers(found: TimedCluster) -> list[float]:
    """Seconds of each stream between its first two tokens."""
    return [stamps[1] - stamps[0] for stamps in found.stamps.values()]


def test_first_tokens_wait_for_the_prompts_before_them_alone(tmp_path: Path) -> None:
    """As in a queue at one server with one time of service: copies cost the prefill GPU nothing, and it never idles
    while a prompt waits."""
    found, free = run(tmp_path, BUSY), 0.0
    seconds = SPEED.step + SPEED.row + PROMPT * SPEED.position
    for due, stamps in zip(BUSY, found.stamps.values(), strict=True):
        free = max(due, free) + seconds
        assert stamps[0] == pytest.approx(free, abs=HOPS)


def test_a_copy_waits_for_no_step_and_for_no_other_copy(tmp_path: Path) -> None:
    """Blocks go to the host's memory, and from there as they come; the request has its turn behind the steps in
    flight."""
    found = run(tmp_path, BUSY)
    steps = 3 * (SPEED.step + 4 * SPEED.row)
    assert max(handovers(found)) < COPY + PART_COPY + steps + HOPS < 2 * COPY


def test_waiting_for_the_older_step_would_cost_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.services.executor.steps.LONG", 1 << 30)
    found = run(tmp_path, BUSY)
    assert max(handovers(found)) > PROMPT * SPEED.position + COPY


def test_streams_never_wait_for_a_prompt(tmp_path: Path) -> None:
    found = run(tmp_path, BUSY)
    later = [b - a for stamps in found.stamps.values() for a, b in itertools.pairwise(stamps[1:])]
    assert max(later) < 2 * (SPEED.step + len(BUSY) * SPEED.row)
