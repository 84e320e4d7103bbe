"""The keys that clients must show: those of --api-key and those of --api-key-file, which may change meanwhile."""

from __future__ import annotations

import hashlib
import hmac
import logging
from pathlib import Path

import msgspec

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.option import words
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

COMMENT = "#"
MAX_FILE = 1 << 20  # bytes
OPTION = "--api-key-file"
Version = tuple[int, int, int]  # inode, size and time of change of a file; a change of its mode is one too


class KeyStatistics(msgspec.Struct, frozen=True):
    """How many keys are in force, and how often the file was read."""

    keys: int
    reads: int


class Keys:
    """Owned by the gate, which asks, and by the process's loop, which has the file read again.

    A server that was started with a key file stays locked whatever becomes of the file: one that cannot be read or
    holds no key leaves the keys in force that were.
    """

    def __init__(self, options: ApiConfig) -> None:
        """Raises ConfigError for a file that cannot be read or holds no key."""
        self._own = tuple(digest(key.encode()) for key in words(options.api_key))
        self._path = Path(options.api_key_file) if options.api_key_file else None
        self._filed: tuple[bytes, ...] = ()
        self._version: Version | None = None
        self._reads = 0
        if self._path is not None:
            self._version = version(self._path)
            self._filed = read(self._path)
            self._reads = 1

    @property
    def locked(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._own) or self._path is not None

    def accepts(self, given: bytes) -> bool:
        """Whether `given` is one of the keys. Takes as long for a wrong key as for a right one, whichever it is."""
        shown = digest(given)
        found = False
        for key in (*self._own, *self._filed):
            found |= hmac.compare_digest(key, shown)
        return found

    def refresh(self, *, always: bool = False) -> None:
        """Read the file again if it has changed, or `always`."""
        if self._path is None:
            return
        current: Version | None = None
        try:
            current = version(self._path)
            if current == self._version and not always:
                return
            self._filed = read(self._path)
        except ConfigError as error:
            if current != self._version or always:
                logs.error(log, "api_keys_kept", keys=len(self._filed), reason=error.allowed)
            self._version = current
            return
        self._version = current
        self._reads += 1
        logs.info(log, "api_keys_read", keys=len(self._filed))

    def statistics(self) -> KeyStatistics:
        return KeyStatistics(len(self._own) + len(self._filed), self._reads)


def digest(key: bytes) -> bytes:
    """Keys are compared as digests: equally long, and telling nothing of where they differ."""
    return hashlib.sha256(key).digest()


def version(path: Path) -> Version:
    """Raises ConfigError for a file that is not there."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(OPTION, str(path), f"it cannot be read: {error.strerror}") from error
    return found.st_ino, found.st_size, found.st_ctime_ns


def read(path: Path) -> tuple[bytes, ...]:
    """Digests of the keys in a file, one per line; blank lines and those that begin with # do not count.

    Raises ConfigError for a file that cannot be read, is no text, is larger than MAX_FILE bytes or holds no key.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE + 1)
        lines = [line.strip() for line in text.decode().splitlines()]
    except OSError as error:
        raise ConfigError(OPTION, str(path), f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(OPTION, str(path), "it must be UTF-8 text with a key per line") from error
    if len(text) > MAX_FILE:
        raise ConfigError(OPTION, str(path), f"it is larger than {MAX_FILE} bytes")
    keys = tuple(digest(line.encode()) for line in lines if line and not line.startswith(COMMENT))
    if not keys:
        raise ConfigError(OPTION, str(path), "it holds no key")
    return keys
