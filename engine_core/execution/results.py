"""What leaves the device with a step, and how it becomes a `StepResult`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling import logprobs
from protocol.messages import Logprobs
from protocol.steps import RowLogprobs


@dataclass(frozen=True)
class LogprobRows:
    """Log-probabilities of equal width: `positions` of them, one after the other, for each entry of `rows`."""

    rows: tuple[int, ...]  # index as in RowLogprobs
    positions: int
    token_ids: Tensor  # int32 [rows * positions, width]
    values: Tensor  # float32 [rows * positions, width]
    ranks: Tensor  # int32 [rows * positions]


@dataclass(frozen=True)
class Launched:
    """A step on its way. `fetched` are on the host once `done` has happened; `held` keeps their device originals."""

    step: int
    epoch: int
    fetched: Columns
    held: Columns
    began: torch.cuda.Event | None
    done: torch.cuda.Event | None  # None: already

    @property
    def finished(self) -> bool:
        """Whether collecting would not wait."""
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Columns:
    """The tensors of a result, on the device or on the host."""

    tokens: Tensor  # int32 [sampled rows], -1 where there is none
    logprobs: tuple[LogprobRows, ...] = ()
    prompt_logprobs: tuple[LogprobRows, ...] = ()

    def tensors(self) -> list[Tensor]:
        parts = (*self.logprobs, *self.prompt_logprobs)
        return [self.tokens, *(tensor for part in parts for tensor in (part.token_ids, part.values, part.ranks))]

    def replaced(self, tensors: list[Tensor]) -> Columns:
        """The same columns over other tensors, in the order of `tensors()`."""
        rest = iter(tensors[1:])
        return Columns(
            tensors[0],
            tuple(LogprobRows(part.rows, part.positions, next(rest), next(rest), next(rest)) for part in self.logprobs),
            tuple(
                LogprobRows(part.rows, part.positions, next(rest), next(rest), next(rest))
                for part in self.prompt_logprobs
            ),
        )


def logprob_rows(rows: tuple[int, ...], positions: int, logits: Tensor, tokens: Tensor, width: int) -> LogprobRows:
    """Log-probabilities of `tokens` int [n] and of the `width` best under raw `logits` [n, vocabulary]."""
    ids, values, ranks = logprobs(logits, tokens.long().clamp(min=0), width)
    return LogprobRows(rows, positions, ids.int(), values, ranks.int())


def row_logprobs(parts: tuple[LogprobRows, ...]) -> Iterator[RowLogprobs]:
    """The message form, a row each."""
    for part in parts:
        for at, row in enumerate(part.rows):
            span = slice(at * part.positions, (at + 1) * part.positions)
            yield RowLogprobs(
                row=row,
                logprobs=Logprobs(
                    width=part.token_ids.shape[1],
                    token_ids=part.token_ids[span].numpy().tobytes(),
                    values=part.values[span].numpy().tobytes(),
                    ranks=part.ranks[span].numpy().tobytes(),
                ),
            )
