"""The canary through the whole pipeline, on every path that must not change an answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.canary import Answer, ask_all, prompts
from tests.e2e.server import Server, serving

EXPECTED = [prompt["answer"] for prompt in prompts()]

# How servers other than the default one are started. The small pool holds one request of full length and little more.
PATHS = {
    "one step at a time, small chunks, no prefix reuse": (
        *("--no-overlap", "--max-num-batched-tokens", "48", "--max-num-seqs", "16", "--block-size", "8"),
        *("--no-enable-prefix-caching", "--kv-cache-memory", str(64 << 20)),  # a GPU is full of the default server's
    ),
    "small pool, large blocks": (
        *("--max-model-len", "1024", "--block-size", "32", "--kv-cache-memory", str(16 << 20)),
        *("--max-num-batched-tokens", "256"),
    ),
}


def texts(answers: Sequence[Answer]) -> list[str]:
    return [answer.text for answer in answers]


async def test_forty_answers_are_exact(server: Server) -> None:
    assert len(EXPECTED) == 40
    assert texts(await ask_all(server.url)) == EXPECTED


async def test_and_again_from_cached_prefixes(server: Server) -> None:
    """Every full block but what the last position needs. The totals of /health come with a heartbeat, which may lag."""
    await ask_all(server.url)
    again = await ask_all(server.url)
    assert texts(again) == EXPECTED
    assert [answer.cached_tokens for answer in again] == [(answer.prompt_tokens - 1) // 16 * 16 for answer in again]


@pytest.mark.parametrize("path", PATHS)
async def test_on_other_paths(path: str, tmp_path: Path) -> None:
    with serving(tmp_path, *PATHS[path]) as server:
        assert texts(await ask_all(server.url)) == EXPECTED
