from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.loading import dummy, load
from penstock.engine_core.loading.dummy import RandomTensor, fill_random
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import Destination, Linear
from penstock.engine_core.models.parts import Placement, whole
from penstock.engine_core.models.quantization.rounding import round_matrix
from penstock.engine_core.models.quantization.weight_format import WeightFormat
from penstock.engine_core.models.registry import build
from penstock.kernels.records import AttentionBatch
from tests.engine_core.loading.test_checkpoint import spec
from tests.engine_core.models.specs import resized


def model(tied: bool = False, hidden: int = 128, rank: int = 0, size: int = 1) -> Decoder:
    return build(spec(tied, hidden), torch.float32, torch.device("cpu"), 16, group=Group(rank, size))


def weights(of: Decoder) -> dict[str, torch.Tensor]:
    return {name: place.tensor for name, place in of.destinations().items() if place.tensor is not None}


def test_same_seed_same_weights(tmp_path: Path) -> None:
    first, second, third = model(), model(), model()
    load(first, tmp_path, "dummy", seed=3)
    load(second, tmp_path / "nowhere", "dummy", seed=3)
    load(third, tmp_path, "dummy", seed=4)
    assert all(torch.equal(tensor, weights(second)[name]) for name, tensor in weights(first).items())
    changed = [name for name, tensor in weights(first).items() if not torch.equal(tensor, weights(third)[name])]
    assert set(changed) == {name for name, place in first.destinations().items() if place.fan_in}


def test_tensors_differ_from_each_other() -> None:
    found = model()
    fill_random(found.destinations(), 0)
    tensors = weights(found)
    first, second = (tensors[f"model.layers.{layer}.self_attn.k_proj.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, tensors["model.layers.0.self_attn.v_proj.weight"])


def test_scale_follows_the_fan_in() -> None:
    found = model(hidden=512)
    fill_random(found.destinations(), 0)
    tensors = weights(found)
    assert tensors["lm_head.weight"].std() == pytest.approx(512**-0.5, rel=0.05)
    assert tensors["model.layers.1.mlp.down_proj.weight"].std() == pytest.approx(12**-0.5, rel=0.05)
    assert torch.equal(tensors["model.norm.weight"], torch.ones(512))
    assert not tensors["model.layers.0.self_attn.q_proj.bias"].any()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("chunk", [dummy.CHUNK, 300])
def test_each_rank_has_its_slice_of_the_same_tensors(monkeypatch: pytest.MonkeyPatch, size: int, chunk: int) -> None:
    monkeypatch.setattr(dummy, "CHUNK", chunk)  # 300: two rows of 128
    single = model()
    fill_random(single.destinations(), 7)
    whole = weights(single)
    for rank in range(size):
        part = model(rank=rank, size=size)
        fill_random(part.destinations(), 7)
        for name, place in part.destinations().items():
            if place.tensor is not None:
                count = place.tensor.shape[place.axis]
                assert torch.equal(place.tensor, whole[name].narrow(place.axis, place.start, count)), name


@pytest.mark.parametrize("rows", [slice(1, 40, 2), slice(0, 39, 3), slice(5, 6, 4), slice(7, 30)])
def test_rows_may_come_in_steps(monkeypatch: pytest.MonkeyPatch, rows: slice) -> None:
    """As those of one part of a fused tensor, whose parts' rows are mixed."""
    monkeypatch.setattr(dummy, "CHUNK", 100)  # five rows of 20
    random = RandomTensor("fused", 3, Destination(None, (40, 20), 0, fan_in=20), torch.float32, torch.Generator())
    whole, found = torch.empty(40, 20), torch.zeros(len(range(40)[rows]), 20)
    random.copy((slice(0, 40),), whole)
    random.copy((rows,), found)
    assert torch.equal(found, whole[rows])


def test_chunks_differ_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy, "CHUNK", 128)
    found = model()
    fill_random(found.destinations(), 0)
    rows = weights(found)["lm_head.weight"]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


@pytest.mark.gpu
def test_eight_billion_parameters_take_seconds_on_a_gpu() -> None:
    """Shapes of Llama 3.1 8B: made on the device, 16 GB of bfloat16."""
    sizes = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 14336}
    large = resized(spec(), **sizes, family="llama", vocab_size=128256, windows=(0,) * 32)
    torch.zeros(1, device="cuda")
    began = time.monotonic()
    found = build(large, torch.bfloat16, torch.device("cuda"), 131072)
    fill_random(found.destinations(), 0)
    torch.cuda.synchronize()
    took = time.monotonic() - began
    print(f"{found.weight_bytes / 1e9:.1f} GB in {took:.2f} s")
    assert took < 10


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_finite_and_alive(tied: bool) -> None:
    found = model(tied)
    fill_random(found.destinations(), 0)
    cache = [(torch.zeros(2, 16, 2, 4), torch.zeros(2, 16, 2, 4)) for _ in range(2)]
    batch = AttentionBatch(
        query_start=torch.tensor([0, 10]),
        context=torch.tensor([10]),
        slots=torch.zeros(1, dtype=torch.int32),
        block_tables=torch.tensor([[1]]),
        slot_mapping=torch.arange(16, 26),
        max_query=10,
        max_context=10,
    )
    logits = found.logits(found.forward(torch.arange(10), torch.arange(10), batch, cache))
    assert logits.isfinite().all()
    assert 0.2 < logits.std(dim=1).mean() < 5
    assert len(logits.argmax(1).unique()) > 2


FORMS = {
    "blocks": WeightFormat(kind="float8", block=(16, 16), activations="block"),
    "awq": WeightFormat(kind="grouped", packing="awq", bits=4, group=16, symmetric=False),
    "mxfp4": WeightFormat(kind="float4", packing="packed", bits=4, group=32),
}


@pytest.mark.parametrize("name", FORMS)
def test_quantized_weights_are_the_same_numbers_rounded(name: str) -> None:
    """Whatever the files of the format would be like, of each rank its slice."""
    form, device = FORMS[name], torch.device("cpu")
    part = whole("down_proj", 24)
    dense = Linear((part,), 128, Placement(torch.float32, device), bias=False)
    fill_random({f"x.{name}": place for name, place in dense.destinations()}, 5)
    for rank in range(2):
        place = Placement(torch.float32, device, Group(rank, 2))
        made = Linear((part,), 128, place, bias=False, split_inputs=True, formats=(("down_proj", form),))
        fill_random({f"x.{name}": place for name, place in made.destinations()}, 5)
        expected = round_matrix(form, dense.weight[:, 64 * rank : 64 * rank + 64]).dequantized(torch.float32)
        assert torch.equal(made.operand.dequantized(torch.float32), expected)
