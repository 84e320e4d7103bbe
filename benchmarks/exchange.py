"""Small all-reduces with the residual addition and the norm behind them: `python -m benchmarks.exchange`.

A process for each GPU, as in a group. For each hidden size and number of tokens: microseconds of a call by NCCL's
all-reduce and the norm's kernel, by NCCL's gathering and a sum in the order of ranks (what `--batch-invariant` asks
for), and by the exchange, each in a CUDA graph of several calls; the slowest rank counts. Beside them stands the time
that the bytes which a rank sends in an exchange take at NVLink's speed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from engine_core.execution.exchange import open_exchange
from engine_core.execution.exchange_trial import Trial, try_exchange
from engine_core.execution.group import Group
from engine_core.execution.peers import CudaMemory
from services.executor.membership import ENVIRONMENT, ONE_HOST

RANKS = (2, 4, 8)
HIDDEN = (4096, 8192)
NVLINK = 450e9  # bytes a second that an H100 or H200 sends
SECONDS = 300.0  # that ranks may take for everything


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange of so many rows, in microseconds."""

    chip: str
    ranks: int
    hidden: int
    tokens: int
    reduced: float  # NCCL's all-reduce, and the norm
    gathered: float  # NCCL's gathering, a sum in the order of ranks, and the norm
    exchanged: float
    sent: float  # what the bytes of the exchange take at NVLink's speed


def figure(chip: str, ranks: int, hidden: int, reduced: Sequence[Trial], gathered: Sequence[Trial]) -> Figure:
    """Of what each rank found at one size."""
    rows = reduced[0].rows
    return Figure(
        chip=chip, ranks=ranks, hidden=hidden, tokens=rows,
        reduced=max(trial.summed for trial in reduced), gathered=max(trial.summed for trial in gathered),
        exchanged=max(trial.exchanged for trial in reduced), sent=(ranks - 1) * rows * hidden * 2 / NVLINK * 1e6,
    )  # fmt: skip


def measure(rank: int, ranks: int, hidden: Sequence[int], store: str, link: Connection) -> None:
    """One rank: what it finds at each hidden size, plainly and in the order of ranks."""
    for name, value in {**ENVIRONMENT, **ONE_HOST}.items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=FileStore(store, ranks), rank=rank, world_size=ranks)
    members = dist.group.WORLD
    assert members is not None, "it was just made"
    group = Group(rank, ranks, ranks=members, members=members)
    torch.cuda.synchronize(device)
    for width in hidden:
        exchange = open_exchange(members, width, torch.bfloat16, device, CudaMemory())
        found = [try_exchange(replace(group, invariant=ordered), exchange, device) for ordered in (False, True)]
        torch.cuda.synchronize(device)
        exchange.close()
        link.send([[msgspec.to_builtins(trial) for trial in trials] for trials in found])
    link.recv()  # until all are done


def figures(ranks: int, hidden: Sequence[int]) -> list[Figure]:
    """What so many GPUs give."""
    context = multiprocessing.get_context("spawn")
    links, processes, found = [], [], []
    chip = torch.cuda.get_device_name(0)
    with tempfile.TemporaryDirectory(prefix="penstock-exchange-") as place:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=measure, args=(rank, ranks, hidden, f"{place}/store", theirs), daemon=True)
            process.start()
            theirs.close()
            links.append(ours)
            processes.append(process)
        try:
            for width in hidden:
                told = []
                for rank, link in enumerate(links):
                    if not link.poll(SECONDS):
                        raise TimeoutError(f"rank {rank} of {ranks} says nothing for {SECONDS:g} s")
                    told.append(msgspec.convert(link.recv(), list[list[Trial]]))
                reduced, gathered = zip(*told, strict=True)  # by rank, of each size
                sizes = zip(zip(*reduced, strict=True), zip(*gathered, strict=True), strict=True)
                found += [figure(chip, ranks, width, *size) for size in sizes]
        finally:
            for process in processes:
                process.kill()
                process.join()
    return found


def table(found: Sequence[Figure]) -> str:
    """In Markdown."""
    lines = ["| GPUs | hidden | tokens | NCCL, norm | NCCL in order, norm | exchange | times | bytes alone |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for one in found:
        times = one.reduced / one.exchanged
        lines.append(
            f"| {one.ranks} | {one.hidden} | {one.tokens} | {one.reduced:.1f} | {one.gathered:.1f} "
            f"| {one.exchanged:.1f} | {times:.2f} | {one.sent:.1f} |"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.exchange", description=__doc__.partition("\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    found.add_argument("--ranks", type=int, action="append", help="GPUs; as many as there are of 2, 4 and 8")
    found.add_argument("--hidden", type=int, action="append", help="hidden sizes; 4096 and 8192")
    found.add_argument("--output", type=Path, help="write the figures there, as JSON")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    count = torch.cuda.device_count()
    sizes = [ranks for ranks in options.ranks or RANKS if ranks <= count]
    if not sizes:
        print(f"an exchange takes two GPUs or more, of which there are {count}", file=sys.stderr)
        return 2
    found = [one for ranks in sizes for one in figures(ranks, options.hidden or HIDDEN)]
    if options.output is not None:
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    print(f"{found[0].chip}, microseconds\n\n{table(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
