"""Products with weights of two models' layers, and the tilings that `benchmarks.linear_kernels` tries for them."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from penstock.kernels.linear_tilings import PIPELINED_ROWS, PipelinedTiling, Tiling, VectorTiling


class Model(NamedTuple):
    """Sizes of a decoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    intermediate: int
    vocabulary: int


class Product(NamedTuple):
    """One product of a layer; `gated`: of twice `width` outputs, with the gate of the MLP."""

    name: str
    width: int
    inputs: int
    gated: bool = False

    @property
    def outputs(self) -> int:
        return 2 * self.width if self.gated else self.width


MODELS = (
    Model("8B", 32, 4096, 32, 8, 128, 14336, 128256),
    Model("0.6B", 28, 1024, 16, 8, 128, 3072, 151936),
)


def products(model: Model) -> tuple[Product, ...]:
    """Those of a layer in their order, and the last one."""
    heads = model.heads * model.dim
    return (
        Product("qkv", heads + 2 * model.kv_heads * model.dim, model.hidden),
        Product("output", model.hidden, heads),
        Product("gate and up", model.intermediate, model.hidden, gated=True),
        Product("down", model.hidden, model.intermediate),
        Product("logits", model.vocabulary, model.hidden),
    )


def work(product: Product, rows: int, itemsize: int = 2) -> tuple[int, int]:
    """Bytes and FLOPs of one call: each operand is read once, the result written once."""
    size = product.outputs * product.inputs + rows * (product.inputs + product.width)
    return itemsize * size, 2 * rows * product.outputs * product.inputs


def candidates(rows: int, gated: bool) -> list[Tiling | VectorTiling | PipelinedTiling]:
    """Tilings worth trying for so many rows."""
    tiles = few_rows(8 if rows <= 8 else 16) if rows <= 16 else some_rows(rows) if rows <= 512 else many_rows()
    if gated:  # both products in one kernel, or the gate in a kernel of its own
        fused = [tile for tile in tiles if tile.gated and 2 * tile.rows * tile.outputs <= 64 * 256]
        tiles = [*fused, *(structs.replace(tile, gated=False) for tile in tiles)]
    rings = rings_of() if rows <= PIPELINED_ROWS else []
    return list(dict.fromkeys([*(vectors() if rows == 1 else ()), *rings, *tiles]))


def rings_of() -> list[PipelinedTiling]:
    return [PipelinedTiling(PIPELINED_ROWS, warps, stages) for warps in (1, 2, 4) for stages in (2, 3, 4, 6, 8)]


def vectors() -> list[VectorTiling]:
    forms = (
        *((1, 1024, 2), (1, 1024, 4), (1, 2048, 4), (1, 4096, 4), (2, 512, 2), (2, 512, 4), (2, 1024, 4)),
        *((2, 2048, 4), (2, 2048, 8), (4, 512, 4), (4, 1024, 4), (8, 512, 4), (8, 256, 4), (16, 256, 4)),
    )
    return [VectorTiling(*form) for form in forms]


def few_rows(height: int) -> list[Tiling]:
    """Outputs, inputs, warps, stages and, for descriptors, programs per processor."""
    forms = (
        *((16, 64, 1, 8), (16, 128, 2, 6), (16, 128, 2, 8), (16, 256, 2, 4), (16, 256, 4, 5), (32, 128, 2, 5)),
        *((32, 128, 4, 5), (32, 256, 4, 4), (64, 64, 4, 8), (64, 128, 4, 4), (64, 128, 4, 6)),
    )
    boxes = ((64, 128, 4, 6, 1), (64, 128, 4, 5, 2), (64, 256, 4, 5, 1), (128, 128, 4, 5, 1), (64, 64, 4, 6, 4))
    plain = [Tiling(height, *form, swap_ab=True) for form in forms]
    return plain + [tma_tiling(height, *box, swap_ab=True) for box in boxes]


def some_rows(rows: int) -> list[Tiling]:
    if rows <= 64:
        height = 32 if rows <= 32 else 64
        forms = ((32, 128, 4, 6, 2), (64, 128, 4, 4, 2), (64, 128, 4, 6, 2), (128, 128, 4, 4, 2), (128, 64, 4, 6, 2))
        found = [tma_tiling(height, *form) for form in forms if height == 64]
        found += [tma_tiling(height, *form, swap_ab=True) for form in forms if form[0] > 32]
        return [*found, Tiling(height, 64, 128, 4, 4, swap_ab=True), Tiling(height, 128, 64, 4, 5, swap_ab=True)]
    tall = (
        *((64, 64, 128, 4, 6, 2), (64, 128, 128, 4, 4, 1), (64, 128, 64, 4, 6, 2), (128, 64, 128, 4, 4, 1)),
        *((128, 128, 64, 4, 5, 1), (128, 128, 64, 8, 5, 1), (256, 128, 64, 8, 4, 1), (128, 256, 64, 8, 4, 1)),
        *((128, 128, 64, 8, 3, 2), (128, 64, 64, 4, 4, 2), (128, 128, 128, 8, 3, 1), (64, 256, 64, 8, 5, 1)),
    )
    upright = [tma_tiling(*form) for form in tall]
    return upright + [tma_tiling(*form, swap_ab=True) for form in tall if form[0] < 256]


def many_rows() -> list[Tiling]:
    forms = ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 8, 5))
    return [Tiling(*form, tma=True, gated=False, flat=True) for form in forms]


def tma_tiling(
    rows: int, outputs: int, inputs: int, warps: int, stages: int, ctas_per_sm: int, *, swap_ab: bool = False
) -> Tiling:
    return Tiling(rows, outputs, inputs, warps, stages, swap_ab=swap_ab, tma=True, ctas_per_sm=ctas_per_sm)
