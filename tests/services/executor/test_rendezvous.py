"""Members of a group meet once per life; whoever comes late, twice, with other options or other keys stays outside, and
nobody outside holds up those who belong there."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError, LinkError
from penstock.protocol.groups import Place
from penstock.services.executor import rendezvous as module
from penstock.services.executor.handshake import ANSWER, HELLO, PROOF, Challenge, Generation, Member, Response
from penstock.services.executor.peer_liveness import PeerLiveness
from penstock.services.executor.rendezvous import MOST_PENDING, Rendezvous, host_and_port, is_file, rendezvous
from penstock.services.links.curve import new_keys, write_keys
from tests.services.executor.test_peer_liveness import Told

SECONDS = 60.0  # that anything may take
SHARED = 77
SECRET = b"what all hosts have"


@pytest.fixture
def stop() -> Iterator[Told]:
    made = Told()
    yield made
    made.close()


@pytest.fixture
def threads(stop: Told) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool
        stop.tell()  # whoever still waits


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(params=["file", "tcp"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "group-0.sock") if request.param == "file" else free_address()


def member_of(where: str, member: int, size: int, shared: int = SHARED, secret: bytes = SECRET, replica: int = 0):
    return Rendezvous(where, member, size, shared, b"" if is_file(where) else secret, replica)


def start(threads: ThreadPoolExecutor, where: str, member: int, size: int, stop: Told, **other):
    return threads.submit(member_of(where, member, size, **other).meet, stop)


def met(found: Future) -> tuple[Generation, PeerLiveness]:
    return found.result(SECONDS)


@pytest.mark.parametrize("size", [2, 4])
def test_all_members_hear_of_the_same_life(where: str, size: int, threads: ThreadPoolExecutor, stop: Told) -> None:
    found = [met(one) for one in [start(threads, where, member, size, stop) for member in reversed(range(size))]]
    assert len({life.name for life, _ in found}) == 1
    assert {bool(life.port) for life, _ in found} == {not is_file(where)}
    assert not any(bond.broken(0.0) for _, bond in found)
    for _, bond in found:
        bond.close()


def test_every_life_has_a_name_of_its_own(where: str, threads: ThreadPoolExecutor, stop: Told) -> None:
    names = set()
    for _ in range(3):
        found = [met(one) for one in [start(threads, where, member, 2, stop) for member in (0, 1)]]
        names.add(found[0][0].name)
        for _, bond in found:
            bond.close()
    assert len(names) == 3


def test_an_end_breaks_the_bond_of_all_through_the_first(where: str, threads: ThreadPoolExecutor, stop: Told) -> None:
    found = [met(one) for one in [start(threads, where, member, 3, stop) for member in range(3)]]
    first, second, third = (bond for _, bond in found)
    third.close()
    assert first.broken(SECONDS)
    assert not second.broken(0.0)
    first.close()  # as its process would end
    assert second.broken(SECONDS)
    second.close()


def test_who_comes_late_waits_for_the_next_life(where: str, threads: ThreadPoolExecutor, stop: Told) -> None:
    old = [met(one) for one in [start(threads, where, member, 2, stop) for member in (0, 1)]]
    late = start(threads, where, 1, 2, stop)
    assert not late.done()
    for _, bond in old:
        bond.close()
    again = met(start(threads, where, 0, 2, stop))
    assert met(late)[0] == again[0] != old[0][0]
    for _, bond in (again, met(late)):
        bond.close()


def test_other_options_are_refused_with_words(where: str, threads: ThreadPoolExecutor, stop: Told) -> None:
    first = start(threads, where, 0, 2, stop)
    with pytest.raises(LinkError, match="executor 1 was started with other model options"):
        start(threads, where, 1, 2, stop, shared=78).result(SECONDS)
    stop.tell()
    assert first.result(SECONDS) is None


@pytest.mark.parametrize("member", [0, 1])
def test_who_waits_can_be_told_to_end(where: str, member: int, threads: ThreadPoolExecutor, stop: Told) -> None:
    waiting = start(threads, where, member, 2, stop)
    stop.tell()
    assert waiting.result(SECONDS) is None


def test_where_nobody_can_listen_is_an_option_to_mend(tmp_path: Path, stop: Told) -> None:
    with pytest.raises(ConfigError, match="--rendezvous"):
        member_of(str(tmp_path / "missing" / "x.sock"), 0, 2).meet(stop)


def connected(where: str) -> socket.socket:
    """A connection to the first member, once it listens. Whoever waits at it waits for long enough."""
    one = member_of(where, 1, 2)
    while (link := one._connect()) is None:
        select.select([], [], [], 0.01)
    link.settimeout(SECONDS)
    return link


def introduced(where: str, member: int, shared: int = SHARED) -> socket.socket:
    """A connection of one that has proved itself."""
    link = connected(where)
    response = Response(b"" if is_file(where) else SECRET, Member(0, member, shared))
    link.sendall(response.hello)
    link.sendall(response.feed(exactly(link, ANSWER.size)))
    return link


def exactly(link: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = link.recv(count - len(found))
        assert more, "the other end has closed it"
        found += more
    return found


def closed(link: socket.socket) -> bool:
    """Whether the other end closes it; what it says before does not matter."""
    try:
        while link.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def finish(*futures: Future) -> None:
    for _, bond in [met(future) for future in futures]:
        bond.close()


def test_one_that_ends_while_it_waits_is_replaced(where: str, threads: ThreadPoolExecutor, stop: Told) -> None:
    first = start(threads, where, 0, 3, stop)
    introduced(where, 1).close()
    finish(first, *(start(threads, where, member, 3, stop) for member in (1, 2)))


def test_one_that_comes_twice_waits_for_its_predecessors_end(
    where: str, threads: ThreadPoolExecutor, stop: Told
) -> None:
    first = start(threads, where, 0, 3, stop)
    before = introduced(where, 1)
    with introduced(where, 1) as again:
        assert closed(again)
    before.close()
    finish(first, *(start(threads, where, member, 3, stop) for member in (1, 2)))


HELLOS = (b"short", b"GET / HTTP/1.1\r\n\r\n" * 4, HELLO.pack(b"PEN0", 0, 1, SHARED, bytes(32)))


@pytest.mark.parametrize("hello", HELLOS)
def test_strangers_are_not_admitted(where: str, hello: bytes, threads: ThreadPoolExecutor, stop: Told) -> None:
    first = start(threads, where, 0, 2, stop)
    with connected(where) as stranger:
        stranger.sendall(hello)
        stranger.shutdown(socket.SHUT_WR)
        assert closed(stranger)
    finish(first, start(threads, where, 1, 2, stop))


@pytest.mark.parametrize(("replica", "member"), [(0, 5), (0, 0), (1, 1)])
def test_members_of_other_groups_are_sent_away_with_words(
    where: str, replica: int, member: int, threads: ThreadPoolExecutor, stop: Told
) -> None:
    first = start(threads, where, 0, 2, stop)
    with connected(where) as link:
        response = Response(b"" if is_file(where) else SECRET, Member(replica, member, SHARED))
        link.sendall(response.hello)
        link.sendall(response.feed(exactly(link, ANSWER.size)))
        while response.told is None:
            response.feed(exactly(link, 1))
        assert "give all the same --rendezvous" in response.told.reason
    finish(first, start(threads, where, 1, 2, stop))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.lists(st.binary(max_size=200), min_size=1, max_size=6), hello=st.booleans())
def test_no_garbage_comes_in_or_holds_anybody_up(
    garbage: list[bytes], hello: bool, threads: ThreadPoolExecutor, stop: Told
) -> None:
    """With or without a hello before it that is right."""
    where = free_address()
    first = start(threads, where, 0, 2, stop)
    with ExitStack() as links:
        for data in garbage:
            link = links.enter_context(connected(where))
            link.sendall((Response(SECRET, Member(0, 1, SHARED)).hello if hello else b"") + data)
        finish(first, start(threads, where, 1, 2, stop))


def test_what_was_overheard_is_not_taken_again(threads: ThreadPoolExecutor, stop: Told) -> None:
    where = free_address()
    response = Response(SECRET, Member(0, 1, SHARED))
    said = response.feed(Challenge(SECRET).feed(response.hello))
    assert len(said) == PROOF
    first = start(threads, where, 0, 2, stop)
    with connected(where) as link:
        link.sendall(response.hello + said)
        assert closed(link)
    finish(first, start(threads, where, 1, 2, stop))


def test_slow_ones_hold_nobody_up_and_the_oldest_of_too_many_goes(
    threads: ThreadPoolExecutor, stop: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HELLO_SECONDS", SECONDS)
    where = free_address()
    meeting = member_of(where, 0, 2)
    first = threads.submit(meeting.meet, stop)
    with ExitStack() as links:
        slow = [links.enter_context(connected(where)) for _ in range(MOST_PENDING + 1)]
        slow[-1].sendall(Response(SECRET, Member(0, 1, SHARED)).hello[:7])
        assert closed(slow[0])
        assert meeting.statistics().refused == 1
        finish(first, start(threads, where, 1, 2, stop))
        assert all(closed(link) for link in slow), "they are nobody's any more"


def test_one_that_says_nothing_is_let_go(
    where: str, threads: ThreadPoolExecutor, stop: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HELLO_SECONDS", 0.2)
    first = start(threads, where, 0, 2, stop)
    with connected(where) as silent:
        assert closed(silent)
    monkeypatch.setattr(module, "HELLO_SECONDS", SECONDS)
    finish(first, start(threads, where, 1, 2, stop))


def test_other_keys_are_refused_with_words_on_both_sides(
    threads: ThreadPoolExecutor, stop: Told, caplog: pytest.LogCaptureFixture
) -> None:
    where = free_address()
    first = start(threads, where, 0, 2, stop)
    with pytest.raises(LinkError, match=r"has other link keys than executor 1 .* the same file as --link-keys"):
        start(threads, where, 1, 2, stop, secret=b"another deployment's").result(SECONDS)
    finish(first, start(threads, where, 1, 2, stop))
    reasons = [record.fields["reason"] for record in caplog.records if record.getMessage() == "refused"]
    assert reasons == ["it left before it had proved that it has our link keys"]


def test_an_address_without_keys_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        Rendezvous(free_address(), 0, 2, SHARED)


def test_where_a_replicas_members_meet(tmp_path: Path) -> None:
    config = Config()
    model = msgspec.structs.replace(config.model, tensor_parallel_size=2, pipeline_parallel_size=2)
    run = msgspec.structs.replace(config.run, run_dir=str(tmp_path))
    config = msgspec.structs.replace(config, model=model, run=run)
    found = rendezvous(config, Place(1, 1, 0))
    assert (found._where, found._member, found._size) == (str(tmp_path / "group-1.sock"), 2, 4)
    keys = tmp_path / "link.keys"
    write_keys(keys, new_keys())
    executor = msgspec.structs.replace(config.executor, rendezvous="tcp://[::1]:29500")
    links = msgspec.structs.replace(config.links, link_keys=str(keys))
    found = rendezvous(msgspec.structs.replace(config, executor=executor, links=links), Place(3, 0, 1))
    assert host_and_port(found._where) == ("::1", 29503)
    assert (found._replica, len(found._secret)) == (3, 32)
