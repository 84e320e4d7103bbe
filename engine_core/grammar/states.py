"""States that the outputs of one automaton come through, with what the automaton said in each of them.

A mask, and whatever else the automaton is asked for at every token, is the same wherever the same may follow. So it is
asked once for each state. A state has a name: the position in a JSON schema, or else all that has been written. States
whose names differ may be one to the automaton; those of one name never differ.
"""

from __future__ import annotations

from typing import Any

from penstock.engine_core.grammar.positions import Position, counts, schema_of
from penstock.engine_core.grammar.tokens import GrammarTokens

MOST = 4096  # states of one automaton
MOST_STEPS = 16384  # tokens from one of them to another
BYTES = 1024  # of a state, and of four tokens that lead on from it
LONGEST = 256  # bytes of an output that is a name
Name = Position | bytes  # in a schema; or all that has been written


class State:
    """One state. What is None has not been asked. The scheduler's thread makes states; a thread of masks fills them."""

    __slots__ = ("accepting", "forced", "name", "next", "place", "stopped")

    def __init__(self, name: Name) -> None:
        self.name = name
        self.next: dict[int, State] = {}  # by a token that the automaton took here
        self.place: Any = None  # the mask's, among those that executors keep; see `masks`
        self.forced: list[int] | None = None
        self.stopped: bool | None = None
        self.accepting: bool | None = None


def fixed(name: bytes, *, ended: bool) -> State:
    """A state that is no automaton's, in which nothing is forced."""
    found = State(name)
    found.forced, found.stopped, found.accepting = [], ended, ended
    return found


class States:
    """The states of one automaton, which all its guides share. As many are kept as memory allows; then it begins anew.

    A guide's thread alone makes states. Others may look for those that there are.
    """

    __slots__ = ("_known", "_schema", "_steps", "_tokens", "counting", "start")

    def __init__(self, tokens: GrammarTokens, source: str) -> None:
        self._tokens = tokens
        self._schema = schema_of(source, tokens.far)
        self._known: dict[Name, State] = {}
        self._steps = 0  # tokens that lead from one state to another
        self.counting = fixed(b"counting", ended=False)  # behind a token whose state only the position tells
        self.start = self._at(b"" if self._schema is None else self._schema.start)

    @property
    def size(self) -> int:
        """Bytes that they take, about, besides the first."""
        return (len(self._known) - 1) * BYTES + self._steps * BYTES // 4

    def name(self, name: Name | None, token_ids: list[int]) -> Name | None:
        """The name of what comes behind these tokens; None where it would be too long."""
        if name is None or not token_ids:
            return name
        if isinstance(name, Position):
            assert self._schema is not None
            return self._schema.follow(name, self._tokens.text(token_ids))
        name += b"".join(map(self._tokens.marked, token_ids))
        return name if len(name) <= LONGEST else None

    def take(self, state: State | None, before: Name | None, token: int, behind: Name | None) -> State | None:
        """The state of the name `behind`, to which a token led that the automaton took; None where it has none."""
        if behind is None or (isinstance(behind, Position) and not behind.known):
            return None
        counting = False
        name = behind
        if isinstance(behind, Position) and self._schema is not None:
            name = self._schema.folded(behind)
            counting = isinstance(before, Position) and counts(before, behind)
        found = self._at(name)
        if state is not None and token not in state.next:
            self._steps += 1
            if self._steps > MOST_STEPS:
                self._forget()
            state.next[token] = self.counting if counting else found
        return found

    def within(self, state: State, token: int, *, make: bool = False) -> State | None:
        """The state behind a token of plain text within a string of JSON that may be any; None elsewhere, or where it
        has not been met and none is to be made. The automaton is not asked."""
        name = state.name
        if not isinstance(name, Position) or self._schema is None:
            return None
        characters = self._tokens.characters(token)
        behind = self._schema.within(name, characters) if characters else None
        if behind is None:
            return None
        if behind is name:
            return state
        found = self._known.get(behind)
        if found is None and make:
            found = self._at(behind)
            found.stopped = found.accepting = False
        return found

    def _at(self, name: Name) -> State:
        found = self._known.get(name)
        if found is None:
            if len(self._known) >= MOST:
                self._forget()
            found = self._known[name] = State(name)
        return found

    def _forget(self) -> None:
        for state in self._known.values():
            state.next.clear()
        self._known = {self.start.name: self.start}
        self._steps = 0
