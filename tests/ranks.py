"""Processes that share a model, as a group's executors do: gloo on this machine, forked from one that has torch."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine_core.execution.group import Group

SECONDS = 240.0  # that a member may take for one thing; nobody waits that long unless something hangs


class Ranks:
    """As many processes as the largest group has members. Smaller groups are the first ones of them."""

    def __init__(self, sizes: tuple[int, ...], folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "benchmarks.structured_engine"])
        self._links: list[Connection] = []
        self._processes = []
        for rank in range(max(sizes)):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, sizes, str(folder / "store"), theirs), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)

    def run(self, size: int, work: Callable[..., Any], *arguments: object) -> list[Any]:
        """What `work(group, *arguments)` gives on each of `size` ranks. Raises AssertionError with a rank's trace."""
        for link in self._links[:size]:
            link.send((size, work, arguments))
        found = []
        for rank, link in enumerate(self._links[:size]):
            assert link.poll(SECONDS), f"rank {rank} of {size} hangs"
            fine, result = link.recv()
            assert fine, f"rank {rank} of {size}: {result}"
            found.append(result)
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def serve(rank: int, sizes: tuple[int, ...], store: str, link: Connection) -> None:
    """One process: what it is told to run, until it is ended."""
    torch.set_num_threads(1)
    most = max(sizes)
    dist.init_process_group("gloo", store=dist.FileStore(store, most), rank=rank, world_size=most)
    parts = {size: dist.new_group(list(range(size))) for size in sizes if size > 1}
    while True:
        size, work, arguments = link.recv()
        group = Group(rank, size, ranks=parts[size], members=parts[size]) if size > 1 else Group()
        try:
            found: tuple[bool, Any] = True, work(group, *arguments)
        except Exception:
            found = False, traceback.format_exc()
        link.send(found)
