"""`invariant` models: a token's logits have the same bits whatever shares its steps and however its prompt is cut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from penstock.engine_core.models.attention import SelfAttention
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import Linear
from penstock.engine_core.models.mlp import Mlp, layer_mlp
from penstock.engine_core.models.parts import Placement, whole
from penstock.engine_core.models.registry import build
from penstock.kernels.records import AttentionBatch
from tests.engine_core.models.specs import small_spec

LENGTH, BLOCK = 400, 16
SPEC = small_spec(
    family="qwen3", layers=2, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab_size=4096,
    tied=True, qk_norm="head", max_position=LENGTH, longest=LENGTH, dtype="bfloat16",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A request's tokens from `start` to `end`, in this step."""

    request: int
    start: int
    end: int


class Requests:
    """Sequences of random tokens over pages of their own, and a model that has read some of them."""

    def __init__(self, model: Decoder, count: int) -> None:
        torch.manual_seed(0)
        self.model = model
        spec = model.spec
        self.ids = torch.randint(spec.vocab_size, (count, LENGTH), device="cuda", dtype=torch.int32)
        wide = -(-LENGTH // BLOCK)
        self.table = (torch.randperm(count * wide, device="cuda") + 1).int().view(count, wide)
        shape = count * wide + 1, BLOCK, spec.attention.kv_heads, spec.attention.head_dim
        self.cache = [
            (torch.zeros(shape, dtype=model.dtype, device="cuda"), torch.zeros(shape, dtype=model.dtype, device="cuda"))
            for _ in range(spec.layers)
        ]

    def step(self, rows: list[Row]) -> list[Tensor]:
        """Logits of every token of every row."""
        sizes = [row.end - row.start for row in rows]
        positions = torch.cat([torch.arange(row.start, row.end, device="cuda") for row in rows])
        owners = torch.repeat_interleave(
            torch.tensor([row.request for row in rows], device="cuda"), torch.tensor(sizes, device="cuda")
        )
        batch = AttentionBatch(
            query_start=torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device="cuda"),
            context=torch.tensor([row.end for row in rows], dtype=torch.int32, device="cuda"),
            slots=torch.tensor([row.request for row in rows], dtype=torch.int32, device="cuda"),
            block_tables=self.table,
            slot_mapping=self.table[owners, positions // BLOCK].long() * BLOCK + positions % BLOCK,
            max_query=max(sizes),
            max_context=max(row.end for row in rows),
        )
        hidden = self.model.forward(self.ids[owners, positions], positions, batch, self.cache)
        return list(self.model.logits(hidden).split(sizes))


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    made = build(SPEC, torch.bfloat16, torch.device("cuda"), LENGTH, invariant=True)
    for destination in made.destinations().values():
        assert destination.tensor is not None
        if destination.fan_in:
            destination.tensor.normal_(std=destination.fan_in**-0.5)
        else:
            destination.tensor.uniform_(0.5, 1.5)
    torch.cuda.synchronize()
    return made


def test_every_product_of_an_invariant_placement_is_one() -> None:
    placement = Placement(torch.float32, torch.device("cpu"), invariant=True)
    mlp = layer_mlp(SPEC.blocks[0].mlp, SPEC.hidden, placement)
    assert isinstance(mlp, Mlp)
    made = SelfAttention(SPEC.blocks[0], SPEC.hidden, placement).qkv, mlp.gate_up, mlp.down
    assert all(product.invariant for product in made)
    assert not Linear((whole("o_proj", 8),), 8, Placement(torch.float32, torch.device("cpu")), bias=False).invariant


@pytest.mark.gpu
@torch.inference_mode()
def test_chunks_do_not_change_bits(model: Decoder) -> None:
    """Whole, token by token at the end, and in pieces that end within blocks and tiles."""
    whole_prompt = Requests(model, 1).step([Row(0, 0, LENGTH)])[0]
    assert whole_prompt.dtype == model.dtype  # a GPU's logits are not copied to single precision
    for cuts in ((128,), (1,), (17, 18, 19, 200), (64, 399), (300, 301, 302, 303)):
        requests = Requests(model, 1)
        edges = (0, *cuts, LENGTH)
        pieces = [requests.step([Row(0, start, end)])[0] for start, end in itertools.pairwise(edges)]
        assert torch.equal(torch.cat(pieces), whole_prompt), cuts


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("count", [2, 7, 16, 33, 64, 150, 300])
def test_neighbours_do_not_change_bits(model: Decoder, count: int) -> None:
    """Decoding alone and among others of other lengths, and with a neighbour's long chunk in the step."""
    lengths = [8 + 5 * (request % 60) for request in range(count)]
    together, alone = Requests(model, count), Requests(model, count)
    for requests in (together, alone):
        requests.step([Row(request, 0, length - 1) for request, length in enumerate(lengths)])
    rows = [Row(request, length - 1, length) for request, length in enumerate(lengths)]
    found = together.step(rows)
    for request in {0, 1, count // 2, count - 1}:
        (expected,) = alone.step([rows[request]])
        assert torch.equal(found[request], expected), request
    last = count - 1
    mixed = alone.step([rows[0], Row(last, lengths[last] - 1, LENGTH)])
    assert torch.equal(mixed[0], found[0])
    assert torch.equal(mixed[1][:1], found[last])
