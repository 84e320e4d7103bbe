"""Log-probabilities of prompts, chunk by chunk, for the requests that want them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine_core.execution.forward import Network
from penstock.engine_core.execution.results import PromptScores
from penstock.engine_core.execution.rows import HostRows, integers
from penstock.engine_core.execution.slots import SlotTable
from penstock.engine_core.execution.transfer import Upload
from penstock.kernels.logprobs import TokenLogprobs, token_logprobs
from penstock.protocol.steps import StepPlan

PIECE_BYTES = 64 << 20  # of the fp32 logits that are looked at together


@dataclass(frozen=True)
class PromptSpan:
    """Prompt positions whose log-probabilities a chunk gives."""

    chunk: int  # index among the plan's chunks
    slot: int
    first: int  # index in the step of the token before the first of them
    start: int  # position of the first of them
    count: int
    width: int


def prompt_spans(plan: StepPlan, rows: HostRows, slots: SlotTable) -> Iterator[PromptSpan]:
    """Positions start+1 .. start+count of each chunk that are prompt, where the request wants them."""
    widths = slots.parameters.prompt_logprobs[rows.slots[rows.decoding :]]
    if (widths < 0).all():
        return
    firsts = rows.query_start[rows.decoding :].tolist()
    for chunk, (slot, start, count, _) in enumerate(integers(plan.chunks).reshape(-1, 4).tolist()):
        count = min(count, int(slots.prompt_tokens[slot]) - 1 - start)
        if widths[chunk] >= 0 and count > 0:
            yield PromptSpan(chunk, slot, firsts[chunk], start + 1, count, int(widths[chunk]))


def prompt_scores(model: Network, hidden: Tensor, span: PromptSpan, slots: SlotTable, upload: Upload) -> PromptScores:
    """A chunk's prompt through the output embedding, in pieces of bounded size. hidden: `[tokens, hidden]`."""
    targets = slots.history.tokens[span.slot, span.start : span.start + span.count]
    (width,) = upload.send((np.array([span.width], np.int32),))
    only = torch.zeros(span.count, dtype=torch.int32, device=upload.device)  # every token asks for that width
    size = max(1, PIECE_BYTES // (4 * slots.sizes.vocabulary))
    pieces = []
    for low in range(0, span.count, size):
        high = min(low + size, span.count)
        logits = model.logits(hidden[span.first + low : span.first + high])
        pieces.append(token_logprobs(logits, targets[low:high], only[low:high], width))
    scores = TokenLogprobs(
        torch.cat([piece.ids for piece in pieces]),
        torch.cat([piece.values for piece in pieces]),
        torch.cat([piece.ranks for piece in pieces]),
    )
    return PromptScores(span.chunk, scores, span.width)
