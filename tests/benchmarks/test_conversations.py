"""Conversations: what is said when, what counts as repeated, and a small run from end to end."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.conversations import (
    LOADS,
    Asked,
    Load,
    Talk,
    figures,
    lines,
    load_of,
    main,
    measure,
    parser,
    repeated,
)
from penstock.services.bench.client import Target, target
from penstock.services.bench.workload import Record

LOAD = Load(conversations=2, turns=4, system=30, tools=0, user=8, answer=3, forks=0, open=2)
LIMIT = 60.0  # seconds
SMALL = "--conversations 3 --turns 3 --system 256 --user 24 --answer 12 --open 1 --pairs 1"
SERVER = "--device cpu --cpu-threads 1 --api-processes 1 --tokenizer-processes 1 --kv-cache-memory 64M"


def ids(text: str) -> list[int]:
    return [zlib.crc32(word.encode()) % 1000 for word in text.split()]


class Answers:
    """A server that takes a word for a token and answers every chat with as many words as it is asked for."""

    def __init__(self, told: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._told = told

    def events(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        prompt = [token for message in body["messages"] for token in ids(f"{message['role']} {message['content']}")]
        words = [f"word{number} " for number in range(body["max_tokens"])]
        found: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": {"content": word}, "token_ids": ids(word) if self._told else None}]}
            for word in words
        ]
        cached = {"cached_tokens": 0 if "cache_salt" in body else len(prompt) - 1}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(words), "prompt_tokens_details": cached}
        return [{"prompt_token_ids": prompt, "choices": []}, *found, {"choices": [], "usage": usage}]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = json.loads(await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0])))
        self.bodies.append(body)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for event in self.events(body):
            writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        writer.write(b"data: [DONE]\n\n")
        writer.close()


@asynccontextmanager
async def answering(answers: Answers) -> AsyncIterator[Target]:
    server = await asyncio.start_server(answers.answer, "127.0.0.1", 0)
    async with server:
        yield target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


def asked(start: float, prompt: str, answer: str = "", *, end: float = 0.0, turn: int = 0, cached: int = 0,
          first: float = 0.0, error: str = "") -> Asked:  # fmt: skip
    """A request whose tokens are letters."""
    record = Record(turn, 0, start, first=first or start + 1, end=end or start + 2, events=1, tokens=1,
                    prompt_tokens=len(prompt), cached_tokens=cached, error=error)  # fmt: skip
    return Asked(record, tuple(map(ord, prompt)), tuple(map(ord, answer)))


async def talked(load: Load, seed: int = 0, pairs: int = 0) -> list[dict[str, Any]]:
    """The bodies of a load, without those of the calibration."""
    answers = Answers()
    async with answering(answers) as where:
        await measure(Talk(where, load, {"model": "m"}, seed, LIMIT), pairs)
    return answers.bodies[2:]


def test_what_an_earlier_request_began_with_is_repeated() -> None:
    rows = [
        asked(20, "abcdefgh"),  # goes on from the answer to the first
        asked(0, "abc", "def"),
        asked(1, "abcx"),  # the first has not been answered yet
        asked(1.5, "abcde"),
        asked(30, "bcdefgh"),  # the same tokens, but none at the beginning
    ]
    assert repeated(rows) == [6, 0, 3, 3, 0]
    assert repeated([*rows, asked(30.5, "abcdefgh")])[-1] == 8


def test_figures_are_of_what_is_repeated_turn_by_turn() -> None:
    rows = [
        asked(0, "abcd", "ef", cached=0),
        asked(1, "abxy", "zz", cached=2),
        asked(10, "abcdefgh", cached=3, turn=1),
        asked(11, "abxyzz..", cached=6, turn=1, error="timeout"),
    ]
    pairs = [
        (asked(50, "a" * 10, cached=8, first=51), asked(60, "a" * 10, first=64)),
        (asked(70, "b" * 10, cached=5, first=73), asked(80, "b" * 10, cached=1, first=81)),
        (asked(90, "c" * 10, cached=4, first=99), asked(99, "c" * 10, error="timeout")),
    ]
    found = figures(rows, pairs)
    assert (found.repeated_tokens, found.cached_tokens, found.hit_rate) == (2 + 6, 2 + 3, 0.625)
    assert found.hit_rate_by_turn == (1.0, 0.5)
    assert (found.hits, found.hit_ttft_ms, found.colds, found.cold_ttft_ms) == (2, 2000.0, 1, 4000.0)
    assert (found.summary.completed, found.summary.failed) == (3, 1)
    assert "62.5% of 8 repeated prompt tokens were cached; by turn 100% 50%" in lines(found)
    assert "begin with an empty cache" not in lines(found)
    assert "begin with an empty cache" in lines(figures([asked(0, "abcd", cached=3)], []))
    assert figures([asked(0, "abcd", error="timeout")], []).hit_rate == 0.0


async def test_each_turn_sends_what_was_said_before() -> None:
    bodies = await talked(LOAD)
    assert len(bodies) == 8
    assert {len(body["messages"]) for body in bodies} == {2, 4, 6, 8}
    (system,) = {body["messages"][0]["content"] for body in bodies}
    assert len(system.split()) == 30
    longest = [body["messages"] for body in bodies if len(body["messages"]) == 8]
    assert len({messages[1]["content"] for messages in longest}) == 2, "conversations have messages of their own"
    for body in bodies:
        assert any(messages[: len(body["messages"])] == body["messages"] for messages in longest)
        assert (body["max_tokens"], body["min_tokens"], body["model"]) == (3, 3, "m")
        assert all(message["content"] == "word0 word1 word2 " for message in body["messages"][2::2])
        assert all(len(message["content"].split()) == 8 for message in body["messages"][1::2])


async def test_texts_are_the_same_each_time_and_others_with_another_seed() -> None:
    def said(bodies: list[dict[str, Any]]) -> list[str]:
        return sorted(json.dumps(body["messages"]) for body in bodies)

    first, again, other = [said(await talked(LOAD, seed)) for seed in (0, 0, 1)]
    assert first == again
    assert not set(first) & set(other)


async def test_forks_leave_halfway_and_tools_go_along() -> None:
    load = Load(conversations=1, turns=4, system=30, tools=450, user=8, answer=3, forks=2, open=2)
    bodies = await talked(load)
    assert len(bodies) == 4 + 2 * 2
    assert {len(body["tools"]) for body in bodies} == {3}
    third = [body["messages"] for body in bodies if len(body["messages"]) == 6]
    assert len(third) == 3
    assert len({json.dumps(messages[:5]) for messages in third}) == 1, "forks share what came before"
    assert len({messages[5]["content"] for messages in third}) == 3


async def test_pairs_ask_the_same_with_and_without_a_salt() -> None:
    *_, hit, cold = await talked(LOAD, pairs=1)
    assert len(hit["messages"]) == 10
    assert cold == hit | {"cache_salt": "cold 0 0000"}


async def test_a_server_without_token_ids_is_refused() -> None:
    async with answering(Answers(told=False)) as where:
        with pytest.raises(ConnectionError, match="no token ids"):
            await Talk(where, LOAD, {}, 0, LIMIT).calibrate()


async def test_a_conversation_ends_with_a_failed_request() -> None:
    answers = Answers()
    async with answering(answers) as where:
        talk = Talk(where, LOAD, {}, 0, LIMIT)
        await talk.calibrate()
    await talk.hold()  # nobody is there any more
    assert [one.record.error for one in talk.asked] == ["no connection"] * 2
    assert await talk.pairs(2) == []


def test_options_change_the_load() -> None:
    options = parser().parse_args(["--load", "agent", "--turns", "3", "--tools", "0", "--", "MODEL", "--device", "cpu"])
    load = load_of(options)
    assert (load.turns, load.tools, load.forks) == (3, 0, LOADS["agent"].forks)
    assert options.rest == ["MODEL", "--device", "cpu"]
    chat = LOADS["chat"]
    assert (chat.conversations, chat.turns, chat.system) == (64, 8, 2000)
    assert LOADS["agent"].system + LOADS["agent"].tools == 10_000


def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--turns", "0"]) == 2
    assert "--turns: 0 is not allowed; at least 1" in capsys.readouterr().err
    assert main(["--forks", "-1"]) == 2
    assert main(["--url", "https://127.0.0.1:9"]) == 2


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How fast it is, is the machine's matter; what is found is not."""
    out = tmp_path / "result.json"
    assert main([*SMALL.split(), "--output", str(out), "--", *SERVER.split()]) == 0
    report = json.loads(out.read_text())
    found = report["figures"]
    assert found["summary"]["completed"] == 9
    assert found["repeated_tokens"] >= found["cached_tokens"] >= 0.8 * found["repeated_tokens"] > 1000
    assert (found["hits"], found["colds"], len(found["hit_rate_by_turn"])) == (1, 1, 3)
    assert (report["chip"], report["load"]["turns"]) == ("cpu", 3)
    assert report["command"].startswith("python -m benchmarks.conversations --conversations 3")
    assert {"commit", "date"} <= report.keys()
    assert "repeated prompt tokens were cached" in capsys.readouterr().out
