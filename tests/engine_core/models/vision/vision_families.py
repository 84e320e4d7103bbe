"""Each family that sees, as a small random model with its processor, and what transformers says of prompts with
pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3ImageProcessorPil,
    PixtralImageProcessorPil,
    PreTrainedConfig,
    Qwen2VLImageProcessorPil,
)

from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.vision_spec import VisionSpec
from tests.engine_core.models.vision import test_pixtral as pixtral
from tests.engine_core.models.vision import test_qwen as qwen
from tests.engine_core.models.vision import test_siglip as gemma
from tests.engine_core.models.vision.vision_folders import TEXT

LINE_END, END = 70, 71
QWEN = {**qwen.PROCESSOR, "size": {"shortest_edge": 64, "longest_edge": 2048}}
PIXTRAL = {**pixtral.PROCESSOR, "size": {"longest_edge": 56}}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}  # shorter than a picture
FAMILIES: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    **{name: (qwen.CASES[name], QWEN) for name in ("qwen2_5_vl", "qwen3_vl", "qwen3_5")},
    "gemma3": (
        Gemma3Config(
            text_config={**TEXT, **WINDOWS}, vision_config=gemma.VISION, mm_tokens_per_image=16, **gemma.TOKENS
        ),
        gemma.PROCESSOR,
    ),
    "mistral3": (pixtral.CASES["mistral"], PIXTRAL),
}


def oracle(family: str, cell: int) -> Any:
    """transformers' image processor."""
    settings = FAMILIES[family][1]
    given = {key: settings[key] for key in ("image_mean", "image_std", "size")}
    if family == "gemma3":
        return Gemma3ImageProcessorPil(**given)
    if family == "mistral3":
        return PixtralImageProcessorPil(**given, patch_size=cell)
    return Qwen2VLImageProcessorPil(
        **given, patch_size=settings["patch_size"], merge_size=settings["merge_size"], temporal_patch_size=2
    )


def image_tokens(vision: VisionSpec, size: Size) -> list[int]:
    """Of one picture."""
    if vision.kind != "pixtral":
        return [vision.token_id] * vision.rows(size)
    lines, columns = vision.grid(size)
    return [*([*[vision.token_id] * columns, LINE_END] * lines)[:-1], END]


def told(
    family: str, model: Any, made: Any, token_id: int, tokens: Sequence[int], answer: Sequence[int]
) -> tuple[list[int], torch.Tensor]:
    """transformers' next token behind a prompt and each token of an answer, and the log-probabilities of all tokens but
    the first. made: what its processor made of the prompt's pictures."""
    ids = torch.tensor([[*tokens, *answer]])
    seen = (ids == token_id).long()
    more = {"token_type_ids": seen} if family == "gemma3" else {"mm_token_type_ids": seen.int()}
    inputs = dict(made.items()) | (more if family != "mistral3" else {})
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0, :-1]
    scored = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).flatten()
    return [int(token) for token in logits[len(tokens) - 1 :].argmax(-1)], scored
