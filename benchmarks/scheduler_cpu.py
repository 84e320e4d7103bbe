"""Host time of the scheduler per step, with an executor that answers at once.

    python -m benchmarks.scheduler_cpu --out result.json

For each number of running requests: `plan`, `apply`, their sum and `outputs`, in microseconds (median, p90, p99) over
the steps measured, at depth 2, garbage collector frozen. The load is that of a server in steady state: staggered
lengths, a share of the requests with a common prefix, prefix caching on, and whoever ends is replaced at once, so
admissions, first chunks and ends are inside the figures. A second load without arrivals has all rows cross their block
boundaries in the same steps. A third is the first with prompt lookup: texts repeat themselves, so that most rows have
drafts, of which 70 in 100 are accepted, and one step in four of a row says something new. `--clock cpu` counts this
process's own time, for a machine that others use as well.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks import report
from penstock.engine_core.scheduling.options import SchedulingOptions, SpeculationOptions
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.protocol.messages import Sampling, SubmitTokens
from penstock.protocol.step_columns import chunk_table, draft_table, integers
from penstock.protocol.steps import REJECTED, StepPlan, StepResult

VOCAB = 150_000
EOS = 2
PREFIX = 512  # tokens shared by a quarter of the requests
DEPTH = 2
BLOCK = 16
ALIGNED_PROMPT = 128
PERIOD = 24  # tokens after which a text repeats itself
LOADS = {
    "steady": "steady state with arrivals and ends",
    "aligned": "all rows cross block boundaries together",
    "drafts": "steady state with prompt lookup",
}


class Timing(msgspec.Struct, frozen=True):
    median: float
    p90: float
    p99: float
    worst: float


class Measured(msgspec.Struct, frozen=True):
    running: int
    steps: int
    load: str
    ended: int  # requests that ended and were replaced while measured
    reused_share: float  # of prompt tokens, taken from the prefix cache
    plan_bytes: float  # mean size of an encoded plan
    drafts: float  # mean drafts of a step
    accepted: float  # mean of those that were accepted
    microseconds: dict[str, Timing]


class Load:
    """Requests without end: lengths around a mean, a quarter with a common prefix, some that end by a stop id."""

    def __init__(self, seed: int, aligned: bool) -> None:
        self._random = random.Random(seed)
        self._generator = np.random.default_rng(seed)
        self._prefix = self._generator.integers(3, VOCAB, PREFIX, dtype=np.int32)
        self._aligned = aligned
        self._made = 0

    def make(self) -> SubmitTokens:
        self._made += 1
        rng = self._random
        own = ALIGNED_PROMPT if self._aligned else rng.randint(64, 512)
        tokens = self._generator.integers(3, VOCAB, own, dtype=np.int32)
        if not self._aligned and rng.random() < 0.25:
            tokens = np.concatenate((self._prefix, tokens))
        return SubmitTokens(
            id=self._made,
            token_ids=tokens.tobytes(),
            sampling=Sampling(
                seed=self._made,
                max_tokens=None if self._aligned else rng.randint(128, 1024),
                eos_token_ids=(EOS,),
            ),
        )


class InstantExecutor:
    """Answers a plan with as many tokens as it has entries; one token in 2,000 is the end of a sequence."""

    def __init__(self, slots: int, load: str) -> None:
        self._decoding = np.zeros(slots, bool)
        self._said = np.zeros(slots, np.int64)  # tokens of each slot's text, which repeats itself
        self._generator = np.random.default_rng(1)
        self._load = load

    def run(self, plan: StepPlan) -> StepResult:
        self._decoding[integers(plan.decode_off)] = False
        self._decoding[integers(plan.decode_on)] = True
        chunks = chunk_table(plan.chunks)
        slots = np.concatenate((self._decoding.nonzero()[0], chunks[chunks[:, 3] > 0, 0]))
        if self._load == "drafts":
            tokens = self._verify(plan, slots)
        else:
            tokens = self._generator.integers(3, VOCAB, len(slots), dtype=np.int32)
        if self._load != "aligned":
            tokens[(self._generator.random(len(tokens)) < 1 / 2000) & (tokens != REJECTED)] = EOS
        return StepResult(step=plan.step, epoch=plan.epoch, token_ids=tokens.tobytes())

    def _verify(self, plan: StepPlan, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Entries of each row: accepted drafts, the row's own next token, then what was rejected."""
        carried = draft_table(plan.drafts)
        counts = dict(zip(carried[:, 0].tolist(), carried[:, 1].tolist(), strict=True))
        drafts: list[int] = integers(plan.draft_ids).tolist()
        place, tokens = 0, []
        for slot in slots.tolist():
            count = counts.get(slot, 0)
            right = min(count, int(self._generator.geometric(0.3)) - 1)
            tokens += drafts[place : place + right]
            new = self._generator.random() < 0.25
            tokens.append(int(self._generator.integers(3, VOCAB)) if new else 1000 + int(self._said[slot]) % PERIOD)
            tokens += [REJECTED] * (count - right)
            self._said[slot] += right + 1
            place += count
        return np.array(tokens, np.int32)


def timing(seconds: list[float]) -> Timing:
    values = np.array(seconds) * 1e6
    return Timing(*[round(float(v), 1) for v in (*np.percentile(values, (50, 90, 99)), values.max())])


def options_of(running: int, steps: int, load: str) -> SchedulingOptions:
    """Room for all of them at any time: what is measured is the work of running, not of refusing."""
    longest = PREFIX + 512 + 1024 if load != "aligned" else ALIGNED_PROMPT + 2 * steps + 512
    return SchedulingOptions(
        blocks=running * -(-longest // BLOCK),
        block_size=BLOCK,
        max_model_len=longest,
        max_num_seqs=running,
        max_num_batched_tokens=max(8192, running),
        vocab_size=VOCAB,
        speculation=SpeculationOptions(method="ngram" if load == "drafts" else "none"),
    )


def measure(running: int, steps: int, load: str, clock: Callable[[], float] = time.perf_counter) -> Measured:
    scheduler, requests = Scheduler(options_of(running, steps, load)), Load(running, load == "aligned")
    executor, encoder = InstantExecutor(running, load), msgspec.msgpack.Encoder()
    results: deque[StepResult] = deque()
    columns: dict[str, list[float]] = {"plan": [], "apply": [], "plan+apply": [], "outputs": []}
    sizes: list[int] = []
    for _ in range(running):
        scheduler.submit(requests.make(), 0, 0.0)
    warm = 64 + steps // 10
    for step in range(warm + steps):
        if step == warm:
            gc.collect()
            gc.freeze()
            gc.disable()
            before = scheduler.statistics()
        while scheduler.unfinished < running:
            scheduler.submit(requests.make(), 0, step * 0.01)
        now = step * 0.01
        begin = clock()
        plan = scheduler.plan(now)
        planned = clock()
        if plan is not None:
            results.append(executor.run(plan))
        ready = clock()
        if len(results) == DEPTH:
            scheduler.apply(results.popleft(), now)
        applied = clock()
        scheduler.outputs(0)
        delivered = clock()
        if step < warm:
            continue
        columns["plan"].append(planned - begin)
        columns["apply"].append(applied - ready)
        columns["plan+apply"].append(planned - begin + applied - ready)
        columns["outputs"].append(delivered - applied)
        sizes.append(len(encoder.encode(plan)))
    gc.enable()
    gc.unfreeze()
    after = scheduler.statistics()
    assert scheduler.check().ok
    assert after.running >= running - 8, "others are in their first step or waiting for it"
    prompts = after.prompt_tokens - before.prompt_tokens
    return Measured(
        running,
        steps,
        load,
        after.finished - before.finished,
        round((after.cached_tokens - before.cached_tokens) / prompts, 3) if prompts else 0.0,
        round(float(np.mean(sizes)), 1),
        round((after.draft_tokens - before.draft_tokens) / steps, 1),
        round((after.accepted_tokens - before.accepted_tokens) / steps, 1),
        {name: timing(values) for name, values in columns.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024], help="requests running at once")
    parser.add_argument("--loads", choices=tuple(LOADS), nargs="+", default=list(LOADS), help="what runs")
    parser.add_argument("--steps", type=int, default=4000, help="steps measured")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what is counted")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    arguments = parser.parse_args()
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    found = []
    for running in arguments.running:
        for load in arguments.loads:
            measured = measure(running, arguments.steps, load, clock)
            found.append(measured)
            print(
                f"{running} running, {LOADS[load]}: {measured.ended} ended, "
                f"{measured.reused_share:.0%} of prompts reused, {measured.plan_bytes:.0f} bytes a plan, "
                f"{measured.drafts:.0f} drafts a step, {measured.accepted:.0f} accepted"
            )
            for name, value in measured.microseconds.items():
                print(
                    f"  {name:<11} median {value.median:7.1f}  p90 {value.p90:7.1f}  p99 {value.p99:7.1f}  "
                    f"worst {value.worst:7.1f} µs"
                )
    if arguments.out is not None:
        results = {"depth": DEPTH, "clock": arguments.clock, "measured": found}
        report.write(arguments.out, "scheduler_cpu", results)


if __name__ == "__main__":
    main()
