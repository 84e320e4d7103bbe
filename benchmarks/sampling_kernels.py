"""What follows the logits of a decode step, on one GPU: `python -m benchmarks.sampling_kernels`.

Prints the time of the sampler's launches for batches that ask for different things, beside the time that reading the
logits once takes at the speed of a read-only stream, and the share of a decode step that the rows' wishes cost over
greedy rows. Calls stand in a CUDA graph, so that the host is not measured. Logits are normal, with a spread of 1
(random weights) or 3.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks import report
from benchmarks.kernels import READ, timed
from penstock.engine_core.execution.input_batch import SlotSizes, SlotTable
from penstock.engine_core.execution.transfer import Upload
from penstock.kernels.gather import gather_inputs
from penstock.kernels.logprobs import token_logprobs
from penstock.kernels.records import DECODING, NO_DRAFT, NO_MASK, Entries, InputRows, Processing
from penstock.kernels.sampling import accept, sample_entries
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import SlotStart, StepPlan

SHAPES = ((1, 128256), (64, 128256), (256, 128256), (64, 151936), (256, 151936))  # rows, vocabulary
STEP = {1: 4.1e3, 64: 5.5e3, 256: 11.0e3}  # microseconds of a decode step of 8B with so many rows
SPREADS = (1.0, 3.0)
LENGTH, KNOWN, BLOCK = 2048, 300, 16
GREEDY = Sampling(temperature=0.0)
MIXES: tuple[tuple[str, tuple[Sampling, ...]], ...] = (
    ("greedy", (GREEDY,)),
    ("temperature", (Sampling(temperature=0.8),)),
    ("min_p 0.05", (Sampling(temperature=0.8, min_p=0.05),)),
    ("top_k 40", (Sampling(temperature=0.8, top_k=40),)),
    ("top_k 40, top_p 0.95", (Sampling(temperature=0.8, top_k=40, top_p=0.95),)),
    ("top_p 0.95", (Sampling(temperature=0.8, top_p=0.95),)),
    ("top_p 0.5", (Sampling(temperature=0.8, top_p=0.5),)),
    ("top_k 5000", (Sampling(temperature=0.8, top_k=5000),)),
    ("penalties", (Sampling(temperature=0.7, frequency_penalty=0.5, presence_penalty=0.5),)),
    ("half greedy, half seeded", (GREEDY, Sampling(temperature=0.8))),
    ("logprobs 5", (Sampling(temperature=0.0, logprobs=5),)),
    ("300 biases", (Sampling(temperature=0.0, logit_bias=tuple((token * 400, 1.0) for token in range(300))),)),
)


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """All launches behind the logits, for one batch."""

    mix: str
    rows: int
    vocabulary: int
    spread: float
    microseconds: float
    read: float  # microseconds of reading the logits once
    price: float  # of a decode step, over greedy rows


class Batch:
    """Rows that decode, with random tokens behind them."""

    def __init__(self, rows: int, vocabulary: int, mix: Sequence[Sampling], device: torch.device) -> None:
        slots = SlotTable(SlotSizes(rows, LENGTH - 1, BLOCK, vocabulary), Upload(device))
        starts = [
            SlotStart(
                slot=slot, token_ids=b"", prompt_tokens=KNOWN // 2, computed=0, blocks=b"", seed=slot,
                sampling=mix[slot % len(mix)],
            )
            for slot in range(rows)
        ]  # fmt: skip
        slots.apply(StepPlan(step=0, epoch=0, starts=tuple(starts)))
        self.sampling, self.history = slots.parameters.sampling, slots.history
        tokens = self.history.tokens.random_(vocabulary)
        self.history.counts.zero_().scatter_(1, tokens[:, :KNOWN].long(), 2)
        self.history.known.fill_(KNOWN)
        self.entries = Entries(**{name: torch.from_numpy(x).to(device) for name, x in entry_columns(rows).items()})
        self.inputs = InputRows(
            self.entries.start, self.entries.slots, torch.full_like(self.entries.slots, DECODING), self.entries.drafts
        )
        self.block_tables = slots.block_tables.fill_(1)

    def run(self, logits: torch.Tensor) -> None:
        """A step without its model."""
        gather_inputs(self.inputs, self.history.tokens, self.history.known, self.block_tables, BLOCK)
        chosen = sample_entries(logits, self.entries, self.sampling, self.history)
        accept(chosen.tokens, self.entries, self.sampling, self.history)
        processing = Processing(self.sampling.uses, self.sampling.temperature, self.entries.masks, chosen.adjusted)
        token_logprobs(logits, chosen.tokens, self.entries.slots, self.sampling.logprobs, processing)


def entry_columns(rows: int) -> dict[str, np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """One entry a row."""
    places = np.arange(rows + 1, dtype=np.int32)
    return {
        "start": places,
        "slots": places[:rows],
        "depth": np.zeros(rows, np.int32),
        "drafts": np.full(rows, NO_DRAFT, np.int32),
        "masks": np.full(rows, NO_MASK, np.int32),
    }


def read_time(rows: int, vocabulary: int) -> float:
    """Microseconds of reading bf16 logits once."""
    return 2 * rows * vocabulary / READ * 1e6


def costs(rows: int, vocabulary: int, spread: float, only: str) -> list[Cost]:
    """Every mix at one shape."""
    device = torch.device("cuda")
    logits = (torch.randn(rows, vocabulary, device=device) * spread).bfloat16()
    found: list[Cost] = []
    for name, mix in MIXES:
        if only not in name:
            continue
        batch = Batch(rows, vocabulary, mix, device)
        taken = timed(lambda _, batch=batch: batch.run(logits), 1)  # type: ignore[misc]
        plain = found[0].microseconds if found else taken
        found.append(Cost(
            mix=name, rows=rows, vocabulary=vocabulary, spread=spread, microseconds=round(taken, 1),
            read=round(read_time(rows, vocabulary), 1), price=round((taken - plain) / STEP[rows], 4),
        ))  # fmt: skip
    return found


def line(cost: Cost) -> str:
    return (
        f"{cost.mix:26} {cost.rows:4} x {cost.vocabulary} spread {cost.spread:3} {cost.microseconds:8.1f} us"
        f" (read {cost.read:5.1f}) {100 * cost.price:+6.2f} %"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling_kernels")
    parser.add_argument("--only", default="", help="mixes whose name holds this")
    parser.add_argument("--output", type=Path, help="figures as JSON")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    found: list[Cost] = []
    with torch.inference_mode():
        for rows, vocabulary in SHAPES:
            for spread in SPREADS:
                found += costs(rows, vocabulary, spread, options.only)
                print("\n".join(line(cost) for cost in found[-len(MIXES) :] if cost.rows == rows), flush=True)
    if options.output is not None:
        report.write(options.output, "sampling_kernels", {"costs": found}, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
