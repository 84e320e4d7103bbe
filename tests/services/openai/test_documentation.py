"""The documentation's tables of endpoints and parameters say what routes.py, schema.py and parameters.py do."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from benchmarks.readme_figures import pages
from penstock.protocol.config import ApiConfig, fields
from penstock.protocol.engine_config import SchedulerConfig
from penstock.protocol.option import Field
from penstock.services.openai import embeddings
from penstock.services.openai.cohere import EmbedRequest
from penstock.services.openai.embeddings import EmbeddingRequest, VectorRequest
from penstock.services.openai.messages import request as messages
from penstock.services.openai.messages.request import MessageRequest
from penstock.services.openai.parameters import UNSUPPORTED, WITHOUT_EFFECT
from penstock.services.openai.responses import request as responses
from penstock.services.openai.responses.request import ResponseRequest
from penstock.services.openai.routes import ROUTES
from penstock.services.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, Extras, TokenizeRequest
from penstock.services.openai.scoring import RerankRequest, ScoreRequest

QUOTED = re.compile(r"`([^`]+)`")
REFUSED = "Refused with a 400, unless the value is neutral"


TEXT = "\n".join(path.read_text() for path in pages())


def tables(head: str) -> list[list[list[str]]]:
    """Cells of the rows of each table whose head begins so."""
    lines = TEXT.split("\n")
    return [
        [
            [cell.strip() for cell in row.strip("|").split(" | ")]
            for row in itertools.takewhile(lambda row: row.startswith("|"), lines[number + 2 :])
        ]
        for number, line in enumerate(lines)
        if line.startswith(f"| {head} |")
    ]


def table(head: str) -> list[list[str]]:
    """Cells of the rows of the table whose head begins so; there is one."""
    (found,) = tables(head)
    return found


def names(text: str) -> list[str]:
    """What stands in backquotes, but for what stands in brackets behind it."""
    return QUOTED.findall(re.sub(r"\([^)]*\)", "", text))


def row(label: str, head: str = "Parameters") -> set[str]:
    (found,) = [cells[1] for cells in table(head) if cells[0] == label]
    listed = names(found)
    assert len(listed) == len(set(listed))
    return set(listed)


def difference(told: set[str], true: set[str]) -> str:
    return f"only in the documentation: {sorted(told - true)}; missing there: {sorted(true - told)}"


def test_every_parameter_of_chats_and_completions_has_one_row() -> None:
    """Each feature's page has those of its subject."""
    told = [name for rows in tables("Parameter") for cells in rows for name in names(cells[0])]
    assert len(told) == len(set(told)), sorted(name for name in set(told) if told.count(name) > 1)
    true = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__} - set(WITHOUT_EFFECT)
    assert set(told) == true, difference(set(told), true)


def test_every_parameter_of_tokenization_stands_in_its_row() -> None:
    for label, kind in (("of `/tokenize`", TokenizeRequest), ("of `/detokenize`", DetokenizeRequest)):
        told, true = row(label), set(kind.__struct_fields__)
        assert told == true, difference(told, true)


def test_every_parameter_of_responses_and_messages_stands_in_its_row() -> None:
    extras, head = set(Extras.__struct_fields__), "Of the two"
    assert row("of both, beyond their APIs", head) == extras
    for label, kind, without in (("of responses", ResponseRequest, responses.RESPONSE_WITHOUT_EFFECT),
                                 ("of messages", MessageRequest, messages.WITHOUT_EFFECT)):  # fmt: skip
        told, true = row(label, head), set(kind.__struct_fields__) - extras - set(without)
        if label == "of responses":
            told |= row("of responses, beyond its API", head)
        assert told == true, difference(told, true)
        assert set(without) <= row(f"{label}, accepted without effect", head)


@pytest.mark.parametrize(
    ("api", "kind", "refusals"), [("responses", ResponseRequest, responses), ("messages", MessageRequest, messages)]
)
def test_what_responses_and_messages_refuse_has_a_reason_and_is_not_served(api: str, kind: type, refusals: Any) -> None:
    told = {name for cells in table(f"Refused by {api}") for name in names(cells[0])}
    own = {*refusals.OWN_REFUSALS, *refusals.CHAT_NAMES}
    assert own <= told, difference(told, own)
    served = set(kind.__struct_fields__)
    assert served.isdisjoint(refusals.REFUSALS)
    stated = row(f"of {api}", "Of the two") | row("of both, beyond their APIs", "Of the two")
    assert stated.isdisjoint(own)


def test_every_parameter_of_vectors_stands_in_its_row() -> None:
    every = set(VectorRequest.__struct_fields__)
    told = row("of all", "Fields")
    assert told == every, difference(told, every)
    for label, kind in (("of `/v1/embeddings`", EmbeddingRequest), ("of `/v2/embed`", EmbedRequest),
                        ("of `/v1/score`", ScoreRequest),
                        ("of `/v1/rerank`, `/rerank`, `/v2/rerank`", RerankRequest)):  # fmt: skip
        told, true = row(label, "Fields"), set(kind.__struct_fields__) - every
        assert told == true, difference(told, true)


def test_every_refused_parameter_of_vectors_has_a_reason() -> None:
    told = {name for cells in table("Refused by requests for vectors") for name in names(cells[0])}
    assert told == set(embeddings.REFUSED), difference(told, set(embeddings.REFUSED))


def test_every_parameter_without_effect_is_listed() -> None:
    told, true = row("accepted without effect"), set(WITHOUT_EFFECT)
    assert told == true, difference(told, true)


def test_every_refused_parameter_has_a_reason() -> None:
    rows = table(REFUSED)
    told = {name for cells in rows for name in names(cells[0])}
    true = set(UNSUPPORTED)
    assert told == true, difference(told, true)
    assert all(len(cells[1]) >= 8 for cells in rows)


def test_every_route_is_listed() -> None:
    told = {name for cells in table("Endpoint") for name in names(cells[0])}
    true = {f"{route.method} {re.sub('^/static/.*', '/static/{file}', route.name)}" for route in ROUTES}
    assert told == true, difference(told, true)


def of_the_api() -> list[Field]:
    return [field for field in fields() if field.section == "api"]


@pytest.mark.parametrize("head", ["Who may call", "Limit"])
def test_options_that_are_named_exist(head: str) -> None:
    flags = {field.flag for field in fields()}
    for cells in table(head):
        named = [name for name in QUOTED.findall(cells[-1]) if name.startswith("--")]
        assert named
        assert set(named) <= flags


def test_every_limit_of_the_api_is_listed() -> None:
    told = {name for cells in table("Limit") for name in QUOTED.findall(cells[-1])}
    limits = {field.flag for field in of_the_api() if field.name.startswith("max_") or field.name.endswith("_timeout")}
    assert limits <= told, difference(told, limits)


def test_the_defaults_that_are_told_are_the_defaults() -> None:
    options = ApiConfig()
    told = {cells[0]: cells[1] for cells in table("Limit")}
    assert told["request line and headers"] == f"{options.max_header_bytes >> 10} KiB, {options.header_timeout:g} s"
    body = f"{options.max_body_bytes >> 20} MiB, {options.body_timeout:g} s, {options.max_json_depth} levels of JSON"
    assert told["body"] == body
    assert told["idle connection"] == f"{options.keep_alive_timeout:g} s"
    bodies = f"{options.max_queued_requests:,} and {options.max_queued_bytes >> 20} MiB of bodies per api process"
    assert told["unfinished requests"] == bodies
    queue = SchedulerConfig()
    assert told["waiting prompts"] == f"{queue.max_queued_tokens >> 20} Mi tokens, for any time"
    assert queue.max_queue_time == 0.0
    most = (options.max_n, options.max_logprobs, options.max_stop_strings, options.max_logit_bias)
    assert told["`n`; log-probabilities; stop strings; `logit_bias`"] == "; ".join(f"{value:,}" for value in most)
