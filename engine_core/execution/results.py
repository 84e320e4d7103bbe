"""What leaves the device with a step, and how it becomes a `StepResult`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine_core.execution.draft_rows import DraftRows
from penstock.engine_core.execution.pooling import Vectors
from penstock.kernels.logprobs import TokenLogprobs
from penstock.protocol.messages import Logprobs
from penstock.protocol.steps import RowLogprobs


@dataclass(frozen=True)
class PromptScores:
    """Of the prompt positions of one chunk, in order."""

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
    """A step on its way. `fetched` is on the host once `done` has happened; `held` keeps its device originals."""

    step: int
    epoch: int
    widths: NDArray[np.int64] | None  # [entries], of the log-probabilities that each wants, -1 none; None: nobody
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
    """`StepResult.drafts`."""
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
