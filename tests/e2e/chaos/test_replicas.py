"""Two replicas behind one API: conversations stay where they are known, and whoever dies is survived by its streams."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.chaos.crowd import Ask, Heard, calm, characters, crowd, play
from tests.e2e.chaos.leftovers import at_rest, ended
from tests.e2e.chaos.test_kills import pids
from tests.e2e.server import LIMIT, Server, serving

STREAMS = 16
KILLS = 2  # of each kind in the long run
OPTIONS = ("--data-parallel-size", "2", "--cpu-threads", "1", "--tokenizer-processes", "2", "--max-num-seqs", "32")
SHORT = "Hi"  # less than a block, so that no prefix decides


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("replicas"), *OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return crowd(STREAMS)


@pytest.fixture(scope="module")
def undisturbed(server: Server, asks: list[Ask]) -> list[Heard]:
    return calm(server.url, asks)


def back(server: Server) -> list[int]:
    """Wait until nothing is left to do and both replicas serve; prompt tokens that each has had.

    By the second heartbeat of each from now on: the first may have been on its way, and tell less than was done.
    """
    at_rest(server)
    heard_anew(server)
    heard_anew(server)
    health = server.until("/health", lambda health: not health["degraded"])
    return [replica["prompt_tokens"] for replica in health["replicas"]]


def heard_anew(server: Server) -> None:
    """Wait for another heartbeat of each replica."""
    asked = now = time.monotonic()
    while any(replica["heartbeat_age"] >= now - asked for replica in server.get("/health")["replicas"]):
        assert now < asked + LIMIT, "a replica is silent"
        select.select([], [], [], 0.02)
        now = time.monotonic()


def grown(server: Server, before: list[int], finished: int) -> list[bool]:
    """Which replicas have had something since `before`, once so many requests have finished in all."""
    health = server.until("/health", lambda health: health["engine"]["finished"] >= finished)
    return [replica["prompt_tokens"] > had for replica, had in zip(health["replicas"], before, strict=True)]


def finished(server: Server) -> int:
    count = server.get("/health")["engine"]["finished"]
    assert isinstance(count, int)
    return count


@pytest.mark.parametrize("named", [{"extra_headers": {"X-Session-Id": "a"}}, {"user": "somebody"}])
def test_a_session_stays(server: Server, client: openai.OpenAI, named: dict[str, Any]) -> None:
    before, count = back(server), finished(server)
    for _ in range(5):
        client.completions.create(model="penstock-demo", prompt=SHORT, max_tokens=2, **named)
    assert sorted(grown(server, before, count + 5)) == [False, True]


def test_others_are_spread(server: Server, client: openai.OpenAI) -> None:
    before, count = back(server), finished(server)
    for _ in range(4):
        client.completions.create(model="penstock-demo", prompt=SHORT, max_tokens=2)
    assert grown(server, before, count + 4) == [True, True]


def test_a_conversation_finds_what_it_wrote(server: Server, client: openai.OpenAI) -> None:
    """Four of them in turns: whatever was said before is in the cache of the replica that gets the next turn."""
    histories: list[list[Any]] = [
        [{"role": "user", "content": f"{name} tells a story. " * 12}] for name in ("Ada", "Bert", "Cleo", "Dora")
    ]
    for turn in range(3):
        for history in histories:
            answer = client.chat.completions.create(model="penstock-demo", messages=history, max_tokens=12)
            usage = answer.usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens or 0
            assert not turn or cached > usage.prompt_tokens // 2
            history += [{"role": "assistant", "content": answer.choices[0].message.content},
                        {"role": "user", "content": "And then?"}]  # fmt: skip


def test_a_name_that_is_none_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="X-Session-Id"):
        client.completions.create(
            model="penstock-demo", prompt=SHORT, max_tokens=2, extra_headers={"X-Session-Id": "a b"}
        )


def struck(server: Server, asks: list[Ask], undisturbed: list[Heard], role: str, replica: int, share: float) -> None:
    """A replica loses its scheduler or its executor when this share of all was said: everybody hears what they hear
    undisturbed, and /health says what is missing."""
    back(server)
    moment = int(characters(undisturbed) * share)
    done: list[int] = []

    def strike() -> None:
        done.append(pids(server, role)[replica])
        os.kill(done[0], signal.SIGKILL)

    found = asyncio.run(play(server.url, asks, {moment: strike}))
    assert done
    for request, heard, expected in zip(asks, found, undisturbed, strict=True):
        assert heard == expected, request
    back(server)


@pytest.mark.parametrize("role", ["scheduler", "executor"])
def test_streams_of_a_lost_replica_go_on(server: Server, asks: list[Ask], undisturbed: list[Heard], role: str) -> None:
    struck(server, asks, undisturbed, role, 1, 0.2)


def test_a_server_without_a_replica_serves_and_says_so(server: Server, client: openai.OpenAI) -> None:
    back(server)
    with server.no_restarts():
        os.kill(pids(server, "executor")[0], signal.SIGKILL)
        health = server.until("/health", lambda health: health["degraded"])
        assert (health["ready"], health["status"]) == (True, "ok")
        assert [replica["ready"] for replica in health["replicas"]] == [False, True]
        assert health["degraded"].startswith("replica 0: ")
        assert server.get("/health/ready") == {"status": "ok"}
        assert client.completions.create(model="penstock-demo", prompt=SHORT, max_tokens=2).choices[0].finish_reason
    back(server)
    before, count = back(server), finished(server)
    for _ in range(4):
        client.completions.create(model="penstock-demo", prompt=SHORT, max_tokens=2)
    assert grown(server, before, count + 4) == [True, True], "who is back gets its share"


def test_afterwards_nothing_is_left(server: Server, undisturbed: list[Heard]) -> None:
    """The last one with this server."""
    at_rest(server)
    ended(server)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(KILLS))
@pytest.mark.parametrize("role", ["scheduler", "executor"])
def test_more_kills(tmp_path: Path, asks: list[Ask], undisturbed: list[Heard], role: str, seed: int) -> None:
    with serving(tmp_path, *OPTIONS) as server:
        for replica in (0, 1):
            struck(server, asks, undisturbed, role, replica, 0.1 + 0.1 * seed + 0.2 * replica)
        ended(server)
