"""Log-probabilities of tokens under the raw distribution, before anything a request asked of its sampling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MOST = 20  # of the best that one may ask for


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of some tokens. A line of a token that nobody asked about holds nothing of meaning."""

    ids: Tensor  # int32 [tokens, 1 + MOST], the token, then the best in order, the lower id first among equals
    values: Tensor  # float32 [tokens, 1 + MOST]
    ranks: Tensor  # int32 [tokens], 1 for the best; tokens as likely as this one do not count


def token_logprobs(logits: Tensor, tokens: Tensor, slots: Tensor, widths: Tensor) -> TokenLogprobs:
    """Of each token and of as many of the best as its slot asks for, which is -1 where it asks for nothing.

    logits: [tokens, vocabulary] in the model's type. tokens: int32 [tokens], negative ones are passed by. slots: int32
    [tokens], lines of `widths`, int32 [slots], at most MOST. On a GPU nothing waits for the device.
    """
    if logits.is_cuda:
        from kernels.logprobs_triton import score_tokens

        return score_tokens(logits, tokens, slots, widths)
    return score_rows(logits, tokens, slots, widths)


def score_rows(logits: Tensor, tokens: Tensor, slots: Tensor, widths: Tensor) -> TokenLogprobs:
    """The reference of `token_logprobs`, on a CPU."""
    count = len(tokens)
    ids, ranks = torch.zeros(count, 1 + MOST, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
    values = torch.zeros(count, 1 + MOST)
    asked = np.where(tokens.numpy() < 0, -1, widths.numpy()[slots.numpy()])
    for width in np.unique(asked[asked >= 0]).tolist():
        rows = torch.from_numpy((asked == width).nonzero()[0])
        found = logprobs(logits[rows].float(), tokens[rows].long(), width)
        columns = found[0].shape[1]
        ids[rows, :columns], values[rows, :columns], ranks[rows] = found[0].int(), found[1], found[2].int()
    return TokenLogprobs(ids, values, ranks)


def logprobs(logits: Tensor, chosen: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the chosen token and of the `width` best, from raw logits: the plain-torch reference.

    logits: float32 [rows, vocabulary]. chosen: int64 [rows]. Returns token ids int64 [rows, 1 + width], values float32
    [rows, 1 + width] and the chosen token's rank int64 [rows], 1 for the best; tokens equal to it do not count.
    """
    own = logits.gather(1, chosen[:, None])
    ranks = (logits > own).sum(-1) + 1
    best = ordered(logits).topk(min(width, logits.shape[1])).values.bitwise_and_(0xFFFFFFFF).neg_().add_(0xFFFFFFFF)
    ids = torch.cat([chosen[:, None], best], 1)
    return ids, logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True), ranks


def ordered(logits: Tensor) -> Tensor:
    """Numbers in the order of the logits, the lower id the larger of equals: int64, 2**32 - 1 - id in its low half."""
    bits = (logits + 0.0).view(torch.int32)  # there is one zero now
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    return keys + (0xFFFFFFFF - torch.arange(logits.shape[1], device=logits.device))
