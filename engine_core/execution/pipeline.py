"""What the stages of a pipeline exchange: hidden states go forwards, sampled tokens come back to every stage.

A stage's input ids and positions are gathered from its own slots, as in a model that is whole, so every stage takes the
tokens of every step into its slots, in the order of the steps. It does so as late as it may: a step's tokens are on
their way while the stage runs steps that need none of them, and are taken before the first one that does, or that
gives one of their slots to somebody else. No more than `stages` steps are on their way before a further one begins.

Nothing here is part of a graph. On a GPU what is sent and received goes by streams of its own, and the step's stream
waits for nothing but what it needs. On a CPU a stage waits where it needs something.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from engine_core.execution.forward import Network
from engine_core.execution.group import Group
from engine_core.execution.pages import Pages
from engine_core.execution.rows import HostRows, entry_columns
from engine_core.execution.transfer import Upload
from engine_core.models.decoder import Decoder
from kernels.acceptance import accept
from kernels.attention import AttentionBatch
from kernels.sampling_tables import Entries, SlotHistory, SlotSampling


class PipelineStatistics(msgspec.Struct, frozen=True):
    """Totals since the start."""

    passed: int  # steps whose hidden states went on
    received: int  # steps whose hidden states came
    told: int  # steps whose tokens were sent
    taken: int  # steps whose tokens were taken over


@dataclass(frozen=True)
class Sent:
    """What is on its way, and the memory it is in."""

    tensor: Tensor
    work: dist.Work


@dataclass(frozen=True)
class Awaited:
    """Tokens of a step that this stage has run: int32 [entries]."""

    step: int
    rows: HostRows
    tokens: Tensor
    work: dist.Work


class StageModel:
    """One stage's layers as the runner wants a model. What the stage before has made stands in `inbox` when it runs;
    what it makes for the next one it leaves in `outbox`, so that graphs find both where they were."""

    def __init__(self, model: Decoder, tokens: int) -> None:
        group, shape = model.placement.group, (2, tokens, model.spec.hidden)
        device = model.placement.device
        self._model = model
        self.inbox = None if group.begins else torch.zeros(shape, dtype=model.dtype, device=device)
        self.outbox = None if group.ends else torch.zeros(shape, dtype=model.dtype, device=device)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        """Hidden states of the step's tokens: [tokens, hidden]; before the last stage nobody may read them."""
        count = len(input_ids)
        stream = None if self.inbox is None else self.inbox[:, :count]
        found = self._model.forward(input_ids, positions, attention, cache, stream)
        if self.outbox is None:
            return found
        self.outbox[:, :count] = found
        return found[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary], of the last stage."""
        return self._model.logits(hidden)


class Pipeline:
    """One member's side of the exchange. Every member is asked the same of the same steps, in their order.

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
        self._sampled: NDArray[np.int64] = np.zeros(slots, np.int64)  # last step that samples for each slot
        self._awaited: deque[Awaited] = deque()
        self._sent: deque[Sent] = deque()  # must stand until they have arrived
        self._aside: torch.cuda.Stream | None = None  # what is received waits for no step
        if upload.device.type == "cuda":
            self._aside = torch.cuda.Stream(upload.device)  # type: ignore[no-untyped-call]
        self._step = self._passed = self._received = self._told = self._taken = 0

    def begin(self, starting: Sequence[int]) -> None:
        """A further step begins, in which these slots are given to others: their tokens must have been taken."""
        self._step += 1
        self._take(int(self._sampled[list(starting)].max(initial=0)))
        while len(self._awaited) >= self._group.stages:
            self._take(self._awaited[0].step)

    def receive(self, rows: HostRows) -> None:
        """Before the forward pass of a step with these rows: what it reads."""
        self._take(int(self._sampled[rows.slots].max(initial=0)))
        inbox = self._model.inbox
        if inbox is None:
            return
        shape = 2, rows.tokens, inbox.shape[2]
        with torch.cuda.stream(self._aside):  # of None: nothing happens
            stream = inbox.new_empty(shape)
            work = self._group.receive(stream)
        work.wait()
        if self._aside is not None:
            stream.record_stream(torch.cuda.current_stream(stream.device))
        inbox[:, : rows.tokens] = stream
        self._received += 1

    def pass_on(self, rows: HostRows) -> None:
        """Behind the forward pass: its hidden states leave for the next stage."""
        outbox = self._model.outbox
        if outbox is not None:
            stream = outbox[:, : rows.tokens].clone(memory_format=torch.contiguous_format)
            self._keep(stream, self._group.send(stream))
            self._passed += 1

    def tell(self, rows: HostRows, tokens: Tensor) -> None:
        """The last stage has sampled: int32 [entries]."""
        own = tokens.clone()
        self._keep(own, self._group.tell(own))
        self._told += 1

    def await_tokens(self, rows: HostRows) -> None:
        """Another stage has run a step that samples."""
        with torch.cuda.stream(self._aside):
            tokens = torch.empty(rows.entries, dtype=torch.int32, device=self._upload.device)
            work = self._group.tell(tokens)
        self._awaited.append(Awaited(self._step, rows, tokens, work))
        self._sampled[rows.entry_slots] = self._step

    def settle(self) -> None:
        """Take all that is on its way, and see off what was sent: nobody asks for either again."""
        self._take(self._step)
        while self._sent:
            self._sent.popleft().work.wait()

    def statistics(self) -> PipelineStatistics:
        return PipelineStatistics(self._passed, self._received, self._told, self._taken)

    def _take(self, step: int) -> None:
        """Have the slots take over the tokens of all steps up to one."""
        while self._awaited and self._awaited[0].step <= step:
            awaited = self._awaited.popleft()
            awaited.work.wait()
            if self._aside is not None:
                awaited.tokens.record_stream(torch.cuda.current_stream(awaited.tokens.device))
            entries = Entries(*self._upload.send(entry_columns(awaited.rows, None)))
            accept(awaited.tokens, entries, self._sampling, self._history)
            self._taken += 1

    def _keep(self, tensor: Tensor, work: dist.Work) -> None:
        """What was sent stays until it has arrived. The oldest has: behind it tokens came back of later steps."""
        self._sent.append(Sent(tensor, work))
        while self._sent and (self._sent[0].work.is_completed() or len(self._sent) > 4 * self._group.stages):
            self._sent.popleft().work.wait()


def staged(model: Network, group: Group, tokens: int) -> StageModel | None:
    """The model as a stage of a pipeline, for steps of at most so many tokens; None: it is whole."""
    if group.stages == 1:
        return None
    assert isinstance(model, Decoder), "no drafts are made behind stages"
    return StageModel(model, tokens)
