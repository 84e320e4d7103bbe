"""What a vision encoder takes: memory of its weights and of what it computes, and operations. Imports no torch."""

from __future__ import annotations

import math

from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.vision_kinds import row_weights, vision_shapes
from penstock.engine_core.models.vision_spec import COLORS, VisionSpec

FLOAT = 4  # bytes
ALIVE = 1.15  # of what is counted: what the products and the allocator take beside


def tower_weights(spec: VisionSpec) -> int:
    """Numbers in an encoder."""
    return sum(map(math.prod, vision_shapes(spec).values()))


def tower_weight_bytes(spec: VisionSpec, item_bytes: int) -> int:
    """Memory of them. item_bytes: of a number."""
    return tower_weights(spec) * item_bytes


def tower_step_bytes(spec: VisionSpec, patches: int, item_bytes: int) -> int:
    """Memory that encoding an image of so many patches takes at its worst moment, its rows included."""
    numbers, hidden = spec.patch_numbers, spec.hidden
    colors = COLORS * spec.patch**2
    # Of a patch: pixels, places in the table of values, values, the patch in fp32 and rounded; then its positions.
    embedding = colors * (1 + 2 * FLOAT) + numbers * (FLOAT + item_bytes)
    positions = hidden * (3 * FLOAT + 2 * item_bytes) if spec.positions else 0
    # The residual stream and its norm; queries, keys and values, twice where they are turned; what was attended.
    attention = hidden * item_bytes * (2 + 3 * (1 + bool(spec.theta)) + 1)
    mlp = item_bytes * (3 * hidden + spec.width * (2 + spec.gated))
    rotation = 4 * spec.head_dim * FLOAT if spec.theta else 0
    rows = 2 * spec.row_width * item_bytes * (spec.pooled or patches // spec.merge**2)
    return int(ALIVE * (patches * (max(embedding, positions, attention, mlp) + rotation) + rows))


def tower_flops(spec: VisionSpec, size: Size) -> int:
    """Operations of an image, two for each product of numbers."""
    patches, layers = spec.patches(size), spec.taken or spec.layers
    layer = spec.hidden * (4 * spec.hidden + (2 + spec.gated) * spec.width)
    pairs = sum(patches**2 if not spec.window or at in spec.full else window_pairs(spec, size) for at in range(layers))
    products = patches * (spec.patch_numbers * spec.hidden + layers * layer) + spec.rows(size) * row_weights(spec)
    return 2 * (products + 2 * spec.hidden * pairs)


def window_pairs(spec: VisionSpec, size: Size) -> int:
    """Pairs of patches of one window."""
    side = spec.window // spec.cell * spec.merge  # patches
    lines, columns = (
        sum(min(side, count - start) ** 2 for start in range(0, count, side))
        for count in (size.height // spec.patch, size.width // spec.patch)
    )
    return lines * columns
