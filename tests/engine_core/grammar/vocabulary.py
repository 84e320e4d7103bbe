"""The embedded model's tokens, and what tests ask of an automaton over them."""

from __future__ import annotations

from functools import cache

import numpy as np

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.grammar.sources import source_of
from penstock.engine_core.grammar.tokens import GrammarTokens, read_tokens
from penstock.engine_core.tokenizer.vocabulary import Vocabulary, read_vocabulary
from penstock.protocol.messages import Automaton, Grammar

END = 4089  # <|im_end|>
OTHER_END = 4087  # <|endoftext|>


@cache
def vocabulary() -> Vocabulary:
    return read_vocabulary(demo_folder())


@cache
def tokens() -> GrammarTokens:
    found = read_tokens(demo_folder(), vocabulary())
    assert found is not None
    return found


def ids(text: str) -> list[int]:
    return vocabulary().encode(text, add_special_tokens=False)


def automaton(kind: str, source: str = "", *, after: tuple[int, ...] = (), **words: object) -> Automaton:
    grammar = Grammar(kind=kind, source=source, **words)  # type: ignore[arg-type]
    found = source_of(grammar, tokens())
    return Automaton(source=found.text, unique=found.unique, after=np.array(after, np.int32).tobytes())


def guide(kind: str, source: str = "", *, after: tuple[int, ...] = (), **words: object) -> Guide:
    return Guide(tokens(), automaton(kind, source, after=after, **words))


def accepts(source: str, text: str, *, lead: tuple[int, ...] = ()) -> bool:
    """Whether a serialised grammar takes the text, byte by byte tokens included, and may end after it."""
    matcher = tokens().matcher(source)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = [*lead, *tokens().tokenizer.greedy_tokenize(text)]
    return bool(matcher.consume_tokens(token_ids)) and matcher.is_accepting()


def allowed(mask: bytes) -> set[int]:
    """Tokens of a mask."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())
