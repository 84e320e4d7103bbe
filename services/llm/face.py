"""The names of the Python API that penstock.py gives out when they are asked for."""

from __future__ import annotations

from services.llm.async_llm import AsyncLLM
from services.llm.llm import LLM
from services.llm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, ToolCall
from services.llm.params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM", "AsyncLLM", "CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput", "RequestOutputKind",
    "SamplingParams", "StructuredOutputsParams", "ToolCall",
]  # fmt: skip
