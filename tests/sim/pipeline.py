"""Stages with a clock: how much of their time a load leaves them idle. Times are virtual; nothing is computed twice.

A stage runs one step at a time, in the order of the plans. A step reaches the next stage when it has left the one
before; the first stage begins a step when the tokens that its decoding rows need have come from the last one. A result
is at the scheduler a little later, and a plan at the first stage a little later than that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from penstock.protocol.steps import StepPlan, StepResult
from tests.sim.executor import ints
from tests.sim.lives import World
from tests.sim.server import Server

LATENCY = 0.1e-3  # seconds between processes, there or back
STEP = 4e-3  # of a stage, whatever the step has
TOKEN = 4e-6  # of a stage, for each token of a step


@dataclass(frozen=True)
class Load:
    """Requests that come at once."""

    stages: int
    rows: int
    tokens: int  # of output
    prompt: int = 16
    spread: int = 0  # of output tokens: the last request has so many more than the first
    piece: int = 512
    overlap: bool = True


class Stages:
    """Owner of the stages' clocks."""

    def __init__(self, stages: int) -> None:
        self.busy = 0.0  # seconds, of all stages
        self.began = 0.0  # when the last stage got its first step
        self.ended = 0.0
        self._free = [0.0] * stages
        self._known: dict[int, float] = {}  # slot → when its last token is at the first stage

    def run(self, decoding: set[int], plan: StepPlan, now: float) -> float:
        """When the step's result is at the scheduler."""
        chunks = ints(plan.chunks, 4)
        tokens = len(decoding) + sum(chunk[2] for chunk in chunks)
        cost = STEP + TOKEN * tokens
        at = max([now + LATENCY, *(self._known.get(slot, 0.0) for slot in decoding)])
        for stage, free in enumerate(self._free):
            at = self._free[stage] = max(at, free) + cost
            self.busy += cost
        self.began = self.began or at - cost
        self.ended = at
        for slot in [*decoding, *(chunk[0] for chunk in chunks if chunk[3])]:
            self._known[slot] = at
        return at + LATENCY


def idle_share(load: Load) -> float:
    """Share of the stages' time in which they had nothing to run, from the first step's beginning to the last's end,
    without the pipeline's fill and its emptying."""
    world = World(
        blocks=1 << 16, block_size=16, slots=max(8, load.rows), budget=8192, max_model_len=8192, piece=load.piece,
        depth=load.stages + load.overlap, stages=load.stages,
    )  # fmt: skip
    server, stages = Server(world), Stages(load.stages)
    for number in range(load.rows):
        most = load.tokens + load.spread * number // load.rows
        server.submit([number % 32] * load.prompt, max_tokens=most)
    now, coming = 0.0, deque[tuple[float, StepResult]]()
    while server.scheduler.unfinished or coming:
        while server.scheduler.in_flight < world.depth and (plan := server.scheduler.plan(now)) is not None:
            (result,) = server.executor.run(plan)
            coming.append((stages.run(set(server.executor._set(plan)), plan, now), result))
        now, result = coming.popleft()
        server.scheduler.apply(result, now)
        server.executor.applied(result.step)
    fill = (load.stages - 1) * (STEP + TOKEN * load.rows)  # of each stage, before its first step or behind its last
    span = load.stages * (stages.ended - (fill if load.rows > 1 else 0.0))
    return float(np.clip(1.0 - stages.busy / span, 0.0, 1.0))
