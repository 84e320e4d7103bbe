"""How the first member of a group and one who comes to it prove to each other that they have the same link keys.

Three messages, with a number used once from each side and HMAC-SHA256 over both (the three-pass mutual authentication
of ISO/IEC 9798-4; HMAC: RFC 2104): nothing that was overheard once can be said again. Then the first one tells how the
group's life begins, or why it does not, under the same seal. Members on one machine meet at a socket file that nobody
else can reach; there the secret is empty and the rest is the same.

No sockets: both sides are fed with what arrives, cut anywhere, and return what to send.
"""

from __future__ import annotations

import hmac
import secrets
import struct

import msgspec

MAGIC = b"PEN1"
HELLO = struct.Struct("<4sIII32s")  # magic, replica, member's number, hash of shared options, number used once
ANSWER = struct.Struct("<32s32s")  # the first member's number used once, and its proof
LENGTH = struct.Struct("<H")  # of what is sealed
NONCE = 32  # bytes
PROOF = 32
LONGEST = 4096  # bytes of what is sealed


class Generation(msgspec.Struct, frozen=True, tag="life"):
    """What the first member tells the others when all have come."""

    name: str  # of this life of the group
    port: int = 0  # of torch's store at the rendezvous's host; 0: it is a file


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Why a member cannot come in, in words that say which side to fix."""

    reason: str


class Member(msgspec.Struct, frozen=True):
    """Whom one who comes says to be."""

    replica: int
    member: int
    shared: int


TOLD = msgspec.json.Decoder(Generation | Refusal)
STRANGER = "it speaks no rendezvous of this release"
OTHER_KEYS = "it does not have our link keys"


class Challenge:
    """The first member's side of one connection."""

    def __init__(self, secret: bytes) -> None:
        self.guest: Member | None = None  # as it says; believe it once it is `proved`
        self.proved = False
        self.fault = ""  # why nothing more is to be said to it
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE)
        self._said = b""  # by both, which their proofs are of
        self._data = b""

    def feed(self, data: bytes) -> bytes:
        """Take what has arrived; what to send back."""
        self._data += data
        answer = b""
        if self.guest is None and len(self._data) >= HELLO.size and not self.fault:
            hello, self._data = self._data[: HELLO.size], self._data[HELLO.size :]
            magic, replica, member, shared, _ = HELLO.unpack(hello)
            if magic != MAGIC:
                self.fault = STRANGER
                return b""
            self.guest = Member(replica, member, shared)
            self._said = hello + self._nonce
            answer = ANSWER.pack(self._nonce, proof(self._secret, b"first", self._said))
        if self.guest is not None and self._data and not self.fault:
            self._prove()
        return answer

    def seal(self, told: Generation | Refusal) -> bytes:
        """What to send to one who is proved."""
        assert self.proved
        payload = msgspec.json.encode(told)
        assert len(payload) <= LONGEST
        return LENGTH.pack(len(payload)) + payload + proof(self._secret, b"told", self._said + payload)

    def _prove(self) -> None:
        if self.proved or len(self._data) > PROOF:
            self.fault = STRANGER  # nobody says anything after its proof
        elif len(self._data) == PROOF:
            self.proved = hmac.compare_digest(self._data, proof(self._secret, b"member", self._said))
            self.fault = "" if self.proved else OTHER_KEYS
            self._data = b""


class Response:
    """The side of one who comes."""

    def __init__(self, secret: bytes, guest: Member) -> None:
        self.told: Generation | Refusal | None = None
        self.answered = False  # the first one has proved itself
        self.fault = ""  # why nothing more is to be said to it
        self._secret = secret
        self.hello = HELLO.pack(MAGIC, guest.replica, guest.member, guest.shared, secrets.token_bytes(NONCE))
        self._said = b""
        self._data = b""

    def feed(self, data: bytes) -> bytes:
        """Take what has arrived; what to send back."""
        self._data += data
        answer = b""
        if not self.answered and len(self._data) >= ANSWER.size and not self.fault:
            nonce, proved = ANSWER.unpack_from(self._data)
            self._said = self.hello + nonce
            if not hmac.compare_digest(proved, proof(self._secret, b"first", self._said)):
                self.fault = OTHER_KEYS
                return b""
            self._data = self._data[ANSWER.size :]
            self.answered = True
            answer = proof(self._secret, b"member", self._said)
        if self.answered and self.told is None and not self.fault:
            self._open()
        return answer

    def _open(self) -> None:
        if len(self._data) < LENGTH.size:
            return
        (length,) = LENGTH.unpack_from(self._data)
        if length > LONGEST:
            self.fault = STRANGER
        elif len(self._data) >= LENGTH.size + length + PROOF:
            payload = self._data[LENGTH.size : LENGTH.size + length]
            seal = self._data[LENGTH.size + length : LENGTH.size + length + PROOF]
            if not hmac.compare_digest(seal, proof(self._secret, b"told", self._said + payload)):
                self.fault = OTHER_KEYS
                return
            self.told = TOLD.decode(payload)


def proof(secret: bytes, label: bytes, said: bytes) -> bytes:
    """That who says this has the secret; the label keeps what one side says from being said back to it."""
    return hmac.digest(secret, label + b"\0" + said, "sha256")
