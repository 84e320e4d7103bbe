"""What can never be served is answered with Rejected, and nothing a message holds can raise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.protocol.messages import Sampling, SubmitTokens, Written
from tests.sim.idle import is_idle
from tests.sim.model import VOCAB
from tests.sim.server import ROOMY, Server


def submit(server: Server, tokens: bytes, **fields: object) -> None:
    options = {"id": 9, "sampling": Sampling(max_tokens=4), **fields}
    server.natures[0] = server.natures.get(0) or server.executor._natures.get(0)  # type: ignore[assignment]
    server.scheduler.submit(SubmitTokens(token_ids=tokens, **options), 3, 0.0)  # type: ignore[arg-type]
    for message in server.scheduler.outputs(3):
        server.record.take(message)


def ids(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


@pytest.mark.parametrize(
    ("tokens", "fields", "param", "words"),
    [
        (b"", {}, "prompt", "empty"),
        (b"\0\0\0", {}, "prompt", "32-bit"),
        (ids(VOCAB), {}, "prompt", "outside"),
        (ids(3, -1), {}, "prompt", "outside"),
        (ids(*[3] * ROOMY.max_model_len), {}, "prompt", "64"),
        (ids(3), {"sampling": Sampling(max_tokens=0)}, "max_tokens", "at least 1"),
        (ids(3), {"n": 0}, "n", "between"),
        (ids(3), {"n": 1 << 20}, "n", "between"),
        (ids(3), {"prediction": b"\0\0"}, "prediction", "32-bit"),
        (ids(3), {"prediction": ids(3, VOCAB)}, "prediction", "outside"),
        (ids(3), {"prediction": ids(-2)}, "prediction", "outside"),
        (ids(3), {"written": (Written(), Written())}, None, "of each choice"),
        (ids(3), {"n": 2, "written": (Written(),)}, None, "of each choice"),
        (ids(3), {"written": (Written(ids(5), ended=True),)}, None, "one goes on"),
        (ids(3), {"written": (Written(b"\0"),)}, None, "32-bit"),
        (ids(3), {"written": (Written(ids(5, VOCAB)),)}, None, "outside"),
        (ids(3), {"written": (Written(ids(5, 5, 5, 5)),)}, None, "goes on"),
        (ids(3), {"id": -5}, None, "63-bit"),
        (ids(3), {"id": 1 << 63}, None, "63-bit"),
    ],
)
def test_rejected(tokens: bytes, fields: dict[str, object], param: str | None, words: str) -> None:
    server = Server()
    submit(server, tokens, **fields)
    (rejected,) = server.record.rejected.values()
    assert (rejected.status, rejected.param) == (400, param)
    assert words in rejected.message
    assert is_idle(server.scheduler)
    assert server.scheduler.statistics().rejected == 1
    assert server.plan() is None


def test_a_request_beyond_the_whole_pool_is_rejected_and_one_that_just_fits_is_served() -> None:
    server = Server(replace(ROOMY, blocks=3))
    too_long = server.submit([3] * 10, max_tokens=4)  # 13 positions
    fits = server.submit([3] * 10, max_tokens=3)  # 12: the last token needs no KV
    server.run()
    assert server.record.rejected[too_long].param == "max_tokens"
    assert len(server.seen(fits).tokens) == 3


def test_the_longest_prompt_gets_one_token() -> None:
    server = Server()
    number = server.submit([3] * (ROOMY.max_model_len - 1), max_tokens=50)
    server.run()
    assert len(server.seen(number).tokens) == 1


def test_max_tokens_left_out_means_the_models_length() -> None:
    server = Server()
    number = server.submit([3] * 4, max_tokens=None, temperature=0.0)
    server.scheduler.abort(number)
    server.run()
    assert number not in server.record.rejected


def test_an_id_that_is_in_use_is_refused_and_the_first_goes_on() -> None:
    server = Server()
    number = server.submit([3, 4], source=0)
    server.step()
    message = server.lives[number].message
    server.scheduler.submit(message, 3, 0.0)
    (rejected,) = server.scheduler.outputs(3)
    assert rejected.status == 500  # type: ignore[union-attr]
    server.run()
    assert len(server.seen(number).tokens) == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "\ud800"},
        {"priority": -(2**31)},
        {"sampling": Sampling(max_tokens=2**62, eos_token_ids=(-7, 2**31 - 1), stop_token_ids=(VOCAB,))},
    ],
)
def test_odd_fields_do_not_raise(fields: dict[str, object]) -> None:
    server = Server()
    submit(server, ids(3, 4), **fields)
    assert server.scheduler.plan(0.0) is not None
    server.scheduler.abort(9)
    assert server.scheduler.unfinished == 0
