"""The output of a step on the device, and its conversion to a `StepResult`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine_core.execution.adapter_slots import AdapterSlots
from penstock.engine_core.execution.draft_model import DraftRows
from penstock.engine_core.execution.forward import Network
from penstock.engine_core.execution.input_batch import HostRows, SlotTable
from penstock.engine_core.execution.transfer import Upload
from penstock.engine_core.models.decoder import Decoder
from penstock.kernels.logprobs import token_logprobs
from penstock.kernels.records import TokenLogprobs
from penstock.protocol.messages import Pooling
from penstock.protocol.outputs import Logprobs
from penstock.protocol.step_columns import chunk_table
from penstock.protocol.steps import RowLogprobs, RowVector, SlotStart, StepPlan

CHUNK = 64  # prompts whose logits are computed together
CHUNK_BYTES = 64 << 20  # of fp32 logits that are computed together


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of the prompt positions of one chunk, in order."""

    chunk: int  # index among the plan's chunks
    scores: TokenLogprobs
    width: int


@dataclass(frozen=True)
class Output:
    """The tensors of a result, on the device or on the host."""

    tokens: Tensor | None  # int32 [entries], -1 where there is none, REJECTED behind a wrong draft; None: no entries
    scores: TokenLogprobs | None  # of the entries
    prompts: tuple[PromptScores, ...]
    drafts: Tensor | None = None  # int32 [told rows, turns], those that the device made after the step
    vectors: Vectors | None = None  # of prompts that pool

    def tensors(self) -> list[Tensor]:
        found = [tensor for tensor in (self.tokens, self.drafts) if tensor is not None]
        for part in (self.scores, *(prompt.scores for prompt in self.prompts)):
            if part is not None:
                found += [part.ids, part.values, part.ranks]
        return found if self.vectors is None else [*found, self.vectors.values]

    def replaced(self, tensors: Sequence[Tensor]) -> Output:
        """The same output over other tensors, in the order of `tensors()`."""
        rest = iter(tensors)
        tokens, drafts = (None if tensor is None else next(rest) for tensor in (self.tokens, self.drafts))
        scores = None if self.scores is None else TokenLogprobs(next(rest), next(rest), next(rest))
        prompts = (replace(prompt, scores=TokenLogprobs(next(rest), next(rest), next(rest))) for prompt in self.prompts)
        found = tuple(prompts)
        vectors = None if self.vectors is None else replace(self.vectors, values=next(rest))
        return Output(tokens, scores, found, drafts, vectors)


@dataclass(frozen=True)
class Launched:
    """A step in flight. `fetched` is on the host once `done` has happened; `held` keeps its device originals alive."""

    step: int
    epoch: int
    widths: NDArray[np.int64] | None  # [entries], log-probabilities wanted by each, -1 none; None: by none
    fetched: Output
    held: Output
    began: torch.cuda.Event | None
    done: torch.cuda.Event | None  # None: already
    ended: torch.cuda.Event | None = None  # the step itself; `done` may be later by the drafting behind it
    drafts: DraftRows | None = None  # what is drafted behind it
    drafted: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # around the drafting
    halves: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # around the wait for masks

    @property
    def finished(self) -> bool:
        """Whether collecting would not wait."""
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]


def entry_logprobs(launched: Launched, tokens: NDArray[np.int32]) -> Iterator[RowLogprobs]:
    """The message form of the entries that want it and have a token."""
    widths, scores = launched.widths, launched.fetched.scores
    if widths is None or scores is None:
        return
    for entry in ((widths >= 0) & (tokens >= 0)).nonzero()[0].tolist():
        yield RowLogprobs(entry, message(scores, slice(entry, entry + 1), int(widths[entry])))


def prompt_logprobs(prompts: Sequence[PromptScores]) -> Iterator[RowLogprobs]:
    """The message form of prompt positions."""
    for prompt in prompts:
        yield RowLogprobs(prompt.chunk, message(prompt.scores, slice(None), prompt.width))


def told_drafts(launched: Launched) -> bytes:
    drafts = launched.fetched.drafts
    if drafts is None or launched.drafts is None:
        return b""
    counts = launched.drafts.told_counts
    return b"".join(row[:count].tobytes() for row, count in zip(drafts.numpy(), counts.tolist(), strict=True))


def message(scores: TokenLogprobs, lines: slice, width: int) -> Logprobs:
    """Some lines, with the `width` best of each."""
    return Logprobs(
        width=1 + width,
        token_ids=scores.ids[lines, : 1 + width].numpy().tobytes(),
        values=scores.values[lines, : 1 + width].numpy().tobytes(),
        ranks=scores.ranks[lines].numpy().tobytes(),
    )


@dataclass(frozen=True)
class StepTimes:
    """Seconds; all zero on a CPU, where this package has no clock."""

    busy: float = 0.0  # from the step's beginning to its result, without the wait for masks
    waited: float = 0.0  # before the step, and in it for masks
    drafting: float = 0.0  # behind the step before


NO_TIMES = StepTimes()


def step_times(launched: Launched, last: Launched | None) -> StepTimes:
    """Of a step that is over; `last` is the one before it."""
    if launched.began is None or launched.ended is None:
        return StepTimes()
    busy: float = launched.began.elapsed_time(launched.ended) / 1e3
    waited = 0.0
    if launched.halves is not None:
        computed, went_on = launched.halves
        waited = computed.elapsed_time(went_on) / 1e3
    if last is None or last.ended is None:
        return StepTimes(busy - waited, waited)
    before, drafting = last.ended, 0.0
    if last.drafted is not None:
        began, before = last.drafted
        drafting = began.elapsed_time(before) / 1e3
    return StepTimes(busy - waited, waited + max(0.0, before.elapsed_time(launched.began) / 1e3), drafting)


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
    """Pooling requests of the slots, and partial results of those whose prompts come in several chunks. heads: the
    model whose heads are behind pooling; None: a vector is the pooled state."""

    def __init__(self, heads: Decoder | None = None) -> None:
        self._heads = heads
        self._asked: dict[int, tuple[Pooling, int]] = {}  # by slot: what is wanted, tokens of the prompt
        self._kept: dict[int, Tensor] = {}  # by slot: fp32 [hidden], the sum so far or the first position's state

    def start(self, starts: Sequence[SlotStart]) -> None:
        """These slots have new requests: drop the results of their last ones."""
        for start in starts:
            self._asked.pop(start.slot, None)
            self._kept.pop(start.slot, None)
            if start.pooling is not None:
                assert not (start.pooling.whole and start.computed), "its first positions are not computed here"
                self._asked[start.slot] = start.pooling, start.prompt_tokens

    def reset(self) -> None:
        self._asked.clear()
        self._kept.clear()

    def token_types(self, plan: StepPlan, rows: HostRows) -> NDArray[np.int32] | None:
        """Of each token of a step with chunks, 1 in the second text of a pair. None: all are 0."""
        found = None
        for span in self._spans(plan, rows) if self._asked else ():
            if span.pooling.second:
                found = np.zeros(rows.tokens, np.int32) if found is None else found
                found[span.first + max(0, span.pooling.second - span.start) : span.first + span.count] = 1
        return found

    def take(
        self, plan: StepPlan, rows: HostRows, hidden: Tensor, model: Network, upload: Upload,
        adapters: AdapterSlots | None = None,
    ) -> Vectors | None:  # fmt: skip
        """Pool the hidden states of a step, `[tokens, hidden]`. None: no pooling prompt ends in it. adapters: if a row
        has one."""
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
            states |= chosen_logits(lasts, found, model, upload, adapters)
        for span in ended:
            if span.pooling.whole:
                kept = self._kept.pop(span.slot)
                states[span.chunk] = kept / span.length if span.pooling.kind == "mean" else kept
            del self._asked[span.slot]
        if self._heads is not None:
            states |= behind_heads(ended, states, self._heads)
        vectors = [states[span.chunk] for span in ended]
        return Vectors(
            chunks=tuple(span.chunk for span in ended),
            widths=tuple(len(vector) for vector in vectors),
            values=torch.cat(vectors),
        )

    def _spans(self, plan: StepPlan, rows: HostRows) -> list[Span]:
        firsts = rows.query_start[rows.decoding :].tolist()
        found = []
        for chunk, (slot, start, count, _) in enumerate(chunk_table(plan.chunks).tolist()):
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


def behind_heads(ended: Sequence[Span], states: Mapping[int, Tensor], model: Decoder) -> dict[int, Tensor]:
    """By chunk, what the model makes of pooled states, [numbers] each."""
    found: dict[int, Tensor] = {}
    for classify in (False, True):
        chunks = [span.chunk for span in ended if span.pooling.kind != "logits" and span.pooling.classify is classify]
        if chunks:
            made = model.pooled(torch.stack([states[chunk] for chunk in chunks]), classify=classify)
            found |= dict(zip(chunks, made.unbind(), strict=True))
    return found


def chosen_logits(
    lasts: Sequence[Span], states: Tensor, model: Network, upload: Upload, adapters: AdapterSlots | None
) -> dict[int, Tensor]:
    """By chunk, of those that want logits: fp32 [tokens]. states: `[lasts, hidden]`."""
    groups: dict[tuple[int, ...], list[int]] = {}  # those that want the same
    for number, span in enumerate(lasts):
        if span.pooling.kind == "logits":
            groups.setdefault(span.pooling.tokens, []).append(number)
    found: dict[int, Tensor] = {}
    for tokens, numbers in groups.items():
        (wanted,) = upload.send((np.array(tokens, np.int32),))
        for low in range(0, len(numbers), CHUNK):
            some = numbers[low : low + CHUNK]
            own = np.array([lasts[number].slot for number in some], np.int32)
            index, slots = upload.send((np.array(some, np.int32), own))
            with nullcontext() if adapters is None else adapters.over_slots(slots):
                logits = model.logits(states.index_select(0, index)).index_select(1, wanted).float()
            found |= {lasts[number].chunk: row for number, row in zip(some, logits.unbind(), strict=True)}
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
    for chunk, (slot, start, count, _) in enumerate(chunk_table(plan.chunks).tolist()):
        count = min(count, int(slots.prompt_tokens[slot]) - 1 - start)
        if widths[chunk] >= 0 and count > 0:
            yield PromptSpan(chunk, slot, firsts[chunk], start + 1, count, int(widths[chunk]))


def prompt_scores(
    model: Network, hidden: Tensor, span: PromptSpan, slots: SlotTable, upload: Upload,
    adapters: AdapterSlots | None = None,
) -> PromptScores:  # fmt: skip
    """Log-probabilities of a chunk's prompt, computed in parts of bounded size. hidden: `[tokens, hidden]`."""
    targets = slots.history.tokens[span.slot, span.start : span.start + span.count]
    (width,) = upload.send((np.array([span.width], np.int32),))
    only = torch.zeros(span.count, dtype=torch.int32, device=upload.device)  # every token asks for that width
    size = max(1, CHUNK_BYTES // (4 * slots.sizes.vocabulary))
    parts = []
    for low in range(0, span.count, size):
        high = min(low + size, span.count)
        own = torch.full((high - low,), span.slot, dtype=torch.int32, device=upload.device)
        with nullcontext() if adapters is None else adapters.over_slots(own):
            logits = model.logits(hidden[span.first + low : span.first + high])
        parts.append(token_logprobs(logits, targets[low:high], only[low:high], width))
    scores = TokenLogprobs(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.values for part in parts]),
        torch.cat([part.ranks for part in parts]),
    )
    return PromptScores(span.chunk, scores, span.width)
