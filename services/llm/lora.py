"""LoRA adapters of the Python API: vLLM's `LoRARequest`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Adapter, SubmitText
from penstock.services.client.model_info import ModelInfo
from penstock.services.llm.prompts import Request


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter by name, with its folder. The number is vLLM's; the name and the folder's content tell adapters
    apart."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


Loras = LoRARequest | Sequence[LoRARequest | None] | None


def with_adapters(requests: Iterable[Request], loras: Loras, count: int, model: ModelInfo) -> Iterable[Request]:
    """The requests of `count` prompts with one adapter for all, or one for each. Raises InvalidRequest at once."""
    if loras is None:
        return requests
    adapters = adapters_of(loras, count, model)
    return (
        msgspec.structs.replace(request, submit=msgspec.structs.replace(request.submit, adapter=adapter))
        for request, adapter in zip(requests, adapters, strict=True)
    )


def adapted(submits: Sequence[SubmitText], loras: Loras, model: ModelInfo) -> list[SubmitText]:
    """The same for messages that ask for vectors."""
    adapters = adapters_of(loras, len(submits), model)
    return [msgspec.structs.replace(submit, adapter=adapter) for submit, adapter in zip(submits, adapters, strict=True)]


def adapters_of(loras: Loras, count: int, model: ModelInfo) -> list[Adapter | None]:
    """The adapter of each of `count` prompts. Raises InvalidRequest."""
    each = [loras] * count if loras is None or isinstance(loras, LoRARequest) else list(loras)
    if len(each) != count:
        message = f"there are {len(each)} lora_request for {count} prompts"
        raise InvalidRequest(message, param="lora_request", code="invalid_value")
    found = {lora: adapter_of(lora, model) for lora in set(each) if lora is not None}
    return [None if lora is None else found[lora] for lora in each]


def adapter_of(lora: LoRARequest, model: ModelInfo) -> Adapter:
    """What the folder holds now. Raises InvalidRequest."""
    if model.adapters is None:
        raise InvalidRequest("lora_request needs enable_lora=True", param="lora_request", code="unsupported")
    return model.adapters.given(lora.lora_name, lora.lora_path)
