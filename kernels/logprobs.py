"""Log-probabilities of tokens: under the raw distribution or, for slots with PROCESSED, under the distribution after
steps 1 to 3 of kernels/sampling.py: masks, biases, penalties, temperature.

Tokens that min_p, top_k or top_p exclude keep their log-probabilities.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.records import ADJUSTED, DRAWS, MOST, NO_MASK, PROCESSED, Processing, TokenLogprobs


def token_logprobs(
    logits: Tensor, tokens: Tensor, slots: Tensor, widths: Tensor, processing: Processing | None = None
) -> TokenLogprobs:
    """Of each token and of as many of the best as its slot asks for, which is -1 where it asks for nothing.

    logits: [tokens, vocabulary] in the model's type. tokens: int32 [tokens], negative ones are passed by. slots: int32
    [tokens], lines of `widths`, int32 [slots], at most MOST. Without `processing` all are scored by the raw logits. On
    a GPU nothing waits for the device.
    """
    if chip_of(logits.device).runs_triton:
        from penstock.kernels.logprobs_triton import score_tokens

        return score_tokens(logits, tokens, slots, widths, processing)
    return score_rows(logits, tokens, slots, widths, processing)


def score_rows(
    logits: Tensor, tokens: Tensor, slots: Tensor, widths: Tensor, processing: Processing | None
) -> TokenLogprobs:
    """The reference of `token_logprobs`, on a CPU."""
    count = len(tokens)
    ids, ranks = torch.zeros(count, 1 + MOST, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
    values = torch.full((count, 1 + MOST), -torch.inf)
    asked = np.where(tokens.numpy() < 0, -1, widths.numpy()[slots.numpy()])
    for width in np.unique(asked[asked >= 0]).tolist():
        rows = (asked == width).nonzero()[0]
        read = logits[rows].float()
        if processing is not None:
            process(read, rows, slots.numpy()[rows], processing)
        found = logprobs(read, tokens[rows].long(), width)
        columns = found[0].shape[1]
        ids[rows, :columns], values[rows, :columns], ranks[rows] = found[0].int(), found[1], found[2].int()
    return TokenLogprobs(ids, values, ranks)


def process(logits: Tensor, rows: NDArray[np.int64], slots: NDArray[np.int32], processing: Processing) -> None:
    """Put what some tokens were drawn by in the place of their raw logits, if they are scored by that.

    logits: float32 [rows, vocabulary], of the tokens `rows` in `slots`, changed in place.
    """
    uses, masks = processing.uses.numpy()[slots], processing.masks.numpy()[rows]
    processed = (uses & PROCESSED) != 0
    changed = (processed & (((uses & ADJUSTED) != 0) | (masks != NO_MASK))).nonzero()[0]
    if len(changed):
        assert processing.adjusted is not None
        logits[changed] = processing.adjusted[rows[changed]]
    drawn = (processed & ((uses & DRAWS) != 0)).nonzero()[0]
    logits[drawn] /= processing.temperature[slots[drawn]][:, None]


def logprobs(logits: Tensor, chosen: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the chosen token and of the `width` best: the plain-torch reference.

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
