"""`penstock run-batch`: good lines and bad ones, each with one outcome."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from penstock.services.commands import run_batch
from penstock.services.commands.client import Client
from penstock.services.commands.run_batch import outcomes
from tests.e2e import canary
from tests.e2e.server import Server
from tests.services.commands.run import penstock


def line(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def read(text: str) -> dict[str | None, dict[str, Any]]:
    found = [json.loads(each) for each in text.splitlines()]
    assert len({each["id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def test_every_line_has_its_answer(server: Server, tmp_path: Path) -> None:
    prompts = [prompt for prompt in canary.prompts() if "tools" not in prompt][:12]
    chat = "/v1/chat/completions"
    asked = [line(f"chat-{n}", chat, messages=p["messages"], temperature=0, max_tokens=canary.LONGEST)
             for n, p in enumerate(prompts)]  # fmt: skip
    asked += [line(f"text-{n}", prompt="Once", max_tokens=1 + n, ignore_eos=True) for n in range(20)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, asked)) + "\n")
    words = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    done = penstock("run-batch", *words, "--url", server.url)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "run-batch: 32/32 requests, 0 not served"  # a slow run says how far it is
    found = read((tmp_path / "out.jsonl").read_text())
    assert set(found) == {each["custom_id"] for each in asked}
    for number, prompt in enumerate(prompts):
        response = found[f"chat-{number}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["message"]["content"] == prompt["answer"]
    for number in range(20):
        assert found[f"text-{number}"]["response"]["body"]["usage"]["completion_tokens"] == 1 + number


def test_vectors_and_scores_are_served_as_well(server: Server) -> None:
    lines = [
        line("vector", "/v1/embeddings", input=["a", "b"]), line("score", "/v1/score", text_1="a", text_2=["a", "b"]),
        line("rank", "/v1/rerank", query="a", documents=["b", "a"]),
    ]  # fmt: skip
    given = "\n".join(map(json.dumps, lines))
    done = penstock("run-batch", "-i", "-", "-o", "-", "--url", server.url, "--quiet", given=given)
    assert done.returncode == 0, done.stderr
    found = {name: each["response"]["body"] for name, each in read(done.stdout).items()}
    assert len(found["vector"]["data"]) == 2
    assert found["score"]["data"][0]["score"] == pytest.approx(1.0, abs=1e-5)
    assert found["rank"]["results"][0]["index"] == 1


def test_bad_lines_are_told_of_and_lose_nobody_else(server: Server) -> None:
    good = line("good", prompt="Once", max_tokens=2)
    lines = [
        json.dumps(good), "", "{broken", json.dumps(good), json.dumps({**line("get"), "method": "GET"}),
        json.dumps(line("elsewhere", "/v1/nothing")), json.dumps(line("hot", prompt="x", temperature=9)),
        json.dumps(line("stream", prompt="x", stream=True)), json.dumps(line("outside", "http://example.com/")),
        json.dumps({"custom_id": "bodiless", "method": "POST", "url": "/v1/completions"}), "[1]",
    ]  # fmt: skip
    done = penstock("run-batch", "-i", "-", "-o", "-", "--url", server.url, "--quiet", given="\n".join(lines))
    assert (done.returncode, done.stderr) == (1, "")
    outcomes = [json.loads(each) for each in done.stdout.splitlines()]
    assert len(outcomes) == 10
    by_name: dict[str | None, list[dict[str, Any]]] = {}
    for outcome in outcomes:
        by_name.setdefault(outcome["custom_id"], []).append(outcome)
    codes = {each["error"]["code"] if each["error"] else each["response"]["status_code"] for each in by_name["good"]}
    assert codes == {200, "duplicate_custom_id"}
    assert by_name["elsewhere"][0]["response"]["status_code"] == 404
    assert by_name["hot"][0]["response"]["status_code"] == 400
    assert "temperature" in by_name["hot"][0]["response"]["body"]["error"]["message"]
    said = {name: each[0]["error"]["message"] for name, each in by_name.items() if each[0]["error"]}
    assert said["get"].startswith("line 5: method")
    assert said["stream"].startswith("line 8: body.stream")
    assert said["outside"].startswith("line 9: url")
    assert said["bodiless"].startswith("line 10: body is missing")
    assert {each["error"]["message"][:6] for each in by_name[None]} == {"line 3", "line 1"}


class Busy(BaseHTTPRequestHandler):
    """A server that is full twice, then serves; and one path that never does."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(self.path)
        full = self.path == "/v1/full" or len(self.asked) <= 2
        body = b'{"error": {"message": "full"}}' if full else b"{}"
        self.send_response(429 if full else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        del arguments


def test_a_full_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_batch, "RETRY", 0.0)
    monkeypatch.setattr(Busy, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        where = Client(f"http://127.0.0.1:{server.server_port}", "")
        lines = [json.dumps(line("a", "/v1/x")).encode(), json.dumps(line("b", "/v1/full")).encode()]
        first, second = outcomes(where, lines, 1)
        server.shutdown()
        thread.join()
    assert first.good
    assert second.response is not None
    assert (second.response.status_code, Busy.asked.count("/v1/full")) == (429, run_batch.ATTEMPTS)


def test_a_server_that_is_gone_is_told_of_each_line() -> None:
    lines = [json.dumps(line(str(number), prompt="x")).encode() for number in range(5)]
    found = list(outcomes(Client("http://127.0.0.1:1", ""), lines, 2))
    assert sorted(each.custom_id or "" for each in found) == list("01234")
    assert all(each.error is not None and each.error.code == "unreachable" for each in found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-i", "/nowhere/in", "-o", "-"), "--input-file: '/nowhere/in' is not allowed; it cannot be opened"),
        (("-i", "-", "-o", "/nowhere/out"), "--output-file"),
        (("-i", "-", "-o", "-", "--concurrency", "0"), "--concurrency"),
        (("-o", "-"), "-i/--input-file"),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], said: str) -> None:
    done = penstock("run-batch", *words, "--url", "http://127.0.0.1:1")
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
