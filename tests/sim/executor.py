"""A fake executor that takes protocol/steps.py at its word and fails at the first thing that is not as it should be.

Every KV cell holds the hash of the whole prefix it was computed from. Before a row is computed, every cell that it
would attend to is compared with the hash of the slot's own tokens: a wrong block table, a block reused too early, a
stale prefix hit and a wrong start position all show at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from protocol.messages import Logprobs, Sampling
from protocol.steps import RowLogprobs, StepPlan, StepResult
from tests.sim.model import Nature, cells, choose, logprob


@dataclass(slots=True)
class Slot:
    tokens: list[int]
    prompt_tokens: int
    computed: int
    table: list[int]
    sampling: Sampling
    seed: int
    nature: Nature
    hashes: list[int] = field(default_factory=list)  # of its own tokens, computed from nothing else


@dataclass(frozen=True, slots=True)
class Touched:
    """What a step reads or writes."""

    step: int
    slots: frozenset[int]
    blocks: frozenset[int]


def ints(data: bytes, width: int = 1) -> list[list[int]]:
    return np.frombuffer(data, np.int32).reshape(-1, width).tolist()


class FakeExecutor:
    def __init__(
        self,
        *,
        blocks: int,
        block_size: int,
        slots: int,
        budget: int,
        max_model_len: int,
        epoch: int,
        natures: Mapping[int, Nature],
    ) -> None:
        self._longest = max_model_len
        self.epoch = epoch
        self._size = block_size
        self._budget = budget
        self._count = slots
        self._natures = natures  # by the request's seed
        self._pages = [[0] * block_size for _ in range(blocks + 1)]
        self._slots: dict[int, Slot] = {}
        self._decoding: set[int] = set()
        self._flying: deque[Touched] = deque()
        self._step = 0
        self.rows = 0

    def applied(self, step: int) -> None:
        """The scheduler has applied this step: its fence is open."""
        assert self._flying.popleft().step == step

    def run(self, plan: StepPlan) -> StepResult:
        assert plan.epoch == self.epoch
        assert plan.step > self._step
        self._step = plan.step
        fenced_slots = frozenset().union(*[touched.slots for touched in self._flying])
        fenced_blocks = frozenset().union(*[touched.blocks for touched in self._flying])
        for start in plan.starts:
            assert start.slot not in fenced_slots, "slot reused before its fence opened"
            self._start(start, fenced_blocks)
        for slot, block in ints(plan.blocks, 2):
            assert block not in fenced_blocks, "block reused before its fence opened"
            assert 1 <= block < len(self._pages)
            self._slots[slot].table.append(block)
        self._turn(plan)
        return self._compute(plan)

    def _start(self, start, fenced_blocks: frozenset[int]) -> None:  # type: ignore[no-untyped-def]
        tokens = ints(start.token_ids)
        slot = Slot(
            [token for (token,) in tokens],
            start.prompt_tokens,
            start.computed,
            [block for (block,) in ints(start.blocks)],
            start.sampling,
            start.seed,
            self._natures[start.sampling.seed],
        )
        assert 0 <= start.slot < self._count
        assert 0 <= slot.computed < len(slot.tokens), "at least one position is computed"
        assert slot.computed % self._size == 0
        assert len(set(slot.table)) == len(slot.table)
        fresh = slot.table[slot.computed // self._size :]
        assert not fenced_blocks.intersection(fresh), "block reused before its fence opened"
        slot.hashes = cells(slot.nature.root, slot.tokens)
        self._slots[start.slot] = slot

    def _turn(self, plan: StepPlan) -> None:
        for (slot,) in ints(plan.decode_off):
            assert slot in self._decoding
            self._decoding.remove(slot)
        for (slot,) in ints(plan.decode_on):
            assert slot not in self._decoding
            self._decoding.add(slot)

    def _compute(self, plan: StepPlan) -> StepResult:
        chunks = ints(plan.chunks, 4)
        used = [*sorted(self._decoding), *[row[0] for row in chunks]]
        assert used, "a step without work"
        assert len(set(used)) == len(used), "one row per slot"
        assert {start.slot for start in plan.starts} <= {row[0] for row in chunks}
        assert len(self._decoding) + sum(row[2] for row in chunks) <= self._budget
        tokens: list[int] = []
        scores: list[RowLogprobs] = []
        prompt_scores: list[RowLogprobs] = []
        for index in sorted(self._decoding):
            slot = self._slots[index]
            assert slot.computed == len(slot.tokens) - 1, "a decoding slot runs its last token"
            self._positions(slot, 1)
            self._sample(slot, tokens, scores)
        for row, (index, start, count, sample) in enumerate(chunks):
            slot = self._slots[index]
            assert start == slot.computed, "a chunk starts where the slot stands"
            assert count >= 1
            self._positions(slot, count)
            assert bool(sample) == (slot.computed == len(slot.tokens)), "the last chunk samples, no other does"
            if slot.sampling.prompt_logprobs >= 0:
                last = min(start + count, slot.prompt_tokens - 1)
                if part := score_positions(slot, start + 1, last):
                    prompt_scores.append(RowLogprobs(row=row, logprobs=part))
            if sample:
                self._sample(slot, tokens, scores)
        blocks = frozenset(block for index in used for block in self._slots[index].table)
        self._flying.append(Touched(plan.step, frozenset(used), blocks))
        self.rows += len(used)
        return StepResult(
            step=plan.step,
            epoch=plan.epoch,
            token_ids=np.array(tokens, np.int32).tobytes(),
            logprobs=tuple(scores),
            prompt_logprobs=tuple(prompt_scores),
        )

    def _positions(self, slot: Slot, count: int) -> None:
        """Attend to everything before, then write the KV of `count` positions."""
        size, end = self._size, slot.computed + count
        assert end <= len(slot.tokens), "positions of unknown tokens"
        assert end <= len(slot.table) * size, "positions beyond the block table"
        for start in range(0, slot.computed, size):
            stop = min(start + size, slot.computed)
            page = self._pages[slot.table[start // size]]
            assert page[: stop - start] == slot.hashes[start:stop], "KV of another prefix"
        for position in range(slot.computed, end):
            self._pages[slot.table[position // size]][position % size] = slot.hashes[position]
        slot.computed = end

    def _sample(self, slot: Slot, tokens: list[int], scores: list[RowLogprobs]) -> None:
        last = self._pages[slot.table[(slot.computed - 1) // self._size]][(slot.computed - 1) % self._size]
        outputs = len(slot.tokens) - slot.prompt_tokens
        assert slot.sampling.max_tokens is not None
        assert outputs < slot.sampling.max_tokens, "a length stop is known ahead"
        assert len(slot.tokens) < self._longest, "a length stop is known ahead"
        token = choose(last, slot.seed, slot.sampling, outputs, slot.nature)
        if slot.sampling.logprobs >= 0:
            value, rank = logprob(last, token)
            scores.append(RowLogprobs(row=len(tokens), logprobs=one_row([token], [value], [rank])))
        tokens.append(token)
        slot.tokens.append(token)
        slot.hashes.append(hash((last, token, 0x5EED)))


def one_row(tokens: list[int], values: list[float], ranks: list[int]) -> Logprobs:
    return Logprobs(
        width=1,
        token_ids=np.array(tokens, np.int32).tobytes(),
        values=np.array(values, np.float32).tobytes(),
        ranks=np.array(ranks, np.int32).tobytes(),
    )


def score_positions(slot: Slot, first: int, last: int) -> Logprobs | None:
    """Log-probabilities of the prompt's tokens at positions first..last."""
    if last < first:
        return None
    found = [logprob(slot.hashes[position - 1], slot.tokens[position]) for position in range(first, last + 1)]
    return one_row(slot.tokens[first : last + 1], [value for value, _ in found], [rank for _, rank in found])
