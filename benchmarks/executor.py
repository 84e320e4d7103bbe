"""Steps of one executor without its process: `python -m benchmarks.executor --shape 0.6b --batch 1 --batch 256`.

A model with random weights runs decode steps from plans like the scheduler's, blocks included, with the next step
launched before the result of the one before is read. With `--prompt` each step has a new prompt of so many tokens, too,
beside the batch's rows or, with `--batch 0`, alone. Printed for each batch: milliseconds per step, host microseconds of
launching and collecting, the share of the time in which the device stood idle, and with `--kernels` what the time went
to, from torch's profiler. `--depth 1` launches a step when the one before has been read: so a step takes as long as
somebody waits for it. Products are cut by the plans that ship, else by the rules, where a server measures at its start.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks import report
from benchmarks.shapes import SHAPES
from penstock.engine_core import loading
from penstock.engine_core.execution.cuda_graphs import absorbed_pairs, graph_sizes
from penstock.engine_core.execution.dummy_runs import warmup_steps
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.models import registry
from penstock.engine_core.models.kv_cache import with_kv_cache
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.memory_estimate import idle_weights, weights
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.engine_config import KV_AUTO, KV_FP8
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import SlotStart, StepPlan

BLOCK = 16
SLOTS = 256
STEP_TOKENS = 8192
WARM = 8  # steps before the clock runs
VARIED = 256  # tokens of prompts: products of equal rows take less power, and so less time, than any prompt's
TRACED = 28  # steps under the profiler, those included
Event = tuple[str, float, float]  # what ran on the device, its begin and its end in microseconds
WAYS = {
    "greedy": Sampling(temperature=0.0),
    "sampled": Sampling(temperature=0.8, top_p=0.95, top_k=40),
    "logprobs": Sampling(temperature=0.0, logprobs=5),
    "penalties": Sampling(temperature=0.7, frequency_penalty=0.2, presence_penalty=0.2),
}


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one batch."""

    batch: int  # decoding rows
    context: int
    prompt: int  # tokens beside them
    step_ms: float  # by the clock, steps in flight all the time
    busy_ms: float  # from a step's first work to its result, on the device
    launch_us: float  # of the host
    collect_us: float  # of the host, once the result is there
    idle: float  # share of the time in which the device ran no kernel; -1: not measured


@dataclass(frozen=True)
class Load:
    """Requests that decode side by side, all of one context, and beside them a prompt that is new with each step."""

    batch: int
    context: int
    steps: int
    way: Sampling
    shared: int = 0  # blocks that all of them begin with
    prompt: int = 0  # tokens; 0: none
    depth: int = 2  # steps in flight

    @property
    def blocks(self) -> int:
        """Of one request's own, at the end."""
        return -(-(self.context + BLOCK + self.steps + 1) // BLOCK) - self.shared

    def table(self, slot: int, first: int, end: int) -> list[int]:
        """Blocks first .. end - 1 of a request."""
        return [1 + block + (0 if block < self.shared else slot * self.blocks) for block in range(first, end)]

    def prompt_start(self) -> SlotStart:
        """The prompt in the slot and the blocks behind those of the batch."""
        first = 1 + self.shared + self.batch * self.blocks
        return SlotStart(
            slot=self.batch,
            token_ids=(np.arange(self.prompt, dtype="<i4") * 7919 % VARIED).tobytes(),
            prompt_tokens=self.prompt,
            computed=0,
            blocks=np.arange(first, first + -(-self.prompt // BLOCK), dtype="<i4").tobytes(),
            sampling=self.way,
            seed=0,
        )


def plans(load: Load) -> Iterator[StepPlan]:
    """A start, then steps; every request that decodes gets a new block whenever it needs one, at its own time."""
    starts, held = [], []
    for slot in range(load.batch):
        known = load.context + slot % BLOCK + 1  # blocks end at different steps
        held.append(-(-known // BLOCK))
        starts.append(
            SlotStart(
                slot=slot,
                token_ids=np.full(known, 7, "<i4").tobytes(),
                prompt_tokens=known,
                computed=known - 1,
                blocks=np.array(load.table(slot, 0, held[slot]), "<i4").tobytes(),
                sampling=load.way,
                seed=slot,
            )
        )
    on = np.arange(load.batch, dtype="<i4").tobytes()
    prompts = (load.prompt_start(),) if load.prompt else ()
    chunks = np.array([(load.batch, 0, load.prompt, 1)], "<i4").tobytes() if load.prompt else b""
    for step in range(load.steps):
        pairs = []
        for slot in range(load.batch):
            position = load.context + slot % BLOCK + step
            if position // BLOCK >= held[slot]:
                pairs += [slot, *load.table(slot, held[slot], held[slot] + 1)]
                held[slot] += 1
        blocks = np.array(pairs, "<i4").tobytes()
        yield StepPlan(
            step=step, epoch=1, starts=(*starts, *prompts) if step == 0 else prompts, blocks=blocks,
            decode_on=on if step == 0 else b"", chunks=chunks,
        )  # fmt: skip
    yield StepPlan(step=load.steps, epoch=1, decode_off=on)


def measure(runner: Runner, load: Load) -> Figure:
    """Run a load's plans, as many in flight as it says."""
    launches: list[float] = []
    collects: list[float] = []
    busy: list[float] = []
    flight: deque[Any] = deque()
    began = 0.0
    stream = list(plans(load))
    for at, plan in enumerate(stream[:-1]):
        if at == WARM:
            began = time.perf_counter()
        start = time.perf_counter()
        flight.append(runner.launch(plan))
        launches.append(time.perf_counter() - start)
        if len(flight) == load.depth:
            while not flight[0].finished:
                pass
            start = time.perf_counter()
            busy.append(runner.collect(flight.popleft()).busy)
            collects.append(time.perf_counter() - start)
    while flight:
        runner.collect(flight.popleft())
    taken = time.perf_counter() - began
    runner.collect(runner.launch(stream[-1]))
    return Figure(
        batch=load.batch,
        context=load.context,
        prompt=load.prompt,
        step_ms=round(taken * 1e3 / (load.steps - WARM), 3),
        busy_ms=round(statistics.median(busy[WARM:]) * 1e3, 3),
        launch_us=round(statistics.median(launches[WARM:]) * 1e6, 1),
        collect_us=round(statistics.median(collects[WARM:]) * 1e6, 1),
        idle=-1.0,
    )


def traced(runner: Runner, load: Load) -> list[Event]:
    """Kernels of the load's steps under the profiler."""
    stream = list(plans(load))
    flight: deque[Any] = deque()
    profile: Any = None
    for at, plan in enumerate(stream[:-1]):
        if at == WARM:
            torch.cuda.synchronize()
            profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profile.start()
        flight.append(runner.launch(plan))
        if len(flight) == load.depth:
            runner.collect(flight.popleft())
    while flight:
        runner.collect(flight.popleft())
    torch.cuda.synchronize()
    profile.stop()
    runner.collect(runner.launch(stream[-1]))
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        return read_trace(Path(file.name).read_bytes())


def read_trace(trace: bytes) -> list[Event]:
    """What the device did, in a trace as Chrome reads them; a kernel's name ends with the shape of its grid."""
    found = []
    for event in msgspec.json.decode(trace)["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            grid = "x".join(str(side) for side in event["args"].get("grid", ()))
            name = f"{event['name']} {grid}".strip()
            found.append((name, float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    return sorted(found, key=lambda event: event[1])


def idle_share(spans: Sequence[tuple[float, float]]) -> float:
    """Share of the time from the first begin to the last end that no span covers."""
    if not spans:
        return 1.0
    ordered = sorted(spans)
    covered, reach = 0.0, ordered[0][0]
    for begin, end in ordered:
        covered += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    whole = reach - ordered[0][0]
    return 1.0 - covered / whole if whole else 0.0


def by_kernel(events: Iterable[Event]) -> list[tuple[str, int, float, float]]:
    """Name, calls, microseconds from begin to end, and from the end before to the end; the most of these first.

    Kernels begin before the one in front of them has ended, so that the time between ends is what each one costs: its
    sum is the whole time, and the time that nothing ran is the next kernel's.
    """
    found: dict[str, tuple[int, float, float]] = {}
    reach: float | None = None
    for name, begin, end in sorted(events, key=lambda event: event[2]):
        calls, taken, cost = found.get(name, (0, 0.0, 0.0))
        found[name] = calls + 1, taken + end - begin, cost + end - (begin if reach is None else reach)
        reach = end
    return sorted(((name, *rest) for name, rest in found.items()), key=lambda row: -row[3])


def steady(events: Sequence[Event], steps: int) -> list[Event]:
    """Events of the middle steps: the profiler's own start and end cost time that no server spends."""
    if not events:
        return []
    low, high = min(event[1] for event in events), max(event[2] for event in events)
    edge = 2 * (high - low) / max(steps, 5)
    return [event for event in events if event[1] >= low + edge and event[2] <= high - edge]


def build(
    shape: str, max_model_len: int, blocks: int, *, eager: bool, device: str = "cuda", kv_cache_dtype: str = KV_AUTO
) -> Runner:
    """A runner over random weights, warm and with all of its graphs."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_bytes(msgspec.json.encode(SHAPES[shape].config))
        spec = with_kv_cache(read_spec(Path(place)), kv_cache_dtype)
    where = torch.device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    model = registry.build(spec, dtype, where, max_model_len)
    with torch.inference_mode():
        loading.load(model, Path(), "dummy")
        pack(model.destinations())  # as kernels of groups read them
    used = weights(spec) - idle_weights(spec)
    graphs = None
    if where.type == "cuda" and not eager:
        graphs = graph_sizes(
            spec.layers, used, SLOTS, STEP_TOKENS, max_model_len, recurrent=len(spec.recurrences),
            long_pairs=absorbed_pairs(spec, 1),
        )  # fmt: skip
    options = RunnerOptions(
        device=where, dtype=dtype, blocks=blocks, block_size=BLOCK, max_model_len=max_model_len, max_num_seqs=SLOTS,
        graphs=graphs,
    )  # fmt: skip
    runner = Runner(model, spec, options)
    warm = warmup_steps(runner.sizes, STEP_TOKENS)
    runner.compile(warm)
    for plan in warm:
        runner.collect(runner.launch(plan))
    runner.prepare()
    return runner


def line(figure: Figure) -> str:
    """One row of the table."""
    idle = f"{figure.idle:6.1%}" if figure.idle >= 0 else "     -"
    return (
        f"{figure.batch:5d} {figure.context:7d} {figure.prompt:6d} {figure.step_ms:8.3f} {figure.busy_ms:8.3f} "
        f"{figure.launch_us:9.1f} {figure.collect_us:10.1f} {idle}"
    )


def for_each(values: list[int], batches: Sequence[int]) -> list[int]:
    """One value for all batches, or one for each."""
    return values * len(batches) if len(values) == 1 else values


def main() -> None:
    """Measure the batches that are asked for and print their table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", default="0.6b", choices=list(SHAPES))
    parser.add_argument("--batch", type=int, action="append", default=None)
    parser.add_argument("--context", type=int, action="append", default=None, help="one, or one for each batch")
    parser.add_argument("--prompt", type=int, action="append", default=None, help="likewise; at most 255 rows decode")
    parser.add_argument("--depth", type=int, default=2, choices=(1, 2), help="steps in flight")
    parser.add_argument("--shared", type=int, default=0, help="leading tokens that all requests have in common")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=40960)
    parser.add_argument("--blocks", type=int, default=16384)
    parser.add_argument("--kv-cache-dtype", default=KV_AUTO, choices=(KV_AUTO, KV_FP8))
    parser.add_argument("--way", default="greedy", choices=list(WAYS))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--kernels", type=int, default=0, help="print so many kernels of each batch by their time")
    parser.add_argument("--output", type=Path, help="file for the figures")
    parser.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    options = parser.parse_args()
    began = time.perf_counter()
    runner = build(
        options.shape, options.max_model_len, options.blocks, eager=options.eager,
        kv_cache_dtype=options.kv_cache_dtype,
    )  # fmt: skip
    ready = time.perf_counter() - began
    print(f"{options.shape} {torch.cuda.get_device_name()} ready in {ready:.1f} s, {runner.statistics()}")
    print("batch context prompt  step_ms  busy_ms launch_us collect_us   idle")
    batches = options.batch or [1, 8, 64, 256]
    contexts, prompts = for_each(options.context or [512], batches), for_each(options.prompt or [0], batches)
    figures = []
    for batch, context, prompt in zip(batches, contexts, prompts, strict=True):
        load = Load(
            batch, context, options.steps, WAYS[options.way], options.shared // BLOCK, prompt, options.depth
        )  # fmt: skip
        figure = measure(runner, load)
        middle = steady(traced(runner, replace(load, steps=TRACED)), TRACED - WARM)
        figures.append(msgspec.structs.replace(figure, idle=idle_share([event[1:] for event in middle])))
        print(line(figures[-1]))
        for name, calls, taken, cost in by_kernel(middle)[: options.kernels]:
            share = cost / sum(event[3] for event in by_kernel(middle))
            print(f"      {share:6.1%} {calls:6d} x {cost / calls:7.2f} us ({taken / calls:7.2f})  {name[:90]}")
    if options.output is not None:
        report.write(options.output, "executor", {"shape": options.shape, "figures": figures},
                     known_commit=options.commit)  # fmt: skip


if __name__ == "__main__":
    main()
