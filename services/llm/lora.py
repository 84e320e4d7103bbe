"""LoRA adapters of the Python API: vLLM's `LoRARequest`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Adapter
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
    each = [loras] * count if isinstance(loras, LoRARequest) else list(loras)
    if len(each) != count:
        message = f"there are {len(each)} lora_request for {count} prompts"
        raise InvalidRequest(message, param="lora_request", code="invalid_value")
    found = {lora: adapter_of(lora, model) for lora in set(each) if lora is not None}
    return named(requests, [None if lora is None else found[lora] for lora in each])


def adapter_of(lora: LoRARequest, model: ModelInfo) -> Adapter:
    """What the folder holds now. Raises InvalidRequest."""
    if model.adapters is None:
        raise InvalidRequest("lora_request needs enable_lora=True", param="lora_request", code="unsupported")
    return model.adapters.given(lora.lora_name, lora.lora_path)


def named(requests: Iterable[Request], adapters: Sequence[Adapter | None]) -> Iterator[Request]:
    for request, adapter in zip(requests, adapters, strict=True):
        yield msgspec.structs.replace(request, submit=msgspec.structs.replace(request.submit, adapter=adapter))
