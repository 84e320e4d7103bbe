"""When a choice ends by itself: end-of-sequence and stop ids, max_tokens, the model's length, non-finite logits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from penstock.engine_core.scheduling.request import Request
from penstock.protocol.messages import Finish, Sampling

NON_FINITE = -1  # the token of a row whose logits were not finite


class Suspects:
    """Token ids that may end somebody, as a count per vocabulary entry: one gather finds the rows worth a look."""

    def __init__(self, vocab_size: int) -> None:
        self._count = np.zeros(vocab_size + 1, np.int32)  # the last entry answers for NON_FINITE, which is -1
        self._count[vocab_size] = 1

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._count[token] += 1

    def remove(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._count[token] -= 1

    def among(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """# [rows] → bool [rows]"""
        return self._count[tokens] > 0

    @property
    def clean(self) -> bool:
        """Whether everything added was removed again."""
        return int(self._count.sum()) == 1


def ending_tokens(sampling: Sampling, vocab_size: int) -> frozenset[int]:
    """Ids that end a choice; those outside the vocabulary can never be sampled and are left out."""
    ids = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids + sampling.eos_token_ids
    return frozenset(token for token in ids if 0 <= token < vocab_size)


def verdict(request: Request, token: int, length: int) -> Finish:
    """Whether `token` ends a choice that has `length` tokens with it. An ending token beats the length."""
    if token in request.ending and length - request.prompt_tokens >= request.message.sampling.min_tokens:
        return Finish.STOP
    if length >= request.limit:
        return Finish.LENGTH
    return Finish.NONE
