"""Drafts through real processes and OpenAI's client: fewer steps, the same answers; usage and metrics say so."""

from __future__ import annotations

import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.samples import scrape, total
from tests.e2e.server import LIMIT, Server, serving

MODEL = "penstock-demo"
LIST = "chair; ziaclurk; kloteax; lantern; ciatros; thoonia; guitar; clumen; bell; drum"
ASK: Any = [{"role": "user", "content": f"Please repeat this list: {LIST}"}]
PREDICTION: Any = {"type": "content", "content": LIST}
# With fixed lengths the number of steps does not follow from what they take on a busy machine.
FIXED = '{"method": "none", "adaptive": false}'
DRAFT = '{"method": "draft_model", "model": "penstock-demo-draft", "num_speculative_tokens": 5, "adaptive": false}'
NGRAM = '{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3, "adaptive": false}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without a method: a request's prediction and a grammar's runs are its drafts."""
    with serving(tmp_path_factory.mktemp("fixed"), "--speculative-config", FIXED) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with prompt lookup."""
    with serving(tmp_path_factory.mktemp("lookup"), "--speculative-config", NGRAM) as server:
        yield server


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the embedded model's draft."""
    with serving(tmp_path_factory.mktemp("draft"), "--speculative-config", DRAFT) as server:
        yield server


@pytest.fixture
def drafted_client(drafting: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=drafting.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def copier(lookup: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=lookup.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def engine(server: Server) -> dict[str, Any]:
    """The engine's numbers in a heartbeat from now on, when nobody runs."""
    asked = time.time()

    def rests(health: dict[str, Any]) -> bool:
        return bool(health["engine"]["time"] > asked and health["engine"]["running"] == 0)

    return dict(server.until("/health", rests)["engine"])


def drafted(answer: Any) -> tuple[int, int]:
    """Tokens accepted and rejected, as usage has them."""
    details = answer.usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def whole(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=ASK, **({"temperature": 0} | options))


def streamed(client: openai.OpenAI, **options: Any) -> tuple[str, Any]:
    """The text, and the chunk with the usage."""
    chunks = list(whole(client, stream=True, stream_options={"include_usage": True}, **options))
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]), chunks[-1]


def test_a_prediction_changes_no_answer_and_is_accounted_for(client: openai.OpenAI) -> None:
    plain = whole(client)
    text = plain.choices[0].message.content
    assert drafted(plain) == (0, 0)
    assert text == LIST
    predicted = whole(client, prediction=PREDICTION)
    assert predicted.choices[0].message.content == text
    assert predicted.usage.completion_tokens == plain.usage.completion_tokens
    accepted, rejected = drafted(predicted)
    assert accepted > plain.usage.completion_tokens / 2
    assert rejected < accepted
    said, last = streamed(client, prediction=PREDICTION)
    assert said == text
    assert drafted(last)[0] > plain.usage.completion_tokens / 2
    assert drafted(whole(client, prediction=PREDICTION, extra_body={"speculative": False})) == (0, 0)


def test_a_prediction_takes_fewer_steps(server: Server, client: openai.OpenAI) -> None:
    taken = []
    for options in ({}, {"prediction": PREDICTION}):
        before = engine(server)["step"]
        assert whole(client, **options).choices[0].message.content == LIST
        taken.append(engine(server)["step"] - before)
    assert taken[0] > 1.5 * taken[1]


def test_a_prediction_in_parts_with_choices_seeds_and_logprobs(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": LIST[:30]}, {"type": "text", "text": LIST[30:]}]
    sampled: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 7, "logprobs": True, "top_logprobs": 2}
    plain = whole(client, **sampled)
    predicted = whole(client, prediction={"type": "content", "content": parts}, **sampled)
    assert [choice.message.content for choice in predicted.choices] == [
        choice.message.content for choice in plain.choices
    ]
    for mine, theirs in zip(predicted.choices, plain.choices, strict=True):
        assert [entry.token for entry in mine.logprobs.content] == [entry.token for entry in theirs.logprobs.content]
    assert sum(drafted(predicted)) > 0


def test_completions_take_a_prediction_too(client: openai.OpenAI) -> None:
    prompt = f"<|im_start|>user\n{ASK[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    found = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=60, temperature=0, extra_body=extra)
        for extra in ({}, {"prediction": PREDICTION})
    ]
    assert found[0].choices[0].text == found[1].choices[0].text == LIST
    assert drafted(found[0]) == (0, 0)
    assert drafted(found[1])[0] > 10


def test_a_stop_string_within_a_draft(client: openai.OpenAI) -> None:
    """The text ends where it would; drafts before it are accounted for although the tokenizer ends the choice."""
    plain = whole(client, stop=["thoonia"])
    predicted = whole(client, stop=["thoonia"], prediction=PREDICTION)
    assert predicted.choices[0].message.content == plain.choices[0].message.content == LIST[: LIST.index("thoonia")]
    assert predicted.usage.completion_tokens == plain.usage.completion_tokens
    accepted, _ = drafted(predicted)
    assert 5 < accepted < predicted.usage.completion_tokens


def test_prompt_lookup_changes_no_answer_and_can_be_switched_off(
    client: openai.OpenAI, lookup: Server, copier: openai.OpenAI
) -> None:
    found = whole(copier)
    assert found.choices[0].message.content == whole(client).choices[0].message.content
    accepted, _ = drafted(found)
    assert accepted > found.usage.completion_tokens / 3
    off = whole(copier, extra_body={"speculative": False})
    assert off.choices[0].message.content == found.choices[0].message.content
    assert drafted(off) == (0, 0)
    seeded: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 80}
    story: Any = [{"role": "user", "content": "Tell me a short story about a fox."}]
    texts = [
        one.chat.completions.create(model=MODEL, messages=story, **seeded).choices[0].message.content
        for one in (client, copier)
    ]
    assert texts[0] == texts[1]


def test_metrics_count_what_became_of_drafts(lookup: Server, copier: openai.OpenAI) -> None:
    before = total(scrape(lookup.url), "engine_accepted_tokens_total")
    accepted, _ = drafted(whole(copier))
    assert accepted > 0
    deadline = time.monotonic() + LIMIT
    while total(scrape(lookup.url), "engine_accepted_tokens_total") < before + accepted:  # told once a second
        assert time.monotonic() < deadline
        select.select([], [], [], 0.05)
    with urllib.request.urlopen(lookup.url + "/metrics", timeout=LIMIT) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    names = ("drafts", "draft_tokens", "accepted_tokens")
    drafts, tokens, taken = (families[f"penstock_engine_{name}"].samples[0].value for name in names)
    assert drafts > 0
    assert tokens >= taken >= accepted
    places = [sample.value for sample in families["penstock_engine_accepted_tokens_by_position"].samples]
    assert sum(places) == taken
    assert places == sorted(places, reverse=True)
    assert "drafts=ngram" in lookup.log.read_text()


def test_a_draft_model_changes_no_answer_and_takes_a_third_of_the_steps(
    server: Server, client: openai.OpenAI, drafting: Server, drafted_client: openai.OpenAI
) -> None:
    """Text, a seeded story, a schema and its tokens' log-probabilities."""
    story: Any = [{"role": "user", "content": "Tell me a short story about a fox."}]
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "hero", "schema": schema}}
    ways: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 1.0, "seed": 3, "n": 2},
        {"temperature": 0, "response_format": form, "logprobs": True},
    ]  # fmt: skip
    for way in ways:
        found = [
            one.chat.completions.create(model=MODEL, messages=story, max_tokens=60, **way)
            for one in (client, drafted_client)
        ]
        texts = [[choice.message.content for choice in answer.choices] for answer in found]
        assert texts[0] == texts[1], way
        assert "response_format" in way or drafted(found[0]) == (0, 0)  # likely runs of a grammar are drafts
        assert drafted(found[1])[0] > 0
    steps = []
    for one, place in ((client, server), (drafted_client, drafting)):
        before = engine(place)["step"]
        assert whole(one).choices[0].message.content == LIST
        steps.append(engine(place)["step"] - before)
    assert steps[0] > 2 * steps[1]
    off = whole(drafted_client, extra_body={"speculative": False})
    assert off.choices[0].message.content == LIST
    assert drafted(off) == (0, 0)
    log = drafting.log.read_text()
    assert "drafts=draft_model" in log
    assert "draft_weight_bytes=" in log


@pytest.mark.parametrize(
    ("value", "said"),
    [('{"method": "draft_model"}', "needs one"), ('{"method": "ngram", "tokens": 3}', "no such key"), ("on", "JSON")],
)
def test_a_wrong_method_is_refused_at_start(value: str, said: str) -> None:
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0", "--speculative-config", value]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode != 0
    assert "--speculative-config" in ended.stderr + ended.stdout
    assert said in ended.stderr + ended.stdout
