"""The model shapes that the GPU figures are of, as folders: a real config.json, the embedded model's tokenizer widened
to the shape's vocabulary, and no weights (`--load-format dummy` makes them up).

Every id has text of its own, as in a real vocabulary, so a stream of random tokens costs what a stream of words does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.vision_shapes import NINE_ROPE, NINE_TOWER, TWO_ROPE, TWO_TEXT, TWO_TOWER, see, seeing
from penstock.engine_core.embedded import demo_folder

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPACE = "\u0120"  # how byte-level vocabularies spell a space
COPIED = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")


class Shape(msgspec.Struct, frozen=True):
    """One model: its name in results and tables, and its config.json."""

    name: str
    title: str
    config: Mapping[str, Any]

    @property
    def vocab(self) -> int:
        return int(self.config["vocab_size"])


EIGHT = Shape(
    "8b",
    "8B",
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": 4089,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
)
SMALL = Shape(
    "0.6b",
    "0.6B",
    {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": 4089,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
)
# Llama-3.1-70B: too large for one H200. Half of its layers fit, and show what a second GPU is worth to each of them.
SEVENTY = Shape(
    "70b",
    "70B",
    {
        **EIGHT.config,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
)
HALF_SEVENTY = Shape("70b-40", "70B, 40 layers", {**SEVENTY.config, "num_hidden_layers": 40})
QWEN_MOE = Shape(  # Qwen3-30B-A3B
    "30b-a3b",
    "30B of which 3B",
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": 4089,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
)
GLM_FLASH = Shape(  # latent attention
    "glm-4.7-flash",
    "GLM-4.7-Flash",
    {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "attention_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": 4089,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 47,
        "num_key_value_heads": 20,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
)
MIXTRAL = Shape(
    "8x7b",
    "8 x 7B",
    {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "bfloat16",
        "eos_token_id": 4089,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
)
GPT_OSS = Shape(  # gpt-oss-20b, as it is published: experts in MXFP4
    "gpt-oss-20b",
    "gpt-oss-20b",
    {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "dtype": "bfloat16",
        "eos_token_id": 4089,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
)
GEMMA = Shape(  # the text half of Gemma-3-27B
    "gemma-3-27b",
    "Gemma-3-27B",
    {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": 4089,
        "head_dim": 128,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000.0,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "vocab_size": 262208,
    },
)
QWEN_NINE = Shape(  # Qwen3.5-9B's text half: three layers of Gated DeltaNet to one that attends
    "qwen3.5-9b",
    "Qwen3.5-9B",
    {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 4089,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
)
SEEING_NINE = Shape("qwen3.5-9b-vision", "Qwen3.5-9B with images", seeing(QWEN_NINE.config, NINE_TOWER, NINE_ROPE))
SEEING_TWO = Shape("qwen3-vl-2b", "Qwen3-VL-2B", seeing(TWO_TEXT, TWO_TOWER, TWO_ROPE))
QWEN_MIXED = Shape(  # Qwen3.6-35B-A3B's text half: the same layers with routed experts
    "qwen3.6-35b-a3b",
    "Qwen3.6-35B-A3B",
    {
        **{key: value for key, value in QWEN_NINE.config.items() if key != "intermediate_size"},
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
    },
)
PLAIN_GPT_OSS = Shape(
    "gpt-oss-20b-bf16",
    "gpt-oss-20b in bf16",
    {key: value for key, value in GPT_OSS.config.items() if key != "quantization_config"},
)
FP8_CHANNELS: Mapping[str, Any] = {  # as llm-compressor writes it: a scale for each output, and one for each row of x
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True,
            },
        },
    },
    "ignore": ["lm_head"],
}  # fmt: skip
FP8_BLOCKS: Mapping[str, Any] = {  # as Qwen publishes it
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
W4A16: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True,
                "dynamic": False,
            },
            "input_activations": None,
        },
    },
    "ignore": ["lm_head"],
}  # fmt: skip


def quantized(shape: Shape, name: str, title: str, how: Mapping[str, Any]) -> Shape:
    """The shape with quantized weights."""
    return Shape(name, title, {**shape.config, "quantization_config": how})


QUANTIZED = (
    quantized(EIGHT, "8b-fp8", "8B in FP8", FP8_CHANNELS),
    quantized(EIGHT, "8b-fp8-blocks", "8B in FP8, blocks of 128", FP8_BLOCKS),
    quantized(EIGHT, "8b-w4a16", "8B in W4A16", W4A16),
    quantized(SEVENTY, "70b-w4a16", "70B in W4A16", W4A16),
    quantized(QWEN_MOE, "30b-a3b-fp8", "30B of which 3B in FP8, blocks of 128", FP8_BLOCKS),
)
SMOKE = Shape("smoke", "smoke", json.loads((demo_folder() / "config.json").read_bytes()))  # for a try on a CPU
SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        EIGHT,
        SMALL,
        QWEN_MOE,
        MIXTRAL,
        *QUANTIZED,
        quantized(QWEN_MIXED, "qwen3.6-35b-a3b-fp8", "Qwen3.6-35B-A3B in FP8, blocks of 128", FP8_BLOCKS),
        GPT_OSS,
        PLAIN_GPT_OSS,
        GEMMA,
        GLM_FLASH,
        QWEN_NINE,
        QWEN_MIXED,
        SEEING_NINE,
        SEEING_TWO,
        SMOKE,
    )
}


def make_folder(shape: Shape, place: Path) -> Path:
    """The shape's model folder below `place`, which must exist. One that sees images has their tokens, a template that
    writes them, and Qwen's image processor."""
    folder = place / shape.name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape.config, indent=1))
    demo = demo_folder()
    for name in COPIED:
        shutil.copyfile(demo / name, folder / name)
    tokenizer = json.loads((demo / "tokenizer.json").read_bytes())
    if "vision_config" in shape.config:
        see(folder, tokenizer, shape.config)
    widen(tokenizer, shape.vocab)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    return folder


def widen(tokenizer: dict[str, Any], size: int) -> None:
    """Give every id below `size` that has no token yet a word of its own. Merges stay, so encoding does not change."""
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    # An added token that the vocabulary lacks would be numbered behind it by the library, whatever its id says.
    vocab.update((token["content"], token["id"]) for token in tokenizer["added_tokens"])
    used = set(vocab.values())
    for token_id in range(size):
        if token_id not in used:
            vocab[word(token_id)] = token_id


def word(number: int) -> str:
    """A space and six letters, others for each number below 26⁴; "zq" begins no word of the embedded model's."""
    letters = ""
    for _ in range(4):
        number, digit = divmod(number, len(LETTERS))
        letters = LETTERS[digit] + letters
    return f"{SPACE}zq{letters}"
