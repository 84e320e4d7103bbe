"""An error of a process, told in a notice and raised again elsewhere."""

from __future__ import annotations

import pytest

from penstock.protocol.errors import AddressError, ConfigError, LinkError, ModelError, PenstockError
from penstock.services.supervisor.sd_notify import ERROR_FIELD, MAX_NOTICE, crash_line, error_line, parse, read_error


def again(line: str) -> PenstockError:
    return read_error(parse(line.encode()[:MAX_NOTICE])[ERROR_FIELD])


@pytest.mark.parametrize(
    "error",
    [
        ModelError("config.json is missing"), LinkError("start both\nfrom the same release"),
        ConfigError("--dtype", "float8", "it must be one of float32"), AddressError("--port", 80, "it is taken"),
        ConfigError("--batch-invariant", True, "it needs a GPU"), ConfigError("--tune", None, "there is nothing"),
    ],
)  # fmt: skip
def test_the_error_comes_back_as_it_was(error: PenstockError) -> None:
    found = again(error_line(error))
    assert type(found) is type(error)
    assert str(found) == str(error)


def test_a_long_message_stays_one_notice() -> None:
    line = error_line(ConfigError("--model", "x" * 10_000, "y" * 10_000))
    assert len(line.encode()) < MAX_NOTICE
    assert isinstance(again(line), ConfigError)


def test_a_process_that_said_nothing_is_told_of_with_its_last_lines() -> None:
    found = again(crash_line("executor-0", "signal SIGKILL", "one\ntwo"))
    assert isinstance(found, LinkError)
    assert str(found) == "executor-0 ended (signal SIGKILL); its last lines:\none\ntwo"


def test_what_cannot_be_read_is_still_an_error() -> None:
    assert "cannot be read" in str(read_error("{broken"))
    assert isinstance(read_error('{"kind": "Unheard", "message": "m"}'), LinkError)
