"""The simulated model: a pure function of the prefix, so every request's tokens are known without scheduling anything.

The KV of one position is a hash that stands for (root, every token up to it, its position). The root stands for the
tenant: blocks shared across cache salts would give a wrong hash. A token of an image stands for its part of the image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.protocol.errors import GrammarFailure
from penstock.protocol.images import Image
from penstock.protocol.messages import Finish, Sampling

VOCAB = 64
EOS = 1


@dataclass(frozen=True, slots=True)
class Nature:
    """What the model knows of one request beyond its tokens; found by the request's seed."""

    root: int = 0
    fails_at: int = -1  # output number (from 0) whose logits are not finite
    period: int = 0  # the output mostly repeats itself after so many tokens
    adapter: str = ""
    images: tuple[Image, ...] = ()  # of its prompt


class Walk(Protocol):
    """What a rollout asks of a guide."""

    ended: bool

    @property
    def finished(self) -> bool: ...

    def allowed(self) -> frozenset[int]: ...

    def advance(self, token_ids: list[int]) -> None: ...


def cell(before: int, token: int) -> int:
    """KV of a position from the KV of the one before it. Hashes of integers do not vary between runs."""
    return hash((before, token, 0x5EED))


def root_of(salt: str, adapter: str) -> int:
    """Of a request's nature: nothing is shared with another salt or another adapter."""
    return hash((len(salt), *adapter.encode())) if adapter else len(salt)


def cells(root: int, tokens: list[int], images: tuple[Image, ...] = ()) -> list[int]:
    found, last = [], hash((root, "root" == ""))
    tokens = list(tokens)
    for image in images:
        content = int.from_bytes(image.digest)
        for at in range(image.length):
            tokens[image.position + at] = hash((content, at))
    for token in tokens:
        last = cell(last, token)
        found.append(last)
    return found


def choose(
    last: int, seed: int, sampling: Sampling, outputs: int, nature: Nature, allowed: frozenset[int] | None = None
) -> int:
    """The token that follows a prefix whose last KV is `last`, as output number `outputs`, out of those `allowed`."""
    if outputs == nature.fails_at:
        return -1
    own = seed if sampling.temperature else 0
    repeats = nature.period and hash((last, 3)) % 8
    key = hash((outputs % nature.period, own)) if repeats else hash((last, own))
    banned = {*sampling.eos_token_ids, *sampling.stop_token_ids} if outputs < sampling.min_tokens else set()
    while (token := key % VOCAB) in banned or (allowed is not None and token not in allowed):
        key = hash((key, 1))
    return token


def logprob(last: int, token: int) -> tuple[float, int]:
    """A made-up log-probability and rank of a token after a prefix."""
    value = hash((last, token)) % 997
    return -value / 64.0, value % 61 + 1


def rollout(
    prompt: list[int],
    sampling: Sampling,
    seed: int,
    nature: Nature,
    max_model_len: int,
    guide: Walk | None = None,
) -> tuple[list[int], Finish]:
    """What one choice must give when nobody interferes: its output tokens and why it ends."""
    assert sampling.max_tokens is not None
    last, output = cells(nature.root, prompt, nature.images)[-1], []
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(sampling.eos_token_ids))
    while True:
        token = choose(last, seed, sampling, len(output), nature, guide and guide.allowed())
        if token < 0:
            return output, Finish.ERROR
        output.append(token)
        last = cell(last, token)
        if token in ends and len(output) >= sampling.min_tokens:
            return output, Finish.STOP
        if len(output) == sampling.max_tokens or len(prompt) + len(output) == max_model_len:
            return output, Finish.LENGTH
        if guide is not None:
            try:
                guide.advance([token])
            except GrammarFailure:
                return output[:-1], Finish.GRAMMAR
            if guide.ended or (guide.finished and EOS not in ends):
                return output, Finish.STOP
