"""Requests with a grammar wait here until their automaton stands, which is made beside the loop and remembered.

The compile worker made the same automaton within its limits, so making it here costs what it cost there.
"""

from __future__ import annotations

from concurrent.futures import Executor

import msgspec

from penstock.engine_core.grammar.cache import GrammarCache, Key
from penstock.engine_core.grammar.guide import Charge, Guide, first_line
from penstock.engine_core.grammar.tokens import GrammarTokens
from penstock.protocol.errors import GrammarFailure, Overloaded, RequestError
from penstock.protocol.messages import Automaton, Rejected, SubmitTokens
from penstock.services.links.link import Peer
from penstock.services.scheduler.background_jobs import BackgroundJobs

ANY = 1 << 62  # bytes


class GrammarStatistics(msgspec.Struct, frozen=True):
    """Counters since start, and what stands now."""

    waiting: int  # now: requests
    remembered: int  # now: automata
    bytes: int  # now: of those and of others that requests still run by
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


class GrammarQueue:
    """Owner of the automata that requests start from and of the requests that wait for one."""

    def __init__(self, tokens: GrammarTokens | None, threads: Executor, families: int = 1, limit: int = ANY) -> None:
        self.jobs: BackgroundJobs[tuple[Automaton, Charge], Guide] = BackgroundJobs(threads)
        self._tokens = tokens
        self._cache = GrammarCache(limit, families)
        self._waiting: dict[Key, list[Waiting]] = {}
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
        key = (automaton.source, automaton.after)
        found = self._cache.find(key)
        if found is not None:
            self._hits += 1
            self._ready.append(Admitted(peer, without_source(request), found, False))
            self._multiply(automaton)
        elif self._tokens is None:
            self._ready.append(Admitted(peer, request, GrammarFailure("this model has no structured output"), False))
        elif key in self._waiting:
            self._waiting[key].append(Waiting(peer, without_source(request)))
        else:
            try:
                charge = self._cache.reserve(automaton)
            except RequestError as error:  # guard: design 7, one request's grammar
                self._ready.append(Admitted(peer, without_source(request), refusal(error), False))
                return
            self._waiting[key] = [Waiting(peer, without_source(request))]
            self.jobs.start((automaton, charge), prepared, self._tokens, automaton)

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
        for (automaton, charge), future in self.jobs.collect():
            key = (automaton.source, automaton.after)
            error = self._settle(key, charge, future.exception() or future.result())
            for each in self._waiting.pop(key, ()):
                guide = error or self._cache.find(key)
                assert guide is not None
                self._ready.append(Admitted(each.peer, each.request, guide, each.aborted))
            if error is None:
                self._multiply(automaton)
        ready, self._ready = self._ready, []
        return ready

    def statistics(self) -> GrammarStatistics:
        """Counters for metrics and tests."""
        cache = self._cache
        return GrammarStatistics(self.waiting, cache.entries, cache.bytes, self._built, self._hits, self._failed)

    def _multiply(self, automaton: Automaton) -> None:
        """Have an automaton made again that many requests start from."""
        assert self._tokens is not None
        while (charge := self._cache.wants(automaton)) is not None:
            self.jobs.start((automaton, charge), prepared, self._tokens, automaton)

    def _settle(self, key: Key, charge: Charge, found: Guide | BaseException) -> RequestError | None:
        """Keep what a build gave; or why it gave nothing."""
        if isinstance(found, Guide):
            self._built += 1
            self._cache.put(key, found, charge)
            return None
        self._failed += 1
        if isinstance(found, RequestError):
            return refusal(found)
        return GrammarFailure(f"the structure could not be prepared: {first_line(str(found))}")


def without_source(request: SubmitTokens) -> SubmitTokens:
    """The request for as long as it runs: of its automaton's source, which may be of megabytes, a hash will do."""
    assert request.automaton is not None
    source = f"{hash(request.automaton.source):x}"
    return msgspec.structs.replace(request, automaton=msgspec.structs.replace(request.automaton, source=source))


def refusal(error: RequestError) -> RequestError:
    """The error without the frames that it was raised in, which hold the automaton and its source."""
    return error.with_traceback(None)


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
        id=admitted.request.id, status=error.status, message=error.message, param=error.param, code=error.code,
        retry_after=error.retry_after if isinstance(error, Overloaded) else None,
    )  # fmt: skip
