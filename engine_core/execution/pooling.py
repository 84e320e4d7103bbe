"""Vectors of prompts: what is kept of the slots that pool, chunk by chunk, and what becomes of it at their ends.

Sums are fp32 and each row's own, so a vector depends on its neighbours in no bit, and on its chunks by rounding alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine_core.execution.forward import Network
from penstock.engine_core.execution.rows import HostRows, integers
from penstock.engine_core.execution.transfer import Upload
from penstock.protocol.messages import Pooling
from penstock.protocol.steps import RowVector, SlotStart, StepPlan

PIECE = 64  # prompts whose logits are looked at together


@dataclass(frozen=True)
class Vectors:
    """Of the chunks of one step that end their prompts, one behind the other."""

    chunks: tuple[int, ...]  # index of each among the plan's chunks
    widths: tuple[int, ...]  # numbers of each
    values: Tensor  # fp32 [sum of widths]


@dataclass(frozen=True)
class Span:
    """One chunk of a slot that pools."""

    chunk: int  # index among the plan's chunks
    slot: int
    first: int  # index of its first token in the step
    start: int  # position of that one
    count: int
    length: int  # tokens of the prompt
    pooling: Pooling

    @property
    def ends(self) -> bool:
        return self.start + self.count == self.length


class Pools:
    """What slots want pooled, and what was kept of those whose prompts come in several chunks."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[Pooling, int]] = {}  # by slot: what is wanted, tokens of the prompt
        self._kept: dict[int, Tensor] = {}  # by slot: fp32 [hidden], the sum so far or the first position's state

    def start(self, starts: Sequence[SlotStart]) -> None:
        """These slots have new requests; all that was kept of them is gone."""
        for start in starts:
            self._asked.pop(start.slot, None)
            self._kept.pop(start.slot, None)
            if start.pooling is not None:
                assert not (start.pooling.whole and start.computed), "its first positions are not computed here"
                self._asked[start.slot] = start.pooling, start.prompt_tokens

    def reset(self) -> None:
        self._asked.clear()
        self._kept.clear()

    def take(self, plan: StepPlan, rows: HostRows, hidden: Tensor, model: Network, upload: Upload) -> Vectors | None:
        """Pool what a step has computed. hidden: `[tokens, hidden]`. None: no prompt that pools ends in it."""
        if not self._asked or not plan.chunks:
            return None
        spans = self._spans(plan, rows)
        for span in spans:
            if span.pooling.whole:
                self._keep(span, hidden)
        ended = [span for span in spans if span.ends]
        if not ended:
            return None
        lasts = [span for span in ended if not span.pooling.whole]
        states: dict[int, Tensor] = {}  # by chunk, [numbers]
        if lasts:
            (index,) = upload.send((np.array([span.first + span.count - 1 for span in lasts], np.int32),))
            found = hidden.index_select(0, index)
            states = {span.chunk: state for span, state in zip(lasts, found.float().unbind(), strict=True)}
            states |= chosen_logits(lasts, found, model, upload)
        for span in ended:
            if span.pooling.whole:
                kept = self._kept.pop(span.slot)
                states[span.chunk] = kept / span.length if span.pooling.kind == "mean" else kept
            del self._asked[span.slot]
        vectors = [states[span.chunk] for span in ended]
        return Vectors(
            chunks=tuple(span.chunk for span in ended),
            widths=tuple(len(vector) for vector in vectors),
            values=torch.cat(vectors),
        )

    def _spans(self, plan: StepPlan, rows: HostRows) -> list[Span]:
        firsts = rows.query_start[rows.decoding :].tolist()
        found = []
        for chunk, (slot, start, count, _) in enumerate(integers(plan.chunks).reshape(-1, 4).tolist()):
            if slot in self._asked:
                pooling, length = self._asked[slot]
                found.append(Span(chunk, slot, firsts[chunk], start, count, length, pooling))
        return found

    def _keep(self, span: Span, hidden: Tensor) -> None:
        """A sum of bf16 states in fp32 makes no copy of them."""
        if span.pooling.kind == "mean":
            total = hidden[span.first : span.first + span.count].sum(0, dtype=torch.float32)
            before = self._kept.get(span.slot)
            self._kept[span.slot] = total if before is None else before + total
        elif span.start == 0:
            self._kept[span.slot] = hidden[span.first].to(torch.float32, copy=True)  # the next step may overwrite it


def chosen_logits(lasts: Sequence[Span], states: Tensor, model: Network, upload: Upload) -> dict[int, Tensor]:
    """By chunk, of those that want logits: fp32 [tokens]. states: `[lasts, hidden]`."""
    groups: dict[tuple[int, ...], list[int]] = {}  # those that want the same
    for number, span in enumerate(lasts):
        if span.pooling.kind == "logits":
            groups.setdefault(span.pooling.tokens, []).append(number)
    found: dict[int, Tensor] = {}
    for tokens, numbers in groups.items():
        (wanted,) = upload.send((np.array(tokens, np.int32),))
        for low in range(0, len(numbers), PIECE):
            piece = numbers[low : low + PIECE]
            (index,) = upload.send((np.array(piece, np.int32),))
            logits = model.logits(states.index_select(0, index)).index_select(1, wanted).float()
            found |= {lasts[number].chunk: row for number, row in zip(piece, logits.unbind(), strict=True)}
    return found


def vector_rows(vectors: Vectors | None) -> tuple[RowVector, ...]:
    """The message form, of values on the host."""
    if vectors is None:
        return ()
    values, ends = vectors.values.numpy(), np.cumsum(vectors.widths).tolist()
    return tuple(
        RowVector(chunk, values[end - width : end].tobytes())
        for chunk, width, end in zip(vectors.chunks, vectors.widths, ends, strict=True)
    )
