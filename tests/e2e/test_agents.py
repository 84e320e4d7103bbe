"""What agents' tests stand on (agents.py): the tiny model takes long prompts, the proxy changes nothing unasked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.e2e.agents import CONTEXT, proxy, roomy_model
from tests.e2e.server import serving


def test_a_long_prompt_through_the_proxy(tmp_path: Path) -> None:
    def shorter(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "max_tokens": 3}

    words: Any = {"model": "roomy", "messages": [{"role": "user", "content": "a b c d " * 3000}], "max_tokens": 9,
                  "extra_body": {"ignore_eos": True}}  # fmt: skip
    model = roomy_model(tmp_path)
    with serving(tmp_path, model=str(model)) as server, proxy(server.url, shorter) as between:
        assert server.get("/v1/models")["data"][0]["max_model_len"] == CONTEXT
        with anthropic.Anthropic(base_url=between.url, api_key="none", max_retries=0) as client:
            said = client.messages.create(**words)
            with client.messages.stream(**words) as stream:
                flowed = stream.get_final_message()
            with pytest.raises(anthropic.NotFoundError):
                client.messages.create(**{**words, "model": "nobody"})
    assert said.usage.input_tokens > 4096
    assert said.usage.output_tokens == flowed.usage.output_tokens == 3
    assert [seen.status for seen in between.exchanges] == [200, 200, 404]
    assert {seen.asked["max_tokens"] for seen in between.exchanges} == {9}
    assert b"message_stop" in between.exchanges[1].response
