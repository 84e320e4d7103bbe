"""A guide walks one choice's output through its automaton: what may come next, what must, whether it is over.

A guide is not thread-safe: while a `MaskStore` fills a mask from it, nothing else may call it. It lives from the
request's admission to its end and survives preemption and new epochs, because it follows the tokens that were taken,
not the slot.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
from llguidance import LLMatcher

from penstock.engine_core.grammar.regexes import MOST_FORCED
from penstock.engine_core.grammar.spacing import Habits, Spacing
from penstock.engine_core.grammar.states import Name, State, States, fixed, leads
from penstock.engine_core.grammar.tokens import GrammarTokens
from penstock.engine_core.grammar.unique_items import UniqueItems
from penstock.protocol.errors import EngineFailure, GrammarFailure
from penstock.protocol.messages import Automaton

MOST_UNTAKEN = 512  # tokens that the automaton takes at once: 0.3 ms
LONGEST_RUN = 64  # forced tokens looked at in one go
SHORT_RUN = 16  # forced tokens behind which more is guessed
FREE = 0.01  # seconds that a token's mask may take at any time: it is made beside a forward pass
NEWEST = 1 / 16  # share of the last mask in what one is expected to take
MOST_OWED = 0.25  # seconds beyond that, in all, before others have waited long enough


class Charge:
    """Bytes of memory that count while this object lives: every guide of an automaton holds it."""

    __slots__ = ("__weakref__", "_size", "states")

    def __init__(self, size: int) -> None:
        self._size = size
        self.states: States | None = None  # that it pays for

    @property
    def size(self) -> int:
        return self._size if self.states is None else self._size + self.states.size


class Guide:
    """One choice's automaton. The constructor and `advance` raise GrammarFailure for an automaton error."""

    __slots__ = (
        "__weakref__", "_after", "_failure", "_free", "_matcher", "_name", "_over", "_owed", "_seen", "_spacing",
        "_spot", "_tokens", "_untaken", "bound", "charge", "family", "lent", "seconds", "state", "states", "unique",
    )  # fmt: skip

    def __init__(self, tokens: GrammarTokens, automaton: Automaton) -> None:
        self._tokens = tokens
        self._matcher = tokens.matcher(automaton.source)
        self._free = fixed(b"free", ended=False)  # where any token but an end may follow
        self._over = fixed(b"over", ended=True)  # where nothing but ends may
        self._untaken: list[int] = []  # tokens of the output that the matcher has not taken
        self.unique = UniqueItems(tokens, automaton.unique) if automaton.unique else None
        self._after: tuple[int, ...] = tuple(np.frombuffer(automaton.after, np.int32).tolist())
        self.family = self._matcher  # copies share what its lexer has learned, behind a lock
        self._seen = 0  # tokens of `after` that the output ends with
        self._failure = ""
        self._owed = 0.0  # seconds
        self._spacing: Spacing | None = None
        self.charge: Charge | None = None  # of the automaton, where memory is counted
        self.bound = not self._after  # constrained now
        check(self._matcher)
        self.states = States(tokens, automaton.source) if self.unique is None else None
        self._name: Name | None = None  # of where the output was when it counted last, or lost its state
        self.state: State | None = None  # whose mask the next token has; None: of no known one
        self._spot: State | None = None  # stands for it then
        self.lent = False  # the mask is being made beside the steps
        self.seconds = 0.0  # that a mask may take which is not there yet
        self._stand()

    @property
    def ended(self) -> bool:
        """Whether an end-of-sequence token was taken."""
        return self.state is self._over

    @property
    def spot(self) -> State:
        """What holds the mask of the next token: its state, or else one of this output alone, until it goes on."""
        if self.state is not None:
            return self.state
        if self._spot is None:
            self._spot = State(b"")
        return self._spot

    @property
    def ready(self) -> bool:
        """Whether the mask of the next token is there, or any will do."""
        return self.failed or self.spot.stored

    @property
    def pace(self) -> float:
        """Seconds that a mask of this automaton is expected to take."""
        return MOST_OWED if self.states is None else self.states.pace

    def took(self, seconds: float, masks: int) -> None:
        """The next mask came with others of a step, all of which took so long to make."""
        self.seconds = seconds
        if self.states is not None:
            self.states.pace += (seconds / masks - self.states.pace) * NEWEST

    @property
    def matcher(self) -> LLMatcher:
        """The automaton where the output is, for `MaskStore`, which leaves it as it found it. In states that are known
        it is not needed, so it takes the output's tokens when it is asked for."""
        if self._untaken:
            untaken, self._untaken = self._untaken, []
            self._teach(untaken)
            if not self._matcher.consume_tokens(untaken):
                self.fail(first_line(self._matcher.get_error()))
        return self._matcher

    def share(self, other: Guide) -> None:
        """Have the states of a guide of the same automaton. Both are at its beginning."""
        if other.states is not None:
            self.states = other.states
            self._stand()

    def _stand(self) -> None:
        """At the beginning of the structure, or before it."""
        self.state = self._free
        if self.bound:
            self.state = None if self.states is None else self.states.start
            self._name = None if self.states is None else self.states.start.name

    @property
    def finished(self) -> bool:
        """The structure is complete and nothing but an end-of-sequence token may follow."""
        if not self.bound:
            return False
        state = self.state
        if state is None or state.stopped is None:
            stopped = bool(self.matcher.is_stopped())
            if state is not None and not self._matcher.is_error():
                state.stopped = stopped
            return stopped
        return state.stopped

    def advance(self, token_ids: list[int]) -> None:
        """Take tokens of the output, in order; the end-of-sequence token too, if one came.

        Raises GrammarFailure for an error of the automaton, EngineFailure for a token that no mask allowed; the guide
        is of no use afterwards.
        """
        if self._failure:
            raise GrammarFailure(self._failure)
        if self.bound:
            self._consume(token_ids)
            return
        for place, token in enumerate(token_ids):
            if self.bound:
                self._consume(token_ids[place:])
                return
            self._seen = follow(self._after, self._seen, token)
            if self._seen == len(self._after):
                self.bound = True
                self._stand()

    def forced(self) -> list[int]:
        """Tokens that come next whatever the model thinks, split as it would split them; [] if it has a choice.

        The last one may stand for the beginning of what follows the run, so they are guesses: to be verified, never
        to be injected. In a finished structure: an end-of-sequence token.
        """
        state = self.state
        if state is not None and state.forced is not None:
            return state.forced
        if not self.bound or self.ended:
            return []
        found = [self._tokens.tokenizer.eos_token] if self.finished else self.matcher.compute_ff_tokens()
        if len(found) > MOST_FORCED:
            self.fail(f"more than {MOST_FORCED} tokens follow without a choice")
            return []
        found = found[:LONGEST_RUN]
        if state is not None and not self._matcher.is_error():
            state.forced = found
            if state.stopped is False:
                state.run = len(found)
        return found

    def learn(self, shared: Habits) -> None:
        """Have `likely` guess, by where this output and others put whitespace. Copies don't."""
        self._spacing = Spacing(self._tokens, shared)

    def likely(self, forced: list[int]) -> list[int]:
        """Tokens that come next, behind what is `forced` now, if whitespace stands where it mostly does, split as the
        model would split them; [] where there is a choice beyond that. Guesses, like forced tokens."""
        if self._spacing is None or not self.bound or self.ended or self._failure or self._owed:
            return []
        if len(forced) > SHORT_RUN or self.finished:
            return []
        return self._spacing.likely(self.matcher, forced)

    def prime(self) -> None:
        """Make now what the automaton makes when it is first asked, for all copies. Raises GrammarFailure."""
        self.matcher.compute_bitmask()
        self.matcher.compute_ff_tokens()
        check(self.matcher)

    def copy(self) -> Guide:
        """A guide at the same place that goes its own way: for the other choices of a request."""
        twin = object.__new__(Guide)
        twin._tokens, twin.charge = self._tokens, self.charge
        twin._matcher, twin.family = self._matcher.deep_copy(), self.family
        twin._free, twin._over = self._free, self._over
        twin._untaken = self._untaken.copy()
        twin._name, twin.state, twin.states = self._name, self.state, self.states
        twin.unique = None if self.unique is None else self.unique.copy()
        twin._after, twin._seen, twin._failure = self._after, self._seen, self._failure
        twin._owed, twin._spacing, twin._spot = self._owed, None, None
        twin.lent, twin.seconds = False, 0.0
        twin.bound = self.bound
        return twin

    def free_before(self, drafts: list[int]) -> int:
        """How many of the entries after nothing, draft 0, draft 1, ... are free: all while `after` is not complete."""
        if self.bound:
            return 0
        seen = self._seen
        for place, token in enumerate(drafts):
            seen = follow(self._after, seen, token)
            if seen == len(self._after):
                return place + 1
        return len(drafts) + 1

    def before_end(self, drafts: list[int]) -> list[int]:
        """The drafts up to the first that ends the output: nothing follows that one."""
        eos = self._tokens.eos
        return next((drafts[:place] for place, token in enumerate(drafts) if token in eos), drafts)

    def may_end(self) -> bool:
        """Whether the output, ended here, follows its structure."""
        if not self.bound or self.ended:
            return self.bound
        state = self.state
        if state is None or state.accepting is None:
            accepting = bool(self.matcher.is_accepting())
            if state is not None and not self._matcher.is_error():
                state.accepting = accepting
            return accepting
        return state.accepting

    def route(self, drafts: list[int]) -> list[State | None]:
        """The states of the entries after nothing, draft 0, draft 1, ...; None from the first that is not known on."""
        found: list[State | None] = [self.spot]
        if not drafts:
            return found
        tokens, states, state = self._tokens, self.states, self.state
        free = self.free_before(drafts)
        if free or state is self._over or state is self._free:
            found = [state] * min(free or len(drafts) + 1, len(drafts) + 1)
            if len(found) <= len(drafts):
                state = None if states is None else states.start
                found.append(state)
        for draft in drafts[len(found) - 1 :]:
            if state is None or states is None:
                break
            if draft in tokens.eos:
                return found + [self._free] * (len(drafts) + 1 - len(found))
            state = state.next.get(draft) or states.within(state, draft)
            if state is states.counting:
                break
            found.append(state)
        return found + [None] * (len(drafts) + 1 - len(found))

    def covered(self, drafts: list[int]) -> int:
        """How many of the drafts may be sent without a mask that is not there."""
        stored = [state is not None and state.stored for state in self.route(drafts)]
        return len(drafts) if self.failed else [*stored[1:], False].index(False)

    @property
    def failed(self) -> bool:
        return bool(self._failure)

    @property
    def failure(self) -> str:
        """Why the automaton is of no use any more; empty while it is."""
        return self._failure

    def fail(self, reason: str) -> None:
        """A mask could not be made: the next `advance` raises GrammarFailure with this reason."""
        self._failure = self._failure or reason
        self.state = self._free

    def spend(self, seconds: float, masks: int) -> None:
        """Account for the time that so many masks took; fails when the batch has waited for them too long."""
        self._owed = max(0.0, self._owed + seconds - FREE * masks)
        if self._owed > MOST_OWED:
            self.fail(f"following the structure takes much more than {FREE * 1000:.0f} ms a token")

    def _consume(self, token_ids: list[int]) -> None:
        ends, unique, states = self._tokens.eos, self.unique, self.states
        for token in token_ids:
            if len(self._untaken) >= MOST_UNTAKEN:
                check(self.matcher)
            state = self.state
            known = None if state is None else state.next.get(token)
            if known is None and state is not None and states is not None:
                known = states.within(state, token, make=True)
            if known is not None:
                self._untaken.append(token)
                if states is not None and state is not None and known is states.counting:
                    self._name, known = states.count(state, self._name, token)
                    self._spot = None
                self.state = known
            elif token in ends:
                if not self.may_end():
                    raise EngineFailure("the output ended inside its structure")
                self.state = self._over
                self._teach(self._untaken)
                if self._spacing is not None:
                    self._spacing.end()
                    self._spacing = None  # it has all tokens, though the automaton may not
                continue
            elif self.ended:
                raise EngineFailure("the output went on after its end")
            else:
                self._find(token)
            if unique is not None:
                unique.take(token)

    def step(self, token: int) -> bool:
        """Take one token of the output if it leads where the structure is known to go on; otherwise nothing is taken,
        and it is for `advance`."""
        state, states, name = self.state, self.states, self._name
        if state is None:
            return False
        known = state.next.get(token)
        if known is None and state.spans is not None:
            known = state.spans.get(self._tokens.characters(token))
        if states is not None and known is states.counting:
            name, known = states.count(state, name, token)
        if known is None or known.stopped is not False or len(self._untaken) >= MOST_UNTAKEN:
            return False
        self.state, self._name = known, name
        self._untaken.append(token)
        return True

    def _teach(self, token_ids: list[int]) -> None:
        """The automaton takes these tokens, and so does what guesses whitespace: it reads none before it is asked."""
        if self._spacing is not None:
            self._spacing.take(token_ids)

    def _find(self, token: int) -> None:
        """Go to the state behind a token that was not taken here before. The automaton takes it, unless the mask allows
        it and it leads to a state that is known."""
        states, state, found = self.states, self.state, None
        if states is not None:
            exact, name, counting = states.follow(state, self._name, token)
            found = states.find(name, make=False)
        if found is not None and state is not None and leads(state, token):
            self._untaken.append(token)
        elif not self.matcher.consume_token(token):
            check(self._matcher)
            raise EngineFailure(f"token {token} is not allowed here")
        else:
            self._teach([token])
        if states is not None:
            self._name = exact
            found = found or states.find(name, make=True)
            if state is not None and found is not None:
                states.note(state, token, states.counting if counting else found)
        self.state, self._spot = found, None


def go_on(
    guides: Sequence[Guide], tokens: Sequence[int], aside: Sequence[bool], ends: Set[int], most: int, long: float
) -> list[int]:
    """Have each guide take its token if that leads to a known state where the structure goes on and no more than `most`
    tokens are forced. Returns the places of the others, which have taken nothing: those set `aside`, those whose token
    is one of `ends`, and those whose last mask took longer than `long`, are among them. One loop without calls: most
    constrained rows go through it in every step."""
    others: list[int] = []
    for place, (guide, token, left) in enumerate(zip(guides, tokens, aside, strict=True)):
        state = guide.state
        if state is not None and not left and token not in ends and guide.seconds <= long:
            known = state.next.get(token)
            if known is None and state.spans is not None:
                known = state.spans.get(guide._tokens.characters(token))
            if known is not None and known.run <= most and len(guide._untaken) < MOST_UNTAKEN:
                guide.state = known
                guide._untaken.append(token)
                continue
        others.append(place)
    return others


def follow(after: tuple[int, ...], seen: int, token: int) -> int:
    """How many tokens of `after` an output ends with that ended with `seen` of them and goes on by `token`."""
    text = (*after[:seen], token)
    return next(count for count in range(len(text), -1, -1) if text[len(text) - count :] == after[:count])


def check(matcher: LLMatcher) -> None:
    """Raise GrammarFailure if the matcher is in error: its masks would look like a normal end."""
    if matcher.is_error():
        raise GrammarFailure(f"the structure cannot be followed any further: {first_line(matcher.get_error())}")


def first_line(text: str) -> str:
    """An error of the automaton library without the state that it may print below."""
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else "no reason was given"
