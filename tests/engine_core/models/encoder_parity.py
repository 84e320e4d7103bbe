"""Random encoders and classifiers as transformers writes them, held to ours over texts of several lengths at once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from penstock.engine_core.loading import load
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.models.tensors import check_weights
from penstock.kernels.records import AttentionBatch
from tests.engine_core.models.specs import tensor_shapes

VOCAB = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
}
LENGTHS = (37, 1, 128, 2, 60)


def write(folder: Path, kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Random weights, biases and norms of a scale at which every part matters."""
    torch.manual_seed(7)
    model = kind(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
    model.save_pretrained(folder)
    return model


def ours(folder: Path) -> Decoder:
    """The same in fp32, checked as before a start."""
    spec = read_spec(folder)
    check_weights(folder, spec)
    model = build(spec, torch.float32, torch.device("cpu"), spec.max_position)
    assert tensor_shapes(spec) == {name: place.shape for name, place in model.destinations().items()}
    load(model, folder)
    pack(model.destinations())
    return model


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def joined(lists: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


@torch.inference_mode()
def states(model: Decoder, prompts: list[list[int]], types: list[list[int]] | None = None) -> list[Tensor]:
    """Hidden states of each text, all of which are run at once, back to back, without pages."""
    sizes = [len(prompt) for prompt in prompts]
    nothing = torch.zeros(1, 1, dtype=torch.int32)
    batch = AttentionBatch(
        query_start=torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32),
        context=torch.tensor(sizes, dtype=torch.int32),
        slots=torch.zeros(len(sizes), dtype=torch.int32),
        block_tables=nothing,
        slot_mapping=torch.zeros(sum(sizes), dtype=torch.int64),
        max_query=max(sizes),
        max_context=max(sizes),
        token_types=None if types is None else torch.tensor(joined(types), dtype=torch.int32),
    )
    empty = torch.empty(0)
    ids, positions = torch.tensor(joined(prompts)), torch.cat([torch.arange(size) for size in sizes])
    return list(model.forward(ids, positions, batch, [(empty, empty)] * model.spec.layers).split(sizes))


@torch.inference_mode()
def check_states(folder: Path, kind: type[PreTrainedModel], config: PreTrainedConfig) -> Decoder:
    """Every state within 1e-4, and the same beside other texts as alone."""
    reference, prompts = write(folder, kind, config), texts()
    model = ours(folder)
    base = getattr(reference, reference.base_model_prefix, reference)
    for prompt, found in zip(prompts, states(model, prompts), strict=True):
        expected = base(torch.tensor([prompt])).last_hidden_state[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(found, states(model, [prompt])[0], atol=1e-5, rtol=0)
    return model


@torch.inference_mode()
def check_scores(folder: Path, kind: type[PreTrainedModel], config: PreTrainedConfig, *, typed: bool = False) -> None:
    """A classifier's logits within 1e-5. typed: the last half of each text is of the second type."""
    reference, prompts = write(folder, kind, config), texts()
    model = ours(folder)
    classifier = model.spec.classifier
    assert classifier is not None
    types = [[int(at >= (len(prompt) + 1) // 2) for at in range(len(prompt))] for prompt in prompts] if typed else None
    for number, (prompt, found) in enumerate(zip(prompts, states(model, prompts, types), strict=True)):
        kinds = {"mean": found.mean(0), "cls": found[0], "last": found[-1]}
        logits = model.pooled(kinds[classifier.kind][None], classify=True)
        more = {} if types is None else {"token_type_ids": torch.tensor([types[number]])}
        expected = reference(torch.tensor([prompt]), **more).logits
        assert logits.shape == (1, len(classifier.labels))
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
