"""The vision encoders of Qwen2.5-VL (2025), Qwen3-VL (2025) and Qwen 3.5 (2026)."""

from __future__ import annotations

from penstock.engine_core.models.vision_kinds import BlockNames, Shapes, VisionKind, block, linear, norm
from penstock.engine_core.models.vision_spec import COLORS, VisionSpec

PATCHES = "patch_embed.proj"
GATED = BlockNames("norm1", ("attn.qkv",), "attn.proj", "norm2", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")
PLAIN = BlockNames("norm1", ("attn.qkv",), "attn.proj", "norm2", ("mlp.linear_fc1",), "mlp.linear_fc2")
MERGED = ("merger.ln_q", "merger.mlp.0", "merger.mlp.2")  # its norm, and the products of a cell
MERGER = ("merger.norm", "merger.linear_fc1", "merger.linear_fc2")


def level_names(level: int) -> tuple[str, str, str]:
    """The same of a DeepStack level, whose norm is of a cell."""
    norm, first, last = (f"deepstack_merger_list.{level}.{name.removeprefix('merger.')}" for name in MERGER)
    return norm, first, last


def shapes(spec: VisionSpec) -> Shapes:
    """The encoder's tensors."""
    for name, shape in tensors(spec):
        yield f"visual.{name}", shape


def tensors(spec: VisionSpec) -> Shapes:
    """By names within the encoder."""
    yield f"{PATCHES}.weight", (spec.hidden, COLORS, spec.frames, spec.patch, spec.patch)
    if not spec.gated:
        yield f"{PATCHES}.bias", (spec.hidden,)
        yield "pos_embed.weight", (spec.positions**2, spec.hidden)
    for layer in range(spec.layers):
        yield from block(f"blocks.{layer}.", spec, GATED if spec.gated else PLAIN)
    joined = spec.hidden * spec.merge**2
    mergers = [(MERGED if spec.gated else MERGER, spec.hidden)]
    mergers += [(level_names(level), joined) for level in range(len(spec.levels))]
    for names, width in mergers:
        yield from norm(names[0], width, spec.norm)
        yield from linear(names[1], joined, joined, bias=True)
        yield from linear(names[2], spec.outputs, joined, bias=True)


KINDS: tuple[VisionKind, ...] = ()
