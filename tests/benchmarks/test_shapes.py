"""The shapes of the GPU figures: sizes as published, and a tokenizer in which every id is a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.shapes import (
    EIGHT,
    HALF_SEVENTY,
    MIXTRAL,
    QWEN_MOE,
    SEVENTY,
    SHAPES,
    SMALL,
    SMOKE,
    Shape,
    make_folder,
    word,
)
from penstock.engine_core import folder
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.tokenizer.vocabulary import read_vocabulary


@pytest.mark.parametrize(
    ("shape", "family", "sizes", "tied", "cache"),
    [
        (EIGHT, "llama", (32, 4096, 32, 8, 128, 14336, 128256), False, 131072),
        (SEVENTY, "llama", (80, 8192, 64, 8, 128, 28672, 128256), False, 327680),
        (HALF_SEVENTY, "llama", (40, 8192, 64, 8, 128, 28672, 128256), False, 163840),
        (SMALL, "qwen3", (28, 1024, 16, 8, 128, 3072, 151936), True, 114688),
        (QWEN_MOE, "qwen3_moe", (48, 2048, 32, 4, 128, 6144, 151936), False, 98304),
    ],
)
def test_a_shape_is_that_of_the_reference(
    tmp_path: Path, shape: Shape, family: str, sizes: tuple[int, ...], tied: bool, cache: int
) -> None:
    spec = read_spec(make_folder(shape, tmp_path))
    heads = spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim
    found = spec.layers, spec.hidden, *heads, spec.dense[0].width if spec.dense else sizes[5], spec.vocab_size
    assert (spec.family, found, spec.tied) == (family, sizes, tied)
    assert (spec.attention.qk_norm == "head") == family.startswith("qwen3")
    assert 2 * 2 * spec.layers * spec.attention.kv_heads * spec.attention.head_dim == cache  # bytes of one position
    assert spec.longest >= 40960
    assert spec.dtype == "bfloat16"


def test_a_mixture_of_experts_is_that_of_its_makers(tmp_path: Path) -> None:
    for shape, sizes in ((QWEN_MOE, (128, 8, 768)), (MIXTRAL, (8, 2, 14336))):
        spec = read_spec(make_folder(shape, tmp_path))
        assert len(spec.sparse) == spec.layers
        experts = spec.sparse[0]
        assert (experts.count, experts.routing.chosen, experts.width) == sizes
        assert experts.routing.normalised


def test_every_id_has_text_of_its_own_and_encoding_stays(tmp_path: Path) -> None:
    small = Shape("little", "little", {**SMALL.config, "vocab_size": 5000})
    wide = read_vocabulary(make_folder(small, tmp_path))
    demo = read_vocabulary(folder.resolve(""))
    texts = [wide.decode([token_id], skip_special_tokens=False) for token_id in range(4096, 5000)]
    assert len(set(texts)) == len(texts)
    assert all(text.startswith(" zq") and len(text) == 7 for text in texts)
    text = "What is 128 + 457? zqaaaa"
    assert wide.encode(text, add_special_tokens=False) == demo.encode(text, add_special_tokens=False)


def test_words_differ() -> None:
    numbers = (0, 25, 26, 676, 17575, 17576, 151935)
    assert len({word(number) for number in numbers}) == len(numbers)


def test_the_shape_for_a_try_is_the_embedded_model(tmp_path: Path) -> None:
    assert read_spec(make_folder(SMOKE, tmp_path)) == read_spec(folder.resolve(""))
    quantized = {"8b-fp8", "8b-fp8-blocks", "8b-w4a16", "70b-w4a16", "30b-a3b-fp8", "qwen3.6-35b-a3b-fp8"}
    families = {"gpt-oss-20b", "gpt-oss-20b-bf16", "gemma-3-27b", "glm-4.7-flash", "qwen3.5-9b", "qwen3.6-35b-a3b"}
    seeing = {"qwen3.5-9b-vision", "qwen3-vl-2b"}
    assert set(SHAPES) == {"8b", "0.6b", "30b-a3b", "8x7b", "smoke"} | quantized | families | seeing
