"""Links between hosts over real TCP connections on loopback: sessions are exact however connections break, and nobody
waits long for a host that is gone."""

from __future__ import annotations

import random
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.config import LinksConfig
from penstock.protocol.errors import AddressError, ConfigError
from penstock.protocol.links import MOST_BYTES, STEPS, TEXT, TOKENS, HostAddress, LinkSpec
from penstock.protocol.messages import Abort, Rejected
from penstock.services.links import tcp
from penstock.services.links.curve import new_keys, write_keys
from penstock.services.links.link import RECONNECTED, UNREACHABLE, Arrival, Joined, Left, Link, Peer
from penstock.services.links.tcp import (
    CURVE,
    DOMAIN,
    VERSION,
    Network,
    TcpConnection,
    authenticate,
    network_of,
    numeric,
    reason_of,
    resolved,
    zap_reply,
)
from tests.services.links.network import LIMIT, Ends, Proxy, free_port, joined, left, messages, patient

SMALL: LinkSpec = msgspec.structs.replace(TEXT, window=8, high_water=64, silence=0.0)
HERE = Path("/nowhere")


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    patient(monkeypatch)
    made = Ends()
    yield made
    made.close()


@pytest.fixture
def proxies() -> Iterator[list[Proxy]]:
    made: list[Proxy] = []
    yield made
    for proxy in made:
        proxy.close()


def has_ipv6() -> bool:
    try:
        free_port("[::1]")
    except OSError:
        return False
    return True


def test_messages_pass_both_ways_in_order(ends: Ends) -> None:
    binder, port = ends.bind(SMALL)
    connector = ends.connect(SMALL, port)
    ends.meet(binder, connector)
    for k in range(5):
        assert connector.send(connector.peers[0], Abort(k))
    assert messages(ends.until(binder, lambda a: len(messages(a)) == 5)) == [Abort(k) for k in range(5)]
    answer = Rejected(id=3, status=400, message="no")
    assert binder.send(binder.peers[0], answer)
    assert messages(ends.until(connector, lambda a: bool(messages(a)))) == [answer]


def test_the_connector_may_come_first(ends: Ends) -> None:
    port = free_port()
    connector = ends.connect(SMALL, port)
    ends.turn()
    first = connector.socket
    end = time.monotonic() + LIMIT
    while connector.socket is first and time.monotonic() < end:
        ends.turn()
    assert connector.socket is not first, "it tries again"
    binder, _ = ends.bind(SMALL, port=port)
    ends.meet(binder, connector)


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_hosts_are_found_by_name_and_by_ipv6(ends: Ends, host: str) -> None:
    if host == "[::1]" and not has_ipv6():
        pytest.skip("no IPv6 on this machine")
    binder, port = ends.bind(SMALL, host=host)
    connector = ends.connect(SMALL, port, host=host)
    ends.meet(binder, connector)


def test_two_connectors_are_two_peers(ends: Ends) -> None:
    binder, port = ends.bind(SMALL)
    one, two = ends.connect(SMALL, port, index=0), ends.connect(SMALL, port, index=1)
    ends.meet(binder, one)
    ends.until(two, joined)
    ends.until(binder, lambda _: len(binder.peers) == 2)
    ends.close(one)
    found = ends.until(binder, left)
    assert [arrival.peer.index for arrival in found if isinstance(arrival.message, Left)] == [0]
    assert two.peers


def test_a_connection_that_breaks_ends_the_session_on_both_ends(ends: Ends, proxies: list[Proxy]) -> None:
    binder, port = ends.bind(SMALL)
    proxies.append(proxy := Proxy(port))
    connector = ends.connect(SMALL, proxy.port)
    ends.meet(binder, connector)
    (before,) = binder.peers
    proxy.cut()
    here = ends.until(connector, lambda a: left(a) and joined(a))
    there = ends.until(binder, lambda a: left(a) and joined(a))
    assert [arrival.message for arrival in here] == [Left(UNREACHABLE), Joined()]
    assert [type(arrival.message) for arrival in there] == [Left, Joined]
    assert there[0] == Arrival(before, there[0].message)
    assert there[0].message in (Left(UNREACHABLE), Left(RECONNECTED))
    (after,) = binder.peers
    assert after.name != before.name, "each connection has a name of its own"
    assert after.session == connector.peers[0].session > before.session


def test_both_ends_hear_of_a_break_that_nobody_mends(ends: Ends, proxies: list[Proxy]) -> None:
    """Although both processes live, and can be seen from here."""
    binder, port = ends.bind(SMALL)
    proxies.append(proxy := Proxy(port))
    connector = ends.connect(SMALL, proxy.port)
    ends.meet(binder, connector)
    assert binder.peers[0].pidfd is not None
    proxy.target = free_port()  # where nobody is
    proxy.cut()
    assert messages(ends.until(connector, left)) == []
    assert Left(UNREACHABLE) in [arrival.message for arrival in ends.until(binder, left)]
    assert not binder.peers
    assert not connector.peers


def test_a_restarted_binder_is_met_again(ends: Ends) -> None:
    binder, port = ends.bind(SMALL, incarnation=1)
    connector = ends.connect(SMALL, port)
    ends.meet(binder, connector)
    ends.close(binder)
    again, _ = ends.bind(SMALL, incarnation=2, port=port)
    ends.until(connector, lambda a: left(a) and joined(a))
    assert connector.peers[0].incarnation == 2
    ends.until(again, joined)


def test_who_is_given_up_and_lives_begins_anew_over_the_same_connection(ends: Ends) -> None:
    binder, port = ends.bind(SMALL)
    connector = ends.connect(SMALL, port)
    ends.meet(binder, connector)
    (peer,) = binder.peers
    before = connector.socket
    binder._dismiss(peer, "silent", binder._arrivals)
    ends.until(connector, lambda a: left(a) and joined(a))
    ends.until(binder, lambda a: left(a) and joined(a))
    assert connector.socket is before
    assert binder.peers[0].session == peer.session + 1


def test_a_hello_over_a_connection_that_has_ended_begins_nothing(ends: Ends, proxies: list[Proxy]) -> None:
    """A binder that was stopped reads what two connections of one process left, in any order."""
    binder, port = ends.bind(SMALL)
    proxies.append(proxy := Proxy(port))
    connector = ends.connect(SMALL, proxy.port)
    ends.meet(binder, connector)
    (before,) = binder.peers
    stale = connector._encoder.encode(connector_hello(connector))
    proxy.cut()
    ends.until(connector, lambda a: left(a) and joined(a))
    ends.until(binder, lambda a: left(a) and joined(a))
    (after,) = binder.peers
    binder._take(before.name, stale, arrivals := [])
    assert arrivals == []
    assert binder.peers == (after,)


def connector_hello(port: Link) -> object:
    from penstock.services.links import handshake

    return handshake.hello(port.me, port.epoch, port._session)


class Flow:
    """One direction: numbered messages of one end, and what the other end heard, by session."""

    def __init__(self, sender: Link, receiver: Link, *, up: bool) -> None:
        self.sender, self.receiver = sender, receiver
        self.sent: dict[int, list[int]] = defaultdict(list)
        self.heard: dict[int, list[int]] = defaultdict(list)
        self.ended: set[int] = set()  # sessions whose sender was told Left
        self._up = up
        self._next = 0
        self._open: Peer | None = None  # at the receiver: between Joined and Left

    def send(self) -> None:
        for peer in self.sender.peers:
            message = Abort(self._next) if self._up else Rejected(id=self._next, status=400, message="x" * 40)
            if self.sender.send(peer, message):
                self.sent[peer.session].append(self._next)
                self._next += 1

    def note(self, port: Link, arrivals: list[Arrival]) -> None:
        for peer, message in ((arrival.peer, arrival.message) for arrival in arrivals):
            if port is self.sender and isinstance(message, Left):
                self.ended.add(peer.session)
            if port is not self.receiver:
                continue
            if isinstance(message, Joined):
                assert self._open is None, "a session begins when the one before it has ended"
                self._open = peer
            elif isinstance(message, Left):
                assert self._open is peer
                self._open = None
            else:
                assert self._open is peer, "messages belong to the session that stands"
                assert isinstance(message, Abort | Rejected)
                self.heard[peer.session].append(message.id)

    @property
    def passing(self) -> bool:
        """Whether something was heard in the session that stands."""
        return any(self.heard.get(peer.session) for peer in self.sender.peers)

    @property
    def delivered(self) -> bool:
        """Whether all was that was sent in it."""
        return all(self.heard.get(peer.session) == self.sent[peer.session] for peer in self.sender.peers)

    def check(self) -> None:
        """Every message was delivered, or its sender was told that the session ended; and nothing came twice, out of
        order, with a gap or in another session."""
        for session, sent in self.sent.items():
            heard = self.heard.get(session, [])
            assert heard == sent[: len(heard)], f"a gap in session {session}"
            assert len(heard) == len(sent) or session in self.ended, f"a silent end of session {session}"
        assert set(self.heard) <= set(self.sent)


def cut_at_random(ends: Ends, proxies: list[Proxy], seed: int, cuts: int) -> list[Flow]:
    """Both ends send as fast as credit allows while a proxy cuts every connection after a random number of bytes."""
    rng = random.Random(seed)
    binder, port = ends.bind(SMALL)
    proxies.append(proxy := Proxy(port))
    connector = ends.connect(SMALL, proxy.port)
    flows = [Flow(connector, binder, up=True), Flow(binder, connector, up=False)]
    end = time.monotonic() + LIMIT
    while proxy.cuts < cuts:
        assert time.monotonic() < end, f"{proxy.cuts} cuts"
        if not proxy.armed:  # in the handshake, in the first messages, or later
            proxy.cut(rng.choice((rng.randrange(0, 700), rng.randrange(700, 3000), rng.randrange(3000, 30000))))
        turn(ends, flows)
    while not all(flow.passing and flow.delivered for flow in flows):
        assert time.monotonic() < end, "the last session delivers everything"
        turn(ends, flows, sending=not all(flow.passing for flow in flows))
    return flows


def turn(ends: Ends, flows: list[Flow], *, sending: bool = True) -> None:
    for flow in flows if sending else ():
        flow.send()
    for port, arrivals in ends.turn(wait=1).items():
        for flow in flows:
            flow.note(port, arrivals)


@pytest.mark.parametrize("seed", range(2))
def test_no_message_is_lost_without_a_word(
    ends: Ends, proxies: list[Proxy], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "RETRY", 0.01)
    flows = cut_at_random(ends, proxies, seed, cuts=12)
    for flow in flows:
        flow.check()
        assert len(flow.sent) > 1, "several sessions"
        assert sum(map(len, flow.heard.values())) > 20


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 130))
def test_no_message_is_lost_without_a_word_at_length(
    ends: Ends, proxies: list[Proxy], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "RETRY", 0.01)
    for flow in cut_at_random(ends, proxies, seed, cuts=60):
        flow.check()


def test_a_host_that_vanishes_is_noticed(ends: Ends, proxies: list[Proxy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes from it any more, and nothing ends: heartbeats tell. In ten seconds with the times that are set."""
    monkeypatch.setattr(tcp, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(tcp, "SILENCE_MS", 300)
    binder, port = ends.bind(SMALL)
    proxies.append(proxy := Proxy(port))
    connector = ends.connect(SMALL, proxy.port)
    ends.meet(binder, connector)
    proxy.stall()
    assert Left(UNREACHABLE) in [arrival.message for arrival in ends.until(binder, left)]
    assert Left(UNREACHABLE) in [arrival.message for arrival in ends.until(connector, left)]


def test_a_host_is_not_waited_for_for_long() -> None:
    assert tcp.HEARTBEAT_MS + tcp.SILENCE_MS < 10_000
    assert tcp.HANDSHAKE_MS <= 5000
    assert tcp.ATTEMPT < 10


def test_a_peer_that_computes_for_long_keeps_its_connection(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats are libzmq's own: a loop that does not turn for longer than they may fail loses nothing."""
    monkeypatch.setattr(tcp, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(tcp, "SILENCE_MS", 30_000)
    binder, port = ends.bind(SMALL)
    connector = ends.connect(SMALL, port)
    ends.meet(binder, connector)
    peer = connector.peers[0]
    for _ in range(50):
        ends.ports[0].socket.poll(10)  # nobody turns
    assert connector.send(peer, Abort(1))
    assert messages(ends.until(binder, lambda a: bool(messages(a)))) == [Abort(1)]
    assert connector.peers == (peer,)


def test_an_attempt_that_leads_nowhere_is_given_up(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody accepts the connection and says nothing, as a host does that hangs."""
    monkeypatch.setattr(tcp, "HANDSHAKE_MS", 200)
    monkeypatch.setattr(tcp, "ATTEMPT", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connector = ends.connect(SMALL, silent.getsockname()[1])
        silent.settimeout(LIMIT)
        first, _ = silent.accept()
        with first:
            seen, end = {connector.socket}, time.monotonic() + LIMIT
            while len(seen) < 3 and time.monotonic() < end:
                ends.turn()
                seen.add(connector.socket)
        assert len(seen) == 3


def test_a_name_that_nobody_knows_is_asked_for_again(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of a cluster has a name once it runs. libzmq tells nothing of it, so time does."""
    monkeypatch.setattr(tcp, "ATTEMPT", 0.3)
    connector = ends.connect(SMALL, 1, host="no-such-host.invalid")
    first, end = connector.socket, time.monotonic() + LIMIT
    while connector.socket is first and time.monotonic() < end:
        ends.turn()
    assert connector.socket is not first


def test_a_name_is_tried_in_both_ways() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for host, ways in (("h.invalid", [0, 1, 0]), ("127.0.0.1", [0, 0, 0]), ("[::1]", [1, 1, 1])):
            line = TcpConnection(context, SMALL, HostAddress(host, 1), new_keys())
            assert [line.open(b"a%d" % k).getsockopt(zmq.IPV6) for k in range(3)] == ways
            line.close(0)
    finally:
        context.term()


def test_a_line_leaves_no_socket_behind() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = TcpConnection(context, SMALL, HostAddress("127.0.0.1", free_port()), new_keys())
    made = [line.open(b"%d" % k) for k in range(5)]
    assert [one.closed for one in made] == [True, True, True, False, False]
    line.over(0.0)
    assert [one.closed for one in made] == [True, True, True, True, False]
    line.close(0)
    assert made[-1].closed
    context.term()


def test_an_address_that_is_taken_or_elsewhere_is_told(ends: Ends) -> None:
    _, port = ends.bind(SMALL)
    with pytest.raises(AddressError, match=r"--tokenizer-address: .* another process listens there"):
        ends.bind(SMALL, port=port)
    with pytest.raises(AddressError, match="its host must be an address of this machine"):
        ends.bind(SMALL, host="192.0.2.1", port=port)
    with pytest.raises(AddressError, match="its host is not known here"):
        ends.bind(SMALL, host="no-such-host.invalid", port=port)


def test_what_a_name_means_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 1, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 1)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert resolved(TEXT, HostAddress("h", 1)) == ("10.0.0.1", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both[:1])
    assert resolved(TEXT, HostAddress("h", 1)) == ("[fd00::1]", True)


@pytest.mark.parametrize(("host", "number"), [("10.0.0.1", True), ("h", False), ("10.0.0", False), ("[::1]", False)])
def test_which_hosts_are_numbers(host: str, number: bool) -> None:
    assert numeric(host) is number


def test_links_without_an_address_stay_on_this_machine(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    assert network_of(context, LinksConfig(link_keys="nobody looks")) is None
    network = Network(context, LinksConfig(scheduler_address="tcp://127.0.0.1:1", link_keys="k"), new_keys())
    assert [network.reaches(link) for link in (TEXT, TOKENS, STEPS)] == [False, True, True]
    context.term()


def test_keys_that_cannot_be_used_are_told_before_anything_is_opened(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    file = tmp_path / "link.keys"
    links = LinksConfig(tokenizer_address="tcp://127.0.0.1:1", link_keys=str(file))
    with pytest.raises(ConfigError, match="--link-keys"):
        network_of(context, links)
    write_keys(file, new_keys())
    assert network_of(context, links) is not None
    context.term()


def test_plain_sockets_have_no_keys(tmp_path: Path) -> None:
    """On one machine nothing is added: what keeps others out is the directory."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = tcp.open_socket(context, zmq.ROUTER, TEXT)
    assert made.getsockopt(zmq.MECHANISM) == zmq.NULL
    assert made.getsockopt(zmq.HEARTBEAT_IVL) == 0
    assert made.getsockopt(zmq.MAXMSGSIZE) == MOST_BYTES
    made.close()
    context.term()


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
        monitor = caller.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | tcp.ENDS)
        caller.connect(f"tcp://127.0.0.1:{port}")
        assert monitor.poll(60_000)
        event, _ = tcp.EVENT.unpack(monitor.recv_multipart()[0])
        assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
        caller.disable_monitor()
        monitor.close()
    finally:
        context.destroy(linger=0)


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
def test_why_a_handshake_failed(event: int, value: int, reason: str) -> None:
    assert reason_of(event, value).startswith(reason)


def test_authentication_ends_with_its_context() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticate(context, new_keys())
    context.term()  # waits for every socket
