"""A model's vocabulary: text to token ids, and what each id stands for.

How ids become text depends on the tokenizer's decoder, which is one of three shapes:

- BYTES: byte-level BPE. A token is bytes, a text is their UTF-8 (GPT-2, Llama 3, Qwen, Mistral's Tekken).
- PIECES: SentencePiece BPE with byte fallback. A token is a piece of text or a single byte (Llama 2, Mistral, Gemma).
- WINDOW: anything else; only the library's decode over neighbouring tokens knows (WordPiece, Metaspace, CTC).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine_core.folder import read_generation
from penstock.engine_core.models.config_file import read_json
from penstock.engine_core.tokenizer.codec import Codec, read_codec
from penstock.protocol.errors import ModelError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MESSAGE_ENDS = ("<|return|>", "<|call|>")  # of harmony: not all folders name both
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Shape(enum.Enum):
    """How token ids become text."""

    BYTES = "bytes"
    PIECES = "pieces"
    WINDOW = "window"


class Spelling(msgspec.Struct, frozen=True):
    """A decoder's shape and what the shape leaves open."""

    shape: Shape
    replaced: str = ""  # PIECES: what stands for `space` within tokens
    space: str = ""
    strip: int = 0  # PIECES: this many leading `stripped` characters of a text are dropped
    stripped: str = ""
    byte_fallback: bool = False


class Vocabulary:
    """One tokenizer. Encoding is safe in threads. Tables of tokens fill as tokens are seen; of BYTES, at the start."""

    def __init__(self, codec: Codec, names: Mapping[str, str]) -> None:
        codec.mark_special(names.values())
        self._codec = codec
        self.names = dict(names)  # bos_token and its like, as templates know them
        self.spelling = read_spelling(codec.decoder)
        self.size = codec.size
        self.special = codec.special
        self.added = codec.added
        self.eos = codec.token_id(names["eos_token"]) if "eos_token" in names else None
        self.texts: dict[int, str] = {}  # BYTES: of every token that is whole UTF-8
        self._raw: dict[int, bytes] = {}
        self._pieces: dict[int, str | int] = {}
        self._alphabet = byte_alphabet()
        self._tokens = codec.tokens()
        # No token stands for more characters of a text than it is written with.
        self.longest = max(map(len, self._tokens), default=1)
        if self.spelling.shape is Shape.BYTES:
            self._spell_all()
        # WINDOW: an ordinary word, if there is one. What follows it is decoded as within a text.
        self.anchor = self._find_anchor() if self.spelling.shape is Shape.WINDOW else None
        self._anchor_text = codec.decode([self.anchor]) if self.anchor is not None else ""

    def encode(self, text: str, *, add_special_tokens: bool, scope: str | None = None) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` those that the model's own post-processor adds. scope: see
        `PieceCache`."""
        return self._codec.encode(text, add_special_tokens, scope)

    def encode_pair(self, first: str, second: str, most: int, *, keep_first: bool) -> tuple[list[int], int]:
        """Token ids of two texts as the model wants them joined: see `FastCodec.encode_pair`."""
        return self._codec.encode_pair(first, second, most, keep_first)

    def encode_pieces(
        self, pieces: Sequence[str], controls: frozenset[str], *, add_special_tokens: bool, scope: str | None = None
    ) -> list[int]:
        """Token ids of plain text and control tokens in turn: see `FastCodec.encode_pieces`."""
        return self._codec.encode_pieces(pieces, controls, add_special_tokens, scope)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of the ids, as the tokenizer library prints it."""
        if skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if token_id not in self.special]
        return self._codec.decode(token_ids)

    def token(self, token_id: int) -> str:
        """The token as the vocabulary writes it; empty for an id without one."""
        return self._tokens[token_id] if 0 <= token_id < self.size else ""

    def token_id(self, token: str) -> int | None:
        """The id of a token that the vocabulary writes so; None if there is none."""
        return self._codec.token_id(token)

    def raw(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; of a special token its name."""
        raw = self._raw.get(token_id)
        if raw is None:
            raw = self._raw[token_id] = self._spell(token_id)
        return raw

    def piece(self, token_id: int) -> str | int:
        """PIECES: a token as text, or the byte that it stands for; empty for an id without a token."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self.token(token_id)
            if self.spelling.replaced:
                token = token.replace(self.spelling.replaced, self.spelling.space)
            byte = BYTE_TOKEN.fullmatch(token)
            piece = self._pieces[token_id] = int(byte[1], 16) if byte else token
        return piece

    def byte(self, token_id: int) -> int | None:
        """The byte that a byte-fallback token stands for."""
        if not self.spelling.byte_fallback:
            return None
        piece = self.piece(token_id)
        return piece if isinstance(piece, int) else None

    def _spell_all(self) -> None:
        """Bytes and texts of all tokens, now rather than in the midst of the first streams that bring them."""
        alphabet, texts, raw = self._alphabet, self.texts, self._raw
        for token_id, token in enumerate(self._tokens):
            spelled = raw[token_id] = spell_bytes(token, alphabet)
            try:
                texts[token_id] = spelled.decode()
            except UnicodeDecodeError:  # part of a character has no text of its own
                continue

    def _spell(self, token_id: int) -> bytes:
        if self.spelling.shape is Shape.BYTES:
            return spell_bytes(self.token(token_id), self._alphabet)
        if self.spelling.shape is Shape.PIECES or self.byte(token_id) is not None:
            piece = self.piece(token_id)
            return bytes([piece]) if isinstance(piece, int) else piece.encode()
        if self.anchor is None or token_id in self.special:
            return self._codec.decode([token_id]).encode()
        text = self._codec.decode([self.anchor, token_id])
        return text[len(self._anchor_text) :].encode()

    def _find_anchor(self) -> int | None:
        for token_id in range(self.size):
            token = self.token(token_id)
            if token_id not in self.special and token.isascii() and token.isalpha():
                return token_id
        return None


def spell_bytes(token: str, alphabet: Mapping[str, int]) -> bytes:
    """The bytes of a byte-level token; a token outside the byte alphabet stands for itself."""
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's character for each byte, inverted. Source: GPT-2's `bytes_to_unicode` (Radford et al., 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def read_spelling(decoder: Mapping[str, Any]) -> Spelling:
    """The shape of a decoder as tokenizer.json describes it."""
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(Shape.BYTES)
    fallback = "ByteFallback" in kinds
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return Spelling(Shape.WINDOW, byte_fallback=fallback)
    replaced = steps[0]["pattern"].get("String")
    strip: Mapping[str, Any] = steps[3] if kinds[3:] else {"content": " ", "start": 0, "stop": 0}
    if not replaced or strip["stop"]:
        return Spelling(Shape.WINDOW, byte_fallback=fallback)
    return Spelling(Shape.PIECES, replaced, steps[0]["content"], strip["start"], strip["content"], byte_fallback=True)


def read_vocabulary(folder: Path) -> Vocabulary:
    """The tokenizer of a model folder, with the special tokens that tokenizer_config.json and its like name.

    Raises ModelError naming the file that is missing or wrong.
    """
    codec = read_codec(folder)
    names, marked = read_special(folder)
    codec.mark_special(marked)
    return Vocabulary(codec, {**codec.names, **names})


def read_special(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Special tokens by name, and those that have none, of the files beside a tokenizer. Raises ModelError."""
    names: dict[str, str] = {}
    marked: list[str] = []
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / file
        if path.is_file():
            values = read_json(path).values
            names |= special_names(path, values)
            marked += added_special(path, values)
    return names, marked


def special_names(path: Path, values: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its like, and the names that `extra_special_tokens` gives."""
    extra = values.get("extra_special_tokens")
    named = {name: values.get(name) for name in SPECIAL_NAMES} | (extra if isinstance(extra, dict) else {})
    return {name: content(path, name, token) for name, token in named.items() if token is not None}


def added_special(path: Path, values: Mapping[str, Any]) -> list[str]:
    """Special tokens that have no name: those of `added_tokens_decoder` and of the lists of additional ones."""
    added = values.get("added_tokens_decoder") or {}
    if not isinstance(added, dict):
        raise ModelError(f"{path}: added_tokens_decoder must be an object")
    found = [
        content(path, "added_tokens_decoder", token)
        for token in added.values()
        if isinstance(token, dict) and token.get("special")
    ]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = values.get(key)
        if isinstance(listed, list):
            found += [content(path, key, token) for token in listed]
    return found


def content(path: Path, key: str, token: Any) -> str:
    """A token as these files write it: a string, or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ModelError(f"{path}: {key} must hold tokens as strings")
    return text


def end_tokens(folder: Path, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Ids that end an output, by the model's files and by its tokenizer's. Raises ModelError on a wrong value."""
    ends = [*read_generation(folder).eos_token_ids, *([] if vocabulary.eos is None else [vocabulary.eos])]
    messages = [token_id for token_id in sorted(vocabulary.special) if vocabulary.token(token_id) in MESSAGE_ENDS]
    return tuple(dict.fromkeys([*ends, *(messages if len(messages) == len(MESSAGE_ENDS) else [])]))
