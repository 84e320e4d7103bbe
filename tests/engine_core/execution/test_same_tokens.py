"""The same tokens however a request is run: chunks, blocks, slots, company, depth, preemption."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from penstock.engine_core.models.decoder import Decoder
from penstock.kernels.records import AttentionBatch
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import StepPlan
from tests.engine_core.execution.harness import (
    GREEDY,
    LENGTH,
    VOCABULARY,
    Life,
    block_tables,
    column,
    decode,
    prefill,
    tiny_model,
    tiny_runner,
    tiny_spec,
    tokens_of,
)

STEPS = 12
SAMPLINGS = [
    GREEDY,
    Sampling(temperature=0.9),
    Sampling(temperature=1.0, top_k=10, top_p=0.9, min_p=0.05),
    Sampling(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    Sampling(temperature=0.0, repetition_penalty=1.5, logit_bias=((3, 2.0), (VOCABULARY, 5.0))),
    Sampling(temperature=1.2, bad_words=((5,), (6, 7), (VOCABULARY + 1,)), allowed_token_ids=tuple(range(60))),
    Sampling(temperature=1.0, min_tokens=6, eos_token_ids=tuple(range(40)), stop_token_ids=(41,), logprobs=3),
    Sampling(temperature=0.0, logprobs=1, prompt_logprobs=2),
]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


def lives(count: int = len(SAMPLINGS), seed: int = 0) -> list[Life]:
    """Requests with prompts of different lengths, one per way of sampling."""
    chance = np.random.default_rng(seed)
    tables = block_tables(count, LENGTH // 8)
    return [
        Life(
            prompt=[int(token) for token in chance.integers(0, VOCABULARY, 5 + 11 * at)],
            sampling=SAMPLINGS[at % len(SAMPLINGS)],
            seed=int(chance.integers(0, 2**63)) + at,
            slot=at,
            blocks=tables[at],
        )
        for at in range(count)
    ]


def outputs(found: list[Life]) -> list[list[int]]:
    return [life.output for life in found]


@pytest.fixture(scope="module")
def alone(model: Decoder) -> list[list[int]]:
    """Each request by itself, its prompt in one piece, one step at a time: what every other way must equal."""
    found = lives()
    for life in found:
        runner = tiny_runner(model, blocks=200)
        prefill(runner, [life])
        decode(runner, [life], STEPS, depth=1)
    assert all(len(output) == STEPS + 1 for output in outputs(found))
    return outputs(found)


def test_model_without_pages_agrees(model: Decoder, alone: list[list[int]]) -> None:
    """Greedy tokens are those of the model run over the whole sequence at once, without slots, chunks or a cache."""
    life = lives()[0]
    ids = torch.tensor([*life.prompt, *alone[0]], dtype=torch.int32)
    spec, count = tiny_spec(), len(ids)
    batch = AttentionBatch(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context=torch.tensor([count], dtype=torch.int32),
        slots=torch.zeros(1, dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=torch.arange(count) + 64,
        max_query=count,
        max_context=count,
    )
    shape = 2, 64, spec.attention.kv_heads, spec.attention.head_dim
    cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(spec.layers)]
    with torch.inference_mode():
        hidden = model.forward(ids, torch.arange(count), batch, cache)
        best = model.logits(hidden).argmax(-1).tolist()
    assert best[len(life.prompt) - 1 : -1] == alone[0]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 7, 1000])
def test_in_one_batch(model: Decoder, alone: list[list[int]], depth: int, budget: int) -> None:
    found = lives()
    runner = tiny_runner(model, blocks=200)
    prefill(runner, found, budget)
    decode(runner, found, STEPS, depth)
    assert outputs(found) == alone


@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_other_block_sizes_slots_and_tables(model: Decoder, alone: list[list[int]], block_size: int) -> None:
    found = lives()
    tables = block_tables(len(found), LENGTH // block_size, seed=9)
    slots = np.random.default_rng(1).permutation(20)
    found = [
        dataclasses.replace(life, slot=int(slots[at]), blocks=tables[at], output=[]) for at, life in enumerate(found)
    ]
    runner = tiny_runner(model, block_size=block_size, slots=20, blocks=len(found) * LENGTH // block_size)
    prefill(runner, found, 13)
    decode(runner, found, STEPS)
    assert outputs(found) == alone


def test_prefill_beside_decoding(model: Decoder, alone: list[list[int]]) -> None:
    """Half of the requests decode while the prompts of the others come in chunks."""
    found = lives()
    early, late = found[: len(found) // 2], found[len(found) // 2 :]
    runner = tiny_runner(model, blocks=200)
    prefill(runner, early)
    plan_on = column(*(life.slot for life in early))
    starts, done = tuple(life.start() for life in late), 0
    for _ in range(STEPS):
        chunks, sampling = [], []
        for life in late:
            count = min(16, len(life.prompt) - done)
            if count > 0:
                chunks += [life.slot, done, count, int(done + count == len(life.prompt))]
                sampling += [life] * int(done + count == len(life.prompt))
        plan = StepPlan(step=0, epoch=0, starts=starts, decode_on=plan_on, chunks=column(*chunks))
        starts, plan_on, done = (), b"", done + 16
        for life, token in zip([*early, *sampling], tokens_of(runner.collect(runner.launch(plan))), strict=True):
            life.output.append(token)
    runner.launch(StepPlan(step=0, epoch=0, decode_off=column(*(life.slot for life in early))))
    decode(runner, late, STEPS)
    assert outputs(early) == alone[: len(early)]
    assert [output[: STEPS + 1] for output in outputs(late)] == alone[len(early) :]


def test_after_preemption_in_another_slot(model: Decoder, alone: list[list[int]]) -> None:
    """Recompute prompt and output, penalties and noise included."""
    found = lives()
    runner = tiny_runner(model, slots=10, blocks=200)
    prefill(runner, found)
    decode(runner, found, 5)
    for life in found:
        life.slot = 9 - life.slot
        life.blocks = life.blocks[::-1]
    prefill(runner, found, 32)
    decode(runner, found, STEPS - 6)
    assert outputs(found) == alone


def test_from_a_cached_prefix(model: Decoder, alone: list[list[int]]) -> None:
    """A second request that shares full blocks of the first's prompt starts behind them."""
    runner = tiny_runner(model, blocks=200)
    first = lives()[4]
    prefill(runner, [first])
    second = dataclasses.replace(first, slot=7, blocks=[*first.blocks[:4], *lives()[0].blocks[4:]], output=[])
    chunk = column(7, 32, len(second.prompt) - 32, 1)
    plan = StepPlan(step=0, epoch=0, starts=(second.start(computed=32),), chunks=chunk)
    second.output += tokens_of(runner.collect(runner.launch(plan)))
    decode(runner, [second], STEPS)
    assert second.output == alone[4]
