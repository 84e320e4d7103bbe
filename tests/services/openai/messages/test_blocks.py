"""Blocks that hold text in other ways than as text (blocks.py): documents, and results of a search."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.protocol.messages import SubmitText
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, words

PLAIN = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Rain."}}
BLOCKS = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Snow."}]}}
FOUND = {"type": "search_result", "title": "T", "source": "http://x", "content": [{"type": "text", "text": "Sun."}]}


async def said(content: Any) -> tuple[int, Any]:
    port = FakeLink(answering(words("so")))
    async with client(app_state(port)) as http:
        messages = [{"role": "user", "content": content}]
        answer = await http.post("/v1/messages", json={"max_tokens": 9, "messages": messages})
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["message"]
    (submit,) = port.of(SubmitText)
    return 200, json.loads(submit.messages or b"")


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (PLAIN, "<document>\n<content>\nRain.\n</content>\n</document>"),
        ({**PLAIN, "title": "T", "context": "C", "citations": {"enabled": False}},
         "<document>\n<title>\nT\n</title>\n<context>\nC\n</context>\n<content>\nRain.\n</content>\n</document>"),
        (BLOCKS, "<document>\n<content>\nSnow.\n</content>\n</document>"),
        ({**BLOCKS, "source": {"type": "content", "content": "Hail."}},
         "<document>\n<content>\nHail.\n</content>\n</document>"),
        (FOUND, "<search_result>\n<title>\nT\n</title>\n<source>\nhttp://x\n</source>\n<content>\nSun.\n</content>\n"
                "</search_result>"),
    ],
)  # fmt: skip
async def test_text_in_other_blocks(block: dict[str, Any], text: str) -> None:
    told = {"type": "text", "text": "What is it like?"}
    assert await said([block, told]) == (200, [{"role": "user", "content": f"{text}\nWhat is it like?"}])
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    assert await said([result]) == (200, [{"role": "tool", "tool_call_id": "t", "content": text}])


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"type": "document"}, "messages[0].content[0].source is missing"),
        ({"type": "document", "source": "x"}, "messages[0].content[0].source: "),
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}},
         "messages[0].content[0].source.type: 'base64' is not supported"),
        ({"type": "document", "source": {"type": "url", "url": "http://x"}},
         "messages[0].content[0].source.type: 'url' is not supported"),
        ({"type": "document", "source": {"type": "text", "data": "x"}}, "messages[0].content[0].source.media_type"),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain"}},
         "messages[0].content[0].source.data is missing"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}},
         "messages[0].content[0].source.content[0].type: 'image' is not supported"),
        ({"type": "search_result", "title": "T", "source": {}, "content": []}, "messages[0].content[0].source must be"),
    ],
)  # fmt: skip
async def test_what_is_not_read(block: dict[str, Any], named: str) -> None:
    status, told = await said([block])
    assert status == 400
    assert told.startswith(named)
