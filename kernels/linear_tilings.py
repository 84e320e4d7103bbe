"""How products with weights are cut: the ways there are, and which one a product of so many rows takes.

A product has a plan, which is measured (`engine_core.execution.product_tuning`) or made by the rules below: the best of
`python -m benchmarks.linear_kernels --sweep` on an H200, fitted to the chip. An invariant product always follows the
rules. Its rows are the same to the last bit in every `Tiling`, which was shown on H100 and H200.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch

from penstock.kernels.chip import Chip
from penstock.kernels.grouped_linear import GROUPED, RUNS, form_named, scales_exactly
from penstock.kernels.grouped_tilings import (
    GroupedTiling,
    WideTiling,
    grouped_bytes,
    grouped_tiling,
    wide_bytes,
    wide_tiling,
)

WIDE = 16384  # outputs of a product whose tiles fill the device however large they are
SMALL = 4096 * 1024  # elements of a weight whose product is short: launches weigh more than tiles
NARROW = 256  # outputs of a product with few tiles, a router's
WELL_FILLED = 0.8  # share of the SMs that have one of a product's tiles
PIPELINED_ROWS = 8  # rows up to which weights are prefetched: with more, too much of what is loaded is rows
PIPELINED_BYTES = 512  # of each row's and each output's inputs, of one iteration
PIPELINED_STAGES = 8
SPLIT_ROWS = 64  # rows up to which e4m3 weights are prefetched, by wgmma
SMALLER_TILES = 0.87  # speed of tiles of 128 by 128 relative to those of 128 by 256, where both fill the device
TALL = 128  # rows of the tallest tiles
BARRIERS = 1 << 10  # bytes of shared memory beside the tiles, at most


SCALED = ("fp8", "fp8_blocks", "fp8_weights", "int8")  # formats of `kernels.scaled_linear_triton`
EIGHT_BITS = ("fp8", "fp8_blocks", "int8")  # formats whose rows have 8 bits, too
TURN = 128  # inputs after which sums of e4m3 products become fp32, and inputs of a block


class VectorTiling(msgspec.Struct, frozen=True, array_like=True, tag="vector"):
    """How a product of one row is cut."""

    outputs: int  # of a program
    inputs: int  # of one iteration
    warps: int


class Tiling(msgspec.Struct, frozen=True, array_like=True, tag="tiles"):
    """How a product of several rows is cut. Powers of 2."""

    rows: int
    outputs: int
    inputs: int  # of one iteration, at least 16
    warps: int
    stages: int
    swap_ab: bool = False  # the weight is operand A of the matrix units, which take 64 rows of A and as few as 8 of B
    tma: bool = False  # both operands are loaded by TMA
    gated: bool = True  # the gate of the MLP is taken in the same kernel, which doubles the sums
    ctas_per_sm: int = 1  # if tma
    flat: bool = False  # if tma: tiles are one loop
    pdl: bool = True  # may start before the previous kernel has ended, see `kernels.launch`


class PipelinedTiling(msgspec.Struct, frozen=True, array_like=True, tag="pipeline"):
    """How a product of few rows is cut whose weights are prefetched. Powers of 2."""

    rows: int  # all of them, at least 8
    warps: int  # each of which computes 16 outputs
    stages: int  # of the pipeline, PIPELINED_BYTES each


class SplitTiling(msgspec.Struct, frozen=True, array_like=True, tag="split"):
    """How a product of up to 64 rows with an e4m3 weight is cut among programs of 64 outputs. Powers of 2."""

    rows: int  # all of them, at least 8
    splits: int  # programs that share the inputs of the same outputs
    stages: int  # of the pipeline, 256 inputs each


class Rescaled(msgspec.Struct, frozen=True, array_like=True, tag="rescaled"):
    """The library's product of e4m3 without scales, in fp32, and a kernel that multiplies it with those of rows and
    outputs: the library's own products with a scale for each row have large tiles and do not split the inputs."""


class ExpertTiling(msgspec.Struct, frozen=True, array_like=True, tag="experts"):
    """How products of the tokens of one expert are cut: both have tiles of as many rows."""

    gate_up: Tiling  # of whose outputs each has its gate
    down: Tiling
    sorted: bool = False  # rows lie expert by expert for `kernels.experts_hopper`; the tiles serve where it cannot

    def __post_init__(self) -> None:
        assert self.gate_up.rows == self.down.rows


Cut = VectorTiling | PipelinedTiling | SplitTiling | Rescaled | Tiling | ExpertTiling | GroupedTiling | WideTiling
Way = Cut | None  # None: the library's product


def describe(way: Way) -> str:
    """A way in a few letters: s swaps the operands, d loads by TMA, f is one loop, g takes the gate; p parts, h shares,
    c cuts."""
    if way is None:
        return "cuBLAS"
    if isinstance(way, VectorTiling):
        return f"vector {way.outputs}x{way.inputs} w{way.warps}"
    if isinstance(way, PipelinedTiling):
        return f"ring w{way.warps} s{way.stages}"
    if isinstance(way, Rescaled):
        return "cuBLAS, rescaled"
    if isinstance(way, SplitTiling):
        return f"split {way.splits} of {way.rows} s{way.stages}"
    if isinstance(way, ExpertTiling):
        return f"{describe(way.gate_up)}, {describe(way.down)}{', sorted' if way.sorted else ''}"
    if isinstance(way, GroupedTiling):
        size = f"{way.rows}x{way.lines} w{way.warps} s{way.stages} p{way.parts} h{way.shares}"
        return f"{size} scaled c{way.cut}" if way.scaled else size
    if isinstance(way, WideTiling):
        return f"wide {way.rows}x{way.outputs} w{way.warps} s{way.stages} x{way.x_stages} h{way.splits}"
    flags = ("s", way.swap_ab), ("d", way.tma), ("f", way.flat), ("g", way.gated)
    size = f"{way.rows}x{way.outputs}x{way.inputs} w{way.warps} s{way.stages} r{way.ctas_per_sm} "
    return size + "".join(letter for letter, there in flags if there)


class Product(msgspec.Struct, frozen=True):
    """A product as far as its plan depends on it."""

    width: int  # outputs, or half of a gated weight's
    inputs: int
    dtype: torch.dtype  # of rows and results
    gated: bool = False
    experts: int = 0  # of a mixture, whose gated MLPs from `inputs` to `width` and back are one product
    weight: str = ""  # format of a quantized weight, as `kernels.quantized_linear.kind_of` names it

    @property
    def itemsize(self) -> int:
        """Bytes of a number that is multiplied."""
        return 1 if self.weight in EIGHT_BITS else self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """Ways by rows; of experts, by pairs of a token and an expert for each expert."""

    rows: tuple[float, ...]  # ascending: up to so many, with the last for any number
    ways: tuple[Way, ...]

    def way(self, rows: float) -> Way:
        return self.ways[min(bisect_left(self.rows, rows), len(self.ways) - 1)]


# Each SM has one tile at most, while cuBLAS splits the inputs (split-K) and adds up the parts.
SQUARE = Tiling(64, 64, 128, 4, 6, tma=True, gated=False, ctas_per_sm=2)
SINGLE = Tiling(16, 64, 32, 4, 2)  # of single precision, which is for tests: nobody serves it on a GPU for speed
RULED = (1, 8, 16, 32, 64, 128, *range(256, 8193, TALL))  # rows up to which the rules have one answer


def ruled(product: Product, chip: Chip, *, invariant: bool) -> Plan:
    """The plan by the rules."""
    if product.experts:
        rules = BY_MEAN
        if product.weight:
            rules = SCALED_BY_MEAN if product.weight in SCALED else GROUPED_BY_MEAN
        single = product.dtype.itemsize > 2 and not product.weight
        ways = [ExpertTiling(SINGLE, SINGLE) if single else way for _, way in rules]
        return Plan(tuple(mean for mean, _ in rules), tuple(fitted(way, product, chip) for way in ways))
    found = [fitted(choose_tiling(rows, product, chip, invariant=invariant), product, chip) for rows in RULED]
    last = [at for at, way in enumerate(found) if at + 1 == len(found) or found[at + 1] != way]
    return Plan(tuple(RULED[at] for at in last), tuple(found[at] for at in last))


def choose_tiling(rows: int, product: Product, chip: Chip, *, invariant: bool) -> Way:
    """The rule: how to multiply `[rows, inputs]` with a weight, on a chip that has room for it."""
    width, inputs, gated = product.width, product.inputs, product.gated
    if product.weight in SCALED:
        return choose_scaled_tiling(rows, product, chip, invariant=invariant)
    if product.weight in GROUPED:
        wide = None if invariant else wide_tiling(rows, width, inputs, chip, gated=gated)
        if wide is not None and fits(wide, product, chip):
            return wide
        return choose_grouped_tiling(rows, product, chip, invariant=invariant)
    if product.dtype.itemsize > 2:
        return SINGLE if invariant else None
    if rows == 1 and not invariant:
        return vector_tiling(width, inputs, gated=gated)
    if rows <= PIPELINED_ROWS and not invariant and (gated or width < WIDE) and chip.tma and chip.pdl:
        return pipelined_tiling(width, inputs, chip, gated=gated)
    if rows <= 64:
        return low_tiling(rows, width, gated=gated)
    if invariant:
        return tall_tiling(rows, width, inputs, chip, gated=gated)
    if rows <= 256 and not gated and width * inputs <= SMALL:
        return tall_tiling(rows, width, inputs, chip, gated=False)
    if rows <= 128 and not gated and WELL_FILLED * chip.num_sms <= 2 * -(-width // 64) <= chip.num_sms:
        return SQUARE
    return None


def choose_grouped_tiling(rows: int, product: Product, chip: Chip, *, invariant: bool) -> Way:
    """The rule for weights in groups, without kernels in Gluon."""
    return grouped_tiling(
        rows, product.width, product.inputs, chip, gated=product.gated, invariant=invariant, weight=product.weight,
        exact=scales_exactly(product.weight, product.dtype),
    )  # fmt: skip


def choose_scaled_tiling(rows: int, product: Product, chip: Chip, *, invariant: bool) -> Way:
    """The rule for weights of 8 bits. The library multiplies e4m3 with scales on chips from 9.0 on."""
    gated = product.gated
    if chip.wgmma and rows <= SPLIT_ROWS and product.weight in ("fp8", "fp8_blocks") and not invariant:
        split = split_tiling(rows, product, chip)
        if split is not None:
            return split
    if rows == 1 and not (gated or invariant):
        return VectorTiling(2, 2048, 4)
    if rows <= 16:
        height = 8 if rows <= 8 and not invariant else 16
        return Tiling(height, 64, TURN, 4, 6, swap_ab=True) if gated else Tiling(height, 16, TURN, 2, 8, swap_ab=True)
    if rows <= 64:
        height = 32 if rows <= 32 else 64
        if gated:
            return Tiling(height, 64, TURN, 4, 4, swap_ab=True, tma=True, ctas_per_sm=3)
        return Tiling(height, 64, TURN, 4, 6, swap_ab=True)
    by_library = product.weight in ("fp8", "fp8_blocks") and product.dtype is torch.bfloat16 and chip.library_scales
    if by_library and not invariant and (gated or rows > 128):
        return None
    if rows <= 128:
        return Tiling(64, 64, TURN, 4, 6, tma=True, gated=False, ctas_per_sm=2)
    return Tiling(TALL, TALL, TURN, 8, 4, tma=True, gated=False, flat=rows > 256)


def split_tiling(rows: int, product: Product, chip: Chip) -> SplitTiling | None:
    """Of up to 64 rows, as whole layers of 8B are fastest (`python -m benchmarks.layer_plans`): up to four programs
    share the inputs where outputs are few, of more rows only long ones, since each fetches its share of the rows. Half
    of the shared memory is left to the next kernel's first weights."""
    height, tiles = max(8, 1 << (rows - 1).bit_length()), -(-product.width // 64)
    stages = min(4, chip.shared_memory // 2 // (256 * (height + (128 if product.gated else 64))))
    wide = product.width >= WIDE and not product.gated
    spills = height > 32 and product.weight == "fp8_blocks"  # factors of so many sums
    if wide or spills or stages < 2:
        return None
    splits = 1
    while tiles <= chip.num_sms and splits < 4 and 2 * splits * (12 if height > 32 else 4) <= product.inputs // 256:
        splits *= 2
    return SplitTiling(height, splits, stages)


def vector_tiling(width: int, inputs: int, *, gated: bool) -> VectorTiling:
    """Of one row."""
    if gated:
        return VectorTiling(1, 2048, 4) if inputs > 2048 else VectorTiling(4, 512, 4)
    if width >= WIDE:
        return VectorTiling(2, 2048, 4) if inputs > 2048 else VectorTiling(8, 512, 4)
    if width > 2048:
        return VectorTiling(1, 1024, 4) if width <= inputs else VectorTiling(8, 512, 4)
    return VectorTiling(2, 2048, 8)


def pipelined_tiling(width: int, inputs: int, chip: Chip, *, gated: bool) -> PipelinedTiling:
    """Of 2 to 8 rows: as long a pipeline as lets all programs be resident at once, at least two stages."""
    programs = -(-width // (16 * chip.num_sms))  # of an SM
    stage = PIPELINED_BYTES * (PIPELINED_ROWS + (32 if gated else 16))
    stages = min(chip.shared_memory // programs // stage, -(-2 * inputs // PIPELINED_BYTES), PIPELINED_STAGES)
    return PipelinedTiling(PIPELINED_ROWS, 1, max(stages, 2))


def low_tiling(rows: int, width: int, *, gated: bool) -> Tiling:
    """Of up to 64 rows: the weights are read once, and the tiles are as many as keep the memory busy."""
    if rows <= 16 or (width <= NARROW and not gated):
        height = 8 if rows <= 8 else 16
        if gated and width >= 8192:
            return Tiling(height, 64, 64, 4, 8, swap_ab=True)
        if gated or width >= WIDE:
            return Tiling(height, 32, 128, 2, 5, swap_ab=True)
        return Tiling(height, 16, 256, 2, 4, swap_ab=True)
    if width <= 2048 or (gated and width < 8192):
        return Tiling(64, 32, 128, 4, 6, tma=True, ctas_per_sm=2)
    if gated:
        return Tiling(32 if rows <= 32 else 64, 64, 128, 4, 4, swap_ab=True)
    if rows <= 32:
        if width >= WIDE:
            return Tiling(32, 128, 64, 4, 5, swap_ab=True)
        return Tiling(32, 64, 128, 4, 6, swap_ab=True, tma=True, ctas_per_sm=2)
    if width >= WIDE:
        return Tiling(64, 128, 128, 4, 4, tma=True, ctas_per_sm=2)
    return Tiling(64, 64, 128, 4, 6, tma=True, ctas_per_sm=2)


def tall_tiling(rows: int, width: int, inputs: int, chip: Chip, *, gated: bool) -> Tiling:
    """Of more rows: as tall and wide as leaves every SM a tile. The gate is a kernel of its own.

    Where such products are long, PDL costs 7 % of all layers' time (8B, 256 rows).
    """
    pdl = width * inputs <= SMALL
    outputs = 2 * width if gated else width
    if rows <= 256 and width <= 2048:
        return SQUARE
    if rows <= 256 and outputs <= max(4096, inputs):
        return Tiling(64, 128, 128, 4, 4, tma=True, gated=False, pdl=pdl)
    if waves(rows, outputs, 128, chip) < SMALLER_TILES * 2 * waves(rows, outputs, 256, chip):
        return Tiling(TALL, 128, 64, 8, 5, tma=True, gated=False, flat=rows > 256, pdl=pdl)
    return Tiling(TALL, 256, 64, 8, 4, tma=True, gated=False, flat=rows > 256, pdl=pdl)


def waves(rows: int, outputs: int, wide: int, chip: Chip) -> int:
    """Waves: how many tiles, 128 rows high and so wide, an SM takes at most."""
    return -(-(-(-rows // TALL) * -(-outputs // wide)) // chip.num_sms)


# The tiling for up to so many tokens to an expert, on every rank alike.
ByMean: TypeAlias = tuple[tuple[float, ExpertTiling], ...]
BY_MEAN: ByMean = (
    (8, ExpertTiling(Tiling(16, 64, 128, 4, 4, swap_ab=True), Tiling(16, 128, 128, 4, 4, swap_ab=True))),
    (16, ExpertTiling(Tiling(32, 64, 128, 4, 4, swap_ab=True), Tiling(32, 128, 128, 4, 4, swap_ab=True))),
    (32, ExpertTiling(Tiling(64, 128, 64, 4, 4, tma=True), Tiling(64, 256, 64, 4, 4, tma=True))),
    (math.inf, ExpertTiling(Tiling(128, 128, 64, 8, 4, tma=True), Tiling(128, 256, 64, 8, 4, tma=True))),
)

# The same of weights of 8 bits, whose blocks have 128 outputs and inputs. Tiles of 8 rows make other bits, and so do
# those of 32 outputs: their matrix instructions add up E4M3 products in another order (H200).
SCALED_BY_MEAN: ByMean = (
    (0.25, ExpertTiling(
        Tiling(16, 64, TURN, 4, 8, swap_ab=True, tma=True), Tiling(16, 64, TURN, 4, 6, swap_ab=True, tma=True)
    )),
    (8, ExpertTiling(
        Tiling(16, 64, TURN, 4, 4, swap_ab=True, tma=True), Tiling(16, 128, TURN, 4, 4, swap_ab=True, tma=True)
    )),
    (24, ExpertTiling(
        Tiling(32, 128, TURN, 8, 3, swap_ab=True, tma=True), Tiling(32, 128, TURN, 8, 3, swap_ab=True, tma=True)
    )),
    (32, ExpertTiling(
        Tiling(32, 128, TURN, 8, 3, swap_ab=True, tma=True), Tiling(32, 128, TURN, 8, 3, swap_ab=True, tma=True),
        sorted=True,
    )),
    (math.inf, ExpertTiling(Tiling(64, 128, TURN, 8, 4, tma=True), Tiling(64, 128, TURN, 8, 4, tma=True), sorted=True)),
)  # fmt: skip
SORTED_BYTES = (4 * (256 + 128) + 128) * TURN  # of shared memory: four stages of weights and rows, and rows to store

# And of weights in groups, whose planes say how many inputs an iteration has.
GROUPED_BY_MEAN: ByMean = (
    (16, ExpertTiling(Tiling(16, 64, 128, 4, 4), Tiling(16, 64, 128, 4, 4))),
    (32, ExpertTiling(Tiling(32, 64, 128, 4, 4), Tiling(32, 64, 128, 4, 4))),
    (64, ExpertTiling(Tiling(64, 64, 128, 8, 3), Tiling(64, 128, 128, 8, 3))),
    (math.inf, ExpertTiling(Tiling(128, 64, 128, 8, 3), Tiling(128, 128, 128, 8, 3))),
)


def shared_bytes(way: Way, chip: Chip, *, gated: bool, itemsize: int = 2) -> int:
    """Shared memory of one program, at most: the stages of its pipeline.

    Hopper's and Blackwell's data center chips multiply from shared memory, others have the last stage in registers.
    """
    if isinstance(way, ExpertTiling):
        sizes = (
            shared_bytes(part, chip, gated=at == 0, itemsize=itemsize)
            for at, part in enumerate((way.gate_up, way.down))
        )
        return max(*sizes, SORTED_BYTES + BARRIERS if way.sorted else 0)
    if isinstance(way, PipelinedTiling):
        outputs = 16 * way.warps * (2 if gated else 1)
        return way.stages * PIPELINED_BYTES * (way.rows + outputs) + BARRIERS
    if isinstance(way, GroupedTiling):
        return grouped_bytes(way, chip, itemsize) + BARRIERS
    if isinstance(way, WideTiling):
        return wide_bytes(way, gated=gated) + BARRIERS
    if isinstance(way, SplitTiling):
        return way.stages * 256 * (way.rows + (128 if gated else 64)) + BARRIERS
    if not isinstance(way, Tiling):
        return 0  # a few words for each warp
    outputs = way.outputs * (2 if gated and way.gated else 1)
    stages = way.stages if chip.shared_operands else way.stages - 1
    stored = max(itemsize, 2) * way.rows * TALL if way.flat else 0  # a tile is written while the next one is loaded
    return stages * itemsize * way.inputs * (way.rows + outputs) + stored + BARRIERS


def fits(way: Way, product: Product, chip: Chip) -> bool:
    """Whether the chip can run it: its shared memory holds one program, and it has the instructions."""
    scaled = isinstance(way, WideTiling) or (isinstance(way, GroupedTiling) and way.scaled)
    if scaled and not scales_exactly(product.weight, product.dtype):
        return False
    if isinstance(way, PipelinedTiling) and not (chip.tma and chip.pdl):
        return False
    if not formed(way, product, chip):
        return False
    parts = (way.gate_up, way.down) if isinstance(way, ExpertTiling) else (way,)
    if any(isinstance(part, Tiling) and part.tma for part in parts) and not chip.tma:
        return False
    size = shared_bytes(way, chip, gated=product.gated or bool(product.experts), itemsize=product.itemsize)
    return size <= chip.shared_memory


def formed(way: Way, product: Product, chip: Chip) -> bool:
    """Whether there is a kernel of it for the weight's format."""
    if isinstance(way, SplitTiling):
        return chip.wgmma and product.weight in ("fp8", "fp8_blocks") and not (product.gated and way.rows > 64)
    if isinstance(way, Rescaled):
        return chip.library_scales and product.weight == "fp8" and product.dtype is torch.bfloat16
    if isinstance(way, PipelinedTiling):
        return product.weight in ("", "fp8")
    if isinstance(way, ExpertTiling) and way.sorted:
        blocks = product.weight == "fp8_blocks" and product.dtype.itemsize == 2
        return blocks and chip.wgmma and chip.tma and product.width % 128 == product.inputs % 256 == 0
    if isinstance(way, WideTiling):
        if product.weight not in GROUPED or not (chip.tma and chip.wgmma):
            return False
        form = form_named(product.weight)
        return form.numbers == "int4" and form.run == RUNS[0] and way.split(form.blocks(product.inputs))
    return True


def fitted(way: Way, product: Product, chip: Chip) -> Way:
    """The nearest way that the chip can run: without TMA where it has none, with fewer stages, then fewer inputs."""
    if isinstance(way, ExpertTiling):
        gate_up = fitted(way.gate_up, msgspec.structs.replace(product, gated=True, experts=0), chip)
        down = fitted(way.down, msgspec.structs.replace(product, gated=False, experts=0), chip)
        assert isinstance(gate_up, Tiling)
        assert isinstance(down, Tiling)
        way = ExpertTiling(gate_up, down, way.sorted)
        return way if fits(way, product, chip) else ExpertTiling(gate_up, down)
    if isinstance(way, Tiling) and way.tma and not chip.tma:
        way = msgspec.structs.replace(way, tma=False, ctas_per_sm=1, flat=False)
    while isinstance(way, Tiling | GroupedTiling) and not fits(way, product, chip):
        if way.stages > 2:
            way = msgspec.structs.replace(way, stages=way.stages - 1)
        elif isinstance(way, GroupedTiling):
            way = way.smaller()
        else:
            assert way.inputs > 16, f"{chip.name} has {chip.shared_memory} bytes of shared memory"
            way = msgspec.structs.replace(way, inputs=way.inputs // 2)
    return way


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A way that is worth measuring."""

    least: int  # rows, or pairs for each expert
    most: int
    way: Cut
    gated: bool | None = None  # None: either
    scaled: bool = False  # for weights of 8 bits


@lru_cache(maxsize=1)
def all_candidates() -> tuple[Candidate, ...]:
    path = Path(__file__).with_name("linear_candidates.json")
    return msgspec.json.decode(path.read_bytes(), type=tuple[Candidate, ...])


def candidates(product: Product, rows: float, chip: Chip) -> list[Way]:
    """Ways of a product of so many rows that are worth measuring on a chip, besides the rules' and the library's.

    One row is multiplied by a vector where kernels overlap (PDL): a pipeline is up to 9 % faster alone, but keeps the
    next kernel from starting early, which costs 6 % of all layers' time (8B, H200).
    """
    return [
        one.way
        for one in all_candidates()
        if one.least <= rows <= one.most
        and one.gated in (None, product.gated)
        and isinstance(one.way, ExpertTiling) == bool(product.experts)
        and one.scaled == (product.weight in SCALED)
        and isinstance(one.way, GroupedTiling | WideTiling) == (product.weight in GROUPED and not product.experts)
        and (rows > 1 or product.experts or product.weight or isinstance(one.way, VectorTiling) or not chip.pdl)
        and fits(one.way, product, chip)
    ]
