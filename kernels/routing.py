"""Which experts a token goes to (Shazeer et al., 2017): the most likely ones of a softmax over all."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routes(NamedTuple):
    """The experts of each token, the likeliest first, and the shares in which their results are added."""

    experts: Tensor  # int32 [tokens, chosen]
    shares: Tensor  # fp32 [tokens, chosen]
    total: int  # experts that there are


def route(logits: Tensor, chosen: int, *, normalised: bool) -> Routes:
    """The `chosen` likeliest of `logits  # [tokens, experts]`, of equals the first; computed in fp32.

    Shares are probabilities, or if `normalised` add up to one. A row with NaN has some experts and shares of NaN.
    """
    if logits.is_cuda:
        from penstock.kernels.routing_triton import route_rows

        return route_rows(logits, chosen, normalised=normalised)
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    experts = probabilities.argsort(dim=-1, descending=True, stable=True)[:, :chosen]
    shares = probabilities.gather(1, experts)
    if normalised:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return Routes(experts.int(), shares, logits.shape[1])
