"""What the operator asks of the engine, and its answer.

api → tokenizer → every scheduler: the tokenizer passes a message on as it is and answers once all schedulers have. Each
may come twice, with the same id, where a process between was lost: asking again changes nothing.

An executor holds the weights of one folder under one version. `CheckWeights` has it look at the headers of another one;
once all executors of a group have found nothing wrong, and none of their steps is left, `WriteWeights` has them read it
into the memory that the model has. One that fails then ends: its weights are of neither folder.
"""

from __future__ import annotations

import enum

from penstock.protocol.message import Message

FIRST_VERSION = "0"  # of the weights that a server starts with


class PauseMode(enum.StrEnum):
    """What becomes of requests when no more steps are planned. New ones wait in each. As in vLLM."""

    ABORT = "abort"  # they end
    WAIT = "wait"  # they run to their ends first
    KEEP = "keep"  # they stay as they are, with their KV cache


class Pause(Message, frozen=True):
    """Answered once nothing runs."""

    id: int
    mode: PauseMode


class Resume(Message, frozen=True):
    """Go on; a pause that is awaited is given up."""

    id: int


class FlushCache(Message, frozen=True):
    """Forget what the KV cache holds, of running requests too, which are computed again."""

    id: int


class AbortAll(Message, frozen=True):
    """End every request."""

    id: int


class AskState(Message, frozen=True):
    """Say how things stand, no more."""

    id: int


class UpdateWeights(Message, frozen=True):
    """Have the executors hold the weights of another folder. Requests go on behind it with the new ones."""

    id: int
    path: str
    version: str
    abort: bool = False  # requests end before
    check_only: bool = False  # say whether it could be done, and do nothing


class SleepEngine(Message, frozen=True):
    """Have the executors give their devices back. Answered once all have; refused while requests run or wait, unless a
    pause holds them."""

    id: int


class WakeEngine(Message, frozen=True):
    """Have them load the model again. Answered once it is loaded."""

    id: int


class Controlled(Message, frozen=True):
    """It has been done, or why not."""

    id: int
    error: str = ""
    requests: int = 0  # that have not ended: paused ones, or those that go on
    paused: str = ""  # mode of a pause that holds; empty: there is none
    version: str = FIRST_VERSION  # of the weights; of replicas that differ, each once with commas between
    asleep: bool = False  # the executors hold no device


class CheckWeights(Message, frozen=True):
    """scheduler → executors: could this folder be read into the model?"""

    number: int
    path: str


class WriteWeights(Message, frozen=True):
    """scheduler → executors: read it, behind all plans so far and before those that follow."""

    number: int
    path: str
    version: str


class WeightsAnswer(Message, frozen=True):
    """each executor → scheduler, to both: it has been done, or why not."""

    number: int
    error: str = ""


Control = Pause | Resume | FlushCache | AbortAll | AskState | UpdateWeights | SleepEngine | WakeEngine
