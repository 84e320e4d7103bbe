"""States that the outputs of one automaton come through, with what the automaton said in each of them.

A mask, and whatever else the automaton is asked for at every token, is the same wherever the same may follow. So it is
asked once for each state. A state has a name: the position in a JSON schema, or else all that has been written. States
whose names differ may be one to the automaton; those of one name never differ.
"""

from __future__ import annotations

from typing import Any

from penstock.engine_core.grammar.positions import STRING, Position, UncountedError, schema_of, unfolded
from penstock.engine_core.grammar.tokens import GrammarTokens

MOST = 4096  # states of one automaton
MOST_STEPS = 16384  # tokens from one of them to another
MOST_COUNTED = 4096  # ends of items that are remembered
BYTES = 1024  # of a state, and of four tokens that lead on from it
UNPROVEN = 0.01  # seconds that a mask is expected to take before many were made
UNKNOWN = 1 << 30  # tokens
LONGEST = 256  # bytes of an output that is a name
Name = Position | bytes  # in a schema; or all that has been written


class State:
    """One state. What is None has not been asked. The scheduler's thread makes states; a thread of masks fills them."""

    __slots__ = ("accepting", "forced", "name", "next", "place", "run", "spans", "stopped", "used")

    def __init__(self, name: Name) -> None:
        self.name = name
        self.next: dict[int, State] = {}  # by a token that may be taken here
        self.spans: dict[int, State] | None = None  # within a string: by the characters of a token of plain text
        if isinstance(name, Position) and name.phase == STRING and not name.text:
            self.spans = {}
        self.place: Any = None  # the mask's, among those that executors keep; see `masks`
        self.forced: list[int] | None = None
        self.run = UNKNOWN  # how many that is, where the structure goes on for certain
        self.stopped: bool | None = None
        self.accepting: bool | None = None
        self.used = False  # an output has come to it since states were last forgotten

    @property
    def stored(self) -> bool:
        """Whether executors have the mask, or will with the next one that is sent."""
        return self.place is not None and self.place.store is not None


def fixed(name: bytes, *, ended: bool) -> State:
    """A state that is no automaton's, in which nothing is forced."""
    found = State(name)
    found.forced, found.stopped, found.accepting = [], ended, ended
    return found


def leads(state: State, token: int) -> bool:
    """Whether the state's mask, where it is known, allows the token."""
    text: bytes = b"" if state.place is None else state.place.text
    return token >> 3 < len(text) and bool(text[token >> 3] >> (token & 7) & 1)


class States:
    """The states of one automaton, which all its guides share. As many are kept as memory allows.

    A guide's thread alone makes states. Others may look for those that there are.
    """

    __slots__ = ("_counted", "_counts", "_known", "_schema", "_steps", "_tokens", "counting", "pace", "start")

    def __init__(self, tokens: GrammarTokens, source: str) -> None:
        self._tokens = tokens
        self._schema = schema_of(source, tokens.far)
        self._known: dict[Name, State] = {}
        self._steps = 0  # tokens that lead from one state to another
        # By state, token and the identity of a name with all items counted: that name, the one behind, and its state.
        self._counted: dict[tuple[State, int, int], tuple[Name | None, Name | None, State | None]] = {}
        self._counts: dict[Position, Position] = {}  # each such name once
        self.counting = State(b"counting")  # behind a token whose state only the position tells
        self.pace = UNPROVEN
        self.start = self._at(b"" if self._schema is None else self._schema.start)

    @property
    def size(self) -> int:
        """Bytes that they take, about, besides the first."""
        return (len(self._known) - 1) * BYTES + self._steps * BYTES // 4 + len(self._counted) * BYTES // 2

    def follow(self, state: State | None, exact: Name | None, token: int) -> tuple[Name | None, Name | None, bool]:
        """Behind a token: the name with all items counted, the state's name, which is None where it has none, and
        whether items were counted on the way. `exact` is the first of these where an output counted last, or lost its
        state; as long as nothing is counted it stays."""
        before = exact if state is None else state.name
        if not isinstance(before, Position):
            behind = None if before is None else before + self._tokens.marked(token)
            behind = behind if behind is None or len(behind) <= LONGEST else None
            return behind, behind, False
        assert self._schema is not None
        assert isinstance(exact, Position)
        text, counting = self._tokens.text([token]), state is None
        try:
            there = self._schema.follow(before, text)
        except UncountedError:
            there, counting = self._schema.follow(unfolded(before, exact), text), True
        if not counting and there.known and there.frames is before.frames:
            return exact, there, False  # nothing was opened or closed
        if not there.known:
            return self._once(unfolded(there, exact)), None, True
        name = self._schema.folded(there)
        if counting or name is not there:
            return self._once(unfolded(there, exact)), name, True
        return exact, name, False

    def count(self, state: State, exact: Name | None, token: int) -> tuple[Name | None, State | None]:
        """Behind a token that leads to `counting`: the name with all items counted, and the state. Outputs that have
        written as many items share both."""
        key = state, token, id(exact)  # which is kept, so that nothing else gets its identity
        found = self._counted.get(key)
        if found is None:
            behind, name, _ = self.follow(state, exact, token)
            there = self.find(name, make=True)
            found = self._counted[key] = exact, behind, there
        return found[1], found[2]

    def _once(self, exact: Position) -> Position:
        """The same object for all outputs that have counted as much."""
        if max(len(self._counts), len(self._counted)) >= MOST_COUNTED:
            self._forget_counts()
        return self._counts.setdefault(exact, exact)

    def find(self, name: Name | None, *, make: bool) -> State | None:
        """The state of a name; None where it has none, or has not been met and none is to be made."""
        if name is None:
            return None
        return self._at(name) if make else self._known.get(name)

    def note(self, state: State, token: int, found: State) -> None:
        """A token led from one state to another, or to `counting`."""
        if token not in state.next:
            self._steps += 1
            if self._steps > MOST_STEPS:
                self._forget()
            state.next[token] = found

    def within(self, state: State, token: int, *, make: bool = False) -> State | None:
        """The state behind a token of plain text within a string of JSON that may be any; None elsewhere, or where it
        has not been met and none is to be made. The automaton is not asked."""
        if state.spans is None:
            return None
        characters = self._tokens.characters(token)
        found = state.spans.get(characters)
        if found is not None or not characters or self._schema is None:
            return found
        name = state.name
        assert isinstance(name, Position)
        behind = self._schema.within(name, characters)
        if behind is None:
            return None
        found = state if behind is name else self._known.get(behind)
        if found is None and make:
            found = self._at(behind)
            found.stopped = found.accepting = False
        if found is not None and make:
            state.spans[characters] = found
        return found

    def _at(self, name: Name) -> State:
        found = self._known.get(name)
        if found is None:
            if len(self._known) >= MOST:
                self._forget()
            found = self._known[name] = State(name)
        return found

    def _forget(self) -> None:
        """Forget the states that no output has come to since the last time, and the newest beyond half of the room."""
        kept, self._steps = {self.start}, 0
        for state in self._known.values():
            if state.used and len(kept) < MOST // 2 and self._steps + len(state.next) <= MOST_STEPS // 2:
                kept.add(state)
                self._steps += len(state.next)
        known = {*kept, self.counting}
        for state in self._known.values():
            stays, state.used = state in kept, False
            state.next = {token: to for token, to in state.next.items() if stays and to in known}
            if state.spans is not None:
                state.spans = {count: to for count, to in state.spans.items() if stays and to in kept}
        self._known = {name: state for name, state in self._known.items() if state in kept}
        self._forget_counts()

    def _forget_counts(self) -> None:
        self._counted.clear()
        self._counts.clear()
