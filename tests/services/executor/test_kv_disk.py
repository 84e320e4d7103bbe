"""The folder of an executor's KV blocks: whose it is, and when what is in it is of use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig
from penstock.protocol.errors import ConfigError
from penstock.services.executor import kv_disk
from penstock.services.executor.kv_disk import Served, attach_disk, files_digest, own_folder, remove_others
from tests.services.executor.folder import write_folder

CPU = torch.device("cpu")


def config(folder: Path, *, name: str = "org/tiny", size: int = 1 << 20, **model: Any) -> Config:
    return Config(
        model=ModelConfig(model="tiny", served_model_name=name, **model),
        executor=ExecutorConfig(device="cpu", kv_host_memory=1, kv_disk=str(folder), kv_disk_size=size),
    )


@pytest.fixture
def found(tmp_path_factory: pytest.TempPathFactory) -> Served:
    model = write_folder(tmp_path_factory.mktemp("models") / "tiny")
    return Served(read_spec(model), None, 64, ALONE, torch.float32, (model,), files_digest([model]))


@pytest.fixture
def copies() -> Iterator[BlockCopier]:
    found = BlockCopier([torch.zeros(9, 4, 8)], 6, CPU)
    yield found
    if found.storage is not None:
        found.storage.close()


def test_each_model_and_executor_has_a_private_folder(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    made = [own_folder(config(root, name=name), index) for name, index in (("org/a", 0), ("org/a", 1), ("b,c", 0))]
    assert [folder.relative_to(root).as_posix() for folder, _ in made] == ["org-a/executor-0", "org-a/executor-1",
                                                                            "b/executor-0"]  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in (root, *root.iterdir(), *root.glob("*/*"))} == {0o700}
    for _, lock in made:
        os.close(lock)


@pytest.mark.parametrize("name", ["../../etc", "..", "/", "a\nb"])
def test_no_name_leads_elsewhere(tmp_path: Path, name: str) -> None:
    folder, lock = own_folder(config(tmp_path, name=name), 0)
    os.close(lock)
    assert folder.resolve().parent.parent == tmp_path.resolve()


def test_two_servers_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, lock = own_folder(config(tmp_path), 0)
    monkeypatch.setattr(kv_disk, "LOCK_SECONDS", 0.0)
    with pytest.raises(ConfigError, match=f"--kv-disk: .*another server uses {folder}: give each a folder"):
        own_folder(config(tmp_path), 0)
    os.close(lock)
    os.close(own_folder(config(tmp_path), 0)[1])


def test_a_folder_that_others_may_enter(tmp_path: Path) -> None:
    own, lock = own_folder(config(tmp_path), 0)
    os.close(lock)
    own.chmod(0o755)
    with pytest.raises(ConfigError, match=r"must be a folder of this user's with mode 0700"):
        own_folder(config(tmp_path), 0)
    own.parent.rename(tmp_path / "elsewhere")
    (tmp_path / "org-tiny").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"mode 0700"):
        own_folder(config(tmp_path), 0)


def test_folders_of_executors_that_are_no_more(tmp_path: Path) -> None:
    """A server that has fewer of them now removes what they had, unless another one uses it."""
    folders = [own_folder(config(tmp_path, tensor_parallel_size=4), index) for index in range(4)]
    for index in (0, 1, 3):
        os.close(folders[index][1])
    remove_others(config(tmp_path, tensor_parallel_size=2), folders[0][0])
    assert sorted(path.name for path in (tmp_path / "org-tiny").iterdir()) == ["executor-0", "executor-1", "executor-2"]
    os.close(folders[2][1])


def test_a_disk_that_fails_is_none(
    tmp_path: Path,
    copies: BlockCopier,
    found: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "mkdir", fails)
    attach_disk(config(tmp_path), 0, copies, found)
    assert copies.storage is None
    assert "kv_disk_fails" in caplog.text


def test_too_little_room(tmp_path: Path, copies: BlockCopier, found: Served) -> None:
    with pytest.raises(ConfigError, match=r"--kv-disk-size: 4096 is not allowed; a KV block takes 128 bytes"):
        attach_disk(config(tmp_path, size=4096), 0, copies, found)
    attach_disk(config(tmp_path, size=3 * 4096), 0, copies, found)
    assert copies.storage is not None
    assert copies.storage.store.total == 1


def test_an_encoder_has_none(tmp_path: Path, found: Served) -> None:
    first = found.spec.body.layers[0]
    attention = msgspec.structs.replace(first.attention, bidirectional=True)
    body = msgspec.structs.replace(found.spec.body, layers=(msgspec.structs.replace(first, attention=attention),))
    with pytest.raises(ConfigError, match=r"--kv-disk: .*the model is an encoder, which keeps no KV blocks"):
        attach_disk(config(tmp_path), 0, None, replace(found, spec=msgspec.structs.replace(found.spec, body=body)))


def test_none_is_made_where_there_are_no_blocks(tmp_path: Path, found: Served) -> None:
    attach_disk(config(tmp_path / "kv"), 0, None, found)
    assert not (tmp_path / "kv").exists()


def test_weights_that_changed_while_they_were_read_are_of_this_life_alone(tmp_path: Path, found: Served) -> None:
    assert found.identity(config(tmp_path), "") == found.identity(config(tmp_path), "")
    stale = replace(found, files=b"")
    assert stale.identity(config(tmp_path), "") != stale.identity(config(tmp_path), "")


def test_what_tells_one_model_from_another(tmp_path: Path, found: Served) -> None:
    told = {
        own.identity(config(tmp_path, **options), layout)
        for options, layout, own in (
            ({}, "", found),
            ({}, "other", found),
            ({"block_size": 32}, "", found),
            ({"seed": 1}, "", found),
            ({"load_format": "dummy"}, "", found),
            ({}, "", replace(found, spec=msgspec.structs.replace(found.spec, hidden=found.spec.hidden + 1))),
            ({}, "", replace(found, length=128)),
            ({}, "", replace(found, group=Group(0, 2))),
            ({}, "", replace(found, group=Group(1, 2))),
            ({}, "", replace(found, group=Group(stage=1, stages=2))),
            ({}, "", replace(found, dtype=torch.bfloat16)),
        )
    }
    assert len(told) == 11
    assert found.identity(config(tmp_path, max_num_seqs=7), "") in told, "what blocks do not depend on"


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(1 << 20))
    (folder / "config.json").write_text("{}")
    before, times = files_digest([folder]), weights.stat()
    assert files_digest([folder]) == before
    weights.write_bytes(bytes(1 << 20))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert files_digest([folder]) != before, "written anew"
    weights.write_bytes(b"1" * (1 << 20))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert files_digest([folder]) != before, "other content with an old time"
    weights.write_bytes(bytes(1 << 20))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert files_digest([folder]) == before
    (folder / "config.json").write_text("[]")
    assert files_digest([folder]) != before
