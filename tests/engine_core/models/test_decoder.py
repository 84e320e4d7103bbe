from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from tests.engine_core.models.parity import SIZES, PagedRun, ours, random_prompts, write_checkpoint
from tests.engine_core.models.specs import resized, windows_of


def config(**more: Any) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, **more})


def test_destinations_are_the_tensors_of_a_checkpoint(tmp_path: Path) -> None:
    """Name by name and shape by shape, with and without an output embedding of its own."""
    from safetensors import safe_open

    for case, made in enumerate((config(), config(tie_word_embeddings=True), Qwen3Config(**SIZES, head_dim=16))):
        folder = tmp_path / str(case)
        write_checkpoint(folder, made)
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        found = {name: destination.shape for name, destination in ours(folder).destinations().items()}
        assert found == stored


def test_one_file_or_shards_or_another_type_on_disk(tmp_path: Path) -> None:
    """As transformers writes them: the same model."""
    write_checkpoint(tmp_path / "one", config())
    write_checkpoint(tmp_path / "shards", config(), max_shard_size="60KB")
    write_checkpoint(tmp_path / "half", config(), torch.bfloat16)
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    whole, shards, half = (ours(tmp_path / name).destinations() for name in ("one", "shards", "half"))
    for name, destination in whole.items():
        assert destination.tensor is not None
        assert torch.equal(destination.tensor, shards[name].tensor), name
        assert torch.equal(destination.tensor.bfloat16().float(), half[name].tensor), name


def test_weight_bytes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config(tie_word_embeddings=True))
    stored = (tmp_path / "model.safetensors").stat().st_size
    found = ours(tmp_path).weight_bytes
    assert stored - 8192 < found < stored
    assert ours(tmp_path, torch.bfloat16).weight_bytes * 2 == found


def test_logits_are_single_precision(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config())
    for dtype in (torch.float32, torch.float16):
        model = ours(tmp_path, dtype)
        assert model.dtype == dtype
        logits = model.logits(torch.randn(3, 64).to(dtype))
        assert logits.dtype == torch.float32
        assert logits.shape == (3, 160)


@torch.inference_mode()
def test_a_sequence_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config())
    model, prompts = ours(tmp_path), random_prompts(4)
    together = PagedRun(model, prompts)
    together.prefill()
    for prompt, sequence in zip(prompts, together.sequences, strict=True):
        alone = PagedRun(model, [prompt], block_size=16)
        alone.prefill((len(prompt),))
        torch.testing.assert_close(torch.cat(sequence.logits), torch.cat(alone.sequences[0].logits), atol=2e-5, rtol=0)


def test_a_cache_of_other_depth_is_our_mistake(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config())
    run = PagedRun(ours(tmp_path), random_prompts(1))
    run.cache.pop()
    with pytest.raises(ValueError, match="zip"):
        run.step([1])


def test_a_shallow_model_has_a_layer_of_each_kind_and_the_same_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config(num_hidden_layers=6))
    model = ours(tmp_path)
    for windows, kept in (((0,) * 6, [0, 1]), ((0, 8, 8, 0, 8, 0), [0, 1, 3]), ((8, 0, 0, 0, 0, 0), [0, 1])):
        model.spec = resized(model.spec, windows=windows)
        short = model.shallow()
        assert short.blocks == tuple(model.blocks[at] for at in kept)
        assert short.spec.layers == len(kept)
        assert windows_of(short.spec) == tuple(windows[at] for at in kept)
        assert short.embedding is model.embedding
    model.spec = resized(model.spec, windows=(0,))
    assert model.shallow().spec.layers == 1
    assert len(model.blocks) == 6
