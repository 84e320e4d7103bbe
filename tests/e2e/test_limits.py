"""What bounds a request in time and a client in what it takes: deadlines, the queue, slow senders and readers,
processes that keep failing, signals; and the log, a line of JSON per event."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.chaos.leftovers import ended
from tests.e2e.server import FAULTY, LIMIT, Server, descendants, serving
from tests.e2e.test_processes import wait_gone

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}
SHORT = {"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}
NARROW = ("--max-num-seqs", "1", "--max-queue-time", "1", "--header-timeout", "2", "--body-timeout", "2")
LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that runs one request at a time and logs JSON."""
    with serving(tmp_path_factory.mktemp("narrow"), *NARROW, "--log-format", "json", entry=FAULTY, apart=True) as found:
        yield found


@pytest.fixture
def http(narrow: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=narrow.url, timeout=LIMIT) as found:
        yield found
    rested(narrow)


def rested(server: Server) -> None:
    """Wait until nobody is left in the engine and no block is held."""
    server.until("/health", lambda found: rests(found["engine"]))


def rests(engine: dict[str, Any]) -> bool:
    held = engine["blocks"] - engine["blocks_free"] - engine["blocks_idle"]
    return bool(engine["running"] == engine["waiting"] == held == 0)


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """What a stream says, its errors included."""
    for line in lines:
        if line.startswith(("data: {", '{"error"')):
            yield json.loads(line.removeprefix("data: "))


@contextmanager
def occupied(narrow: Server, http: httpx.Client) -> Iterator[None]:
    """The one place of the narrow server is taken, until the block ends."""
    with narrow.slow(), http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as answer:
        heard = events(answer.iter_lines())
        next(heard)
        yield


@pytest.mark.parametrize(
    ("field", "headers", "source"),
    [({"timeout": 0.2}, {}, "timeout"), ({}, {"X-Request-Timeout": "0.2"}, "X-Request-Timeout")],
)
def test_a_request_ends_at_its_deadline(
    narrow: Server, http: httpx.Client, field: dict[str, float], headers: dict[str, str], source: str
) -> None:
    with narrow.slow():
        answer = http.post(COMPLETIONS, json={**LONG, **field}, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (504, "timeout_error", "deadline_exceeded")
    assert f"0.2 s ({source})" in error["message"]


def test_a_stream_that_has_begun_ends_with_the_error(narrow: Server, http: httpx.Client) -> None:
    """One that has not, because the machine is slow, ends with the status."""
    with narrow.slow(), http.stream("POST", COMPLETIONS, json={**LONG, "stream": True, "timeout": 2}) as answer:
        *_, last = events(answer.iter_lines())
    assert answer.status_code in (200, 504)
    assert last["error"]["code"] == "deadline_exceeded"


def test_a_deadline_holds_in_the_queue_and_so_does_the_queues_own(narrow: Server, http: httpx.Client) -> None:
    with occupied(narrow, http):
        late = http.post(COMPLETIONS, json={**SHORT, "timeout": 0.2})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        turned_away = http.post(COMPLETIONS, json=SHORT)
        assert (turned_away.status_code, turned_away.json()["error"]["code"]) == (429, "overloaded")
        assert "--max-queue-time" in turned_away.json()["error"]["message"]
        assert int(turned_away.headers["Retry-After"]) >= 1
    rested(narrow)
    assert http.post(COMPLETIONS, json=SHORT).status_code == 200


def test_a_salt_hides_what_others_have_asked(http: httpx.Client) -> None:
    """What a probe would measure: how much of a prompt somebody has asked before."""
    found = []
    for salt in ("one", "one", "another", None):
        body = {**SHORT, "prompt": "It was a dark and stormy night, and nobody was at sea. " * 8, "cache_salt": salt}
        usage = http.post(COMPLETIONS, json=body).json()["usage"]
        found.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert (found[0], found[1] > 0, found[2], found[3]) == (0, True, 0, 0)


@pytest.mark.parametrize(
    ("begun", "option"),
    [
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Fill: ", "--header-timeout"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n", "--body-timeout"),
    ],
)
def test_a_client_that_sends_a_byte_now_and_then_is_cut_off(narrow: Server, begun: bytes, option: str) -> None:
    host, port = narrow.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT) as client:
        client.sendall(begun)
        deadline = time.monotonic() + LIMIT
        while not select.select([client], [], [], 0.05)[0]:
            assert time.monotonic() < deadline
            with contextlib.suppress(ConnectionError):  # it was cut off just now, and the answer is here
                client.sendall(b" ")
        answer = client.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 408")
    assert option.encode() in answer


def test_every_line_of_the_log_is_an_object_and_a_request_is_named_in_its_own(narrow: Server) -> None:
    """Also those of the tests before this one."""
    named = {"X-Request-Id": "named-here", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    secret = "a prompt that nobody logs"
    body = {**SHORT, "prompt": secret}
    assert httpx.post(narrow.url + COMPLETIONS, json=body, headers=named, timeout=LIMIT).status_code == 200
    narrow.logged("named-here")
    text = narrow.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "process", "event"} <= set(line) for line in lines)
    requests = [line for line in lines if line["event"] == "request"]
    assert requests
    assert all(line["id"] and line["status"] for line in requests)
    (mine,) = [line for line in requests if line["id"] == "named-here"]
    assert (mine["trace_id"], mine["status"], mine["completion_tokens"]) == (TRACE, 200, 4)
    assert secret not in text


def test_a_process_that_keeps_failing_makes_the_server_say_so(tmp_path: Path) -> None:
    """Its executor dies as often as it is started: whoever waits hears why, with an error of class 503."""
    with serving(tmp_path, entry=FAULTY) as server, httpx.Client(base_url=server.url, timeout=LIMIT) as http:
        with server.slow(), http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as answer:
            heard = events(answer.iter_lines())
            next(heard)
            killed: set[int] = set()
            deadline = time.monotonic() + LIMIT
            while "beyond_hope" not in server.log.read_text():
                assert time.monotonic() < deadline, server.log.read_text()
                pid = server.children().get("executor")
                if pid is not None and pid not in killed:
                    killed.add(pid)
                    os.kill(pid, signal.SIGKILL)
                select.select([], [], [], 0.02)
            *_, last = heard
        reason = "executor-0 failed 5 times within 60 seconds"
        assert (last["error"]["type"], reason in last["error"]["message"]) == ("service_unavailable", True)
        for path in ("/health", "/health/ready"):
            answer = http.get(path)
            assert (answer.status_code, reason in answer.text) == (503, True)
        refused = http.post(COMPLETIONS, json=SHORT)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "service_unavailable")
        assert http.get("/health/live").status_code == 200
        assert f'beyond_hope child=executor-0 reason="{reason}' in server.log.read_text()
        ended(server)


def test_a_slow_reader_holds_up_nobody_and_hears_everything(tmp_path: Path) -> None:
    """Beyond what the socket takes its deltas are merged; the engine is done with it long before it reads on."""
    place = tmp_path / "http.sock"
    body = {**LONG, "max_tokens": 200, "n": 4, "logprobs": 20, "temperature": 1, "seed": 5, "return_token_ids": True}
    asking = httpx.Client(transport=httpx.HTTPTransport(uds=str(place)), base_url="http://x", timeout=LIMIT)
    with serving(tmp_path, "--uds", str(place), entry=FAULTY) as server, asking as http:
        expected = http.post(COMPLETIONS, json=body).json()["choices"]
        with http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as answer:
            deadline = time.monotonic() + LIMIT
            while not finished(http, 2 * len(expected)):
                assert time.monotonic() < deadline
                select.select([], [], [], 0.1)
            choices = [choice for event in events(answer.iter_lines()) for choice in event["choices"]]
        for index, whole in enumerate(expected):
            own = [choice for choice in choices if choice["index"] == index]
            told = [choice["logprobs"]["tokens"] for choice in own if choice.get("logprobs")]
            assert "".join(choice["text"] for choice in own) == whole["text"]
            assert [token for choice in own for token in choice.get("token_ids") or ()] == whole["token_ids"]
            assert [token for each in told for token in each] == whole["logprobs"]["tokens"]
            assert max(map(len, told)) > 5  # merged, which single tokens are not
        second_signal(server, http)


def finished(http: httpx.Client, choices: int) -> bool:
    """Whether the engine has ended so many."""
    return bool(http.get("/health").json()["engine"]["finished"] >= choices)


def second_signal(server: Server, http: httpx.Client) -> None:
    """It ends the server at once, whatever runs, with another exit code and nothing left over."""
    pids = descendants(server.process.pid)
    with server.slow(), http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as answer:
        heard = events(answer.iter_lines())
        next(heard)
        server.process.send_signal(signal.SIGTERM)
        server.logged("draining unfinished=1")
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.TransportError):
            list(heard)
    assert server.process.wait(LIMIT) == 1
    wait_gone(pids)
    assert "ending_at_once" in server.log.read_text()
    assert not list(server.run_dir.glob("*.sock"))


@pytest.mark.long
def test_ten_thousand_idle_connections_do_no_harm(tmp_path: Path) -> None:
    """Nor does the loss of a tokenizer while they are there: what api processes watch has high numbers then."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    count = min(10_000, most - 500)
    with serving(tmp_path, "--keep-alive-timeout", "3600") as server, ExitStack() as stack:
        with httpx.Client(base_url=server.url, timeout=LIMIT) as http:
            body = {**SHORT, "max_tokens": 40, "temperature": 0}
            expected = http.post(COMPLETIONS, json=body).json()["choices"]
            api = server.children()["api"]
            before = resident(api)
            idle = [stack.enter_context(connected(server)) for _ in range(count)]
            for one in idle:
                one.sendall(LIVE)
            for one in idle:
                lives(one)
            assert (resident(api) - before) / count < 40_000  # bytes
            assert http.post(COMPLETIONS, json=body).json()["choices"] == expected
            os.kill(server.children()["tokenizer"], signal.SIGKILL)
            server.logged("serving_again")
            server.healthy()
            assert http.post(COMPLETIONS, json=body).json()["choices"] == expected
            for one in idle[:: count // 100]:
                one.sendall(LIVE)
                lives(one)
        assert server.children()["api"] == api
        ended(server)


def connected(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT)


def lives(one: socket.socket) -> None:
    """Its request is answered."""
    heard = b""
    while not heard.endswith(b"}"):
        data = one.recv(4096)
        assert data, heard
        heard += data
    assert heard.startswith(b"HTTP/1.1 200 OK")


def resident(pid: int) -> int:
    """Bytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
