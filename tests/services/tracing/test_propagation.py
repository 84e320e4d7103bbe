"""W3C trace context: valid ones travel, others are as none."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.messages import SubmitText, TraceContext
from penstock.services.tracing.propagation import client_context
from tests.services.client.pipe import FakePort, answering, client, service, words

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, TraceContext()),
        ({"traceparent": PARENT}, TraceContext(PARENT)),
        ({"traceparent": PARENT, "tracestate": "a=1"}, TraceContext(PARENT, "a=1")),
        ({"traceparent": PARENT, "tracestate": "a=" + "x" * 511}, TraceContext(PARENT)),
        ({"traceparent": "cc" + PARENT[2:] + "-more"}, TraceContext("cc" + PARENT[2:] + "-more")),
        ({"traceparent": PARENT + "-more"}, TraceContext()),
        ({"traceparent": "ff" + PARENT[2:]}, TraceContext()),
        ({"traceparent": PARENT.upper()}, TraceContext()),
        ({"traceparent": PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32)}, TraceContext()),
        ({"traceparent": PARENT.replace("b7ad6b7169203331", "0" * 16)}, TraceContext()),
        ({"traceparent": "x" * 9000}, TraceContext()),
        ({"tracestate": "a=1"}, TraceContext()),
    ],
)
def test_trace_context(headers: dict[str, str], expected: TraceContext) -> None:
    scope = {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    assert client_context(scope) == expected


async def test_the_trace_travels_with_the_request() -> None:
    port = FakePort(answering(words("ok")))
    async with client(service(port)) as http:
        for path, body in (("/v1/chat/completions", HELLO), ("/v1/completions", {"prompt": "a"})):
            await http.post(path, json=body, headers={"traceparent": PARENT})
    assert [request.trace.traceparent for request in port.of(SubmitText)] == [PARENT, PARENT]
