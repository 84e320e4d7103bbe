"""Times the ways to make products on a GPU, for `engine_core.execution.product_tuning`.

All kernels are compiled first, in parallel. Each way's calls stand in a CUDA graph, over copies of the weight that do
not stay in the L2 cache. A way that does not compile, cannot be launched or gives another result is left out.

Calls follow one another. With a norm before each, as behind half of a model's products, other ways came out best for
128 rows, and in the sequence of all layers those were 2.8 % slower (8B, H200).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor

from penstock.engine_core.execution.all_reduce_tuning import replay_microseconds
from penstock.engine_core.execution.compilation import load_all, prewarm
from penstock.engine_core.execution.cuda_graphs import Memory
from penstock.engine_core.execution.product_tuning import Dropped, Job
from penstock.kernels.grouped_linear import GROUPED, form_named, timed_weight
from penstock.kernels.linear_tilings import SCALED, TURN, ExpertTiling, Product, Way
from penstock.kernels.quantize import quantize, row_format
from penstock.kernels.quantized import FLOAT8, Float8Weight, Int8Weight, QuantizedWeight, Rows
from penstock.kernels.records import Routes

log = logging.getLogger(__name__)

OUTLAST = 200 << 20  # bytes of weights before one is read again
MOST_COPIES = 24
MOST_EXPERTS = 2 << 30  # bytes of them
CHOSEN = 8  # experts of a token
CALLS = 6  # in a graph, at least
REPLAYS = 3  # of which the quickest counts
STD = 0.02  # of weights
SMALL_CODES = 0xBF  # bits of which an E4M3 below 2 has none but these
TOLERANCE = 0.02  # relative distance from the first way's result


class ProductBench:
    """Weights and inputs of products on a GPU, made of one piece of memory."""

    def __init__(self, device: torch.device, products: Sequence[Product]) -> None:
        self.device = device
        self.memory = Memory(device)
        self.anchor = self.memory.capture(lambda: torch.zeros(1, device=device), run=True)  # keeps the graphs' memory
        size = max(OUTLAST, *map(weight_bytes, products))
        self.pools = {
            dtype: torch.empty(size // 2, dtype=dtype, device=device).normal_(std=STD)
            for dtype in dict.fromkeys(product.dtype for product in products)
        }

    def calls(self, job: Job) -> tuple[Callable[[int, Way], Tensor], int]:
        """The product by number of call and way, and how many calls read different weights."""
        from penstock.kernels import grouped_linear_triton, linear_triton, quantized_linear

        product = job.product
        if product.experts:
            return self.expert_calls(job)
        outputs, pool = product.width * (2 if product.gated else 1), self.pools[product.dtype]
        x = torch.randn(int(job.rows), product.inputs, device=self.device).to(product.dtype)
        rows: Rows = x
        weights: Sequence[Any]
        multiply: Any
        if product.weight in SCALED:  # with rows that are rounded already
            size = outputs * product.inputs
            copies = max(1, min(MOST_COPIES, OUTLAST // size))
            weights = [scaled_weight(product.weight, (outputs, product.inputs), self.device) for _ in range(copies)]
            form = row_format(weights[0])
            rows = x if form is None else quantize(x, form)
            multiply = quantized_linear.multiply_quantized_by
        elif product.weight in GROUPED:
            planes = form_named(product.weight)
            size = outputs * planes.blocks(product.inputs) * planes.run
            copies = max(1, min(MOST_COPIES, len(pool) // size))
            parts = (pool[at * size : (at + 1) * size] for at in range(copies))
            weights = [timed_weight(planes, outputs, product.inputs, part) for part in parts]
            multiply = grouped_linear_triton.multiply_by
        else:
            size = outputs * product.inputs
            copies = max(1, min(MOST_COPIES, OUTLAST // (size * product.dtype.itemsize)))
            weights = [pool[at * size : (at + 1) * size].view(outputs, product.inputs) for at in range(copies)]
            multiply = linear_triton.multiply_by

        def call(at: int, way: Way) -> Tensor:
            found = multiply(way, rows, weights[at % copies], None, gated=product.gated)
            assert isinstance(found, Tensor)
            return found

        return call, max(copies, CALLS)

    def expert_calls(self, job: Job) -> tuple[Callable[[int, Way], Tensor], int]:
        """Of experts that all have about as many tokens."""
        from penstock.kernels.experts_triton import multiply_sorted

        product = job.product
        held = held_experts(product)
        each = product.width * product.inputs
        shapes = (held, 2 * product.width, product.inputs), (held, product.inputs, product.width)
        gate_up: Tensor | QuantizedWeight
        down: Tensor | QuantizedWeight
        if product.weight in SCALED:
            gate_up, down = (scaled_weight(product.weight, shape, self.device) for shape in shapes)
        else:
            pool = self.pools[product.dtype]
            gate_up, down = (
                pool[: 2 * held * each].view(shapes[0]),
                pool[2 * held * each : 3 * held * each].view(shapes[1]),
            )
        chosen = min(CHOSEN, held)
        tokens = max(1, int(job.rows * held) // chosen)
        x = torch.randn(tokens, product.inputs, device=self.device).to(product.dtype)
        experts = torch.rand(tokens, held, device=self.device).argsort(1)[:, :chosen].int().contiguous()
        shares = torch.full((tokens, chosen), 1 / chosen, device=self.device)
        routes = Routes(experts, shares, product.experts)

        def call(at: int, way: Way) -> Tensor:
            assert isinstance(way, ExpertTiling)
            return multiply_sorted(x, routes, gate_up, down, 0, way)

        return call, CALLS

    def time(self, job: Job, dropped: Dropped) -> dict[Way, float]:
        """Microseconds of each way's call."""
        call, calls = self.calls(job)
        found: dict[Way, float] = {}
        expected = None
        for way in job.ways:
            try:
                result = call(0, way).float()
                expected = result if expected is None else expected
                distance = float((result - expected).norm() / expected.norm())
                if not distance <= TOLERANCE:
                    dropped(job, way, f"its result is {distance:.3f} off")
                    continue
                found[way] = self.microseconds(lambda: [call(at, way) for at in range(calls)]) / calls  # noqa: B023
            except Exception as error:  # guard: design 7, a compiler or driver fails in any way
                dropped(job, way, f"{type(error).__name__}: {error}")
        return found

    def microseconds(self, calls: Callable[[], object]) -> float:
        """The time of some calls in a graph."""
        graph, _ = self.memory.capture(calls, run=False)
        return replay_microseconds(graph, REPLAYS)


def scaled_weight(kind: str, shape: tuple[int, ...], device: torch.device) -> Float8Weight | Int8Weight:
    """A random weight of 8 bits, or experts."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).bitwise_and_(SMALL_CODES)
    if kind == "int8":
        return Int8Weight(codes.view(torch.int8), torch.full(shape[:-1], STD / SMALL_CODES, device=device))
    blocks = *shape[:-2], -(-shape[-2] // TURN), -(-shape[-1] // TURN)
    if kind == "fp8_blocks":
        return Float8Weight(codes.view(FLOAT8), torch.full(blocks, STD, device=device), (TURN, TURN), "block")
    scales = torch.full(shape[:-1], STD, device=device)
    return Float8Weight(codes.view(FLOAT8), scales, activations="none" if kind == "fp8_weights" else "row")


def weight_bytes(product: Product) -> int:
    if product.experts:
        return 3 * held_experts(product) * product.width * product.inputs * product.dtype.itemsize
    return product.width * (2 if product.gated else 1) * product.inputs * product.dtype.itemsize


def held_experts(product: Product) -> int:
    """As many experts as are measured together."""
    each = 3 * product.width * product.inputs * product.dtype.itemsize
    return max(1, min(product.experts, MOST_EXPERTS // each))


@torch.inference_mode()
def measure(
    jobs: Sequence[Job],
    device: torch.device,
    compilers: Executor | None,
    dropped: Dropped,
    progress: Callable[[int, int], None],
) -> list[dict[Way, float]]:
    """Microseconds by way of each job. `compilers` are worker processes, see `engine_core.execution.compilation`."""
    bench = ProductBench(device, [job.product for job in jobs])
    with prewarm(compilers) as uncompiled:
        for job in jobs:
            call, _ = bench.calls(job)
            for way in job.ways:
                try:
                    call(0, way)
                except Exception as error:  # guard: design 7, it fails again below and is left out
                    log.debug("%s: %s", way, error)
    for kernel in load_all(uncompiled, device):
        kernel.exception()  # those that fail do so again when they are measured
    found = []
    for at, job in enumerate(jobs):
        progress(at, len(jobs))
        found.append(bench.time(job, dropped))
    return found
