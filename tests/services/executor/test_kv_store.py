"""Blocks in a Mooncake store: whose they are, and that nothing which goes wrong there is more than a block less."""

from __future__ import annotations

import os
import select
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.engine_core.execution.block_files import BadBlock, Bytes
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.kv_store import read_store
from penstock.services.executor import kv_store
from penstock.services.executor.kv_disk import Served, files_digest
from penstock.services.executor.kv_store import MooncakeBlocks, attach_store, weights_digest
from tests.services.executor.folder import write_folder
from tests.services.executor.mooncake import FakeMooncake, fake_mooncake

EACH, LIMIT = 300, 120.0
KEYS = [bytes([number]) * 16 for number in range(1, 9)]
OURS, THEIRS = b"o" * 32, b"t" * 32
Open = Callable[..., MooncakeBlocks]


@pytest.fixture
def mooncake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMooncake]:
    monkeypatch.setattr(kv_store, "FIRST_REST", 0.05)
    monkeypatch.setattr(kv_store, "LONGEST_REST", 0.1)
    with fake_mooncake(tmp_path / "mooncake") as found:
        yield found


@pytest.fixture
def opened(mooncake: FakeMooncake) -> Iterator[Open]:
    stores: list[MooncakeBlocks] = []

    def make(identity: bytes = OURS, *, connected: bool = True) -> MooncakeBlocks:
        made = MooncakeBlocks(read_store(mooncake.url), 10, EACH, lambda: identity, threads=2)
        stores.append(made)
        made.start()
        if connected:
            until(lambda: made._client is not None)
        return made

    yield make
    for store in stores:
        store.close()


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < deadline
        select.select((), (), (), 0.01)


def content(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, EACH, np.uint8)


def put(store: MooncakeBlocks, *numbers: int) -> None:
    buffer = store.new_buffer()
    for number in numbers:
        buffer[:EACH] = content(number)
        store.write(0, KEYS[number], buffer)
    store._buffers.put(buffer)


def holds(store: MooncakeBlocks, number: int) -> bool:
    buffer = store.new_buffer()
    try:
        store.read(0, KEYS[number], buffer)
        return np.array_equal(buffer[:EACH], content(number))
    except BadBlock:
        return False
    finally:
        store._buffers.put(buffer)


def test_what_one_server_has_written_another_one_finds(opened: Open) -> None:
    first = opened()
    first.begin([0])
    put(first, 0, 1)
    second = opened()
    assert second.missing(KEYS[:4]) == [2, 3]
    assert [holds(second, number) for number in range(3)] == [True, True, False]
    assert second.entries() == []
    put(second, 0)
    assert holds(first, 0)


def test_nothing_of_another_identity_is_found(opened: Open) -> None:
    ours, theirs = opened(), opened(THEIRS)
    put(ours, 0)
    assert theirs.missing(KEYS[:1]) == [0]
    assert not holds(theirs, 0)


def test_damaged_bytes_are_found_out_and_make_room_for_better_ones(mooncake: FakeMooncake, opened: Open) -> None:
    store = opened()
    put(store, 0)
    (path,) = mooncake.blocks()
    good = path.read_bytes()
    for at in (0, EACH - 1, EACH, EACH + 3):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert not holds(store, 0)
        assert mooncake.blocks() == [], "it would be found again"
        put(store, 0)
        assert holds(store, 0)


def test_a_block_under_another_key_or_of_another_length_is_none(mooncake: FakeMooncake, opened: Open) -> None:
    store = opened()
    put(store, 0, 1)
    first, second = mooncake.blocks()
    shutil.copy(first, second)
    assert not holds(store, 1)
    assert holds(store, 0)
    for wrong in (b"", bytes(EACH)):
        first.write_bytes(wrong)
        assert not holds(store, 0)
    put(store, 0)
    first.write_bytes(bytes(EACH + 9))
    with pytest.raises(OSError, match="another size"):
        holds(store, 0)


@pytest.mark.parametrize(("code", "words"), [("-900", "the master does not answer"), ("-200", "it has no room")])
def test_what_mooncake_refuses_is_an_error_of_the_system(
    mooncake: FakeMooncake, opened: Open, code: str, words: str
) -> None:
    store, buffer = opened(), np.zeros(0, np.uint8)
    put(store, 0)
    buffer = store.new_buffer()
    mooncake.fault(code)
    for call in (
        lambda: store.missing(KEYS[:1]),
        lambda: store.read(0, KEYS[0], buffer),
        lambda: store.write(0, KEYS[0], buffer),
        lambda: store.drop([], KEYS[:1]),
    ):
        with pytest.raises(OSError, match=f"code {code}: {words}"):
            call()
    mooncake.fault()
    assert store.missing(KEYS[:1]) == []


@pytest.mark.parametrize("how", ["die", "hang"])
def test_a_client_that_dies_or_hangs_is_replaced(
    mooncake: FakeMooncake, opened: Open, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    store = opened()
    put(store, 0)
    before = store._client
    assert before is not None
    mooncake.fault(how)
    monkeypatch.setattr(kv_store, "ANSWER_SECONDS", 0.2)
    with pytest.raises(OSError, match=r"has ended|has not answered"):
        store.missing(KEYS[:1])
    mooncake.fault()
    monkeypatch.setattr(kv_store, "ANSWER_SECONDS", LIMIT)
    until(lambda: store._client not in (None, before))
    assert before.process.returncode is not None
    assert store.missing(KEYS[:2]) == [1]
    assert holds(store, 0)


def test_a_master_that_comes_later(mooncake: FakeMooncake, opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    mooncake.fault("-1")
    store = opened(connected=False)
    until(lambda: "kv_store_lost" in caplog.text)
    assert "it cannot be set up (code -1)" in caplog.records[-1].__dict__["fields"]["reason"]
    for call in (lambda: store.missing(KEYS), lambda: store.begin([1])):
        with pytest.raises(ConnectionError, match="not connected"):
            call()
    mooncake.fault()
    until(lambda: store._client is not None)
    put(store, 0)
    assert holds(store, 0)


def test_flushing_removes_what_is_of_this_identity_alone(mooncake: FakeMooncake, opened: Open) -> None:
    ours, theirs = opened(), opened(THEIRS)
    put(ours, 0, 1)
    put(theirs, 0)
    ours.wipe(OURS)
    assert ours.missing(KEYS[:2]) == [0, 1]
    assert holds(theirs, 0)
    put(ours, 0)
    assert holds(opened(), 0), "others go on sharing"


def test_what_cannot_be_flushed_is_not_found_all_the_same(mooncake: FakeMooncake, opened: Open) -> None:
    store = opened()
    put(store, 0)
    mooncake.fault("-900")
    with pytest.raises(OSError, match="the master does not answer"):
        store.wipe(OURS)
    mooncake.fault()
    assert store.missing(KEYS[:1]) == [0]


def test_other_weights_leave_the_blocks_of_those_before_to_others(opened: Open) -> None:
    store, other = opened(), opened()
    put(store, 0)
    store.wipe(THEIRS)
    assert store.missing(KEYS[:1]) == [0]
    assert not holds(store, 0)
    assert holds(other, 0)


def test_single_blocks_are_forgotten(opened: Open) -> None:
    store = opened()
    put(store, 0, 1)
    store.drop([7], [KEYS[0], KEYS[5]])
    assert store.missing(KEYS[:2]) == [0]


def test_closing_ends_the_process(opened: Open) -> None:
    store = opened()
    client = store._client
    assert client is not None
    store.close()
    until(lambda: store._client is None and client.process.returncode is not None)


def test_weights_that_cannot_be_read_again_are_shared_with_nobody(
    mooncake: FakeMooncake, caplog: pytest.LogCaptureFixture
) -> None:
    def identity() -> bytes:
        raise ModelError("they are gone")

    store = MooncakeBlocks(read_store(mooncake.url), 10, EACH, identity)
    store._keep()
    assert "kv_store_unused" in caplog.text
    with pytest.raises(ConnectionError):
        store.missing(KEYS)


def config(url: str = "mooncake://127.0.0.1:1", **model: object) -> Config:
    return Config(
        model=ModelConfig(model="tiny", **model),  # type: ignore[arg-type]
        executor=ExecutorConfig(device="cpu", kv_host_memory=1, kv_store=url),
    )


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    model = write_folder(tmp_path_factory.mktemp("models") / "tiny")
    (model / "model.safetensors").write_bytes(bytes(range(256)))
    return Served(read_spec(model), None, 64, ALONE, torch.float32, (model,), files_digest([model]))


def test_weights_are_told_apart_by_content_alone(tmp_path: Path, served: Served) -> None:
    (folder,) = served.folders
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    weights = copy / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    other = replace(served, folders=(copy,), files=files_digest([copy]))
    assert other.files != served.files
    digest = weights_digest(config(), served)
    assert weights_digest(config(), other) == digest
    assert other.identity(config(), "", digest) == served.identity(config(), "", digest)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert weights_digest(config(), other) != digest
    assert weights_digest(config(load_format="dummy"), other) == weights_digest(config(load_format="dummy"), served)


def test_each_share_has_keys_of_its_own(served: Served) -> None:
    ranks = (Group(0, 2), Group(1, 2), Group(stage=0, stages=2), Group(stage=1, stages=2), ALONE)
    assert len({replace(served, group=group).identity(config(), "", b"w") for group in ranks}) == 5
    assert served.identity(config(), "", b"w") != served.identity(config(), "", b"v")
    stale = replace(served, files=b"")
    assert stale.identity(config(), "", b"w") != stale.identity(config(), "", b"w"), "weights of no files"


def test_it_is_attached_to_what_has_blocks(mooncake: FakeMooncake, served: Served) -> None:
    attach_store(config(mooncake.url), None, served)
    copies = BlockCopier([torch.zeros(9, 4, 8)], 6, torch.device("cpu"))
    attach_store(config(mooncake.url), copies, served)
    assert copies.storage is not None
    assert copies.storage.store.total == 12
    copies.storage.close()
    attention = msgspec.structs.replace(served.spec.body.layers[0].attention, bidirectional=True)
    layers = (msgspec.structs.replace(served.spec.body.layers[0], attention=attention),)
    spec = msgspec.structs.replace(served.spec, body=msgspec.structs.replace(served.spec.body, layers=layers))
    with pytest.raises(ConfigError, match=r"--kv-store: .*the model is an encoder, which keeps no KV blocks"):
        attach_store(config(), copies, replace(served, spec=spec))
