"""The names of the Python API that the package gives out when they are asked for."""

from __future__ import annotations

from penstock.services.llm.async_llm import AsyncLLM
from penstock.services.llm.llm import LLM
from penstock.services.llm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, ToolCall
from penstock.services.llm.params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM", "AsyncLLM", "CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput", "RequestOutputKind",
    "SamplingParams", "StructuredOutputsParams", "ToolCall",
]  # fmt: skip
