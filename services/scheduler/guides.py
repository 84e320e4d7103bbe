"""Requests with a grammar wait here until their automaton stands, which is made beside the loop and remembered.

The compile worker made the same automaton within its limits, so making it here costs what it cost there.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Executor

import msgspec

from engine_core.grammar.guide import Guide, first_line
from engine_core.grammar.tokens import GrammarTokens
from protocol.errors import GrammarFailure, RequestError
from protocol.messages import Automaton, Rejected, SubmitTokens
from services.scheduler.aside import Aside
from services.wire import Peer

MOST_GUIDES = 512  # remembered automata
MOST_CHARACTERS = 32 << 20  # of their sources
FAMILY = 16  # requests after which an automaton is made once more: masks of one's copies are filled one by one


class GuideStatistics(msgspec.Struct, frozen=True):
    """Counters since start, and what stands now."""

    waiting: int  # now: requests
    remembered: int  # now: automata
    built: int
    hits: int  # requests whose automaton stood already
    failed: int


class Admitted(msgspec.Struct, frozen=True):
    """A request that waited, and its guide; or why there is none."""

    peer: Peer
    request: SubmitTokens
    guide: Guide | RequestError
    aborted: bool


class Waiting:
    """A request whose automaton is being made."""

    def __init__(self, peer: Peer, request: SubmitTokens) -> None:
        self.peer = peer
        self.request = request
        self.aborted = False


class Known:
    """An automaton that stands, once or several times, for requests to start from in turns."""

    def __init__(self) -> None:
        self.guides: list[Guide] = []
        self.coming = 0  # further ones that are being made
        self.uses = 0  # requests

    def next(self) -> Guide:
        self.uses += 1
        return self.guides[self.uses % len(self.guides)]


class Guides:
    """Owner of the automata that requests start from and of the requests that wait for one."""

    def __init__(self, tokens: GrammarTokens | None, threads: Executor, families: int = 1) -> None:
        self.aside: Aside[Automaton, Guide] = Aside(threads)
        self._tokens = tokens
        self._families = families  # how often one automaton is made at most
        self._known: OrderedDict[Automaton, Known] = OrderedDict()  # least recently used first
        self._characters = 0
        self._waiting: dict[Automaton, list[Waiting]] = {}
        self._ready: list[Admitted] = []
        self._built = self._hits = self._failed = 0

    @property
    def waiting(self) -> int:
        """Requests that have not been given back."""
        return sum(map(len, self._waiting.values())) + len(self._ready)

    def take(self, peer: Peer, request: SubmitTokens) -> None:
        """Keep a request with an automaton until `admit` gives it back; at once if the automaton stands."""
        automaton = request.automaton
        assert automaton is not None
        known = self._known.get(automaton)
        if known is not None:
            self._hits += 1
            self._known.move_to_end(automaton)
            self._ready.append(Admitted(peer, request, known.next(), False))
            self._multiply(automaton, known)
        elif self._tokens is None:
            self._ready.append(Admitted(peer, request, GrammarFailure("this model has no structured output"), False))
        else:
            waiting = self._waiting.setdefault(automaton, [])
            waiting.append(Waiting(peer, request))
            if len(waiting) == 1:
                self.aside.start(automaton, prepared, self._tokens, automaton)

    def abort(self, request: int) -> bool:
        """Mark a request as aborted; whether it was here. It is given back all the same, so that it ends in order."""
        for waiting in self._waiting.values():
            for each in waiting:
                if each.request.id == request:
                    each.aborted = True
                    return True
        for index, ready in enumerate(self._ready):  # its automaton was remembered, and `admit` has not been called yet
            if ready.request.id == request:
                self._ready[index] = msgspec.structs.replace(ready, aborted=True)
                return True
        return False

    def forget(self, peer: Peer) -> None:
        """The peer is gone: nobody waits for its requests."""
        for automaton, waiting in self._waiting.items():
            self._waiting[automaton] = [each for each in waiting if each.peer != peer]
        self._ready = [admitted for admitted in self._ready if admitted.peer != peer]

    def admit(self) -> list[Admitted]:
        """Requests whose automaton stands or failed."""
        for automaton, future in self.aside.collect():
            found = self._settle(automaton, future.exception() or future.result())
            for each in self._waiting.pop(automaton, ()):
                guide = found.next() if isinstance(found, Known) else found
                self._ready.append(Admitted(each.peer, each.request, guide, each.aborted))
            if isinstance(found, Known):
                self._multiply(automaton, found)
        ready, self._ready = self._ready, []
        return ready

    def statistics(self) -> GuideStatistics:
        """Counters for metrics and tests."""
        return GuideStatistics(self.waiting, len(self._known), self._built, self._hits, self._failed)

    def _multiply(self, automaton: Automaton, known: Known) -> None:
        """Have an automaton made again that many requests start from."""
        assert self._tokens is not None
        if self._known.get(automaton) is not known:
            return  # too large to be remembered
        wanted = min(self._families, 1 + known.uses // FAMILY)
        for _ in range(wanted - len(known.guides) - known.coming):
            known.coming += 1
            self.aside.start(automaton, prepared, self._tokens, automaton)

    def _settle(self, automaton: Automaton, found: Guide | BaseException) -> Known | RequestError:
        """What a build gave, remembered if it is a guide."""
        if not isinstance(found, Guide):
            self._failed += 1
            if isinstance(found, RequestError):
                return found
            return GrammarFailure(f"the structure could not be prepared: {first_line(str(found))}")
        self._built += 1
        known = self._known.setdefault(automaton, Known())
        known.guides.append(found)
        known.coming = max(0, known.coming - 1)
        self._characters += len(automaton.source)
        while len(self._known) > MOST_GUIDES or self._characters > MOST_CHARACTERS:
            oldest, forgotten = self._known.popitem(last=False)
            self._characters -= len(oldest.source) * len(forgotten.guides)
        return known


def prepared(tokens: GrammarTokens, automaton: Automaton) -> Guide:
    """A guide whose first mask has been made once, so that what is made lazily is made here. Raises GrammarFailure."""
    guide = Guide(tokens, automaton)
    guide.prime()
    return guide


def rejection(admitted: Admitted) -> Rejected:
    """The answer to a request whose automaton failed."""
    error = admitted.guide
    assert isinstance(error, RequestError)
    return Rejected(
        id=admitted.request.id, status=error.status, message=error.message, param=error.param, code=error.code
    )
