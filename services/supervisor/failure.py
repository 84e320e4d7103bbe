"""Why a process ended, told to whoever started it as a field of its last notice: the error that the process itself met.

`penstock serve` needs no more than the exit code and the log; a Python program that started an engine raises the same
error that the process did.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.protocol.errors import AddressError, ConfigError, LinkError, ModelError, PenstockError

FIELD = "X_PENSTOCK_FAULT"  # of a notice
LONGEST = 4000  # characters of a message: a notice is one datagram
CONFIG_ERRORS: Mapping[str, type[ConfigError]] = {"ConfigError": ConfigError, "AddressError": AddressError}
ERRORS: Mapping[str, type[PenstockError]] = {"ModelError": ModelError, "LinkError": LinkError}


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error of protocol/errors.py, as it travels."""

    kind: str
    message: str
    option: str = ""
    value: str = ""
    allowed: str = ""


FAULT = msgspec.json.Decoder(Fault)


def told(error: PenstockError) -> str:
    """The notice's line that tells of `error`."""
    fault = Fault(type(error).__name__, str(error)[:LONGEST])
    if isinstance(error, ConfigError):
        fault = msgspec.structs.replace(
            fault, option=error.option, value=str(error.value)[:LONGEST], allowed=error.allowed[:LONGEST]
        )
    return f"{FIELD}={msgspec.json.encode(fault).decode()}"


def lost(process: str, ending: str, last: str) -> str:
    """The notice's line about a process that could not tell itself: its last lines say why, if anything does."""
    return told(LinkError(f"{process} ended ({ending}); its last lines:\n{last[-LONGEST // 2:]}"))


def read(field: str) -> PenstockError:
    """The error that a notice told of."""
    try:
        fault = FAULT.decode(field)
    except msgspec.DecodeError:
        return LinkError(f"a process failed and said why in words that cannot be read: {field[:LONGEST]}")
    if fault.kind in CONFIG_ERRORS:
        return CONFIG_ERRORS[fault.kind](fault.option, fault.value, fault.allowed)
    return ERRORS.get(fault.kind, LinkError)(fault.message)
