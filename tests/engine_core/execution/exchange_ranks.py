"""What ranks do in tests of the exchange: on GPUs, or by Triton's interpreter over memory in files."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine_core.distributed.custom_all_reduce import CudaMemory, DeviceMemory, Exchange, open_exchange
from penstock.engine_core.distributed.group import Group
from penstock.engine_core.execution.cuda_graphs import Memory
from penstock.kernels.exchange import add_parts
from tests.engine_core.execution.file_memory import FileMemory

EPS = 1e-5
VARIANTS = 4  # of what is exchanged, between replays

Pair = tuple[Tensor, Tensor]  # norm and residual


def drawn(seed: int, ranks: int, rows: int, width: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """Every rank's parts, residual and weight: the same wherever they are drawn. Some numbers are zeros, minus zeros,
    and as large as their type has them."""
    generator = torch.Generator().manual_seed(seed)
    *parts, residual = (torch.randn(rows, width, generator=generator) for _ in range(ranks + 1))
    for part in parts:
        part[torch.rand(rows, width, generator=generator) < 0.05] = -0.0
        part[torch.rand(rows, width, generator=generator) < 0.01] = 200.0
    weight = torch.rand(width, generator=generator) + 0.5
    return [part.to(dtype) for part in parts], residual.to(dtype), weight.to(dtype)


def here() -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def opened(group: Group, width: int, dtype: torch.dtype, folder: Path) -> Iterator[Exchange]:
    """An exchange between the group's ranks, closed behind it."""
    assert group.ranks is not None
    device = here()
    memory: DeviceMemory = FileMemory(folder)
    if device.type == "cuda":
        torch.cuda.synchronize()
        memory = CudaMemory()
    exchange = open_exchange(group.ranks, width, dtype, device, memory)
    yield exchange
    if device.type == "cuda":
        torch.cuda.synchronize()
    exchange.close()


def dawdle(dice: random.Random) -> None:
    """Take a time that differs from rank to rank."""
    if torch.cuda.is_available():
        torch.cuda._sleep(dice.choice((0, 0, 1_000, 30_000, 300_000)))
    else:
        for _ in range(dice.choice((0, 0, 1, 40))):
            torch.randn(64, 64) @ torch.randn(64, 64)


def exchanged(
    group: Group, sizes: Sequence[int], width: int, dtype: torch.dtype, folder: Path, seed: int
) -> list[Pair]:
    """One exchange of each size after the other, at whatever time each rank comes to it. On the host."""
    device, dice, found = here(), random.Random(group.rank * 1000 + seed), []
    with opened(group, width, dtype, folder) as exchange:
        for at, rows in enumerate(sizes):
            parts, residual, weight = drawn(seed + at, group.size, rows, width, dtype)
            given = (tensor.to(device) for tensor in (parts[group.rank], residual, weight))
            dawdle(dice)
            found.append(exchange.add(*given, EPS))
        return [(normed.cpu(), total.cpu()) for normed, total in found]


def differences(group: Group, sizes: Sequence[int], width: int, dtype: torch.dtype, seed: int) -> tuple[int, int]:
    """Numbers in which norms and sums of exchanges on GPUs differ from those by NCCL's gathering in the order of ranks
    and the norm's kernel."""
    device, dice = here(), random.Random(group.rank * 1000 + seed)
    ordered = replace(group, invariant=True)
    different = torch.zeros(2, dtype=torch.int64, device=device)
    with opened(group, width, dtype, Path()) as exchange:
        generator = torch.Generator(device).manual_seed(seed + group.rank)
        common = torch.Generator(device).manual_seed(seed)
        weight = torch.rand(width, generator=common, device=device).to(dtype)
        for rows in sizes:
            partial = torch.randn(rows, width, generator=generator, device=device).to(dtype)
            residual = torch.randn(rows, width, generator=common, device=device).to(dtype)
            dawdle(dice)
            found = exchange.add(partial, residual, weight, EPS)
            expected = add_parts([ordered.all_reduce(partial)], residual, weight, EPS)
            different += torch.stack([(one != other).sum() for one, other in zip(found, expected, strict=True)])
        of_norms, of_sums = different.tolist()
        return of_norms, of_sums


def replayed(
    group: Group, sizes: Sequence[int], width: int, dtype: torch.dtype, replays: int, seed: int
) -> tuple[int, int]:
    """Graphs of several exchanges each, of several sizes, replayed in a random order with exchanges outside of them
    between, each rank in its own time. Numbers that are not what they should be, and exchanges made."""
    device, dice, order = here(), random.Random(group.rank * 1000 + seed), random.Random(seed)
    wrong, made = torch.zeros((), dtype=torch.int64, device=device), 0
    with opened(group, width, dtype, Path()) as exchange:
        scenes = []
        for rows in sizes:
            variants = []
            for variant in range(VARIANTS):
                drawn_parts, *rest = drawn(seed + variant, group.size, rows, width, dtype)
                parts = [part.to(device) for part in drawn_parts]
                residual, weight = (tensor.to(device) for tensor in rest)
                variants.append((parts[group.rank], residual, weight, add_parts(parts, residual, weight, EPS)))
            partial, residual, weight, _ = (tensor for tensor in variants[0])
            still = partial.clone(), residual.clone(), weight.clone()

            def thrice(still: tuple[Tensor, Tensor, Tensor] = still) -> list[Pair]:
                return [exchange.add(*still, EPS) for _ in range(3)]

            graph, outputs = Memory(device).capture(thrice, run=True)
            scenes.append((graph, outputs, still, variants))
        for _ in range(replays):
            graph, outputs, still, variants = order.choice(scenes)
            *given, expected = order.choice(variants)
            for place, tensor in zip(still, given, strict=True):
                place.copy_(tensor)
            dawdle(dice)
            graph.replay()
            results = list(outputs)
            if order.random() < 0.3:
                results.append(exchange.add(*given, EPS))
            made += len(results)
            for result in results:
                for one, other in zip(result, expected, strict=True):
                    wrong += (one != other).sum()
        torch.cuda.synchronize()
        del scenes, graph
        return int(wrong), made


def waiting(group: Group) -> str:
    """The first rank of two waits for the other, which never comes."""
    exchange = opened(group, 256, torch.bfloat16, Path()).__enter__()
    if group.rank == 0:
        line = torch.zeros(4, 256, dtype=torch.bfloat16, device=here())
        exchange.add(line, line, line[0], EPS)
        return "waits" if not torch.cuda.current_stream().query() else "went on"
    return "is elsewhere"
