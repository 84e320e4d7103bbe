"""The library under a vocabulary: `tokenizers` for tokenizer.json, transformers for folders without one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.protocol.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from penstock.engine_core.text.plain import PlainTokenizer


class Codec(Protocol):
    """What a vocabulary needs of a tokenizer library."""

    size: int  # ids are below it
    decoder: dict[str, Any]  # tokenizer.json's description of the decoder; {} when there is none
    special: frozenset[int]  # what skip_special_tokens leaves out
    added: frozenset[int]  # split off whole in texts, special or not
    names: Mapping[str, str]  # bos_token and its like, where the library knows them by itself

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def encode_pieces(self, pieces: Sequence[str], controls: frozenset[str], add_special_tokens: bool) -> list[int]:
        """Ids of plain text and control tokens in turn, the first and the last plain. Nothing in plain text is taken
        for one of `controls`, which are the same at every call."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of all ids, special ones included."""

    def tokens(self) -> list[str]:
        """Every token by its id, as the vocabulary writes it; empty for an id without one."""

    def token_id(self, token: str) -> int | None: ...

    def mark_special(self, tokens: Iterable[str]) -> None:
        """Have these tokens, as far as the vocabulary holds them, split off whole in texts and count as special."""


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
    """A `tokenizers.Tokenizer`. Its encode releases the GIL and may run in several threads."""

    def __init__(self, tokenizer: Tokenizer, names: Mapping[str, str] | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._plain: PlainTokenizer | None = None  # made when it is first needed
        self.names = names or {}
        state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b"{}"
        self.decoder: dict[str, Any] = json.loads(state)
        added = tokenizer.get_added_tokens_decoder()
        self.size = max(tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added = frozenset(added)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with panics():
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_pieces(self, pieces: Sequence[str], controls: frozenset[str], add_special_tokens: bool) -> list[int]:
        """As `Codec.encode_pieces`."""
        from penstock.engine_core.text.plain import PlainTokenizer

        if self._plain is None:
            self._plain = PlainTokenizer(self._tokenizer, controls)
        with panics():
            return self._plain.encode(pieces, add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        with panics():
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def tokens(self) -> list[str]:
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
        from tokenizers import AddedToken

        known = {token: token_id for token in tokens if (token_id := self.token_id(token)) is not None}
        fresh = {token: token_id for token, token_id in known.items() if token_id not in self.special}
        if fresh:
            self._tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in fresh])
            self.special |= set(fresh.values())


class SlowCodec:
    """A tokenizer class of transformers that runs in Python."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.names: Mapping[str, str] = named_tokens(tokenizer)
        self.decoder: dict[str, Any] = {}
        self.size = len(tokenizer)
        self.special = frozenset(int(token_id) for token_id in tokenizer.all_special_ids)
        self.added = frozenset(map(int, tokenizer.added_tokens_decoder))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)]

    def encode_pieces(self, pieces: Sequence[str], controls: frozenset[str], add_special_tokens: bool) -> list[int]:
        """As `Codec.encode_pieces`; plain text has no added token at all, since these classes know no other way."""
        del controls
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


def read_codec(folder: Path) -> Codec:
    """The folder's tokenizer. Raises ModelError naming the file when it is missing or malformed."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        return fall_back(folder)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: {error}") from None
    try:
        return FastCodec(Tokenizer.from_buffer(data))
    except Exception as error:  # guard: design 7; the library raises nothing narrower
        raise ModelError(f"{path}: not a tokenizer file: {error}") from None


def fall_back(folder: Path) -> Codec:
    """The tokenizer that transformers makes of the folder's other files (vocab.json, merges.txt, tokenizer.model)."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    path = folder / "tokenizer.json"
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{path}: no such file, and transformers cannot make a tokenizer: {lines[0]}") from None
    files = {name for name in dict(tokenizer.vocab_files_names).values() if name != path.name}
    if files and not any((folder / name).is_file() for name in files):
        # Without its files transformers makes a tokenizer that knows no words.
        raise ModelError(f"{path}: no such file, and none of {', '.join(sorted(files))}")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return SlowCodec(tokenizer)
    codec = FastCodec(backend, named_tokens(tokenizer))
    codec.mark_special(tokenizer.all_special_tokens)
    return codec


def named_tokens(tokenizer: Any) -> dict[str, str]:
    """The special tokens of a tokenizer of transformers that have one token each."""
    return {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
