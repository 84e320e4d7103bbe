"""Sends requests and calls to tokenizers, and keeps what cannot be sent yet.

The tokenizers are shared out among the api processes, so that a step's text arrives in few messages; a process turns to
the others when its own accept no more. With several replicas a conversation keeps to one tokenizer instead, which knows
the replica that has its prefix cached. Without replicas a request goes where its first image was decoded before.

What is kept of a request or a call is enough to go on with it at another tokenizer.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec

from penstock.protocol.control import Control, Controlled
from penstock.protocol.messages import Abort, Detokenize, Detokenized, SubmitText, Tokenize, Tokenized, Written
from penstock.services.client.output_collector import OutputCollector
from penstock.services.links.async_link import AsyncLink
from penstock.services.links.link import Link, Peer


class ChatMessage(msgspec.Struct, frozen=True):
    """The part of a chat message that affinity depends on."""

    role: str = ""


MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])
MESSAGE = msgspec.json.Decoder(ChatMessage)


class RequestState(msgspec.Struct, eq=False):
    """One internal request: its rows go to choices `first`, `first` + 1, … of `collector`."""

    id: int
    request: SubmitText
    collector: OutputCollector
    first: int
    written: list[bytearray]  # [n] of int32: ids of the tokens that were delivered
    peer: Peer | None = None  # None while no tokenizer has it
    ended: set[int] = set()
    deaths: int = 0  # of tokenizers that had it, since it last made progress
    progress: int = 0  # when the last of them died

    def message(self) -> SubmitText:
        """The request, continued after what was delivered."""
        written: tuple[Written, ...] = ()
        if self.ended or any(self.written):
            written = tuple(Written(bytes(ids), index in self.ended) for index, ids in enumerate(self.written))
        return msgspec.structs.replace(self.request, id=self.id, written=written, suspect=self.deaths > 0)

    def count_death(self) -> None:
        """Its tokenizer died, perhaps because of this request, unless the request made progress there."""
        progress = sum(map(len, self.written)) + len(self.ended)
        self.deaths = self.deaths + 1 if progress == self.progress else 0
        self.progress = progress


class Call(msgspec.Struct, eq=False):
    """A call to a tokenizer, or to all schedulers behind it, which has one answer."""

    id: int
    request: Tokenize | Detokenize | Control
    answer: asyncio.Future[Tokenized | Detokenized | Controlled]
    peer: Peer | None = None  # None while no tokenizer has it
    deaths: int = 0  # of tokenizers that had it

    def message(self) -> Tokenize | Detokenize | Control:
        """The call, marked if a tokenizer may have died of it."""
        if self.deaths and isinstance(self.request, Tokenize | Detokenize):
            return msgspec.structs.replace(self.request, suspect=True)
        return self.request


class TokenizerRouter:
    """Requests and calls that wait for a tokenizer, in order, and aborts that wait for credit, by tokenizer."""

    def __init__(
        self, links: Sequence[Link | AsyncLink], api_index: int, *, processes: int, keep_conversations: bool
    ) -> None:
        shares = 1 if keep_conversations else min(len(links), processes)
        assert shares > 0
        self._links = tuple(links)
        self._own = self._links[api_index % shares :: shares]
        self._others = tuple(link for link in self._links if link not in self._own)
        self._keep_conversations = keep_conversations
        self.waiting: OrderedDict[int, RequestState | Call] = OrderedDict()
        self.aborts: dict[Peer, deque[Abort]] = {}

    @property
    def connected(self) -> int:
        """Tokenizers that are connected."""
        return sum(bool(link.peers) for link in self._links)

    def route(self, state: RequestState | Call, message: SubmitText | Tokenize | Detokenize | Control) -> bool:
        """Send `message`, or have it wait while there is no tokenizer; False when all are full."""
        if self.waiting or self.aborts:
            self.flush()
        if not self.waiting:
            state.peer = self._send(message)
        if state.peer is None and not self.connected:
            self.waiting[state.id] = state
            return True
        return state.peer is not None

    def requeue(self, state: RequestState | Call) -> None:
        """Its tokenizer is gone: it waits for another one."""
        state.peer = None
        self.waiting[state.id] = state

    def abort(self, state: RequestState) -> None:
        """Tell its tokenizer, once there is credit, that nobody wants its output any more."""
        self.waiting.pop(state.id, None)
        if state.peer is not None:
            self.aborts.setdefault(state.peer, deque()).append(Abort(state.id))

    def flush(self) -> None:
        """Send as much of what waits as there is credit for. It is called for every request, so it looks at no more
        messages than it sends, and at the first one that it cannot send."""
        while self.waiting:
            number, state = next(iter(self.waiting.items()))
            state.peer = self._send(state.message())
            if state.peer is None:
                break
            del self.waiting[number]
        for peer, aborts in list(self.aborts.items()):
            link = next((link for link in self._links if peer in link.peers), None)
            while aborts and (link is None or link.send(peer, aborts[0])):  # a lost peer needs none
                aborts.popleft()
            if not aborts:
                del self.aborts[peer]

    def _send(self, message: SubmitText | Tokenize | Detokenize | Control) -> Peer | None:
        """Send to the tokenizer that the message's number selects, or the next one with credit; None without any."""
        first, own, others = message.id, self._own, self._others
        if isinstance(message, SubmitText):
            if self._keep_conversations:
                first = affinity(message)
            elif message.images:
                first, own, others = zlib.crc32(message.images[0].data), self._links, ()
        for links in (own, others):
            candidates = [(link, peer) for link in links for peer in link.peers]
            for step in range(len(candidates)):
                link, peer = candidates[(first + step) % len(candidates)]
                if link.send(peer, message):
                    return peer
        return None


def affinity(request: SubmitText) -> int:
    """The same number for all requests of a session, or of one conversation.

    A conversation is known by its messages up to the first answer; a prompt without a session has a number of its own.
    """
    if request.session:
        return zlib.crc32(request.session.encode())
    if request.messages is None:
        return request.id
    number = 0
    for message in MESSAGES.decode(request.messages):
        number = zlib.crc32(message, number)
        if MESSAGE.decode(message).role == "user":
            break
    return number
