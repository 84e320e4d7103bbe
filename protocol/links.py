"""The links between processes as data: which role binds, which connects, their messages, and how many may wait.

On every link the first-named role binds a ROUTER (MANDATORY) and the other connects a DEALER whose identity is
role-index-incarnation, and between hosts that of one connection. `window` is the credit: how many messages a sender may
have unacknowledged at one peer; what is produced beyond it is merged or refused upstream, never dropped. `high_water`
is the socket's own limit, above that.

An address of a host, as options give it, is tcp://HOST:PORT; HOST is a name, an IPv4 address, or an IPv6 address in
brackets. Several ports from PORT on belong to a process that listens in several ways, or to several processes.
"""

from __future__ import annotations

import enum
import re
import secrets
import zlib
from pathlib import Path
from typing import get_args

import msgspec

from penstock.protocol.config import LinksConfig
from penstock.protocol.control import Asked, Control, Controlled, EngineStatus, WeightsAnswer
from penstock.protocol.errors import ConfigError
from penstock.protocol.images import EncodeImage, ImageEncoded
from penstock.protocol.message import Message
from penstock.protocol.messages import (
    Abort,
    Detokenize,
    Detokenized,
    Prefilled,
    Rejected,
    ReleaseTransfer,
    StopHit,
    SubmitText,
    SubmitTokens,
    Tokenize,
    Tokenized,
)
from penstock.protocol.outputs import TextBatch, TokenBatch
from penstock.protocol.snapshots import MetricsSnapshots
from penstock.protocol.steps import (
    AdapterLoaded,
    BlocksCopied,
    CopyBlocks,
    DropAdapter,
    ExecutorAsleep,
    ExecutorReady,
    LoadAdapter,
    Sleep,
    StepMasks,
    StepPlan,
    StepResult,
    Wake,
)
from penstock.protocol.storage_blocks import StorageAnswer, StorageMessage

PROTOCOL_VERSION = 1
# Bytes of one message: what msgpack's longest value holds, and above all that the options let a request bring (a token
# id is two bytes of a body and four here). A socket that meets more ends the connection and all that is on its way.
MOST_BYTES = (1 << 32) - 1  # of one message
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what decoders raise on bytes of no message
ADDRESS = re.compile(r"tcp://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
PORTS = 1 << 16


class Role(enum.StrEnum):
    API = "api"
    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    EXECUTOR = "executor"


class Hello(Message, frozen=True, kw_only=True):
    """Connector → binder on connecting, and again whenever the link was idle: its identity and its shared options."""

    version: int
    role: str
    index: int
    incarnation: int
    pid: int
    config: int  # `shared_hash` of the options that both sides must agree on
    epoch: int = 0
    session: int = 0  # how often the connector has given the binder up
    pid_namespace: int = 0  # in which `pid` counts; 0: unknown


class Welcome(Message, frozen=True, kw_only=True):
    """Binder → connector: the handshake is accepted; `epoch` and `incarnation` are the binder's own."""

    version: int
    role: str
    index: int
    incarnation: int
    pid: int
    epoch: int = 0
    session: int = 0  # as in the Hello that it answers
    number: int = 0  # of the session among all that the binder has begun
    pid_namespace: int = 0  # as in Hello


class Refused(Message, frozen=True):
    """Binder → connector: the handshake failed; the reason says which side to fix. The connector exits with it."""

    reason: str


class Credit(Message, frozen=True):
    """Receiver → sender: it has taken `count` more messages off the link."""

    count: int


class Goodbye(Message, frozen=True):
    """Either way: messages in flight will not be answered. It is about sessions before a certain one, so that it cannot
    end one that begins while it is on its way."""

    incarnation: int = 0  # of the sender
    before: int = 1 << 62  # the connector's `session`, or the binder's `number`


LinkControl = Hello | Welcome | Refused | Credit | Goodbye


class LinkSpec(msgspec.Struct, frozen=True):
    """One row of the table."""

    name: str
    binder: Role
    connector: Role
    up: tuple[type[Message], ...]  # connector → binder
    down: tuple[type[Message], ...]  # binder → connector
    window: int = 1024  # messages in flight per peer and direction
    high_water: int = 4096
    silence: float = 10.0  # seconds without a message after which a peer is lost; 0: only when its process ends


TEXT = LinkSpec(
    name="text",
    binder=Role.TOKENIZER,
    connector=Role.API,
    up=(SubmitText, Abort, Tokenize, Detokenize, *get_args(Control)),
    down=(TextBatch, Rejected, Tokenized, Detokenized, Controlled, EngineStatus, MetricsSnapshots),
)
TOKENS = LinkSpec(
    name="tokens",
    binder=Role.SCHEDULER,
    connector=Role.TOKENIZER,
    up=(SubmitTokens, Abort, StopHit, ReleaseTransfer, *get_args(Control)),
    down=(TokenBatch, Prefilled, Rejected, Controlled, EngineStatus, MetricsSnapshots),
)
STEPS = LinkSpec(
    name="steps",
    binder=Role.SCHEDULER,
    connector=Role.EXECUTOR,
    up=(
        ExecutorReady,
        ExecutorAsleep,
        StepResult,
        AdapterLoaded,
        ImageEncoded,
        BlocksCopied,
        *get_args(StorageAnswer),
        WeightsAnswer,
        MetricsSnapshots,
    ),
    down=(
        StepPlan,
        StepMasks,
        CopyBlocks,
        *get_args(StorageMessage),
        LoadAdapter,
        DropAdapter,
        EncodeImage,
        *get_args(Asked),
        Sleep,
        Wake,
    ),
    window=16,
    high_water=64,
    silence=0.0,  # a step may be long; how long is the scheduler's to judge
)

LINKS: tuple[LinkSpec, ...] = (TEXT, TOKENS, STEPS)


def ports_of(binder: str) -> int:
    """How many links one process of this role binds, and so how many ports it needs where it has an address."""
    return sum(link.binder == binder for link in LINKS)


def address(link: LinkSpec, run_dir: Path, index: int, links: LinksConfig | None = None) -> str:
    """Where binder number `index` of the link listens: a port of its role's address where that is given, those of one
    process side by side in the order of the table; else a socket file in the 0700 run directory.

    Raises ConfigError for an address that is none."""
    given = given_address(link, links)
    if not given:
        return f"ipc://{run_dir}/{link.name}-{index}.sock"
    names = [each.name for each in LINKS if each.binder is link.binder]
    return str(read_address(f"--{link.binder}-address", given).after(index * len(names) + names.index(link.name)))


def given_address(link: LinkSpec, links: LinksConfig | None) -> str:
    """The address option of the link's binders; empty where they are on this machine."""
    if links is None:
        return ""
    return links.scheduler_address if link.binder is Role.SCHEDULER else links.tokenizer_address


def identity(role: Role, index: int, incarnation: int, session: int = 0) -> bytes:
    """The name of a connection; between hosts each has its own, after its first session."""
    return f"{role}-{index}-{incarnation:08x}{f'-{session}' if session else ''}".encode()


def new_incarnation() -> int:
    """31 random bits that distinguish one start of a process from the next."""
    return secrets.randbits(31)


def shared_hash(options: msgspec.Struct) -> int:
    """CRC-32 of the options that every process must share, in canonical JSON."""
    return zlib.crc32(msgspec.json.encode(options, order="deterministic"))


def decoder(link: LinkSpec, *, at_binder: bool) -> msgspec.msgpack.Decoder[Message]:
    """The decoder of messages that arrive at the binder's (or the connector's) end of the link."""
    union = LinkControl
    for kind in link.up if at_binder else link.down:
        union = union | kind
    return msgspec.msgpack.Decoder(union)


class HostAddress(msgspec.Struct, frozen=True):
    """A host, as it was spelled, brackets included, and the first of its ports."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    @property
    def bare(self) -> str:
        """The host as resolvers and sockets take it: an IPv6 address without its brackets."""
        return self.host.strip("[]")

    def after(self, count: int) -> HostAddress:
        """The same host, so many ports further on."""
        return HostAddress(self.host, self.port + count)


def read_address(option: str, text: str, ports: int = 1) -> HostAddress:
    """Raises ConfigError for what is no address of a host and of so many ports."""
    found = ADDRESS.fullmatch(text)
    if not found or not 0 < int(found[2]) < PORTS:
        raise ConfigError(option, text, "it must be like tcp://10.0.0.1:29500")
    if int(found[2]) + ports > PORTS:
        raise ConfigError(option, text, f"it needs {ports} ports from this one on, and {PORTS - 1} is the last")
    return HostAddress(found[1], int(found[2]))


def check_apart(addresses: dict[str, tuple[HostAddress, int]]) -> None:
    """Raise ConfigError where two options want the same port of one host, as far as its spelling tells. By option: its
    address and how many ports it needs."""
    seen: dict[tuple[str, int], str] = {}
    for option, (address, ports) in addresses.items():
        for port in range(address.port, address.port + ports):
            other = seen.setdefault((address.host.lower(), port), option)
            if other != option:
                why = f"it needs {ports} ports from this one on, and {other} has {port}"
                raise ConfigError(option, str(address), why)
