"""What the clients of a simulated run saw, and whether each life ended once and with the right tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.engine_core.scheduling.lifecycle import KILLER
from penstock.protocol.messages import Finish, Pooling, Rejected
from penstock.protocol.outputs import Logprobs, TokenBatch
from penstock.protocol.steps import choice_seed
from tests.sim.grammar import FakeGuide
from tests.sim.lives import Life, World
from tests.sim.model import cells, logprob, rollout


@dataclass(slots=True)
class Seen:
    """One choice at its client."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    cached: int | None = None
    scores: list[float] = field(default_factory=list)
    prompt_scores: list[float] | None = None
    stop_token: int | None = None
    error: str | None = None
    vector: list[float] | None = None
    drafted: tuple[int, int] | None = None
    drafted_early: bool = False  # told before the last row
    weights: list[tuple[int, str]] = field(default_factory=list)


class Record:
    """Owner of everything delivered. Fails as soon as a choice goes on after its end."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], Seen] = {}
        self.rejected: dict[int, Rejected] = {}

    def take(self, message: TokenBatch | Rejected) -> list[tuple[int, int]]:
        """Book one message; returns the choices whose tokens it brought."""
        if isinstance(message, Rejected):
            assert message.id not in self.rejected
            self.rejected[message.id] = message
            return []
        ids = np.frombuffer(message.ids, np.int64).tolist()
        choices = np.frombuffer(message.choices, np.uint16).tolist()
        counts = np.frombuffer(message.counts, np.int32).tolist()
        finish = np.frombuffer(message.finish, np.uint8).tolist()
        tokens = np.frombuffer(message.token_ids, np.int32).tolist()
        assert len(ids) == len(choices) == len(counts) == len(finish)
        assert sum(counts) == len(tokens)
        keys = list(zip(ids, choices, strict=True))
        assert len(set(keys)) == len(keys), "one row per choice in a batch"
        at = 0
        for key, count, end in zip(keys, counts, finish, strict=True):
            seen = self.seen.setdefault(key, Seen())
            assert seen.finish == Finish.NONE, "a row after the terminal row"
            assert count or end, "a row that says nothing"
            seen.tokens += tokens[at : at + count]
            seen.finish = Finish(end)
            at += count
        for extra in message.extras:
            seen = self.seen[keys[extra.row]]
            seen.weights += extra.weights
            if extra.cached_tokens is not None:
                assert seen.cached is None
                seen.cached = extra.cached_tokens
            if extra.logprobs is not None:
                assert len(extra.logprobs.ranks) // 4 == counts[extra.row], "a position for each token of the row"
                seen.scores += floats(extra.logprobs)
            if extra.prompt_logprobs is not None:
                assert seen.prompt_scores is None
                seen.prompt_scores = floats(extra.prompt_logprobs)
            if extra.vector is not None:
                assert seen.vector is None
                seen.vector = np.frombuffer(extra.vector, np.float32).tolist()
            if extra.drafted is not None:
                assert sum(extra.drafted) >= sum(seen.drafted or ()), "they count from the choice's beginning"
                assert extra.drafted[0] >= (seen.drafted or (0,))[0]
                seen.drafted_early |= seen.finish == Finish.NONE
                seen.drafted = extra.drafted
            seen.stop_token = extra.stop_token if extra.stop_token is not None else seen.stop_token
            seen.error = extra.error or seen.error
        return keys

    def complete(self, life: Life) -> bool:
        """Whether every choice's end was delivered."""
        keys = [(life.message.id, index) for index in range(life.message.n) if not life.over(index)]
        ended = all(key in self.seen and self.seen[key].finish != Finish.NONE for key in keys)
        return ended or life.message.id in self.rejected

    def verify(self, life: Life, world: World, aborted: bool, stopped: bool, convicted: bool = False) -> None:
        """Every choice of the life ended exactly once, with the tokens that the model gives to its prompt.

        convicted: executors died often enough for one that runs alone to be taken for the cause."""
        message = life.message
        if message.id in self.rejected:
            assert life.invalid, self.rejected[message.id]
            assert self.rejected[message.id].status == 400
            assert not any((message.id, index) in self.seen for index in range(message.n))
            return
        assert not life.invalid
        if message.pooling is not None:
            verify_vector(self.seen[message.id, 0], life, message.pooling, aborted, convicted)
            return
        for index in range(message.n):
            if life.over(index):
                assert (message.id, index) not in self.seen, "a choice that had ended goes on"
                continue
            seen = self.seen[message.id, index]
            seed = choice_seed(message.sampling.seed, index)
            guide = None if message.automaton is None else FakeGuide(message.automaton)
            tokens, finish = rollout(life.prompt, message.sampling, seed, life.nature, world.max_model_len, guide)
            tokens = tokens[len(life.written(index)) :]
            assert seen.finish != Finish.NONE, "a choice without an end"
            hit = stopped and index == 0
            if seen.finish == finish and (finish != Finish.STOP or not hit):
                assert seen.tokens == tokens
                named = message.sampling.stop_token_ids
                assert seen.stop_token == (tokens[-1] if finish == Finish.STOP and tokens[-1] in named else None)
            elif seen.finish == Finish.ABORT:
                assert aborted
                assert seen.tokens == tokens[: len(seen.tokens)]
            elif seen.error == KILLER:
                assert convicted, "it killed nobody"
                assert seen.tokens == tokens[: len(seen.tokens)]
            else:
                assert seen.finish == Finish.STOP
                assert hit
                assert seen.tokens == tokens[: len(seen.tokens)]
                assert life.stop_at is not None
                assert len(seen.tokens) >= min(life.stop_at, len(tokens))
            assert (seen.error is not None) == (seen.finish in (Finish.ERROR, Finish.GRAMMAR))
            assert world.prefix_caching or not seen.cached
            assert message.stop_strings or not seen.drafted_early, "drafts are told with the last row"
            self._verify_scores(life, index, seen)

    def _verify_scores(self, life: Life, index: int, seen: Seen) -> None:
        prompt, sampling = life.prompt, life.message.sampling
        written = life.written(index)
        if written:
            assert seen.cached is None, "it was told with the first token"
        elif seen.tokens:
            assert seen.cached is not None
            assert 0 <= seen.cached < len(prompt)
        both = prompt + written + seen.tokens
        hashes = cells(life.nature.root, both, life.nature.images)
        expected = [logprob(hashes[place - 1], both[place])[0] for place in range(1, len(both))]
        if sampling.logprobs >= 0:
            assert seen.scores == expected[len(prompt) + len(written) - 1 :]
        else:
            assert not seen.scores
        if sampling.prompt_logprobs >= 0 and index == 0 and seen.tokens and not written:
            assert seen.prompt_scores == expected[: len(prompt) - 1]
        else:
            assert seen.prompt_scores is None


def verify_vector(seen: Seen, life: Life, pooling: Pooling, aborted: bool, convicted: bool) -> None:
    """A prompt's vector, made of every position that it needs, or the reason why there is none."""
    assert not seen.tokens
    if seen.error == KILLER:
        assert convicted, "it killed nobody"
        return
    fails = life.nature.fails_at == 0
    if seen.finish == Finish.ABORT:
        assert aborted
    else:
        assert seen.finish == (Finish.ERROR if fails else Finish.STOP)
    assert (seen.error is not None) == (seen.finish == Finish.ERROR)
    assert (seen.vector is not None) == (seen.finish == Finish.STOP)
    if seen.vector is not None:
        last = cells(life.nature.root, life.prompt)[-1] % 9973
        assert seen.vector == [last, len(life.prompt) if pooling.whole else 0]
        assert seen.cached is not None
        assert seen.cached < len(life.prompt)
        assert not (pooling.whole and seen.cached)


def floats(scores: Logprobs) -> list[float]:
    return np.frombuffer(scores.values, np.float32).tolist()
