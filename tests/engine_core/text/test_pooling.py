"""Prompts of requests that pool: truncation at their ends, closings, words, and what is refused."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.text.pooling import pooled_submission
from penstock.engine_core.text.prompts import Prompter, PromptLimits
from penstock.engine_core.text.template import read_template
from penstock.engine_core.tokenizer.vocabulary import Vocabulary, read_vocabulary
from penstock.protocol.errors import InvalidRequest, Unsupported
from penstock.protocol.messages import Client, Pooling, Sampling, SubmitText

LENGTH = 64
TEXT = "Once upon a time there was a small fox who lived by the river."


class Wrapped:
    """A vocabulary whose tokenizer puts a token before and one behind every text."""

    def __init__(self, inner: Vocabulary) -> None:
        self.inner = inner
        self.longest = inner.longest

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = self.inner.encode(text, add_special_tokens=False)
        return [1, *ids, 2] if add_special_tokens else ids


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return read_vocabulary(demo_folder())


def ids(vocabulary: Any, text: str | None = TEXT, **fields: Any) -> list[int]:
    pooling = fields.pop("pooling", Pooling(kind="mean", param="input[2]"))
    fields.setdefault("keep_first", True)
    request = SubmitText(id=1, prompt=text, sampling=Sampling(), pooling=pooling, **fields)
    found = pooled_submission(request, pooling, vocabulary, 4000, LENGTH)
    return list(struct.unpack(f"<{len(found.token_ids) // 4}i", found.token_ids))


def test_a_text_with_what_the_tokenizer_puts_around_it(vocabulary: Vocabulary) -> None:
    bare = vocabulary.encode(TEXT, add_special_tokens=False)
    assert ids(Wrapped(vocabulary)) == [1, *bare, 2]
    assert ids(Wrapped(vocabulary), add_special_tokens=False) == bare


def test_whose_it_is_is_carried_over(vocabulary: Vocabulary) -> None:
    pooling, client = Pooling(kind="mean"), Client("tenant", "name")
    request = SubmitText(id=1, prompt=TEXT, sampling=Sampling(), pooling=pooling, client=client)
    assert pooled_submission(request, pooling, vocabulary, 4000, LENGTH).client == client


def test_truncation_keeps_the_beginning_and_what_stands_around(vocabulary: Vocabulary) -> None:
    bare = vocabulary.encode(TEXT, add_special_tokens=False)
    assert ids(Wrapped(vocabulary), truncate=6) == [1, *bare[:4], 2]
    assert ids(vocabulary, truncate=6, add_special_tokens=False) == bare[:6]
    assert ids(Wrapped(vocabulary), truncate=60) == [1, *bare, 2]
    assert ids(Wrapped(vocabulary), TEXT * 20, truncate=-1)[-1] == 2
    assert len(ids(Wrapped(vocabulary), TEXT * 20, truncate=-1)) == LENGTH
    assert len(ids(Wrapped(vocabulary), TEXT * 2000, truncate=-1)) == LENGTH
    assert ids(vocabulary, None, prompt_ids=struct.pack("<4i", 9, 8, 7, 6), truncate=2) == [9, 8]


def test_truncation_may_keep_the_end(vocabulary: Vocabulary) -> None:
    bare = vocabulary.encode(TEXT, add_special_tokens=False)
    assert ids(Wrapped(vocabulary), truncate=6, keep_first=False) == [1, *bare[-4:], 2]
    assert ids(vocabulary, truncate=6, add_special_tokens=False, keep_first=False) == bare[-6:]
    packed = struct.pack("<4i", 9, 8, 7, 6)
    assert ids(vocabulary, None, prompt_ids=packed, truncate=2, keep_first=False) == [7, 6]
    long = ids(Wrapped(vocabulary), TEXT * 2000, truncate=-1, keep_first=False)
    assert long[1:-1] == vocabulary.encode(TEXT * 20, add_special_tokens=False)[-len(long) + 2 :]
    closing = Pooling(kind="last", closing="The end.", param="input")
    length = len(vocabulary.encode("The end.", add_special_tokens=False))
    for first in (True, False):
        found = ids(vocabulary, None, prompt_ids=packed, truncate=length, keep_first=first, pooling=closing)
        assert len(found) == length, "the closing alone"


def test_a_closing_stays_whatever_is_cut(vocabulary: Vocabulary) -> None:
    closing = vocabulary.encode("The end.", add_special_tokens=False)
    pooling = Pooling(kind="last", closing="The end.", param="input")
    found = ids(vocabulary, pooling=pooling, truncate=8, add_special_tokens=False)
    assert len(found) == 8
    assert found[-len(closing) :] == closing
    assert ids(vocabulary, "", pooling=pooling, add_special_tokens=False) == closing


def test_words_become_tokens(vocabulary: Vocabulary) -> None:
    word = next(text for text in ("yes", "a", "the") if len(vocabulary.encode(text, add_special_tokens=False)) == 1)
    pooling = Pooling(kind="logits", words=(word,), param="input")
    request = SubmitText(id=1, prompt=TEXT, sampling=Sampling(), pooling=pooling)
    found = pooled_submission(request, pooling, vocabulary, 4000, LENGTH).pooling
    assert found is not None
    assert found.tokens == tuple(vocabulary.encode(word, add_special_tokens=False))
    assert (found.words, found.closing) == ((), "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": "", "add_special_tokens": False}, "input[2]"),
        ({"text": TEXT * 10}, "input[2]"),
        ({"text": TEXT * 5000}, "input[2]"),
        ({"text": None, "prompt_ids": b""}, "input[2]"),
        ({"text": None, "prompt_ids": struct.pack("<i", 4000)}, "input[2]"),
        ({"text": None, "prompt_ids": struct.pack("<i", -1)}, "input[2]"),
        ({"truncate": LENGTH + 1}, "truncate_prompt_tokens"),
        ({"truncate": 2}, "truncate_prompt_tokens"),
    ],
)
def test_what_cannot_be_pooled_is_refused(vocabulary: Vocabulary, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ids(Wrapped(vocabulary), **fields)
    assert caught.value.param == param


def test_a_model_without_an_output_embedding_makes_vectors_and_no_text(vocabulary: Vocabulary) -> None:
    limits = PromptLimits(vocab_size=4000, max_model_len=LENGTH, eos_token_ids=(), headless=True)
    prompter = Prompter(vocabulary, read_template(demo_folder(), vocabulary.names, ""), limits)
    text = SubmitText(id=1, prompt=TEXT, sampling=Sampling())
    with pytest.raises(Unsupported, match="no output embedding"):
        prompter.prepare(text, 0.0)
    pooling = Pooling(kind="last", param="input")
    made = prompter.prepare(SubmitText(id=1, prompt=TEXT, sampling=Sampling(), pooling=pooling), 0.0)
    assert made.request.pooling is not None
    assert (made.request.sampling.max_tokens, made.request.speculate) == (1, False)


def test_a_word_of_several_tokens_is_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(InvalidRequest, match="no token for"):
        ids(vocabulary, pooling=Pooling(kind="logits", words=("incomprehensibilities",), param="input"))


class Paired(Wrapped):
    """A vocabulary whose tokenizer joins two texts by three tokens of its own, the second of another type."""

    def encode_pair(self, first: str, second: str, most: int, *, keep_first: bool) -> tuple[list[int], int]:
        one, other = (self.inner.encode(text, add_special_tokens=False) for text in (first, second))
        room = most - 3
        while len(one) + len(other) > room:
            longer = one if len(one) > len(other) else other
            longer.pop(-1 if keep_first else 0)
        return [1, *one, 2, *other, 2], len(one) + 2


def paired(vocabulary: Vocabulary, second: str = "A fox.", **fields: Any) -> tuple[list[int], Pooling]:
    pooling = Pooling(kind="cls", classify=True, pair=second, param="documents[3]")
    fields.setdefault("keep_first", True)
    request = SubmitText(id=1, prompt="Who?", sampling=Sampling(), pooling=pooling, **fields)
    found = pooled_submission(request, pooling, Paired(vocabulary), 4000, LENGTH)  # type: ignore[arg-type]
    assert found.pooling is not None
    return list(struct.unpack(f"<{len(found.token_ids) // 4}i", found.token_ids)), found.pooling


def test_a_pair_is_joined_by_the_tokenizer(vocabulary: Vocabulary) -> None:
    one, other = (vocabulary.encode(text, add_special_tokens=False) for text in ("Who?", "A fox."))
    ids, pooling = paired(vocabulary)
    assert ids == [1, *one, 2, *other, 2]
    assert (pooling.second, pooling.classify, pooling.pair) == (len(one) + 2, True, None)


def test_a_pair_that_is_too_long_is_refused_or_cut(vocabulary: Vocabulary) -> None:
    for text in (TEXT * 20, TEXT * 5000):
        with pytest.raises(InvalidRequest) as caught:
            paired(vocabulary, text)
        assert (caught.value.param, caught.value.code) == ("documents[3]", "context_length_exceeded")
        one = vocabulary.encode("Who?", add_special_tokens=False)
        for first in (True, False):
            ids, pooling = paired(vocabulary, text, truncate=-1, keep_first=first)
            assert len(ids) == LENGTH
            assert ids[1 : pooling.second - 1] == one, "the shorter one is whole"
        assert len(paired(vocabulary, text, truncate=20)[0]) == 20
    with pytest.raises(InvalidRequest) as caught:
        paired(vocabulary, truncate=4)
    assert caught.value.param == "truncate_prompt_tokens"
