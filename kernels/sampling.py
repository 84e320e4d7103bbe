"""From logits to tokens, one path whose parameters are per row: kernels on a GPU, plain torch and numpy on a CPU.

What is done to an entry, in this order (the order of vLLM, whose clients expect it):

1. the grammar's mask, allowed_token_ids, bad_words, min_tokens and logit_bias are added to the logits (a forbidden
   token gets -inf);
2. penalties: repetition over prompt and output (positive logits are divided by it, negative ones multiplied), then
   frequency and presence over the output;
3. a greedy entry takes its best token, the lowest id among equals; any other is divided by its temperature;
4. min_p keeps tokens at least min_p times as likely as the best; top_k the k best; top_p, over what those two left and
   renormalised, the smallest set of best tokens whose mass reaches p. A token equal to the last one kept is kept too,
   so a set is `logits >= floor` and never depends on how a sort treats equals;
5. the entry takes the kept token with the largest logit plus Gumbel noise (Gumbel-max: an exact draw), the noise being
   the counter RNG's for (seed, position, token); see kernels/random.py.

An entry's token depends on nothing but the entry: work for a feature is skipped where nobody uses it, and the way a
vocabulary is cut among programs follows from its size alone. So the sampler is the same whatever shares the batch, and
a batch-invariant server needs no other. An entry with a logit that is NaN or infinite, or with every token forbidden,
gives token -1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels import adjustment
from penstock.kernels.chip import chip_of
from penstock.kernels.random import GUMBEL_MAX, GUMBEL_MIN, acceptance_words, gumbel_at, gumbel_rows
from penstock.kernels.records import (
    ADJUSTED,
    DRAWS,
    NO_DRAFT,
    NO_MASK,
    OWN_DRAFT,
    PENALTIES,
    REJECTED,
    Chosen,
    Entries,
    SlotHistory,
    SlotSampling,
    threshold,
)

GREEDY_BELOW = 1e-5  # a temperature below this is greedy: float32 could not tell its distribution from the best token


@dataclass(frozen=True)
class Draws:
    """The rows that are not greedy."""

    seeds: Tensor  # int64 [draws], 64 bits
    temperature: Tensor  # float32 [draws]
    min_p: Tensor  # float32 [draws], 0 keeps all
    top_k: Tensor  # int64 [draws], 0 keeps all
    top_p: Tensor  # float32 [draws]
    largest_top_k: int  # over the rows, 0 when none has one
    nucleus: bool  # whether any row has top_p below 1


def sample_entries(logits: Tensor, entries: Entries, sampling: SlotSampling, history: SlotHistory) -> Chosen:
    """The token of every entry, and the logits that steps 1 and 2 changed.

    logits: [entries, vocabulary] in the model's type, which stay as they are. On a GPU nothing waits for the device or
    depends in size on data, so that a graph may hold it.
    """
    if chip_of(logits.device).runs_triton:
        from penstock.kernels.sampling_triton import choose_tokens

        return choose_tokens(logits, entries, sampling, history)
    return sample_rows(logits, entries, sampling, history)


def sample_rows(logits: Tensor, entries: Entries, sampling: SlotSampling, history: SlotHistory) -> Chosen:
    """The reference of `sample_entries`, on a CPU: it looks at what the slots use and leaves out the rest."""
    slots, masks = entries.slots.numpy(), entries.masks.numpy()
    uses = sampling.uses.numpy()[slots]
    given, logits = logits, logits.float()
    peak = logits.amax(-1)  # [entries]
    alive = (peak - logits.amin(-1)).isfinite()  # NaN and either infinity end up in the difference
    adjusted = None
    if (uses & ADJUSTED).any() or (masks != NO_MASK).any():
        logits = logits.clone() if logits is given else logits
        adjustment.adjust(logits, uses, masks, entries, sampling, history)
        adjusted = logits
        peak = logits.amax(-1)
        alive &= peak > -math.inf
    draws_here = uses & DRAWS
    if not draws_here.any():
        return Chosen(torch.where(alive, logits.max(-1).indices, -1).int(), adjusted)
    chosen = torch.empty(len(logits), dtype=torch.int64)
    greedy, drawn = (torch.from_numpy((draws_here == want).nonzero()[0]) for want in (0, DRAWS))
    if len(greedy):
        chosen[greedy] = logits[greedy].max(-1).indices
    slots_drawn = entries.slots.index_select(0, drawn)
    draws = slot_draws(slots_drawn, sampling)
    relative = (logits[drawn] - peak[drawn, None]).div_(draws.temperature[:, None])  # [draws, vocabulary]
    positions = (history.known[slots_drawn] + entries.depth[drawn]).long()
    chosen[drawn] = draw(relative, draws, positions)
    return Chosen(torch.where(alive, chosen, -1).int(), adjusted)


def slot_draws(slots: Tensor, sampling: SlotSampling) -> Draws:
    """The parameters of some entries from their slots."""
    top_k, top_p = sampling.top_k.index_select(0, slots).long(), sampling.top_p.index_select(0, slots)
    return Draws(
        seeds=sampling.seed.index_select(0, slots),
        temperature=sampling.temperature.index_select(0, slots),
        min_p=sampling.min_p.index_select(0, slots),
        top_k=top_k,
        top_p=top_p,
        largest_top_k=int(top_k.max()),
        nucleus=bool((top_p < 1.0).any()),
    )


def draw(logits: Tensor, draws: Draws, positions: Tensor) -> Tensor:
    """Steps 4 and 5: int64 [draws]. logits: divided by the temperature, each row's best 0: [draws, vocabulary]."""
    floor = floors(logits, draws)
    # Noise is bounded, so a token further below the best than its range cannot win. Where few tokens are left, drawing
    # for those alone gives the same tokens for a fraction of the work.
    candidates = logits >= floor.clamp(min=GUMBEL_MIN - GUMBEL_MAX)
    if 4 * int(candidates.count_nonzero()) < logits.numel():
        rows, tokens = candidates.nonzero(as_tuple=True)
        scores = logits[rows, tokens] + gumbel_at(draws.seeds[rows], positions[rows], tokens)
        return _first_best(rows, tokens, scores, len(logits))
    scores = gumbel_rows(draws.seeds, positions, logits.shape[1]).add_(logits)
    return scores.masked_fill_(logits < floor, -math.inf).max(-1).indices


def _first_best(rows: Tensor, tokens: Tensor, scores: Tensor, count: int) -> Tensor:
    """The token with the best score of each row, the lowest among equals; 0 for a row without candidates."""
    best = scores.new_full((count,), -math.inf).scatter_reduce_(0, rows, scores, "amax")
    winners = scores == best[rows]
    chosen = tokens.new_zeros(count)
    return chosen.scatter_reduce_(0, rows[winners], tokens[winners], "amin", include_self=False)


def floors(logits: Tensor, draws: Draws) -> Tensor:
    """The lowest logit that each row keeps under min_p, top_k, then top_p over what is left: float32 [draws, 1]."""
    floor = draws.min_p.log()[:, None]  # the best is 0, and log 0 keeps all
    if not draws.largest_top_k and not draws.nucleus:
        return floor
    most = min(draws.largest_top_k, logits.shape[1])
    ranked = descending(logits) if draws.nucleus else logits.topk(most).values
    if most:
        top_k = draws.top_k[:, None]
        kth = ranked.gather(1, (top_k - 1).clamp_(0, most - 1))
        floor = torch.where(top_k > 0, torch.maximum(floor, kth), floor)
    if draws.nucleus:
        top_p = draws.top_p[:, None]
        mass = ranked.exp().masked_fill_(ranked < floor, 0.0).cumsum(-1, dtype=torch.float64)
        last = torch.searchsorted(mass, mass[:, -1:] * top_p).clamp_(max=logits.shape[1] - 1)  # the first to reach it
        floor = torch.where(top_p < 1.0, ranked.gather(1, last), floor)
    return floor


def descending(logits: Tensor) -> Tensor:
    """Each row sorted, the best first; by numpy, whose sort of plain numbers takes a fifteenth of torch's."""
    return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)


def accept(
    tokens: Tensor, entries: Entries, sampling: SlotSampling, history: SlotHistory, rate: float | None = None
) -> None:
    """Mark the entries behind the first wrong draft of each row REJECTED, and carry the others into the history.

    tokens: int32 [entries], of `sample_entries`, changed in place. A row's accepted tokens are written behind its
    slot's known ones (0 for a failed entry, harmless to a step that was planned already; nothing past the table's end),
    added to its penalty counts where its request has penalties, and counted as known. The scratch slot stays as it is.
    One launch on a GPU, which waits for nothing. `rate`, 0 to 1, is for benchmarks: see above.
    """
    if chip_of(tokens.device).runs_triton:
        from penstock.kernels.sampling_triton import accept_rows

        accept_rows(tokens, entries, sampling, history, rate)
    else:
        accept_entries(tokens, entries, sampling, history, rate)


def accept_entries(
    tokens: Tensor, entries: Entries, sampling: SlotSampling, history: SlotHistory, rate: float | None = None
) -> None:
    """The reference of `accept`: all rows at once, by numpy."""
    found, slots, depth = tokens.numpy(), entries.slots.numpy(), entries.depth.numpy()
    kept = slots < len(history.known) - 1
    if depth.any():
        drafts = entries.drafts.numpy()
        if rate is None:
            right = found == drafts
        else:
            right = (found >= 0) & (drafts != NO_DRAFT) & kept_at_rate(entries, sampling, history, rate)
            found[right] = drafts[right]
        for at in depth.nonzero()[0].tolist():  # few; a row's entries stand in order
            right[at] &= right[at - 1]
            if not right[at - 1]:
                kept[at], found[at] = False, REJECTED
    stays = kept.nonzero()[0]
    slots = slots[stays]
    known = history.known.numpy()
    positions = known[slots] + depth[stays]
    new = found[stays].clip(min=0)
    inside = positions < history.tokens.shape[1]
    history.tokens.numpy()[slots[inside], positions[inside]] = new[inside]
    penalised = (sampling.uses.numpy()[slots] & PENALTIES).nonzero()[0]
    if len(penalised):
        places = torch.from_numpy(slots[penalised]).long(), torch.from_numpy(new[penalised]).long()
        history.counts.index_put_(places, history.counts.new_tensor(2), accumulate=True)
    known[slots] = positions + 1  # the deepest of a slot's comes last


def marked_entries(tokens: Tensor, entries: Entries) -> Entries:
    """The entries for a further `accept` of tokens that it has marked already, elsewhere: it keeps the same ones.

    Drafts need not be known here: each is what the token before it says, unless the token behind is REJECTED.
    """
    drafts = torch.where(tokens.roll(-1) == REJECTED, OWN_DRAFT, tokens)
    return replace(entries, drafts=drafts)


def kept_at_rate(entries: Entries, sampling: SlotSampling, history: SlotHistory, rate: float) -> NDArray[np.bool_]:
    """Whether the draft behind each entry would be kept, by its position's word. # [entries]"""
    slots = entries.slots.numpy()
    positions = (history.known.numpy()[slots] + entries.depth.numpy()).astype(np.int64)
    found: NDArray[np.bool_] = acceptance_words(sampling.seed.numpy()[slots], positions) < threshold(rate)
    return found
