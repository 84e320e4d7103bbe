"""What is timed is what the processes tell of a request."""

from __future__ import annotations

import pytest

from benchmarks.span_cost import REQUESTS, ROLES, seconds, spans_of
from penstock.services.tracing import names

TOLD = {
    "api": {"POST /v1/completions", "text_completion model", names.STREAM},
    "tokenizer": {names.TOKENIZE, names.DETOKENIZE},
    "scheduler": {names.QUEUE, names.PREFILL, names.DECODE},
    "executor": {names.EXECUTE_PREFILL, names.EXECUTE_DECODE},
}


@pytest.mark.parametrize("role", ROLES)
def test_each_role_tells_its_spans_of_every_request(role: str) -> None:
    spans = spans_of(ROLES[role], "http://localhost:1")
    assert {span.name for span in spans} == TOLD[role]
    assert len(spans) == REQUESTS * len(TOLD[role])


def test_the_quickest_try_counts() -> None:
    assert 0.0 <= seconds(lambda: None) < 60.0
