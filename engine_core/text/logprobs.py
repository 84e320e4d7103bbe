"""Log-probabilities of token ids → of tokens as clients see them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.engine_core.text.detokenizer import detokenizer
from penstock.engine_core.tokenizer.vocabulary import Vocabulary
from penstock.protocol.columns import unpack, unpack_floats
from penstock.protocol.messages import Logprobs, PositionLogprobs, TokenLogprob

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say


def positions(vocabulary: Vocabulary, logprobs: Logprobs, offsets: Sequence[int]) -> list[PositionLogprobs]:
    """One entry per position; `offsets` are where the positions' tokens begin in the choice's text, in characters.

    A token that cannot come is not among the best.
    """
    width = logprobs.width
    ids = unpack("i", logprobs.token_ids)
    values = unpack_floats(logprobs.values)
    ranks = unpack("i", logprobs.ranks)
    found = []
    for position, (rank, offset) in enumerate(zip(ranks, offsets, strict=False)):
        at = position * width
        best = [i for i in range(at + 1, at + width) if values[i] > -math.inf]
        chosen, *top = [token_logprob(vocabulary, ids[i], values[i]) for i in (at, *best)]
        found.append(PositionLogprobs(chosen, rank, tuple(top), offset))
    return found


def token_logprob(vocabulary: Vocabulary, token_id: int, value: float) -> TokenLogprob:
    raw = vocabulary.raw(token_id)
    return TokenLogprob(raw.decode(errors="replace"), token_id, max(value, LOWEST), raw)


def prompt_positions(
    vocabulary: Vocabulary, logprobs: Logprobs, token_ids: Sequence[int], *, skip_special_tokens: bool
) -> tuple[PositionLogprobs | None, ...]:
    """One entry per prompt token; None at position 0, which nothing predicts."""
    stream = detokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
    offsets, length = [], 0
    for token_id in token_ids:
        offsets.append(length + stream.held())
        length += len(stream.push(token_id))
    return (None, *positions(vocabulary, logprobs, offsets[1:]))
