"""A request comes in: what can be served is queued, what cannot is told why."""

from __future__ import annotations

import sys

import numpy as np

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.kv.identity import root
from penstock.engine_core.scheduling.condemned import signature
from penstock.engine_core.scheduling.lifecycle import add, resume
from penstock.engine_core.scheduling.options import SchedulingOptions
from penstock.engine_core.scheduling.overload import check_room
from penstock.engine_core.scheduling.request import Request
from penstock.engine_core.scheduling.state import State
from penstock.engine_core.scheduling.stops import ending_tokens
from penstock.engine_core.scheduling.tracing import traces
from penstock.protocol.errors import EngineFailure, InvalidRequest, Overloaded, RequestError
from penstock.protocol.messages import Rejected, SubmitTokens

CONDEMNED = "a request like this one ended the engine's executor; it is refused for ten minutes"

assert sys.byteorder == "little", "columns are little-endian arrays"


def longest(message: SubmitTokens, options: SchedulingOptions) -> int:
    """Most tokens a choice can reach, prompt included."""
    prompt = len(message.token_ids) // 4
    if message.pooling is not None:
        return prompt + 1  # as if its last position were followed by a token: blocks are counted that way
    allowed = message.sampling.max_tokens
    return options.max_model_len if allowed is None else min(options.max_model_len, prompt + allowed)


def validate_written(message: SubmitTokens, options: SchedulingOptions) -> None:
    """Raise InvalidRequest if its choices cannot go on from where they are said to have come."""
    if len(message.written) != message.n or all(written.ended for written in message.written):
        raise InvalidRequest("a request that goes on says of each choice how far it has come, and one goes on")
    room = longest(message, options) - len(message.token_ids) // 4
    for written in message.written:
        if len(written.token_ids) % 4:
            raise InvalidRequest("what a choice has written is not an array of 32-bit token ids")
        tokens = np.frombuffer(written.token_ids, np.int32)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < options.vocab_size:
            raise InvalidRequest(f"a choice has written token ids outside 0..{options.vocab_size - 1}")
        if not written.ended and len(tokens) >= room:
            raise InvalidRequest(f"a choice that may have {room} tokens has written {len(tokens)} and goes on")


def validate(message: SubmitTokens, options: SchedulingOptions, capacity: int) -> None:
    """Raise InvalidRequest, naming the parameter, if the request can never be served."""
    if not 0 <= message.id < 1 << 63:
        raise InvalidRequest("the request id is not a 63-bit integer")
    if not message.token_ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if len(message.token_ids) % 4:
        raise InvalidRequest("the prompt is not an array of 32-bit token ids", param="prompt")
    tokens = np.frombuffer(message.token_ids, np.int32)
    if len(message.prediction) % 4:
        raise InvalidRequest("the prediction is not an array of 32-bit token ids", param="prediction")
    predicted = np.frombuffer(message.prediction, np.int32)
    if len(predicted) and not 0 <= int(predicted.min()) <= int(predicted.max()) < options.vocab_size:
        raise InvalidRequest(f"the prediction holds token ids outside 0..{options.vocab_size - 1}", param="prediction")
    if int(tokens.min()) < 0 or int(tokens.max()) >= options.vocab_size:
        raise InvalidRequest(f"the prompt holds token ids outside 0..{options.vocab_size - 1}", param="prompt")
    if message.pooling is not None:
        validate_pooling(message, options)
    elif len(tokens) + 1 > options.max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(tokens)} tokens; with one token of output the model's limit is "
            f"{options.max_model_len}",
            param="prompt",
            code="context_length_exceeded",
        )
    allowed = message.sampling.max_tokens
    if allowed is not None and allowed < 1:
        raise InvalidRequest(f"max_tokens is {allowed}; it must be at least 1", param="max_tokens")
    if not 1 <= message.n <= 1 << 16:
        raise InvalidRequest(f"n is {message.n}; it must be between 1 and 65536", param="n")
    if message.written:
        validate_written(message, options)
    need = -(-(longest(message, options) - 1) // options.block_size)
    if need > capacity:
        raise InvalidRequest(
            f"prompt and max_tokens need {need * options.block_size} tokens of KV cache; "
            f"the server has {capacity * options.block_size}",
            param="max_tokens",
        )


def validate_pooling(message: SubmitTokens, options: SchedulingOptions) -> None:
    """Raise InvalidRequest if no vector can be made of its prompt."""
    pooling, prompt = message.pooling, len(message.token_ids) // 4
    assert pooling is not None
    if message.n != 1 or message.automaton is not None:
        raise InvalidRequest("a request that pools has one choice and nothing that its output must follow")
    if prompt > options.max_model_len:
        raise InvalidRequest(
            f"the prompt has {prompt} tokens; the model's limit is {options.max_model_len}",
            param=pooling.param or "prompt",
            code="context_length_exceeded",
        )
    if not all(0 <= token < options.vocab_size for token in pooling.tokens):
        raise InvalidRequest(f"logits are wanted of token ids outside 0..{options.vocab_size - 1}")


def submit(state: State, message: SubmitTokens, source: int, guide: Guide | None, now: float) -> None:
    """Queue the request, or put a `Rejected` for it into its source's outbox. Never raises for what a message holds."""
    options = state.options
    try:
        if message.id in state.requests:
            raise EngineFailure("a request with this id is already running")
        validate(message, options, state.pool.capacity)
        if state.condemned and state.condemned.holds(signature(message), now):
            raise InvalidRequest(CONDEMNED, code="condemned")
        check_room(state, message)
    except RequestError as error:
        state.totals.rejected += 1
        later = error.retry_after if isinstance(error, Overloaded) else None
        state.outbox(source).reject(
            Rejected(
                id=message.id, status=error.status, message=error.message, param=error.param, code=error.code,
                retry_after=later,
            )
        )  # fmt: skip
        return
    start: bytes | None = None
    if options.prefix_caching:
        start = root(message.cache_salt)
    elif message.n > 1:  # its choices share the prompt through the index; nobody else can name its blocks
        start = root(message.cache_salt, private=message.id)
    state.orders += 1
    request = Request(
        message=message,
        source=source,
        order=state.orders,
        prompt_tokens=len(message.token_ids) // 4,
        limit=longest(message, options),
        root=start,
        ending=ending_tokens(message.sampling, options.vocab_size),
        guide=guide,
        since=now,
        traced=traces(state, message),
    )
    state.requests[message.id] = request
    state.totals.prompt_tokens += request.prompt_tokens
    if message.written:
        resume(state, request)
    else:
        add(state, request)
