"""A fuzzer reads /openapi.json and asks a running server whatever it makes of it: no 500, no hang, every answer as
described, and nothing left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.e2e.server import Server, serving

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    response_headers_conformance, negative_data_rejection,
]  # fmt: skip
LIMIT = 60  # seconds that one answer may take on a machine that does other things as well
SHORT = ("--max-model-len", "64")  # whatever is generated is short


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("fuzzed"), *SHORT) as found:
        yield found


def strategy(url: str, mode: GenerationMode) -> st.SearchStrategy[Case]:
    """Requests of every operation that takes a body or a name, as described or as not described."""
    schema = schemathesis.openapi.from_url(url + "/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    with_input = [each for each in operations if each.method == "post" or each.path_parameters]
    return st.one_of(*(each.as_strategy(generation_mode=mode) for each in with_input))


def sharpened(case: Case, *, named: bool) -> Case:
    """The same request so that more of it is read: an integer is written as one, and unless `named` no model, which
    is any text to a schema, is asked for. Who has no time gets some."""
    case.body = whole_numbers(case.body)
    if isinstance(case.body, dict):
        if not named:
            case.body.pop("model", None)
        if case.body.get("timeout"):
            case.body["timeout"] = LIMIT
    return case


def whole_numbers(value: Any) -> Any:
    """JSON whose integers are no floats: a schema does not tell 1.0 from 1."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {name: whole_numbers(part) for name, part in value.items()}
        case list():
            return [whole_numbers(part) for part in value]
        case _:
            return value


def fuzz(url: str, mode: GenerationMode, requests: int, start: int) -> Counter[int]:
    """Ask `requests` times; the answers by status."""
    seen: Counter[int] = Counter()

    @seed(start)
    @settings(max_examples=requests, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy(url, mode))
    def ask(case: Case) -> None:
        if mode is GenerationMode.POSITIVE:
            sharpened(case, named=sum(seen.values()) % 8 == 0)
        response = case.call(timeout=LIMIT)
        seen[response.status_code] += 1
        assert response.status_code < 500, response.text
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as failure:
            raise AssertionError(str(failure)) from None  # which another process can be told

    ask()
    return seen


def check_nothing_is_left(server: Server) -> None:
    health = server.until("/health", lambda found: found["capacity"]["unfinished_requests"] == 0)
    assert health["status"] == "ok"
    server.until("/health", lambda found: found["capacity"]["tokens"] == found["capacity"]["tokens_free"])


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_a_few_hundred_requests(small: Server, mode: GenerationMode) -> None:
    seen = fuzz(small.url, mode, 100, 1)
    assert sum(seen.values()) >= 80
    check_nothing_is_left(small)


def test_every_plain_operation_answers_as_described(small: Server) -> None:
    schema = schemathesis.openapi.from_url(small.url + "/openapi.json")
    for operation in (found.ok() for found in schema.get_all_operations()):
        if operation.method == "get" and not operation.path_parameters:
            case = operation.Case()
            response = case.call(timeout=LIMIT)
            assert response.status_code == 200
            case.validate_response(response, checks=CHECKS)


@pytest.mark.long
def test_twenty_thousand_requests(small: Server) -> None:
    """From three clients at a time, half of the requests as described."""
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] * 20
    seen: Counter[int] = Counter()
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        for found in pool.map(fuzz, repeat(small.url), modes, repeat(600), range(len(modes))):
            seen.update(found)
            print(sum(seen.values()), dict(seen), flush=True)
    assert sum(seen.values()) >= 20_000
    check_nothing_is_left(small)
