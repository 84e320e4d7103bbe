"""Bombs through real processes, among a neighbour's stream: a 400 that says why or a valid output, and nothing else.

Nothing dies but compile workers, nobody's memory grows beyond a limit, and the neighbour's tokens are those it gets
alone. How much later they come is a measurement: `benchmarks/bombs.py`.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks.bomb_cases import cases, texts
from penstock.engine_core.embedded import draft_folder
from tests.e2e.server import Server, serving

MODEL = str(draft_folder())  # any will do, and this one computes least
MOST_GROWN = 768 << 20  # bytes of a process: one compilation may take 512 MiB in a worker, and less of it remains
WAIT = 300.0  # seconds of silence that mean a hang; a compilation may take ten by the clock, and a crowd waits
CROWD = 12  # clients at once
SALT, OTHER_SALT = 5, 6
BEGUN = {"prompt": "Say: ", "max_tokens": 32, "temperature": 1.0, "seed": 3}
STORY_TOKENS = 400
STORY = {"prompt": "Tell me a long story.", "temperature": 0, "ignore_eos": True, "stream": True}
ENDED = "the structure|without a choice"  # what a request hears whose automaton passed a limit on its way

MARK = "@"  # where the salt stands
# What finished outputs of small grammars look like, said in a way that nobody has to search for.
PLAIN = {
    "regex: exponential alternation": rf"[ab]*b{MARK}",
    "regex: exponential automaton": rf"[ab]*a[ab]{{24}}{MARK}",
    "regex: nested quantifiers": rf"(a{MARK})+",
    "regex: a megabyte of alternatives": rf"{MARK}x[0-9]{{5}}",
    "grammar: left recursion": rf"{MARK}[a{MARK}]*",
    "grammar: hidden left recursion": rf"[xy]*{MARK}a*",
    "grammar: ambiguity": rf"[a{MARK}]*",
    "grammar: unit rules in a ring": MARK,
    "grammar: thousands of rules": rf"{MARK}x([0-9]+)",
    "grammar: wide repeats": r"[ab]*",
    "grammar: slow and slower": rf"[a-z{MARK}]+",
    "grammar: lark left recursion": rf"{MARK}[a{MARK}]*",
    "100,000 choices": rf"{MARK}-[0-9]{{6}}",
    "choices of one stem": rf"{MARK}a{{1,1499}}",
}


# CPU without end, memory without end.
TEMPLATES = {
    "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{% set a = 'x' * 9999 %}" + "{% set a = a ~ a %}" * 60 + "{{ a }}",
}
TEMPLATE_SECONDS = 2.0  # of CPU: twenty times what the memory bomb takes to reach its limit on an idle machine
TEMPLATE_MEMORY = 128 << 20  # bytes
TEMPLATE_WAIT = 30.0  # seconds by the clock for two of CPU, on a machine that others use too
TEMPLATES_GROWN = 32 << 20  # bytes of a tokenizer: a fraction of one bomb
LIMITS = {"time": "more than 2 s (--template-timeout)", "memory": "more than 128 MiB (--template-memory)"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("bombs"), model=MODEL) as server:
        yield server


def posted(server: Server, body: bytes, path: str = "/v1/completions") -> tuple[int, Any]:
    """Status and answer of a request."""
    place = urllib.parse.urlsplit(server.url)
    with closing(http.client.HTTPConnection(place.hostname or "", place.port, timeout=WAIT)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def streamed(server: Server, tokens: int = STORY_TOKENS) -> str:
    """The neighbour's whole text."""
    place = urllib.parse.urlsplit(server.url)
    pieces = []
    with closing(http.client.HTTPConnection(place.hostname or "", place.port, timeout=WAIT)) as connection:
        asked = json.dumps({**STORY, "max_tokens": tokens})
        connection.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        for line in response:
            if line.startswith(b"data: {"):
                pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    return "".join(pieces)


@pytest.fixture(scope="module")
def alone(server: Server) -> str:
    """What the neighbour hears without bombs."""
    return streamed(server)


def resident(server: Server) -> dict[str, int]:
    """Bytes of memory that each process holds. Source: proc(5)."""
    found = {}
    for role, pid in server.children().items():
        match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        assert match is not None
        found[role] = int(match[1]) << 10
    return found


def judge(name: str, field: str, status: int, answer: Any, salt: int = SALT) -> None:
    """A 400 that names the field and says why in few words; an output that follows the grammar as far as it goes; or
    the word that the automaton passed a limit on its way."""
    if status == 400:
        assert answer["error"]["param"] in (field, None), name
        assert answer["error"]["param"] or "deep" in name, name  # the body's own depth is nobody's field
        assert 10 < len(answer["error"]["message"]) < 2000, name
        return
    if "error" in answer:
        assert re.search(ENDED, answer["error"]["message"]), f"{name}: {answer}"
        return
    assert status == 200, f"{name}: {status} {answer}"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] in ("stop", "length"), name
    if choice["finish_reason"] == "length":
        return
    if name in PLAIN:
        plain = PLAIN[name].replace(MARK, str(salt))
        assert re.fullmatch(plain, choice["text"]), f"{name}: {choice['text']!r}"
    elif field == "guided_json" and name.startswith("schema: "):
        schema = cases(salt)[name]["guided_json"]
        jsonschema.Draft202012Validator(schema).validate(json.loads(choice["text"]))


def bodies(salt: int) -> list[tuple[str, str, bytes]]:
    """Name, field and body of every bomb."""
    fields_of = cases(salt)
    found = [(name, next(iter(each)), json.dumps({**BEGUN, **each}).encode()) for name, each in fields_of.items()]
    begun = json.dumps(BEGUN).removesuffix("}")
    return found + [(f"text: {name}", "guided_json", make(begun)) for name, make in texts(salt).items()]


@pytest.mark.long
def test_bombs_one_after_the_other_leave_everything_as_it_was(server: Server, alone: str) -> None:
    pids, before = server.children(), resident(server)
    with ThreadPoolExecutor(1) as threads:
        neighbour = threads.submit(streamed, server)
        for name, field, body in bodies(SALT):
            judge(name, field, *posted(server, body))
            if neighbour.done():
                assert neighbour.result() == alone
                neighbour = threads.submit(streamed, server)
        assert neighbour.result() == alone
    assert server.children() == pids
    after = resident(server)
    assert {role: after[role] - before[role] for role in after if after[role] - before[role] > MOST_GROWN} == {}
    assert server.get("/health/ready")


def test_bombs_all_at_once(server: Server, alone: str) -> None:
    """Whatever waits for two workers waits without harm; the neighbour reads on. A third of each kind is crowd enough,
    and each bomb's own answer is the business of the test before this one."""
    pids, before = server.children(), resident(server)
    with ThreadPoolExecutor(CROWD + 1) as threads:
        neighbour = threads.submit(streamed, server)
        crowd = bodies(OTHER_SALT)[::3]
        answers = [(name, field, threads.submit(posted, server, body)) for name, field, body in crowd]
        assert neighbour.result() == alone
        for name, field, answer in answers:
            judge(name, field, *answer.result(), OTHER_SALT)
    assert server.children() == pids
    after = resident(server)
    assert {role: after[role] - before[role] for role in after if after[role] - before[role] > MOST_GROWN} == {}


def test_what_is_slow_to_follow_ends_alone(server: Server, alone: str) -> None:
    """It compiles, and each token takes longer than the one before: it ends with an error that says so."""
    slow = {
        "prompt": "Say: ", "max_tokens": 3000, "temperature": 1.0, "seed": 4, "min_tokens": 2500,
        "guided_grammar": 'root ::= root root root | root root | [a-z] | ""',
    }  # fmt: skip
    with ThreadPoolExecutor(2) as threads:
        bomb = threads.submit(posted, server, json.dumps(slow).encode())
        assert threads.submit(streamed, server).result() == alone
        status, answer = bomb.result()
    assert status != 200 or answer["choices"][0]["finish_reason"] != "stop"
    assert "ms a token" in json.dumps(answer) or status == 400
    assert server.get("/health/ready")


def test_templates_of_requests_end_alone(tmp_path: Path) -> None:
    """A bomb is a 400 that names the limit, the neighbour reads on, and the tokenizer is as large as before."""
    options = ("--template-timeout", str(TEMPLATE_SECONDS), "--template-memory", str(TEMPLATE_MEMORY))
    with serving(tmp_path, "--trust-request-chat-template", *options, model=MODEL) as server:
        alone = streamed(server, 200)
        pids, before = server.children(), resident(server)
        with ThreadPoolExecutor(1) as threads:
            neighbour = threads.submit(streamed, server, 200)
            for kind, template in TEMPLATES.items():
                asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "chat_template": template}
                started = time.monotonic()
                status, answer = posted(server, json.dumps(asked).encode(), "/v1/chat/completions")
                assert time.monotonic() - started < TEMPLATE_WAIT
                assert (status, answer["error"]["param"]) == (400, "chat_template"), answer
                assert LIMITS[kind] in answer["error"]["message"], answer
            assert neighbour.result() == alone
        assert server.children() == pids
        assert resident(server)["tokenizer"] - before["tokenizer"] < TEMPLATES_GROWN
        assert server.get("/health/ready")
