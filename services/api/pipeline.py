"""The api's end of the pipeline: requests go to a tokenizer, rows of text come back to the reply they belong to.

Every internal request has one ticket from its submission until its terminal row, its rejection, its abort, or the loss
of its tokenizer; then the ticket is gone and what still arrives for its id is dropped. An abort that the link has no
credit for is owed and sent as soon as there is some, so that no request runs on for a client that left.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from protocol.errors import InvalidRequest, Overloaded, Unavailable
from protocol.messages import (
    Abort,
    Detokenize,
    Detokenized,
    EngineStatus,
    Message,
    Rejected,
    SubmitText,
    TextBatch,
    Tokenize,
    Tokenized,
    request_id,
)
from services.api.errors import from_rejected
from services.api.reply import Reply
from services.wire import Arrival, Joined, Left, Peer

RETRY_AFTER = 1.0  # seconds, where nothing better is known


class TextPort(Protocol):
    """The connector's end of a text link, as far as the pipeline needs it: `services.watch.Watch` and test doubles."""

    @property
    def peers(self) -> tuple[Peer, ...]: ...

    def send(self, peer: Peer, message: Message) -> bool: ...


class PipelineStatistics(msgspec.Struct, frozen=True):
    """Requests in the pipeline and what became of the others."""

    unfinished: int
    tokenizers: int
    submitted: int
    refused: int  # for want of room or of credit
    aborts_owed: int


class Ticket:
    """One internal request: its rows go to choices `first`.. of `reply`."""

    __slots__ = ("first", "id", "open", "peer", "reply")

    def __init__(self, number: int, peer: Peer, reply: Reply, first: int, n: int) -> None:
        self.id = number
        self.peer = peer
        self.reply = reply
        self.first = first
        self.open = n


class Question:
    """A call to a tokenizer that has one answer."""

    __slots__ = ("answer", "peer")

    def __init__(self, peer: Peer, answer: asyncio.Future[Tokenized | Detokenized]) -> None:
        self.peer = peer
        self.answer = answer


class Pipeline:
    """Tickets by id, over one port per tokenizer. `limit` bounds the unfinished requests of this process.

    The tokenizers are shared out among the `processes` api processes, so that a step's text comes in few messages; a
    process turns to the others when its own take no more.
    """

    def __init__(
        self,
        ports: Sequence[TextPort],
        api_index: int,
        incarnation: int,
        limit: int,
        status_limit: float,
        *,
        processes: int,
    ) -> None:
        self.status: EngineStatus | None = None
        self.status_time = 0.0  # monotonic seconds when it came
        self.draining = False
        self._ports = tuple(ports)
        shares = min(len(self._ports), processes)
        assert shares > 0
        own = [index % shares == api_index % shares for index in range(len(self._ports))]
        self._own = tuple(port for port, mine in zip(self._ports, own, strict=True) if mine)
        self._spare = tuple(port for port, mine in zip(self._ports, own, strict=True) if not mine)
        self._api_index = api_index
        self._incarnation = incarnation
        self._limit = limit
        self.status_limit = status_limit
        self._counter = 0
        self._tickets: dict[int, Ticket] = {}
        self._questions: dict[int, Question] = {}
        self._owed: deque[tuple[Peer, Abort]] = deque()
        self._submitted = self._refused = 0

    def new_id(self) -> int:
        """An id that no other request of any api process has."""
        self._counter += 1
        return request_id(self._api_index, self._incarnation, self._counter)

    def ready(self, now: float) -> bool:
        """Whether a request would be served: an engine that is ready and was heard of lately, and not draining."""
        return self.trouble(now) == ""

    def trouble(self, now: float) -> str:
        """Why requests cannot be served; empty when they can."""
        status = self.status
        if tokenizing := self._tokenizer_trouble():
            return tokenizing
        if status is None:
            return "the engine has not reported yet"
        if now - self.status_time > self.status_limit:
            return "the engine's heartbeat is missing"
        if status.draining:
            return "the engine is shutting down"
        return "" if status.ready else "the engine is not ready"

    def submit(self, requests: Sequence[SubmitText], reply: Reply, now: float) -> None:
        """Send all `requests`, prompt i's choices being those from i * n on, or none of them.

        Raises Unavailable when the engine is not ready, Overloaded when too many requests are unfinished or a
        tokenizer takes no more, InvalidRequest when these alone are more than ever fit.
        """
        if trouble := self.trouble(now):
            raise Unavailable(trouble, code="not_ready")
        if len(requests) > self._limit:
            message = f"{len(requests)} prompts in one request; the server takes {self._limit} (--max-queued-requests)"
            raise InvalidRequest(message, param="prompt", code="invalid_value")
        if len(self._tickets) + len(requests) > self._limit:
            self._refused += 1
            raise Overloaded("too many requests are waiting; try again later", retry_after=self.retry_after())
        for number, request in enumerate(requests):
            peer = self._send(request.id, request)
            if peer is None:
                self.drop(reply)
                self._refused += 1
                raise Overloaded("the server is busy; try again later", retry_after=self.retry_after())
            self._tickets[request.id] = Ticket(request.id, peer, reply, number * request.n, request.n)
            reply.tickets.append(request.id)
        self._submitted += len(requests)

    def drop(self, reply: Reply) -> None:
        """Abort what the reply still waits for; nobody will take it."""
        for number in reply.tickets:
            ticket = self._tickets.pop(number, None)
            if ticket is not None:
                self._owed.append((ticket.peer, Abort(number)))
        reply.tickets.clear()
        self.settle()

    def settle(self) -> None:
        """Send the aborts that are owed, as far as there is credit."""
        for _ in range(len(self._owed)):
            peer, abort = self._owed.popleft()
            port = self._port(peer)
            if port is not None and not port.send(peer, abort):
                self._owed.append((peer, abort))

    async def ask(self, question: Tokenize | Detokenize) -> Tokenized | Detokenized:
        """The tokenizer's answer, which needs no engine.

        Raises Unavailable without a tokenizer, Overloaded when it takes no more, and what it refuses the question with.
        """
        if trouble := self._tokenizer_trouble():
            raise Unavailable(trouble, code="not_ready")
        peer = self._send(question.id, question) if len(self._questions) < self._limit else None
        if peer is None:
            self._refused += 1
            raise Overloaded("the server is busy; try again later", retry_after=RETRY_AFTER)
        answer: asyncio.Future[Tokenized | Detokenized] = asyncio.get_running_loop().create_future()
        self._questions[question.id] = Question(peer, answer)
        try:
            return await answer
        finally:
            del self._questions[question.id]

    def receive(self, arrivals: list[Arrival], now: float) -> None:
        """What the ports delivered, at `now` in monotonic seconds."""
        for arrival in arrivals:
            match arrival.message:
                case TextBatch() as batch:
                    self._rows(batch, now)
                case EngineStatus() as status:
                    self.status, self.status_time = status, now
                case Rejected() as rejected:
                    self._rejected(rejected)
                case Tokenized() | Detokenized() as answer:
                    question = self._questions.get(answer.id)
                    if question is not None and not question.answer.done():
                        question.answer.set_result(answer)
                case Left():
                    self._lost(arrival.peer)
                case Joined():
                    pass
                case other:
                    raise AssertionError(f"{type(other).__name__} does not travel down the text link")
        if self._owed:
            self.settle()

    def fail_all(self, error: Unavailable) -> None:
        """End every unfinished request with `error`; the drain limit is over."""
        for ticket in list(self._tickets.values()):
            ticket.reply.fail(error)
        for question in self._questions.values():
            if not question.answer.done():
                question.answer.set_exception(error)

    def retry_after(self) -> float:
        """Seconds until the present queue has probably drained by half."""
        rate = self.status.drain_rate if self.status is not None else 0.0
        return len(self._tickets) / 2 / rate if rate > 0 else RETRY_AFTER

    def statistics(self) -> PipelineStatistics:
        return PipelineStatistics(
            unfinished=len(self._tickets),
            tokenizers=sum(bool(port.peers) for port in self._ports),
            submitted=self._submitted,
            refused=self._refused,
            aborts_owed=len(self._owed),
        )

    def _tokenizer_trouble(self) -> str:
        if self.draining:
            return "the server is shutting down"
        return "" if any(port.peers for port in self._ports) else "no tokenizer is connected"

    def _rows(self, batch: TextBatch, now: float) -> None:
        rows = len(batch.text)
        ids = struct.unpack(f"<{rows}q", batch.ids)
        choices = struct.unpack(f"<{rows}H", batch.choices)
        tokens = struct.unpack(f"<{rows}i", batch.tokens)
        extras = {extra.row: extra for extra in batch.extras} if batch.extras else {}
        parsed = {each.row: each.pieces for each in batch.parsed} if batch.parsed else {}
        tickets = self._tickets
        replies: dict[Reply, None] = {}  # those with news, once each
        columns = zip(ids, choices, batch.text, tokens, batch.finish, strict=True)
        for row, (number, choice, text, count, finish) in enumerate(columns):
            ticket = tickets.get(number)
            if ticket is not None:
                extra = extras.get(row) if extras else None
                pieces = parsed.get(row, ()) if parsed else ()
                ticket.reply.push(ticket.first + choice, text, count, finish, extra, now, pieces)
                replies[ticket.reply] = None
                if finish:
                    ticket.open -= 1
                    if not ticket.open:
                        del tickets[number]
        for reply in replies:
            reply.pushed()

    def _rejected(self, rejected: Rejected) -> None:
        error = from_rejected(rejected)
        question = self._questions.get(rejected.id)
        if question is not None and not question.answer.done():
            question.answer.set_exception(error)
        ticket = self._tickets.pop(rejected.id, None)
        if ticket is not None:
            ticket.reply.fail(error)

    def _lost(self, peer: Peer) -> None:
        error = Unavailable("a part of the server was lost; try again", code="part_lost")
        for ticket in [ticket for ticket in self._tickets.values() if ticket.peer is peer]:
            del self._tickets[ticket.id]
            ticket.reply.fail(error)
        for question in self._questions.values():
            if question.peer is peer and not question.answer.done():
                question.answer.set_exception(error)

    def _send(self, number: int, message: Message) -> Peer | None:
        """Hand `message` to the tokenizer that `number` falls to, or to the next with credit; None: all are full."""
        for ports in (self._own, self._spare):
            candidates = [(port, peer) for port in ports for peer in port.peers]
            for step in range(len(candidates)):
                port, peer = candidates[(number + step) % len(candidates)]
                if port.send(peer, message):
                    return peer
        return None

    def _port(self, peer: Peer) -> TextPort | None:
        """The port that `peer` is connected by; None when it is gone, and its requests with it."""
        return next((port for port in self._ports if peer in port.peers), None)
