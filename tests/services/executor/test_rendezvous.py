"""Members of a group meet once per life; whoever comes late, twice or with other options stays outside; an end is heard
at once, whatever else a process does."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from protocol.config import Config
from protocol.errors import ConfigError, LinkError
from protocol.groups import Place
from services.executor import rendezvous as module
from services.executor.rendezvous import HELLO, Bond, Life, Rendezvous, host_and_port, is_file, keep_alive, rendezvous

SECONDS = 30.0  # that anything may take
SHARED = 77


class Told:
    """A `Stop` that a test gives."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.asked = False

    def fileno(self) -> int:
        return self.reader

    def tell(self) -> None:
        self.asked = True
        os.write(self.writer, b"x")

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def stop() -> Iterator[Told]:
    made = Told()
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(params=["file", "tcp"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "group-0.sock") if request.param == "file" else free_address()


def start(threads: ThreadPoolExecutor, where: str, member: int, size: int, stop: Told, shared: int = SHARED):
    return threads.submit(Rendezvous(where, member, size, shared).meet, stop)


def met(found: Future) -> tuple[Life, Bond]:
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


def test_one_that_ends_while_it_waits_is_replaced(where: str, threads: ThreadPoolExecutor, stop: Told) -> None:
    first = start(threads, where, 0, 3, stop)
    gone = connected(where)
    gone.sendall(HELLO.pack(1, SHARED))
    gone.close()
    others = [start(threads, where, member, 3, stop) for member in (1, 2)]
    for _, bond in (met(first), *(met(other) for other in others)):
        bond.close()


@pytest.mark.parametrize("hello", [HELLO.pack(5, SHARED), HELLO.pack(0, SHARED), b"short"])
def test_strangers_are_not_admitted(where: str, hello: bytes, threads: ThreadPoolExecutor, stop: Told) -> None:
    first = start(threads, where, 0, 2, stop)
    with connected(where) as stranger:
        stranger.sendall(hello)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""
    second = start(threads, where, 1, 2, stop)
    for _, bond in (met(first), met(second)):
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
        Rendezvous(str(tmp_path / "missing" / "x.sock"), 0, 2, SHARED).meet(stop)


def connected(where: str) -> socket.socket:
    """A connection to the first member, once it listens."""
    one = Rendezvous(where, 1, 2, SHARED)
    while (link := one._connect()) is None:
        select.select([], [], [], 0.01)
    return link


def watched(bond: Bond, stop: Told, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Thread, threading.Event, list]:
    left: list[str] = []
    monkeypatch.setattr(module, "leave", lambda: left.append("left"))
    done = threading.Event()
    thread = threading.Thread(target=bond.watch, args=(stop, done))
    thread.start()
    return thread, done, left


def test_a_broken_bond_ends_the_process(monkeypatch: pytest.MonkeyPatch, stop: Told) -> None:
    ours, theirs = socket.socketpair()
    thread, _, left = watched(Bond([ours]), stop, monkeypatch)
    theirs.close()
    thread.join(SECONDS)
    assert left == ["left"]
    ours.close()


def test_unless_it_is_told_to_end_itself(monkeypatch: pytest.MonkeyPatch, stop: Told) -> None:
    ours, theirs = socket.socketpair()
    stop.tell()
    thread, _, left = watched(Bond([ours]), stop, monkeypatch)
    theirs.close()
    thread.join(SECONDS)
    assert left == []
    ours.close()


def test_or_has_done_all(monkeypatch: pytest.MonkeyPatch, stop: Told) -> None:
    ours, theirs = socket.socketpair()
    thread, done, left = watched(Bond([ours]), stop, monkeypatch)
    done.set()
    thread.join(SECONDS)
    assert left == []
    theirs.close()
    ours.close()


def test_where_a_replicas_members_meet(tmp_path: Path) -> None:
    config = Config()
    model = msgspec.structs.replace(config.model, tensor_parallel_size=2, pipeline_parallel_size=2)
    run = msgspec.structs.replace(config.run, run_dir=str(tmp_path))
    config = msgspec.structs.replace(config, model=model, run=run)
    found = rendezvous(config, Place(1, 1, 0))
    assert (found._where, found._member, found._size) == (str(tmp_path / "group-1.sock"), 2, 4)
    executor = msgspec.structs.replace(config.executor, rendezvous="tcp://[::1]:29500")
    found = rendezvous(msgspec.structs.replace(config, executor=executor), Place(3, 0, 1))
    assert host_and_port(found._where) == ("::1", 29503)


def test_hosts_ends_are_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as link:
        keep_alive(link)
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
