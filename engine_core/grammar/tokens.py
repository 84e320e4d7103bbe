"""The model's tokens as automata see them: the bytes of each, which of them are control tokens, which end an output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from penstock.engine_core.grammar.token_index import TokenIndex
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.tokenizer.vocabulary import Vocabulary, end_tokens

ABSENT = -1  # in place of the token of a byte that has none
MARKUP = re.compile(r"</?[^<>\s]+>|\[/?[^\[\]\s]+\]")
SENTINEL = "\x02"  # a text after it is split as within a text, without the space that some tokenizers put first
SHORT = 256  # characters of a text whose split is remembered: what stands between values comes again and again
REMEMBERED = 4096  # texts
JSON_TEXT = re.compile(rb'[^"\\\x00-\x1f\x7f]+')  # what stands for itself in a string
UNREAD = 255  # characters of a token that nobody has asked for


def read_tokens(folder: Path, vocabulary: Vocabulary) -> GrammarTokens | None:
    """The tokens of a model folder; None if nothing there says which token ends an output. Raises ModelError."""
    ends = end_tokens(folder, vocabulary)
    return GrammarTokens(vocabulary, read_spec(folder).vocab_size, ends) if ends else None


def limits() -> LLParserLimits:
    """The library's limits, finite everywhere: the guard against bombs, where a grammar compiles and where it runs.

    The items of a row and of a step carry an object of a thousand optional properties; a state is about 2 kB.
    """
    return LLParserLimits(
        max_items_in_row=50_000,
        step_max_items=100_000,
        step_lexer_fuel=1_000_000,
        initial_lexer_fuel=5_000_000,
        max_lexer_states=50_000,
        max_grammar_size=2_000_000,
        verbose_errors=False,  # an error's text reaches the client, so it holds no parser state
    )


def control_tokens(vocabulary: Vocabulary) -> frozenset[int]:
    """Special tokens, and added ones that look like markup (<think>, [TOOL_CALLS]): models never write them as text."""
    marks = {token_id for token_id in vocabulary.added if MARKUP.fullmatch(vocabulary.token(token_id))}
    return vocabulary.special | marks


class TokenSplit:
    """What `TokenizerWrapper` asks of a tokenizer: the tokens' bytes, and the tokens that the model would write.

    A text is bytes: a split of it spells exactly these bytes and holds no control token, whatever the text reads like
    and whatever the tokenizer's normalizer makes of it. The library takes the tokens of forced text for those that the
    grammar allows, so a wrong split would become a wrong mask.
    """

    def __init__(self, vocabulary: Vocabulary, width: int, ends: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._lead = vocabulary.encode(SENTINEL, add_special_tokens=False)
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        # Ids without a token of their own have no bytes, and what has no bytes is never allowed.
        self.tokens = [vocabulary.raw(token_id) if token_id < vocabulary.size else b"" for token_id in range(width)]
        found = control_tokens(vocabulary).union(ends)
        self.special_token_ids = sorted(token_id for token_id in found if token_id < width)
        self.controls = frozenset(self.special_token_ids)
        names = sorted(filter(None, map(vocabulary.token, self.special_token_ids)), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._remembered = lru_cache(REMEMBERED)(self._split)
        self._plain: dict[bytes, int] = {}  # tokens of text by their bytes, from the first text that asks on
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return list(self._remembered(text)) if len(text) <= SHORT else self._split(text)

    def _split(self, text: str) -> list[int]:
        """Around what spells a control token, which is split by its bytes."""
        found: list[int] = []
        place = 0
        for match in self._spelled.finditer(text):
            found += self._ordinary(text[place : match.start()])
            found += self._greedy(match[0].encode())
            place = match.end()
        return found + self._ordinary(text[place:]) if place else self._ordinary(text)

    def _ordinary(self, text: str) -> list[int]:
        if not text:
            return []
        token_ids = self._vocabulary.encode(text, add_special_tokens=False)
        if self._spells(token_ids, text):
            return token_ids
        token_ids = self._vocabulary.encode(SENTINEL + text, add_special_tokens=False)[len(self._lead) :]
        return token_ids if self._spells(token_ids, text) else self._greedy(text.encode())

    def _spells(self, token_ids: Sequence[int], text: str) -> bool:
        return self.controls.isdisjoint(token_ids) and self.spelt(token_ids) == text.encode()

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token at each place, as far as there is one."""
        if not self._plain:
            ordinary = [*enumerate(self.tokens)]
            self._plain = {text: each for each, text in reversed(ordinary) if text and each not in self.controls}
        found: list[int] = []
        place = 0
        while place < len(text):
            ends = range(min(len(text), place + self._longest), place, -1)
            end = next((end for end in ends if text[place:end] in self._plain), None)
            if end is None:
                break  # no text of the model's holds this byte
            found.append(self._plain[text[place:end]])
            place = end
        return found

    def spelt(self, token_ids: Sequence[int]) -> bytes:
        """Their bytes, of all together."""
        return b"".join([self.tokens[token_id] for token_id in token_ids])


class GrammarTokens:
    """Built once in a process, for all automata of one model.

    `width` is the number of rows of the LM head: a mask has a bit for each, and those beyond the vocabulary are 0.
    """

    def __init__(self, vocabulary: Vocabulary, width: int, eos_token_ids: Sequence[int]) -> None:
        ends = [token_id for token_id in dict.fromkeys(eos_token_ids) if token_id < width]
        assert ends, "a structure ends with an end-of-sequence token"
        self._limits = limits()
        self.width = width
        self.words = -(-width // 32)  # of 32 bits, in one mask
        self.eos = frozenset(ends)
        self._split = TokenSplit(vocabulary, width, ends)
        self.specials = {vocabulary.token(token_id): token_id for token_id in self._split.special_token_ids}
        self.ends = frozenset(vocabulary.token(token_id) for token_id in ends)  # the names of `eos`
        texts = [(token_id, text) for token_id, text in enumerate(self._split.tokens) if self._plain(token_id)]
        single = {text[0]: token_id for token_id, text in reversed(texts) if len(text) == 1}
        self.single = tuple([single.get(byte, ABSENT) for byte in range(256)])  # the token of each byte alone
        self.plain = ranges(token_id for token_id, _ in texts)
        self._index: TokenIndex | None = None
        self._commas = 0  # most of one token; 0 until it is asked for
        self._characters = bytearray(b"\xff") * width  # see `characters`; UNREAD until it is asked for
        self.tokenizer = LLTokenizer(TokenizerWrapper(self._split), eos_token=ends)
        assert self.tokenizer.vocab_size == width

    @property
    def index(self) -> TokenIndex:
        """Of the tokens of text. Made when it is first asked for: few grammars need it."""
        if self._index is None:
            texts = self._split.tokens
            self._index = TokenIndex((texts[each], each) for each in range(self.width) if self._plain(each))
        return self._index

    def _plain(self, token_id: int) -> bool:
        """Whether a token is part of a text and nothing else."""
        split = self._split
        return bool(split.tokens[token_id]) and token_id not in split.controls

    def matcher(self, source: str) -> LLMatcher:
        """An automaton at its beginning. Never raises: callers check `is_error`. Releases the GIL."""
        return LLMatcher(self.tokenizer, source, log_level=0, limits=self._limits)

    def text(self, token_ids: Sequence[int]) -> bytes:
        """Their bytes, of all together."""
        return self._split.spelt(token_ids)

    def marked(self, token_id: int) -> bytes:
        """The bytes of a token; of a control token what no text is."""
        text = self._split.tokens[token_id]
        return text if token_id not in self._split.controls else b"\xff%d\xff" % token_id

    @property
    def far(self) -> int:
        """More items of an array than one token may end."""
        self._commas = self._commas or max([text.count(b",") for text in self._split.tokens])
        return self._commas + 1

    def characters(self, token_id: int) -> int:
        """How many whole characters a token has that stand for themselves in a string of JSON; 0 for other tokens."""
        count = self._characters[token_id]
        if count == UNREAD:
            text = self._split.tokens[token_id] if self._plain(token_id) else b""
            try:
                count = min(len(text.decode()), UNREAD) % UNREAD if JSON_TEXT.fullmatch(text) else 0
            except UnicodeDecodeError:
                count = 0
            self._characters[token_id] = count
        return count

    def split(self, text: bytes) -> list[int]:
        """The tokens that the model would most likely write for these bytes; bytes cut within a character give none."""
        try:
            return self._split(text.decode())
        except UnicodeDecodeError:
            return []


def ranges(token_ids: Iterable[int]) -> str:
    """Ascending ids as llguidance writes sets of them: 0-9,12,14-20."""
    found: list[tuple[int, int]] = []
    for token_id in token_ids:
        if found and found[-1][1] == token_id - 1:
            found[-1] = (found[-1][0], token_id)
        else:
            found.append((token_id, token_id))
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in found)
