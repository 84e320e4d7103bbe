from __future__ import annotations

from array import array

import pytest

from penstock.engine_core.scheduling.request import Request, Sequence, finish_reason, stop_token_ids
from penstock.engine_core.scheduling.running_batch import StopTokenCounts
from penstock.protocol.messages import Finish, Sampling, SubmitTokens
from tests.sim.idle import is_clean


def choice(outputs: list[int], limit: int = 9, **sampling: object) -> Sequence:
    """A prompt of two tokens, then these."""
    options = Sampling(eos_token_ids=(1,), stop_token_ids=(2,), **sampling)  # type: ignore[arg-type]
    message = SubmitTokens(id=1, token_ids=b"", sampling=options)
    request = Request(message, 0, 1, 2, limit, None, stop_token_ids(options, 10))
    return Sequence(request, 0, (0, 1, 0), array("i", [5, 5, *outputs]), [])


@pytest.mark.parametrize(
    ("outputs", "options", "expected"),
    [
        ([5], {}, Finish.NONE),
        ([1], {}, Finish.STOP),
        ([2], {}, Finish.STOP),
        ([1], {"ignore_eos": True}, Finish.NONE),
        ([2], {"ignore_eos": True}, Finish.STOP),
        ([1], {"min_tokens": 2}, Finish.NONE),
        ([2], {"min_tokens": 2}, Finish.NONE),
        ([5, 1], {"min_tokens": 2}, Finish.STOP),
        ([5, 5, 5], {"limit": 5}, Finish.LENGTH),
        ([5, 5, 1], {"limit": 5}, Finish.STOP),
        ([5, 5], {"limit": 5}, Finish.NONE),
        ([5, 5, 1], {"limit": 5, "min_tokens": 9}, Finish.LENGTH),
    ],
)
def test_verdict(outputs: list[int], options: dict[str, int], expected: Finish) -> None:
    one = choice(outputs, **options)
    assert finish_reason(one, outputs[-1], len(one.tokens)) == expected


def test_ids_outside_the_vocabulary_end_nothing() -> None:
    assert stop_token_ids(Sampling(eos_token_ids=(-1, 3), stop_token_ids=(10, 2**31 - 1, 4)), 10) == {3, 4}


def test_suspects_count_and_the_non_finite_token_is_always_one() -> None:
    suspects = StopTokenCounts()
    suspects.add((3, 9))
    suspects.add((3,))
    assert suspects.each([0, 3, 9, -1]).tolist() == [False, True, True, True]
    suspects.remove((3, 9))
    assert suspects.each([0, 3, 9, -1]).tolist() == [False, True, False, True]
    assert [suspects.among([0, token]) for token in (3, 9, -1)] == [True, False, True]
    assert not is_clean(suspects)
    suspects.remove((3,))
    assert is_clean(suspects)
