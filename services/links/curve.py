"""The keys of links over a network: one CURVE pair for a whole deployment, in one file that every host has a copy of.

Every process uses the pair at both ends, so each end proves that it has the secret key, and a peer with another public
key is refused. Having the file means belonging to the deployment.

Source: CurveZMQ, ZeroMQ RFC 26; keys are written in Z85, ZeroMQ RFC 32.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import tomllib
from pathlib import Path

import msgspec
import zmq

from penstock.protocol.errors import ConfigError

OPTION = "--link-keys"
MODE = 0o600
MAX_FILE = 4096  # bytes
KEY_CHARACTERS = 40  # of a key in Z85
MAKE = "`penstock keys FILE` makes one"
HEADER = """\
# Keys of the links between the processes of one Penstock deployment. Whoever can read this file can join them: give it
# to the user that runs Penstock on each host, mode 0600, and to nobody else.
"""


class LinkKeys(msgspec.Struct, frozen=True):
    """A CURVE pair, in Z85. Its text never shows the secret key."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"LinkKeys({self.public.decode()})"


def new_keys() -> LinkKeys:
    return LinkKeys(*zmq.curve_keypair())


def as_file(keys: LinkKeys) -> str:
    """TOML; no character of Z85 needs an escape in it."""
    return f'{HEADER}public = "{keys.public.decode()}"\nsecret = "{keys.secret.decode()}"\n'


def write_keys(path: Path, keys: LinkKeys, *, force: bool = False) -> None:
    """Write the file atomically, readable by its owner alone. Raises ConfigError if that fails, or if the file exists
    and `force` is not given."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE), "w") as file:
            os.fchmod(file.fileno(), MODE)
            file.write(as_file(keys))
            file.flush()
            os.fsync(file.fileno())
        if force:
            fresh.replace(path)
        else:
            os.link(fresh, path)
    except FileExistsError as error:
        why = "it is there already, and other hosts may have copies; --force makes new keys"
        raise ConfigError("FILE", str(path), why) from error
    except OSError as error:
        raise ConfigError("FILE", str(path), f"it cannot be written: {error.strerror}") from error
    finally:
        fresh.unlink(missing_ok=True)


def read_keys(given: str) -> LinkKeys:
    """The keys in a file. Raises ConfigError if it cannot be read, if others can read it, or if it is no file of
    keys."""
    try:
        with open(os.open(given, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            check_access(given, os.fstat(file.fileno()))
            text = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(OPTION, given, f"it cannot be read: {error.strerror}") from error
    try:
        return parsed(text)
    except ValueError:  # the error may quote the file, so it is not passed on
        raise ConfigError(OPTION, given, f"it is no file of link keys; {MAKE}") from None


def check_access(given: str, found: os.stat_result) -> None:
    """Raise ConfigError unless it is a regular, private file: no access for others, and none for a group, except for a
    file of root's that a group may read, as container secrets are mounted."""
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(OPTION, given, f"it is no file; {MAKE}")
    lent = found.st_uid == 0 and os.geteuid() != 0
    if found.st_mode & (0o037 if lent else 0o077):
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(OPTION, given, f"its mode must be 0600, not {mode:04o}: others can read the keys")


def parsed(text: bytes) -> LinkKeys:
    """Raises ValueError for anything but a file of keys that belong together."""
    if len(text) > MAX_FILE:
        raise ValueError("too long")
    found = tomllib.loads(text.decode())
    public, secret = found.pop("public", None), found.pop("secret", None)
    for key in (public, secret):
        if not (isinstance(key, str) and len(key) == KEY_CHARACTERS and key.isascii()):
            raise ValueError("no key")
    keys = LinkKeys(public.encode(), secret.encode())
    if found or not hmac.compare_digest(derived_public(keys.secret), keys.public):
        raise ValueError("not a pair")
    return keys


def derived_public(secret: bytes) -> bytes:
    """The public key of a secret one. Raises ValueError for an invalid key."""
    try:
        return zmq.curve_public(secret)
    except zmq.ZMQError as error:
        raise ValueError("no Z85") from error
