"""Both sides of a handshake, without sockets: whatever way the bytes are cut, only who has the keys comes in, and only
what the first member said is believed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.executor.handshake import (
    ANSWER,
    HELLO,
    LENGTH,
    LONGEST,
    MAGIC,
    OTHER_KEYS,
    PROOF,
    STRANGER,
    Challenge,
    Generation,
    Member,
    Refusal,
    Response,
    proof,
)

SECRET = b"what all hosts have"
GUEST = Member(replica=0, member=1, shared=0xFFFFFFFF)
LIFE = Generation("abc", 29500)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[low:high] for low, high in itertools.pairwise(places)]


def fed(side: Challenge | Response, data: bytes, cuts: list[int]) -> bytes:
    return b"".join(side.feed(piece) for piece in pieces(data, cuts))


def met(cuts: list[int], ours: bytes = SECRET, theirs: bytes = SECRET) -> tuple[Challenge, Response]:
    challenge, response = Challenge(ours), Response(theirs, GUEST)
    answer = fed(challenge, response.hello, cuts)
    fed(challenge, fed(response, answer, cuts), cuts)
    return challenge, response


CUTS = st.lists(st.integers(0, 200), max_size=12)


@given(CUTS, st.sampled_from([LIFE, Refusal("other options")]))
def test_who_has_the_keys_comes_in_however_it_is_cut(cuts: list[int], told: Generation | Refusal) -> None:
    challenge, response = met(cuts)
    assert challenge.proved
    assert response.answered
    assert challenge.guest == GUEST
    fed(response, challenge.seal(told), cuts)
    assert response.told == told
    assert not challenge.fault
    assert not response.fault


@given(CUTS)
def test_who_has_others_does_not_and_knows_why(cuts: list[int]) -> None:
    challenge, response = met(cuts, theirs=b"what another deployment has")
    assert response.fault == OTHER_KEYS
    assert not response.answered
    assert not challenge.proved
    assert challenge.feed(proof(b"what another deployment has", b"member", b"")) == b""
    assert challenge.fault == OTHER_KEYS


@given(st.binary(max_size=400), CUTS)
def test_garbage_proves_nothing_and_is_answered_once_at_most(data: bytes, cuts: list[int]) -> None:
    challenge, response = Challenge(SECRET), Response(SECRET, GUEST)
    assert len(fed(challenge, data, cuts)) in (0, ANSWER.size)
    assert not challenge.proved
    assert len(challenge.feed(data)) in (0, ANSWER.size)
    assert not challenge.proved
    assert fed(response, data, cuts) == b""
    assert response.told is None
    assert bool(response.fault) == (len(data) >= ANSWER.size)


@given(st.binary(max_size=200), CUTS)
def test_garbage_behind_a_hello_is_no_proof(data: bytes, cuts: list[int]) -> None:
    challenge = Challenge(SECRET)
    assert len(fed(challenge, Response(SECRET, GUEST).hello + data, cuts)) == ANSWER.size
    assert not challenge.proved
    assert bool(challenge.fault) == (len(data) >= PROOF)


def test_an_old_hello_and_proof_are_not_taken_again() -> None:
    challenge, response = Challenge(SECRET), Response(SECRET, GUEST)
    said = response.feed(challenge.feed(response.hello))
    challenge.feed(said)
    assert challenge.proved
    again = Challenge(SECRET)
    again.feed(response.hello + said)
    assert (again.proved, again.fault) == (False, OTHER_KEYS)


def test_an_old_answer_and_life_are_not_taken_again() -> None:
    challenge, response = Challenge(SECRET), Response(SECRET, GUEST)
    answer = challenge.feed(response.hello)
    challenge.feed(response.feed(answer))
    life = challenge.seal(LIFE)
    later = Response(SECRET, GUEST)
    assert later.feed(answer + life) == b""
    assert (later.told, later.fault) == (None, OTHER_KEYS)


def test_nothing_that_one_side_says_is_taken_from_it_by_the_other() -> None:
    """Whoever has no keys and has both ends talk to one another, or to themselves, learns no proof."""
    challenge, response = Challenge(SECRET), Response(SECRET, GUEST)
    answer = challenge.feed(response.hello)
    challenge.feed(answer[ANSWER.size - PROOF :])  # its own proof, said back to it
    assert (challenge.proved, challenge.fault) == (False, OTHER_KEYS)


@given(st.integers(0, 10_000))
def test_a_life_that_was_changed_on_its_way_is_not_believed(place: int) -> None:
    challenge, response = met([])
    sealed = bytearray(challenge.seal(LIFE))
    place = LENGTH.size + place % (len(sealed) - LENGTH.size)
    sealed[place] ^= 1
    response.feed(bytes(sealed))
    assert (response.told, response.fault) == (None, OTHER_KEYS)


def test_more_than_is_ever_said_is_not_waited_for() -> None:
    challenge, response = met([])
    response.feed(LENGTH.pack(LONGEST + 1))
    assert response.fault == STRANGER
    challenge.feed(b"more")
    assert challenge.fault == STRANGER


def test_another_release_is_a_stranger() -> None:
    challenge = Challenge(SECRET)
    assert challenge.feed(HELLO.pack(b"PEN0", 0, 1, 7, bytes(32))) == b""
    assert (challenge.guest, challenge.fault) == (None, STRANGER)
    assert MAGIC != b"PEN0"
    assert challenge.feed(Response(SECRET, GUEST).hello) == b"", "it is not listened to any more"


def test_only_who_is_proved_is_told() -> None:
    with pytest.raises(AssertionError):
        Challenge(SECRET).seal(LIFE)


def test_at_a_file_the_secret_is_empty_and_the_rest_is_the_same() -> None:
    challenge, response = met([3, 40, 90], b"", b"")
    assert challenge.proved
    response.feed(challenge.seal(LIFE))
    assert response.told == LIFE
