"""What a chip allows for a load, for the share-of-limit column of the published figures.

The limit of a load is the time that it would take if every step cost nothing but this:

- a decode step reads all weights that a step uses once (of a mixture of experts as many as tokens go to that choose
  among all alike), or multiplies its rows with them, whichever takes longer, and
  reads the keys and values of every running request, those of a shared prefix once, and its recurrent states;
- a prompt costs the floating-point operations of its tokens (two per weight and token, and causal attention's
  4 · heads · dim per pair of positions and layer), at least one reading of the weights where it runs alone.

Requests follow one another as the load's closed loop has them. Bytes are read at the rate of a read-only stream, the
fastest that was measured on the chip (`python -m benchmarks.read_bandwidth`); operations run at the rate of a large
matrix product. Quantized weights are read with their scales, and multiplied at the rate of their activations' type.
Nothing else is counted: no sampling, no activations, no host. After a rate was changed, `python -m benchmarks.relimit`
derives the stored limits again.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from penstock.engine_core.models.layer_spec import AttentionSpec
from penstock.engine_core.models.memory_estimate import FLOAT, expert_weights
from penstock.engine_core.models.quantization.weight_format import format_of
from penstock.engine_core.models.spec import ModelSpec
from penstock.services.bench.workload import Workload, request_chance

TWO_BYTES = 2  # of a bf16 number


class Chip(msgspec.Struct, frozen=True):
    """Measured rates of one chip."""

    name: str
    bytes_per_second: float  # read-only stream
    flops_per_second: float  # bf16 matrix product of 8192 by 8192 by 8192
    fp8_flops_per_second: float  # the same of FP8, by `torch._scaled_mm`


SEVERAL = re.compile(r"(\d+) x ")  # before the name of each of a group's GPUs
# H200: a kernel that only reads reached 4.58 TB/s on 2026-11-23 (benchmarks/results/read_bandwidth.json), the weights
# of an LM head 4.4 to 4.6 on 2026-11-21. A device copy reaches less, bytes read and written together.
# FP8: the four matrices of an 8B layer times 8,192 rows, 2026-11-22.
CHIPS: Mapping[str, Chip] = {"H200": Chip("H200", 4.6e12, 790e12, 1293e12)}


def chip(device: str) -> Chip | None:
    """The chip of a device's name; None where nobody measured its rates.

    Of "4 x NVIDIA H200" it is one of four times the rates: what they could do if they shared all work and exchanged
    nothing.
    """
    found = next((found for name, found in CHIPS.items() if name in device), None)
    several = SEVERAL.match(device)
    if found is None or several is None:
        return found
    count = int(several[1])
    rates = (found.bytes_per_second, found.flops_per_second, found.fp8_flops_per_second)
    return Chip(f"{count} x {found.name}", *(count * rate for rate in rates))


class Cost(msgspec.Struct, frozen=True):
    """What one model costs at least on one chip."""

    chip: Chip
    layer_weights: int  # numbers in the matrices of all layers
    head_weights: int  # numbers in the LM head
    attention: int  # operations per pair of positions, all layers
    cache_bytes: int  # keys and values of one position, all layers
    expert_weights: int = 0  # numbers in the matrices of one expert, all layers: `layer_weights` has none of them
    experts: int = 0
    chosen: int = 0  # of them, for a token
    weight_bytes: float = TWO_BYTES  # of a number in a layer's matrices, scales included
    fast: bool = False  # layers multiply in FP8
    state_bytes: int = 0  # of one request's recurrent states, all layers

    @classmethod
    def of(cls, spec: ModelSpec, chip: Chip) -> Cost:
        matrices = [matrix for own in spec.attentions for matrix in own.matrices(spec.hidden).values()]
        products = [shape for own in spec.recurrences for shape in own.products(spec.hidden).values()]
        states = [own.state() for own in spec.recurrences]
        experts = spec.sparse[0] if spec.sparse else None
        sparse, mlp = len(spec.sparse), experts or spec.dense[0]
        form, inner = format_of(mlp.formats, "down_proj"), mlp.width
        layers = sum(matrix.outputs * matrix.inputs for matrix in matrices) + sum(map(math.prod, products))
        layers += sum((2 + mlp.gated) * spec.hidden * mlp.width for mlp in spec.dense)
        return cls(
            chip=chip,
            layer_weights=layers + (0 if experts is None else sparse * spec.hidden * experts.count),
            head_weights=spec.hidden * spec.vocab_size,
            attention=2 * sum(own.heads * pair_numbers(own) for own in spec.attentions),
            cache_bytes=TWO_BYTES * sum(own.page_numbers for own in spec.attentions),
            expert_weights=0 if experts is None else sparse * expert_weights(spec, experts),
            experts=0 if experts is None else experts.count,
            chosen=0 if experts is None else experts.routing.chosen,
            weight_bytes=TWO_BYTES if form is None else form.held_bytes(spec.hidden, inner) / (spec.hidden * inner),
            fast=form is not None and form.kind == "float8" and form.activations != "none",
            state_bytes=FLOAT * sum(one.heads * one.key_dim * one.value_dim for one in states),
        )

    @property
    def token_weights(self) -> int:
        """Numbers in the matrices of all layers that a token is multiplied with."""
        return self.layer_weights + self.chosen * self.expert_weights

    def read_weights(self, tokens: int) -> float:
        """Numbers in the matrices of all layers that so many tokens read: an expert that several are sent to once."""
        if not self.experts:
            return self.layer_weights
        missed = (1 - self.chosen / self.experts) ** tokens  # share of experts, if all are as likely
        return self.layer_weights + self.experts * (1 - missed) * self.expert_weights

    def read_bytes(self, tokens: int) -> float:
        """Of all weights that so many tokens read."""
        return self.weight_bytes * self.read_weights(tokens) + TWO_BYTES * self.head_weights

    def multiply(self, tokens: int, entries: int) -> float:
        """Seconds of the products of so many tokens, and of the LM head for `entries` of them."""
        rate = self.chip.fp8_flops_per_second if self.fast else self.chip.flops_per_second
        return 2 * (self.token_weights * tokens / rate + self.head_weights * entries / self.chip.flops_per_second)

    def decode(self, rows: int, context: float) -> float:
        """Seconds of a decode step of `rows` requests that hold `context` positions together."""
        read = self.read_bytes(rows) / self.chip.bytes_per_second
        held = context * self.cache_bytes + rows * self.state_bytes
        return max(read, self.multiply(rows, rows)) + held / self.chip.bytes_per_second

    def prefill(self, tokens: int, cached: int = 0) -> float:
        """Seconds of a prompt's `tokens` after `cached` positions that stand in the cache, its first token included."""
        pairs = tokens * cached + tokens * tokens / 2
        return self.multiply(tokens, 1) + self.attention * pairs / self.chip.flops_per_second

    def first_token(self, tokens: int) -> float:
        """Seconds to the first token of a prompt that is alone."""
        return max(self.prefill(tokens), self.read_bytes(tokens) / self.chip.bytes_per_second)

    def load(self, requests: Sequence[tuple[int, int]], concurrency: int, cached: int = 0) -> float:
        """Seconds of a closed loop of (prompt, output) lengths after `cached` positions that all of them share."""
        waiting = deque(requests)
        ends: list[tuple[int, int]] = []  # (step of the last token, positions then held) of running requests
        seconds, step, context = 0.0, 0, 0
        while waiting or ends:
            while waiting and len(ends) < concurrency:
                prompt, output = waiting.popleft()
                seconds += self.prefill(prompt, cached)
                if output > 1:
                    heapq.heappush(ends, (step + output - 1, prompt + output))
                    context += prompt + 1
            if ends:
                seconds += self.decode(len(ends), cached + context)
                context += len(ends)
                step += 1
            while ends and ends[0][0] == step:
                context -= heapq.heappop(ends)[1]
        return seconds


def lengths(workload: Workload) -> list[tuple[int, int]]:
    """Prompt tokens after the shared prefix, and output tokens, of each request."""
    found = []
    for index in range(workload.requests):
        chance = request_chance(workload, index)
        output = chance.randint(*workload.output)
        found.append((chance.randint(*workload.input), output))
    return found


def pair_numbers(attention: AttentionSpec) -> int:
    """That a head multiplies for a pair of positions, of a query and of a value."""
    own = attention.latent
    return 2 * attention.head_dim if own is None else own.query_dim + own.value_dim


def limit(figure: str, workload: Workload, cost: Cost) -> float | None:
    """The best value that the chip allows for a figure of a load; None where the formula says nothing."""
    sizes = lengths(workload)
    match figure:
        case "output_tokens_per_second":
            return sum(output for _, output in sizes) / cost.load(sizes, workload.concurrency, workload.prefix)
        case "tpot_ms":
            mean = sum(prompt + output / 2 for prompt, output in sizes) / len(sizes)
            rows = min(workload.concurrency, len(sizes))
            return 1000 * cost.decode(rows, workload.prefix + rows * mean)
        case "ttft_ms" if workload.concurrency == 1:
            return 1000 * sum(cost.first_token(prompt) for prompt, _ in sizes) / len(sizes)
    return None
