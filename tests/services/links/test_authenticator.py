"""Which peers are admitted and which are counted: replies to ZAP requests, and monitors that are fed by hand."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from penstock.services.links import authenticator
from penstock.services.links.authenticator import (
    CURVE,
    DOMAIN,
    LOG_SECONDS,
    UNKNOWN,
    VERSION,
    Authenticator,
    ListenerMonitor,
    address_of,
    reason_of,
    zap_reply,
)
from penstock.services.links.curve import new_keys

PUBLIC = b"p" * 32


def question(**other: Any) -> list[bytes]:
    parts = {
        "version": VERSION, "request": b"7", "domain": DOMAIN, "address": b"10.0.0.1", "identity": b"i",
        "mechanism": CURVE, "key": PUBLIC,
    }  # fmt: skip
    return list((parts | other).values())


def test_who_shows_the_public_key_comes_in() -> None:
    assert zap_reply(question(), PUBLIC) == [VERSION, b"7", b"200", b"", b"", b""]


@pytest.mark.parametrize(
    "other",
    [
        {"key": b"q" * 32},
        {"key": b""},
        {"key": PUBLIC + b"p"},
        {"key": PUBLIC[:-1]},
        {"mechanism": b"NULL"},
        {"mechanism": b"PLAIN"},
        {"domain": b"other"},
        {"domain": b""},
        {"version": b"2.0"},
        {"more": PUBLIC},
    ],
)
def test_nobody_else_does(other: dict[str, bytes]) -> None:
    answer = zap_reply(question(**other), PUBLIC)
    assert answer[1:3] == [b"7", b"400"]
    assert PUBLIC not in answer


def test_who_shows_nothing_does_not() -> None:
    assert zap_reply(question()[:-1], PUBLIC)[2] == b"400"


@given(st.binary(max_size=40))
def test_of_all_keys_one_opens(key: bytes) -> None:
    assert (zap_reply(question(key=key), PUBLIC)[2] == b"200") == (key == PUBLIC)


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> ListenerMonitor:
    monkeypatch.setattr(authenticator, "address_of", lambda descriptor: f"10.0.0.{descriptor}")
    return ListenerMonitor("text", zmq.Socket.__new__(zmq.Socket))


def test_a_peer_is_not_counted(listener: ListenerMonitor) -> None:
    listener.note(zmq.EVENT_ACCEPTED, 5)
    listener.note(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0)
    listener.note(zmq.EVENT_DISCONNECTED, 5)
    assert listener.refused == 0


@pytest.mark.parametrize(
    ("event", "value", "reason"),
    [
        (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400, "it has other keys"),
        (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC, "it has other keys"),
        (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH, "it has no keys"),
        (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_UNSPECIFIED, "it spoke another protocol"),
        (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 11, "it did not end the handshake"),
    ],
)
def test_who_fails_is_counted_and_told_with_address_and_reason(
    listener: ListenerMonitor, event: int, value: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    listener.note(zmq.EVENT_ACCEPTED, 5)
    listener.note(event, value)
    listener.note(zmq.EVENT_DISCONNECTED, 5)
    assert (listener.refused, listener.unlogged) == (1, 1)
    listener.log_refused(0.0)
    (record,) = caplog.records
    fields = record.fields  # type: ignore[attr-defined]
    assert (record.getMessage(), record.levelno) == ("link_refused", logging.WARNING)
    assert (fields["link"], fields["address"], fields["times"]) == ("text", "10.0.0.5", 1)
    assert fields["reason"].startswith(reason)
    assert reason_of(event, value) == fields["reason"]


def test_who_speaks_something_else_is_counted(listener: ListenerMonitor) -> None:
    """libzmq tells nothing but the end of such a connection."""
    listener.note(zmq.EVENT_ACCEPTED, 5)
    listener.note(zmq.EVENT_DISCONNECTED, 5)
    assert listener.refused == 1


def test_strangers_beside_a_peer(listener: ListenerMonitor) -> None:
    """One that is in its handshake for long, one that is admitted, and one that leaves, under a number used again."""
    listener.note(zmq.EVENT_ACCEPTED, 5)
    listener.note(zmq.EVENT_ACCEPTED, 6)
    listener.note(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0)  # of one of them
    listener.note(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 11)
    listener.note(zmq.EVENT_DISCONNECTED, 5)
    assert listener.refused == 1
    listener.note(zmq.EVENT_ACCEPTED, 5)
    listener.note(zmq.EVENT_DISCONNECTED, 6)  # the admitted one
    assert listener.refused == 1
    listener.note(zmq.EVENT_DISCONNECTED, 5)
    assert listener.refused == 2


def test_an_admitted_peer_that_leaves_is_not_blamed_for_a_failure(listener: ListenerMonitor) -> None:
    for number in (5, 6):
        listener.note(zmq.EVENT_ACCEPTED, number)
        if number == 5:
            listener.note(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0)
    listener.note(zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)
    listener.note(zmq.EVENT_DISCONNECTED, 5)
    assert listener.refused == 0
    listener.note(zmq.EVENT_DISCONNECTED, 6)
    assert listener.refused == 1


@given(st.lists(st.sampled_from(["peer", "garbage", "failure"]), max_size=40))
def test_connections_one_after_the_other_are_counted_exactly(kinds: list[str]) -> None:
    listener = ListenerMonitor("text", zmq.Socket.__new__(zmq.Socket))
    for number, kind in enumerate(kinds, start=1 << 20):  # no descriptors of this process
        listener.note(zmq.EVENT_ACCEPTED, number)
        if kind == "peer":
            listener.note(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0)
        if kind == "failure":
            listener.note(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0)
        listener.note(zmq.EVENT_DISCONNECTED, number)
    assert listener.refused == sum(kind != "peer" for kind in kinds)


def test_of_several_the_address_that_is_known_is_told(
    listener: ListenerMonitor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are gone before anybody can look."""
    addresses = iter([UNKNOWN, "10.0.0.9", UNKNOWN])
    monkeypatch.setattr(authenticator, "address_of", lambda _: next(addresses))
    for number in (5, 6, 7):
        listener.note(zmq.EVENT_ACCEPTED, number)
        listener.note(zmq.EVENT_DISCONNECTED, number)
    listener.log_refused(0.0)
    assert [record.fields["address"] for record in caplog.records] == ["10.0.0.9"]  # type: ignore[attr-defined]


def test_many_are_told_in_one_line(listener: ListenerMonitor, caplog: pytest.LogCaptureFixture) -> None:
    for tenth in range(100):
        listener.note(zmq.EVENT_ACCEPTED, 5)
        listener.note(zmq.EVENT_DISCONNECTED, 5)
        listener.log_refused(tenth / 10)
    assert len(caplog.records) == 1
    listener.log_refused(LOG_SECONDS)
    listener.log_refused(LOG_SECONDS * 3)
    assert [record.fields["times"] for record in caplog.records] == [1, 99]  # type: ignore[attr-defined]
    assert listener.refused == 100


def test_the_address_of_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        accepted, _ = server.accept()
        with accepted:
            assert address_of(accepted.fileno()) == "127.0.0.1"
            number = accepted.fileno()
        assert address_of(number) == "unknown", "it is closed"
        assert address_of(server.fileno()) == "unknown", "nobody is at its other end"


def test_what_is_no_connection_has_no_address() -> None:
    one, other = socket.socketpair()
    with one, other, open("/dev/null") as file:
        assert address_of(one.fileno()) == "unknown"
        assert address_of(file.fileno()) == "unknown"


def test_it_ends_with_its_context_and_leaves_nothing_open() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Authenticator(context, new_keys())
    listeners = [context.socket(zmq.ROUTER) for _ in range(2)]
    monitors = [made.watch(listener, "text") for listener in listeners]
    for listener in listeners:
        listener.close()
    context.term()  # waits for every socket
    assert all(listener.monitor.closed for listener in monitors)


def test_a_listener_of_no_admission_lets_nobody_in() -> None:
    """Where no answer can come, the answer is no."""
    keys, context = new_keys(), zmq.Context()
    listener, caller = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        for made in (listener, caller):
            made.setsockopt(zmq.LINGER, 0)
            made.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            made.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        listener.setsockopt(zmq.CURVE_SERVER, 1)
        listener.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        listener.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        caller.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
        caller.setsockopt(zmq.RECONNECT_IVL, -1)
        monitor = caller.get_monitor_socket(authenticator.MONITORED)
        caller.connect(f"tcp://127.0.0.1:{port}")
        assert monitor.poll(60_000)
        event, _ = authenticator.EVENT.unpack(monitor.recv_multipart()[0])
        assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
        caller.disable_monitor()
        monitor.close()
    finally:
        context.destroy(linger=0)
    assert len(z85.decode(keys.public)) == 32
