"""A made-up automaton: which tokens may come next is a pure function of those that came, so its outputs are known."""

from __future__ import annotations

from penstock.engine_core.grammar.spacing import Habits
from penstock.protocol.errors import GrammarFailure
from penstock.protocol.messages import Automaton
from tests.sim.model import EOS, VOCAB


class FakeGuide:
    """Speaks as `engine_core.grammar.guide.Guide` does. While it is lent out for mask work nobody may call it."""

    def __init__(self, automaton: Automaton) -> None:
        seed, length, fails_at, *slow = (int(word) for word in automaton.source.split())
        self.bound, self.ended, self.lent = not automaton.after, False, False
        self.failed, self.failure = False, ""
        self._after = automaton.after
        self._state, self._left, self._fails_at = hash((seed, 0)), length, fails_at
        self._taken = 0
        self._learns = False
        self._slow = slow[0] if slow else 0
        self.state = None  # none that is known: it never goes on unasked
        self.seconds = 1.0 if self._slow else 0.0
        self._made = -1  # tokens taken as its mask was made beside the steps

    @property
    def ready(self) -> bool:
        """As if the masks of all states were known, but for so many in ten."""
        return self.failed or self._made == self._taken or hash((self._state, self._taken)) % 10 >= self._slow

    def make(self) -> None:
        self._made, self.lent = self._taken, False

    def covered(self, drafts: list[int]) -> int:
        """As if some of the masks behind drafts were known."""
        return min(abs(self._state) % 4, len(drafts)) if self._slow else len(drafts)

    @property
    def finished(self) -> bool:
        return self.bound and self._left == 0

    def allowed(self) -> frozenset[int]:
        """A third of the states leaves one token, some leave a few, some nearly all."""
        if not self.bound:
            return frozenset(range(VOCAB)) - {EOS}
        if self.ended or not self._left:
            return frozenset((EOS,))
        first, kind = abs(self._state) % VOCAB, abs(self._state) // VOCAB % 6
        count = (1, 1, 2, 3, 20, VOCAB)[kind]
        found = {(first + step) % VOCAB for step in range(count)}
        found = found if count == VOCAB and self._state % 2 else found - {EOS}
        return frozenset(found or {EOS + 1})

    def may_end(self) -> bool:
        return self.bound and EOS in self.allowed()

    def advance(self, token_ids: list[int]) -> None:
        assert not self.lent, "a guide is called while its masks are being made"
        for token in token_ids:
            self._taken += 1
            if self._taken == self._fails_at:
                raise GrammarFailure("made to fail")
            if not self.bound:
                self.bound = self._after == token.to_bytes(4, "little")
                continue
            assert token in self.allowed(), "a token that the mask forbids"
            if token == EOS:
                self.ended = True
            else:
                self._left -= 1
                self._state = hash((self._state, token))

    def step(self, token: int) -> bool:
        """Half of what leads on, as if it were known."""
        known = self.bound and not (self.failed or self.ended or self._state % 2)
        if not known or self._left < 2 or self._taken + 1 == self._fails_at or token == EOS:
            return False
        self.advance([token])
        return True

    def fail(self, reason: str) -> None:
        self.failed, self.failure = True, reason

    def forced(self) -> list[int]:
        assert not self.lent, "a guide is called while its masks are being made"
        run, guide = [], self.copy()
        guide._fails_at = 0
        while guide.bound and not guide.ended and len(run) < 20:
            allowed = guide.allowed()
            if len(allowed) > 1:
                break
            run += allowed
            guide.advance(list(allowed))
        return run

    def learn(self, shared: Habits) -> None:
        self._learns = True

    def likely(self, forced: list[int]) -> list[int]:
        """Where few tokens are allowed, the first of them, now and then one that is not."""
        assert not self.lent, "a guide is called while its masks are being made"
        run: list[int] = []
        if not self._learns or EOS in forced:
            return run
        guide = self.copy()
        guide._fails_at = 0
        guide.advance(forced)
        while guide.bound and not guide.ended and len(run) < 8:
            token = min(guide.allowed())
            if len(guide.allowed()) > 3 or token == EOS:
                break
            if guide._state % 11 == 0:
                return [*run, (token + 1) % VOCAB]
            run.append(token)
            guide.advance([token])
        return run

    def copy(self) -> FakeGuide:
        twin = object.__new__(FakeGuide)
        twin.__dict__.update(self.__dict__)
        twin.lent = twin._learns = False
        return twin

    def walk(self, drafts: list[int]) -> list[frozenset[int]]:
        """What each entry of a row may take; all, where no mask can matter any more."""
        guide, found = self.copy(), []
        guide._fails_at = 0
        for token in drafts:
            found.append(guide.allowed())
            if token not in found[-1] or guide.ended:
                return found + [frozenset(range(VOCAB))] * (len(drafts) + 1 - len(found))
            guide.advance([token])
        return [*found, guide.allowed()]
