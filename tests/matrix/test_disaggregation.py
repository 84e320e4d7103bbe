"""Prefill and decode at different replicas in the cells of the matrix: the same tokens as from one. Drafts of models
and heads, whose keys and values go along, FP8, chunks, choices, what a decoding replica knows. fp32 on a CPU."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from penstock.engine_core.embedded import demo_folder, draft_folder, eagle_folder
from penstock.engine_core.execution.shared_blocks import SharedBlocks
from penstock.protocol.engine_config import KV_FP8
from penstock.protocol.groups import ReplicaRole
from penstock.protocol.messages import Finish, Sampling, Written
from tests.matrix.engine import Answers, Cell, Engine, Prompt, submission

CPU = torch.device("cpu")
PLAIN = Cell(block_size=4, blocks=400, max_num_seqs=8, budget=128, host_blocks=400)
CELLS = {
    "plain": PLAIN,
    "pieces": msgspec.structs.replace(PLAIN, budget=9, depth=1),
    "preemption": msgspec.structs.replace(PLAIN, blocks=60, expected_share=0.0),
    "prompt lookup": msgspec.structs.replace(PLAIN, ngram=3),
    "draft model": msgspec.structs.replace(PLAIN, own_drafts=3),
    "EAGLE head": msgspec.structs.replace(PLAIN, own_drafts=3, method="eagle"),
    "fp8": msgspec.structs.replace(PLAIN, kv_cache_dtype=KV_FP8),
}


def prompts() -> list[Prompt]:
    """Some begin alike, one has two choices, one ends with its first token."""
    rng = random.Random(3)
    system = [rng.randrange(3, 500) for _ in range(20)]
    found = []
    for number in range(6):
        ids = [*system[: 20 * (number % 2)], *(rng.randrange(3, 500) for _ in range(11 + 7 * number))]
        sampling = Sampling(
            temperature=0.8 * (number % 2), max_tokens=1 if number == 4 else 14, ignore_eos=True, seed=number
        )
        found.append(Prompt(token_ids=tuple(ids), sampling=sampling, n=1 + (number == 3)))
    return found


def draft_of(cell: Cell) -> Path | None:
    if not cell.own_drafts:
        return None
    return eagle_folder() if cell.method == "eagle" else draft_folder()


def apart(cell: Cell) -> tuple[Answers, int]:
    """What is said, and blocks that went from one replica to the other."""
    first, second = (
        Engine(msgspec.structs.replace(cell, role=role), demo_folder(), draft=draft_of(cell))
        for role in (ReplicaRole.PREFILL, ReplicaRole.DECODE)
    )
    assert first.copier is not None
    assert first.copier.shared is not None
    assert second.copier is not None
    second.copier.others[0] = SharedBlocks.open(first.copier.shared.path, second.copier.layout, CPU)
    asked, answers = prompts(), Answers()
    ends: dict[tuple[int, int], Finish] = {}
    for number, prompt in enumerate(asked):
        message = msgspec.structs.replace(submission(number, prompt), prefill=True)
        first.scheduler.submit(message, 0, first.now)
    first.run(answers, ends)
    assert sorted(message.id for message in first.told) == [0, 1, 2, 3, 5]
    for message in first.told:
        prompt, number = asked[message.id], message.id
        said = (np.array(answers[number, choice], np.int32).tobytes() for choice in range(prompt.n))
        written = tuple(Written(tokens, (number, choice) in ends) for choice, tokens in enumerate(said))
        going = msgspec.structs.replace(submission(number, prompt), written=written, transfer=message.transfer)
        second.scheduler.submit(going, 0, second.now)
    second.run(answers, ends)
    for engine in (first, second):
        assert engine.scheduler.unfinished == 0
        assert engine.scheduler.check(thorough=True).ok
    return answers, second.scheduler.statistics().transfers.fetched


LONG = ("preemption", "prompt lookup", "draft model")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CELLS])
def test_the_same_tokens(name: str) -> None:
    cell = CELLS[name]
    alone = msgspec.structs.replace(PLAIN, kv_cache_dtype=cell.kv_cache_dtype, host_blocks=0, depth=1)
    expected = Engine(alone, demo_folder()).answer(prompts())
    found, fetched = apart(cell)
    assert found == expected
    assert fetched > 30
