from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from penstock.engine_core.models.layer_spec import RopeSpec
from penstock.engine_core.models.rope import rope_axes, rope_frequencies, rope_table
from penstock.engine_core.models.spec import ModelSpec, read_spec
from tests.engine_core.models.parity import SIZES, PagedRun, ours, random_prompts, theirs, write_checkpoint
from tests.engine_core.models.test_layers import SPEC

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn without factor": {"factor": None, "original_max_position_embeddings": 64},
    "yarn attention factor": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.8},
    "yarn mscale": {"factor": 8.0, "original_max_position_embeddings": 32, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn one mscale": {"factor": 8.0, "original_max_position_embeddings": 32, "mscale": 0.707},
    "yarn betas": {"factor": 8.0, "original_max_position_embeddings": 128, "beta_fast": 8, "beta_slow": 2},
    "yarn not truncated": {"factor": 8.0, "original_max_position_embeddings": 128, "truncate": False},
    "yarn not stretched": {"factor": 1.0, "original_max_position_embeddings": 256},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def config(kind: str, **more: Any) -> LlamaConfig:
    values = {"rope_type": kind.split()[0], "rope_theta": 20000.0, **KINDS.get(kind, {})}
    return LlamaConfig(**{**SIZES, "head_dim": 64, "rope_parameters": values, **more})


def read(folder: Path, config: LlamaConfig) -> ModelSpec:
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return read_spec(folder)


def table_of(frequencies: Tensor, factor: float, length: int) -> Tensor:
    angles = torch.arange(length).float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1) * factor


@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_transformers(kind: str, tmp_path: Path) -> None:
    reference = config(kind)
    spec = read(tmp_path, reference)
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind.split()[0]](reference)
    torch.testing.assert_close(rope_frequencies(spec.attention.rope, 64, 200), frequencies, rtol=3e-7, atol=0)
    assert spec.attention.rope.attention_factor == pytest.approx(factor)
    torch.testing.assert_close(
        rope_table(spec.attention.rope, 64, 200, torch.device("cpu")),
        table_of(frequencies, factor, 200),
        rtol=0,
        atol=2e-5,
    )


def test_plain_frequencies_are_powers_of_the_base() -> None:
    found = rope_frequencies(RopeSpec(theta=100.0), 4, 10)
    torch.testing.assert_close(found, torch.tensor([1.0, 0.1]))


def test_dynamic_is_plain_up_to_the_trained_length() -> None:
    rope = RopeSpec(kind="dynamic", theta=20000.0, factor=4.0, original_max_position=256)
    plain = rope_frequencies(RopeSpec(theta=20000.0), 64, 0)
    assert torch.equal(rope_frequencies(rope, 64, 1), plain)
    assert torch.equal(rope_frequencies(rope, 64, 256), plain)
    assert not torch.equal(rope_frequencies(rope, 64, 257), plain)


@pytest.mark.parametrize("length", [257, 700, 1024])
def test_dynamic_beyond_it_is_that_of_the_served_length(length: int, tmp_path: Path) -> None:
    reference = config("dynamic")
    spec = read(tmp_path, reference)
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](reference, seq_len=length)
    torch.testing.assert_close(rope_frequencies(spec.attention.rope, 64, length), frequencies, rtol=3e-7, atol=0)


@torch.inference_mode()
def test_dynamic_served_at_a_prompts_length_is_transformers(tmp_path: Path) -> None:
    """However the prompt is cut: the base depends on the served length alone, so chunks and cached keys agree."""
    write_checkpoint(tmp_path, config("dynamic", max_position_embeddings=32))
    prompts = random_prompts(1)
    expected = theirs(tmp_path)(torch.tensor(prompts)).logits[0]
    for chunks in ((83,), (17, 1, 40, 1, 1, 23)):
        run = PagedRun(ours(tmp_path, length=83), prompts)
        run.prefill(chunks)
        torch.testing.assert_close(torch.cat(run.sequences[0].logits), expected, atol=1e-4, rtol=0)


def test_table_is_single_precision_of_the_served_length() -> None:
    table = rope_table(SPEC.attention.rope, 6, 7, torch.device("cpu"))
    assert table.shape == (7, SPEC.attention.head_dim)
    assert table.dtype == torch.float32
    assert torch.equal(table[0], torch.tensor([1.0] * 3 + [0.0] * 3))


@pytest.mark.parametrize(
    ("sections", "alternate", "dim"),
    [((16, 24, 24), False, 128), ((24, 20, 20), True, 128), ((11, 11, 10), True, 64), ((2, 1, 1), True, 8)],
)
def test_axes_of_pairs_are_those_of_transformers(sections: tuple[int, ...], alternate: bool, dim: int) -> None:
    """Of Qwen2.5-VL, Qwen3-VL, and Qwen 3.5, which turns a quarter of its heads: its other pairs come last."""
    rope = RopeSpec(sections=sections, sections_alternate=alternate, dim=dim if dim == 64 else 0)
    axes = rope_axes(rope, 256 if dim == 64 else dim, torch.device("cpu"))
    assert axes is not None
    model: Any = SimpleNamespace(mrope_section=list(sections))
    kind = Qwen3VLTextRotaryEmbedding if alternate else Qwen2_5_VLRotaryEmbedding
    told = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, dim // 2).clone()  # each pair's is its axis
    expected = kind.recomposition_frequencies(model, told)[0, 0, : dim // 2]
    assert axes[: dim // 2].tolist() == expected.tolist()
    assert not axes[dim // 2 :].any()


def test_a_rope_without_sections_has_no_axes() -> None:
    assert rope_axes(RopeSpec(), 64, torch.device("cpu")) is None
