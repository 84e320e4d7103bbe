"""What makes two requests alike, and how long they are remembered."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from penstock.engine_core.scheduling.poison_requests import (
    MOST,
    REFUSED_SECONDS,
    PoisonRequests,
    signature,
    text_signature,
)
from penstock.protocol.images import ImageFile
from penstock.protocol.messages import Automaton, Sampling, SubmitText, SubmitTokens, Tokenize
from tests.sim.images import picture


def request(number: int = 1, prompt: tuple[int, ...] = (3, 4), **fields: object) -> SubmitTokens:
    message = SubmitTokens(id=number, token_ids=np.array(prompt, np.int32).tobytes(), sampling=Sampling(seed=number))
    return msgspec.structs.replace(message, **fields)


def test_the_like_is_who_asks_for_the_same() -> None:
    same = [request(), request(2), request(3, priority=7, cache_salt="another tenant")]
    assert len({signature(message) for message in same}) == 1


@pytest.mark.parametrize(
    "other",
    [
        request(prompt=(3, 5)),
        request(sampling=Sampling(temperature=0.5)),
        request(sampling=Sampling(max_tokens=5)),
        request(automaton=Automaton(source="a")),
        request(n=2),
        request(images=(picture(1, 2),)),
        request(prediction=np.array([4], np.int32).tobytes()),
    ],
)
def test_others_are_not(other: SubmitTokens) -> None:
    assert signature(other) != signature(request())


def test_other_images_are_another_request() -> None:
    one, other = ImageFile(data=b"a"), ImageFile(data=b"b")
    for kind in (SubmitText, Tokenize):
        fields = {"sampling": Sampling()} if kind is SubmitText else {}
        made = [kind(messages=b"[]", images=images, **fields) for images in ((), (one,), (other,), (one, other))]  # type: ignore[operator]
        assert len({text_signature(message) for message in made}) == 4


def test_it_is_refused_for_a_while() -> None:
    condemned = PoisonRequests()
    assert not condemned.holds(signature(request()), 0.0)
    condemned.add(signature(request()), 100.0)
    assert condemned.holds(signature(request(2)), 100.0 + REFUSED_SECONDS - 1)
    assert not condemned.holds(signature(request(prompt=(9,))), 101.0)
    assert not condemned.holds(signature(request()), 100.0 + REFUSED_SECONDS)
    assert len(condemned.until) == 0


def test_memory_is_bounded() -> None:
    condemned = PoisonRequests()
    for number in range(MOST + 10):
        condemned.add(signature(request(prompt=(number,))), 100.0)
    assert len(condemned.until) == MOST
    assert not condemned.holds(signature(request(prompt=(9,))), 100.0)
    assert condemned.holds(signature(request(prompt=(10,))), 100.0)


def test_a_request_with_another_picture_is_another_one() -> None:
    one, other = (request(images=(picture(number, 2),)) for number in (1, 2))
    assert signature(one) != signature(other)
    texts = [SubmitText(messages=b"[]", images=(ImageFile(data=data),), sampling=Sampling()) for data in (b"1", b"2")]
    assert text_signature(texts[0]) != text_signature(texts[1])
