"""POST /generate: SGLang's own API, of token ids and log-probabilities, by which trainers ask for rollouts.

Source: SGLang, srt/managers/io_struct.py (GenerateReqInput), srt/sampling/sampling_params.py and
srt/managers/tokenizer_manager.py; slime, slime/rollout/sglang_rollout.py.
"""

from __future__ import annotations

import functools
import secrets
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.protocol import limits
from penstock.protocol.errors import InvalidRequest, RequestError, invalid
from penstock.protocol.messages import Finish, SubmitText
from penstock.protocol.outputs import PositionLogprobs, TokenLogprob
from penstock.services.client.model_info import ModelInfo
from penstock.services.client.output_collector import Choice, OutputCollector, PromptFacts, renamed
from penstock.services.http.request_context import RequestContext
from penstock.services.openai import errors
from penstock.services.openai.answers import WeightSpan, finite, unpacked
from penstock.services.openai.app_state import AppState
from penstock.services.openai.completions import Prompt, texts
from penstock.services.openai.generation import GenerateRequest, Parsed, generate
from penstock.services.openai.parameters import (
    Lengths,
    check_limits,
    check_unsupported,
    choices,
    submission,
    with_own_seed,
)
from penstock.services.openai.schema import (
    LOGPROBS_MODE,
    Bias,
    GenerationRequest,
    LogprobsMode,
    OptionalJson,
    Penalty,
    Share,
    StopString,
    Timeout,
    TokenId,
    TopCount,
)
from penstock.services.openai.sse import DONE, ENCODE, escaped
from penstock.services.openai.validation import read_request

# This API's names of fields that a GenerationRequest calls otherwise.
FIELD_NAMES: Mapping[str, str] = {
    "prompt": "input_ids", "max_tokens": "sampling_params.max_new_tokens", "top_logprobs": "top_logprobs_num",
    "min_tokens": "sampling_params.min_new_tokens", "seed": "sampling_params.sampling_seed",
    **{name: f"sampling_params.{name}"
       for name in ("n", "stop", "stop_token_ids", "logit_bias", "json_schema", "regex", "ebnf", "structural_tag")},
}  # fmt: skip
# Fields of a request that have no effect where they are null or one of these.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "image_data": ([],), "audio_data": ([],), "video_data": ([],), "input_embeds": (), "session_params": (),
    "token_ids_logprob": (), "return_hidden_states": (False,), "return_routed_experts": (False,),
    "custom_logit_processor": (), "bootstrap_host": (), "bootstrap_room": (),
}  # fmt: skip
REASONS: Mapping[str, str] = {
    "image_data": "image_data is not supported here: POST /v1/chat/completions takes images",
    "input_embeds": "input_embeds is not supported: give text or input_ids",
}
RequestId = Annotated[str, Meta(min_length=1, max_length=limits.MAX_RID)]
Logprob = tuple[float | None, int, str | None]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params`."""

    max_new_tokens: Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)] | None = 128
    min_new_tokens: Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)] | None = None
    n: Annotated[int, Meta(ge=1, le=limits.MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=limits.MOST_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=limits.MAX_STOP_TOKEN_IDS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=limits.MAX_TOKEN_ID)] | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=limits.MAX_LOGIT_BIAS)] | None = None
    sampling_seed: Annotated[int, Meta(ge=limits.SEED_MIN, le=limits.SEED_MAX)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None  # true: the text holds what ended it
    spaces_between_special_tokens: bool | None = None  # taken: none are ever put there
    json_schema: OptionalJson = msgspec.UNSET
    regex: OptionalJson = msgspec.UNSET
    ebnf: OptionalJson = msgspec.UNSET
    structural_tag: OptionalJson = msgspec.UNSET


class NativeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /generate: one of `text` and `input_ids`, or several of one of them."""

    text: str | Annotated[list[str], Meta(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId | list[TokenId]], Meta(min_length=1)] | None = None
    sampling_params: SamplingParams | None = None
    rid: RequestId | list[RequestId] | None = None  # what POST /abort_request calls it
    return_logprob: bool | None = None
    # Of the prompt's tokens, the first with one; -1: none.
    logprob_start_len: Annotated[int, Meta(ge=-1, le=limits.MAX_TOKEN_ID)] | None = None
    top_logprobs_num: TopCount | None = None
    return_text_in_logprobs: bool | None = None
    logprobs_mode: Annotated[LogprobsMode, Meta(description=LOGPROBS_MODE)] = "processed_logprobs"  # as SGLang's are
    stream: bool | None = None
    lora_path: str | None = None  # name of an adapter
    model: str | None = None
    priority: Annotated[int, Meta(ge=limits.PRIORITY_MIN, le=limits.PRIORITY_MAX)] | None = None
    timeout: Timeout | None = None

    @property
    def parameters(self) -> SamplingParams:
        return self.sampling_params or SamplingParams()


class FinishReason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`finish_reason`."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["stop", "length", "abort"]})]
    matched: int | str | None = None  # the token or the string that ended it
    length: int | msgspec.UnsetType = msgspec.UNSET
    message: str | msgspec.UnsetType = msgspec.UNSET


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`meta_info`. Log-probabilities are triples: the value, the token, its text where that was asked for."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str  # of the last tokens
    weight_versions: tuple[WeightSpan, ...] | msgspec.UnsetType = msgspec.UNSET  # where they are of several
    e2e_latency: float  # seconds
    output_token_logprobs: list[Logprob] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[Logprob]] | msgspec.UnsetType = msgspec.UNSET
    input_token_logprobs: list[Logprob] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[Logprob] | None] | msgspec.UnsetType = msgspec.UNSET


class NativeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /generate: one, or a list of them for several prompts or choices. Events of streams hold all so
    far, and `index` where there are several."""

    text: str
    output_ids: tuple[int, ...]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET


REQUEST = msgspec.json.Decoder(NativeRequest)
ENDED: Mapping[Finish, Literal["stop", "length", "abort"]] = {
    Finish.STOP: "stop", Finish.CALLS: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort",
}  # fmt: skip


async def parse_generate(app: AppState, context: RequestContext) -> Parsed:
    """Each prompt is an internal request of its own; choices are numbered prompt by prompt."""
    options, model = app.config.api, app.model
    request, fields = await read_request(await context.read_json(), REQUEST, model, context)
    check_unsupported(fields, UNSUPPORTED, REASONS)
    if request.lora_path is not None:
        context.adapter = model.adapter(request.lora_path)
    prompts = prompts_of(request, model)
    rids = rids_of(request, len(prompts))
    asked = generation_request(request)
    try:
        check_limits(asked, options, ("top_logprobs", request.top_logprobs_num), FIELD_NAMES)
        n = choices(asked, len(prompts))
        common = submission(asked, lengths(request), model, n, context.trace)
    except InvalidRequest as error:
        raise renamed(error, FIELD_NAMES) from None
    submits = tuple(prompt_submission(common, request, prompt, rid) for prompt, rid in zip(prompts, rids, strict=True))
    several = n > 1 or isinstance(request.text, list) or isinstance((request.input_ids or [0])[0], list)
    encoder = NativeEncoder(request, rids, several=several)
    return GenerateRequest(id=rids[0], prompts=submits, least_aborted=0, field_names=FIELD_NAMES), encoder


generate_native = functools.partial(generate, parse_generate)


def prompts_of(request: NativeRequest, model: ModelInfo) -> list[Prompt]:
    """Raises InvalidRequest unless there is one of both fields, and names what is wrong in it."""
    if (request.text is None) == (request.input_ids is None):
        raise InvalidRequest("give text or input_ids, one of them", param="text")
    found = request.text if request.text is not None else request.input_ids
    param = "text" if request.text is not None else "input_ids"
    assert found is not None
    prompts = texts(found, param, model, any_length=False, keep_first=False)
    if len(prompts) > limits.MAX_PROMPTS:
        raise invalid(param, f"holds {len(prompts)} prompts; at most {limits.MAX_PROMPTS} are served at once")
    return prompts


def rids_of(request: NativeRequest, count: int) -> list[str]:
    """An id for each prompt. Raises InvalidRequest for a list of another length."""
    if isinstance(request.rid, list):
        if len(request.rid) != count:
            raise invalid("rid", f"holds {len(request.rid)} ids for {count} prompts")
        return request.rid
    first = request.rid or secrets.token_hex(16)
    return [first] if count == 1 else [f"{first}_{number}" for number in range(count)]


def generation_request(request: NativeRequest) -> GenerationRequest:
    """The parameters by the names that all APIs of ours share."""
    given = request.parameters
    same = {name: getattr(given, name) for name in SamplingParams.__struct_fields__
            if name in GenerationRequest.__struct_fields__}  # fmt: skip
    return GenerationRequest(
        **same,
        max_tokens=given.max_new_tokens or None,
        min_tokens=given.min_new_tokens,
        seed=given.sampling_seed,
        include_stop_str_in_output=given.no_stop_trim,
        logprobs_mode=request.logprobs_mode if request.return_logprob else None,
        stream=request.stream,
        return_token_ids=True,
        priority=request.priority,
    )


def lengths(request: NativeRequest) -> Lengths:
    top, start = request.top_logprobs_num or 0, request.logprob_start_len
    tells = bool(request.return_logprob)
    return Lengths(
        max_tokens=request.parameters.max_new_tokens,
        max_tokens_param=FIELD_NAMES["max_tokens"],
        logprobs=top if tells else -1,
        prompt_logprobs=top if tells and start is not None and start >= 0 else -1,
    )


def prompt_submission(common: SubmitText, request: NativeRequest, prompt: Prompt, rid: str) -> SubmitText:
    made = msgspec.structs.replace(
        common,
        rid=rid,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_ids=None if isinstance(prompt, str) else struct.pack(f"<{len(prompt)}i", *prompt),
        echo=request.parameters.max_new_tokens == 0,  # the prompt alone is computed
    )
    return made if request.parameters.sampling_seed is not None else with_own_seed(made)


class SoFar:
    """A choice as far as it has come."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []

    def add(self, choice: Choice) -> None:
        self.text.append(choice.take_text())
        self.ids += unpacked(choice.take_token_ids())
        self.logprobs += choice.take_logprobs()


class NativeEncoder:
    """Answers of one request, whole or as events that each hold all so far."""

    def __init__(self, request: NativeRequest, rids: Sequence[str], *, several: bool) -> None:
        self._request = request
        self._rids = rids
        self._several = several
        self._began = time.monotonic()
        self._choices: dict[int, SoFar] = {}

    def response(self, outputs: OutputCollector) -> bytes:
        found = [self._answer(outputs, choice) for choice in outputs.choices]
        return ENCODE.encode(found if self._several else found[0])

    def take(self, outputs: OutputCollector, updated: list[Choice]) -> bytes:
        if outputs.error is not None:
            return b""
        found = []
        for choice in updated:
            answer = self._answer(outputs, choice)
            if self._several:
                answer = msgspec.structs.replace(answer, index=choice.index)
            found.append(b"data: " + escaped(ENCODE.encode(answer)) + b"\n\n")
        return b"".join(found)

    def end(self, outputs: OutputCollector) -> bytes:
        return DONE

    def failure(self, outputs: OutputCollector, error: RequestError) -> bytes:
        return b"data: " + escaped(errors.encode(error)) + b"\n\n" + DONE

    def _answer(self, outputs: OutputCollector, choice: Choice) -> NativeAnswer:
        so_far = self._choices.setdefault(choice.index, SoFar())
        so_far.add(choice)
        facts, versions = outputs.prompts[choice.prompt], choice.versions
        spans = tuple(WeightSpan(choice.index, *span) for span in versions)
        meta = MetaInfo(
            id=self._rids[choice.prompt],
            finish_reason=finish_reason(choice, so_far.ids),
            prompt_tokens=facts.tokens,
            completion_tokens=choice.tokens,
            cached_tokens=facts.cached_tokens or 0,
            weight_version=versions[-1][1] if versions else "",
            weight_versions=spans if len(spans) > 1 else msgspec.UNSET,
            e2e_latency=time.monotonic() - self._began,
            **self._logprobs(facts, so_far),
        )
        alone = self._request.parameters.max_new_tokens == 0
        return NativeAnswer(text="" if alone else "".join(so_far.text), output_ids=tuple(so_far.ids), meta_info=meta)

    def _logprobs(self, facts: PromptFacts, so_far: SoFar) -> dict[str, Any]:
        """What of them was asked for. A prompt's first token has none."""
        request = self._request
        if not request.return_logprob:
            return {}
        top, text = bool(request.top_logprobs_num), bool(request.return_text_in_logprobs)
        start = request.logprob_start_len
        found: dict[str, Any] = {
            "output_token_logprobs": [triple(at.chosen, text) for at in so_far.logprobs],
            "input_token_logprobs": [],
        }
        if top:
            found["output_top_logprobs"] = [[triple(one, text) for one in at.top] for at in so_far.logprobs]
            found["input_top_logprobs"] = []
        if start is None or start < 0 or facts.logprobs is None:
            return found
        ids, positions = unpacked(facts.token_ids), facts.logprobs[start:]
        found["input_token_logprobs"] = [
            (None, ids[start + at], None) if one is None else triple(one.chosen, text)
            for at, one in enumerate(positions)
        ]
        if top:
            found["input_top_logprobs"] = [
                None if one is None else [triple(each, text) for each in one.top] for one in positions
            ]
        return found


def triple(token: TokenLogprob, text: bool) -> Logprob:
    return finite(token), token.token_id, token.token if text else None


def finish_reason(choice: Choice, ids: Sequence[int]) -> FinishReason | None:
    """None while it goes on."""
    if choice.finish == Finish.NONE:
        return None
    kind = ENDED[choice.finish]
    if kind == "length":
        return FinishReason(type=kind, length=choice.tokens)
    if kind == "abort":
        return FinishReason(type=kind, message="the server ended this request before it was complete")
    return FinishReason(type=kind, matched=ids[-1] if choice.stop_reason is None and ids else choice.stop_reason)
