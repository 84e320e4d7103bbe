"""What the engine client keeps of a request or a call, so that it can go on at another tokenizer."""

from __future__ import annotations

import asyncio

import msgspec

from penstock.protocol.control import Control, Controlled
from penstock.protocol.messages import Detokenize, Detokenized, SubmitText, Tokenize, Tokenized, Written
from penstock.services.client.output_collector import OutputCollector
from penstock.services.links.link import Peer


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
