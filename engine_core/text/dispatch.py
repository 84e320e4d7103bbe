"""Which scheduler has which request. Once its prompt is made, each is with one of them or held until one takes it.

A request moves when its scheduler is lost, and when that lost its executors while another replica is ready: whoever
starts again has an empty cache, so what was written must be computed anew in either place, and elsewhere that begins at
once. What executors die of must not go from one to the next: a request that has moved for the sake of executors, and
has not got further since, stays where it is and is tried there (engine_core/scheduling/lifecycle.py).

With prefill replicas a request is at one of these until its prompt is computed, and then at one that decodes, which is
told where the blocks of the prompt are (engine_core/scheduling/disaggregation.py). They are released once it has said
anything. Where it is at any time, and what it has written, is all that there is to know when either of them is lost.

The scheduler that a request was taken from, if it lives, is told to end it. Until it has said so the request does not
come back, so that each row from there is known to be of the former life.
"""

from __future__ import annotations

from array import array
from collections import deque

import msgspec

from penstock.engine_core.kv.prefix_index import extend, root_of
from penstock.engine_core.placement.placement import Asked, Placement, PlacementStatistics
from penstock.engine_core.text.choice import Choice
from penstock.engine_core.text.request import Request
from penstock.protocol.control import EngineStatus
from penstock.protocol.message import Message
from penstock.protocol.messages import Abort, KVTransfer, Prefilled, ReleaseTransfer, SubmitTokens

AHEAD = 2  # tokens of a choice that were in flight when executors died: beyond them it has got further


class DispatchStatistics(msgspec.Struct, frozen=True):
    """Counters since start, and what stands now."""

    held: int  # now: requests that wait for a scheduler
    upward: int  # now: messages waiting for schedulers
    moved: int  # requests that went on with another scheduler
    handed_over: int  # times that a request went on behind its prompt, which a prefill replica had computed
    local: int  # requests that began where they are decoded, while there are prefill replicas
    placement: PlacementStatistics


class Dispatch:
    """Custody of requests. The caller takes messages from the left of `upward`, a queue per scheduler."""

    def __init__(self, placement: Placement) -> None:
        self.upward: tuple[deque[Message], ...] = tuple(deque() for _ in placement.replicas)
        self._placement = placement
        self._had: tuple[dict[int, Request], ...] = tuple({} for _ in placement.replicas)  # by scheduler, in order
        self._held: dict[int, Request] = {}  # wait for a scheduler that takes requests, in order
        self._moved = self._handed_over = self._local = 0

    def chain(self, message: SubmitTokens) -> list[bytes]:
        """Identities of the full blocks of a prompt, as far as they matter. May run in any thread."""
        if not self._placement.chains or (message.pooling is not None and message.pooling.whole):
            return []
        tokens = array("i", message.token_ids)
        found: list[bytes] = []
        size = self._placement.block_size
        extend(found, root_of(message), tokens, len(tokens) // size, size, message.images)
        return found

    def send(self, request: Request) -> None:
        """Have a scheduler begin it, or go on with it; hold it while there is none."""
        assert request.placement.replica is None
        without = request.placement.former.keys() | request.placement.refused
        number = self._placement.place(self._asked(request), without)
        if number is None:
            self._held[request.id] = request
            return
        self._held.pop(request.id, None)
        request.placement.replica = number
        self._had[number][request.id] = request
        prefill = self._placement.hands_over(number) and request.message.pooling is None
        self._local += self._placement.apart and not prefill and request.placement.transfer is None
        self.upward[number].append(request.handover(prefill=prefill))

    def hand_over(self, request: Request, transfer: KVTransfer | None) -> None:
        """Its scheduler has computed its prompt and has it no more. Another one goes on with it, which finds the blocks
        there."""
        self._handed_over += 1
        self._release(request)
        request.placement.transfer = transfer
        self.send(request)

    def end_transfer(self, request: Request) -> None:
        """Nobody needs the blocks that are held for it any more."""
        transfer, request.placement.transfer = request.placement.transfer, None
        if transfer is not None and self._placement.replicas[transfer.replica].connected:
            self.upward[transfer.replica].append(ReleaseTransfer(request.id))

    def decline(self, message: Prefilled, replica: int) -> None:
        """Nobody wants these blocks: the request has ended, or is elsewhere."""
        if message.transfer is not None:
            self.upward[replica].append(ReleaseTransfer(message.id))

    def tell(self, request: Request, message: Message) -> None:
        """Say something about a request to who has it."""
        if request.placement.replica is not None:
            self.upward[request.placement.replica].append(message)

    def holds(self, request: Request) -> bool:
        """Whether no scheduler has it."""
        return request.id in self._held

    def end(self, request: Request) -> None:
        """It is over here: what it has written may be the beginning of another prompt."""
        self._held.pop(request.id, None)
        self.end_transfer(request)
        replica = request.placement.replica
        if replica is not None:
            if self._placement.chains:
                for choice in request.choices:
                    self._placement.learn(replica, self._written(request, choice, len(choice.written) - 1))
            self._release(request)

    def take_back(self, request: Request) -> None:
        """Its scheduler refused it; where it goes next is for the caller to say."""
        self._release(request)

    def is_former(self, request: Request, number: int, *, rows: int) -> bool:
        """Whether a scheduler speaks of a life that is over; `rows`: how many of its choices it ends there."""
        if request.placement.replica == number:
            return False
        former = request.placement.former
        if number in former:
            former[number] -= rows
            if former[number] <= 0:
                del former[number]
        return True

    def unwilling(self, number: int) -> None:
        """It refuses whatever comes, until it says that it is ready."""
        self._placement.replicas[number].taking = False

    def willing(self, request: Request) -> bool:
        """Whether somebody takes requests who has not refused this one."""
        without = request.placement.former.keys() | request.placement.refused
        return any(replica.taking for number, replica in enumerate(self._placement.replicas) if number not in without)

    def leave(self, number: int) -> list[Request]:
        """A scheduler is gone; the requests that it had, in order."""
        self._placement.replicas[number].leave()
        self.upward[number].clear()
        lost = list(self._had[number].values())
        self._had[number].clear()
        for request in lost:
            request.placement.replica = None
            self._moved += 1
        for requests in (self._held, *self._had):
            for request in requests.values():
                request.placement.former.pop(number, None)
        return lost

    def report(self, status: EngineStatus) -> list[Request]:
        """A scheduler's heartbeat: what is held is sent as far as somebody takes it. Requests that have to wait while
        they could run elsewhere are returned: to be dropped, or to be moved."""
        self._placement.report(status.replica, status)
        for request in list(self._held.values()):
            self.send(request)
        replicas = self._placement.replicas
        ready = {number for number, replica in enumerate(replicas) if replica.ready}
        found = []
        for number, replica in enumerate(replicas):
            if ready and replica.stalled:
                found += [each for each in self._had[number].values() if self._may_move(each, ready)]
        return found

    def move(self, request: Request) -> None:
        """Have another scheduler go on with it. The one that has it is told to end it."""
        assert request.placement.replica is not None
        self._moved += 1
        request.placement.mark = sum(choice.tokens for choice in request.choices)
        request.placement.former[request.placement.replica] = len(request.choices) - request.confirmed
        self.upward[request.placement.replica].append(Abort(request.id))
        self._release(request)
        self.send(request)

    def idle(self) -> bool:
        return not any(self.upward)

    def _may_move(self, request: Request, ready: set[int]) -> bool:
        placement = request.placement
        if ready <= placement.former.keys():
            return False
        ahead = AHEAD * len(request.choices)
        return placement.mark < 0 or sum(choice.tokens for choice in request.choices) > placement.mark + ahead

    def _release(self, request: Request) -> None:
        """Its scheduler does not have it any more."""
        placement = request.placement
        assert placement.replica is not None
        del self._had[placement.replica][request.id]
        self._placement.replicas[placement.replica].give(placement.booked)
        placement.replica = None

    def _asked(self, request: Request) -> Asked:
        """What decides where it goes: of a request that goes on, its first choice that does."""
        choice = next(choice for choice in request.choices if not choice.ended)
        prompt = len(request.message.token_ids) // 4
        request.placement.booked = sum(not choice.ended for choice in request.choices)
        return Asked(
            tokens=prompt + choice.tokens,
            chain=self._written(request, choice, choice.tokens) if choice.tokens else request.placement.chain,
            session=request.session,
            choices=request.placement.booked,
            pooled=request.message.pooling is not None,
            prefilled=request.placement.transfer is not None,
        )

    def _written(self, request: Request, choice: Choice, count: int) -> list[bytes]:
        """Identities of a choice's full blocks, with the first `count` tokens that it has written."""
        message, size = request.message, self._placement.block_size
        if not self._placement.chains or count <= 0 or (message.pooling is not None and message.pooling.whole):
            return request.placement.chain
        tokens = array("i", message.token_ids) + choice.written[:count]
        found = request.placement.chain[:]
        extend(found, root_of(message), tokens, len(tokens) // size, size, message.images)
        return found

    def statistics(self) -> DispatchStatistics:
        """Counters for metrics and tests."""
        return DispatchStatistics(
            held=len(self._held),
            upward=sum(map(len, self.upward)),
            moved=self._moved,
            handed_over=self._handed_over,
            local=self._local,
            placement=self._placement.statistics(),
        )
