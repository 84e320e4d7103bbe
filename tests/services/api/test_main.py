"""The process: it listens, tells its readiness and address, drains on SIGTERM, ends with a refused handshake."""

from __future__ import annotations

from pathlib import Path

import openai

from tests.services.api.pipe import answering, words
from tests.services.api.process import Tokenizer, api

HELLO = [{"role": "user", "content": "Hello"}]


async def test_a_chat_over_real_sockets(tmp_path: Path) -> None:
    tokenizer = Tokenizer(answering(words("Hi", " there")), tmp_path)
    async with api(tmp_path) as process:
        async with openai.AsyncOpenAI(base_url=process.url + "/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(model="model", messages=HELLO)
            stream = await client.chat.completions.create(model="model", messages=HELLO, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert whole.choices[0].message.content == text == "Hi there"
        process.signal()
        assert await process.ended() == 0
        log = process.log.read_text()
    tokenizer.close()
    assert log.count(" request ") == 2
    assert "Hello" not in log
