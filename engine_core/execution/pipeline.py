"""Pipeline parallelism: hidden states go to the next stage, sampled tokens come back to every stage.

A stage's input ids and positions are gathered from its own slots, as in an undivided model, so every stage writes the
tokens of every step into its slots, in the order of the steps. It does so as late as it can: a step's tokens are in
flight while the stage runs steps that need none of them, and are received before the first step that does, or that
gives one of their slots to another request. At most `stages` steps are in flight when a further one begins.

A draft model drafts on the last stage, where tokens are known first. Its drafts come back behind the step's tokens in
the same way, and stand in every stage's slots as they do there. Auxiliary hidden states that an EAGLE-3 head reads from
layers of earlier stages travel beside the hidden states.

Hidden states cross the network once: each rank sends its columns to the rank of the same number in the next stage, and
the ranks there gather them.

Nothing here is part of a CUDA graph. On a GPU transfers use streams of their own, and the step's stream waits only for
what it needs. On a CPU a stage blocks where it needs something.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.execution.draft_model import DraftRows
from penstock.engine_core.execution.forward import StageModel
from penstock.engine_core.execution.input_batch import HostRows, entry_columns
from penstock.engine_core.execution.transfer import Upload
from penstock.kernels.gather import place_drafts
from penstock.kernels.records import Entries, SlotHistory, SlotSampling
from penstock.kernels.sampling import accept, marked_entries


@dataclass(frozen=True)
class Sent:
    """A send in flight, and its memory."""

    tensor: Tensor
    work: dist.Work


@dataclass(frozen=True)
class Awaited:
    """Tokens of a step that this stage has run, int32 [entries], or its drafts, int32 [rows, iterations]."""

    number: int  # in the order of arrival
    rows: HostRows  # of the step, or of one iteration of the drafting
    tokens: Tensor
    work: dist.Work
    drafts: bool = False


class Pipeline:
    """One member's side of the pipeline. Every member gets the same calls for the same steps, in their order.

    slots: of the slot tables, scratch included.
    """

    def __init__(
        self, model: StageModel, group: Group, slots: int, sampling: SlotSampling, history: SlotHistory, upload: Upload
    ) -> None:
        self._model = model
        self._group = group
        self._sampling = sampling
        self._history = history
        self._upload = upload
        self._last: NDArray[np.int64] = np.zeros(slots, np.int64)  # number of the latest transfer for each slot
        self._awaited: deque[Awaited] = deque()
        self._sent: deque[Sent] = deque()  # their memory must live until they have arrived
        self._aside: torch.cuda.Stream | None = None  # receives wait for no step
        if upload.device.type == "cuda":
            self._aside = torch.cuda.Stream(upload.device)  # type: ignore[no-untyped-call]
        self._number = 0  # transfers that were awaited

    def begin(self, starting: Sequence[int]) -> None:
        """A further step begins, which gives these slots to new requests: their tokens must have been written."""
        self._take(int(self._last[list(starting)].max(initial=0)))
        while sum(not awaited.drafts for awaited in self._awaited) >= self._group.stages:
            self._take(self._awaited[0].number)

    def receive(self, rows: HostRows) -> None:
        """Before the forward pass of a step with these rows: receive what it reads."""
        self._take(int(self._last[rows.slots].max(initial=0)))
        inbox = self._model.inbox
        if inbox is None:
            return
        lines, _, hidden = inbox.shape
        with torch.cuda.stream(self._aside):  # of None: nothing happens
            part = inbox.new_empty(lines * rows.tokens, -(-hidden // self._group.size))
            work = self._group.recv(part)
        work.wait()
        if self._aside is not None:
            part.record_stream(torch.cuda.current_stream(part.device))
        inbox[:, : rows.tokens] = self._group.all_gather(part, hidden).view(lines, rows.tokens, hidden)

    def pass_on(self, rows: HostRows) -> None:
        """After the forward pass: send its hidden states to the next stage."""
        outbox = self._model.outbox
        if outbox is not None:
            part = self._group.shard(outbox[:, : rows.tokens])
            self._keep(part, self._group.send(part))

    def tell(self, rows: HostRows, tokens: Tensor) -> None:
        """Send the last stage's samples: int32 [entries]."""
        own = tokens.clone()
        self._keep(own, self._group.broadcast_tokens(own))

    def tell_drafts(self, drafts: Tensor) -> None:
        """Send the last stage's drafts: int32 [rows, iterations]."""
        self._keep(drafts, self._group.broadcast_tokens(drafts))

    def await_tokens(self, rows: HostRows) -> None:
        """Expect the samples of a step that this stage has run."""
        self._await((rows.entries,), rows, drafts=False)

    def await_drafts(self, rows: DraftRows) -> None:
        """Expect the drafts after a step that this stage has run."""
        if rows.turns:
            self._await((rows.turn.rows, rows.turns), rows.turn, drafts=True)

    def settle(self) -> None:
        """Receive everything in flight, and wait for all sends."""
        self._take(self._number)
        while self._sent:
            self._sent.popleft().work.wait()

    def _await(self, shape: tuple[int, ...], rows: HostRows, *, drafts: bool) -> None:
        with torch.cuda.stream(self._aside):
            tokens = torch.empty(shape, dtype=torch.int32, device=self._upload.device)
            work = self._group.broadcast_tokens(tokens)
        self._number += 1
        self._awaited.append(Awaited(self._number, rows, tokens, work, drafts))
        self._last[rows.entry_slots] = self._number

    def _take(self, number: int) -> None:
        """Write all transfers up to a number to the slots."""
        while self._awaited and self._awaited[0].number <= number:
            awaited = self._awaited.popleft()
            awaited.work.wait()
            if self._aside is not None:
                awaited.tokens.record_stream(torch.cuda.current_stream(awaited.tokens.device))
            if awaited.drafts:
                self._take_drafts(awaited)
            else:
                self._take_tokens(awaited)

    def _take_tokens(self, awaited: Awaited) -> None:
        entries = Entries(*self._upload.send(entry_columns(awaited.rows, None)))
        if awaited.rows.depth.any():
            entries = marked_entries(awaited.tokens, entries)
        accept(awaited.tokens, entries, self._sampling, self._history)

    def _take_drafts(self, awaited: Awaited) -> None:
        (slots,) = self._upload.send((awaited.rows.slots.astype(np.int64),))
        place_drafts(awaited.tokens, slots, self._history)

    def _keep(self, tensor: Tensor, work: dist.Work) -> None:
        """Keep a send's memory until it has arrived. The oldest has: tokens of later steps have come back since."""
        self._sent.append(Sent(tensor, work))
        while self._sent and (self._sent[0].work.is_completed() or len(self._sent) > 4 * self._group.stages):
            self._sent.popleft().work.wait()
