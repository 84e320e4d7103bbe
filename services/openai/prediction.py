"""OpenAI's `prediction`: the text that a request's output is expected to repeat.

Source: OpenAI API reference, "Create chat completion", `prediction`. OpenAI refuses it beside n, logprobs, penalties
and tools; here a draft changes no token, so nothing has to be refused beside it.
"""

from __future__ import annotations

from penstock.protocol.errors import InvalidRequest
from penstock.services.openai.schema import GenerationRequest


def predicted_text(request: GenerationRequest) -> str:
    """The text, its parts put together; empty where there is none. Raises InvalidRequest naming the part."""
    if request.prediction is None:
        return ""
    content = request.prediction.content
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        place = f"prediction.content[{number}]"
        if part.type != "text":
            message = f"{place}.type: {part.type!r} is not 'text', which a prediction is made of"
            raise InvalidRequest(message, param=f"{place}.type", code="invalid_value")
        if part.text is None:
            message = f"{place}.text is missing"
            raise InvalidRequest(message, param=f"{place}.text", code="missing_required_parameter")
    return "".join(part.text or "" for part in content)
