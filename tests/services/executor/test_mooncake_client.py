"""The process of Mooncake's client: what it says when it cannot begin, and what it does with keys that stay."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgspec
import pytest

from penstock.protocol.kv_store import MooncakeSettings
from penstock.services.executor.mooncake_client import MISSING, Channel, own_address, remove


class Stubborn:
    def __init__(self, codes: dict[str, int]) -> None:
        self.codes, self.asked = codes, list[str]()

    def remove(self, key: str, force: bool) -> int:
        assert force, "a lease does not keep it"
        self.asked.append(key)
        return self.codes[key]


def test_a_master_that_does_not_answer_is_asked_once() -> None:
    store = Stubborn({"a": 0, "b": MISSING, "c": -900, "d": 0})
    assert remove(store, ["a", "b", "c", "d"]) == [0, MISSING, -900]
    assert store.asked == ["a", "b", "c"]
    assert remove(store, []) == []


def test_the_address_that_others_are_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert own_address(f"127.0.0.1:{port}") == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        own_address(f"127.0.0.1:{port}")


def test_without_the_library_it_says_so() -> None:
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("test")
    os.truncate(memory, 4096)
    words = [msgspec.json.encode(MooncakeSettings("127.0.0.1:1")).decode(), str(memory), str(theirs.fileno())]
    hidden = "import sys; sys.modules['mooncake'] = None; from penstock.services.executor.mooncake_client import main"
    process = subprocess.run(
        [sys.executable, "-c", f"{hidden}; main(*sys.argv[1:])", *words], pass_fds=(memory, theirs.fileno()), check=True
    )
    assert process.returncode == 0
    theirs.close()
    channel = Channel(ours)
    assert b"mooncake" in channel.receive()
    with pytest.raises(EOFError):
        channel.receive()
    os.close(memory)
