from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.models.families import families
from penstock.engine_core.models.layer_spec import RopeSpec
from penstock.engine_core.models.spec import ModelSpec, read_spec
from penstock.protocol.errors import ModelError
from tests.engine_core.models.specs import windows_of

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "torch_dtype": "bfloat16",
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {**QWEN2, "architectures": ["MistralForCausalLM"]}
WINDOW = {"use_sliding_window": True, "sliding_window": 32}


def spec(folder: Path, base: dict[str, Any] = LLAMA, **more: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({**base, **more}))
    return read_spec(folder)


def test_sizes(tmp_path: Path) -> None:
    found = spec(tmp_path)
    attention = found.attention
    assert (found.family, found.layers, found.hidden, attention.heads, attention.kv_heads) == ("llama", 4, 64, 8, 8)
    assert (found.attention.head_dim, found.dense[0].width, found.vocab_size, found.norm.eps) == (8, 96, 100, 1e-6)
    assert (found.max_position, found.longest, found.dtype) == (512, 512, "bfloat16")
    assert not any((found.tied, attention.qkv_bias, attention.output_bias, found.dense[0].bias, attention.qk_norm))
    assert found.attention.rope == RopeSpec()


@pytest.mark.parametrize(
    ("base", "more", "expected"),
    [
        (LLAMA, {"attention_bias": True}, (True, True, False, "")),
        (LLAMA, {"mlp_bias": True}, (False, False, True, "")),
        (QWEN2, {}, (True, False, False, "")),
        (QWEN2, {"attention_bias": True}, (True, False, False, "")),
        (QWEN3, {}, (False, False, False, "head")),
        (QWEN3, {"attention_bias": True, "mlp_bias": True}, (True, True, False, "head")),
        (MISTRAL, {"attention_bias": True}, (False, False, False, "")),
    ],
)
def test_what_a_family_has(tmp_path: Path, base: dict[str, Any], more: dict[str, Any], expected: object) -> None:
    found = spec(tmp_path, base, **more)
    assert (
        found.attention.qkv_bias,
        found.attention.output_bias,
        found.dense[0].bias,
        found.attention.qk_norm,
    ) == expected


def test_head_size_and_groups(tmp_path: Path) -> None:
    assert spec(tmp_path, head_dim=32).attention.head_dim == 32
    assert spec(tmp_path, head_dim=None).attention.head_dim == 8
    assert spec(tmp_path, QWEN3).attention.head_dim == 128
    assert spec(tmp_path, num_key_value_heads=2).attention.kv_heads == 2
    assert spec(tmp_path, num_key_value_heads=None).attention.kv_heads == 8


@pytest.mark.parametrize(
    ("base", "more", "windows"),
    [
        (LLAMA, {"sliding_window": 1 << 20}, (0, 0, 0, 0)),
        (MISTRAL, {}, (4096,) * 4),
        (MISTRAL, {"sliding_window": None}, (0,) * 4),
        (MISTRAL, {"sliding_window": 8}, (8,) * 4),
        (QWEN2, {"sliding_window": 32, "max_window_layers": 0}, (0,) * 4),
        (QWEN2, {**WINDOW, "max_window_layers": 3}, (0, 0, 0, 32)),
        (QWEN2, WINDOW, (0,) * 4),
        (QWEN3, {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}, (32, 0, 32, 0)),
        (QWEN3, {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (0,) * 4),
    ],
)
def test_windows(tmp_path: Path, base: dict[str, Any], more: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert windows_of(spec(tmp_path, base, **more)) == windows


OLD = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}
NEW = {"rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 5e5}}


def test_both_spellings_of_rope(tmp_path: Path) -> None:
    expected = RopeSpec(kind="linear", theta=5e5, factor=4.0, original_max_position=512)
    assert spec(tmp_path, **OLD).attention.rope == spec(tmp_path, **NEW).attention.rope == expected
    assert spec(tmp_path, rope_theta=5e5, rope_scaling=None).attention.rope == RopeSpec(theta=5e5)
    plain = {"rope_type": "default", "rope_theta": 7.0}
    assert spec(tmp_path, rope_parameters=plain).attention.rope == RopeSpec(theta=7.0)


def test_llama3_rope(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    found = spec(tmp_path, rope_theta=5e5, rope_scaling=scaling)
    assert found.max_position == 512
    assert found.attention.rope == RopeSpec(kind="llama3", theta=5e5, factor=8.0, original_max_position=128)


@pytest.mark.parametrize(
    ("scaling", "served", "longest"),
    [
        ({"type": "linear", "factor": 4.0}, 2048, 2048),
        ({"type": "dynamic", "factor": 4.0}, 512, 2048),
        ({"type": "yarn", "factor": 4.0}, 2048, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512, 512),
        ({"type": "yarn", "original_max_position_embeddings": 128}, 512, 512),
    ],
)
def test_lengths(tmp_path: Path, scaling: dict[str, Any], served: int, longest: int) -> None:
    found = spec(tmp_path, rope_scaling=scaling)
    assert (found.max_position, found.longest) == (served, longest)


def test_yarn_attention_factor(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0}
    assert spec(tmp_path, rope_scaling=yarn).attention.rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert spec(tmp_path, rope_scaling={**yarn, "attention_factor": 0.5}).attention.rope.attention_factor == 0.5
    scales = {**yarn, "mscale": 2.0, "mscale_all_dim": 2.0}
    assert spec(tmp_path, rope_scaling=scales).attention.rope.attention_factor == 1.0


def test_model_type_serves_where_architectures_are_silent(tmp_path: Path) -> None:
    silent = {**LLAMA, "architectures": None, "model_type": "mistral"}
    assert spec(tmp_path, silent, num_key_value_heads=8).attention.window


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForTokenClassification", "GPT2Model", ""])
def test_unknown_architectures_are_refused_with_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec(tmp_path, architectures=[name])
    classes = [family.architecture for family in families().values()]
    assert all(known in str(caught.value) for known in (*classes, "config.json"))


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map.*code of its own"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config.*hqq"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'.*silu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": None, "model_type": ["llama"]}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 65}, "num_attention_heads is 8; without head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3.*divide"),
        ({"head_dim": 7}, "head_dim is 7.*heads of 7"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "head_dim is 2.*dynamic"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'.*bfloat16"),
        ({"rope_scaling": 3}, "rope_scaling"),
        ({"rope_scaling": {"type": "ntk"}}, "ntk.*dynamic"),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope_type of default"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 1e308}}, "factor is 1e.308"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1e308}}, "beta_fast"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ],
)
def test_what_is_refused_names_file_and_key(tmp_path: Path, more: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: .*{complaint}"):
        spec(tmp_path, **more)


@pytest.mark.parametrize("kinds", [["full_attention"], ["chunked_attention"] * 4, "sliding_attention", [[]] * 4])
def test_layer_types_that_do_not_fit(tmp_path: Path, kinds: object) -> None:
    with pytest.raises(ModelError, match="layer_types"):
        spec(tmp_path, QWEN3, **WINDOW, layer_types=kinds)


def test_nothing_heavy_is_imported() -> None:
    script = "import sys, penstock.engine_core.folder\n"
    script += "print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout.strip() == "set()"
