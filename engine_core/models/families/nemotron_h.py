"""Nemotron-H and Nemotron 3 (NVIDIA, 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.families.nemotron import squared
from penstock.engine_core.models.layer_spec import NO_ROPE, Body, ExpertSpec, GateSpec, LayerSpec, MlpSpec, NormNames
from penstock.engine_core.models.reading import ModelFile
from penstock.engine_core.models.recurrence_spec import MambaSpec

MIXER, MLP = NormNames(attention_input="norm", mlp_input=""), NormNames(attention_input="", mlp_input="norm")
LETTERS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
KINDS: Mapping[str, str] = {"linear_attention": "mamba", "full_attention": "attention"}  # as transformers writes them


def read_nemotron_h(file: ModelFile) -> Body:
    """A layer is Mamba-2, attention without positions, an MLP, or experts without gates."""
    kinds, norm = read_parts(file), file.norm("layer_norm_epsilon", 1e-5)
    for key in ("use_bias", "mamba_proj_bias", "attention_bias"):
        if file.flag(key):
            raise file.error(key, "Penstock serves this family without biases of these products")
    mlp = squared(file, "mlp_hidden_act")
    parts: dict[str, dict[str, Any]] = {
        "mamba": {"recurrence": read_mamba(file), "norms": MIXER},
        "attention": {"attention": file.attention(NO_ROPE), "norms": MIXER},
        "mlp": {"mlp": mlp, "norms": MLP},
    }  # fmt: skip
    if "moe" in kinds:
        parts["moe"] = {"mlp": read_experts(file, mlp), "norms": MLP}
    return Body(layers=tuple(LayerSpec(norm=norm, **parts[kind]) for kind in kinds), unread=("mtp.",))


def read_parts(file: ModelFile) -> list[str]:
    """What each layer is: letters of a pattern, or names."""
    pattern = file.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        key, found = "hybrid_override_pattern", [LETTERS.get(letter) for letter in pattern]
    else:
        key = "layers_block_type" if file.get("layers_block_type") is not None else "layer_types"
        names = file.get(key)
        found = [KINDS.get(str(name), name) for name in names] if isinstance(names, list) else []
    kinds = [kind for kind in found if kind in LETTERS.values()]
    layers = file.integer("num_hidden_layers", len(kinds), high=4096)
    if len(kinds) != len(found) or len(kinds) != layers:
        raise file.error(key, f"mamba, attention, mlp or moe (M, *, - or E) is expected for each of {layers} layers")
    if "attention" not in kinds:
        raise file.error(key, "Penstock serves models of which at least one layer attends")
    return [str(kind) for kind in kinds]


def read_mamba(file: ModelFile) -> MambaSpec:
    """Time steps have no limits: `time_step_min` is of random weights, though transformers clamps by it."""
    file.activation("mamba_hidden_act")
    heads, groups = file.integer("mamba_num_heads"), file.integer("n_groups")
    if heads % groups:
        raise file.error("n_groups", f"it must divide mamba_num_heads ({heads})")
    return MambaSpec(
        heads=heads,
        head_dim=file.integer("mamba_head_dim"),
        groups=groups,
        state_dim=file.integer("ssm_state_size"),
        width=file.integer("conv_kernel", low=2, high=4),
        conv_bias=file.flag("use_conv_bias", True),
    )


def read_experts(file: ModelFile, mlp: MlpSpec) -> ExpertSpec:
    """As DeepSeek-V3's, of MLPs like the dense one."""
    if file.get("moe_latent_size") is not None:
        raise file.error("moe_latent_size", "Penstock serves experts that read the residual stream (null)")
    if mlp.bias:
        raise file.error("mlp_bias", "Penstock serves experts of this family without biases")
    number, width = file.integer("n_shared_experts", 1), file.integer("moe_shared_expert_intermediate_size")
    if number != 1:
        raise file.error("n_shared_experts", "Penstock serves one shared expert (1) in this family")
    gate, shared = GateSpec(kind=mlp.activation), structs.replace(mlp, width=width)
    return structs.replace(file.routed_experts(), gated=False, gate=gate, shared=shared)


FAMILIES = (
    Family(
        name="nemotron_h",
        architecture="NemotronHForCausalLM",
        read=read_nemotron_h,
        defaults={
            "max_position_embeddings": 4096,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
        },
        names=(
            ("embed_tokens.", "embeddings."),
            ("model.norm.", "model.norm_f."),
            ("self_attn.", "mixer."),
            ("mamba.", "mixer."),
            ("mlp.", "mixer."),
        ),
        ignored=(
            *("mamba_ssm_cache_dtype", "use_mamba_kernels", "rescale_prenorm_residual", "moe_shared_expert_overlap"),
            *("mtp_layers_block_type", "norm_eps", "rope_theta", "partial_rotary_factor", "n_routed_experts"),
            *("n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "n_group"),
            *("num_experts_per_tok", "topk_group", "norm_topk_prob", "routed_scaling_factor", "num_local_experts"),
        ),
        published_code=True,
    ),
)
