"""Up to how many rows the custom all-reduce is faster than the collective and its norm: both are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from penstock.engine_core.distributed.custom_all_reduce import Exchange
from penstock.engine_core.distributed.group import Group
from penstock.engine_core.execution.cuda_graphs import Memory
from penstock.kernels.norm import add_norm

TRIED = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)  # rows
CALLS = 20  # in a graph
REPLAYS = 5  # of which the quickest counts
EPS = 1e-5


class Trial(msgspec.Struct, frozen=True):
    """Microseconds of one call in a graph, by the exchange and by the collective with the norm."""

    rows: int
    exchanged: float
    summed: float


@torch.inference_mode()
def try_exchange(group: Group, exchange: Exchange, device: torch.device) -> list[Trial]:
    """Measure both at several sizes. All ranks run this at once; their results may differ."""
    inboxes = exchange.inboxes
    weight = torch.ones(inboxes.width, dtype=inboxes.dtype, device=device)
    found = []
    for rows in (rows for rows in TRIED if rows <= exchange.rows):
        partial, residual = (torch.zeros(rows, inboxes.width, dtype=inboxes.dtype, device=device) for _ in range(2))
        exchanged = microseconds(lambda: exchange.add(partial, residual, weight, EPS), device)  # noqa: B023
        summed = microseconds(lambda: summed_norm(group, partial, residual, weight), device)  # noqa: B023
        found.append(Trial(rows, exchanged, summed))
    return found


def summed_norm(group: Group, partial: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The collective and the norm. Zeros stay zeros, however often they are summed in place."""
    return add_norm(group.all_reduce(partial), residual, weight, EPS)


def microseconds(call: Callable[[], object], device: torch.device) -> float:
    """The time of one call, in a graph of several."""

    def calls() -> None:
        for _ in range(CALLS):
            call()

    graph, _ = Memory(device).capture(calls, run=True)
    return replay_microseconds(graph, REPLAYS) / CALLS


def replay_microseconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """The time of the quickest of some replays, after one that does not count."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    took: list[float] = []
    for _ in range(1 + replays):  # the first one's beginning waits for the slowest rank
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        took.append(began.elapsed_time(ended) * 1e3)
    return min(took[1:])


def quicker_rows(trials: Sequence[Trial]) -> int:
    """Up to how many rows the exchange is faster at every size tried; 0: it never is."""
    found = 0
    for trial in trials:
        if trial.exchanged >= trial.summed:
            break
        found = trial.rows
    return found


def quickest(group: Group, exchange: Exchange, device: torch.device) -> tuple[Group, list[Trial]]:
    """The group with the exchange for as many rows as all ranks find it faster for, and this rank's trials. Where it
    never is faster the exchange is closed, and the group goes without."""
    trials = try_exchange(group, exchange, device)
    rows = group.all_min(quicker_rows(trials))
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    if not rows:
        exchange.close()
        return group, trials
    return replace(group, exchange=exchange.up_to(rows)), trials
