"""The text half of models of text and images: the numbers under `text_config`, tensors under names of their own, and
encoders that are left unread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Exaone4_5_Config,
    Gemma3Config,
    Gemma4Config,
    Glm4vConfig,
    Glm4vMoeConfig,
    Glm46VConfig,
    Mistral3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.tensors import check_weights, unread_tensors
from penstock.engine_core.models.weight_files import read_names
from penstock.protocol.errors import ModelError
from tests.engine_core.models.parity import SIZES, PagedRun, ours, random_prompts

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
CLIP = {**VISION, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
TEXT = {**SIZES, "head_dim": 16, "pad_token_id": 0}
GLM = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GLM_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
GLM_TOKENS = {
    "image_start_token_id": 7, "image_end_token_id": 8, "video_start_token_id": 9, "video_end_token_id": 10
}  # fmt: skip
GLM_EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
CASES: dict[str, PreTrainedConfig] = {
    "gemma3": Gemma3Config(
        text_config={**TEXT, "sliding_window": 11, "sliding_window_pattern": 3}, vision_config=CLIP,
        mm_tokens_per_image=4, image_token_index=5, boi_token_index=6, eoi_token_index=7,
    ),
    "gemma4": Gemma4Config(
        text_config={**TEXT, "global_head_dim": 32, "sliding_window": 11, "hidden_size_per_layer_input": 0,
                     "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        vision_config={**VISION, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4,
                       "position_embedding_size": 64}, image_token_id=5, video_token_id=6, audio_token_id=7,
    ),
    "mistral3": Mistral3Config(
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None}, image_token_index=5,
        vision_config={**CLIP, "model_type": "pixtral", "head_dim": 16},
    ),
    "ministral3": Mistral3Config(
        text_config={**TEXT, "model_type": "ministral3", "sliding_window": None}, image_token_index=5,
        vision_config={**CLIP, "model_type": "pixtral", "head_dim": 16},
    ),
    "glm4v": Glm4vConfig(
        text_config={**TEXT, "rope_parameters": {**GLM, "mrope_section": [1, 1, 2]}}, image_token_id=5,
        vision_config=GLM_VISION, video_token_id=6, **GLM_TOKENS,
    ),
    "glm4v_moe": Glm4vMoeConfig(
        text_config={**TEXT, "rope_parameters": {**GLM, "mrope_section": [1, 1, 2]}, **GLM_EXPERTS}, image_token_id=5,
        vision_config=GLM_VISION, video_token_id=6, **GLM_TOKENS,
    ),
    "glm46v_moe": Glm46VConfig(
        text_config={**TEXT, "model_type": "glm4v_moe_text", "rope_parameters": {**GLM, "mrope_section": [1, 1, 2]},
                     **GLM_EXPERTS}, image_token_id=5, vision_config=GLM_VISION, video_token_id=6, **GLM_TOKENS,
    ),
    "exaone4_5": Exaone4_5_Config(
        text_config={**TEXT, "model_type": "exaone4", "sliding_window": 11, "layer_types": LAYERS}, image_token_id=5,
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
                       "num_key_value_heads": 2}, video_token_id=6,
    ),
    "qwen3_vl_moe": Qwen3VLMoeConfig(
        text_config={**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}, "num_experts": 6,
                     "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}, image_token_id=5,
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
                       "deepstack_visual_indexes": [0]}, video_token_id=6,
    ),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config={**SIZES, "pad_token_id": 0, "rope_parameters": MROPE}, image_token_id=5, video_token_id=6,
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64},
    ),
    "qwen3_vl": Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}}, image_token_id=5,
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
                       "deepstack_visual_indexes": [0]}, video_token_id=6,
    ),
}  # fmt: skip


def write(folder: Path, config: PreTrainedConfig) -> Any:
    """A random checkpoint, as transformers writes it."""
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    reference, prompts = write(tmp_path, CASES[case]), random_prompts(2)
    prompts = [[token + 8 * (token < 8) for token in prompt] for prompt in prompts]  # no image's
    expected = reference(input_ids=torch.tensor(prompts)).logits
    model = ours(tmp_path)
    check_weights(tmp_path, model.spec)
    run = PagedRun(model, prompts)
    run.prefill()
    for sequence, logits in zip(run.sequences, expected, strict=True):
        torch.testing.assert_close(torch.cat(sequence.logits), logits, atol=1e-4, rtol=0)
    assert sum(unread_tensors(model.spec, read_names(tmp_path)).values()) > 5


def test_both_spellings_of_names_are_read(tmp_path: Path) -> None:
    """Checkpoints of today, and of before the text half became a part of the model."""
    write(tmp_path, CASES["gemma3"])
    before = {name: place.tensor for name, place in ours(tmp_path).destinations().items()}
    tensors = load_file(tmp_path / "model.safetensors")
    named = {name: name.replace("language_model.model.", "model.language_model.") for name in tensors}
    if list(named) == list(named.values()):
        named = {name: name.replace("model.language_model.", "language_model.model.") for name in tensors}
    assert list(named) != list(named.values())
    save_file({named[name]: tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    for name, place in ours(tmp_path).destinations().items():
        assert torch.equal(place.tensor, before[name]), name  # type: ignore[arg-type]


def test_stacked_experts_are_read_with_either_axis_first(tmp_path: Path) -> None:
    """As Qwen3-VL's were published, inputs first, and as transformers 5 writes them."""
    write(tmp_path, CASES["qwen3_vl_moe"])
    before = {name: place.tensor for name, place in ours(tmp_path).destinations().items()}
    assert not any(experts.transposed for experts in read_spec(tmp_path).sparse)
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
              for name, tensor in tensors.items()}  # fmt: skip
    save_file(turned, tmp_path / "model.safetensors")
    assert all(experts.transposed for experts in read_spec(tmp_path).sparse)
    for name, place in ours(tmp_path).destinations().items():
        tensor = before[name]
        assert torch.equal(place.tensor, tensor.transpose(1, 2) if ".mlp.experts." in name else tensor), name  # type: ignore[arg-type, union-attr]


def test_a_tied_models_output_embedding_may_stand_in_the_files(tmp_path: Path) -> None:
    """Under any of the prefixes: it is the input embedding, and left unread."""
    write(tmp_path, CASES["gemma3"])
    before = {name: place.tensor for name, place in ours(tmp_path).destinations().items()}
    tensors = load_file(tmp_path / "model.safetensors")
    for head in ("lm_head.weight", "language_model.lm_head.weight"):
        save_file({**tensors, head: torch.zeros(SIZES["vocab_size"], 64)}, tmp_path / "model.safetensors")
        spec = read_spec(tmp_path)
        assert spec.tied
        check_weights(tmp_path, spec)
        for name, place in ours(tmp_path).destinations().items():
            assert torch.equal(place.tensor, before[name]), name  # type: ignore[arg-type]


def test_another_familys_text_half_is_refused(tmp_path: Path) -> None:
    write(tmp_path, CASES["mistral3"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "mistral4"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"text_config is of 'mistral4'; Penstock serves mistral and ministral3 in Mistral3"
    ):
        read_spec(tmp_path)
