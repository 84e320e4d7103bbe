"""EAGLE heads through shuffled pages, chunk by chunk, against the same in float64 over whole sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import LlamaConfig

from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.eagle import LEAST, EagleHead
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.records import AttentionBatch
from tests.engine_core.models import eagle_heads as heads
from tests.engine_core.models.eagle_heads import load_head
from tests.engine_core.models.parity import CHUNKS, SIZES, VOCAB, PagedRun, ours, random_prompts, write_checkpoint

PROMPTS = 3
LAYERS = 8


class Driven:
    """A head as `PagedRun` wants a model: the states before the tokens of row r are those given for sequence r."""

    def __init__(self, head: EagleHead, states: Tensor) -> None:
        self.head = head
        self.given = states  # [sequences, tokens, hidden]
        self.spec: ModelSpec = head.spec.layers
        self.dtype = states.dtype

    def forward(self, ids: Tensor, positions: Tensor, batch: AttentionBatch, cache: Any) -> Tensor:
        counts = batch.query_start.diff()
        rows = torch.arange(len(counts)).repeat_interleave(counts)
        return self.head.forward(ids, positions, self.given[rows, positions], batch, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, LlamaConfig(**SIZES | {"num_hidden_layers": LAYERS}))
    return ours(folder)


def given_states() -> Tensor:
    found = torch.randn(PROMPTS, sum(CHUNKS), heads.HIDDEN, generator=torch.Generator().manual_seed(2))
    found[:, 0] = 0.0
    return found


@pytest.mark.parametrize(("layers", "bias"), [(1, False), (1, True), (2, True)])
@torch.inference_mode()
def test_the_first_version(layers: int, bias: bool, target: Decoder, tmp_path: Path) -> None:
    weights = heads.first_weights(layers, bias)
    folder = heads.write_head(tmp_path, heads.head_config(VOCAB, num_hidden_layers=layers), weights)
    head = load_head(folder, target, 256)
    prompts, states = random_prompts(PROMPTS), given_states()
    run = PagedRun(Driven(head, states), prompts)  # type: ignore[arg-type]
    run.prefill()
    assert target.head is not None
    for sequence, prompt, given in zip(run.sequences, prompts, states, strict=True):
        expected = heads.first_states(weights, target.embedding.weight[prompt].double(), given.double())
        logits = linear(expected, target.head.weight.double())
        torch.testing.assert_close(torch.cat(sequence.logits).double(), logits, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_the_third_version(target: Decoder, tmp_path: Path) -> None:
    weights = heads.third_weights(VOCAB)
    folder = heads.write_head(tmp_path, heads.head_config(VOCAB, third=True), weights)
    head = load_head(folder, target, 256)
    prompts, states = random_prompts(PROMPTS), given_states()
    run = PagedRun(Driven(head, states), prompts)  # type: ignore[arg-type]
    run.prefill()
    known = weights["d2t"] + torch.arange(heads.KNOWN)
    for sequence, prompt, given in zip(run.sequences, prompts, states, strict=True):
        expected = heads.third_states(weights, target.embedding.weight[prompt].double(), given.double())
        found = torch.cat(sequence.logits)
        logits = heads.third_logits(weights, expected)
        torch.testing.assert_close(found[:, known].double(), logits, atol=1e-4, rtol=1e-4)
        assert (found.scatter(1, known.expand(len(found), -1), LEAST) == LEAST).all()


@torch.inference_mode()
def test_what_a_head_hears_of_its_target(target: Decoder, tmp_path: Path) -> None:
    """The first version what the last norm gives; the third the residual stream before layers 2, 4 and 5, joined."""
    run = PagedRun(target, random_prompts(1, 10))
    aux_states: list[Tensor] = []

    class Tapped:
        spec, dtype, logits = target.spec, target.dtype, target.logits

        def forward(self, *inputs: Any) -> Tensor:
            hidden, aux = target.forward_aux(*inputs, (2, 4, 5))
            aux_states.extend([hidden, *aux])
            return hidden

    run.model = Tapped()  # type: ignore[assignment]
    run.step([10])
    first = load_head(heads.write_head(tmp_path / "1", heads.head_config(VOCAB), heads.first_weights()), target, 256)
    assert first.combine(aux_states[0], ()) is aux_states[0]
    weights = heads.third_weights(VOCAB)
    third = load_head(heads.write_head(tmp_path / "3", heads.head_config(VOCAB, third=True), weights), target, 256)
    assert third.spec.aux_layers == (2, 4, 5)
    expected = linear(torch.cat(aux_states[1:], -1).double(), weights["fc.weight"].double())
    torch.testing.assert_close(third.combine(aux_states[0], aux_states[1:]).double(), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_auxiliary_states_are_the_sums_that_the_layers_find(target: Decoder) -> None:
    """Every layer's input, and none: the hidden states are the same whether anybody listens."""
    prompts = random_prompts(1, 9)
    plain, listened = PagedRun(target, prompts), PagedRun(target, prompts)
    plain.step([9])
    streams: list[Tensor] = []

    class Tapped:
        spec, dtype, logits = target.spec, target.dtype, target.logits

        def forward(self, *inputs: Any) -> Tensor:
            hidden, aux = target.forward_aux(*inputs, range(LAYERS))
            streams.extend(aux)
            return hidden

    listened.model = Tapped()  # type: ignore[assignment]
    listened.step([9])
    assert torch.equal(plain.sequences[0].logits[0], listened.sequences[0].logits[0])
    assert len(streams) == LAYERS
    assert torch.equal(streams[0], target.embedding.weight[prompts[0]])
    assert not torch.equal(streams[1], streams[0])


@torch.inference_mode()
def test_over_a_shallow_target_a_head_listens_to_the_first_layer(target: Decoder, tmp_path: Path) -> None:
    weights = heads.third_weights(VOCAB)
    head = load_head(heads.write_head(tmp_path, heads.head_config(VOCAB, third=True), weights), target, 256)
    short = head.over(target.shallow())
    assert short.target.spec.layers < LAYERS
    assert head.target is target
    run = PagedRun(short.target, random_prompts(1, 5))
    heard: list[Tensor] = []

    class Tapped:
        spec, dtype, logits = short.target.spec, target.dtype, target.logits

        def forward(self, *inputs: Any) -> Tensor:
            hidden, aux = short.target.forward_aux(*inputs, short.spec.aux_layers)
            heard.append(short.combine(hidden, aux))
            return hidden

    run.model = Tapped()  # type: ignore[assignment]
    run.step([5])
    assert heard[0].shape == (5, heads.HIDDEN)


def test_a_head_counts_its_own_weights_alone(target: Decoder, tmp_path: Path) -> None:
    weights = heads.first_weights()
    head = load_head(heads.write_head(tmp_path, heads.head_config(VOCAB), weights), target, 256)
    assert head.weight_bytes == sum(tensor.numel() * 4 for tensor in weights.values())


def test_random_heads_need_no_files(target: Decoder, tmp_path: Path) -> None:
    for third in (False, True):
        folder = tmp_path / str(third)
        heads.write_head(folder, heads.head_config(VOCAB, third=third), {})
        (folder / "model.safetensors").unlink()
        head = load_head(folder, target, 256, "dummy")
        assert head.logits(torch.randn(2, heads.HIDDEN)).isfinite().all()
