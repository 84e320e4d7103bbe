"""The memory of the layers: fused, placed, and shared out over ranks so that the parts add up to the whole."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.loading.checkpoint import cuts
from penstock.engine_core.loading.dummy import fill_random
from penstock.engine_core.models.attention import SelfAttention
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.embedding import Embedding
from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.layers import Linear, Norm, held_bytes, pack
from penstock.engine_core.models.mlp import Mlp, layer_mlp
from penstock.engine_core.models.parts import Part, Placement, spread, whole
from penstock.engine_core.models.quantization.weight_format import WeightFormat
from tests.engine_core.models.specs import small_spec

SPEC = small_spec(hidden=12, head_dim=6, intermediate=20, qkv_bias=True, output_bias=True, mlp_bias=True)
Layer = Mlp | Linear | Norm | Embedding


def placement(rank: int = 0, size: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(dtype, torch.device(device), Group(rank, size))


def checkpoint(layer: Layer) -> dict[str, Tensor]:
    torch.manual_seed(5)
    return {name: torch.randn(destination.shape) for name, destination in layer.destinations()}


def fill(layer: Layer, tensors: dict[str, Tensor]) -> None:
    for name, destination in layer.destinations():
        if destination.tensor is not None:
            for place, part in cuts(destination, destination.tensor):
                part.copy_(tensors[name][place])


def attention(where: Placement) -> SelfAttention:
    return SelfAttention(SPEC.blocks[0], SPEC.hidden, where)


def mlp(where: Placement) -> Mlp:
    found = layer_mlp(SPEC.blocks[0].mlp, SPEC.hidden, where)
    assert isinstance(found, Mlp)
    return found


def test_fused_products_are_the_separate_ones() -> None:
    layer = attention(placement())
    tensors = checkpoint(layer.qkv)
    fill(layer.qkv, tensors)
    x = torch.randn(5, 12)
    for found, name in zip(layer.heads_of(layer.qkv.forward(x)), ("q_proj", "k_proj", "v_proj"), strict=True):
        expected = x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]
        torch.testing.assert_close(found, expected.view(5, -1, 6))


def test_gated_mlp() -> None:
    layer = mlp(placement())
    tensors = checkpoint(layer)
    fill(layer, tensors)
    x = torch.randn(5, 12)
    gate, up = (x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"] for name in ("gate_proj", "up_proj"))
    expected = torch.nn.functional.silu(gate) * up @ tensors["down_proj.weight"].T + tensors["down_proj.bias"]
    torch.testing.assert_close(layer.forward(x), expected)


def test_names_and_shapes_are_those_of_a_checkpoint() -> None:
    found = {name: destination.shape for name, destination in attention(placement(1, 2)).qkv.destinations()}
    assert found == {
        "q_proj.weight": (24, 12),
        "q_proj.bias": (24,),
        "k_proj.weight": (12, 12),
        "k_proj.bias": (12,),
        "v_proj.weight": (12, 12),
        "v_proj.bias": (12,),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_heads_that_add_up(size: int) -> None:
    single = attention(placement())
    tensors = checkpoint(single.qkv)
    fill(single.qkv, tensors)
    x = torch.randn(3, 12)
    q, k, v = single.heads_of(single.qkv.forward(x))
    for rank in range(size):
        layer = attention(placement(rank, size))
        fill(layer.qkv, tensors)
        own_q, own_k, own_v = layer.heads_of(layer.qkv.forward(x))
        heads = 4 // size
        torch.testing.assert_close(own_q, q[:, rank * heads : (rank + 1) * heads])
        kv = slice(rank, rank + 1) if size == 2 else slice(rank // 2, rank // 2 + 1)  # four ranks repeat two heads
        torch.testing.assert_close(own_k, k[:, kv])
        torch.testing.assert_close(own_v, v[:, kv])


def test_partial_sums_of_the_ranks_are_the_whole() -> None:
    double = torch.float64  # terms that cancel would differ by more than sums in another order should
    single = mlp(placement(dtype=double))
    tensors = checkpoint(single)
    fill(single, tensors)
    ranks = [mlp(placement(rank, 4, dtype=double)) for rank in range(4)]
    for layer in ranks:
        fill(layer, tensors)
    x = torch.randn(3, 12, dtype=double)
    torch.testing.assert_close(sum(layer.forward(x) for layer in ranks), single.forward(x))
    assert [layer.down.bias is None for layer in ranks] == [False, True, True, True]


def test_every_element_has_one_source() -> None:
    """Destinations tile a layer's memory: nothing is left unfilled, nothing written twice."""
    split = mlp(placement(2, 4))
    for linear in (attention(placement()).qkv, split.gate_up, split.down):
        linear.weight.zero_()
        for _, destination in linear.destinations():
            if destination.fan_in and destination.tensor is not None:
                destination.tensor.add_(1)
        assert torch.equal(linear.weight, torch.ones_like(linear.weight))


def test_packed_weights_give_the_same_products_and_take_no_memory_twice() -> None:
    layer = Linear((whole("o_proj", 8),), 4, placement(), bias=True)
    fill(layer, checkpoint(layer))
    x = torch.randn(3, 4)
    before, held = layer.forward(x), held_bytes(found for _, found in layer.destinations())
    for _ in range(2):  # what is packed stays as it is
        pack(dict(layer.destinations()))
        assert layer.operand.is_mkldnn
        assert layer.weight.is_meta
        torch.testing.assert_close(layer.forward(x), before)
        assert held_bytes(found for _, found in layer.destinations()) == held


@pytest.mark.parametrize(("tied", "group", "packs"), [
    (True, ALONE, True), (False, ALONE, False), (True, Group(0, 1, 0, 2), False), (True, Group(0, 1, 1, 2), True),
])  # fmt: skip
def test_an_embedding_has_a_copy_for_products_where_logits_are_read_off_it(
    tied: bool, group: Group, packs: bool
) -> None:
    spec = msgspec.structs.replace(SPEC, tied=tied)
    layer = Decoder(spec, Placement(torch.float32, torch.device("cpu"), group), 8).embedding
    assert layer is not None
    layer.weight.normal_()
    pack(dict(layer.destinations()))
    assert layer.operand.is_mkldnn == packs
    assert layer.copied_bytes == (layer.weight.nbytes if packs else 0)
    assert torch.equal(layer.forward(torch.tensor([3])), layer.weight[3:4])


def test_weights_of_a_gpu_are_not_packed() -> None:
    layer = Linear((whole("o_proj", 8),), 4, placement(device="meta"), bias=False)
    pack(dict(layer.destinations()))
    assert layer.operand is layer.weight


@pytest.mark.skipif(not __debug__, reason="an assertion")
def test_widths_that_ranks_cannot_share() -> None:
    with pytest.raises(AssertionError, match="20 is not divisible by 3"):
        spread("gate_proj", 20, placement(0, 3))


def test_norm_and_embedding() -> None:
    norm, embedding = Norm(12, NormSpec(eps=1e-6), placement()), Embedding(whole("", 9), 12, placement(), 1.0)
    fill(norm, {"weight": torch.ones(12)})
    rows = torch.randn(9, 12)
    fill(embedding, {"weight": rows})
    x = embedding.forward(torch.tensor([3, 3, 8], dtype=torch.int32))
    assert torch.equal(x, rows[[3, 3, 8]])
    torch.testing.assert_close(norm.forward(x).pow(2).mean(-1), torch.ones(3), rtol=1e-4, atol=0)


def test_products_apart_are_cut_without_being_put_together() -> None:
    """One matrix in blocks of e4m3, and two neighbours that are not quantized, which are one product."""
    form = WeightFormat(kind="float8", block=(128, 128), activations="block", scale="weight_scale_inv")
    parts = tuple(Part(name, size, size, 0) for name, size in (("a", 256), ("b", 8), ("c", 8)))
    linear = Linear(parts, 128, placement(), bias=False, formats=(("a", form),))
    fill_random(dict(linear.destinations()), 3)
    x = torch.randn(3, 128)
    assert [operand.shape[0] for operand in linear.operands] == [256, 16]
    whole = linear.forward(x)
    for sizes in ([200, 56, 8, 8], [256, 16], [250, 22]):  # the last over both
        assert torch.equal(torch.cat(linear.split(x, sizes), -1), whole)
        assert [part.shape[1] for part in linear.split(x, sizes)] == sizes
    first, _, second, _ = linear.split(x, [200, 56, 8, 8])
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
