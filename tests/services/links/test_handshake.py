"""Hellos, welcomes and refusals, without sockets."""

from __future__ import annotations

import os

import msgspec
import pytest

from penstock.protocol.links import PROTOCOL_VERSION, TEXT, TOKENS, Hello, Role, decoder
from penstock.services.links import handshake
from penstock.services.links.handshake import Identity

API = Identity(Role.API, 3, 77, 5, pid_namespace=9)
TOKENIZER = Identity(Role.TOKENIZER, 1, 88, 5, pid_namespace=9)


def test_a_hello_says_who_speaks() -> None:
    hello = handshake.hello(API, epoch=4, session=2)
    assert (hello.role, hello.index, hello.incarnation, hello.pid) == ("api", 3, 77, os.getpid())
    assert (hello.version, hello.config, hello.epoch, hello.session) == (PROTOCOL_VERSION, 5, 4, 2)
    assert hello.pid_namespace == 9
    assert decoder(TEXT, at_binder=True).decode(msgspec.msgpack.encode(hello)) == hello


def test_a_welcome_answers_one_hello() -> None:
    hello = handshake.hello(API, epoch=0, session=6)
    welcome = handshake.welcome(TOKENIZER, hello, epoch=8, number=4)
    assert (welcome.role, welcome.index, welcome.incarnation) == ("tokenizer", 1, 88)
    assert (welcome.session, welcome.number, welcome.epoch) == (6, 4, 8)
    assert decoder(TEXT, at_binder=False).decode(msgspec.msgpack.encode(welcome)) == welcome


def said(**other: object) -> Hello:
    return msgspec.structs.replace(handshake.hello(API, epoch=0, session=0), **other)


def test_who_belongs_is_not_refused() -> None:
    assert handshake.refusal(TEXT, TOKENIZER, said()) == ""
    assert handshake.refusal(TEXT, TOKENIZER, said(epoch=9, session=9, pid_namespace=1, index=50)) == ""


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (said(role="executor"), "executor-3 .* connected to the link 'text', which is for role 'api'"),
        (said(version=PROTOCOL_VERSION + 1), "start both from the same release"),
        (said(config=6), "other model options than tokenizer-1; give both the same"),
    ],
)
def test_a_refusal_says_which_side_to_fix(hello: Hello, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(handshake.refusal(TEXT, TOKENIZER, hello))


def test_the_role_is_of_the_link() -> None:
    scheduler = Identity(Role.SCHEDULER, 0, 1, 5)
    assert "for role 'tokenizer'" in handshake.refusal(TOKENS, scheduler, said())
    assert handshake.refusal(TOKENS, scheduler, said(role="tokenizer")) == ""
