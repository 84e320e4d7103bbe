"""Control tokens in chats: those of the template's own text stay, what users and tools spell is text.

A control token's spelling has a key character (`<` in most vocabularies). In what a request brings, key characters
become sentinels, code points for private use, before the template is rendered, so that no slicing, joining or upper
case of it makes a control token. The control tokens that the printed text holds then are the template's; between them
sentinels become key characters again, and that text is encoded as text. See `Splitter` for templates that look at
contents or put together control tokens of their text and a content.

Trusted are system and developer messages, and in what an assistant has said the marks of reasoning and calls, which
templates parse.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from penstock.engine_core.parsers import dialect as dialects
from penstock.engine_core.parsers.dialect import Dialect
from penstock.engine_core.parsers.formats import FORMS
from penstock.engine_core.text.template import Conversation
from penstock.engine_core.tokenizer.vocabulary import Vocabulary
from penstock.protocol.errors import InvalidRequest

TRUSTED_ROLES = ("system", "developer")
SPOKEN = frozenset(("content", "reasoning_content", "reasoning"))  # of an assistant: what templates parse
# Words of messages and JSON Schema: where marks are many, these stay, since templates compare them.
STRUCTURE = frozenset(
    ("arguments", "array", "boolean", "content", "description", "enum", "function", "id", "integer", "items", "name",
     "null", "number", "object", "parameters", "properties", "reasoning", "reasoning_content", "required", "role",
     "string", "strict", "tool_call_id", "tool_calls", "type")
)  # fmt: skip
FIRST, LAST = 0xE100, 0xF8FF  # code points for private use; those below mark the end of a message (template.py)
UNESCAPING = ("striptags", "unescape")  # filters and methods that make a character of an entity

Put = Callable[[str], str]
Draw = Callable[[Conversation], str]


class Controls:
    """The control tokens of a model, as text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(texts)
        self.keys = key_characters(self.texts)
        self.alphabet = "".join(sorted({each for text in self.texts for each in text if not each.isspace()}))
        self._lengths: dict[str, list[int]] = {}  # by first character, longest first
        for text in self.texts:
            lengths = self._lengths.setdefault(text[0], [])
            if len(text) not in lengths:
                lengths.append(len(text))
        for lengths in self._lengths.values():
            lengths.sort(reverse=True)
        # Beginnings and ends of them that hold a key character.
        self._heads = {text[:end] for text in self.texts for end in range(1, len(text)) if self._keyed(text[:end])}
        self._tails = {text[at:] for text in self.texts for at in range(1, len(text)) if self._keyed(text[at:])}
        self._longest = max(map(len, self.texts), default=0)
        self._first = re.compile(f"[{re.escape(''.join(self._lengths))}]") if self.texts else None

    def split(self, text: str) -> list[str]:
        """Plain text and control tokens in turn, plain text first and last; the leftmost and longest tokens."""
        found: list[str] = []
        end = 0
        if self._first is not None:
            for start in self._first.finditer(text):
                place = start.start()
                if place < end:
                    continue
                for length in self._lengths[text[place]]:
                    if text[place : place + length] in self.texts:
                        found += (text[end:place], text[place : place + length])
                        end = place + length
                        break
        found.append(text[end:])
        return found

    def spelled(self, text: str) -> bool:
        """Whether a text holds a control token."""
        return len(self.split(text)) > 1

    def completed(self, literals: Iterable[str]) -> bool:
        """Whether a template with these texts may need a content to complete a control token: `<` + name + `>`."""
        for literal in literals:
            for length in range(1, min(self._longest, len(literal) + 1)):
                if literal[-length:] in self._heads or literal[:length] in self._tails:
                    return True
            if self._keyed(literal) and any(literal in text and literal != text for text in self.texts):
                return True
        return False

    def _keyed(self, text: str) -> bool:
        return any(key in text for key in self.keys)


def read_controls(vocabulary: Vocabulary, source: str, dialect: Dialect) -> Controls:
    """Special tokens, and of the other added ones those that the template or the dialect writes. Blanks are text."""
    marks = set(marks_of(dialect))
    added = map(vocabulary.token, vocabulary.added - vocabulary.special)
    found = [token for token in added if token in source or token in marks]
    found += map(vocabulary.token, vocabulary.special)
    return Controls(token for token in found if token.strip())


def marks_of(dialect: Dialect) -> tuple[str, ...]:
    """The marks of reasoning and of calls."""
    marks = dialects.marks_of(dialect.reasoning)
    return marks + (FORMS[dialect.calls].marks if dialect.calls is not None else ())


def key_characters(texts: Iterable[str]) -> str:
    """A few characters of which every text has one: where it can be none that has an upper and a lower case."""
    found = ""
    rest = [text for text in texts if text]
    while rest:
        counts: dict[str, int] = {}
        for text in rest:
            for each in set(text):
                if not each.isspace():
                    counts[each] = counts.get(each, 0) + 1
        caseless = [each for each in counts if each.lower() == each.upper()]
        best = max(caseless or counts, key=lambda each: (not each.isalnum(), counts[each], -ord(each)))
        found += best if best.lower() == best.upper() else best.lower() + best.upper()
        rest = [text for text in rest if not any(key in text for key in found)]
    return found


class Sentinels:
    """A sentinel for each of some characters, none of which a conversation holds."""

    def __init__(self, characters: str, taken: str) -> None:
        """`taken`: all text of the conversation."""
        room = range(FIRST, LAST - len(characters), len(characters))
        free = next((start for start in room if not holds(taken, start, len(characters))), None)
        if free is None:
            raise InvalidRequest("messages hold too many characters for private use", param="messages")
        self._put = {ord(each): free + number for number, each in enumerate(characters)}
        self._back: dict[int, str] = {code: chr(each) for each, code in self._put.items()}

    def put(self, text: str) -> str:
        for each, code in self._put.items():
            text = text.replace(chr(each), chr(code))
        return text

    def put_all(self, text: str) -> str:
        """As `put`, for many characters."""
        return text if text in STRUCTURE else text.translate(self._put)

    def back(self, text: str) -> str:
        """The text as it came, sentinels in the escapes of JSON and of addresses included."""
        text = text.translate(self._back)
        if "\\u" in text or "%" in text:
            for code, each in self._back.items():
                text = text.replace(f"\\u{code:04x}", each).replace(in_address(chr(code)), in_address(each))
        return text


def in_address(character: str) -> str:
    """A character as addresses escape it. Source: RFC 3986, section 2.1."""
    plain = character.isalnum() and character.isascii()
    return character if plain else "".join(f"%{byte:02X}" for byte in character.encode())


def holds(text: str, start: int, count: int) -> bool:
    """Whether a text has one of the `count` code points from `start` on, as itself or as JSON escapes it."""
    codes = range(start, start + count)
    return any(chr(code) in text or f"\\u{code:04x}" in text for code in codes)


class Split(msgspec.Struct, frozen=True):
    """A chat as text in which plain text cannot be taken for control tokens."""

    marked: str  # with sentinels
    pieces: tuple[str, ...]  # plain text and control tokens in turn, plain text first and last


class Splitter:
    """Finds the template's own control tokens. `literals` are the texts of the template, `source` is all of it."""

    def __init__(self, controls: Controls, dialect: Dialect, source: str, literals: Iterable[str]) -> None:
        self._controls = controls
        self._keys = controls.keys + ("&" if any(name in source for name in UNESCAPING) else "")
        self._completes = controls.completed(literals)
        # Where marks begin and end messages, none of them is what an assistant has said.
        spared = [] if dialect.channels else [mark for mark in marks_of(dialect) if mark in controls.texts]
        self._spared = re.compile(f"({'|'.join(map(re.escape, spared))})") if spared else None
        escaped = [re.escape(key) + "|" + re.escape(f"\\u{ord(key):04x}") for key in self._keys]
        self._seen = re.compile("|".join(escaped).encode(), re.IGNORECASE) if escaped else None

    def idle(self, raw: Iterable[bytes | None]) -> bool:
        """Whether nothing in a request's JSON could become part of a control token."""
        if self._seen is None:
            return True
        return not self._completes and not any(part and self._seen.search(part) for part in raw)

    def split(self, conversation: Conversation, plain: str, draw: Draw) -> Split | None:
        """How to encode a chat that reads `plain`; None: as any text, all of whose control tokens are the template's.

        The conversation is rendered once more, by `draw`, its key characters replaced. What a template prints of that
        is what it printed before, but for upper and lower case, unless it looks at key characters (an `in`, an
        escape). Then the replaced rendering counts as soon as a content spells a control token; else both must agree
        about control tokens. A template that completes control tokens is shown contents of sentinels alone.
        """
        taken = "\n".join(strings(conversation))
        sentinels = Sentinels(self._keys, taken)
        try:
            marked = draw(self._marked(conversation, sentinels.put))
        except InvalidRequest:
            if self._controls.spelled(taken):
                raise
            return None
        if self._completes:
            every = Sentinels("".join(sorted({*self._controls.alphabet, *self._keys})), taken)
            try:
                deep = draw(self._marked(conversation, every.put_all))
            except InvalidRequest:  # it looks at contents
                deep = marked
            pieces = self._cut(deep, every)
            if agree(pieces, plain):
                return self._split(deep, aligned(pieces, plain))
            if self._tokens(deep) != self._tokens(marked):
                return Split(deep, tuple(pieces))
        pieces = self._cut(marked, sentinels)
        if agree(pieces, plain):
            return self._split(marked, aligned(pieces, plain))
        if not self._controls.spelled(taken) and self._tokens(marked) == self._tokens(plain):
            return None
        return Split(marked, tuple(pieces))

    def _tokens(self, text: str) -> list[str]:
        return self._controls.split(text)[1::2]

    def _cut(self, marked: str, sentinels: Sentinels) -> list[str]:
        pieces = self._controls.split(marked)
        pieces[::2] = map(sentinels.back, pieces[::2])
        return pieces

    def _split(self, marked: str, pieces: list[str]) -> Split | None:
        """None where no content spells a control token."""
        return Split(marked, tuple(pieces)) if any(map(self._controls.spelled, pieces[::2])) else None

    def _marked(self, conversation: Conversation, put: Put) -> Conversation:
        arguments = conversation.arguments
        if "documents" in arguments:
            arguments = {**arguments, "documents": every_string(arguments["documents"], put)}
        return msgspec.structs.replace(
            conversation,
            messages=[self._message(message, put) for message in conversation.messages],
            tools=every_string(conversation.tools, put),
            arguments=arguments,
        )

    def _message(self, message: Mapping[str, Any], put: Put) -> dict[str, Any]:
        role = message.get("role")
        if role in TRUSTED_ROLES:
            return dict(message)
        found = {}
        for key, value in message.items():
            if key == "role":
                found[key] = value
            elif role == "assistant" and key in SPOKEN and isinstance(value, str):
                found[key] = self._said(value, put)
            elif key == "content" and isinstance(value, list):  # parts, whose keys and types templates compare
                found[key] = [{**part, "text": put(part["text"])} if "text" in part else part for part in value]
            else:
                found[key if key in STRUCTURE else put(key)] = every_string(value, put)
        return found

    def _said(self, text: str, put: Put) -> str:
        """Of an assistant: the marks that templates parse stay."""
        if self._spared is None:
            return put(text)
        parts = self._spared.split(text)
        parts[::2] = map(put, parts[::2])
        return "".join(parts)


def agree(pieces: list[str], plain: str) -> bool:
    """Whether two renderings are the same, but for upper and lower case between control tokens."""
    text = "".join(pieces)
    if text == plain:
        return True
    if len(text) != len(plain) or text.lower() != plain.lower():
        return False
    return aligned(pieces, plain)[1::2] == pieces[1::2]


def aligned(pieces: list[str], plain: str) -> list[str]:
    """`plain` in pieces of the same lengths."""
    ends = list(itertools.accumulate(map(len, pieces)))
    return [plain[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def every_string(value: Any, put: Put) -> Any:
    """A value of JSON, each of its strings put differently, keys included."""
    match value:
        case str():
            return put(value)
        case list():
            return [every_string(each, put) for each in value]
        case dict():
            return {put(key): every_string(each, put) for key, each in value.items()}
        case _:
            return value


def strings(conversation: Conversation) -> Iterable[str]:
    """All strings of a conversation, the trusted ones included."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    every_string([conversation.messages, conversation.tools, conversation.arguments], note)
    return found
