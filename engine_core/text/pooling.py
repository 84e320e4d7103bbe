"""Prompts of requests that pool. Truncated they keep their beginnings, as encoders are trained, or their ends."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import msgspec

from penstock.engine_core.tokenizer.vocabulary import Vocabulary
from penstock.protocol.columns import pack, unpack_token_ids
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Pooling, SubmitText, SubmitTokens


def pooled_submission(
    request: SubmitText, pooling: Pooling, vocabulary: Vocabulary, vocab_size: int, max_model_len: int
) -> SubmitTokens:
    """The request as token ids. Raises InvalidRequest naming `pooling.param`: empty, too long, unknown ids.

    `request.truncate` keeps so many of the prompt's first tokens, or of its last without `request.keep_first`; what the
    tokenizer puts around a text and what `pooling.closing` puts behind it stay.
    """
    closing = vocabulary.encode(pooling.closing, add_special_tokens=False) if pooling.closing else []
    keep, second = kept(request.truncate, max_model_len) - len(closing), 0
    if pooling.pair is not None:
        ids, second = pair_ids(request, pooling.pair, vocabulary, keep, max_model_len)
    elif request.prompt is None:
        ids = unpack_token_ids(request.prompt_ids or b"", pooling.param)
        check_ids(ids, vocab_size, pooling.param)
        ids = part(ids, keep, request) if request.truncate else ids
    else:
        ids = text_ids(request, request.prompt, vocabulary, keep, max_model_len)
    ids = ids + closing
    if not ids:
        raise InvalidRequest(f"{pooling.param} must hold at least one token", param=pooling.param)
    if len(ids) > max_model_len:
        raise too_long(pooling.param, max_model_len, f"{len(ids)} tokens")
    return SubmitTokens(
        id=request.id,
        token_ids=pack("i", ids),
        sampling=msgspec.structs.replace(request.sampling, max_tokens=1),
        pooling=Pooling(
            kind=pooling.kind,
            tokens=chosen(pooling, vocabulary),
            param=pooling.param,
            classify=pooling.classify,
            second=second,
        ),
        speculate=False,
        priority=request.priority,
        cache_salt=request.cache_salt,
        trace=request.trace,
        client=request.client,
        adapter=request.adapter,
        rid=request.rid,
    )


def kept(truncate: int, max_model_len: int) -> int:
    """Tokens that may be kept of a prompt. Raises InvalidRequest."""
    if truncate > max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {truncate}; the model's context holds {max_model_len} tokens (--max-model-len)",
            param="truncate_prompt_tokens",
        )
    return truncate if truncate > 0 else max_model_len


def text_ids(request: SubmitText, text: str, vocabulary: Vocabulary, keep: int, max_model_len: int) -> list[int]:
    """Ids of a text, cut where the request wants it. Raises InvalidRequest."""
    pooling, longest = request.pooling, max_model_len * vocabulary.longest
    assert pooling is not None
    if len(text) > longest:
        if not request.truncate:
            raise too_long(pooling.param, max_model_len, f"{len(text)} characters, more than that many tokens can hold")
        text = text[:longest] if request.keep_first else text[-longest:]  # nothing beyond can be among the kept tokens
    ids = vocabulary.encode(text, add_special_tokens=request.add_special_tokens)
    if not request.truncate or len(ids) <= keep:
        return ids
    bare = vocabulary.encode(text, add_special_tokens=False)
    around = len(ids) - len(bare)
    if keep <= around:
        message = f"truncate_prompt_tokens leaves no room for text: {request.truncate}"
        raise InvalidRequest(message, param="truncate_prompt_tokens")
    before = next((at for at in range(around + 1) if ids[at : at + len(bare)] == bare), None)
    if before is None:
        return part(ids, keep, request)
    return ids[:before] + part(bare, keep - around, request) + ids[before + len(bare) :]


def pair_ids(
    request: SubmitText, second: str, vocabulary: Vocabulary, keep: int, max_model_len: int
) -> tuple[list[int], int]:
    """Ids of the prompt and the text that goes with it, and the first of the second type. Where they are cut, the
    longer one is first. Raises InvalidRequest."""
    pooling, longest = request.pooling, max_model_len * vocabulary.longest
    assert pooling is not None
    assert request.prompt is not None
    first, most = request.prompt, sys.maxsize
    if request.truncate:
        around, most = len(vocabulary.encode_pair("", "", keep, keep_first=True)[0]), keep
        if keep < around + 2:
            message = f"truncate_prompt_tokens leaves no room for two texts: {request.truncate}"
            raise InvalidRequest(message, param="truncate_prompt_tokens")
        # Nothing beyond can be among the kept tokens.
        first, second = (text[:longest] if request.keep_first else text[-longest:] for text in (first, second))
    elif len(first) + len(second) > 2 * longest:
        raise too_long(pooling.param, max_model_len, "more characters than that many tokens can hold")
    return vocabulary.encode_pair(first, second, most, keep_first=request.keep_first)


def part(ids: list[int], length: int, request: SubmitText) -> list[int]:
    """So many of the ids, the first or the last."""
    if length <= 0:
        return []
    return ids[:length] if request.keep_first else ids[-length:]


def chosen(pooling: Pooling, vocabulary: Vocabulary) -> tuple[int, ...]:
    """The tokens whose logits are wanted. Raises InvalidRequest for a word that this model has no token for."""
    tokens = list(pooling.tokens)
    for word in pooling.words:
        found = vocabulary.encode(word, add_special_tokens=False)
        if len(found) != 1:
            raise InvalidRequest(
                f"this model has no token for {word!r}, so it cannot score by the logits of its answer (--scorer)",
                code="unsupported",
            )
        tokens += found
    return tuple(tokens)


def check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            message = f"{param}: token id {token} is outside the vocabulary, which has {vocab_size} entries"
            raise InvalidRequest(message, param=param)


def too_long(param: str, max_model_len: int, found: str) -> InvalidRequest:
    return InvalidRequest(
        f"This model's maximum context length is {max_model_len} tokens (--max-model-len). However, {param} came to "
        f"{found}. Shorten it, or let the server do so with truncate_prompt_tokens.",
        param=param,
        code="context_length_exceeded",
    )
