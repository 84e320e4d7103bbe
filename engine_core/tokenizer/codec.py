"""The library under a vocabulary: `tokenizers` for tokenizer.json, transformers for folders without one."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from tokenizers import AddedToken, Tokenizer

from penstock.engine_core.models.config_file import decode_json, unreadable
from penstock.engine_core.tokenizer.piece_cache import LEAST, PieceCache, cut_tokens
from penstock.protocol.errors import ModelError

OTHER_FILES = ("*.model", "vocab.*", "*.tiktoken", "tekken.json", "tokenizer_config.json")


@contextlib.contextmanager
def panics() -> Iterator[None]:
    """A panic of the library, which is no Exception to Python, as an error that ends one request."""
    try:
        yield
    except BaseException as error:  # guard: design 7; its type has no name that can be imported
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError("the tokenizer library failed") from error


class FastCodec:
    """A `tokenizers.Tokenizer`. Its encode releases the GIL and may run in several threads.

    size: ids are below it. decoder: tokenizer.json's description of the decoder; {} when there is none. special: what
    skip_special_tokens leaves out. added: tokens split off whole in texts, special or not. names: bos_token and its
    like, where the library knows them by itself.
    """

    def __init__(self, tokenizer: Tokenizer, names: Mapping[str, str] | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._plain: PlainTokenizer | None = None  # made when it is first needed
        self._pieces: PieceCache | None = None  # as well
        self.names = names or {}
        state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b"{}"
        self.decoder: dict[str, Any] = json.loads(state)
        added = tokenizer.get_added_tokens_decoder()
        self.size = max(tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added = frozenset(added)

    def encode(self, text: str, add_special_tokens: bool, scope: str | None = None) -> list[int]:
        """Ids of a text. Where there is a scope, parts of the text may have been encoded before for the same one; what
        the post-processor adds is left to texts without."""
        with panics():
            if scope is None or add_special_tokens or len(text) < LEAST:
                ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
                return ids
            if self._pieces is None:
                cuts = cut_tokens(self._tokenizer.get_added_tokens_decoder().values())
                self._pieces = PieceCache(cuts)
            found = self._pieces.encode(text, scope, self._whole)
        assert found is not None, "every text has ids"
        return found

    def _whole(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_pair(self, first: str, second: str, most: int, keep_first: bool) -> tuple[list[int], int]:
        """Ids of two texts as the post-processor joins them, at most so many, of which the longer text loses first and
        `keep_first` keeps beginnings; and the first of them of the second type, 0 where all are of the first."""
        tokenizer = self._tokenizer
        with panics():
            one, other = (tokenizer.encode(text, add_special_tokens=False) for text in (first, second))
            room = max(0, most - tokenizer.num_special_tokens_to_add(is_pair=True))
            for text, length in zip((one, other), shares(len(one), len(other), room), strict=True):
                text.truncate(length, direction="right" if keep_first else "left")
            found = tokenizer.post_process(one, other, add_special_tokens=True)
        return found.ids, second_type(found.type_ids)

    def encode_pieces(
        self, pieces: Sequence[str], controls: frozenset[str], add_special_tokens: bool, scope: str | None = None
    ) -> list[int]:
        """Ids of plain text and control tokens in turn, the first and the last plain. Nothing in plain text is taken
        for one of `controls`, which are the same at every call. scope: as of `encode`."""
        if self._plain is None:
            self._plain = PlainTokenizer(self._tokenizer, controls)
        with panics():
            return self._plain.encode(pieces, add_special_tokens, scope)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of all ids, special ones included."""
        with panics():
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def tokens(self) -> list[str]:
        """Every token by its id, as the vocabulary writes it; empty for an id without one."""
        found = [""] * self.size
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            found[token_id] = token
        for token_id, added in self._tokenizer.get_added_tokens_decoder().items():
            found[token_id] = added.content
        return found

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def mark_special(self, tokens: Iterable[str]) -> None:
        """Have these tokens, as far as the vocabulary holds them, split off whole in texts and count as special."""
        known = {token: token_id for token in tokens if (token_id := self.token_id(token)) is not None}
        fresh = {token: token_id for token, token_id in known.items() if token_id not in self.special}
        if fresh:
            self._tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in fresh])
            self.special |= set(fresh.values())
            self._pieces = None


class SlowCodec:
    """A tokenizer class of transformers that runs in Python. It has what `FastCodec` has."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.names: Mapping[str, str] = named_tokens(tokenizer)
        self.decoder: dict[str, Any] = {}
        self.size = len(tokenizer)
        self.special = frozenset(int(token_id) for token_id in tokenizer.all_special_ids)
        self.added = frozenset(map(int, tokenizer.added_tokens_decoder))

    def encode(self, text: str, add_special_tokens: bool, scope: str | None = None) -> list[int]:
        del scope
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)]

    def encode_pair(self, first: str, second: str, most: int, keep_first: bool) -> tuple[list[int], int]:
        """As `FastCodec.encode_pair`."""
        texts = [self.encode(text, False) for text in (first, second)]
        room = max(0, most - self._tokenizer.num_special_tokens_to_add(pair=True))
        lengths = shares(len(texts[0]), len(texts[1]), room)
        one, other = (
            text[:length] if keep_first else text[len(text) - length :]
            for text, length in zip(texts, lengths, strict=True)
        )
        ids = [int(i) for i in self._tokenizer.build_inputs_with_special_tokens(one, other)]
        return ids, second_type(self._tokenizer.create_token_type_ids_from_sequences(one, other))

    def encode_pieces(
        self, pieces: Sequence[str], controls: frozenset[str], add_special_tokens: bool, scope: str | None = None
    ) -> list[int]:
        """As `FastCodec.encode_pieces`; plain text has no added token at all, since these classes know no other way."""
        del controls, scope
        found: list[int] = []
        for number, piece in enumerate(pieces):
            if number % 2:
                found += self.encode(piece, False)
            elif piece:
                plain = self._tokenizer.tokenize(piece, split_special_tokens=True)
                found += [int(i) for i in self._tokenizer.convert_tokens_to_ids(plain)]
        return list(self._tokenizer.build_inputs_with_special_tokens(found)) if add_special_tokens else found

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            [token_id for token_id in token_ids if 0 <= token_id < self.size],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )
        return str(text)

    def tokens(self) -> list[str]:
        return [token or "" for token in self._tokenizer.convert_ids_to_tokens(list(range(self.size)))]

    def token_id(self, token: str) -> int | None:
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        if not isinstance(token_id, int) or not 0 <= token_id < self.size:
            return None
        # Some classes answer with the unknown token's id.
        return token_id if self._tokenizer.convert_ids_to_tokens(token_id) == token else None

    def mark_special(self, tokens: Iterable[str]) -> None:
        found = (self.token_id(token) for token in tokens)
        self.special |= {token_id for token_id in found if token_id is not None}


Codec: TypeAlias = FastCodec | SlowCodec


def shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths of two texts that fit so much room: the longer loses until they are equal (tokenizers' longest_first)."""
    if first + second <= room:
        return first, second
    if min(first, second) <= room // 2:
        return (first, room - first) if first <= second else (room - second, second)
    return (room // 2, room - room // 2) if first <= second else (room - room // 2, room // 2)


def second_type(types: Sequence[int]) -> int:
    """The first token of a type above 0; 0 where there is none."""
    return next((at for at, kind in enumerate(types) if kind), 0)


def read_codec(folder: Path) -> Codec:
    """The folder's tokenizer. Raises ModelError naming the file when it is missing or malformed."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return fall_back(folder)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        return FastCodec(Tokenizer.from_buffer(data))
    except Exception as error:  # guard: design 7; the library raises nothing narrower
        raise not_a_tokenizer(path, error) from None


def check_tokenizer(folder: Path, rows: int) -> None:
    """Raise ModelError, as `read_codec` would, for a folder without a tokenizer, for a file that is none, and for one
    of another model, which has tokens beyond the `rows` of this one's embedding.

    A vocabulary's tables take the library a second, so they are left out of what it reads here.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        fall_back(folder)
        return
    parts = decode_json(path, dict[str, msgspec.Raw])
    try:
        model = msgspec.json.decode(parts["model"], type=dict[str, msgspec.Raw])
        vocabulary = msgspec.json.decode(model["vocab"], type=dict[str, int] | list[msgspec.Raw])
        if isinstance(vocabulary, dict):
            empty: dict[str, object] = {"vocab": {}, "merges": []}
            model |= {name: msgspec.Raw(msgspec.json.encode(empty[name])) for name in empty.keys() & model.keys()}
            highest = max(vocabulary.values(), default=0)
        else:  # Unigram's: the library wants the unknown token to be there
            highest = len(vocabulary) - 1
        bare = parts | {"model": model, "added_tokens": []}
        Tokenizer.from_buffer(msgspec.json.encode(bare))
    except Exception as error:  # guard: design 7; the library raises nothing narrower
        raise not_a_tokenizer(path, error) from None
    if highest >= rows:
        why = f"it has tokens up to {highest}, and config.json's vocab_size is {rows}; are both of the same model?"
        raise ModelError(f"{path}: {why}")


def not_a_tokenizer(path: Path, error: Exception) -> ModelError:
    """What the library says of a file, as an error for the operator."""
    why = f"{type(error).__name__} {error}" if isinstance(error, KeyError) else str(error)
    return ModelError(f"{path}: not a tokenizer file ({why}); download it again")


def fall_back(folder: Path) -> Codec:
    """The tokenizer that transformers makes of the folder's other files (vocab.json, merges.txt, tokenizer.model)."""
    path = folder / "tokenizer.json"
    if not any(found for pattern in OTHER_FILES for found in folder.glob(pattern)):
        raise ModelError(f"{path}: no such file, and no other tokenizer; copy the tokenizer's files of the base model")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = f"transformers cannot make one of the other files ({lines[0]}); take a folder that has it"
        if any(folder.glob("*.model")) and importlib.util.find_spec("sentencepiece") is None:
            why = "the tokenizer is SentencePiece's; install the package sentencepiece, or take a folder that has it"
        raise ModelError(f"{path}: no such file, and {why}") from None
    files = {name for name in dict(tokenizer.vocab_files_names).values() if name != path.name}
    if files and not any((folder / name).is_file() for name in files):
        # Without its files transformers makes a tokenizer that knows no words.
        raise ModelError(f"{path}: no such file, and none of {', '.join(sorted(files))}; copy the base model's")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return SlowCodec(tokenizer)
    codec = FastCodec(backend, named_tokens(tokenizer))
    codec.mark_special(tokenizer.all_special_tokens)
    return codec


def named_tokens(tokenizer: Any) -> dict[str, str]:
    """The special tokens of a tokenizer of transformers that have one token each."""
    return {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}


STAND_IN = "\U0010fffd\U0010fffc"  # around the number of a control token: the last code points for private use


class PlainTokenizer:
    """A tokenizer for which control tokens in a text are text: contents of chats may spell them. It shares the model of
    another tokenizer.

    The control tokens that are meant stand in its texts as tokens of its own, behind the vocabulary, so that a text is
    cut at them as the other tokenizer would cut it.
    """

    def __init__(self, tokenizer: Tokenizer, controls: frozenset[str]) -> None:
        self._tokenizer = plain_copy(tokenizer, controls)
        added = tokenizer.get_added_tokens_decoder()
        known = {token.content: (token_id, token) for token_id, token in added.items() if token.content in controls}
        self._ids = {text: token_id for text, (token_id, _) in known.items()}
        self._stand_ins = {text: f"{STAND_IN[0]}{number}{STAND_IN[1]}" for number, text in enumerate(known)}
        self._tokenizer.add_tokens([
            AddedToken(self._stand_ins[text], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False)
            for text, (_, token) in known.items()
        ])  # fmt: skip
        self._meant = {self._tokenizer.token_to_id(each): self._ids[text] for text, each in self._stand_ins.items()}
        # Some models have their control tokens among the words, where a text may be taken for one.
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self._forbidden = frozenset(token_id for text, token_id in self._ids.items() if text != unknown)
        # Stand-ins are nowhere but where they are meant, so a text is cut at any that takes no space beside it.
        cuts = [self._stand_ins[text] for text, (_, token) in known.items() if not (token.lstrip or token.rstrip)]
        self._pieces = PieceCache(cuts)

    def encode(self, pieces: Sequence[str], add_special_tokens: bool, scope: str | None) -> list[int]:
        """Ids of plain text and control tokens in turn, the first and the last plain."""
        if not any(mark in piece for mark in STAND_IN for piece in pieces[::2]):
            text = "".join([self._stand_ins[piece] if number % 2 else piece for number, piece in enumerate(pieces)])
            if add_special_tokens:
                found = self._framed_ids(text)
            else:
                found = self._meant_ids(text) if scope is None else self._pieces.encode(text, scope, self._meant_ids)
            if found is not None:
                return found
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            ids += [self._ids[piece]] if number % 2 else self._words(piece)
        return self._framed(ids) if add_special_tokens else ids

    def _meant_ids(self, text: str) -> list[int] | None:
        """Ids of a text with stand-ins; None where a model finds a control token in plain text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return (
            None if not self._forbidden.isdisjoint(ids) else [self._meant.get(token_id, token_id) for token_id in ids]
        )

    def _framed_ids(self, text: str) -> list[int] | None:
        """The same with what the post-processor adds, in which control tokens are meant."""
        found = self._tokenizer.encode(text, add_special_tokens=True)
        own = zip(found.ids, found.special_tokens_mask, strict=True)
        if any(token_id in self._forbidden and not frame for token_id, frame in own):
            return None
        return [self._meant.get(token_id, token_id) for token_id in found.ids]

    def _words(self, text: str) -> list[int]:
        """Ids of plain text in which a model finds control tokens: cut until it finds none."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not any(token_id in self._forbidden or token_id in self._meant for token_id in ids):
            return ids
        if len(text) == 1:
            return [token_id for token_id in ids if token_id not in self._forbidden]
        middle = len(text) // 2
        return self._words(text[:middle]) + self._words(text[middle:])

    def _framed(self, ids: list[int]) -> list[int]:
        """The ids with what the post-processor puts around a text."""
        found = self._tokenizer.encode("a", add_special_tokens=True)
        own = [place for place, frame in enumerate(found.special_tokens_mask) if not frame]
        return [*found.ids[: own[0]], *ids, *found.ids[own[-1] + 1 :]]


def plain_copy(tokenizer: Tokenizer, controls: frozenset[str]) -> Tokenizer:
    """A tokenizer with the same model that takes `controls` for text."""
    added = tokenizer.get_added_tokens_decoder()
    copy = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(tokenizer, part) is not None:
            setattr(copy, part, getattr(tokenizer, part))
    for control, run in itertools.groupby(sorted(added), key=lambda token_id: added[token_id].content in controls):
        tokens = [ordinary(added[token_id]) for token_id in run]
        if control:
            copy.add_special_tokens(tokens)
        else:
            copy.add_tokens(tokens)
    if contents(copy) != contents(tokenizer):  # ids with gaps, which only a file can give
        copy = Tokenizer.from_str(tokenizer.to_str())
        copy.add_special_tokens([token for token in added.values() if token.content in controls])
    copy.encode_special_tokens = True  # special tokens in a text are text: all of `controls`, and no others
    return copy


def ordinary(token: AddedToken) -> AddedToken:
    """The token, not special."""
    return AddedToken(
        token.content, lstrip=token.lstrip, rstrip=token.rstrip, single_word=token.single_word,
        normalized=token.normalized, special=False,
    )  # fmt: skip


def contents(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
