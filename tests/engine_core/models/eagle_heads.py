"""Random EAGLE heads as they are published, and what they compute, plainly, in float64, whole sequences at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from penstock.engine_core.loading import fill_head
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.draft_spec import HeadSpec, read_head
from penstock.engine_core.models.eagle import EagleHead, build_head
from penstock.engine_core.models.spec import ModelSpec
from penstock.engine_core.models.weight_files import stored_names

HIDDEN, HEADS, KV_HEADS, DIM, WIDTH, EPS, THETA = 64, 4, 2, 16, 96, 1e-6, 10000.0
KNOWN = 40  # tokens of the smaller vocabulary

Weights = dict[str, Tensor]


def head_config(vocabulary: int, third: bool = False, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 256,
        "vocab_size": vocabulary,
    }
    if third:
        found |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": KNOWN}
    return found | more


def layer_weights(prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}self_attn.q_proj.weight": (HEADS * DIM, inputs),
        f"{prefix}self_attn.k_proj.weight": (KV_HEADS * DIM, inputs),
        f"{prefix}self_attn.v_proj.weight": (KV_HEADS * DIM, inputs),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{prefix}mlp.gate_proj.weight": (WIDTH, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (WIDTH, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, WIDTH),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
    }


def first_weights(layers: int = 1, bias: bool = False) -> Weights:
    """EAGLE's tensors."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    if bias:
        shapes["fc.bias"] = (HIDDEN,)
    for layer in range(layers):
        shapes |= layer_weights(f"layers.{layer}.", HIDDEN)
        if layer:
            shapes[f"layers.{layer}.input_layernorm.weight"] = (HIDDEN,)
    return fill(shapes)


def third_weights(vocabulary: int) -> Weights:
    """EAGLE-3's tensors, over every third target token or so."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 3 * HIDDEN), "lm_head.weight": (KNOWN, HIDDEN)}
    shapes |= layer_weights("midlayer.", 2 * HIDDEN)
    shapes |= {f"midlayer.{name}.weight": (HIDDEN,) for name in ("input_layernorm", "hidden_norm")}
    found = fill(shapes | {"norm.weight": (HIDDEN,)})
    chosen = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(5))[:KNOWN].sort().values
    found["d2t"] = chosen - torch.arange(KNOWN)
    found["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, chosen, True)
    return found


def fill(shapes: dict[str, tuple[int, ...]]) -> Weights:
    random = torch.Generator().manual_seed(11)
    return {
        name: torch.randn(shape, generator=random) * shape[1] ** -0.5
        if len(shape) > 1
        else torch.randn(shape, generator=random) * 0.3 + ("norm" in name)
        for name, shape in shapes.items()
    }


def write_head(folder: Path, config: dict[str, Any], weights: Weights) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def listening_head(folder: Path, target: ModelSpec) -> Path:
    """A head of the third version without tensors, for random ones: it hears three depths and guesses nothing right."""
    config = head_config(
        target.vocab_size, True, hidden_size=target.hidden, draft_vocab_size=512, head_dim=16,
        eagle_aux_hidden_state_layer_ids=[1, 3, 5],
    )  # fmt: skip
    (write_head(folder, config, {}) / "model.safetensors").unlink()
    return folder


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotate(x: Tensor) -> Tensor:
    """x: [tokens, heads, dim], positions 0.. in order."""
    angles = torch.arange(len(x)).double()[:, None] * THETA ** -(torch.arange(0, DIM, 2).double() / DIM)
    cos, sin = (found(torch.cat((angles, angles), 1))[:, None] for found in (torch.cos, torch.sin))
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def attend(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    q, k, v = (linear(x, weights[f"{prefix}self_attn.{name}_proj.weight"]).view(len(x), -1, DIM) for name in "qkv")
    found = scaled_dot_product_attention(
        rotate(q).transpose(0, 1), rotate(k).transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
    )
    return linear(found.transpose(0, 1).flatten(1), weights[f"{prefix}self_attn.o_proj.weight"])


def mlp(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    x = norm(x, weights[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (linear(x, weights[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return linear(silu(gate) * up, weights[f"{prefix}mlp.down_proj.weight"])


def doubled(weights: Weights) -> Weights:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def first_states(weights: Weights, embedded: Tensor, states: Tensor) -> Tensor:
    """EAGLE: float64 [tokens, hidden] of embeddings and the states before them."""
    weights = doubled(weights)
    x = linear(torch.cat((embedded, states), -1), weights["fc.weight"], weights.get("fc.bias"))
    for layer in range(sum(name.endswith("o_proj.weight") for name in weights)):
        prefix = f"layers.{layer}."
        normed = norm(x, weights[f"{prefix}input_layernorm.weight"]) if layer else x
        x = x + attend(normed, weights, prefix)
        x = x + mlp(x, weights, prefix)
    return x


def third_states(weights: Weights, embedded: Tensor, states: Tensor) -> Tensor:
    """EAGLE-3, after `fc`."""
    weights = doubled(weights)
    normed = [
        norm(x, weights[f"midlayer.{name}.weight"])
        for name, x in (("input_layernorm", embedded), ("hidden_norm", states))
    ]
    x = states + attend(torch.cat(normed, -1), weights, "midlayer.")
    return x + mlp(x, weights, "midlayer.")


def third_logits(weights: Weights, states: Tensor) -> Tensor:
    """Over the head's own vocabulary."""
    weights = doubled(weights)
    return linear(norm(states, weights["norm.weight"]), weights["lm_head.weight"])


def load_head(
    folder: Path,
    target: Decoder,
    length: int,
    load_format: str = "auto",
    seed: int = 0,
    spec: HeadSpec | None = None,
) -> EagleHead:
    """The head in a folder for a target, with its weights. spec: None: it is read here."""
    dummy = load_format == "dummy"
    if spec is None:
        spec = read_head(folder, target.spec, None if dummy else stored_names(folder))
    head = build_head(spec, target, length)
    fill_head(head, folder, load_format, seed)
    return head
