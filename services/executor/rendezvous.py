"""How the executors of a group find one another.

The first member listens, the others come to it and each proves to the other that it has the same keys
(services/executor/handshake.py); when all have come their group begins its life, and nobody can join any more. So a
member that was started again waits for the next life, and never meets members of an older one. The connections stay
open: by them members notice one another's ends (services/executor/peer_liveness.py).

gloo and NCCL use the network interface over which the members met. By themselves they choose one by the host's name or
by the order of interfaces, which may lead nowhere.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.protocol.addresses import read_address
from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError, LinkError
from penstock.protocol.groups import Place, group_size
from penstock.protocol.links import shared_hash
from penstock.services.executor.handshake import Challenge, Generation, Member, Refusal, Response
from penstock.services.executor.peer_liveness import PeerLiveness, keep_alive
from penstock.services.links.curve import read_keys
from penstock.services.supervisor import logs
from penstock.services.supervisor.process import Stop
from penstock.services.supervisor.sd_notify import progress

log = logging.getLogger(__name__)

RETRY = 0.1  # seconds between tries to reach the first member
HELLO_SECONDS = 10.0  # that one who has connected may take to prove who it is
MOST_PENDING = 64  # connections that have not done so; of more the oldest is closed
WARN_SECONDS = 10.0  # between words in the log about those who are refused
CHUNK = 4096  # bytes read at once
Come = dict[int, tuple[socket.socket, Challenge]]  # members that have proved themselves, by number
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SIOCGIFCONF = 0x8912  # netdevice(7)
IFCONF = struct.Struct("@iP")  # bytes of a buffer, its address
IFREQ = struct.Struct("@16s2x2x4s16x")  # an interface's name and a sockaddr_in: family, port, address, padding
MOST_ADDRESSES = 4096
IF_INET6 = Path("/proc/net/if_inet6")  # proc(5)


class RendezvousStatistics(msgspec.Struct, frozen=True):
    """Of the first member: connections that were refused since it listens, and now those that have proved nothing."""

    refused: int
    pending: int


@dataclass(slots=True)
class Pending:
    """A connection that has not proved itself."""

    challenge: Challenge
    peer: str  # its address, for the log
    until: float  # monotonic seconds


class Rendezvous:
    """One member's part in the beginning of a life. `where` is a socket file, or tcp://host:port for several hosts;
    `secret` is what all members have, and empty at a file."""

    def __init__(self, where: str, member: int, size: int, shared: int, secret: bytes = b"", replica: int = 0) -> None:
        assert is_file(where) or secret, "the options were checked"
        self._where = where
        self._member = member
        self._size = size
        self._shared = shared
        self._secret = secret
        self._replica = replica
        self._pending: dict[socket.socket, Pending] = {}
        self._refused = 0
        self._warned = float("-inf")

    def meet(self, stop: Stop) -> tuple[Generation, PeerLiveness] | None:
        """Wait until all members have come; None: we were told to end.

        Raises LinkError when this member was started with other options or keys, ConfigError where nobody can listen.
        """
        return self._gather(stop) if self._member == 0 else self._join(stop)

    def statistics(self) -> RendezvousStatistics:
        return RendezvousStatistics(self._refused, len(self._pending))

    def _gather(self, stop: Stop) -> tuple[Generation, PeerLiveness] | None:
        listener = self._listen()
        come: Come = {}
        try:
            while len(come) < self._size - 1:
                links = [link for link, _ in come.values()]
                readable = select.select([listener, *self._pending, *links], [], [], RETRY)[0]
                if stop.asked:
                    PeerLiveness(links).close()
                    return None
                for number, (link, _) in tuple(come.items()):
                    if link in readable:  # it has ended before the life began; its successor will come
                        come.pop(number)[0].close()
                for link in tuple(self._pending):
                    if link in readable:
                        self._hear(link, come)
                if listener in readable:
                    self._accept(listener)
                self._expire()
            life = Generation(secrets.token_hex(8), 0 if is_file(self._where) else free_port(listener))
            for link, challenge in come.values():
                link.setblocking(True)
                with suppress(OSError):  # it has ended at this very moment, as the bond will say
                    link.sendall(challenge.seal(life))
        finally:
            listener.close()
            for link in tuple(self._pending):
                self._drop(link)
            if is_file(self._where):
                Path(self._where).unlink(missing_ok=True)
        return life, PeerLiveness([link for link, _ in come.values()])

    def _accept(self, listener: socket.socket) -> None:
        try:
            link, peer = listener.accept()
        except OSError:
            return  # it has gone again
        link.setblocking(False)
        keep_alive(link)
        if len(self._pending) >= MOST_PENDING:
            self._refuse(next(iter(self._pending)), "too many come at once")
        peer = str(peer[0]) if peer else "this machine"
        self._pending[link] = Pending(Challenge(self._secret), peer, time.monotonic() + HELLO_SECONDS)

    def _hear(self, link: socket.socket, come: Come) -> None:
        """Go on with one who has not proved itself; one that has is taken if it is a member that has not come yet."""
        challenge = self._pending[link].challenge
        try:
            data = link.recv(CHUNK)
            if not data:
                self._refuse(link, "it left before it had proved that it has our link keys")
                return
            link.sendall(challenge.feed(data))
        except BlockingIOError:
            return
        except OSError:
            self._drop(link)
            return
        if challenge.fault:
            self._refuse(link, challenge.fault)
        elif challenge.proved:
            self._admit(link, challenge, come)

    def _admit(self, link: socket.socket, challenge: Challenge, come: Come) -> None:
        guest = challenge.guest
        assert guest is not None
        if reason := self._refusal(guest):
            with suppress(OSError):
                link.sendall(challenge.seal(Refusal(reason)))
            self._refuse(link, reason)
        elif guest.member in come:
            self._drop(link)  # its predecessor's end has not been heard of yet; it comes again
        else:
            del self._pending[link]
            come[guest.member] = link, challenge
            progress(f"waiting for {self._size - 1 - len(come)} more executors of the group")

    def _refusal(self, guest: Member) -> str:
        """Why one who has our keys is no member of this group; empty for one that is."""
        if guest.shared != self._shared:
            return (
                f"executor {guest.member} was started with other model options than the first of its group; give both "
                "the same (compare `penstock config` on each side)"
            )
        if guest.replica != self._replica or not 0 < guest.member < self._size:
            return (
                f"executor {guest.member} of replica {guest.replica} came to where replica {self._replica} meets; give "
                "all the same --rendezvous and let two processes have no number twice"
            )
        return ""

    def _expire(self) -> None:
        now = time.monotonic()
        for link, pending in tuple(self._pending.items()):
            if now >= pending.until:
                self._refuse(link, "it said nothing for too long")

    def _refuse(self, link: socket.socket, reason: str) -> None:
        """Somebody came who is no member."""
        self._refused += 1
        if (now := time.monotonic()) - self._warned >= WARN_SECONDS:
            self._warned = now
            peer = self._pending[link].peer
            logs.warning(log, "refused", address=peer, reason=reason, refused=self._refused)
        self._drop(link)

    def _drop(self, link: socket.socket) -> None:
        del self._pending[link]
        link.close()

    def _listen(self) -> socket.socket:
        """Raises ConfigError where nobody can."""
        try:
            if not is_file(self._where):
                host, port = host_and_port(self._where)
                family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                return socket.create_server(address[:2], family=family, backlog=MOST_PENDING)
            Path(self._where).unlink(missing_ok=True)
            with ExitStack() as failing:
                listener = failing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                listener.bind(self._where)
                listener.listen(MOST_PENDING)
                failing.pop_all()
                return listener
        except OSError as error:
            raise ConfigError("--rendezvous", self._where, f"it cannot be listened at: {error.strerror}") from error

    def _join(self, stop: Stop) -> tuple[Generation, PeerLiveness] | None:
        progress("waiting for the first executor of the group")
        while not stop.asked:
            link = self._connect()
            if link is not None:
                response = Response(self._secret, Member(self._replica, self._member, self._shared))
                with suppress(OSError):
                    self._introduce(link, response, stop)
                if isinstance(response.told, Generation):
                    return response.told, PeerLiveness([link])
                link.close()
                if isinstance(response.told, Refusal):
                    raise LinkError(response.told.reason)
                if response.fault:
                    raise LinkError(
                        f"who listens at {self._where} has other link keys than executor {self._member} of its group; "
                        "give all hosts the same file as --link-keys, made once by `penstock keys`"
                    )
            select.select([stop.fileno()], [], [], RETRY)
        return None

    def _connect(self) -> socket.socket | None:
        """To the first member, if it listens."""
        if not is_file(self._where):
            try:
                return socket.create_connection(host_and_port(self._where), HELLO_SECONDS)
            except OSError:
                return None
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(self._where)
        except OSError:
            link.close()
            return None
        return link

    def _introduce(self, link: socket.socket, response: Response, stop: Stop) -> None:
        """Say who we are, hear who the other is, and wait for the beginning; less where the first member ends
        meanwhile, or never says anything."""
        keep_alive(link)
        link.settimeout(None)
        link.sendall(response.hello)
        until = time.monotonic() + HELLO_SECONDS
        while response.told is None and not response.fault and not stop.asked:
            if not select.select([link], [], [], RETRY)[0]:
                if not response.answered and time.monotonic() >= until:
                    return
                continue
            data = link.recv(CHUNK)
            if not data:
                return
            if answer := response.feed(data):
                link.sendall(answer)


def rendezvous(config: Config, place: Place) -> Rendezvous:
    """Of the executor at a place, in its replica's group. Of a given address replica r has the r-th port.

    Raises ConfigError for a file of keys that cannot be used.
    """
    model = config.model
    where, secret = config.executor.rendezvous, b""
    if where:
        where = str(read_address("--rendezvous", where).after(place.replica))
        secret = read_keys(config.links.link_keys).derived("rendezvous")
    else:
        where = str(Path(config.run.run_dir) / f"group-{place.replica}.sock")
    member = place.stage * model.tensor_parallel_size + place.rank
    return Rendezvous(where, member, group_size(model), shared_hash(model), secret, place.replica)


def is_file(where: str) -> bool:
    return not where.startswith("tcp://")


def host_and_port(where: str) -> tuple[str, int]:
    found = read_address("--rendezvous", where)
    return found.bare, found.port


def free_port(listener: socket.socket) -> int:
    """One that nobody listens at now, at the address of this listener."""
    with socket.create_server((listener.getsockname()[0], 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def choose(address: str, environ: MutableMapping[str, str] = os.environ) -> str:
    """Have gloo and NCCL use the interface with this address, unless the operator has named one; its name, or nothing
    where no interface has it."""
    name = interface(address)
    for variable in VARIABLES if name else ():
        environ.setdefault(variable, name)
    return name


def interface(address: str) -> str:
    """Name of the interface with this IPv4 or IPv6 address; empty where none has it."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    wanted = getattr(wanted, "ipv4_mapped", None) or wanted
    return next((name for found, name in (*ipv4_addresses(), *ipv6_addresses()) if found == wanted), "")


def ipv4_addresses() -> Iterator[tuple[ipaddress.IPv4Address, str]]:
    """Every IPv4 address of this host, and the interface that has it. An alias is told by its interface's name."""
    buffer = array.array("B", bytes(IFREQ.size * MOST_ADDRESSES))
    place, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        length, _ = IFCONF.unpack(fcntl.ioctl(asking, SIOCGIFCONF, IFCONF.pack(size, place)))
    for name, packed in IFREQ.iter_unpack(buffer[:length].tobytes()):
        yield ipaddress.IPv4Address(packed), name.rstrip(b"\0").decode().partition(":")[0]


def ipv6_addresses(path: Path = IF_INET6) -> Iterator[tuple[ipaddress.IPv6Address, str]]:
    """The same of IPv6, where the kernel has it."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        digits, _, _, _, _, name = line.split()
        yield ipaddress.IPv6Address(int(digits, 16)), name
