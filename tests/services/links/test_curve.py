"""Files of link keys: what is made, what is taken, and what is never shown."""

from __future__ import annotations

import copy
import os
import stat
import threading
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import ConfigError
from penstock.services.links import curve
from penstock.services.links.curve import LinkKeys, as_file, check_access, new_keys, parsed, read_keys, write_keys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "link.keys"
    write_keys(path, new_keys())
    return path


def refusal(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_keys(str(path))
    assert caught.value.option == "--link-keys"
    assert caught.value.__cause__ is None or isinstance(caught.value.__cause__, OSError)
    return caught.value.allowed


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    keys = new_keys()
    write_keys(tmp_path / "k", keys)
    assert read_keys(str(tmp_path / "k")) == keys
    assert zmq.curve_public(keys.secret) == keys.public
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600


def test_every_pair_is_another() -> None:
    assert len({new_keys().secret for _ in range(20)}) == 20


def test_the_mode_does_not_depend_on_the_shell(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_keys(tmp_path / "k", new_keys())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600


def test_a_file_is_replaced_only_by_force_and_as_a_whole(file: Path) -> None:
    before, keys = file.read_bytes(), new_keys()
    with pytest.raises(ConfigError, match="--force makes new keys"):
        write_keys(file, keys)
    assert file.read_bytes() == before
    write_keys(file, keys, force=True)
    assert read_keys(str(file)) == keys
    assert os.listdir(file.parent) == [file.name]


def test_of_two_writers_one_wins(tmp_path: Path) -> None:
    path, refused, pairs = tmp_path / "k", [], [new_keys() for _ in range(8)]

    def write(keys: LinkKeys) -> None:
        try:
            write_keys(path, keys)
        except ConfigError:
            refused.append(keys)

    threads = [threading.Thread(target=write, args=(keys,)) for keys in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [keys for keys in pairs if keys not in refused] == [read_keys(str(path))]
    assert os.listdir(tmp_path) == ["k"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o620, 0o610, 0o601, 0o777])
def test_a_file_that_others_can_read_or_write_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert refusal(file) == f"its mode must be 0600, not {mode:04o}: others can read the keys"


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_private_file_is_taken(file: Path, mode: int) -> None:
    file.chmod(mode)
    read_keys(str(file))


@pytest.mark.parametrize(("mode", "taken"), [(0o440, True), (0o640, True), (0o660, False), (0o444, False)])
def test_root_may_lend_a_file_to_a_group(file: Path, monkeypatch: pytest.MonkeyPatch, mode: int, taken: bool) -> None:
    """A secret of a container belongs to root, and its process to the group that may read it."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = os.stat_result((stat.S_IFREG | mode, 1, 1, 1, 0, 1000, 100, 0, 0, 0))
    if taken:
        check_access(str(file), found)
        return
    with pytest.raises(ConfigError, match="its mode must be 0600"):
        check_access(str(file), found)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none")
    assert "Is a directory" in refusal(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    assert "it is no file" in refusal(tmp_path / "fifo")  # without waiting for somebody to write
    assert "it is no file" in refusal("/dev/null")


def changed(keys: LinkKeys, public: str = "", secret: str = "", more: str = "") -> bytes:
    text = f'public = "{public or keys.public.decode()}"\nsecret = "{secret or keys.secret.decode()}"\n{more}'
    return text.encode()


def test_what_holds_no_keys_is_refused_and_not_quoted(tmp_path: Path) -> None:
    keys, other = new_keys(), new_keys()
    wrong = [
        b"",
        b"public = 1\nsecret = 2\n",
        b"\xff\xfe",
        as_file(keys).encode()[:-20],
        changed(keys, public=other.public.decode()),
        changed(keys, secret=other.secret.decode()),
        changed(keys, secret="~" * 40),
        changed(keys, secret="\u00e9" * 40),
        changed(keys, secret=keys.secret.decode()[:-1]),
        changed(keys, more='third = "x"\n'),
        as_file(keys).encode() + b"#" * curve.MAX_FILE,
        keys.secret + b" = \n",
    ]
    for number, text in enumerate(wrong):
        path = tmp_path / f"{number}"
        path.write_bytes(text)
        path.chmod(0o600)
        assert refusal(path) == "it is no file of link keys; `penstock keys FILE` makes one"


@given(st.binary(max_size=200))
def test_bytes_are_no_keys(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parsed(data)


def test_a_copy_with_a_comment_is_still_the_file(file: Path) -> None:
    keys = read_keys(str(file))
    assert parsed(b"# of the second deployment\n" + changed(keys)) == keys


def test_the_secret_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    keys = new_keys()
    secret = keys.secret.decode()
    for shown in (repr(keys), str(keys), f"{keys}", f"{keys!r}", repr([keys]), repr(copy.copy(keys))):
        assert secret not in shown
    assert secret in as_file(keys)
