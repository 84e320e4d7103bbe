"""Traces of a real server at a real collector: a request is one trace over all kinds of processes, whatever becomes of
it, and whatever becomes of the collector.

Where $JAEGER_QUERY_URL names a Jaeger (and $JAEGER_OTLP_URL its OTLP port), one trace is asked of it as well.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import select
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.collector import Collector, Span, collecting
from tests.e2e.server import FAULTY, LIMIT, Server, serving

KINDS = {f"penstock-{role}" for role in ("api", "tokenizer", "scheduler", "executor")}
PARENT = "b7ad6b7169203331"
HELLO = [{"role": "user", "content": "Hello there, how are you?"}]
NESTING = 2_000_000  # nanoseconds by which a child may seem to begin before its parent
SMALL = ("--max-model-len", "96", "--kv-cache-memory", str(9 * 196608), "--device", "cpu", "--trace-tokens", "8")
EOS = 4089


@pytest.fixture(scope="module")
def sink() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, sink: Collector) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("traced")
    with serving(folder, "--otlp-endpoint", sink.url, *SMALL, entry=FAULTY) as server:
        yield server


class Ask:
    """One request with a trace of its own, and its answer."""

    def __init__(self, server: Server, path: str, body: dict[str, Any], flags: str = "01") -> None:
        self.trace = secrets.token_hex(16)
        host, port = server.url.removeprefix("http://").split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=120)
        headers = {"content-type": "application/json", "traceparent": f"00-{self.trace}-{PARENT}-{flags}"}
        self.connection.request("POST", path, json.dumps(body), headers)
        self.answer = self.connection.getresponse()

    def read(self) -> bytes:
        data = self.answer.read()
        self.connection.close()
        return data


def stream(tokens: int = 30, **more: Any) -> dict[str, Any]:
    return {"prompt": "Once upon a time", "max_tokens": tokens, "stream": True, "ignore_eos": True, **more}


def has(*names: str) -> Callable[[list[Span]], bool]:
    """All of these are there, a name as often as it stands here, and so is the span that everything is below."""

    def done(spans: list[Span]) -> bool:
        found = [span["name"] for span in spans]
        whole = any(name.startswith("POST") for name in found)
        return whole and all(found.count(name) >= names.count(name) for name in names)

    return done


def named(spans: list[Span], name: str) -> list[Span]:
    return sorted((span for span in spans if span["name"] == name), key=lambda span: span["start"])


def events(spans: list[Span]) -> list[str]:
    return [event["name"] for span in spans for event in span["events"]]


def until(found: Callable[[], list[Span]]) -> list[Span]:
    """What is found, once it is."""
    deadline = time.monotonic() + LIMIT
    while not (spans := found()):
        assert time.monotonic() < deadline
        select.select([], [], [], 0.05)
    return spans


def written(spans: list[Span]) -> int:
    """Tokens, in all stays."""
    return sum(span["attributes"]["penstock.output.tokens"] for span in named(spans, "decode"))


def check_tree(spans: list[Span]) -> None:
    """One root below the client's span, nobody without a parent, nobody before their parent."""
    by_id = {span["id"]: span for span in spans}
    roots = [span for span in spans if span["parent"] not in by_id]
    assert [root["parent"] for root in roots] == [PARENT]
    assert roots[0]["resource"]["service.name"] == "penstock-api"
    for span in spans:
        parent = by_id.get(span["parent"])
        assert span["end"] >= span["start"], span
        # Behind an abort a step that had been planned still runs, so only beginnings nest.
        assert parent is None or parent["start"] - NESTING <= span["start"], (span, parent)


def named_in(answer: bytes) -> str:
    """The id of a streamed chat."""
    first, _, _ = answer.removeprefix(b"data: ").partition(b"\n")
    found: str = json.loads(first)["id"]
    return found


def test_a_streamed_chat_is_one_trace_of_all_kinds_of_processes(traced: Server, sink: Collector) -> None:
    ask = Ask(traced, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 40, "stream": True, "ignore_eos": True})
    assert ask.answer.getheader("traceresponse", "").split("-")[1] == ask.trace
    answer = ask.read()
    wanted = ("tokenize", "queue", "prefill", "decode", "detokenize", "stream", "execute prefill", "execute decode")
    spans = sink.trace(ask.trace, has(*wanted))
    check_tree(spans)
    assert {span["resource"]["service.name"] for span in spans} == KINDS
    assert {span["resource"]["service.instance.id"] for span in spans} == {f"{kind[9:]}-0" for kind in KINDS}
    (http_span,), (chat,) = named(spans, "POST /v1/chat/completions"), named(spans, "chat penstock-demo")
    assert (http_span["kind"], http_span["attributes"]["http.response.status_code"]) == (2, 200)
    assert chat["parent"] == http_span["id"]
    assert {span["parent"] for span in spans if span not in (http_span, chat)} == {chat["id"]}
    told = chat["attributes"]
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.response.id"] == named_in(answer)
    assert (told["gen_ai.usage.output_tokens"], told["gen_ai.response.finish_reasons"]) == (40, ["length"])
    assert 0 < told["gen_ai.server.time_to_first_token"] < 120
    (decode,) = named(spans, "decode")
    assert events([decode])[0] == "first token"
    assert [event["attributes"]["penstock.tokens"] for event in decode["events"][1:]] == [9, 17, 25, 33]
    order = [named(spans, name)[0]["start"] for name in ("tokenize", "queue", "prefill", "decode")]
    assert order == sorted(order)
    traced.logged(f"trace_id={ask.trace}")


def test_steps_link_to_the_requests_in_them(traced: Server, sink: Collector) -> None:
    traces = set()

    def linked() -> list[Span]:
        """Of a request that came when the span of a step was due: one a second at most is recorded."""
        ask = Ask(traced, "/v1/completions", stream())
        ask.read()
        sink.trace(ask.trace, has("decode", "execute decode"))
        traces.add(ask.trace)
        return [span for span in sink.spans() if traces.intersection(link["trace"] for link in span["links"])]

    step = until(linked)[0]
    assert (step["name"], step["resource"]["service.name"], step["parent"]) == ("step", "penstock-scheduler", "")
    assert step["attributes"]["penstock.step.rows"] >= 1
    assert step["attributes"]["penstock.blocks.total"] == 8  # and one that is scratch
    pair = sink.trace(step["trace"], lambda spans: len(spans) == 2)
    (executed,) = named(pair, "execute step")
    assert (executed["parent"], executed["resource"]["service.name"]) == (step["id"], "penstock-executor")
    assert executed["attributes"]["penstock.device.seconds"] > 0


def test_a_client_that_leaves(traced: Server, sink: Collector) -> None:
    before = traced.aborted()
    with traced.slow():
        ask = Ask(traced, "/v1/completions", stream(80))
        ask.answer.read(10)
        ask.connection.sock.close()
        ask.answer.close()
        traced.until("/health", lambda _: traced.aborted() > before)
    spans = sink.trace(ask.trace, has("decode", "execute decode"))
    check_tree(spans)
    assert written(spans) < 80
    assert {"aborted", "client left"} <= set(events(spans))
    assert named(spans, "text_completion penstock-demo")[0]["attributes"]["error.type"] == "client_left"


def test_a_deadline(traced: Server, sink: Collector) -> None:
    with traced.slow():
        ask = Ask(traced, "/v1/completions", {**stream(80), "stream": False, "timeout": 0.05})
        ask.read()
    assert ask.answer.status == 504
    spans = sink.trace(ask.trace, has("text_completion penstock-demo"))
    check_tree(spans)
    (asked,) = named(spans, "text_completion penstock-demo")
    assert (events([asked]), asked["error"]) == (["deadline exceeded"], True)


def test_several_prompts_with_several_choices(traced: Server, sink: Collector) -> None:
    ask = Ask(traced, "/v1/completions", {"prompt": ["One", "Two"], "n": 2, "max_tokens": 4, "ignore_eos": True})
    ask.read()
    spans = sink.trace(ask.trace, has(*["decode"] * 4, *["execute decode"] * 4, *["prompt", "detokenize"] * 2))
    check_tree(spans)
    prompts = {span["id"] for span in named(spans, "prompt")}
    for name in ("decode", "queue", "execute decode"):
        found = [(span["parent"], span["attributes"]["penstock.choice"]) for span in named(spans, name)]
        assert sorted(found) == sorted((parent, choice) for parent in prompts for choice in (0, 1)), name


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/embeddings", {"input": ["a b c", "d e f"]}, "embeddings penstock-demo"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 3}, "chat penstock-demo"),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 3}, "chat penstock-demo"),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, "embeddings penstock-demo"),
    ],
)
def test_every_way_to_ask(traced: Server, sink: Collector, path: str, body: dict[str, Any], name: str) -> None:
    ask = Ask(traced, path, body)
    ask.read()
    assert ask.answer.status == 200
    spans = sink.trace(ask.trace, has(name, "tokenize", "queue", "prefill", "execute prefill"))
    check_tree(spans)


def test_structured_output_shows_its_grammar(traced: Server, sink: Collector) -> None:
    ask = Ask(
        traced, "/v1/completions", {"prompt": "x", "max_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}}
    )
    ask.read()
    assert ask.answer.status == 200
    spans = sink.trace(ask.trace, has("compile grammar", "prepare grammar", "execute prefill"))
    check_tree(spans)


def test_what_the_client_does_not_sample_is_not_told(traced: Server, sink: Collector) -> None:
    quiet = Ask(traced, "/v1/completions", stream(2), flags="00")
    quiet.read()
    assert quiet.answer.getheader("traceresponse") is None
    loud = Ask(traced, "/v1/completions", stream(2))
    loud.read()
    sink.trace(loud.trace, has("decode", "execute decode", "detokenize"))
    assert not [span for span in sink.spans() if span["trace"] == quiet.trace]


def test_a_start_is_a_trace_of_all_processes(traced: Server, sink: Collector) -> None:
    wanted = {"start launcher", *(f"start {kind[9:]}-0" for kind in KINDS)}
    (launcher,) = until(lambda: [span for span in sink.spans() if span["name"] == "start launcher"])
    spans = sink.trace(launcher["trace"], lambda spans: wanted <= {span["name"] for span in spans})
    starts = {span["name"]: span for span in spans if span["name"].startswith("start ")}
    assert set(starts) == wanted
    assert {span["parent"] for name, span in starts.items() if name != "start launcher"} == {launcher["id"]}
    stages = [span["name"] for span in spans if span["parent"] == starts["start executor-0"]["id"]]
    assert {"importing", "loading weights", "making the KV cache", "warming up"} <= set(stages)
    assert not {"compiling kernels", "capturing graphs"} & set(stages), "a CPU does neither"
    ids = {span["id"] for span in spans}
    assert all(span["parent"] in ids for span in spans if span["id"] != launcher["id"])


def test_a_preempted_request(traced: Server, sink: Collector) -> None:
    """Requests that end early teach the scheduler to expect little; then one comes whose two choices, which keep step
    with each other, take all they may: more than there is."""
    early = {"prompt": "x", "max_tokens": 80, "n": 64, "logit_bias": {str(EOS): 100}}
    for _ in range(2):
        Ask(traced, "/v1/completions", early, flags="00").read()
    ask = Ask(traced, "/v1/completions", stream(80, n=2, seed=1))
    ask.read()
    wanted = has("execute decode", "detokenize")
    spans = sink.trace(ask.trace, lambda spans: wanted(spans) and written(spans) >= 160)
    check_tree(spans)
    assert written(spans) == 160
    preempted = [span for span in named(spans, "decode") if "preempted" in events([span])]
    assert preempted
    assert len(named(spans, "decode")) == 2 + len(preempted)
    assert len(named(spans, "queue")) == 2 + len(preempted)


def test_a_collector_that_hangs_or_fails_disturbs_nobody(traced: Server, sink: Collector) -> None:
    for trouble in ({"hang": True}, {"status": 503}):
        sink.answers(**trouble)
        for _ in range(3):
            ask = Ask(traced, "/v1/completions", stream(4))
            ask.read()
            assert ask.answer.status == 200
    sink.answers(status=200)
    ask = Ask(traced, "/v1/completions", stream(4))
    ask.read()
    check_tree(sink.trace(ask.trace, has("decode", "execute decode", "detokenize")))


def test_an_executor_that_is_killed_is_part_of_the_trace(traced: Server, sink: Collector) -> None:
    """In the middle of an answer."""
    wanted = has("execute decode", "detokenize")
    with traced.slow():
        ask = Ask(traced, "/v1/completions", stream(80))
        ask.answer.read(1)
        os.kill(traced.children()["executor"], signal.SIGKILL)
    ask.read()
    spans = sink.trace(ask.trace, lambda spans: wanted(spans) and written(spans) >= 80)
    check_tree(spans)
    first, second = named(spans, "decode")
    assert events([first])[-1] == "restarted"
    again = [span for span in named(spans, "prefill") if span["start"] >= first["end"]]
    assert again, "what had been written is computed again"
    assert second["attributes"]["penstock.end"] == "length"
    assert written(spans) == 80


def test_a_server_ends_in_time_although_its_collector_hangs(traced: Server, sink: Collector) -> None:
    """The last one: its spans are lost, and nothing else."""
    sink.answers(hang=True)
    Ask(traced, "/v1/completions", stream(3)).read()
    traced.process.send_signal(signal.SIGTERM)
    assert traced.process.wait(LIMIT) == 0
    sink.answers(status=200)
    log = traced.log.read_text()
    lost = [line.split() for line in log.splitlines() if "traces_lost" in line]
    processes = [words[2] for words in lost]
    assert processes
    assert len(set(processes)) == len(processes), "one line of each that lost some"


@pytest.mark.skipif("JAEGER_QUERY_URL" not in os.environ, reason="no Jaeger: set JAEGER_QUERY_URL and JAEGER_OTLP_URL")
def test_jaeger_shows_the_same(tmp_path: Path) -> None:
    query = os.environ["JAEGER_QUERY_URL"].rstrip("/")
    endpoint = os.environ.get("JAEGER_OTLP_URL", "http://localhost:4318")
    with serving(tmp_path, "--otlp-endpoint", endpoint, "--device", "cpu") as server:
        ask = Ask(server, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 8, "stream": True})
        ask.read()
        deadline = time.monotonic() + 60
        kinds: set[str] = set()
        while kinds != KINDS:
            assert time.monotonic() < deadline, kinds
            select.select([], [], [], 0.5)
            try:
                with urllib.request.urlopen(f"{query}/api/traces/{ask.trace}", timeout=30) as answer:
                    found = json.load(answer)["data"]
            except urllib.error.HTTPError:
                continue
            kinds = {process["serviceName"] for trace in found for process in trace["processes"].values()}
