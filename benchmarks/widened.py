"""The embedded model in a larger model's shape: it says what it says, and a step takes what that shape's steps take.

Speed that depends on what a model says (drafts under a grammar, say) shows nothing over random weights, and a model of
19 MB leaves a GPU idle. So the embedded model's weights are put into the corner of larger ones. Hidden states end in
zeros, and norms are scaled by what that takes from their mean; heads are padded such that rotary frequencies stay;
further layers compute on random weights and add zero. The vocabulary stays.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from penstock.engine_core.embedded import demo_folder

COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
NOISE = 0.02  # standard deviation of weights that change nothing


class Width(msgspec.Struct, frozen=True, kw_only=True):
    """What a config.json says of a decoder's sizes."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


EIGHT = Width(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128,
)  # fmt: skip
Weights = dict[str, torch.Tensor]


def padded(weight: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The weight in the first corner of zeros of these sizes."""
    found = torch.zeros(sizes, dtype=weight.dtype)
    found[tuple(slice(size) for size in weight.shape)] = weight
    return found


def spread(weight: torch.Tensor, heads: int, size: int, old: Width, new: Width) -> torch.Tensor:
    """Rows of so many query or key heads in heads of another size: # [old heads · old size, ...] → [heads · size, ...]

    A head's two halves are rotated against each other, the more slowly the farther in; the place at which as many heads
    share keys as before stays the same share of a half.
    """
    rows = weight.reshape(-1, 2, old.head_dim // 2, *weight.shape[1:])
    found = torch.zeros((heads, 2, size // 2, *weight.shape[1:]), dtype=weight.dtype)
    places = torch.tensor(head_places(len(rows), heads, old, new))
    found[places, :, :: size // old.head_dim] = rows
    return found.reshape(heads * size, *weight.shape[1:])


def head_places(count: int, heads: int, old: Width, new: Width) -> list[int]:
    """Where these heads come to stand: query heads beside those that they share keys with."""
    if count == old.num_key_value_heads:
        return list(range(count))
    group, wide = old.num_attention_heads // old.num_key_value_heads, heads // new.num_key_value_heads
    return [head // group * wide + head % group for head in range(count)]


def layer(weights: Mapping[str, torch.Tensor], old: Width, new: Width) -> Weights:
    """A real layer's weights, by the names behind its number."""
    hidden, heads, kv_heads, head = new.hidden_size, new.num_attention_heads, new.num_key_value_heads, new.head_dim
    queries = spread(weights["self_attn.q_proj.weight"], heads, head, old, new)
    keys = spread(weights["self_attn.k_proj.weight"], kv_heads, head, old, new)
    values = torch.zeros(kv_heads, head, old.hidden_size, dtype=queries.dtype)
    values[: old.num_key_value_heads, : old.head_dim] = weights["self_attn.v_proj.weight"].reshape(
        old.num_key_value_heads, old.head_dim, -1
    )
    output = torch.zeros(old.hidden_size, heads, head, dtype=queries.dtype)
    output[:, head_places(old.num_attention_heads, heads, old, new), : old.head_dim] = weights[
        "self_attn.o_proj.weight"
    ].reshape(old.hidden_size, old.num_attention_heads, old.head_dim)
    scores = (head / old.head_dim) ** 0.25  # of queries and of keys: their product is divided by the head's root
    found = {
        "self_attn.q_proj.weight": padded(queries, heads * head, hidden),
        "self_attn.k_proj.weight": padded(keys, kv_heads * head, hidden),
        "self_attn.v_proj.weight": padded(values.reshape(kv_heads * head, -1), kv_heads * head, hidden),
        "self_attn.o_proj.weight": padded(output.reshape(old.hidden_size, -1), hidden, heads * head),
        "mlp.gate_proj.weight": padded(weights["mlp.gate_proj.weight"], new.intermediate_size, hidden),
        "mlp.up_proj.weight": padded(weights["mlp.up_proj.weight"], new.intermediate_size, hidden),
        "mlp.down_proj.weight": padded(weights["mlp.down_proj.weight"], hidden, new.intermediate_size),
    }
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        wide = spread(weights[name], 1, head, msgspec.structs.replace(old, num_key_value_heads=1), new)
        found[name] = scaled(wide, math.sqrt(old.head_dim / head) * scores)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        found[name] = norm(weights[name], old, new)
    return found


def idle_layer(like: Mapping[str, torch.Tensor]) -> Weights:
    """A layer that adds zero: as large as the real one."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.empty_like(weight).normal_(0.0, NOISE, generator=generator) for name, weight in like.items()}
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        found[name].zero_()
    return found


def norm(weight: torch.Tensor, old: Width, new: Width) -> torch.Tensor:
    """Of hidden states that end in zeros: their mean square is smaller by the same share."""
    return padded(scaled(weight, math.sqrt(old.hidden_size / new.hidden_size)), new.hidden_size)


def scaled(weight: torch.Tensor, by: float) -> torch.Tensor:
    return (weight.float() * by).to(weight.dtype)


def widen(target: Path, width: Width, source: Path | None = None) -> Path:
    """Write the embedded model, or that of another folder, in this shape, one file for each layer. Every size must be
    a multiple of the model's own, or at least as large where it says nothing of others."""
    source = source or demo_folder()
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    old = msgspec.convert(config, Width)
    assert width.head_dim % old.head_dim == 0, "rotary frequencies are kept by leaving places out"
    assert width.num_key_value_heads >= old.num_key_value_heads
    assert width.num_attention_heads * old.num_key_value_heads >= old.num_attention_heads * width.num_key_value_heads
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers"):
        assert getattr(width, name) >= getattr(old, name), name
    target.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        shutil.copy(source / name, target / name)
    epsilon = config["rms_norm_eps"] * old.hidden_size / width.hidden_size
    (target / "config.json").write_text(json.dumps(config | msgspec.structs.asdict(width) | {"rms_norm_eps": epsilon}))
    weights = load_file(source / "model.safetensors")
    files: dict[str, str] = {}

    def keep(number: int, found: Weights) -> None:
        name = f"model-{number:05}.safetensors"
        save_file({key: weight.contiguous() for key, weight in found.items()}, target / name, {"format": "pt"})
        files.update(dict.fromkeys(found, name))

    embedding = weights["model.embed_tokens.weight"]
    keep(0, {
        "model.embed_tokens.weight": padded(embedding, len(embedding), width.hidden_size),
        "model.norm.weight": norm(weights["model.norm.weight"], old, width),
    })  # fmt: skip
    for number in range(width.num_hidden_layers):
        prefix = f"model.layers.{number}."
        if number < old.num_hidden_layers:
            own = {key.removeprefix(prefix): weight for key, weight in weights.items() if key.startswith(prefix)}
            found = layer(own, old, width)
        elif number == old.num_hidden_layers:
            found = idle_layer(found)  # one for all of them: as many bytes are read
        keep(number + 1, {prefix + key: weight for key, weight in found.items()})
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return target
