"""Youtu-LLM (Tencent, 2025): dense layers behind the latent attention of DeepSeek-V3."""

from __future__ import annotations

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.families.deepseek import V3, read_latent_attention
from penstock.engine_core.models.reading import alike, read_mlp, read_norm


def read(file: ConfigFile) -> Body:
    attention = read_latent_attention(file, interleaved=file.flag("rope_interleave", True))
    return Body(layers=alike(file, attention, read_mlp(file), read_norm(file)))


LATENTS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
FAMILIES = (
    Family(
        name="youtu",
        architecture="YoutuForCausalLM",
        base="YoutuModel",
        read=read,
        defaults={
            **{key: V3[key] for key in LATENTS},
            "q_lora_rank": 1536,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        ignored=("head_dim", "qk_head_dim", "mlp_bias"),
        published_code=True,
    ),
)
