"""Penstock's public face: `from penstock import ...` and `python -m penstock`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError, LinkError, ModelError, PenstockError, RequestError

if TYPE_CHECKING:
    from penstock.services.llm.async_llm import AsyncLLM
    from penstock.services.llm.llm import LLM
    from penstock.services.llm.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
        ToolCall,
    )
    from penstock.services.llm.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
    from penstock.services.llm.prompts import LoRARequest

__all__ = [
    "LLM", "AsyncLLM", "ClassificationOutput", "ClassificationRequestOutput", "CompletionOutput", "Config",
    "ConfigError", "EmbeddingOutput", "EmbeddingRequestOutput",
    "LinkError", "LoRARequest", "Logprob",
    "ModelError", "PenstockError", "PoolingOutput", "PoolingRequestOutput", "RequestError",
    "RequestMetrics", "RequestOutput", "RequestOutputKind", "SamplingParams", "ScoringOutput", "ScoringRequestOutput",
    "StructuredOutputsParams", "ToolCall",
]  # fmt: skip

MODULES: Mapping[str, str] = {
    "LLM": "llm", "AsyncLLM": "async_llm", "LoRARequest": "prompts",
    **dict.fromkeys(("RequestOutputKind", "SamplingParams", "StructuredOutputsParams"), "params"),
}  # fmt: skip


def __getattr__(name: str) -> object:
    """The Python API, loaded when it is asked for: every process of a server starts through this file."""
    if name in __all__:
        return getattr(importlib.import_module(f"penstock.services.llm.{MODULES.get(name, 'outputs')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
