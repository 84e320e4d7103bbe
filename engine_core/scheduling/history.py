"""What is noted of traced requests: records of one stay in the queue and in a slot, and of one step.

Times are those that the scheduler was last told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from penstock.protocol.messages import TraceContext

if TYPE_CHECKING:
    from penstock.engine_core.scheduling.request import Choice


class PrefillChunk(msgspec.Struct, frozen=True, gc=False):
    """Positions of a prompt, or of what is recomputed, that one step ran."""

    step: int
    start: int
    count: int
    planned: float
    applied: float


class Stay(msgspec.Struct, frozen=True, kw_only=True):
    """One wait of a choice in the queue and the stay in a slot behind it, if it got one."""

    trace: TraceContext
    request: int
    choice: int
    queued: float
    entered: float | None
    left: float
    end: str  # a finish in small letters, or why it goes back to the queue
    prompt_tokens: int
    reused: int  # positions that the prefix cache had
    chunks: tuple[PrefillChunk, ...]
    decoding: float | None  # since when it has a token to go on from
    first: bool  # its very first token came in this stay
    tokens: int  # of output, that this stay gave
    accepted: int  # drafts, of this stay
    rejected: int
    marks: tuple[tuple[float, int], ...]  # when its output had so many tokens


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The step that was planned last."""

    step: int
    epoch: int
    rows: int  # that sample
    chunks: int
    tokens: int  # positions that it runs
    drafts: int
    masked: int
    running: int
    waiting: int
    blocks: int
    blocks_used: int
    traced: tuple[TraceContext, ...]  # of the requests in it


@dataclass(slots=True, eq=False)
class Passage:
    """A stay that has not ended."""

    queued: float
    entered: float | None = None
    reused: int = 0
    outputs: int = 0  # these three: of the choice when it began to wait
    accepted: int = 0
    rejected: int = 0
    chunks: list[PrefillChunk] = field(default_factory=list)
    decoding: float | None = None
    first: bool = False
    marks: list[tuple[float, int]] = field(default_factory=list)


@dataclass(slots=True)
class History:
    """Whose stays are being noted, and those that are over and nobody has taken."""

    traced: dict[int, Choice] = field(default_factory=dict)  # by slot
    stays: list[Stay] = field(default_factory=list)
