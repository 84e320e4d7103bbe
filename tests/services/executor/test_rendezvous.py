"""Members of a group meet once per generation. A member that comes late, twice, or with other options or keys stays
outside, and what else connects holds nobody up."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest

from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError, LinkError
from penstock.protocol.groups import Place
from penstock.services.executor.rendezvous import (
    Generation,
    Member,
    Rendezvous,
    accepted,
    host_and_port,
    is_file,
    key,
    rendezvous,
    stores,
)
from penstock.services.links.curve import new_keys, write_keys
from tests.services.executor.test_peer_liveness import Told

SECONDS = 60.0  # that anything may take
OPTIONS = 77
KEYS = "the public key of all hosts"


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
    return str(tmp_path / "group-0") if request.param == "file" else free_address()


def member_of(where: str, member: int, size: int, options: int = OPTIONS, keys: str = KEYS, replica: int = 0):
    return Rendezvous(where, member, size, Member(replica, options, "" if is_file(where) else keys))


def start(threads: ThreadPoolExecutor, where: str, member: int, size: int, stop: Told, **other):
    return threads.submit(member_of(where, member, size, **other).meet, stop)


def meet(threads: ThreadPoolExecutor, where: str, members: list[int], stop: Told) -> list[Generation]:
    """All members of a group, in the order of their start."""
    return [future.result(SECONDS) for future in [start(threads, where, one, len(members), stop) for one in members]]


def end(*generations: Generation) -> None:
    """As their processes' ends do; a store ends with its last reference."""
    for generation in generations:
        generation.liveness.close()


def finish(*futures: Future) -> None:
    end(*(future.result(SECONDS) for future in futures))


@pytest.mark.parametrize("size", [2, 4])
def test_all_members_hear_of_the_same_generation(
    where: str, size: int, threads: ThreadPoolExecutor, stop: Told
) -> None:
    found = meet(threads, where, [*reversed(range(size))], stop)
    assert len({generation.name for generation in found}) == 1
    assert not any(generation.liveness.broken(0.0) for generation in found)
    assert {generation.liveness.address for generation in found} == {"127.0.0.1"}
    found[0].store.set("said", "by one")
    assert [generation.store.get("said") for generation in found] == [b"by one"] * size
    end(*found)


def test_every_generation_has_a_name_and_a_store_of_its_own(
    where: str, threads: ThreadPoolExecutor, stop: Told
) -> None:
    names = set()
    for _ in range(3):
        found = meet(threads, where, [0, 1], stop)
        assert not found[1].store.check(["said"])
        found[0].store.set("said", "in this generation")
        names.add(found[0].name)
        end(*found)
        del found
    assert len(names) == 3
    assert len(stores(where)) == is_file(where), "those of generations that are over are gone"


def test_an_end_reaches_all_through_the_first_member(where: str, threads: ThreadPoolExecutor, stop: Told) -> None:
    first, second, third = (generation.liveness for generation in meet(threads, where, [0, 1, 2], stop))
    third.close()
    assert first.broken(SECONDS)
    assert not second.broken(0.0)
    first.close()  # as its process would end
    assert second.broken(SECONDS)
    second.close()


def test_a_late_member_waits_for_the_next_generation(where: str, threads: ThreadPoolExecutor, stop: Told) -> None:
    old = meet(threads, where, [0, 1], stop)
    late = start(threads, where, 1, 2, stop)
    select.select([], [], [], 0.5)
    assert not late.done()
    name = old[0].name
    end(*old)
    del old
    again = start(threads, where, 0, 2, stop).result(SECONDS)
    assert late.result(SECONDS).name == again.name != name
    end(again, late.result())


def test_a_store_that_is_removed_at_this_moment_holds_nobody_up(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """By itself torch waits five minutes for its file to come back."""
    (tmp_path / "group-0-old.store").touch()
    store, _ = member_of(str(tmp_path / "group-0"), 1, 2)._find()
    stores(str(tmp_path / "group-0"))[0].unlink()
    with pytest.raises(RuntimeError):
        threads.submit(store.check, ["generation"]).result(SECONDS)


def test_what_a_killed_group_left_behind_misleads_nobody(tmp_path: Path, threads, stop: Told) -> None:
    """Its store says that the group had other options, and that its generation has begun."""
    where = str(tmp_path / "group-0")
    old = [start(threads, where, member, 2, stop, options=1).result for member in (0, 1)]
    end(*(wait(SECONDS) for wait in old))
    assert len(stores(where)) == 1
    early = start(threads, where, 1, 2, stop)
    select.select([], [], [], 0.5)
    assert not early.done()
    finish(start(threads, where, 0, 2, stop), early)


def test_other_options_are_refused_with_words(
    where: str, threads: ThreadPoolExecutor, stop: Told, caplog: pytest.LogCaptureFixture
) -> None:
    first = start(threads, where, 0, 2, stop)
    with pytest.raises(LinkError, match="executor 1 was started with other model options"):
        start(threads, where, 1, 2, stop, options=78).result(SECONDS)
    finish(first, start(threads, where, 1, 2, stop))
    assert [record.getMessage() for record in caplog.records] == ["refused"], "once for each process that tries"


@pytest.mark.parametrize("member", [0, 1])
def test_a_waiting_member_can_be_told_to_end(where: str, member: int, threads: ThreadPoolExecutor, stop: Told) -> None:
    waiting = start(threads, where, member, 2, stop)
    stop.tell()
    assert waiting.result(SECONDS) is None


def test_a_joined_member_can_be_told_to_end(where: str, threads: ThreadPoolExecutor, stop: Told) -> None:
    waiting = [start(threads, where, member, 3, stop) for member in (0, 1)]
    select.select([], [], [], 0.5)
    stop.tell()
    assert [one.result(SECONDS) for one in waiting] == [None, None]


@pytest.mark.parametrize("where", ["missing/group-0", "tcp://192.0.2.77:29500"])
def test_where_nobody_can_listen_is_an_option_to_mend(where: str, tmp_path: Path, stop: Told) -> None:
    with pytest.raises(ConfigError, match=r"--rendezvous.*it cannot be listened at"):
        member_of(where if not is_file(where) else str(tmp_path / where), 0, 2).meet(stop)


def test_the_store_listens_at_its_address_alone(threads: ThreadPoolExecutor, stop: Told) -> None:
    where = free_address()
    first = start(threads, where, 0, 2, stop)
    with connected(where):
        listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    port = f":{host_and_port(where)[1]:04X}"
    addresses = [words[1] for words in map(str.split, listening.splitlines()) if words[3] == "0A" and port in words[1]]
    assert addresses == [f"0100007F{port}"]
    finish(first, start(threads, where, 1, 2, stop))


def connected(where: str) -> socket.socket:
    """A connection to the first member's store, once it listens."""
    while True:
        try:
            return socket.create_connection(host_and_port(where), SECONDS)
        except ConnectionRefusedError:
            select.select([], [], [], 0.01)


def joined(where: str, member: int) -> socket.socket:
    """The first member's connection to one that has joined and does nothing else."""
    one = member_of(where, member, 3)
    while (found := one._find()) is None:
        select.select([], [], [], 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        record = msgspec.structs.replace(one._me, id="abc", address=listener.getsockname())
        found[0].set(key(member), msgspec.json.encode(record))
        listener.settimeout(SECONDS)
        link = accepted(listener, "abc")
    assert link is not None
    return link


def test_a_member_that_ends_while_it_waits_is_replaced(where: str, threads: ThreadPoolExecutor, stop: Told) -> None:
    first = start(threads, where, 0, 3, stop)
    while True:  # until the store is open
        try:
            joined(where, 1).close()
            break
        except OSError:
            select.select([], [], [], 0.01)
    finish(first, *(start(threads, where, member, 3, stop) for member in (1, 2)))


def test_a_member_that_ends_while_the_last_one_joins_is_in_no_generation(
    where: str, threads: ThreadPoolExecutor, stop: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = Rendezvous._admit

    def admit_and_lose(self: Rendezvous, member: int, record: Member) -> socket.socket | None:
        if member == 2:
            while links:
                links.pop().close()
        return admit(self, member, record)

    monkeypatch.setattr(Rendezvous, "_admit", admit_and_lose)
    first = start(threads, where, 0, 3, stop)
    links = []
    while not links:  # until the store is open
        with suppress(OSError):
            links.append(joined(where, 1))
    last = start(threads, where, 2, 3, stop)
    while links:
        select.select([], [], [], 0.01)
    finish(first, start(threads, where, 1, 3, stop), last)


def test_a_second_process_of_a_member_waits_for_the_end_of_the_first(
    where: str, threads: ThreadPoolExecutor, stop: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit, admitted = Rendezvous._admit, threading.Event()

    def tell(self: Rendezvous, member: int, record: Member) -> socket.socket | None:
        link = admit(self, member, record)
        admitted.set()
        return link

    monkeypatch.setattr(Rendezvous, "_admit", tell)
    first = start(threads, where, 0, 3, stop)
    before = start(threads, where, 1, 3, stop)
    assert admitted.wait(SECONDS)
    again = start(threads, where, 1, 3, stop)
    finish(first, before, start(threads, where, 2, 3, stop))
    assert not again.done()


def test_members_of_other_groups_are_sent_away_with_words(where: str, threads: ThreadPoolExecutor, stop: Told) -> None:
    first = start(threads, where, 0, 2, stop)
    with pytest.raises(LinkError, match=r"executor 1 of replica 1 .* give all the same --rendezvous"):
        start(threads, where, 1, 2, stop, replica=1).result(SECONDS)
    finish(first, start(threads, where, 1, 2, stop))


def test_other_keys_are_refused_with_words_on_both_sides(
    threads: ThreadPoolExecutor, stop: Told, caplog: pytest.LogCaptureFixture
) -> None:
    where = free_address()
    first = start(threads, where, 0, 2, stop)
    with pytest.raises(LinkError, match=r"has other link keys than executor 1 .* the same file as --link-keys"):
        start(threads, where, 1, 2, stop, keys="another deployment's").result(SECONDS)
    finish(first, start(threads, where, 1, 2, stop))
    (reason,) = [record.fields["reason"] for record in caplog.records if record.getMessage() == "refused"]
    assert "has other link keys than executor 1" in reason


@pytest.mark.parametrize("data", [b"", b"short", b"GET / HTTP/1.1\r\n\r\n" * 4, bytes(200)])
def test_what_else_connects_holds_nobody_up(data: bytes, threads: ThreadPoolExecutor, stop: Told) -> None:
    """To the store, and to a member that waits for the first one."""
    where = free_address()
    first = start(threads, where, 0, 2, stop)
    with ExitStack() as links:
        for _ in range(8):
            links.enter_context(connected(where)).sendall(data)
        finish(first, start(threads, where, 1, 2, stop))


@pytest.mark.parametrize("data", [b"", b"short", b"another id, as long as it has to be"])
def test_a_connection_without_the_members_id_is_closed(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as link:
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        assert accepted(listener, "an id that nobody else has seen....") is None


def test_where_a_replicas_members_meet(tmp_path: Path) -> None:
    config = Config()
    model = msgspec.structs.replace(config.model, tensor_parallel_size=2, pipeline_parallel_size=2)
    run = msgspec.structs.replace(config.run, run_dir=str(tmp_path))
    config = msgspec.structs.replace(config, model=model, run=run)
    found = rendezvous(config, Place(1, 1, 0))
    assert (found._where, found._member, found._size) == (str(tmp_path / "group-1"), 2, 4)
    keys, pair = tmp_path / "link.keys", new_keys()
    write_keys(keys, pair)
    executor = msgspec.structs.replace(config.executor, rendezvous="tcp://[::1]:29500")
    links = msgspec.structs.replace(config.links, link_keys=str(keys))
    found = rendezvous(msgspec.structs.replace(config, executor=executor, links=links), Place(3, 0, 1))
    assert host_and_port(found._where) == ("::1", 29503)
    assert (found._me.replica, found._me.keys) == (3, pair.public.decode())
