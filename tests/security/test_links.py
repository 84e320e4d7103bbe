"""Links between hosts: who does not have the deployment's keys gets nothing and disturbs nobody, however they come.
Real tcp, on loopback."""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from penstock.protocol.config import Config, LinksConfig
from penstock.protocol.links import TEXT, LinkSpec, Role, identity
from penstock.protocol.messages import Abort
from penstock.services.links import handshake, tcp
from penstock.services.links.curve import LinkKeys, new_keys, read_keys, write_keys
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Arrival, Left, Link
from penstock.services.supervisor import options
from tests.services.links.network import LIMIT, Ends, joined, left, messages, patient

SMALL: LinkSpec = msgspec.structs.replace(TEXT, window=8, high_water=64, silence=0.0)
GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0"  # ZMTP 3.0 (RFC 23): signature, version; a mechanism's name follows
HALF_OPEN = 300


class Watched(Ends):
    """Counts the connections that have ended at the first binder."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = 0
        self._monitor: zmq.Socket[bytes] | None = None

    def bind(self, *arguments: Any, **named: Any) -> tuple[Link, int]:
        binder, port = super().bind(*arguments, **named)
        self._binder, self._monitor = binder, binder.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        return binder, port

    def turn(self, *, wait: int = 2) -> dict[Link, list[Arrival]]:
        while self._monitor is not None and self._monitor.poll(0):
            self._monitor.recv_multipart()
            self.ended += 1
        return super().turn(wait=wait)

    def close(self, *ports: Link) -> None:
        if self._monitor is not None:
            self._binder.socket.disable_monitor()
            self._monitor.close()
            self._monitor = None
        super().close(*ports)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    patient(monkeypatch)
    made = Watched()
    yield made
    made.close()


class Stranger:
    """A socket of somebody's own making, without ports."""

    def __init__(self, port: int, **keys: bytes) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IDENTITY, identity(Role.API, 0, 1))  # a peer's own name
        for name, value in keys.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.socket.send(msgspec.msgpack.encode(handshake.hello(Identity(Role.API, 0, 1, 7), 0, 0)))

    def close(self) -> None:
        self.context.destroy(linger=0)


def refused(ends: Watched, count: int) -> None:
    """Wait until as many were."""
    end = time.monotonic() + LIMIT
    while ends.ended < count:
        assert time.monotonic() < end, f"{ends.ended} of {count} were refused"
        ends.turn()


def logged(ends: Watched, caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    """Wait for a line of this event; all of them."""
    end = time.monotonic() + LIMIT
    while not (told := [record for record in caplog.records if record.getMessage() == event]):
        assert time.monotonic() < end, f"{event} is not in the log"
        ends.turn()
    return told


def undisturbed(ends: Watched, binder: Link, connector: Link) -> None:
    """The session that stood before the stranger came stands, and passes messages."""
    (peer,) = connector.peers
    assert connector.send(peer, Abort(9))
    found = ends.until(binder, lambda a: bool(messages(a)))
    assert messages(found) == [Abort(9)]
    assert not left(found)
    assert connector.peers == (peer,)
    assert len(binder.peers) == 1


def keys_of(pair: LinkKeys, server: bytes) -> dict[str, bytes]:
    return {"CURVE_PUBLICKEY": pair.public, "CURVE_SECRETKEY": pair.secret, "CURVE_SERVERKEY": server}


@pytest.mark.parametrize("kind", ["no keys", "other keys", "other keys, and our public one", "a user and a password"])
def test_who_has_not_the_keys_is_refused(ends: Watched, kind: str) -> None:
    binder, port = ends.bind(SMALL)
    connector = ends.connect(SMALL, port, index=1)
    ends.meet(binder, connector)
    before, other = binder.statistics(), new_keys()
    given = {
        "no keys": {},
        "other keys": keys_of(other, other.public),
        "other keys, and our public one": keys_of(other, ends.keys.public),
        "a user and a password": {"PLAIN_USERNAME": b"penstock", "PLAIN_PASSWORD": ends.keys.secret},
    }[kind]
    stranger = Stranger(port, **given)
    try:
        refused(ends, 1)  # some come again and again, and never in
        undisturbed(ends, binder, connector)
        assert stranger.socket.poll(0) == 0, "it hears nothing"
    finally:
        stranger.close()
    after = binder.statistics()
    assert after.messages_in - before.messages_in < 20, "of the peer alone"


def test_a_process_with_other_keys_is_told_so(ends: Watched, caplog: pytest.LogCaptureFixture) -> None:
    _, port = ends.bind(SMALL)
    ends.connect(SMALL, port, keys=new_keys())
    refused(ends, 1)
    told = logged(ends, caplog, "link_not_admitted")
    assert "other keys" in told[0].fields["reason"]  # type: ignore[attr-defined]


def test_a_connector_does_not_talk_to_a_stranger(ends: Watched) -> None:
    """Who listens in a binder's place without its secret key hears no message, and is believed none."""
    other = Ends()
    try:
        binder, port = other.bind(SMALL)
        connector = ends.connect(SMALL, port)
        seen, end = {connector.socket}, time.monotonic() + LIMIT
        while len(seen) < 3 and time.monotonic() < end:
            assert not [arrival for arrivals in ends.turn().values() for arrival in arrivals]
            other.turn()
            seen.add(connector.socket)
        assert len(seen) == 3, "it tries again"
        assert binder.statistics().messages_in == 0
    finally:
        other.close()


def test_a_stranger_that_speaks_plain_zmtp_as_a_binder_hears_nothing(ends: Watched) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    binder = context.socket(zmq.ROUTER)
    try:
        port = binder.bind_to_random_port("tcp://127.0.0.1")
        connector = ends.connect(SMALL, port)
        first, end = connector.socket, time.monotonic() + LIMIT
        while connector.socket is first and time.monotonic() < end:
            ends.turn()
        assert connector.socket is not first
        assert binder.poll(0) == 0
    finally:
        context.destroy(linger=0)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
    "bytes": bytes(range(256)) * 64,
    "zeros": bytes(5000),
    "a plain greeting and a plain message": GREETING + b"NULL" + bytes(16) + bytes(32) + b"\4\x19\5READY" + b"\0\3abc",
    "a frame without an end": GREETING + b"CURVE" + bytes(15) + bytes(32) + b"\6" + struct.pack(">Q", 1 << 62),
    "a hello of zeros": GREETING + b"CURVE" + bytes(15) + bytes(32) + b"\4\xc8\5HELLO" + bytes(194),
    "an end at once": b"",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_bytes_of_no_protocol_disturb_nobody(ends: Watched, kind: str) -> None:
    binder, port = ends.bind(SMALL)
    connector = ends.connect(SMALL, port)
    ends.meet(binder, connector)
    for number in range(3):
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as stranger:
            stranger.sendall(GARBAGE[kind])
        refused(ends, number + 1)
    undisturbed(ends, binder, connector)


def test_random_bytes_disturb_nobody(ends: Watched) -> None:
    binder, port = ends.bind(SMALL)
    connector = ends.connect(SMALL, port)
    ends.meet(binder, connector)
    for number in range(40):
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as stranger:
            stranger.sendall((GREETING if number % 2 else b"") + os.urandom(number * 40))
        refused(ends, number + 1)
    undisturbed(ends, binder, connector)


def test_many_half_open_connections_disturb_nobody_and_are_ended(
    ends: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_MS", 2000)
    binder, port = ends.bind(SMALL)
    connector = ends.connect(SMALL, port)
    ends.meet(binder, connector)
    strangers = [socket.create_connection(("127.0.0.1", port), timeout=LIMIT) for _ in range(HALF_OPEN)]
    try:
        for stranger in strangers[::2]:
            stranger.sendall(GREETING[:5])  # as far as some ever come
        undisturbed(ends, binder, connector)
        another = ends.connect(SMALL, port, index=1)
        ends.until(another, joined)
        refused(ends, HALF_OPEN)
        for stranger in strangers:
            while stranger.recv(100):  # its handshake, and the end
                pass
    finally:
        for stranger in strangers:
            stranger.close()
    assert len(binder.peers) == 2


def test_what_is_said_cannot_be_read_or_changed_on_the_way(ends: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wire-tapper sees no word of a message. What one changes is never heard, nor is what comes behind it: the
    connection ends."""
    monkeypatch.setattr(tcp, "HEARTBEAT_MS", 500)
    binder, port = ends.bind(SMALL)
    listener = socket.create_server(("127.0.0.1", 0))
    connector = ends.connect(SMALL, listener.getsockname()[1])
    listener.settimeout(LIMIT)
    one, _ = listener.accept()
    other = socket.create_connection(("127.0.0.1", port), timeout=LIMIT)
    seen = b""
    try:
        for each in (one, other):
            each.setblocking(False)

        def passed(*, change: bool = False) -> bytes:
            found = b""
            for source, target in ((one, other), (other, one)):
                try:
                    data = source.recv(1 << 16)
                    found += data
                    if change and source is one and data:
                        data = data[:-1] + bytes([data[-1] ^ 1])
                    target.sendall(data)
                except OSError:  # nothing there, or its end
                    continue
            return found

        end = time.monotonic() + LIMIT
        while not (binder.peers and connector.peers) and time.monotonic() < end:
            seen += passed()
            ends.turn(wait=0)
        (peer,) = binder.peers
        connector.send(connector.peers[0], Abort(77))
        heard: list[object] = []
        while Abort(77) not in heard and time.monotonic() < end:
            seen += passed()
            heard += [arrival.message for arrival in ends.turn(wait=0)[binder]]
        assert b"api" not in seen, "names and words are sealed"
        assert msgspec.msgpack.encode(Abort(77)) not in seen
        assert ends.keys.public not in seen
        connector.send(connector.peers[0], Abort(78))
        heard = []
        while not any(isinstance(each, Left) for each in heard) and time.monotonic() < end:
            passed(change=True)
            heard += [arrival.message for arrival in ends.turn(wait=0)[binder]]
        assert Abort(78) not in heard
        assert peer not in binder.peers
    finally:
        for each in (one, other, listener):
            each.close()


def test_the_secret_is_in_no_log_option_or_report(
    ends: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "link.keys"
    write_keys(file, ends.keys)
    config = msgspec.structs.replace(
        Config(), links=LinksConfig(scheduler_address="tcp://127.0.0.1:5", link_keys=str(file))
    )
    shown = [options.as_toml(options.Effective(config, {})), " ".join(options.arguments(config))]
    shown += options.environment(config, {}).values()
    _, port = ends.bind(SMALL)
    ends.connect(SMALL, port, keys=new_keys())
    refused(ends, 1)
    file.write_bytes(file.read_bytes().replace(b"public", b"pubic"))
    try:
        read_keys(str(file))
    except Exception as error:
        shown += traceback.format_exception(error)
    shown += [f"{record.getMessage()} {record.__dict__}" for record in caplog.records]
    secret = ends.keys.secret.decode()
    assert len(shown) > 5
    assert not [text for text in shown if secret in text]
