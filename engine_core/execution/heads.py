"""An EAGLE head over the slots: hidden states are paged beside the keys and values of their positions.

The model puts its states there as it runs; what the head reads for a token is the state of the position before. At a
slot's last token, and at drafts behind it, the model has not been: the head puts its own states there, goes on from
them, and the model overwrites them when it comes. So a block's states are known wherever its keys are, after a hit in
the prefix cache and after rejected drafts alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.engine_core.execution.capacity import drafting_bytes
from penstock.engine_core.execution.drafting import Draft
from penstock.engine_core.execution.pages import Pages, zeros
from penstock.engine_core.models.eagle import EagleHead
from penstock.kernels.attention import AttentionBatch
from penstock.kernels.states import state_places


class TappedNetwork(Protocol):
    """A model that a head may listen to: a decoder, or the last stage of one."""

    def forward_tapped(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBatch,
        cache: Sequence[Pages],
        taps: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states of the step's tokens, and the residual stream as each layer of `taps` finds it:
        [tokens, hidden] each."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary]."""
        ...


@dataclass(frozen=True)
class StatePages:
    """The states of all positions of all blocks."""

    lines: Tensor  # [(blocks + 1) * block_size + 1, hidden], the last one zero
    known: Tensor  # int32 [slots], tokens that each slot has
    block_size: int

    @property
    def zeros(self) -> int:
        return len(self.lines) - 1


def attach(
    head: EagleHead, model: TappedNetwork, blocks: int, block_size: int, known: Tensor
) -> tuple[WatchedModel, PagedHead]:
    """The head's target, as the runner has it, and the head, over the same states. known: int32 [slots], tokens that
    each slot has."""
    shape = (blocks + 1) * block_size + 1, head.spec.layers.hidden
    pages = StatePages(zeros(shape, head.target.dtype, known.device), known, block_size)
    return WatchedModel(model, head, pages), PagedHead(head, pages)


def draft_block_bytes(draft: Draft, block_size: int, item_bytes: int) -> int:
    """What drafting adds to a block of an executor that does it."""
    if draft.model is None:
        return 0
    return drafting_bytes(draft.spec, block_size, item_bytes, states=isinstance(draft.model, EagleHead))


class WatchedModel:
    """The model a head drafts for, as the runner wants one: it leaves its states where the head finds them."""

    def __init__(self, model: TappedNetwork, head: EagleHead, pages: StatePages) -> None:
        self._model = model
        self._head = head
        self._pages = pages

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        """Hidden states of the step's tokens: [tokens, hidden]."""
        taps = self._head.spec.taps
        hidden, tapped = self._model.forward_tapped(input_ids, positions, attention, cache, taps)
        self._pages.lines.index_copy_(0, attention.slot_mapping, self._head.states(hidden, tapped))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary]."""
        return self._model.logits(hidden)


class PagedHead:
    """The head as a draft model, whose states are in the pages."""

    def __init__(self, head: EagleHead, pages: StatePages) -> None:
        self._head = head
        self._pages = pages

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        """The head's states of the step's tokens: [tokens, hidden]."""
        pages = self._pages
        places = state_places(positions, attention, pages.known, pages.block_size, pages.zeros)
        before = pages.lines.index_select(0, places.before)  # [tokens, hidden]
        states = self._head.forward(input_ids, positions, before, attention, cache)
        pages.lines.index_copy_(0, places.own, states)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary]."""
        return self._head.logits(hidden)
