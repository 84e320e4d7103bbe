"""A tokenizer for which control tokens in a text are text: contents of chats may spell them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer

STAND_IN = "\U0010fffd"  # around the number of a control token: the last code point for private use


class PlainTokenizer:
    """Shares the model of another tokenizer.

    The control tokens that are meant stand in its texts as tokens of its own, behind the vocabulary, so that a text is
    cut at them as the other tokenizer would cut it.
    """

    def __init__(self, tokenizer: Tokenizer, controls: frozenset[str]) -> None:
        self._tokenizer = plain_copy(tokenizer, controls)
        added = tokenizer.get_added_tokens_decoder()
        known = {token.content: (token_id, token) for token_id, token in added.items() if token.content in controls}
        self._ids = {text: token_id for text, (token_id, _) in known.items()}
        self._stand_ins = {text: f"{STAND_IN}{number}{STAND_IN}" for number, text in enumerate(known)}
        self._tokenizer.add_tokens([
            AddedToken(self._stand_ins[text], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False)
            for text, (_, token) in known.items()
        ])  # fmt: skip
        self._meant = {self._tokenizer.token_to_id(each): self._ids[text] for text, each in self._stand_ins.items()}
        # Some models have their control tokens among the words, where a text may be taken for one.
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self._forbidden = frozenset(token_id for text, token_id in self._ids.items() if text != unknown)

    def encode(self, pieces: Sequence[str], add_special_tokens: bool) -> list[int]:
        """Ids of plain text and control tokens in turn, the first and the last plain."""
        if not any(STAND_IN in piece for piece in pieces[::2]):
            text = "".join([self._stand_ins[piece] if number % 2 else piece for number, piece in enumerate(pieces)])
            found = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            own = zip(found.ids, found.special_tokens_mask, strict=True)
            if not any(token_id in self._forbidden and not frame for token_id, frame in own):
                return [self._meant.get(token_id, token_id) for token_id in found.ids]
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            ids += [self._ids[piece]] if number % 2 else self._words(piece)
        return self._framed(ids) if add_special_tokens else ids

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
