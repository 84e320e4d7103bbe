"""What a message between two processes takes, there and back: `python -m benchmarks.links`.

Two processes with a port each, as those of a server have: over a socket file, and over TCP on loopback with keys and
encryption, as between hosts but for the network itself. One message at a time, each answered at once by one that
carries as many bytes as are asked for; both sides sleep in poll until something arrives, as loops at rest do. Prints
the median and the 99th percentile of the round trips in microseconds, and the CPU time of both processes for each: the
least of several rounds, in which the two ways take turns.
"""

from __future__ import annotations

import argparse
import resource
import socket as sockets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from penstock.protocol.config import LinksConfig
from penstock.protocol.errors import AddressError
from penstock.protocol.links import TEXT, Role
from penstock.protocol.messages import Abort, Rejected
from penstock.services.links.curve import new_keys, write_keys
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Link
from penstock.services.links.tcp import network_of

FIRST_PORT, LAST_PORT = 29_600, 29_700
WARM = 500  # round trips before those that count
TICK = 0.2  # seconds
ROOT = Path(__file__).parents[1]


class Trips(msgspec.Struct, frozen=True):
    """What was measured: microseconds."""

    median: float
    high: float  # the 99th percentile
    cpu: float  # of both processes, per round trip


@contextmanager
def opened(run_dir: Path, links: LinksConfig, *, binder: bool) -> Iterator[Link]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    network = network_of(context, links)
    if binder:
        port = Link.bind(context, TEXT, Identity(Role.TOKENIZER, 0, 1, 0), run_dir, network)
    else:
        port = Link.connect(context, TEXT, Identity(Role.API, 0, 1, 0), run_dir, network=network)
    try:
        yield port
    finally:
        port.close()
        context.term()


def echo(run_dir: Path, links: LinksConfig, size: int) -> None:
    """The other process: answers until its peer has gone, then prints the CPU seconds that it took."""
    with opened(run_dir, links, binder=True) as port:
        met, due = False, 0.0
        while port.peers or not met:
            if (now := time.monotonic()) >= due:
                port.tick(now)
                due = now + TICK
            for arrival in port.receive():
                met = True
                if isinstance(arrival.message, Abort):
                    port.send(arrival.peer, Rejected(id=arrival.message.id, status=400, message="x" * size))
            port.socket.poll(int(TICK * 1000))
    print(cpu_seconds())


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(run_dir: Path, links: LinksConfig, size: int, count: int) -> Trips:
    """Round trips with one other process."""
    words = ["--echo", str(run_dir), "--address", links.tokenizer_address, "--keys", links.link_keys]
    command = [sys.executable, "-m", "benchmarks.links", *words, "--sizes", str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        with opened(run_dir, links, binder=False) as port:
            while not port.peers:
                port.tick(time.monotonic())
                port.receive()
                port.socket.poll(5)
            trips(port, 0, WARM)
            before = cpu_seconds()
            took = sorted(trips(port, WARM, count))
            ours = (cpu_seconds() - before) / count
        assert child.stdout is not None
        theirs = float(child.stdout.read()) / (WARM + count)  # its start included: little, of many trips
    return Trips(statistics.median(took), took[int(count * 0.99)], (ours + theirs) * 1e6)


def trips(port: Link, first: int, count: int) -> list[float]:
    """Microseconds of each of so many."""
    took, due = [], 0.0
    for number in range(first, first + count):
        began = time.perf_counter()
        port.send(port.peers[0], Abort(number))
        while not any(isinstance(arrival.message, Rejected) for arrival in port.receive()):
            port.socket.poll(int(TICK * 1000))
        took.append((time.perf_counter() - began) * 1e6)
        if (now := time.monotonic()) >= due:
            port.tick(now)
            due = now + TICK
    return took


def least(rounds: Sequence[Trips]) -> Trips:
    """Of each figure by itself: what else the machine did only adds."""
    return Trips(*(min(values) for values in zip(*map(msgspec.structs.astuple, rounds), strict=True)))


def free_address() -> str:
    """One of loopback at which nobody listens now."""
    for port in range(FIRST_PORT, LAST_PORT):
        with sockets.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return f"tcp://127.0.0.1:{port}"
    raise AddressError("benchmarks.links", FIRST_PORT, f"no port up to {LAST_PORT} is free")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="20,4000", help="bytes of an answer, with commas")
    parser.add_argument("--count", type=int, default=20_000, help="round trips that count")
    parser.add_argument("--rounds", type=int, default=5, help="of which the least is told")
    parser.add_argument("--echo", default="", help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    parser.add_argument("--keys", default="", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    sizes = [int(word) for word in given.sizes.split(",")]
    if given.echo:
        echo(Path(given.echo), LinksConfig(tokenizer_address=given.address, link_keys=given.keys), sizes[0])
        return
    with tempfile.TemporaryDirectory(prefix="penstock-links-", dir="/tmp") as folder:
        keys = Path(folder) / "link.keys"
        write_keys(keys, new_keys())
        ways = {
            "socket file": LinksConfig(),
            "TCP with keys": LinksConfig(tokenizer_address=free_address(), link_keys=str(keys)),
        }
        print(f"{'link':16}{'bytes':>8}{'median':>10}{'p99':>10}{'CPU':>10}   (microseconds of a round trip)")
        for size in sizes:
            rounds = [
                {way: measure(Path(folder), links, size, given.count) for way, links in ways.items()}
                for _ in range(given.rounds)
            ]
            for way in ways:
                found = least([each[way] for each in rounds])
                print(f"{way:16}{size:8}{found.median:10.0f}{found.high:10.0f}{found.cpu:10.0f}", flush=True)


if __name__ == "__main__":
    main()
