"""Random checkpoints of models with a head of multi-token prediction as they are published, and what the head
computes: transformers' own layer behind the projection, in float64, whole sequences at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from penstock.engine_core.models.families.qwen_next import HEAD
from penstock.engine_core.models.layer_spec import MtpNames
from tests.engine_core.models.parity import SIZES, write_checkpoint

LAYERS = 2  # the first dense, the second and the head's with experts
PLACE = f"model.layers.{LAYERS}."
EPS = 1e-5
Weights = dict[str, Tensor]
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 20, "n_group": 1, "topk_group": 1, "pad_token_id": 0,
}  # fmt: skip
MIXTURE: dict[str, Any] = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
}  # fmt: skip
RECURRENT: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip
# Of a family its configuration, its layer, its rotary embedding, and further sizes.
KINDS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "glm4_moe": (
        Glm4MoeConfig, modeling_glm4_moe.Glm4MoeDecoderLayer, modeling_glm4_moe.Glm4MoeRotaryEmbedding,
        {**MIXTURE, "use_qk_norm": True, "head_dim": 16},
    ),
    "deepseek_v3": (
        DeepseekV3Config, modeling_deepseek_v3.DeepseekV3DecoderLayer, modeling_deepseek_v3.DeepseekV3RotaryEmbedding,
        {**MIXTURE, **LATENT},
    ),
    "glm4_moe_lite": (
        Glm4MoeLiteConfig, modeling_glm4_moe_lite.Glm4MoeLiteDecoderLayer,
        modeling_glm4_moe_lite.Glm4MoeLiteRotaryEmbedding, {**MIXTURE, **LATENT, "v_head_dim": 8},
    ),
    "qwen3_next": (
        Qwen3NextConfig, modeling_qwen3_next.Qwen3NextDecoderLayer, modeling_qwen3_next.Qwen3NextRotaryEmbedding,
        {**RECURRENT, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5": (
        Qwen3_5TextConfig, modeling_qwen3_5.Qwen3_5DecoderLayer, modeling_qwen3_5.Qwen3_5TextRotaryEmbedding, RECURRENT,
    ),
}  # fmt: skip


def head_names(kind: str) -> tuple[MtpNames, float]:
    """Of its tensors, and what is added to the weights of its norms."""
    return (HEAD, 1.0) if kind.startswith("qwen") else (MtpNames(place=PLACE), 0.0)


def headed_config(kind: str = "glm4_moe", **options: Any) -> PreTrainedConfig:
    sizes = {
        "num_hidden_layers": LAYERS,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 1024,
    }
    found, _, _, more = KINDS[kind]
    config: PreTrainedConfig = found(**{**SIZES, **sizes, **more, **options})
    return config


def write_headed(
    folder: Path, kind: str = "glm4_moe", *, guessing: bool = False, copies: bool = True, **options: Any
) -> Weights:
    """A checkpoint; returns the head's tensors. With `guessing` layers add little, so that the next token follows from
    the last one, and the head is right most of the time. With `copies` it has the model's embeddings, too."""
    write_checkpoint(folder, headed_config(kind, **options))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    hidden, random = SIZES["hidden_size"], torch.Generator().manual_seed(13)
    names, offset = head_names(kind)
    place = names.place
    head: Weights = {}
    for name, tensor in tensors.items():
        if name.startswith(last := f"model.layers.{LAYERS - 1}."):
            scale = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.3
            found = torch.randn(tensor.shape, generator=random) * scale + name.endswith("norm.weight") * (1 - offset)
            head[place + names.block + name.removeprefix(last)] = found
    for name in (names.embedding_norm, names.state_norm, names.norm):
        head[f"{place}{name}.weight"] = torch.randn(hidden, generator=random) * 0.3 + 1 - offset
    projection = f"{place}{names.projection}.weight"
    head[projection] = torch.randn(hidden, 2 * hidden, generator=random) * (2 * hidden) ** -0.5
    if guessing:
        for name, tensor in (*tensors.items(), *head.items()):
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                tensor.mul_(0.02)
            elif name.endswith("out_proj.weight"):  # what is said still follows from states
                tensor.mul_(0.2)
        head[f"{place}{names.embedding_norm}.weight"].fill_(1.0 - offset)
        head[projection].copy_(torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1))
        head[f"{place}{names.norm}.weight"].copy_(tensors["model.norm.weight"])
    shared = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    if copies:
        tensors |= {place + name: tensors[shared[name]].clone() for name in names.copies}
    save_file({**tensors, **head}, path, {"format": "pt"})
    configure(folder, num_nextn_predict_layers=1)
    return head


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class Oracle:
    """The head over whole sequences."""

    def __init__(self, weights: Weights, kind: str) -> None:
        config: Any = headed_config(kind)
        _, layer, rotary, _ = KINDS[kind]
        self.names, self.offset = head_names(kind)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        place, block = self.names.place, self.names.block
        self.weights = {
            name.removeprefix(place).removeprefix(block): tensor.double() for name, tensor in weights.items()
        }
        self.layer = layer(config, LAYERS - 1).double().eval()
        self.rotary = rotary(config)
        wanted = self.layer.state_dict()
        found = {name: tensor for name, tensor in self.weights.items() if name in wanted}
        if (stacked := "mlp.experts.gate_up_proj") in wanted and stacked not in found:
            count = config.num_experts if hasattr(config, "num_experts") else config.n_routed_experts
            ups = [
                torch.cat([self.weights[f"mlp.experts.{at}.{part}_proj.weight"] for part in ("gate", "up")])
                for at in range(count)
            ]
            downs = [self.weights[f"mlp.experts.{at}.down_proj.weight"] for at in range(count)]
            found |= {stacked: torch.stack(ups), "mlp.experts.down_proj": torch.stack(downs)}
        self.layer.load_state_dict(found)

    def states(self, embedded: Tensor, before: Tensor) -> Tensor:
        """float64 `[tokens, hidden]` of embeddings and the states before them."""
        names, count = self.names, len(embedded)
        joined = torch.cat((self.norm(embedded, names.embedding_norm), self.norm(before, names.state_norm)), -1)
        x = linear(joined, self.weights[f"{names.projection}.weight"])[None]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        turned = self.rotary(x, positions)
        out = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=turned)
        return self.norm((out[0] if isinstance(out, tuple) else out)[0], names.norm)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (self.weights[f"{name}.weight"] + self.offset)
