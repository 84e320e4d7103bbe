"""What one request may ask for, as the options of the server say.

The types of `requests` hold what the engine can do at all; the options may hold less.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import InvalidRequest
from penstock.services.openai.schema import ChatRequest, CompletionRequest, GenerationRequest

# Parameter → the option that bounds it, for every message about its limit.
OPTIONS: Mapping[str, str] = {
    "n": "--max-n",
    "logprobs": "--max-logprobs",
    "top_logprobs": "--max-logprobs",
    "prompt_logprobs": "--max-logprobs",
    "stop": "--max-stop-strings",
    "logit_bias": "--max-logit-bias",
}


def check(request: ChatRequest | CompletionRequest, options: ApiConfig) -> None:
    """Raise InvalidRequest for the first parameter that asks for more than its option allows."""
    for param, asked in amounts(request).items():
        most = limit(param, options)
        if asked > most:
            message = f"{param} asks for {asked}; at most {most} are allowed ({OPTIONS[param]})"
            raise InvalidRequest(message, param=param, code="limit_exceeded")


def amounts(request: ChatRequest | CompletionRequest) -> dict[str, int]:
    """How much the request asks for of everything that an option bounds."""
    found = common_amounts(request)
    if isinstance(request, ChatRequest):
        found["top_logprobs"] = request.top_logprobs or 0
    else:
        found["logprobs"] = request.logprobs or 0
    return found


def common_amounts(request: GenerationRequest) -> dict[str, int]:
    return {
        "n": request.n or 1,
        "prompt_logprobs": request.prompt_logprobs or 0,
        "stop": len(request.stop) if isinstance(request.stop, list) else int(request.stop is not None),
        "logit_bias": len(request.logit_bias or ()),
    }


def limit(param: str, options: ApiConfig) -> int:
    """What the option of `param` says."""
    found = getattr(options, OPTIONS[param].removeprefix("--").replace("-", "_"))
    assert isinstance(found, int)
    return found
