"""The canary through the whole pipeline, on every path that must not change an answer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from benchmarks import format_folders
from penstock.engine_core.embedded import demo_folder
from tests.e2e.canary import Answer, ask, ask_all, prompts
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


LONG = ("small pool, large blocks",)  # tests/matrix has its cells


@pytest.mark.parametrize("path", [pytest.param(path, marks=pytest.mark.long if path in LONG else ()) for path in PATHS])
async def test_on_other_paths(path: str, tmp_path: Path) -> None:
    with serving(tmp_path, *PATHS[path]) as server:
        assert texts(await ask_all(server.url)) == EXPECTED


# tests/matrix/test_quantized_folders.py has every format, in one process.
@pytest.mark.parametrize("form", [pytest.param("fp8", marks=pytest.mark.long), "int4"])
async def test_quantized_folders_give_the_same_answers_though_the_executor_dies(form: str, tmp_path: Path) -> None:
    """They are transformers' with these folders, too, where each right token leads by 3.8 logits or more."""
    folder = format_folders.write(demo_folder(), tmp_path / "model", form)
    with serving(tmp_path, model=str(folder)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            asked = [asyncio.create_task(ask(client, prompt)) for prompt in prompts()]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            os.kill(server.children()["executor"], signal.SIGKILL)
            assert texts(await asyncio.gather(*asked)) == EXPECTED
        assert server.get("/v1/models")["data"][0]["quantization"]
