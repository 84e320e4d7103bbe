"""Vectors and scores of the Python API, made by the code that serves them over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import SubmitText, TraceContext
from penstock.services.client.model_info import ServedModel
from penstock.services.commands.progress import Meter
from penstock.services.llm.batch import share_out
from penstock.services.llm.engine import Engine
from penstock.services.llm.params import SamplingParams, encoded
from penstock.services.llm.prompts import Order, PromptForm, listed
from penstock.services.openai.embeddings import (
    REQUEST,
    EmbeddingRequest,
    Vector,
    check_dimensions,
    check_pooler,
    text_submission,
    texts_of,
    vectors,
    vectors_of,
)
from penstock.services.openai.scoring import ScoreRequest, Sheet, Strings, pairs_of
from penstock.services.openai.validation import decode
from penstock.services.tracing.propagation import parse

NO_PARAMS = SamplingParams()


class PoolingOutput(msgspec.Struct, frozen=True):
    """A prompt's hidden state as the engine pooled it: float32 [hidden]."""

    data: Vector


class EmbeddingOutput(msgspec.Struct, frozen=True):
    """A prompt's vector, cut and scaled."""

    embedding: list[float]


class ScoringOutput(msgspec.Struct, frozen=True):
    """How well two texts go together."""

    score: float


class PoolingRequestOutput(msgspec.Struct, frozen=True):
    """`encode`'s of one prompt."""

    request_id: str
    outputs: PoolingOutput
    finished: bool = True


class EmbeddingRequestOutput(msgspec.Struct, frozen=True):
    """`embed`'s of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    finished: bool = True


class ScoringRequestOutput(msgspec.Struct, frozen=True):
    """`score`'s of one pair."""

    request_id: str
    outputs: ScoringOutput
    finished: bool = True


def embedding_request(**fields: Any) -> EmbeddingRequest:
    """The options of a call as the body of a request that has no input yet. Raises InvalidRequest naming the option."""
    given = {name: value for name, value in fields.items() if value is not None}
    return decode(encoded({**given, "input": ""}), REQUEST)


def prompt_submissions(
    prompts: PromptForm | Sequence[PromptForm], request: EmbeddingRequest, model: ServedModel
) -> list[SubmitText]:
    """A message for each prompt. Raises InvalidRequest naming the one that is wrong."""
    check_pooler(model)
    check_dimensions(request.dimensions, model)
    found = []
    for number, prompt in enumerate(listed(prompts)):
        path = f"prompts[{number}]"
        content = prompt.prompt if prompt.prompt is not None else prompt.prompt_token_ids
        assert content is not None
        if prompt.prediction is not None:
            raise InvalidRequest(f"{path}: a vector has no prediction", param=path, code="invalid_value")
        (text,) = texts_of(content, path, model, request)
        trace = parse(prompt.traceparent, prompt.tracestate)
        submit = text_submission(request, model, text, path, trace)
        found.append(msgspec.structs.replace(submit, cache_salt=prompt.cache_salt or ""))
    return found


def shaped_outputs(
    request: EmbeddingRequest, found: Sequence[Vector], model: ServedModel, first: int
) -> list[EmbeddingRequestOutput]:
    """`first` is the number in the first one's name."""
    made = vectors(request, found, model)
    return [
        EmbeddingRequestOutput(str(number), EmbeddingOutput(vector.tolist()))
        for number, vector in enumerate(made, first)
    ]


def score_sheet(data_1: Strings, data_2: Strings, truncate: int | None, model: ServedModel) -> Sheet:
    """The pairs of a call. Raises InvalidRequest and NotBuilt."""
    request = ScoreRequest(text_1=data_1, text_2=data_2, truncate_prompt_tokens=truncate)
    return Sheet(request, pairs_of(request), model, TraceContext())


async def run(engine: Engine, submits: Sequence[SubmitText], meter: Meter) -> list[Vector]:
    """The vectors, in order. Raises the first error of any of them, which ends the others."""
    found: list[Vector | None] = [None] * len(submits)
    numbered: Iterator[tuple[int, SubmitText]] = iter(enumerate(submits))
    done = 0

    async def work() -> None:
        nonlocal done
        for number, submit in numbered:  # shared: each is taken by one worker
            async with engine.request(Order(submit, None, NO_PARAMS)) as reply:
                await reply.news()
                if reply.error is not None:
                    raise await engine.reason(reply.error)
                (found[number],) = vectors_of(reply)
            done += 1
            meter.show(done, "")

    await share_out(work, min(len(submits), engine.window))
    complete = [vector for vector in found if vector is not None]
    assert len(complete) == len(found)
    return complete
