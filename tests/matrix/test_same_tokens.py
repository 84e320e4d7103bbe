"""The same tokens whichever path produced them: overlap, chunking, prefix reuse, block size, company, preemption.

fp32 on a CPU. A random model of the embedded one's family answers with near-ties that a wrong page or position would
flip at once; the embedded model's own answers are held to the canary in test_canary.py.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import msgspec
import pytest
import torch

from penstock.protocol.messages import Sampling
from tests.matrix.engine import Answers, Cell, Engine, Prompt

BASE = Cell(depth=1, prefix_caching=False)
BUDGETS, BLOCKS = (16, 64, 8192), (8, 16, 32)
CELLS = [  # of which one in four runs each time: every two values meet in one of them
    pytest.param(
        Cell(depth=1 + depth, budget=BUDGETS[budget], prefix_caching=bool(prefix), block_size=BLOCKS[block]),
        marks=() if (depth, prefix) == ((budget + block) % 3 % 2, (budget + 2 * block) % 3 % 2) else pytest.mark.long,
    )
    for depth, budget, prefix, block in itertools.product(range(2), range(3), range(2), range(3))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 checkpoint with sharp enough logits that fp32 rounding decides no token."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.2, eos_token_id=0,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("qwen3")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def workload(count: int, seed: int = 3) -> list[Prompt]:
    """Prompts of 3 to 90 tokens, many with a shared prefix; every other one sampled, some with n, some penalised."""
    rng = random.Random(seed)
    shared = [tuple(rng.randrange(1, 512) for _ in range(40)) for _ in range(3)]
    prompts = []
    for number in range(count):
        own = tuple(rng.randrange(1, 512) for _ in range(rng.randrange(3, 50)))
        ids = (rng.choice(shared) if number % 3 else ()) + own
        sampling = Sampling(temperature=0.0, max_tokens=rng.randrange(4, 40), eos_token_ids=(0,), seed=number)
        if number % 2:
            sampling = msgspec.structs.replace(sampling, temperature=0.9, top_p=0.9, top_k=40)
        if number % 5 == 4:
            sampling = msgspec.structs.replace(
                sampling, frequency_penalty=0.4, presence_penalty=0.3, repetition_penalty=1.2, min_tokens=3
            )
        prompts.append(Prompt(token_ids=ids, sampling=sampling, n=3 if number % 8 == 7 else 1))
    return prompts


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    """What each request gives alone, in whole prompts, one step at a time."""
    return Engine(BASE, folder).answer(workload(24), together=False)


def label(cell: Cell) -> str:
    return f"{cell.depth}-{cell.budget}-{cell.prefix_caching:d}-{cell.block_size}"


@pytest.mark.parametrize("cell", CELLS, ids=label)
def test_every_cell_gives_the_same_tokens(cell: Cell, folder: Path, expected: Answers) -> None:
    if cell.budget < cell.max_num_seqs:
        cell = msgspec.structs.replace(cell, max_num_seqs=cell.budget)
    assert Engine(cell, folder).answer(workload(24)) == expected


def test_alone_or_among_sixty_four(folder: Path) -> None:
    prompts = workload(64, seed=9)
    alone = Engine(BASE, folder).answer(prompts, together=False)
    assert Engine(Cell(), folder).answer(prompts) == alone


@pytest.mark.sweep
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_changes_nothing(depth: int, prefix_caching: bool, folder: Path, expected: Answers) -> None:
    cell = Cell(
        depth=depth, prefix_caching=prefix_caching, block_size=8, blocks=24, max_model_len=192, expected_share=0.0
    )
    engine = Engine(cell, folder)
    assert engine.answer(workload(24)) == expected
    assert engine.scheduler.statistics().preemptions > 0, "the pool was meant to be too small"


def test_a_second_round_on_a_warm_cache(folder: Path, expected: Answers) -> None:
    engine = Engine(Cell(), folder)
    assert engine.answer(workload(24)) == expected
    before = engine.scheduler.statistics().reused_tokens
    assert engine.answer(workload(24)) == expected
    assert engine.scheduler.statistics().reused_tokens > before


def test_an_epoch_restart_continues_every_request(folder: Path, expected: Answers) -> None:
    """All slots and pages are lost in the middle; nothing is missing and nothing repeated."""
    engine = Engine(Cell(), folder)
    answers: Answers = {}
    ends: dict[tuple[int, int], object] = {}
    from tests.matrix.engine import submission, take

    prompts = workload(24)
    for number, prompt in enumerate(prompts):
        engine.scheduler.submit(submission(number, prompt), 0, 0.0)
    for _ in range(6):
        plan = engine.scheduler.plan(0.0)
        assert plan is not None
        engine.scheduler.apply(engine.runner.collect(engine.runner.launch(plan)), 0.0)
        for message in engine.scheduler.outputs(0):
            take(message, answers, ends)  # type: ignore[arg-type]
    engine.scheduler.plan(0.0)  # in flight when the executor dies
    engine.runner = Engine(engine.cell, folder).runner
    engine.scheduler.restart(2, 1.0, engine.cell.blocks)
    engine.run(answers, ends)  # type: ignore[arg-type]
    assert answers == expected
