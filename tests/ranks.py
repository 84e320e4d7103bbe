"""Processes that share a model, as a group's executors do: over gloo, or NCCL with a GPU for each, forked from one that
has torch."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.engine_core.distributed.group import Group
from penstock.services.executor.process_groups import ENVIRONMENT
from penstock.services.executor.rendezvous import LOOPBACK, choose

Size = int | tuple[int, int]  # ranks, or ranks and stages
SECONDS = 240.0  # that a member may take for one thing; nobody waits that long unless something hangs


class Ranks:
    """As many processes as the largest group has members. Smaller groups are the first ones of them. `device`: cpu, or
    cuda, or "own cuda" where each process sees its own GPU alone."""

    def __init__(self, sizes: tuple[Size, ...], folder: Path, device: str = "cpu") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "benchmarks.structured_engine"])
        self._links: list[Connection] = []
        self._processes = []
        for rank in range(max(map(count, sizes))):
            ours, theirs = context.Pipe()
            arguments = rank, sizes, str(folder / "store"), device, theirs
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)

    def run(self, size: Size, work: Callable[..., Any], *arguments: object) -> list[Any]:
        """What `work(group, *arguments)` gives on each of `size` ranks. Raises AssertionError with a rank's trace."""
        for link in self._links[: count(size)]:
            link.send((size, work, arguments))
        found = []
        for rank, link in enumerate(self._links[: count(size)]):
            assert link.poll(SECONDS), f"rank {rank} of {size} hangs"
            fine, result = link.recv()
            assert fine, f"rank {rank} of {size}: {result}"
            found.append(result)
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def count(size: Size) -> int:
    """Members of a group."""
    return size if isinstance(size, int) else size[0] * size[1]


def member(rank: int, size: Size) -> Group:
    """A group of the first processes, as one of the members sees it. Every process makes all its process groups."""
    ranks, stages = (size, 1) if isinstance(size, int) else size
    everybody = list(range(ranks * stages))
    if len(everybody) == 1:
        return Group()
    rows = [dist.new_group(everybody[stage * ranks : (stage + 1) * ranks]) for stage in range(stages)]
    columns = [[dist.new_group(everybody[column::ranks]) for column in range(ranks)] for _ in range(2)]
    members = dist.new_group(everybody)
    stage, column = divmod(rank, ranks)
    if rank not in everybody:
        return Group()
    mine = rows[stage] if ranks > 1 else None
    forwards, backwards = (made[column] if stages > 1 else None for made in columns)
    return Group(column, ranks, stage, stages, mine, members, forwards, backwards)


def serve(rank: int, sizes: tuple[Size, ...], store: str, device: str, link: Connection) -> None:
    """One process: what it is told to run, until it is ended."""
    torch.set_num_threads(1)
    most = max(map(count, sizes))
    choose(LOOPBACK)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    backend = "gloo"
    if device == "own cuda":  # it sees no other
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = shown.split(",")[rank] if shown else str(rank)
    if device != "cpu":
        torch.cuda.set_device(rank if device == "cuda" else 0)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.FileStore(store, most), rank=rank, world_size=most)
    parts = {size: member(rank, size) for size in sizes}
    while True:
        size, work, arguments = link.recv()
        try:
            found: tuple[bool, Any] = True, work(parts.get(size, Group()), *arguments)
        except Exception:
            found = False, traceback.format_exc()
        link.send(found)
