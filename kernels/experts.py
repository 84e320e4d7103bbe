"""Products of tokens with the experts that each was sent to: MLPs whose results are added up for each token.

A rank may hold some of the experts alone, `first` and so many after it: the others' part of a token's sum is left out.
Tokens' sums are made in one order whatever the batch, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from penstock.kernels.activation import SILU, activate
from penstock.kernels.chip import chip_of
from penstock.kernels.grouped_linear import PlaneWeight, planes_or_dense
from penstock.kernels.quantized import (
    Float4Weight,
    GroupedWeight,
    QuantizedWeight,
    expert_of,
    multiply_reference,
    outputs_axes,
    tensors_of,
)
from penstock.kernels.records import (
    NO_BIASES,
    Activation,
    ExpertAdapters,
    ExpertBiases,
    LowRankExperts,
    Routes,
    Routing,
)

Weight = Tensor | QuantizedWeight | PlaneWeight


def expert_mlp(
    x: Tensor, routes: Routes, gate_up: Weight, down: Weight, *, first: int = 0,
    biases: ExpertBiases = NO_BIASES, activation: Activation = SILU, gated: bool = True,
    adapters: ExpertAdapters | None = None, invariant: bool = False,
) -> Tensor:  # fmt: skip
    """The sum over a token's experts of share * down(activation(gate(x)) * up(x)): `[tokens, hidden]`, as x.

    gate_up is `[held, 2 * width, hidden]`, gate first, and down `[held, hidden, width]`, of experts `first` and after.
    Not `gated` it is `[held, width, hidden]`, and the sum of share * down(activation(up(x))).
    Sums are fp32, the result has x's type. `invariant` asks that a token's be to the last bit the same whatever others
    there are, on a GPU. adapters: what they add to the products of gate_up and down.
    """
    if chip_of(x.device).runs_triton:
        from penstock.kernels.experts_triton import multiply_experts

        return multiply_experts(
            x, routes, gate_up, down, first, biases, activation, gated=gated, adapters=adapters, invariant=invariant
        )
    total = torch.zeros(x.shape, dtype=torch.float32)
    pairs = routes.experts.flatten() - first
    order = pairs.argsort(stable=True)  # pairs of a token and an expert, expert by expert
    end = int((pairs < 0).sum())
    held = down.shape[0]
    for expert, count in enumerate(torch.bincount(pairs[order[end:]], minlength=held)[:held].tolist()):
        if not count:
            continue
        own = order[end : end + count]
        end += count
        tokens = own // routes.experts.shape[1]
        gate_up_bias, down_bias = (None if bias is None else bias[expert] for bias in biases)
        inner = expert_linear(x[tokens], gate_up, expert, gate_up_bias)
        if adapters is not None:
            add_low_rank(inner, x[tokens], adapters.places[tokens], adapters.gate_up, expert)
        inner = activate(inner, activation, gated=gated)
        found = expert_linear(inner, down, expert, down_bias)
        if adapters is not None:
            add_low_rank(found, inner, adapters.places[tokens], adapters.down, expert)
        total.index_add_(0, tokens, found * routes.shares.flatten()[own, None])
    return total.to(x.dtype)


def prepared(weight: Weight, dtype: torch.dtype) -> Weight:
    """Experts as kernels read them quickest, in new memory; as they are where kernels read them so, and on a CPU.
    Where no kernel can read them they become dense."""
    if not isinstance(weight, GroupedWeight | Float4Weight) or not chip_of(weight.values.device).runs_triton:
        return weight
    found = planes_or_dense(lines_of(weight), dtype)
    return found.view(weight.shape) if isinstance(found, Tensor) else found


def lines_of(weight: GroupedWeight | Float4Weight) -> GroupedWeight | Float4Weight:
    """All experts' outputs one behind the other."""
    parts = tensors_of(weight)
    flat: dict[str, Any] = {name: parts[name].flatten(0, 1) for name in outputs_axes(weight)}
    return replace(weight, **flat)


def expert_linear(x: Tensor, weight: Weight, expert: int, bias: Tensor | None) -> Tensor:
    """The product with one expert's matrix on a CPU."""
    if isinstance(weight, Tensor):
        return linear(x, weight[expert], bias)
    assert not isinstance(weight, PlaneWeight)
    return multiply_reference(x, expert_of(weight, expert), bias)


def add_low_rank(out: Tensor, x: Tensor, places: Tensor, weight: LowRankExperts, expert: int) -> None:
    """Add to `out  # [rows, outputs]`, in place, each part of b @ a @ x of its row's place, of one expert: x is
    `[rows, inputs]`, places int32 [rows]."""
    for place in sorted(set(places.tolist()) - {0}):
        own = (places == place).nonzero()[:, 0]
        a, b = (half[place - 1, expert].chunk(weight.parts) for half in (weight.a, weight.b))
        shrunk = [x[own] @ part.T for part in a]
        out.index_add_(0, own, torch.cat([part @ wide.T for part, wide in zip(shrunk, b, strict=True)], 1))


def route(
    logits: Tensor, routing: Routing, gates: Tensor | None = None, real: Tensor | None = None
) -> Routes:  # fmt: skip
    """The experts of highest score of `logits  # [tokens, experts]`, of equals the first; computed in fp32. Where
    experts are in groups (DeepSeek-V2, 2024) they are those of the token's best groups.

    Shares are scores without the bias, perhaps normalised. A row with NaN has some experts and shares of NaN. The share
    of a shared expert is 1, or the sigmoid of its one of `gates  # [tokens]`, which lie as far apart as the logits do.
    real: int32 [1], tokens behind which all others are padding, and go to expert -1, which nobody has.
    """
    if chip_of(logits.device).runs_triton:
        from penstock.kernels.routing_triton import route_rows

        return route_rows(logits, routing, gates, real)
    scores = logits.float().sigmoid() if routing.sigmoid else torch.softmax(logits, dim=-1, dtype=torch.float32)
    ranked = scores if routing.bias is None else scores + routing.bias
    if routing.groups > 1:
        ranked = limited(ranked, routing)
    experts = ranked.argsort(dim=-1, descending=True, stable=True)[:, : routing.chosen]
    shares = scores.gather(1, experts)
    if routing.normalised:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    shares, count = shares if routing.scale == 1.0 else shares * routing.scale, logits.shape[1]
    if routing.shared:
        own = torch.ones_like(shares[:, :1]) if gates is None else gates[:, None].float().sigmoid()
        experts, shares = torch.cat((experts, torch.full_like(experts[:, :1], count)), 1), torch.cat((shares, own), 1)
    experts = experts.int()
    if real is not None:
        experts[int(real) :] = -1
    return Routes(experts, shares, count)


def limited(ranked: Tensor, routing: Routing) -> Tensor:
    """The scores `[tokens, experts]` of the best groups, -inf in others."""
    grouped = ranked.view(len(ranked), routing.groups, -1)
    scores = grouped.topk(routing.group_best, dim=-1).values.sum(dim=-1)
    best = scores.argsort(dim=-1, descending=True, stable=True)[:, : routing.top_groups]
    out = torch.ones_like(scores, dtype=torch.bool).scatter_(1, best, value=False)
    return grouped.masked_fill(out[..., None], -torch.inf).flatten(1)
