"""Keys: several, of a file that changes, compared without telling where they differ."""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path

import pytest

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import ConfigError
from penstock.services.http import security as keys
from penstock.services.http.security import MAX_FILE, Keys


def of(file: Path | None = None, own: str = "") -> Keys:
    return Keys(ApiConfig(api_key=own, api_key_file=str(file) if file else ""))


def test_none_means_open() -> None:
    assert not of().locked
    assert not of().accepts(b"")
    assert not of(own=" , ").locked


@pytest.mark.parametrize("given", [b"one", b"two", "drei-ü".encode()])
def test_each_of_several_opens(given: bytes) -> None:
    found = of(own="one,two, drei-ü ")
    assert found.locked
    assert found.accepts(given)


@pytest.mark.parametrize("given", [b"", b"on", b"one ", b"ONE", b"one,two", b"\xff", b"x" * 100_000])
def test_nothing_else_opens(given: bytes) -> None:
    assert not of(own="one,two").accepts(given)


def test_every_key_is_compared_whether_or_not_one_has_fitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise the time to an answer would tell which key fitted."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def noted(first: bytes, second: bytes) -> bool:
        compared.append((first, second))
        return real(first, second)

    monkeypatch.setattr(keys.hmac, "compare_digest", noted)
    file = tmp_path / "keys"
    file.write_text("three\n")
    found = of(file, "one,two")
    for given in (b"one", b"two", b"three", b"none"):
        compared.clear()
        found.accepts(given)
        assert len(compared) == 3
        assert all(len(first) == len(second) == 32 for first, second in compared)


def test_a_file_has_a_key_per_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes("# of the team\r\n\r\n  first \nwith,comma\nzwei-ü\n".encode())
    found = of(file, "own")
    for given in ("first", "with,comma", "zwei-ü", "own"):
        assert found.accepts(given.encode())
    for given in ("# of the team", "", "with", "comma"):
        assert not found.accepts(given.encode())


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"", "no key"), (b"\n# only words\n", "no key"), (b"\xff\xfe", "UTF-8"),
     (b"k\n" * MAX_FILE, "larger than")],
)  # fmt: skip
def test_a_file_without_keys_ends_the_start(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        of(file)
    assert caught.value.option == "--api-key-file"


def test_a_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, keys.__name__)
    file = tmp_path / "keys"
    file.write_text("old\n")
    found = of(file, "own")
    found.refresh()
    assert not caplog.messages
    file.write_text("newer\n")
    found.refresh()
    assert found.accepts(b"newer")
    assert found.accepts(b"own")
    assert not found.accepts(b"old")
    assert caplog.messages == ["api_keys_read"]


def test_a_file_is_replaced_by_another_of_the_same_size_and_time(tmp_path: Path) -> None:
    file, fresh = tmp_path / "keys", tmp_path / "fresh"
    file.write_text("aaaa\n")
    fresh.write_text("bbbb\n")
    for path in (file, fresh):
        os.utime(path, ns=(10**18, 10**18))
    found = of(file)
    fresh.replace(file)
    found.refresh()
    assert found.accepts(b"bbbb")
    assert not found.accepts(b"aaaa")


def test_a_signal_reads_it_though_nothing_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, keys.__name__)
    file = tmp_path / "keys"
    file.write_text("aaaa\n")
    found = of(file)
    found.refresh(always=True)
    assert found.accepts(b"aaaa")
    assert caplog.messages == ["api_keys_read"]


@pytest.mark.parametrize("content", [None, b"", b"\xff"])
def test_a_file_that_is_spoilt_opens_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    found = of(file)
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with caplog.at_level(logging.INFO, keys.__name__):
        for _ in range(3):
            found.refresh()
    assert found.locked
    assert found.accepts(b"old")
    assert not found.accepts(b"")
    assert [record.levelname for record in caplog.records] == ["ERROR"]  # said once
    file.write_text("new\n")
    found.refresh()
    assert found.accepts(b"new")
    assert "old" not in caplog.text


def test_without_a_file_there_is_nothing_to_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, keys.__name__)
    found = of(own="k")
    found.refresh(always=True)
    assert found.accepts(b"k")
    assert not caplog.messages
