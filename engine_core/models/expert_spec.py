"""What config.json says about a mixture of experts (Shazeer et al., 2017). Imports no torch.

Qwen3-MoE has experts in some layers or all of them, Mixtral (Jiang et al., 2024) in all. Their tensors lie one by one
in published checkpoints; transformers 5 can also store those of a layer stacked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from penstock.engine_core.models.config_file import ConfigFile

QWEN, MIXTRAL = "qwen3_moe", "mixtral"
STACKED = "mlp.experts.gate_up_proj"  # in a checkpoint whose experts are


class ExpertNames(msgspec.Struct, frozen=True):
    """How the tensors of a layer are called in a checkpoint: of its block, and of one expert's three products."""

    block: str
    gate: str
    up: str
    down: str


NAMES: Mapping[str, ExpertNames] = {
    QWEN: ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    MIXTRAL: ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
}


class ExpertSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Gated MLPs of which a router picks some for each token."""

    count: int
    chosen: int  # for a token
    width: int  # of one expert's gate
    normalised: bool  # the weights of those that are chosen add up to one
    layers: tuple[bool, ...]  # which layers have experts, the others have one MLP
    names: ExpertNames
    stacked: bool = False  # in the checkpoint a layer's experts are one tensor of gates and ups and one of downs


def read_experts(file: ConfigFile, family: str, layers: int) -> ExpertSpec | None:
    """The experts of a family that has some. Raises ModelError naming the file and the key."""
    if family not in NAMES:
        return None
    # Up to version 4 of transformers Qwen's key had a name of its own.
    key = "num_experts" if family == QWEN and "num_experts" in file.values else "num_local_experts"
    count = file.integer(key, low=0 if family == QWEN else 1, high=4096)
    sparse = sparse_layers(file, layers) if family == QWEN else (True,) * layers
    if not count or not any(sparse):
        return None
    return ExpertSpec(
        count=count,
        chosen=file.integer("num_experts_per_tok", high=count),
        width=file.integer("moe_intermediate_size" if family == QWEN else "intermediate_size"),
        normalised=family == MIXTRAL or file.flag("norm_topk_prob"),
        layers=sparse,
        names=NAMES[family],
    )


def sparse_layers(file: ConfigFile, layers: int) -> tuple[bool, ...]:
    """Every so many-th layer, the first of each turn being its last, but those that are to have one MLP alone."""
    step = file.integer("decoder_sparse_step")
    plain = file.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(layer) is int and 0 <= layer < layers for layer in plain):
        raise file.error("mlp_only_layers", f"a list of layers, 0 to {layers - 1}, is expected")
    return tuple((layer + 1) % step == 0 and layer not in plain for layer in range(layers))


def with_layout(experts: ExpertSpec, names: Collection[str]) -> ExpertSpec:
    """The same for a checkpoint that holds tensors of these names."""
    return msgspec.structs.replace(experts, stacked=any(name.endswith(STACKED) for name in names))
