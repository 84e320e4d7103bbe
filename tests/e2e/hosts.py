"""Two hosts on one machine: two network namespaces joined by a veth pair, and a server with parts on both.

Namespaces have no names: they live as long as a descriptor or a process of theirs, so that nothing of them can be left.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.services.links.curve import new_keys, write_keys
from penstock.services.supervisor.sd_notify import NoticeSocket
from tests.e2e.server import LIMIT, ONE_EACH, Server, descendants, end, serving

CLONE_NEWNET = 0x40000000  # unshare(2), setns(2)
MINE = "/proc/thread-self/ns/net"
ADDRESSES = ("10.99.0.1", "10.99.0.2")
PORTS = {"--scheduler-address": 7000, "--rendezvous": 7200}  # all are free in a namespace of one's own

FIRST = "api,tokenizer,scheduler,executor:0"  # what host A has


class Hosts:
    """Two namespaces, A and B, by number."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = tuple(descriptors)

    @contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """This thread, and what it starts, is on that host."""
        before = os.open(MINE, os.O_RDONLY | os.O_CLOEXEC)
        enter(self._descriptors[host])
        try:
            yield
        finally:
            enter(before)
            os.close(before)

    def cut(self) -> None:
        """From now on nothing reaches the other host, and nobody is told."""
        with self.inside(1):
            ip("link", "set", "wire", "down")

    def mend(self) -> None:
        with self.inside(1):
            ip("link", "set", "wire", "up")


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Skips the test where namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2) to join two namespaces with")
    with ExitStack() as held:
        descriptors = []
        for _ in ADDRESSES:
            descriptors.append(new_namespace())
            held.callback(os.close, descriptors[-1])
        hosts = Hosts(descriptors)
        try:
            with hosts.inside(0):
                there = f"/proc/{os.getpid()}/fd/{descriptors[1]}"
                ip("link", "add", "wire", "type", "veth", "peer", "name", "far")
                ip("link", "set", "far", "netns", there)
            with hosts.inside(1):
                ip("link", "set", "far", "name", "wire")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no veth pair can be made here: {error.stderr.decode().strip()}")
        for host, address in enumerate(ADDRESSES):
            with hosts.inside(host):
                ip("link", "set", "lo", "up")
                ip("address", "add", f"{address}/24", "dev", "wire")
                ip("link", "set", "wire", "up")
        yield hosts


def new_namespace() -> int:
    """A descriptor of a new network namespace, which another thread makes and leaves. Skips where that is forbidden."""
    found: list[int | OSError] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):
            found.append(OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno())))
        else:
            found.append(os.open(MINE, os.O_RDONLY | os.O_CLOEXEC))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    (one,) = found
    if isinstance(one, OSError):
        pytest.skip(f"no network namespace can be made here: {one.strerror}")
    return one


def enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@dataclass
class Worker:
    """`penstock serve` on a host, and what a test asks of it."""

    process: subprocess.Popen[bytes]
    notices: NoticeSocket
    log: Path
    run_dir: Path

    def executors(self) -> list[int]:
        """Pids, in the order of their numbers."""
        found = {}
        for pid in descendants(self.process.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"executor" in words:
                found[next(word for word in words if word.startswith(b"--index="))] = pid
        return [found[index] for index in sorted(found)]

    def logged(self, words: str, limit: float = LIMIT) -> None:
        """Wait until these words stand in the log."""
        deadline = time.monotonic() + limit
        while words not in (text := self.log.read_text()):
            assert time.monotonic() < deadline, f"{words!r} is not in the log:\n{text}"
            select.select([], [], [], 0.02)

    def ready(self, limit: float = LIMIT) -> None:
        """Wait until it says so."""
        deadline = time.monotonic() + limit
        while not any(notice.ready for notice in self.notices.receive()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            select.select([self.notices], [], [], 0.5)

    def end(self) -> int:
        """Tell it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT)


@contextmanager
def working(
    hosts: Hosts | None, folder: Path, *arguments: str, parts: str = "executor:1", host: int = 1
) -> Iterator[Worker]:
    """`penstock serve` with some parts on a host; it is not waited for. hosts: None: this machine is both."""
    folder.mkdir()
    notices, log, run_dir = NoticeSocket(folder / "notify.sock"), folder / "worker.log", folder / "run"
    command = [sys.executable, "-m", "penstock", "serve", "--parts", parts, "--run-dir", str(run_dir), *arguments]
    environment = {**os.environ, "NOTIFY_SOCKET": str(notices.path), "NO_COLOR": "1"}
    with log.open("wb") as out, nullcontext() if hosts is None else hosts.inside(host):
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        yield Worker(process, notices, log, run_dir)
    finally:
        end(process)
        notices.close()


@dataclass
class TwoHosts:
    """A server whose processes are on two hosts; the test runs on host A, where its clients are."""

    hosts: Hosts
    server: Server
    worker: Worker


def shared(keys: Path) -> tuple[str, ...]:
    """Options that both hosts are given."""
    addresses = [f"{option}=tcp://{ADDRESSES[0]}:{port}" for option, port in PORTS.items()]
    sizes = ("--device", "cpu", "--cpu-threads", "1", "--max-num-seqs", "32", *ONE_EACH)
    return (*sizes, *addresses, "--link-keys", str(keys))


@contextmanager
def serving_from_two(folder: Path, *arguments: str) -> Iterator[TwoHosts]:
    """api, tokenizer, scheduler and executor 0 on host A, executor 1 on host B; ready."""
    keys = folder / "link.keys"
    write_keys(keys, new_keys())
    options = (*arguments, *shared(keys))
    with (
        two_hosts() as hosts,
        working(hosts, folder / "b", *options) as worker,
        hosts.inside(0),
        serving(folder, *options, "--parts", FIRST) as server,
    ):
        yield TwoHosts(hosts, server, worker)
