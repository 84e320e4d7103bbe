"""The api's routes: the tables that requests are routed by and openapi.json is made from, one for each listener."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import msgspec
from starlette.types import ASGIApp

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import InvalidRequest
from penstock.services.http.middleware import Dialect, Middleware
from penstock.services.http.request_context import RequestContext
from penstock.services.http.routing import Access, Handler, Route, Router
from penstock.services.http.security import Keys
from penstock.services.http.server import admin_options
from penstock.services.http.static_files import FILES, send_file
from penstock.services.openai import errors, operator, weight_updates
from penstock.services.openai.answers import ChatAnswer, CompletionAnswer
from penstock.services.openai.app_state import AppState
from penstock.services.openai.chat import create_chat_completion
from penstock.services.openai.classification import ClassifyAnswer, ClassifyRequest, classify
from penstock.services.openai.cohere import EmbedAnswer, EmbedRequest, embed
from penstock.services.openai.completions import create_completion
from penstock.services.openai.dispatch import dispatched, operated
from penstock.services.openai.embeddings import EmbeddingAnswer, EmbeddingRequest, create_embeddings
from penstock.services.openai.health import Health, StatusAnswer, VersionAnswer, health, live, metrics, ready, version
from penstock.services.openai.messages.endpoint import count_message_tokens, create_message
from penstock.services.openai.messages.output import MessageAnswer, TokenCount
from penstock.services.openai.messages.request import CountRequest, MessageRequest
from penstock.services.openai.models import ModelAnswer, ModelList, models
from penstock.services.openai.openapi import PAGE_QUERY, PAUSE_QUERY, SLEEP_QUERY, STREAM_QUERY, WORLD_QUERY, document
from penstock.services.openai.responses.endpoint import (
    cancel_response,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from penstock.services.openai.responses.output import Deleted, ItemList, ResponseAnswer
from penstock.services.openai.responses.request import ResponseRequest
from penstock.services.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from penstock.services.openai.scoring import (
    SCORE_FIELDS,
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
    create_score,
    rerank,
)
from penstock.services.openai.sglang import NativeAnswer, NativeRequest, generate_native
from penstock.services.openai.tokenization import (
    DetokenizeAnswer,
    TokenizeAnswer,
    TokenizerInfoAnswer,
    detokenize,
    tokenize,
    tokenizer_info,
)
from penstock.services.openai.validation import FIELDS, decode

PREFIX = "/v1"
WRONG_OUTPUT = b"x-penstock-wrong-output"
ENGINE_STATUSES = (400, 404, 408, 413, 415, 429, 500, 503, 504)  # of what engine or tokenizer answers


# Fields of a body → the endpoint whose body has them; the first that fits.
ENDPOINTS: tuple[tuple[frozenset[str], Handler], ...] = (
    (frozenset(("messages",)), create_chat_completion),
    (frozenset(("prompt",)), create_completion),
    *((frozenset(names), create_score) for names in SCORE_FIELDS),
    (frozenset(("query", "documents")), rerank),
    (frozenset(("input",)), create_embeddings),
)


async def invoke(app: AppState, context: RequestContext) -> None:
    """POST /invocations, where Amazon SageMaker sends every request: the body's fields decide which endpoint answers.

    Source: Amazon SageMaker developer guide, "Custom inference code with hosting services", as vLLM reads it.
    """
    context.body = await context.read_json()
    names = decode(context.body, FIELDS).keys()
    handler = next((handler for fields, handler in ENDPOINTS if fields <= names), None)
    if handler is None:
        known = "; ".join(" and ".join(sorted(fields)) for fields, _ in ENDPOINTS)
        raise InvalidRequest(f"the body is for no endpoint: it holds none of {known}")
    await handler(app, context)


async def openapi(app: AppState, context: RequestContext) -> None:
    """GET /openapi.json."""
    await context.send_json(description(app.config.api, locked=app.keys.locked))


async def operator_openapi(app: AppState, context: RequestContext) -> None:
    """The same at --admin-address, of the operator's routes."""
    assert app.operators is not None, "this listener has keys of its own"
    await context.send_json(description(directories(app), locked=app.operators.locked, operator=True))


@functools.lru_cache(maxsize=2)
def description(options: ApiConfig, *, locked: bool, operator: bool = False) -> bytes:
    routes = operator_routes(options) if operator else ROUTES
    return msgspec.json.encode(document(routes, options, locked=locked))


generation = functools.partial(Route, "POST", streams=True, statuses=ENGINE_STATUSES)
computation = functools.partial(Route, "POST", statuses=ENGINE_STATUSES)
probe = functools.partial(Route, answer=StatusAnswer, access=Access.PROBE, quiet=True)
rerank_ids = functools.partial(rerank, documents=False)
NATIVE: tuple[Route, ...] = (
    generation("/generate", generate_native, "Continue prompts, as SGLang has it", NativeAnswer, NativeRequest),
)

ROUTES: tuple[Route, ...] = (
    generation("/v1/chat/completions", create_chat_completion, "Answer a chat", ChatAnswer, ChatRequest),
    generation("/v1/completions", create_completion, "Continue prompts", CompletionAnswer, CompletionRequest),
    *NATIVE,
    generation("/v1/responses", create_response, "Make a response", ResponseAnswer, ResponseRequest),
    Route("GET", "/v1/responses/{id}", get_response, "A response that is kept", ResponseAnswer, statuses=(400, 404),
          query=(STREAM_QUERY,)),
    Route("DELETE", "/v1/responses/{id}", delete_response, "Forget a response", Deleted, statuses=(404,)),
    Route("GET", "/v1/responses/{id}/input_items", list_input_items, "List the input of a response", ItemList,
          statuses=(400, 404), query=PAGE_QUERY),
    Route("POST", "/v1/responses/{id}/cancel", cancel_response, "Cancel a response", ResponseAnswer,
          statuses=(400, 404)),
    generation("/v1/messages", create_message, "Make a message", MessageAnswer, MessageRequest),
    computation("/v1/messages/count_tokens", count_message_tokens, "Count the tokens of a message", TokenCount,
                CountRequest),
    computation("/v1/embeddings", create_embeddings, "Vectors of texts", EmbeddingAnswer, EmbeddingRequest),
    computation("/v1/score", create_score, "Score pairs of texts", ScoreAnswer, ScoreRequest),
    computation("/v1/rerank", rerank, "Rank documents", RerankAnswer, RerankRequest),
    computation("/rerank", rerank, "Rank documents, by Jina's path", RerankAnswer, RerankRequest),
    computation("/v2/rerank", rerank_ids, "Rank documents, by Cohere's path", RerankAnswer, RerankRequest),
    computation("/score", create_score, "Score pairs of texts, by vLLM's path", ScoreAnswer, ScoreRequest),
    computation("/classify", classify, "Labels of texts, by vLLM's path", ClassifyAnswer, ClassifyRequest),
    computation("/v2/embed", embed, "Vectors of texts, as Cohere's clients ask", EmbedAnswer, EmbedRequest),
    generation("/invocations", invoke, "Answer what the body is for, as SageMaker asks", ChatAnswer, ChatRequest),
    Route("GET", "/v1/models", models, "List the served names", ModelList),
    Route("GET", "/v1/models/{name:path}", models, "One served name", ModelAnswer, statuses=(404,)),
    computation("/tokenize", tokenize, "Token ids of a text or a chat", TokenizeAnswer, TokenizeRequest),
    computation("/detokenize", detokenize, "Text of token ids", DetokenizeAnswer, DetokenizeRequest),
    Route("GET", "/tokenizer_info", tokenizer_info, "The tokenizer's configuration", TokenizerInfoAnswer),
    probe("GET", "/ping", ready, "Requests are taken, by SageMaker's path", statuses=(503,)),
    probe("POST", "/ping", ready, "Requests are taken, asked with POST", statuses=(503,)),
    Route("GET", "/health", health, "State of every part", Health, quiet=True, statuses=(503,)),
    probe("GET", "/health_generate", ready, "Requests are taken, by SGLang's path", statuses=(503,)),
    probe("GET", "/health/live", live, "The process runs"),
    probe("GET", "/health/ready", ready, "Requests are taken", statuses=(503,)),
    Route("GET", "/version", version, "Penstock's version", VersionAnswer),
    Route("GET", "/metrics", metrics, "Prometheus text", quiet=True),
    Route("GET", "/openapi.json", openapi),
    *(Route("GET", path, functools.partial(send_file, file), file.summary, access=Access.OPEN, quiet=True,
            media="text/html")
      for path, file in FILES.items()),
)  # fmt: skip

# What --admin-address answers, where there is a directory that bounds the adapters.
ADAPTER_ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/load_lora_adapter", operator.load_adapter, "Load an adapter", ModelAnswer,
          operator.LoadAdapterRequest,
          statuses=(400,)),
    Route("POST", "/v1/unload_lora_adapter", operator.unload_adapter, "Unload an adapter", operator.Unloaded,
          operator.UnloadAdapterRequest,
          statuses=(404,)),
)  # fmt: skip
WEIGHT_ROUTES: tuple[Route, ...] = (
    Route("POST", "/update_weights_from_disk", operator.update_weights_from_disk, "Update the weights from a folder",
          operator.UpdateAnswer, operator.UpdateRequest, statuses=(404, 503)),
)  # fmt: skip
change = functools.partial(Route, "POST", statuses=(400, 503))
OPERATOR_ROUTES: tuple[Route, ...] = (
    change("/pause", operator.pause, "Pause", operator.PauseStatus, query=PAUSE_QUERY),
    change("/resume", operator.resume, "Resume", operator.PauseStatus),
    Route("GET", "/is_paused", operator.is_paused, "Whether a pause holds", operator.IsPaused, statuses=(503,)),
    change("/sleep", operator.sleep, "Have executors give their devices back", query=SLEEP_QUERY,
           statuses=(400, 409, 503)),
    change("/wake_up", operator.wake_up, "Load the model again"),
    Route("GET", "/is_sleeping", operator.is_sleeping, "Whether executors sleep", operator.IsSleeping, statuses=(503,)),
    change("/pause_generation", operator.pause_generation, "Pause, by SGLang's path", operator.GenerationStatus,
           operator.PauseRequest),
    change("/continue_generation", operator.continue_generation, "Resume, by SGLang's path", operator.GenerationStatus,
           operator.NoFields),
    change("/flush_cache", operator.flush_cache, "Forget the prefix cache"),
    change("/reset_prefix_cache", operator.flush_cache, "The same by vLLM's path"),
    Route("GET", "/flush_cache", operator.flush_cache, "Forget the prefix cache, asked with GET", statuses=(503,)),
    change("/abort_request", operator.abort_request, "End one request or all", None, operator.AbortRequest),
    # What a client of SGLang's asks at the same address as all this.
    *NATIVE,
    Route("GET", "/v1/loads", operator.loads, "Requests that have not ended", operator.Loads, statuses=(503,)),
    Route("GET", "/health_generate", ready, "Requests are taken", StatusAnswer, quiet=True, statuses=(503,)),
    change("/release_memory_occupation", weight_updates.release_memory, "Sleep, by SGLang's path", None,
           weight_updates.MemoryRequest, statuses=(400, 409, 503)),
    change("/resume_memory_occupation", weight_updates.resume_memory, "Wake up, by SGLang's path", None,
           weight_updates.MemoryRequest),
    change("/init_weights_update_group", weight_updates.init_group, "Join a trainer's process group",
           weight_updates.Done, weight_updates.GroupRequest),
    change("/destroy_weights_update_group", weight_updates.destroy_group, "Leave a trainer's process group",
           weight_updates.Done, weight_updates.LeaveRequest),
    change("/update_weights_from_distributed", weight_updates.from_distributed, "Update the weights by broadcasts",
           operator.UpdateAnswer, weight_updates.DistributedRequest),
    change("/update_weights_from_tensor", weight_updates.from_tensor, "Update the weights from a trainer's memory",
           operator.UpdateAnswer, weight_updates.TensorRequest),
    change("/init_weight_transfer_engine", weight_updates.init_transfer, "Join a trainer's group, by vLLM's path",
           weight_updates.Message, weight_updates.TransferInitRequest),
    change("/start_weight_update", weight_updates.start_update, "Begin an update of several parts",
           weight_updates.Message, weight_updates.StartRequest),
    change("/update_weights", weight_updates.update_part, "A part of an update", weight_updates.Message,
           weight_updates.TransferUpdateRequest),
    change("/finish_weight_update", weight_updates.finish_update, "End an update of several parts",
           weight_updates.Message, weight_updates.FinishRequest),
    Route("GET", "/get_world_size", weight_updates.world_size, "How many executors there are",
          weight_updates.WorldSize, statuses=(400,), query=WORLD_QUERY),
    change("/weights_checker", weight_updates.check_weights, "Sums of the weights in memory",
           weight_updates.CheckAnswer, weight_updates.CheckRequest),
    Route("GET", "/get_weight_version", operator.weight_version, "Version of the weights", operator.WeightVersion,
          statuses=(503,)),
    Route("GET", "/model_info", operator.model_info, "Name of the model and version of its weights",
          operator.ModelInfoAnswer, statuses=(503,)),
    Route("GET", "/server_info", operator.server_info, "Sizes of the server, by SGLang's path",
          operator.ServerInfoAnswer),
    Route("GET", "/openapi.json", operator_openapi),
)  # fmt: skip

# What is not at the clients' address, and where it is.
ELSEWHERE: Mapping[str, str] = {
    route.path: f"; it is for the operator, with {options}"
    for routes, options in (
        (OPERATOR_ROUTES, "--admin-address"),
        (ADAPTER_ROUTES, "--admin-address and --lora-dir"),
        (WEIGHT_ROUTES, "--admin-address and --weights-dir"),
    )
    for route in routes
}

# What --metrics-port answers. Host names are checked there as well, so that no page rebinds its own to it.
METRICS_ROUTES = tuple(
    route for route in ROUTES if route.path in ("/metrics", "/version") or route.path.startswith("/health")
)

DIALECTS = (
    Dialect(
        errors.encode_for_messages, (b"x-request-id", b"request-id"),
        {errors.MESSAGES: b"", "/v1/models": errors.VERSION_HEADER},
    ),
    Dialect(lambda error, _: errors.encode(error)),
)  # fmt: skip


def application(app: AppState) -> ASGIApp:
    """What clients ask, at --port or --uds."""
    return middleware(app, dispatched(app, ROUTES), app.config.api, app.keys)


def metrics_application(app: AppState) -> ASGIApp:
    """What --metrics-port answers, to everybody."""
    return middleware(app, METRICS_ROUTES, app.config.api, Keys(ApiConfig()))


def operator_application(app: AppState) -> ASGIApp:
    """What --admin-address answers: nothing without a key of the operator's, where there are any."""
    options = admin_options(app.config.api)
    assert options is not None, "there is such a listener"
    assert app.operators is not None, "with keys of its own"
    assert app.operators.locked or options.uds, "but for a socket of its owner's"
    routes = operated(app, operator_routes(directories(app)))
    return middleware(app, routes, options, app.operators, operator=True)


def directories(app: AppState) -> ApiConfig:
    """The options, with a directory of adapters and one of weights where any model has it."""
    every = [each.config.api for each in app.each]
    return msgspec.structs.replace(
        app.config.api,
        lora_dir=next((each.lora_dir for each in every if each.lora_dir), ""),
        weights_dir=next((each.weights_dir for each in every if each.weights_dir), ""),
    )


def operator_routes(options: ApiConfig) -> tuple[Route, ...]:
    """Those of --admin-address."""
    adapters = ADAPTER_ROUTES if options.lora_dir else ()
    return (*OPERATOR_ROUTES, *adapters, *(WEIGHT_ROUTES if options.weights_dir else ()))


def middleware(
    app: AppState, routes: Sequence[Route], options: ApiConfig, keys: Keys, *, operator: bool = False
) -> Middleware:
    """An application of these routes, for who has these keys."""
    wrong = wrong_output(list(dict.fromkeys(reason for each in app.each for reason in each.model.wrong_output)))
    return Middleware(
        Router(routes, PREFIX, ELSEWHERE), app, options, keys, app.traffic, DIALECTS, tracer=app.tracer, always=wrong,
        operator=operator,
    )  # fmt: skip


def wrong_output(reasons: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """The header of every response of a server whose output is wrong."""
    return [(WRONG_OUTPUT, "; ".join(reasons).encode())] if reasons else []
