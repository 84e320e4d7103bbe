"""Random requests in random cells say what each says alone: every feature of sampling beside drafts of every kind,
cached prefixes, preemption, several choices, grammars and prompts whose log-probabilities are wanted.

fp32 on a CPU, the embedded model, its draft and its head.
"""

from __future__ import annotations

import random
from functools import cache

import msgspec
import pytest

from benchmarks.structured_engine import Answer, Ask, Cell, Engine, Key
from penstock.engine_core.embedded import demo_folder, draft_folder, eagle_folder
from penstock.protocol.messages import Sampling
from tests.engine_core.grammar.vocabulary import END, OTHER_END, automaton, ids, tokens

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TEXTS = (
    "Tell me a short story about a fox.",
    "Please repeat this list: bell; ziaclurk; kloteax; ciatros; thoonia; clumen; drum; piano",
    "What is 128 + 457?",
    "one two three four five six seven one two three four five six seven one two",
)
METHODS = ("none", "ngram", "draft_model", "eagle")
ALONE = Cell(depth=1, drafts=False, prefix_caching=False, max_num_seqs=1)


@cache
def engine(method: str) -> Engine:
    draft = {"draft_model": draft_folder, "eagle": eagle_folder}.get(method)
    return Engine(demo_folder(), tokens(), Cell(method=method), draft=draft() if draft is not None else None)


def answers(cell: Cell, asks: list[Ask]) -> dict[Key, Answer]:
    found = engine(cell.method)
    found.cell = cell
    return found.answer(asks)


def random_prompt(rng: random.Random) -> tuple[int, ...]:
    """Few beginnings, so that many are shared, and some ends of their own."""
    prompt = ids(CHAT.format(rng.choice(TEXTS)))
    if rng.random() < 0.3:
        prompt = prompt[: rng.randint(1, len(prompt))]
    if rng.random() < 0.2:
        prompt = prompt + rng.sample(range(4000), rng.randint(1, 60))
    return tuple(prompt)


def random_sampling(rng: random.Random, *, guided: bool) -> Sampling:
    common = Sampling(
        temperature=rng.choice((0.0, 0.0, 0.7, 1.3)),
        top_k=rng.choice((0, 0, 1, 20)),
        top_p=rng.choice((1.0, 1.0, 0.8, 0.1)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3, 0.8)),
        presence_penalty=rng.choice((0.0, 0.0, 0.5, -0.5)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.4)),
        seed=rng.randrange(1 << 40),
        max_tokens=rng.choice((1, 2, 8, 24, 40)),
        eos_token_ids=(END, OTHER_END),
        stop_token_ids=tuple(rng.sample(range(4000), rng.choice((0, 0, 5, 200)))),
        logprobs=rng.choice((-1, -1, 0, 3)),
        prompt_logprobs=rng.choice((-1, -1, -1, 2)),
    )
    if guided:
        return common
    return msgspec.structs.replace(
        common,
        min_tokens=rng.choice((0, 0, 3)),
        ignore_eos=rng.random() < 0.2,
        logit_bias=tuple((rng.randrange(4000), rng.choice((-100.0, 5.0))) for _ in range(rng.choice((0, 0, 3)))),
        bad_words=tuple(tuple(rng.sample(range(4000), rng.choice((1, 2)))) for _ in range(rng.choice((0, 0, 4)))),
        allowed_token_ids=tuple(rng.sample(range(4000), 600)) if rng.random() < 0.1 else (),
    )


def random_ask(rng: random.Random) -> Ask:
    bound = None
    if rng.random() < 0.2:
        bound = rng.choice((
            automaton("regex", "([a-z]{2,8}(, | and )){2,6}[a-z]{2,8}"),
            automaton("choice", '["the answer is forty-two", "the answer is not known to me"]'),
        ))  # fmt: skip
    return Ask(
        token_ids=random_prompt(rng),
        sampling=random_sampling(rng, guided=bound is not None),
        automaton=bound,
        n=rng.choice((1, 1, 1, 2, 3)),
        speculate=rng.random() < 0.9,
    )


def random_cell(rng: random.Random, asks: list[Ask]) -> Cell:
    """Its pool holds the longest request, and often little more."""
    size = rng.choice((4, 8, 16))
    longest = max(len(ask.token_ids) + (ask.sampling.max_tokens or 0) for ask in asks)
    return Cell(
        depth=rng.choice((1, 2, 2, 3)),
        method=rng.choice(METHODS),
        prefix_caching=rng.random() < 0.7,
        blocks=-(-longest // size) + rng.choice((0, 4, 20, 400)),
        block_size=size,
        expected_share=rng.choice((0.0, 0.3, 1.0)),
        max_num_seqs=rng.choice((2, 6, 16)),
        budget=rng.choice((16, 33, 128, 512)),
    )


def check(seed: int) -> int:
    """Preemptions, of cells that say the same as their requests alone."""
    rng = random.Random(seed)
    asks = [random_ask(rng) for _ in range(rng.choice((4, 10, 16)))]
    expected = answers(ALONE, asks)
    predicting = [
        msgspec.structs.replace(ask, prediction=tuple(expected[number, 0].token_ids[:: rng.choice((1, 3))]))
        if rng.random() < 0.3
        else ask
        for number, ask in enumerate(asks)
    ]
    preemptions = 0
    for _ in range(2):
        cell = random_cell(rng, asks)
        assert answers(cell, predicting) == expected, cell
        found = engine(cell.method).scheduled
        assert found is not None
        preemptions += found.preemptions
    return preemptions


@pytest.mark.long
def test_random_cells_change_no_token() -> None:
    assert sum(check(seed) for seed in range(60)) > 20, "pools were meant to be too small"
