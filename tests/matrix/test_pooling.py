"""Vectors of prompts are those of transformers, whatever shares their steps, however they are cut, in fp32."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.execution.step_output import Launched
from penstock.engine_core.scheduling.statistics import SchedulerStatistics
from penstock.protocol.messages import Finish, Pooling, Sampling, SubmitTokens
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import StepResult
from tests.matrix.engine import Cell, Engine, over_the_wire
from tests.sim.idle import is_idle

Vector = npt.NDArray[np.float32]

KINDS = ("mean", "last", "cls")
TOKENS = (5, 300, 17)  # whose logits are asked for
EXACT = 0.99999  # cosine
COMMON = "Once upon a time there was a small fox who lived by the river and liked to count the fish. "
TEXTS = (
    "A fox.", "Hello", COMMON + "One day it saw an owl.", COMMON + "Then winter came.", COMMON * 4,
    "What is 12 + 30?", COMMON * 7 + "The end.",
)  # fmt: skip
GREEDY = Sampling(temperature=0.0, max_tokens=24)

CELLS = {
    "one step": Cell(),
    "no overlap": Cell(depth=1),
    "chunks": Cell(budget=64, max_num_seqs=16, block_size=8),
    "crumbs": Cell(budget=7, max_num_seqs=3, block_size=4),
    "no cache": Cell(prefix_caching=False, budget=33, max_num_seqs=8),
    "preemption": Cell(blocks=56, block_size=4, max_model_len=200, budget=24, max_num_seqs=16, expected_share=0.0),
}


class Asked:
    """A run of one engine: what each request gave."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.vectors: dict[int, Vector] = {}
        self.cached: dict[int, int | None] = {}
        self.tokens: dict[int, list[int]] = {}
        self._launched: deque[Launched] = deque()

    def submit(self, number: int, ids: Sequence[int], pooling: Pooling | None) -> None:
        sampling = Sampling(max_tokens=1) if pooling is not None else GREEDY
        request = SubmitTokens(
            id=number, token_ids=np.array(ids, np.int32).tobytes(), sampling=sampling, pooling=pooling,
            speculate=pooling is None,
        )  # fmt: skip
        self.engine.scheduler.submit(request, 0, self.engine.now)

    def run(self) -> SchedulerStatistics:
        scheduler, runner, ended = self.engine.scheduler, self.engine.runner, set()
        while True:
            while scheduler.in_flight < self.engine.cell.depth and (plan := scheduler.plan(self.engine.now)):
                self._launched.append(runner.launch(over_the_wire(plan)))
            if not self._launched:
                break
            scheduler.apply(arrived(runner.collect(self._launched.popleft())), self.engine.now)
            for batch in scheduler.outputs(0):
                assert isinstance(batch, TokenBatch)
                ended |= self._take(batch)
        assert is_idle(scheduler)
        assert scheduler.check(thorough=True).ok
        assert ended == {*self.vectors, *self.tokens}
        return scheduler.statistics()

    def _take(self, batch: TokenBatch) -> set[int]:
        ids, counts = np.frombuffer(batch.ids, np.int64).tolist(), np.frombuffer(batch.counts, np.int32).tolist()
        tokens, start = np.frombuffer(batch.token_ids, np.int32).tolist(), 0
        extras = {extra.row: extra for extra in batch.extras}
        for row, (number, count) in enumerate(zip(ids, counts, strict=True)):
            extra = extras.get(row)
            if extra is not None and extra.vector is not None:
                assert (count, batch.finish[row], number in self.vectors) == (0, Finish.STOP, False)
                self.vectors[number] = np.frombuffer(extra.vector, np.float32)
                self.cached[number] = extra.cached_tokens
            else:
                self.tokens.setdefault(number, []).extend(tokens[start : start + count])
            start += count
        return {number for number, finish in zip(ids, batch.finish, strict=True) if finish}


def arrived(result: StepResult) -> StepResult:
    """The result as it comes from an executor."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> dict[tuple[int, str], Vector]:
    """By prompt and kind, as transformers has them: hidden states behind the final norm, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)
    found = {}
    for number, ids in enumerate(prompts):
        with torch.inference_mode():
            states = model.model(torch.tensor([ids])).last_hidden_state[0]
            logits = model.lm_head(states[-1])
        found[number, "mean"] = states.mean(0).numpy()
        found[number, "last"], found[number, "cls"] = states[-1].numpy(), states[0].numpy()
        found[number, "logits"] = logits[list(TOKENS)].numpy()
    return found


def cosine(one: Vector, other: Vector) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def like(one: Vector, other: Vector) -> bool:
    return one.shape == other.shape and cosine(one, other) > EXACT and np.allclose(one, other, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("name", CELLS)
def test_vectors_are_those_of_transformers(
    name: str, prompts: list[list[int]], expected: dict[tuple[int, str], Vector]
) -> None:
    cell = Asked(Engine(CELLS[name], demo_folder()))
    asked = list(product(range(len(prompts)), (*KINDS, "logits")))
    for number, (prompt, kind) in enumerate(asked):
        tokens = TOKENS if kind == "logits" else ()
        cell.submit(number, prompts[prompt], Pooling(kind=kind, tokens=tokens))
    stand = cell.run()
    for number, (prompt, kind) in enumerate(asked):
        assert like(cell.vectors[number], expected[prompt, kind]), (prompt, kind)
        if kind in ("mean", "cls"):
            assert cell.cached[number] == 0, "every position is needed"
    assert (stand.finished, stand.output_tokens, stand.failed) == (len(asked), 0, 0)
    reused = sum(cell.cached[number] or 0 for number in cell.cached)
    assert (reused > 0) == CELLS[name].prefix_caching, "the others begin behind what stands already"


@pytest.mark.parametrize("name", CELLS)
def test_generation_and_pooling_share_steps_and_neither_sees_the_other(
    name: str, prompts: list[list[int]], expected: dict[tuple[int, str], Vector]
) -> None:
    alone = Asked(Engine(Cell(), demo_folder()))
    for number, ids in enumerate(prompts):
        alone.submit(number, ids, None)
    alone.run()
    mixed = Asked(Engine(CELLS[name], demo_folder()))
    kinds = [KINDS[number % 3] for number in range(len(prompts))]
    for number, ids in enumerate(prompts):
        mixed.submit(2 * number, ids, None)
        mixed.submit(2 * number + 1, ids, Pooling(kind=kinds[number]))
    stand = mixed.run()
    assert {number // 2: tokens for number, tokens in mixed.tokens.items()} == alone.tokens
    for number, kind in enumerate(kinds):
        assert like(mixed.vectors[2 * number + 1], expected[number, kind]), (number, kind)
    if name == "preemption":
        assert stand.preemptions > 0


def test_a_vector_depends_on_its_neighbours_in_no_way_that_its_cut_does_not(prompts: list[list[int]]) -> None:
    """The same prompt many times at once: equal cuts give equal bits but for the products of another batch."""
    cell = Asked(Engine(Cell(prefix_caching=False), demo_folder()))
    for number in range(8):
        cell.submit(number, prompts[4], Pooling(kind="mean"))
    cell.run()
    for number in range(1, 8):
        assert np.allclose(cell.vectors[number], cell.vectors[0], rtol=1e-4, atol=1e-5)


def test_a_prompt_of_the_models_whole_length_has_its_vector(prompts: list[list[int]]) -> None:
    cell = Asked(Engine(Cell(max_model_len=64, budget=50, max_num_seqs=4), demo_folder()))
    whole = (prompts[4] * 2)[:64]
    cell.submit(1, whole, Pooling(kind="last"))
    cell.submit(2, whole[:63], Pooling(kind="last"))
    cell.run()
    other = Asked(Engine(Cell(), demo_folder()))
    other.submit(1, whole, Pooling(kind="last"))
    other.run()
    assert like(cell.vectors[1], other.vectors[1])
    assert not like(cell.vectors[1], cell.vectors[2])


def test_a_slot_forgets_what_it_kept_of_another_request(prompts: list[list[int]]) -> None:
    """Aborted in the middle of its prompt, then the slot goes to another one, and to one that generates."""
    engine = Engine(Cell(budget=16, max_num_seqs=1, prefix_caching=False, depth=1), demo_folder())
    cell, scheduler, runner = Asked(engine), engine.scheduler, engine.runner
    cell.submit(1, prompts[6], Pooling(kind="mean"))
    for _ in range(2):
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.apply(runner.collect(runner.launch(plan)), 0.0)
    scheduler.abort(1)
    scheduler.outputs(0)
    cell.submit(2, prompts[4], Pooling(kind="mean"))
    cell.submit(3, prompts[4], None)
    cell.run()
    fresh = Asked(Engine(Cell(budget=16, max_num_seqs=1), demo_folder()))
    fresh.submit(2, prompts[4], Pooling(kind="mean"))
    fresh.submit(3, prompts[4], None)
    fresh.run()
    assert np.array_equal(cell.vectors[2], fresh.vectors[2])
    assert cell.tokens == fresh.tokens


def test_a_new_epoch_recomputes_what_was_half_pooled(
    prompts: list[list[int]], expected: dict[tuple[int, str], Vector]
) -> None:
    engine = Engine(Cell(budget=32, max_num_seqs=4), demo_folder())
    cell = Asked(engine)
    for number, kind in enumerate(KINDS):
        cell.submit(number, prompts[6], Pooling(kind=kind))
    for _ in range(2):
        plan = engine.scheduler.plan(0.0)
        assert plan is not None
        engine.runner.launch(plan)
    engine.scheduler.restart(2, 0.0)
    engine.runner.reset()
    cell.run()
    for number, kind in enumerate(KINDS):
        assert like(cell.vectors[number], expected[6, kind]), kind


def test_a_canary_of_the_embedded_model() -> None:
    """Texts about the same thing are closer to each other than to others: the states mean something."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    texts = ["Tell me a story about a fox.", "Tell me a short story about a fox.", '{"name": "fox", "age": 3}']
    cell = Asked(Engine(Cell(), demo_folder()))
    for number, text in enumerate(texts):
        ids: Any = tokenizer(text)["input_ids"]
        cell.submit(number, ids, Pooling(kind="mean"))
    cell.run()
    near, far = cosine(cell.vectors[0], cell.vectors[1]), cosine(cell.vectors[0], cell.vectors[2])
    assert near > far, json.dumps([near, far])
