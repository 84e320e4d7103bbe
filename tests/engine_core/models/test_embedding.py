"""Embeddings by layer against their formula; parity with transformers is tests/engine_core/models/families/."""

from __future__ import annotations

import torch
from msgspec import structs
from torch.nn.functional import gelu

from penstock.engine_core.models.embedding import LayerEmbedding, LayerInput
from penstock.engine_core.models.layer_spec import EmbeddingSpec
from penstock.engine_core.models.parts import Placement
from tests.engine_core.models.specs import small_spec

LAYERS, WIDTH = 3, 4
CPU = Placement(torch.float32, torch.device("cpu"))
LLAMA = small_spec(layers=LAYERS)
SPEC = structs.replace(
    LLAMA,
    body=structs.replace(
        LLAMA.body,
        layers=tuple(structs.replace(layer, layer_input=WIDTH) for layer in LLAMA.blocks),
        embedding=EmbeddingSpec(layer_inputs=LAYERS * WIDTH, layer_rows=9),
    ),
)


def fill(made: LayerEmbedding | LayerInput) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    found = {}
    for name, place in made.destinations():
        assert place.tensor is not None
        assert tuple(place.tensor.shape) == place.shape
        found[name.removesuffix(".weight")] = place.tensor.normal_()
    return found


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def test_each_layer_has_a_part_of_the_table_and_of_the_embedding() -> None:
    made = LayerEmbedding(SPEC, CPU)
    held = fill(made)
    ids, embedded = torch.tensor([3, 0, 8, 3, 5]), torch.randn(5, SPEC.hidden)
    projected = (embedded @ held["per_layer_model_projection"].T * SPEC.hidden**-0.5).view(5, LAYERS, WIDTH)
    table = held["embed_tokens_per_layer"][ids].view(5, LAYERS, WIDTH) * WIDTH**0.5
    expected = (normed(projected, held["per_layer_projection_norm"]) + table) * 2**-0.5
    torch.testing.assert_close(made.forward(ids, embedded), expected)


def test_a_layer_adds_a_product_of_its_part() -> None:
    made = LayerInput(SPEC.blocks[0], SPEC.hidden, CPU)
    held = fill(made)
    stream, part = torch.randn(5, SPEC.hidden), torch.randn(5, WIDTH)
    inner = gelu(stream @ held["per_layer_input_gate"].T, approximate="tanh") * part
    expected = stream + normed(inner @ held["per_layer_projection"].T, held["post_per_layer_input_norm"])
    torch.testing.assert_close(made.forward(stream, part), expected)
