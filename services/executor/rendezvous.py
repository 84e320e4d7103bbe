"""How the executors of a group meet: through torch's store, by torchelastic's rules.

The first member opens the store: a TCPStore at --rendezvous, or a FileStore in the run directory where all members are
on one machine. The others write their records into it. When all have joined, the first member writes the generation,
with the ids of its members, and nobody else can join it. A member that was started again waits for the next generation.
Every generation has a store of its own, because a group restarts as a whole: its first member ends with it.

A store does not report that a client has ended, and torchelastic's heartbeats take seconds to find out. So the first
member connects to each of the others, and both sides watch that connection (services/executor/peer_liveness.py).

torch's store authenticates nobody: its port, like those of NCCL and gloo, belongs on a private network. Comparing the
link keys only finds an operator's mistake.

Sources: PyTorch documentation, "Distributed communication package" and "Rendezvous" (torch.distributed.elastic).
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
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError, LinkError
from penstock.protocol.groups import Place, group_size
from penstock.protocol.links import read_address, shared_hash
from penstock.services.executor.peer_liveness import PeerLiveness, keep_alive
from penstock.services.links.curve import read_keys
from penstock.services.supervisor import logs
from penstock.services.supervisor.process import Stop
from penstock.services.supervisor.sd_notify import progress

log = logging.getLogger(__name__)

RETRY = 0.1  # seconds between looks at the store, and between attempts to reach it
STORE_SECONDS = 10.0  # of one operation of the store
CONNECT_SECONDS = 5.0
GONE_SECONDS = 1.0  # that torch waits for a store's file, should the first member remove it at this moment
ID_SECONDS = 1.0  # that a connection may take to send a member's id
LOOPBACK = "127.0.0.1"
GENERATION = "generation"  # key of the store
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SIOCGIFCONF = 0x8912  # netdevice(7)
IFCONF = struct.Struct("@iP")  # bytes of a buffer, its address
IFREQ = struct.Struct("@16s2x2x4s16x")  # an interface's name and a sockaddr_in: family, port, address, padding
MAX_ADDRESSES = 4096
IF_INET6 = Path("/proc/net/if_inet6")  # proc(5)


Record = TypeVar("Record")


class Member(msgspec.Struct, frozen=True):
    """A member's record in the store."""

    replica: int
    options: int  # hash of the shared options
    keys: str  # the public link key; empty on one machine
    id: str = ""  # a new one each time that it joins
    address: tuple[str, int] = ("", 0)  # where it waits for the first member's connection


class Roll(msgspec.Struct, frozen=True):
    """A generation in the store: its name and the ids of its members but the first."""

    name: str
    ids: tuple[str, ...]


@dataclass(frozen=True)
class Generation:
    """A group that has begun, as one of its members holds it."""

    name: str
    store: Store
    liveness: PeerLiveness


class Rendezvous:
    """One member's part in the beginning of a generation. `where` is tcp://host:port, or for members on one machine
    the path in front of `-NAME.store`."""

    def __init__(self, where: str, member: int, size: int, me: Member) -> None:
        self._where = where
        self._member = member
        self._size = size
        self._me = me
        self._file: Path | None = None  # of the store, where it is one
        self._refused: set[str] = set()  # ids that were logged

    def meet(self, stop: Stop) -> Generation | None:
        """Wait until all members have joined; None: this process was told to end.

        Raises LinkError when this member was started with other options or keys, ConfigError when the first member
        cannot open the store.
        """
        if self._member == 0:
            return self._lead(stop)
        progress("waiting for the first executor of the group")
        while not stop.asked:
            try:
                if (found := self._join(stop)) is not None:
                    return found
            except (OSError, RuntimeError) as error:  # torch's, too: the first member has ended, or does not listen yet
                logs.debug(log, "not_joined", reason=str(error).partition("\n")[0])
            readable(stop)
        return None

    def _lead(self, stop: Stop) -> Generation | None:
        store = self._open()
        write(store, key(0), self._me)
        joined: dict[int, tuple[str, socket.socket]] = {}  # a member's id and the connection to it
        while True:
            complete = len(joined) == self._size - 1
            ended = readable(stop, *(link for _, link in joined.values()), seconds=0.0 if complete else RETRY)
            if complete and not ended:
                break
            if stop.asked:
                PeerLiveness([link for _, link in joined.values()]).close()
                return None
            if self._file is not None:
                remove_others(self._file)
            for member, (_, link) in tuple(joined.items()):
                if link in ended:  # it has ended; its successor will join
                    joined.pop(member)[1].close()
            for member in range(1, self._size):
                if member not in joined and store.check([key(member)]):
                    record = read(store, key(member), Member)
                    if (admitted := self._admit(member, record)) is not None:
                        joined[member] = record.id, admitted
                        progress(f"waiting for {self._size - 1 - len(joined)} more executors of the group")
        roll = Roll(secrets.token_hex(8), tuple(found for found, _ in joined.values()))
        write(store, GENERATION, roll)
        return Generation(roll.name, store, PeerLiveness([link for _, link in joined.values()]))

    def _admit(self, member: int, record: Member) -> socket.socket | None:
        """A connection to a member that has joined; None for one that is refused, or has ended."""
        if record.id in self._refused:
            return None
        try:
            link = socket.create_connection(record.address, CONNECT_SECONDS)
        except OSError:
            return None
        keep_alive(link)
        link.settimeout(None)
        with suppress(OSError):  # it has ended, as the next look at the connection shows
            link.sendall(record.id.encode())
        if reason := self._refusal(member, self._me, record):
            self._refused.add(record.id)
            link.close()
            logs.warning(log, "refused", address=record.address[0], reason=reason, refused=len(self._refused))
            return None
        return link

    def _join(self, stop: Stop) -> Generation | None:
        """Join the generation that the first member prepares. None when it ends before, or when there is no store."""
        found = self._find()
        if found is None:
            return None
        store, host = found
        with ExitStack() as held:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = held.enter_context(socket.create_server((host, 0), family=family))
            me = msgspec.structs.replace(self._me, id=secrets.token_hex(16), address=listener.getsockname()[:2])
            write(store, key(self._member), me)
            link = self._connected(store, listener, me.id, stop)
            if link is None:
                return None
            held.enter_context(link)
            # Only now: a store in the run directory may be what a group of other options left behind.
            first = read(store, key(0), Member)
            if reason := self._refusal(self._member, first, me):
                raise LinkError(reason)
            while not readable(stop, link):  # the link is readable once the first member has ended
                if store.check([GENERATION]):
                    roll = read(store, GENERATION, Roll)
                    if me.id in roll.ids:
                        listener.close()
                        held.pop_all()
                        return Generation(roll.name, store, PeerLiveness([link]))
        return None

    def _connected(self, store: Store, listener: socket.socket, expected: str, stop: Stop) -> socket.socket | None:
        """The first member's connection; None when there is another store by now. Raises torch's error when the first
        member has ended."""
        while not stop.asked and self._current():
            if listener in readable(stop, listener) and (link := accepted(listener, expected)) is not None:
                return link
            store.check([GENERATION])
        return None

    def _open(self) -> Store:
        """The first member's store. Raises ConfigError when it cannot be opened."""
        try:
            if is_file(self._where):
                self._file = Path(f"{self._where}-{secrets.token_hex(8)}.store")
                self._file.touch(mode=0o600, exist_ok=False)
                return FileStore(str(self._file))
            host, port = host_and_port(self._where)
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            # By itself torch listens at all addresses of the host.
            listener = socket.create_server(address[:2], family=family)
        except OSError as error:
            raise ConfigError("--rendezvous", self._where, f"it cannot be listened at: {error.strerror}") from error
        return TCPStore(
            str(address[0]), port, is_master=True, timeout=timedelta(seconds=STORE_SECONDS), wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip

    def _find(self) -> tuple[Store, str] | None:
        """The store that the first member has opened, if any, and this host's address on the way to it."""
        if is_file(self._where):
            self._file = next(iter(stores(self._where)), None)
            if self._file is None:
                return None
            store: Store = FileStore(str(self._file))
            store.set_timeout(timedelta(seconds=GONE_SECONDS))
            return store, LOOPBACK
        # torch logs every attempt to connect with a stack trace, so find out first whether anybody listens.
        with socket.create_connection(host_and_port(self._where), CONNECT_SECONDS) as probe:
            here, (host, port, *_) = probe.getsockname()[0], probe.getpeername()
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS), wait_for_workers=False)
        return store, str(here)

    def _current(self) -> bool:
        """Whether the first member has not opened another store. A lost TCPStore raises torch's error by itself."""
        return self._file is None or stores(self._where) == [self._file]

    def _refusal(self, member: int, first: Member, record: Member) -> str:
        """Why a member cannot join the first one, in words that say which side to fix; empty if it can."""
        if record.keys != first.keys:
            return (
                f"the executor that listens at {self._where} has other link keys than executor {member} of its group; "
                "give all hosts the same file as --link-keys, made once by `penstock keys`"
            )
        if record.options != first.options:
            return (
                f"executor {member} was started with other model options than the first of its group; give both "
                "the same (compare `penstock config` on each side)"
            )
        if record.replica != first.replica:
            return (
                f"executor {member} of replica {record.replica} came to where replica {first.replica} meets; give "
                "all the same --rendezvous"
            )
        return ""


def rendezvous(config: Config, place: Place) -> Rendezvous:
    """Of the executor at a place, in its replica's group. At a given address replica r has the r-th port.

    Raises ConfigError for a file of keys that cannot be used.
    """
    model = config.model
    where, keys = config.executor.rendezvous, ""
    if where:
        where = str(read_address("--rendezvous", where).after(place.replica))
        keys = read_keys(config.links.link_keys).public.decode()
    else:
        where = str(Path(config.run.run_dir) / f"group-{place.replica}")
    member = place.stage * model.tensor_parallel_size + place.rank
    return Rendezvous(where, member, group_size(model), Member(place.replica, shared_hash(model), keys))


def key(member: int) -> str:
    return f"member/{member}"


def write(store: Store, name: str, record: Member | Roll) -> None:
    store.set(name, msgspec.json.encode(record).decode())


def read(store: Store, name: str, kind: type[Record]) -> Record:
    return msgspec.json.decode(store.get(name), type=kind)


def is_file(where: str) -> bool:
    return not where.startswith("tcp://")


def stores(where: str) -> list[Path]:
    """Stores of members on one machine, the newest first. There are several only while a generation is replaced."""
    path = Path(where)
    found = [(file.stat().st_mtime_ns, file) for file in path.parent.glob(f"{path.name}-*.store")]
    return [file for _, file in sorted(found, reverse=True)]


def remove_others(current: Path) -> None:
    """Remove the stores of earlier generations. A member that comes upon one at this moment may write it again."""
    for file in current.parent.glob(f"{current.name.rpartition('-')[0]}-*.store"):
        if file != current:
            file.unlink(missing_ok=True)


def host_and_port(where: str) -> tuple[str, int]:
    found = read_address("--rendezvous", where)
    return found.bare, found.port


def readable(*watched: Stop | socket.socket, seconds: float = RETRY) -> list[Stop | socket.socket]:
    """Those that become readable in this time, which is that between two looks at the store."""
    return select.select(watched, [], [], seconds)[0]


def accepted(listener: socket.socket, expected: str) -> socket.socket | None:
    """The connection that waits at a listener, if it sends this id."""
    link, _ = listener.accept()
    link.settimeout(ID_SECONDS)
    with suppress(OSError), link.makefile("rb") as file:
        if file.read(len(expected)) == expected.encode():
            keep_alive(link)
            link.settimeout(None)
            return link
    link.close()
    return None


def choose(address: str, environ: MutableMapping[str, str] = os.environ) -> str:
    """Have gloo and NCCL use the interface with this address, unless the operator has named one. Returns its name,
    empty if no interface has the address."""
    name = interface(address)
    for variable in VARIABLES if name else ():
        environ.setdefault(variable, name)
    return name


def interface(address: str) -> str:
    """Name of the interface with this IPv4 or IPv6 address; empty if none has it."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    wanted = getattr(wanted, "ipv4_mapped", None) or wanted
    return next((name for found, name in (*ipv4_addresses(), *ipv6_addresses()) if found == wanted), "")


def ipv4_addresses() -> Iterator[tuple[ipaddress.IPv4Address, str]]:
    """Every IPv4 address of this host and the name of its interface, also of one that is an alias."""
    buffer = array.array("B", bytes(IFREQ.size * MAX_ADDRESSES))
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
