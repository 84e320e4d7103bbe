"""New requests: what can be served is queued, what cannot is rejected with the reason.

The queue is bounded in tokens and in time; rejections then say when to retry. Neither limit changes the order, and a
request that has had a slot is no longer rejected.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.kv.prefix_index import root_of
from penstock.engine_core.scheduling.lifecycle import add, cancel, end, resume
from penstock.engine_core.scheduling.options import SchedulingOptions
from penstock.engine_core.scheduling.poison_requests import signature
from penstock.engine_core.scheduling.request import Request, Sequence, stop_token_ids
from penstock.engine_core.scheduling.state import SchedulerState
from penstock.protocol.control import PauseMode
from penstock.protocol.errors import EngineFailure, InvalidRequest, Overloaded, RequestError, Unsupported, rejection
from penstock.protocol.messages import Adapter, Finish, SubmitTokens

POISONED = "a request like this one ended the engine's executor; it is refused for ten minutes"
DIGEST_BYTES = 16  # of an image
UNKNOWN = 1.0  # seconds until a retry, where nothing has ended lately


assert sys.byteorder == "little", "columns are little-endian arrays"


def longest(message: SubmitTokens, options: SchedulingOptions) -> int:
    """Most tokens a sequence can reach, prompt included."""
    prompt = len(message.token_ids) // 4
    if message.pooling is not None:
        return prompt + 1  # as if its last position were followed by a token: blocks are counted that way
    allowed = message.sampling.max_tokens
    return options.max_model_len if allowed is None else min(options.max_model_len, prompt + allowed)


def blocks_needed(message: SubmitTokens, options: SchedulingOptions) -> int:
    """Blocks of a sequence at its longest."""
    return 0 if options.encoder else options.layout().most(longest(message, options) - 1)


def validate_written(message: SubmitTokens, options: SchedulingOptions) -> None:
    """Raise InvalidRequest if its sequences cannot continue from what they have written."""
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


def validate(message: SubmitTokens, options: SchedulingOptions, capacity: int, encoder_rows: int) -> None:
    """Raise InvalidRequest, naming the parameter, if the request can never be served with so many KV blocks and rows of
    the encoder cache."""
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
    elif options.encoder:
        raise Unsupported("the model is an encoder: it makes vectors and no text", param="model")
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
    if message.adapter is not None and not options.adapter_places:
        raise Unsupported("this server serves no adapters (--enable-lora)", param="model")
    if message.written:
        validate_written(message, options)
    if message.images:
        validate_images(message, options, encoder_rows)
    need = blocks_needed(message, options)
    if need > capacity:
        groups = len(options.windows)  # tokens are told as if all groups held them
        raise InvalidRequest(
            f"prompt and max_tokens need {-(-need // groups) * options.block_size} tokens of KV cache; "
            f"the server has {capacity // groups * options.block_size}",
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


def rows_needed(message: SubmitTokens) -> int:
    """Rows of the encoder cache that its images have together: equal ones share theirs."""
    return sum({image.digest: image.rows for image in message.images}.values())


def validate_images(message: SubmitTokens, options: SchedulingOptions, rows: int) -> None:
    """Raise InvalidRequest if the request's images cannot be encoded, or stand where none can."""
    if not rows:
        why = "the model has no vision encoder, or --limit-mm-per-prompt is 0"
        raise Unsupported(f"the server takes no images: {why}", param="messages")
    if message.pooling is not None:
        raise InvalidRequest("no vector is made of a prompt with images", param=message.pooling.param or "input")
    end, tokens = 0, np.frombuffer(message.token_ids, np.int32)
    for image in message.images:
        shaped = len(image.pixels) == 3 * image.width * image.height > 0 and len(image.digest) == DIGEST_BYTES
        if not (shaped and end <= image.position and 1 <= image.rows <= image.length):
            raise InvalidRequest("what stands for an image is misshapen, or out of order", param="messages")
        end = image.position + image.length
        if end > len(tokens):
            raise InvalidRequest(f"an image ends behind the prompt's {len(tokens)} tokens", param="messages")
        if np.count_nonzero(tokens[image.position : end] == options.image_token) != image.rows:
            raise InvalidRequest("an image does not have a placeholder for each of its embeddings", param="messages")
    need = rows_needed(message)
    if need > rows:
        raise InvalidRequest(
            f"the images take {need} tokens; the encoder cache has {rows} (--mm-encoder-cache-tokens)",
            param="messages",
            code="image_too_large",
        )
    room = options.max_num_batched_tokens - options.max_num_seqs + 1  # beside all others that decode
    longest = max(image.length for image in message.images)
    if options.mutual and longest > room:
        raise InvalidRequest(
            f"an image takes {longest} tokens, which one step computes; it has room for {room} "
            "(--max-num-batched-tokens)",
            param="messages",
            code="image_too_large",
        )


def submit(state: SchedulerState, message: SubmitTokens, source: int, guide: Guide | None, now: float) -> None:
    """Queue the request, or put a `Rejected` for it into its source's outbox. Never raises for what a message holds."""
    options = state.options
    try:
        if message.id in state.requests:
            raise EngineFailure("a request with this id is already running")
        validate(message, options, state.kv.pool.capacity, state.encoder_cache.rows)
        if state.poison_requests.until and state.poison_requests.holds(signature(message), now):
            raise InvalidRequest(POISONED, code="condemned")
        if message.adapter is not None and (why := state.adapters.refused(message.adapter, now)):
            raise unserved(message.adapter, why)
        check_room(state, message)
    except RequestError as error:
        state.stats.totals.rejected += 1
        state.outboxes[source].reject(rejection(message.id, error))
        return
    start: bytes | None = None
    if options.prefix_caching:
        start = root_of(message)
    elif message.n > 1:  # its sequences share the prompt through the index; no other request can
        start = root_of(message, private=message.id)
    state.stats.arrivals += 1
    if message.adapter is not None:
        state.adapters.prefetch(message.adapter)
    request = Request(
        message=message,
        source=source,
        order=state.stats.arrivals,
        prompt_tokens=len(message.token_ids) // 4,
        limit=longest(message, options),
        root=start,
        stop_token_ids=stop_token_ids(message.sampling, options.vocab_size),
        guide=guide,
        since=now,
        traced=options.traced and message.trace.sampled,
        transfer=message.transfer,
    )
    state.requests[message.id] = request
    if message.transfer is None:
        state.stats.totals.prompt_tokens += request.prompt_tokens
    if message.written:  # not new to the server
        resume(state, request)
    elif state.steps.pause.mode is PauseMode.WAIT:
        state.steps.pause.held[message.id] = request
    else:
        add(state, request)


def check_room(state: SchedulerState, message: SubmitTokens) -> None:
    """Raise Overloaded if the prompts that wait leave no room for this one.

    An empty queue takes any, and one that goes on after a crash is not new to the server.
    """
    most, held = state.options.max_queued_tokens, state.steps.pause.held
    waiting = state.queue.tokens + (sum([request.prompt_tokens for request in held.values()]) if most and held else 0)
    if most and waiting and waiting + len(message.token_ids) // 4 > most and not message.written:
        told = f"prompts of {waiting} tokens are waiting; at most {most} are allowed to (--max-queued-tokens)"
        raise Overloaded(told, retry_after=retry_after(state))


def expire(state: SchedulerState, now: float) -> None:
    """Reject requests that have waited too long for their first slot."""
    most = state.options.max_queue_time
    if not most:
        return
    late = {sequence.request: None for sequence in state.queue if now - sequence.request.since >= most}
    for request in late:
        if not had_slot(request):
            told = f"the request has waited for {most:g} s without a free slot (--max-queue-time)"
            refuse(state, request, Overloaded(told, retry_after=retry_after(state)))


def had_slot(request: Request) -> bool:
    """Whether any of it has run, here or where it came from."""
    if request.message.written or request.spawned > len(request.sequences):
        return True
    return any(sequence.last_step or sequence.slot >= 0 for sequence in request.sequences.values())


def refuse(state: SchedulerState, request: Request, error: RequestError) -> None:
    """End a request of which nothing has run."""
    request.spawned = request.message.n  # what waits for its first sequence's prompt is refused with it
    for sequence in tuple(request.sequences.values()):
        end(state, sequence, Finish.ABORT)
    state.stats.totals.rejected += 1
    state.outboxes[request.source].reject(rejection(request.message.id, error))


def fail_adapter(state: SchedulerState, adapter: Adapter, error: str) -> None:
    """End the requests that wait for an adapter which cannot be read."""
    refusal = unserved(adapter, error)
    for request in {sequence.request: None for sequence in state.queue if sequence.request.adapter == adapter}:
        if had_slot(request):
            cancel(state, request, Finish.ERROR, refusal.message)
        else:
            refuse(state, request, refusal)


def unserved(adapter: Adapter, error: str) -> InvalidRequest:
    """What a request for an adapter is told that executors cannot read."""
    return InvalidRequest(
        f"the adapter {adapter.name!r} cannot be served: {error}", param="model", code="adapter_failed"
    )


def fail_image(state: SchedulerState, sequences: Iterable[Sequence], error: str) -> None:
    """End the requests of sequences that need an image which cannot be encoded."""
    told = f"an image of the request cannot be encoded: {error}"
    for request in {sequence.request: None for sequence in sequences}:
        if had_slot(request):
            cancel(state, request, Finish.ERROR, told)
        else:
            refuse(state, request, EngineFailure(told, param="messages", code="image_failed"))


def retry_after(state: SchedulerState) -> float:
    """Seconds in which half of what waits has probably drained, at the rate of late."""
    rate = state.stats.totals.drain_rate
    return len(state.queue) / 2 / rate if rate > 0 else UNKNOWN
