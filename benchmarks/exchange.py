"""Small all-reduces with the residual addition and the norm behind them: `python -m benchmarks.exchange`.

A process for each GPU, as in a group. For each hidden size and number of tokens: microseconds of a call by NCCL's
all-reduce and the norm's kernel, by NCCL's gathering and a sum in the order of ranks (what `--batch-invariant` asks
for), and by the exchange, each in a CUDA graph of several calls; the slowest rank counts. Beside them stands the time
that the bytes which a rank sends in an exchange take at NVLink's speed. `--passes` adds what it is worth to a model: a
decode pass through some layers of 8B's and of 70B's shape, with it and without.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from benchmarks import report
from benchmarks.shapes import EIGHT, SEVENTY, Shape
from penstock.engine_core.distributed.custom_all_reduce import CudaMemory, Exchange, open_exchange
from penstock.engine_core.distributed.group import Group
from penstock.engine_core.execution.all_reduce_tuning import Trial, microseconds, try_exchange
from penstock.engine_core.loading import load
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from penstock.kernels.records import AttentionBatch
from penstock.services.executor.process_groups import ENVIRONMENT
from penstock.services.executor.rendezvous import LOOPBACK, choose

RANKS = (2, 4, 8)
HIDDEN = (4096, 8192)
NVLINK = 450e9  # bytes a second that an H100 or H200 sends
SECONDS = 300.0  # that ranks may take for one hidden size
LAYERS, CONTEXT, PAGE = 8, 256, 16  # of a pass
BATCHES = (1, 8, 64, 256)  # rows of a pass
SHAPES = (EIGHT, SEVENTY)


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


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """A decode pass through some layers, in microseconds."""

    shape: str
    ranks: int
    layers: int
    tokens: int
    reduced: float
    exchanged: float


def decode_batch(rows: int, device: torch.device) -> AttentionBatch:
    """Rows that decode behind so much context, each in pages of its own."""
    first = torch.arange(rows, dtype=torch.int32, device=device)
    pages = CONTEXT // PAGE
    tables = 1 + first[:, None] * pages + torch.arange(pages, dtype=torch.int32, device=device)
    arrivals = None
    if device.type == "cuda":
        from penstock.kernels.attention_device import arrival_counters

        arrivals = arrival_counters(device)
    return AttentionBatch(
        query_start=torch.arange(rows + 1, dtype=torch.int32, device=device), context=torch.full_like(first, CONTEXT),
        slots=first, block_tables=tables, slot_mapping=tables[:, -1].long() * PAGE + PAGE - 1,
        max_query=1, max_context=CONTEXT, arrivals=arrivals,
    )  # fmt: skip


@torch.inference_mode()
def passes(
    group: Group, shape: Shape, folder: Path, batches: Sequence[int], dtype: torch.dtype, device: torch.device,
    timed: Callable[[Callable[[], object], torch.device], float],
) -> list[float]:  # fmt: skip
    """What a pass takes by the rows in it, in a group with an exchange or without."""
    (folder / "config.json").write_text(json.dumps({**shape.config, "num_hidden_layers": LAYERS}))
    spec = read_spec(folder)
    model = build(spec, dtype, device, CONTEXT, group=group)
    load(model, folder, "dummy", 1)
    kv_heads = model.placement.kv_heads(spec.attention.kv_heads)
    sizes = 1 + max(batches) * CONTEXT // PAGE, PAGE, kv_heads, spec.attention.head_dim
    cache = [(torch.zeros(sizes, dtype=dtype, device=device),) * 2 for _ in range(spec.layers)]
    found = []
    for rows in batches:
        ids, batch = torch.arange(rows, dtype=torch.int32, device=device), decode_batch(rows, device)
        positions = torch.full((rows,), CONTEXT - 1, device=device)

        def run(ids: torch.Tensor = ids, positions: torch.Tensor = positions, batch: AttentionBatch = batch) -> object:
            return model.forward(ids, positions, replace(batch), cache)

        found.append(timed(run, device))
    return found


def compare_passes(group: Group, exchange: Exchange, shape: Shape, folder: Path, device: torch.device) -> list[Pass]:
    """A pass of each size, both ways."""
    ways = [
        passes(one, shape, folder, BATCHES, torch.bfloat16, device, microseconds)
        for one in (group, replace(group, exchange=exchange))
    ]
    return [
        Pass(shape=shape.title, ranks=group.size, layers=LAYERS, tokens=rows, reduced=reduced, exchanged=exchanged)
        for rows, reduced, exchanged in zip(BATCHES, *ways, strict=True)
    ]


def measure(rank: int, ranks: int, hidden: Sequence[int], whole: bool, place: str, link: Connection) -> None:
    """One rank: what it finds at each hidden size, plainly and in the order of ranks, and of a pass if that is asked
    for."""
    choose(LOOPBACK)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=FileStore(f"{place}/store", ranks), rank=rank, world_size=ranks)
    members = dist.group.WORLD
    assert members is not None, "it was just made"
    group = Group(rank, ranks, ranks=members, members=members)
    torch.cuda.synchronize(device)
    for width in hidden:
        exchange = open_exchange(members, width, torch.bfloat16, device, CudaMemory())
        found = [try_exchange(replace(group, invariant=ordered), exchange, device) for ordered in (False, True)]
        shapes = [shape for shape in SHAPES if whole and shape.config["hidden_size"] == width]
        own = Path(place) / str(rank)
        own.mkdir(exist_ok=True)
        through = [one for shape in shapes for one in compare_passes(group, exchange, shape, own, device)]
        torch.cuda.synchronize(device)
        exchange.close()
        link.send(msgspec.to_builtins((*found, through)))
    link.recv()  # until all are done


def figures(ranks: int, hidden: Sequence[int], whole: bool) -> tuple[list[Figure], list[Pass]]:
    """What so many GPUs give; of passes what the first rank finds."""
    context = multiprocessing.get_context("spawn")
    links, processes = [], []
    found: list[Figure] = []
    through: list[Pass] = []
    chip = torch.cuda.get_device_name(0)
    with tempfile.TemporaryDirectory(prefix="penstock-exchange-") as place:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=measure, args=(rank, ranks, hidden, whole, place, theirs), daemon=True)
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
                    told.append(msgspec.convert(link.recv(), tuple[list[Trial], list[Trial], list[Pass]]))
                reduced, gathered, _ = zip(*told, strict=True)  # by rank, of each size
                sizes = zip(zip(*reduced, strict=True), zip(*gathered, strict=True), strict=True)
                found += [figure(chip, ranks, width, *size) for size in sizes]
                through += told[0][2]
        finally:
            for process in processes:
                process.kill()
                process.join()
    return found, through


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


def table_of_passes(found: Sequence[Pass]) -> str:
    """In Markdown."""
    lines = [
        f"| {one.ranks} | {one.shape} | {one.layers} | {one.tokens} | {one.reduced:.0f} | {one.exchanged:.0f} "
        f"| {one.reduced / one.exchanged:.2f} |"
        for one in found
    ]
    heads = "| GPUs | shape | layers | rows | NCCL | exchange | times |", "|---|---|---|---|---|---|---|"
    return "\n".join([*heads, *lines])


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.exchange", description=__doc__.partition("\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    found.add_argument("--ranks", type=int, action="append", help="GPUs; as many as there are of 2, 4 and 8")
    found.add_argument("--hidden", type=int, action="append", help="hidden sizes; 4096 and 8192")
    found.add_argument("--passes", action="store_true", help="decode passes, too")
    found.add_argument("--output", type=Path, help="write the figures there, as JSON")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    count = torch.cuda.device_count()
    sizes = [ranks for ranks in options.ranks or RANKS if ranks <= count]
    if not sizes:
        print(f"an exchange takes two GPUs or more, of which there are {count}", file=sys.stderr)
        return 2
    found: list[Figure] = []
    through: list[Pass] = []
    for ranks in sizes:
        of_calls, of_passes = figures(ranks, options.hidden or HIDDEN, options.passes)
        found += of_calls
        through += of_passes
    if options.output is not None:
        report.write(options.output, "exchange", {"calls": found, "passes": through}, arguments)
    print(f"{found[0].chip}, microseconds\n\n{table(found)}")
    if through:
        print(f"\n{table_of_passes(through)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
