"""The link: handshake, credit, loss and return of peers, over real ipc sockets in one process and in two."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from penstock.protocol.control import EngineStatus
from penstock.protocol.errors import LinkError
from penstock.protocol.limits import MAX_BODY_BYTES
from penstock.protocol.links import TEXT, TOKENS, Credit, Goodbye, LinkSpec, Role, Welcome
from penstock.protocol.messages import Abort, Rejected, Sampling, SubmitText
from penstock.services.links.async_link import AsyncLink
from penstock.services.links.handshake import Identity, pid_namespace
from penstock.services.links.link import (
    CREDIT_INTERVAL,
    HELLO_INTERVAL,
    PROBES,
    UNREACHABLE,
    Arrival,
    Joined,
    Left,
    Link,
    Peer,
)

# The clock of these tests runs faster than messages travel, so nobody counts as silent unless a test says so.
SMALL: LinkSpec = msgspec.structs.replace(TEXT, window=8, high_water=32, silence=0.0)
STRICT: LinkSpec = msgspec.structs.replace(SMALL, silence=10.0)


class Wires:
    """Ports of one test, on one context, with a clock that only moves when told."""

    def __init__(self, run_dir: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.run_dir = run_dir
        self.now = 0.0
        self.ports: list[Link] = []

    def bind(self, link: LinkSpec = SMALL, incarnation: int = 1, shared: int = 7, where: int | None = None) -> Link:
        me = Identity(link.binder, 0, incarnation, shared, pid_namespace() if where is None else where)
        port = Link.bind(self.context, link, me, self.run_dir)
        self.ports.append(port)
        return port

    def connect(
        self, link: LinkSpec = SMALL, index: int = 0, incarnation: int = 1, shared: int = 7, where: int | None = None
    ) -> Link:
        me = Identity(link.connector, index, incarnation, shared, pid_namespace() if where is None else where)
        port = Link.connect(self.context, link, me, self.run_dir)
        self.ports.append(port)
        return port

    def until(self, port: Link, done: Callable[[list[Arrival]], bool]) -> list[Arrival]:
        """Everything `port` receives until `done` says so; all ports keep ticking. Fails after 2,000 rounds."""
        found: list[Arrival] = []
        for _ in range(2000):
            for other in self.ports:
                if not other.socket.closed:
                    other.tick(self.now)
            self.now += 0.1
            for other in self.ports:
                if other is not port and not other.socket.closed:
                    other._arrivals = other.receive() + other._arrivals  # keeps the far side moving, loses no event
            found += port.receive()
            if done(found):
                return found
            port.socket.poll(5)
        raise AssertionError(f"nothing of the kind arrived: {found}")

    def quietly(self, port: Link, done: Callable[[list[Arrival]], bool]) -> list[Arrival]:
        """Everything `port` receives until `done` says so, while nobody says anything of their own accord."""
        found: list[Arrival] = []
        for _ in range(2000):
            found += port.receive()
            if done(found):
                return found
            port.socket.poll(5)
        raise AssertionError(f"nothing of the kind arrived: {found}")


@pytest.fixture
def wires(tmp_path: Path) -> Iterator[Wires]:
    wires = Wires(tmp_path)
    yield wires
    for port in wires.ports:
        if not port.socket.closed:
            port.close()
    wires.context.destroy(linger=0)


def joined(arrivals: list[Arrival]) -> bool:
    return any(isinstance(arrival.message, Joined) for arrival in arrivals)


def left(arrivals: list[Arrival]) -> bool:
    return any(isinstance(arrival.message, Left) for arrival in arrivals)


def messages(arrivals: list[Arrival]) -> list[object]:
    return [arrival.message for arrival in arrivals if not isinstance(arrival.message, Joined | Left)]


def meet(wires: Wires, binder: Link, connector: Link) -> None:
    wires.until(connector, joined)
    wires.until(binder, joined)


def test_messages_pass_both_ways_in_order(wires: Wires) -> None:
    binder, connector = wires.bind(), wires.connect()
    meet(wires, binder, connector)
    for k in range(5):
        assert connector.send(connector.peers[0], Abort(k))
    found = wires.until(binder, lambda a: len(messages(a)) == 5)
    assert messages(found) == [Abort(k) for k in range(5)]
    answer = Rejected(id=3, status=400, message="no")
    assert binder.send(binder.peers[0], answer)
    assert messages(wires.until(connector, lambda a: bool(messages(a)))) == [answer]


def test_the_connector_may_come_first(wires: Wires) -> None:
    connector = wires.connect()
    connector.tick(0.0)
    assert connector.receive() == []
    binder = wires.bind()
    meet(wires, binder, connector)


def test_credit_bounds_what_is_in_flight_and_returns(wires: Wires) -> None:
    binder, connector = wires.bind(), wires.connect()
    meet(wires, binder, connector)
    peer = connector.peers[0]
    sent = sum(connector.send(peer, Abort(k)) for k in range(100))
    assert sent == SMALL.window
    assert connector.statistics().refused_sends == 100 - SMALL.window
    assert connector.statistics().unacknowledged == SMALL.window
    assert len(messages(wires.until(binder, lambda a: len(messages(a)) == sent))) == sent
    wires.until(connector, lambda a: peer.credit == SMALL.window)
    assert connector.send(peer, Abort(1))


def test_credit_returns_at_once_when_a_quarter_of_the_window_was_taken(wires: Wires) -> None:
    """Nobody ticks, so no time passes: a sender must not wait for it in the middle of a flow."""
    binder, connector = wires.bind(), wires.connect()
    meet(wires, binder, connector)
    peer, share = connector.peers[0], SMALL.window // 4
    assert [connector.send(peer, Abort(k)) for k in range(share - 1)] == [True] * (share - 1)
    wires.quietly(binder, lambda found: len(messages(found)) == share - 1)
    assert binder.peers[0].taken == share - 1
    assert connector.send(peer, Abort(share))
    wires.quietly(binder, lambda found: len(messages(found)) == 1)
    wires.quietly(connector, lambda found: peer.credit == SMALL.window)


def test_credit_of_a_few_messages_returns_with_time(wires: Wires) -> None:
    """Fewer than a quarter of the window are not worth a message at once. But the sender must not go without for good:
    what it sends next may be all that there is room for."""
    binder, connector = wires.bind(), wires.connect()
    meet(wires, binder, connector)
    peer = connector.peers[0]
    assert connector.send(peer, Abort(1))
    began = wires.now
    assert messages(wires.until(binder, lambda a: bool(messages(a)))) == [Abort(1)]
    assert peer.credit == SMALL.window - 1
    wires.until(connector, lambda a: peer.credit == SMALL.window)
    assert wires.now - began <= 2 * CREDIT_INTERVAL + 1.0
    assert connector.statistics().unacknowledged == 0


def test_the_largest_body_passes_as_one_message_and_what_is_larger_than_any_is_never_sent(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of token ids takes twice as many bytes here. What a socket refuses would end the connection."""
    binder, connector = wires.bind(), wires.connect()
    meet(wires, binder, connector)
    asked = SubmitText(id=1, prompt_ids=bytes(2 * MAX_BODY_BYTES), sampling=Sampling(seed=1))
    assert connector.send(connector.peers[0], asked)
    assert connector.send(connector.peers[0], Abort(1))
    assert messages(wires.quietly(binder, lambda found: len(messages(found)) == 2)) == [asked, Abort(1)]
    monkeypatch.setattr("penstock.services.links.link.MOST_BYTES", 100)
    with pytest.raises(AssertionError, match="messages are bounded where they are made"):
        connector.send(connector.peers[0], Rejected(id=1, status=400, message="x" * 100))


def test_other_options_are_refused_with_the_side_to_fix(wires: Wires) -> None:
    wires.bind(shared=1)
    connector = wires.connect(shared=2)
    with pytest.raises(LinkError, match="started with other model options"):
        wires.until(connector, joined)


def test_the_wrong_role_is_refused(wires: Wires) -> None:
    wires.bind()
    connector = wires.connect(msgspec.structs.replace(SMALL, connector=Role.EXECUTOR))
    with pytest.raises(LinkError, match="which is for role 'api'"):
        wires.until(connector, joined)


def test_goodbye_is_seen_at_once(wires: Wires) -> None:
    binder, connector = wires.bind(), wires.connect()
    meet(wires, binder, connector)
    peer = binder.peers[0]
    connector.close()
    found = wires.until(binder, left)
    assert found[-1] == Arrival(peer, Left("said goodbye"))
    assert binder.peers == ()
    assert not binder.send(peer, Rejected(id=1, status=500, message=""))


def test_a_new_incarnation_replaces_the_old(wires: Wires) -> None:
    binder, first = wires.bind(), wires.connect(incarnation=1)
    meet(wires, binder, first)
    first.socket.close(linger=0)  # dies without a word; its process, this one, lives on
    second = wires.connect(incarnation=2)
    wires.until(second, joined)
    found = wires.until(binder, lambda a: left(a) and joined(a))
    assert [type(arrival.message) for arrival in found] == [Left, Joined]
    assert [peer.incarnation for peer in binder.peers] == [2]


def test_a_restarted_binder_is_met_again(wires: Wires) -> None:
    binder, connector = wires.bind(incarnation=1), wires.connect()
    meet(wires, binder, connector)
    binder.socket.close(linger=0)  # dies without a word
    again = wires.bind(incarnation=2)
    wires.until(connector, lambda a: left(a) and joined(a))
    assert connector.peers[0].incarnation == 2
    wires.until(again, joined)


def test_data_from_a_stranger_is_answered_with_goodbye(wires: Wires) -> None:
    binder, connector = wires.bind(), wires.connect()
    meet(wires, binder, connector)
    connector.send(connector.peers[0], Abort(0))
    assert messages(wires.quietly(binder, lambda a: bool(messages(a)))) == [Abort(0)]  # no hello is behind it
    binder._peers.clear()  # as after a restart that the connector has not noticed
    connector.send(connector.peers[0], Abort(1))
    assert binder.socket.poll(60_000)
    assert binder.receive() == []
    assert messages(wires.quietly(connector, left)) == []
    wires.until(connector, joined)
    assert messages(wires.until(binder, joined)) == []


def test_a_silent_peer_is_lost(wires: Wires) -> None:
    binder, connector = wires.bind(STRICT), wires.connect(STRICT)
    while not joined(binder.receive()):
        connector.tick(0.0)  # one hello, and none behind it
        binder.socket.poll(5)
    binder.tick(STRICT.silence + 1)
    assert Left("silent for 10 s") in [arrival.message for arrival in binder.receive()]


def test_who_was_given_up_and_lives_begins_a_new_session_on_both_sides(wires: Wires) -> None:
    """What is said of the one that is over, and arrives late, does not end the next."""
    binder, connector = wires.bind(STRICT), wires.connect(STRICT)
    meet(wires, binder, connector)
    for number in range(5):
        assert connector.send(connector.peers[0], Abort(number))
    (first,) = binder.peers
    binder._dismiss(first, "silent for 10 s", binder._arrivals)
    heard = wires.until(connector, lambda a: left(a) and joined(a))
    assert [type(arrival.message) for arrival in heard if not isinstance(arrival.message, Abort)] == [Left, Joined]
    found = wires.until(binder, joined)
    assert not any(isinstance(arrival.message, Abort) for arrival in found), "they were of the session that is over"
    (second,) = binder.peers
    assert second.number > first.number
    assert connector.send(connector.peers[0], Abort(9))
    fresh = wires.until(binder, lambda a: any(isinstance(arrival.message, Abort) for arrival in a))
    assert [arrival.peer for arrival in fresh if arrival.message == Abort(9)] == [second]
    assert not left(fresh)
    assert not left(connector.receive())


def test_a_hello_that_was_on_its_way_begins_no_session_for_the_data_behind_it(wires: Wires) -> None:
    binder, connector = wires.bind(STRICT), wires.connect(STRICT)
    meet(wires, binder, connector)
    (first,) = binder.peers
    connector._say_hello()
    assert connector.send(connector.peers[0], Abort(1))
    binder._dismiss(first, "silent for 10 s", binder._arrivals)
    assert binder.socket.poll(60_000)
    found = wires.until(binder, left)
    heard = wires.until(connector, lambda a: left(a) and joined(a))
    found += wires.until(binder, lambda _: bool(binder.peers))
    assert [type(arrival.message) for arrival in heard if not isinstance(arrival.message, Abort)] == [Left, Joined]
    assert [type(arrival.message) for arrival in found] == [Left, Joined]
    assert binder.peers[0].session == 1


def test_one_that_is_given_up_hears_of_it_and_begins_anew(wires: Wires) -> None:
    binder, connector = wires.bind(STRICT), wires.connect(STRICT)
    meet(wires, binder, connector)
    (first,) = binder.peers
    binder.give_up(first, "out of step")
    binder.give_up(first, "out of step")  # which it is already
    found = [arrival.message for arrival in wires.until(binder, lambda a: left(a) and joined(a))]
    assert found == [Left("out of step"), Joined()]
    wires.until(connector, lambda _: bool(connector.peers))
    assert binder.peers[0].incarnation == first.incarnation


def test_a_connector_that_was_not_told_finds_out_by_its_next_hello(wires: Wires) -> None:
    binder, connector = wires.bind(), wires.connect()
    meet(wires, binder, connector)
    binder._lose(binder.peers[0], "without a word", binder._arrivals)
    heard = wires.until(connector, lambda a: left(a) and joined(a))
    assert [arrival.message for arrival in heard] == [Left("began again"), Joined()]
    assert binder.peers[0].number == connector.peers[0].number


def test_a_binder_that_was_given_up_hears_of_the_new_session(wires: Wires) -> None:
    binder, connector = wires.bind(), wires.connect()
    meet(wires, binder, connector)
    connector._lose(connector.peers[0], "without a word", connector._arrivals)
    heard = wires.until(binder, lambda a: left(a) and joined(a))
    assert [arrival.message for arrival in heard] == [Left("began again"), Joined()]
    wires.until(connector, joined)
    assert binder.peers[0].session == 1


def test_an_old_goodbye_and_an_old_welcome_mean_nothing(wires: Wires) -> None:
    binder, connector = wires.bind(), wires.connect()
    meet(wires, binder, connector)
    wires.until(connector, lambda a: bool(connector.peers))
    at_binder, at_connector = binder.peers[0], connector.peers[0]
    connector._session = 4
    old = connector._encoder.encode(Goodbye(1, at_binder.session))
    binder._take(at_binder.name, old, [])
    connector._take(b"", connector._encoder.encode(Goodbye(1, at_connector.number)), [])
    connector._welcomed(at_connector, Welcome(version=1, role="tokenizer", index=0, incarnation=77, pid=0), [])
    assert (binder.peers, connector.peers) == ((at_binder,), (at_connector,))


@pytest.mark.parametrize("payload", [b"\xc1 not msgpack", b"\x91\xa4\x00\x00\x00\x80", b"\x91" * 5000])
def test_malformed_bytes_lose_the_peer_and_nothing_else(payload: bytes, wires: Wires) -> None:
    binder, one, two = wires.bind(), wires.connect(index=0), wires.connect(index=1)
    meet(wires, binder, one)
    wires.until(two, joined)
    wires.until(binder, lambda a: len(binder.peers) == 2)
    one.socket.send(payload)
    lost = [arrival for arrival in wires.until(binder, left) if isinstance(arrival.message, Left)]
    assert [(arrival.peer.index, arrival.message) for arrival in lost] == [(0, Left("sent a malformed message"))]
    wires.until(one, lambda a: left(a) and joined(a))  # it hears of its loss and begins anew
    assert two.peers
    assert not left(two.receive())


def test_a_killed_process_is_seen_by_its_descriptor(wires: Wires) -> None:
    binder = wires.bind(TOKENS)
    script = (
        "import sys, time, zmq, pathlib; from penstock.protocol.links import TOKENS, Role;"
        "from penstock.services.links.handshake import Identity;"
        "from penstock.services.links.link import Link, Joined\n"
        "port = Link.connect(zmq.Context(), TOKENS, Identity(Role.TOKENIZER, 0, 5, 7), pathlib.Path(sys.argv[1]))\n"
        "while True: port.tick(time.monotonic()); port.receive(); port.socket.poll(50)"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(wires.run_dir)], cwd=Path(__file__).parents[3])
    try:
        assert binder.socket.poll(60_000)
        wires.until(binder, joined)
        assert binder.peers[0].pid == child.pid
        child.kill()
        child.wait()
        assert wires.until(binder, left)[-1].message == Left(f"process {child.pid} ended")
    finally:
        child.kill()
        child.wait()


def test_last_words_come_before_an_end_and_count_against_silence(wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks late finds both at once: the word that has arrived, and that its sender has ended or was silent."""
    binder, connector = wires.bind(STRICT), wires.connect(STRICT)
    meet(wires, binder, connector)
    assert connector.send(connector.peers[0], Abort(0))
    wires.quietly(binder, lambda a: bool(messages(a)))  # and whatever was on its way before it
    assert connector.send(connector.peers[0], Abort(1))
    assert binder.socket.poll(60_000)
    binder.tick(wires.now + 2 * STRICT.silence)
    assert messages(binder.receive()) == [Abort(1)]
    assert binder.peers
    monkeypatch.setattr(Peer, "exited", lambda peer: True)
    connector.close()
    assert binder.socket.poll(60_000)
    binder.tick(wires.now + 2 * STRICT.silence)
    assert [arrival.message for arrival in binder.receive()] == [Left("said goodbye")]


ELSEWHERE = 1  # what processes of another namespace or host say of their place


def connection_breaks(port: Link) -> None:
    """As when its process is killed: no Goodbye."""
    port.socket.close(linger=0)


@pytest.mark.parametrize("at_binder", [True, False])
def test_the_end_of_a_process_elsewhere_is_seen_by_its_connection(wires: Wires, at_binder: bool) -> None:
    """Within two seconds of the links' clock, which ticks ten times a second here as fast as it can."""
    binder, connector = wires.bind(where=ELSEWHERE), wires.connect(where=ELSEWHERE)
    meet(wires, binder, connector)
    stays, goes = (binder, connector) if at_binder else (connector, binder)
    assert stays.peers[0].pidfd is None
    gone = stays.peers[0]
    connection_breaks(goes)
    assert Arrival(gone, Left(UNREACHABLE)) in wires.until(stays, left)
    assert stays.peers == ()


def test_a_process_elsewhere_that_lives_is_kept_and_not_drowned_in_words(wires: Wires) -> None:
    """Its silence alone is what the link's limit is for; what is said to it has an end."""
    binder, connector = wires.bind(where=ELSEWHERE), wires.connect(where=ELSEWHERE)
    meet(wires, binder, connector)
    assert connector.send(connector.peers[0], Abort(0))
    wires.quietly(binder, lambda a: bool(messages(a)))  # and whatever was on its way before it
    peer = binder.peers[0]
    for _ in range(PROBES * 4):
        wires.now += HELLO_INTERVAL
        binder.tick(wires.now)
        assert binder.receive() == []
    assert binder.peers == (peer,)
    assert peer.probes == PROBES
    assert connector.receive() == []  # and what was said is nothing to anybody
    wires.until(connector, lambda _: peer.probes < PROBES)
    assert connector.send(connector.peers[0], Abort(1))
    assert messages(wires.until(binder, lambda a: bool(messages(a)))) == [Abort(1)]
    assert binder.peers == (peer,)


def test_the_binders_file_goes_with_it(wires: Wires) -> None:
    binder, connector = wires.bind(), wires.connect()
    meet(wires, binder, connector)
    connector.close()
    assert [path.name for path in wires.run_dir.iterdir()] == ["text-0.sock"]
    binder.close()
    assert list(wires.run_dir.iterdir()) == []


def test_a_successors_file_stays(wires: Wires) -> None:
    first = wires.bind()
    second = wires.bind(incarnation=2)
    first.close()
    assert [path.name for path in wires.run_dir.iterdir()] == ["text-0.sock"]
    meet(wires, second, wires.connect())


def test_control_messages_cost_no_credit(wires: Wires) -> None:
    binder, connector = wires.bind(), wires.connect()
    meet(wires, binder, connector)
    for _ in range(50):
        wires.now += 1
        connector.tick(wires.now)
        binder.receive()
        connector.receive()
    assert connector.peers[0].credit == SMALL.window
    assert binder.peers[0].credit == SMALL.window


def test_closing_a_port_closes_its_descriptors(wires: Wires) -> None:
    binder, connector = wires.bind(), wires.connect()
    meet(wires, binder, connector)
    fd = binder.peers[0].pidfd
    assert fd is not None
    binder.close()
    with pytest.raises(OSError):
        os.fstat(fd)


async def test_watch_delivers_without_polling(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    binder = AsyncLink(Link.bind(context, TEXT, Identity(Role.TOKENIZER, 0, 1, 7), tmp_path))
    connector = AsyncLink(Link.connect(context, TEXT, Identity(Role.API, 0, 1, 7), tmp_path))
    got: asyncio.Queue[object] = asyncio.Queue()
    echoed: asyncio.Queue[object] = asyncio.Queue()

    owed: deque[tuple[Peer, Rejected]] = deque()

    def answer() -> None:
        """Answers go out as far as there is credit; the rest is kept and tried again."""
        while owed and binder.send(*owed[0]):
            owed.popleft()
        if owed:
            asyncio.get_running_loop().call_later(0.002, answer)

    def echo(arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            match arrival.message:
                case Abort(id):
                    owed.append((arrival.peer, Rejected(id=id, status=499, message="aborted")))
        answer()

    def keep(arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            (got if isinstance(arrival.message, Joined) else echoed).put_nowait(arrival.message)

    binder.start(echo)
    connector.start(keep)
    try:
        await asyncio.wait_for(got.get(), 60)
        for k in range(3000):  # far beyond the window: credit returns while we go
            while not connector.send(connector.peers[0], Abort(k)):
                await asyncio.wait_for(echoed.get(), 60)
        last = None
        while last is None or last.id != 2999:
            last = await asyncio.wait_for(echoed.get(), 60)
            assert isinstance(last, Rejected)
    finally:
        connector.close()
        binder.close()
        context.destroy(linger=0)


def test_statistics_count_messages_and_bytes(wires: Wires) -> None:
    binder, connector = wires.bind(), wires.connect()
    meet(wires, binder, connector)
    before = connector.statistics()
    connector.send(connector.peers[0], Abort(1))
    after = connector.statistics()
    assert after.messages_out == before.messages_out + 1
    assert after.bytes_out > before.bytes_out
    assert EngineStatus not in TEXT.up
    assert {Credit, Goodbye}.isdisjoint(TEXT.up)
