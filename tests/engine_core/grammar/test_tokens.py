"""What automata know of the model's tokens."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
from llguidance import LLMatcher

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.grammar.tokens import SHORT, GrammarTokens, TokenSplit, control_tokens, ranges, read_tokens
from tests.engine_core.grammar.vocabulary import END, OTHER_END, allowed, ids, tokens, vocabulary

ANYTHING = LLMatcher.grammar_from_regex(r"(?s:.*)")


def test_a_mask_is_as_wide_as_the_head_and_empty_beyond_the_vocabulary() -> None:
    wide = GrammarTokens(vocabulary(), 4170, (END,))
    assert (wide.width, wide.words) == (4170, 131)
    found = allowed(wide.matcher(ANYTHING).compute_bitmask())
    assert max(found) < vocabulary().size
    assert END in found


def test_control_tokens_are_never_allowed_but_for_the_ends() -> None:
    found = allowed(tokens().matcher(ANYTHING).compute_bitmask())
    marked = control_tokens(vocabulary())
    assert found & marked == {END, OTHER_END}
    assert {vocabulary().token(token) for token in marked} >= {"<think>", "</think>", "<tool_call>", "<|im_start|>"}
    assert len(found) > 3900


def test_every_end_ends() -> None:
    for end in (END, OTHER_END):
        assert end in tokens().eos
        matcher = tokens().matcher(LLMatcher.grammar_from_regex("a"))
        assert allowed(matcher.compute_bitmask()).isdisjoint(tokens().eos)
        matcher.consume_tokens(ids("a"))
        assert allowed(matcher.compute_bitmask()) == {END, OTHER_END}


def test_bytes_of_tokens_are_those_of_texts() -> None:
    text = 'naïve "{\n\t√ 😀 }'
    assert b"".join(vocabulary().raw(token) for token in ids(text)) == text.encode()
    assert tokens().tokenizer.decode_bytes(ids(text)) == text.encode()


def test_a_text_is_split_as_the_model_would() -> None:
    split = TokenSplit(vocabulary(), 4096, [END])
    assert split('{"name"') == ids('{"name"')
    assert split(b'{"name"') == ids('{"name"')
    assert tokens().split(b'{"name"') == ids('{"name"')
    assert tokens().split("√".encode()[:2]) == []


def test_what_was_split_before_is_not_split_again() -> None:
    split, made = TokenSplit(vocabulary(), 4096, [END]), []
    split._split = lambda text: made.append(text) or ids(text)  # type: ignore[method-assign, func-returns-value]
    split._remembered = lru_cache(8)(split._split)
    first = split('{"name"')
    first.append(0)
    assert split('{"name"') == split(b'{"name"') == ids('{"name"')
    assert made == ['{"name"']
    long = "a" * (SHORT + 1)
    assert split(long) == split(long) == ids(long)
    assert made[1:] == [long, long], "what is long is not kept"


def test_a_tokenizer_that_puts_a_space_first_is_split_without_it() -> None:
    class Spaced:
        size, special, added = 4, frozenset({3}), frozenset({3})

        def token(self, token_id: int) -> str:
            return ("a", " a", "\x02", "<s>")[token_id]

        def raw(self, token_id: int) -> bytes:
            return self.token(token_id).encode()

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            found, first = [], True
            for character in text:
                found.append(2 if character == "\x02" else int(first))
                first = False
            return found

    split = TokenSplit(Spaced(), 6, [3])  # type: ignore[arg-type]
    assert split("aa") == [0, 0]
    assert split.tokens[4:] == [b"", b""]


def test_a_model_without_an_end_has_no_structures(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        text = (demo_folder() / name).read_text()
        (tmp_path / name).write_text(text.replace('"eos_token_id": 4089', '"eos_token_id": null'))
    assert read_tokens(tmp_path, vocabulary_without_end()) is None
    with pytest.raises(AssertionError, match="end-of-sequence"):
        GrammarTokens(vocabulary(), 16, (END,))


def vocabulary_without_end():
    class Endless:
        eos = None
        special = frozenset[int]()

    return Endless()


def test_plain_tokens_are_of_text_alone() -> None:
    assert ranges([]) == ""
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert tokens().plain == "0-4086"  # the embedded model's control tokens come last
