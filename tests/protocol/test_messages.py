"""Every message of every link: what is sent is what arrives, and nothing that arrives can be misread."""

from __future__ import annotations

import enum
import typing

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.protocol import control, links, messages, snapshots, steps
from penstock.protocol.columns import pack
from penstock.protocol.links import LINKS, MALFORMED, LinkControl, LinkSpec, decoder
from penstock.protocol.message import Message, Part
from penstock.protocol.messages import Finish, SubmitText
from penstock.protocol.outputs import TextBatch, TokenBatch
from penstock.protocol.request_ids import request_id
from penstock.protocol.steps import choice_seed

INT64 = st.integers(-(2**63), 2**63 - 1)
MESSAGES = tuple(dict.fromkeys(kind for link in LINKS for kind in (*link.up, *link.down)))
CONTROL = typing.get_args(LinkControl)
ENCODER = msgspec.msgpack.Encoder()


def strategy(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Any value of a field's type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(strategy(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(strategy, arguments))
    if arguments:
        return st.one_of(*map(strategy, arguments))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(list(kind))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{field.name: strategy(hints[field.name]) for field in msgspec.structs.fields(kind)})
    scalars: dict[object, st.SearchStrategy[typing.Any]] = {
        int: INT64,
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=12),
        type(None): st.none(),
    }
    return scalars[kind]


def all_structs() -> list[type[msgspec.Struct]]:
    found: list[type[msgspec.Struct]] = []
    for module in (control, messages, snapshots, steps, links):
        kinds = [value for value in vars(module).values() if isinstance(value, type)]
        found += [kind for kind in kinds if issubclass(kind, Message | Part) and kind not in (Message, Part)]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("kind", [*MESSAGES, *CONTROL], ids=lambda kind: kind.__name__)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_sent_is_what_arrives(kind, data):
    message = data.draw(strategy(kind))
    payload = ENCODER.encode(message)
    for link in LINKS:
        for at_binder, kinds in ((True, link.up), (False, link.down)):
            if kind in (*kinds, *CONTROL):
                assert decoder(link, at_binder=at_binder).decode(payload) == message


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.name)
@given(data=st.data())
def test_each_end_takes_its_own_messages_alone(link: LinkSpec, data):
    kind = data.draw(st.sampled_from(MESSAGES))
    payload = ENCODER.encode(data.draw(strategy(kind)))
    for at_binder, kinds in ((True, link.up), (False, link.down)):
        if kind not in kinds:
            with pytest.raises(msgspec.ValidationError):
                decoder(link, at_binder=at_binder).decode(payload)


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.name)
@given(payload=st.binary(max_size=200))
@example(payload=b"\x91\xa4\x00\x00\x00\x80")  # a tag that is no text
def test_any_bytes_are_a_message_or_an_error(link: LinkSpec, payload):
    try:
        found = decoder(link, at_binder=True).decode(payload)
    except MALFORMED:
        return
    assert isinstance(found, (*link.up, *CONTROL))


@pytest.mark.parametrize("kind", all_structs(), ids=lambda kind: kind.__name__)
def test_messages_are_frozen_arrays_that_the_collector_need_not_see(kind):
    config = kind.__struct_config__
    assert config.frozen
    assert config.array_like
    assert not config.gc
    if issubclass(kind, Message):
        assert config.tag == kind.__name__


def test_no_message_holds_an_open_type():
    """No Any, no object, no dict: a decoder knows the type of every value."""
    closed = (int, float, bool, str, bytes, type(None))

    def check(kind: typing.Any) -> None:
        if typing.get_origin(kind) is tuple or typing.get_args(kind):
            for part in typing.get_args(kind):
                if part is not Ellipsis:
                    check(part)
        elif not (isinstance(kind, type) and issubclass(kind, msgspec.Struct | enum.Enum)):
            assert kind in closed

    for struct in all_structs():
        for hint in typing.get_type_hints(struct).values():
            check(hint)


def test_a_steady_step_is_tens_of_bytes():
    plan = steps.StepPlan(step=1 << 40, epoch=1 << 31, blocks=bytes(16))
    assert len(ENCODER.encode(plan)) < 72


def test_tags_are_the_names_and_all_differ():
    tags = [kind.__struct_config__.tag for kind in (*MESSAGES, *CONTROL)]
    assert len(set(tags)) == len(tags)


def test_defaults_are_neutral():
    sampling = messages.Sampling()
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    text = SubmitText(id=1, prompt="x", sampling=sampling)
    assert (text.n, text.stop, text.priority, text.cache_salt) == (1, (), 0, "")


def test_finish_fits_a_byte_and_none_is_zero():
    assert Finish.NONE == 0
    assert max(Finish) < 256


@given(
    index=st.integers(0, 127),
    incarnation=st.integers(0, 2**31 - 1),
    counters=st.sets(st.integers(0, 2**32 - 1), max_size=9),
)
def test_request_ids_fit_63_bits_and_tell_their_api(index, incarnation, counters):
    ids = {request_id(index, incarnation, counter) for counter in counters}
    assert len(ids) == len(counters)
    for number in ids:
        assert 0 <= number < 2**63
        assert number >> 56 == index


@given(seed=INT64, choice=st.integers(0, 127))
def test_choice_seeds_are_64_bits_and_the_first_is_the_requests(seed, choice):
    found = choice_seed(seed, choice)
    assert 0 <= found < 2**64
    assert choice_seed(seed, 0) == seed % 2**64
    assert found == choice_seed(seed, choice)


@given(seed=INT64)
def test_choices_of_a_request_differ(seed):
    assert len({choice_seed(seed, choice) for choice in range(128)}) == 128


def test_choice_seeds_are_splitmix64():
    """The reference sequence of seed 1234567, from the paper's authors' C code."""
    reference = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [choice_seed(1234567, choice) for choice in (1, 2, 3)] == reference


def test_rows_of_batches_are_read_back():
    text = TextBatch(
        ids=pack("q", [7, 1 << 62]), choices=pack("H", [0, 3]), text=("a", ""), tokens=pack("i", [2, 0]),
        token_ids=pack("i", [5, 6]), finish=pack("B", [0, 2]),
    )  # fmt: skip
    rows = [(*row[:4], row[4].tobytes(), row[5]) for row in text.rows()]
    assert rows == [(7, 0, "a", 2, pack("i", [5, 6]), 0), (1 << 62, 3, "", 0, b"", 2)]
    tokens = TokenBatch(
        ids=text.ids,
        choices=text.choices,
        counts=pack("i", [0, 2]),
        token_ids=text.token_ids,
        finish=text.finish,
    )
    assert list(tokens.rows()) == [(7, 0, [], 0), (1 << 62, 3, [5, 6], 2)]
