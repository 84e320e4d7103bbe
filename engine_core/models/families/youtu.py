"""Youtu-LLM (Tencent, 2025): dense layers behind the latent attention of DeepSeek-V3."""

from __future__ import annotations

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.families.deepseek import V3, read_latent_attention
from penstock.engine_core.models.layer_spec import Body
from penstock.engine_core.models.reading import ModelFile


def read(file: ModelFile) -> Body:
    return file.body(read_latent_attention(file, interleaved=file.flag("rope_interleave", True)), file.mlp())


LATENTS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
FAMILIES = (
    Family(
        name="youtu",
        architecture="YoutuForCausalLM",
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
