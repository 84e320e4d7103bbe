"""Runs steps: a plan in, the work enqueued on the device, and a result out.

`launch` never waits for the device, so that step k+1 can be launched before the result of step k is read: input ids are
gathered from the slots' own tokens, where the step before wrote what it sampled, and everything runs in stream order.
On a CPU the same code runs to the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_core.execution.parameters import IntArray
from engine_core.execution.results import Columns, Launched, LogprobRows, logprob_rows, row_logprobs
from engine_core.execution.slots import SlotSizes, SlotTable, StepRows, integers
from engine_core.execution.transfer import Download, Upload
from engine_core.models.spec import ModelSpec
from kernels.attention import AttentionBatch
from kernels.sampling import SamplingBatch, sample
from protocol.steps import StepPlan, StepResult

CACHE_LINE = 64  # bytes
PROMPT_LOGITS_BYTES = 64 << 20  # of one piece of a chunk whose prompt's log-probabilities are wanted



class Network(Protocol):
    """What the runner asks of a model."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, cache: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Hidden states of the step's tokens: [tokens, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocabulary], the caller's to change."""
        ...


@dataclass(frozen=True)
class RunnerOptions:
    """What the runner is made for."""

    device: torch.device
    dtype: torch.dtype
    blocks: int  # usable ones, numbered 1..blocks
    block_size: int
    max_model_len: int
    max_num_seqs: int


@dataclass(frozen=True)
class DeviceRows:
    """A step's rows on the device."""

    input_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int64 [tokens]
    attention: AttentionBatch
    last: Tensor | None  # int64 [sampled rows], their last tokens; None: every token is one
    sampled_positions: Tensor  # int64 [sampled rows], index in its sequence of the token to be sampled
    sampled_places: Tensor  # int64 [sampled rows], where it goes in the flat token table


@dataclass(frozen=True)
class PromptSpan:
    """Prompt positions whose log-probabilities a chunk gives."""

    chunk: int  # index among the plan's chunks
    first: int  # index in the step of the token before the first of them
    count: int
    target: int  # flat place of the first of them in the token table
    width: int


class RunnerStatistics(msgspec.Struct, frozen=True):
    """Totals since the start."""

    steps: int
    tokens: int  # positions computed
    sampled: int
    failed: int  # rows that got no token


class Runner:
    """One executor's steps over one model, its slots and its KV pages."""

    def __init__(self, model: Network, spec: ModelSpec, options: RunnerOptions) -> None:
        self.options = options
        self.sizes = SlotSizes(options.max_num_seqs, options.max_model_len, options.block_size, spec.vocab_size)
        self._model = model
        self._upload = Upload(options.device)
        self._download = Download(options.device)
        self._slots = SlotTable(self.sizes, self._upload)
        self._cache = [(pages(spec, options), pages(spec, options)) for _ in range(spec.layers)]
        self._batch = SamplingBatch(greedy=None)
        self._batch_slots = np.zeros(0, np.int64)  # what `_batch` was made for
        self._batch_version = 0
        self._last_done: torch.cuda.Event | None = None
        self._steps = self._tokens = self._sampled = self._failed = 0

    def reset(self) -> None:
        """Forget every request. Steps still in flight end harmlessly."""
        self._slots.reset()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Enqueue one step. Plans are launched in order; a plan is trusted."""
        began = self._mark()
        self._slots.apply(plan)
        rows = self._slots.rows(plan)
        self._steps += 1
        self._tokens += len(rows.positions)
        self._sampled += len(rows.sampled)
        found = self._compute(plan, rows) if len(rows.slots) else Columns(torch.zeros(0, dtype=torch.int32))
        fetched, done = self._download.fetch(found.tensors())
        return Launched(plan.step, plan.epoch, found.replaced(fetched), found, began, done)

    def collect(self, launched: Launched) -> StepResult:
        """The result of a step, waiting for it. `busy` and `waited` are the device's own, 0 on a CPU."""
        busy = waited = 0.0
        if launched.began is not None and launched.done is not None:
            launched.done.synchronize()
            busy = launched.began.elapsed_time(launched.done) / 1e3
            if self._last_done is not None:
                waited = max(0.0, self._last_done.elapsed_time(launched.began) / 1e3)
            self._last_done = launched.done
        tokens = launched.fetched.tokens.numpy()
        failed = frozenset(np.flatnonzero(tokens < 0).tolist())
        self._failed += len(failed)
        sampled = row_logprobs(launched.fetched.logprobs)
        return StepResult(
            step=launched.step,
            epoch=launched.epoch,
            token_ids=tokens.tobytes(),
            logprobs=tuple(row for row in sampled if row.row not in failed),
            prompt_logprobs=tuple(row_logprobs(launched.fetched.prompt_logprobs)),
            busy=busy,
            waited=waited,
        )

    def statistics(self) -> RunnerStatistics:
        return RunnerStatistics(self._steps, self._tokens, self._sampled, self._failed)

    def _compute(self, plan: StepPlan, rows: StepRows) -> Columns:
        on_device = self._send(rows)
        hidden = self._model.forward(on_device.input_ids, on_device.positions, on_device.attention, self._cache)
        spans = self._prompt_spans(plan, rows) if plan.chunks else []
        prompts = tuple(self._prompt_logprobs(hidden, span) for span in spans)
        if not len(rows.sampled):
            return Columns(torch.zeros(0, dtype=torch.int32), (), prompts)
        slots = rows.slots[rows.sampled]
        logits = self._model.logits(hidden if on_device.last is None else hidden[on_device.last])
        wanted = self._raw_logits(logits, slots)
        batch = self._sampling(slots)
        tokens = sample(logits, batch, self._slots.history, on_device.sampled_positions).int()
        self._slots.write(on_device.sampled_places, tokens, batch.penalties)
        found = tuple(
            logprob_rows(tuple(at.tolist()), 1, raw, tokens[index], width) for width, at, index, raw in wanted
        )
        return Columns(tokens, found, prompts)

    def _send(self, rows: StepRows) -> DeviceRows:
        starts = np.zeros(len(rows.slots) + 1, np.int32)
        starts[1:] = rows.ends
        next_positions = rows.context[rows.sampled]
        arrays: list[NDArray[Any]] = [
            rows.token_places,
            rows.positions,
            rows.cache_places,
            rows.slots.astype(np.int32),
            starts,
            rows.context.astype(np.int32),
            next_positions,
            rows.slots[rows.sampled] * self._slots.row_length + next_positions,
        ]
        every = len(rows.sampled) == len(rows.positions)
        if not every:
            arrays.append(rows.ends[rows.sampled] - 1)
        token_places, positions, cache_places, slots, query_start, context, *sampled = self._upload.send(arrays)
        attention = AttentionBatch(
            query_start=query_start,
            context=context,
            slots=slots,
            block_tables=self._slots.block_tables,
            slot_mapping=cache_places,
            max_query=int(rows.counts.max()),
            max_context=int(rows.context.max()),
        )
        return DeviceRows(
            input_ids=self._slots.tokens.view(-1).index_select(0, token_places),
            positions=positions,
            attention=attention,
            last=None if every else sampled[2],
            sampled_positions=sampled[0],
            sampled_places=sampled[1],
        )

    def _sampling(self, slots: IntArray) -> SamplingBatch:
        """How these slots are sampled: made anew only when they, or a request in one of them, changed."""
        if self._batch_version != self._slots.version or not np.array_equal(self._batch_slots, slots):
            self._batch = self._slots.parameters.batch(slots)
            self._batch_slots, self._batch_version = slots, self._slots.version
        return self._batch

    def _raw_logits(self, logits: Tensor, slots: IntArray) -> list[tuple[int, IntArray, Tensor, Tensor]]:
        """Copies of the logits whose log-probabilities are wanted: width, rows, the same on the device, logits."""
        widths = self._slots.parameters.logprobs[slots]
        found: list[tuple[int, IntArray, Tensor, Tensor]] = []
        if widths.max() < 0:
            return found
        for width in np.unique(widths[widths >= 0]).tolist():
            rows = np.flatnonzero(widths == width)
            (index,) = self._upload.send([rows])
            found.append((width, rows, index, logits[index]))
        return found

    def _prompt_spans(self, plan: StepPlan, rows: StepRows) -> list[PromptSpan]:
        """Positions start+1 .. start+count of each chunk that are prompt, where the request wants them."""
        widths = self._slots.parameters.prompt_logprobs[rows.slots[rows.decoding :]]
        if (widths < 0).all():
            return []
        spans = []
        firsts = (rows.ends - rows.counts)[rows.decoding :].tolist()
        for chunk, (slot, start, count, _) in enumerate(integers(plan.chunks).reshape(-1, 4).tolist()):
            count = min(count, int(self._slots.prompt_tokens[slot]) - 1 - start)
            if widths[chunk] >= 0 and count > 0:
                target = slot * self._slots.row_length + start + 1
                spans.append(PromptSpan(chunk, firsts[chunk], count, target, int(widths[chunk])))
        return spans

    def _prompt_logprobs(self, hidden: Tensor, span: PromptSpan) -> LogprobRows:
        """A chunk's prompt through the output embedding, in pieces of bounded size."""
        targets = self._slots.tokens.view(-1)[span.target : span.target + span.count]
        size = max(1, PROMPT_LOGITS_BYTES // (4 * self.sizes.vocabulary))
        pieces = []
        for low in range(0, span.count, size):
            high = min(low + size, span.count)
            logits = self._model.logits(hidden[span.first + low : span.first + high])
            pieces.append(logprob_rows((span.chunk,), high - low, logits, targets[low:high], span.width))
        return LogprobRows(
            (span.chunk,),
            span.count,
            torch.cat([piece.token_ids for piece in pieces]),
            torch.cat([piece.values for piece in pieces]),
            torch.cat([piece.ranks for piece in pieces]),
        )

    def _mark(self) -> torch.cuda.Event | None:
        if self.options.device.type == "cpu":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def pages(spec: ModelSpec, options: RunnerOptions) -> Tensor:
    """Keys or values of one layer, zero: [blocks + 1, block_size, kv_heads, head_dim]. Block 0 is scratch.

    On a CPU the memory is the kernel's promise: it becomes real as blocks are first written.
    """
    shape = (options.blocks + 1, options.block_size, spec.kv_heads, spec.head_dim)
    if options.device.type != "cpu":
        return torch.zeros(shape, dtype=options.dtype, device=options.device)
    size = math.prod(shape) * options.dtype.itemsize
    promised = np.zeros(size + CACHE_LINE, np.uint8)
    start = -promised.ctypes.data % CACHE_LINE
    return torch.from_numpy(promised[start : start + size]).view(options.dtype).view(shape)
