"""What the operator has asked of every scheduler: passed on as it came, and answered once all of them have."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.protocol.control import Controlled
from penstock.services.links.link import Peer

GONE = "its scheduler is gone; ask again"
DIFFERS = "its weights are not those of replica 0"


@dataclass(slots=True)
class ControlCall:
    """One that is awaited."""

    api: Peer
    answers: dict[int, Controlled] = field(default_factory=dict)  # by replica


class ControlCalls:
    """Those that schedulers have not all answered."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._calls: dict[int, ControlCall] = {}

    def begin(self, api: Peer, number: int) -> None:
        self._calls[number] = ControlCall(api)

    def answered(self, replica: int, answer: Controlled) -> tuple[Peer, Controlled] | None:
        """A scheduler's answer; all of them as one, and who asked, once there are no more to come."""
        call = self._calls.get(answer.id)
        if call is None:
            return None
        call.answers[replica] = answer
        if len(call.answers) < self._replicas:
            return None
        del self._calls[answer.id]
        return call.api, joined([call.answers[each] for each in range(self._replicas)])

    def lost(self, replica: int) -> list[tuple[Peer, Controlled]]:
        """A scheduler is gone; what that completes."""
        waiting = [number for number, call in self._calls.items() if replica not in call.answers]
        found = [self.answered(replica, Controlled(number, GONE)) for number in waiting]
        return [each for each in found if each is not None]

    def leave(self, api: Peer) -> None:
        """Nobody waits for its answers any more."""
        self._calls = {number: call for number, call in self._calls.items() if call.api is not api}


def joined(answers: list[Controlled]) -> Controlled:
    """The replicas' answers, in their order, as one. Errors say whose they are where there are several replicas."""
    modes = {answer.paused for answer in answers}
    told = [f"replica {replica}: {answer.error}" for replica, answer in enumerate(answers) if answer.error]
    told += [f"replica {at}: {DIFFERS}" for at, answer in enumerate(answers) if answer.digests != answers[0].digests]
    return Controlled(
        id=answers[0].id,
        error=answers[0].error if len(answers) == 1 else "; ".join(told),
        digests=answers[0].digests,
        requests=sum(answer.requests for answer in answers),
        paused=modes.pop() if len(modes) == 1 else "",
        asleep=all(answer.asleep for answer in answers),
        version=",".join(dict.fromkeys(answer.version for answer in answers)),
    )
