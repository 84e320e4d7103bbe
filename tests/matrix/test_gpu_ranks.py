"""On GPUs in bf16: the embedded model's answers from one, two and four ranks, their collectives in graphs, and logits
of a stack of 8B layers. NCCL, with the exchange and without; a machine with fewer GPUs runs what it can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.shapes import EIGHT, make_folder
from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.embedded import demo_folder, draft_folder
from penstock.engine_core.loading import load
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from penstock.kernels.records import AttentionBatch
from tests.engine_core.execution.exchange_ranks import opened
from tests.matrix.engine import Answers, Cell, Engine, Prompt
from tests.matrix.test_gpu import BASE, prompts
from tests.ranks import Ranks

pytestmark = pytest.mark.gpu

SIZES = tuple(size for size in (2, 4) if size <= torch.cuda.device_count())
LAYERS, TOKENS, PAGE = 4, 300, 16
CELLS = {
    "eager": BASE,
    "graphs": msgspec.structs.replace(BASE, graphs=True, depth=2),
    "drafts": msgspec.structs.replace(BASE, graphs=True, depth=2, own_drafts=4),
}


@pytest.fixture(scope="module")
def gpu_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    if not SIZES:
        pytest.skip("there is one GPU")
    found = Ranks(SIZES, tmp_path_factory.mktemp("ranks"), "cuda")
    yield found
    found.close()


@contextmanager
def exchanging(group: Group, folder: Path, exchanged: bool) -> Iterator[Group]:
    """The group, with an exchange between its ranks for a model's hidden states if that is wanted."""
    if not exchanged:
        yield group
        return
    with opened(group, read_spec(folder).hidden, torch.bfloat16, folder) as exchange:
        yield replace(group, exchange=exchange)


def answers(group: Group, cell: Cell, exchanged: bool, asked: list[Prompt]) -> Answers:
    draft = draft_folder() if cell.own_drafts else None
    device = f"cuda:{group.rank}"
    with exchanging(group, demo_folder(), exchanged) as joined:
        return Engine(cell, demo_folder(), dtype=torch.bfloat16, device=device, draft=draft, group=joined).answer(asked)


@torch.inference_mode()
def logits(group: Group, folder: Path, exchanged: bool, tokens: Sequence[int]) -> torch.Tensor:
    """Of a few 8B-shaped layers of dummy weights, behind each token of one prompt; on the host."""
    with exchanging(group, folder, exchanged) as joined:
        return logits_of(joined, folder, tokens)


def logits_of(group: Group, folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    device = torch.device("cuda", group.rank)
    spec = read_spec(folder)
    model = build(spec, torch.bfloat16, device, TOKENS, group=group)
    load(model, folder, "dummy", 5)
    blocks, kv_heads = -(-TOKENS // PAGE), model.placement.kv_heads(spec.attention.kv_heads)
    shape = blocks + 1, PAGE, kv_heads, spec.attention.head_dim
    pages = [tuple(torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2)) for _ in range(LAYERS)]

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch = AttentionBatch(
        query_start=column([0, TOKENS]), context=column([TOKENS]), slots=column([0]),
        block_tables=column(range(1, blocks + 1))[None],
        slot_mapping=torch.arange(PAGE, PAGE + TOKENS, device=device), max_query=TOKENS, max_context=TOKENS,
    )  # fmt: skip
    return model.logits(model.forward(column(tokens), column(range(TOKENS)), batch, pages)).float().cpu()


@pytest.mark.parametrize("exchanged", [True, False])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_give_the_canarys_answers(gpu_ranks: Ranks, size: int, cell: str, exchanged: bool) -> None:
    if size not in SIZES:
        pytest.skip(f"there are fewer than {size} GPUs")
    asked = prompts()
    expected = answers(ALONE, BASE, False, asked)
    for found in gpu_ranks.run(size, answers, CELLS[cell], exchanged, asked):
        assert found == expected


@pytest.mark.parametrize("exchanged", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_logits_of_large_layers_are_within_rounding(
    gpu_ranks: Ranks, size: int, exchanged: bool, tmp_path: Path
) -> None:
    if size not in SIZES:
        pytest.skip(f"there are fewer than {size} GPUs")
    few = type(EIGHT)(EIGHT.name, EIGHT.title, {**EIGHT.config, "num_hidden_layers": LAYERS})
    folder = make_folder(few, tmp_path)
    tokens = torch.randint(0, few.vocab, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = logits(ALONE, folder, False, tokens)
    found = gpu_ranks.run(size, logits, folder, exchanged, tokens)
    assert all(torch.equal(other, found[0]) for other in found[1:]), "all ranks have the same bits"
    error = (found[0] - expected).norm() / expected.norm()
    print(f"\n{size} ranks: relative error {error:.2e}")
    assert error < 0.02
