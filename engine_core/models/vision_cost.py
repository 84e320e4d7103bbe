"""What a vision encoder takes: memory of its weights and of what it computes. Imports no torch."""

from __future__ import annotations

import math

from penstock.engine_core.models.vision_kinds import vision_shapes
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
