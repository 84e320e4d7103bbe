"""Requests with a grammar wait here until their automaton has been made, in threads beside the loop.

The compile worker made the same automaton within its limits, so making it here costs what it cost there. Which automata
are kept is decided by engine_core/grammar/cache.py.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain

import msgspec

from penstock.engine_core.grammar.cache import GrammarCache, GrammarCacheStatistics, Key, key_of
from penstock.engine_core.grammar.guide import Charge, Guide
from penstock.engine_core.grammar.tokens import GrammarTokens
from penstock.protocol.errors import GrammarFailure, RequestError
from penstock.protocol.messages import Automaton, SubmitTokens
from penstock.services.links.link import Peer
from penstock.services.scheduler.background_jobs import BackgroundJobs

ANY = 1 << 62  # bytes


class GrammarStatistics(msgspec.Struct, frozen=True):
    waiting: int  # requests, now
    cache: GrammarCacheStatistics


@dataclass(slots=True)
class Structured:
    """A request with a grammar: it waits until it has its guide, or the reason why there is none."""

    peer: Peer
    request: SubmitTokens
    guide: Guide | RequestError | None = None
    aborted: bool = False


class GrammarQueue:
    """Owner of the requests that wait for an automaton."""

    def __init__(self, tokens: GrammarTokens | None, threads: Executor, families: int = 1, limit: int = ANY) -> None:
        self.jobs: BackgroundJobs[tuple[Automaton, Charge], Guide] = BackgroundJobs(threads)
        self._tokens = tokens
        self._cache = GrammarCache(limit, families)
        self._waiting: dict[Key, list[Structured]] = {}
        self._ready: list[Structured] = []

    @property
    def waiting(self) -> int:
        """Requests that have not been returned."""
        return sum(map(len, self._waiting.values())) + len(self._ready)

    def take(self, peer: Peer, request: SubmitTokens) -> None:
        """Keep a request with an automaton until `admit` returns it: at its next call if the automaton is there."""
        automaton = request.automaton
        assert automaton is not None
        key = key_of(automaton)
        found = self._cache.find(automaton)
        if found is not None:
            self._ready.append(Structured(peer, without_source(request), found))
            self._build_more(automaton)
        elif self._tokens is None:
            self._ready.append(Structured(peer, request, GrammarFailure("this model has no structured output")))
        elif key in self._waiting:
            self._waiting[key].append(Structured(peer, without_source(request)))
        else:
            try:
                charge = self._cache.reserve(automaton)
            except RequestError as error:  # guard: design 7, one request's grammar
                error = error.with_traceback(None)  # its frames hold the automaton
                self._ready.append(Structured(peer, without_source(request), error))
                return
            self._waiting[key] = [Structured(peer, without_source(request))]
            self._build(automaton, charge)

    def abort(self, request: int) -> bool:
        """Mark a request as aborted; whether it was here. It is returned all the same, so that it ends in order."""
        for each in chain(*self._waiting.values(), self._ready):
            if each.request.id == request:
                each.aborted = True
                return True
        return False

    def forget(self, peer: Peer) -> None:
        """The peer is gone: drop its requests."""
        for waiting in (*self._waiting.values(), self._ready):
            waiting[:] = [each for each in waiting if each.peer != peer]

    def admit(self) -> list[Structured]:
        """Requests whose automaton was made or failed."""
        for (automaton, charge), future in self.jobs.collect():
            error = self._cache.built(automaton, charge, future.exception() or future.result())
            for each in self._waiting.pop(key_of(automaton), ()):
                each.guide = error or self._cache.guide(automaton)
                self._ready.append(each)
            if error is None:
                self._build_more(automaton)
        ready, self._ready = self._ready, []
        return ready

    def statistics(self) -> GrammarStatistics:
        return GrammarStatistics(self.waiting, self._cache.statistics())

    def _build_more(self, automaton: Automaton) -> None:
        """Make an automaton again that many requests start from."""
        while (charge := self._cache.wants(automaton)) is not None:
            self._build(automaton, charge)

    def _build(self, automaton: Automaton, charge: Charge) -> None:
        assert self._tokens is not None
        self.jobs.start((automaton, charge), prepared, self._tokens, automaton)


def without_source(request: SubmitTokens) -> SubmitTokens:
    """The request as it is kept while it runs: a hash replaces its automaton's source, which may take megabytes."""
    assert request.automaton is not None
    source = f"{hash((request.automaton.source, request.automaton.unique)):x}"
    automaton = msgspec.structs.replace(request.automaton, source=source, unique=b"")
    return msgspec.structs.replace(request, automaton=automaton)


def prepared(tokens: GrammarTokens, automaton: Automaton) -> Guide:
    """A guide that has made its first mask, so that everything lazy is made here. Raises GrammarFailure."""
    guide = Guide(tokens, automaton)
    guide.prime()
    return guide
