"""How executors find the memory of prefill replicas in the run directory."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from penstock.engine_core.distributed import nixl
from penstock.engine_core.execution.block_copies import BlockCopier
from penstock.protocol.config import Config, LinksConfig
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.links import HostAddress
from penstock.services.executor.prefill_memory import PrefillMemory, choose_network, living, reach_hosts
from tests.engine_core.execution.test_block_copies import CPU, HOST, memory

MODEL = ModelConfig(data_parallel_size=3, prefill_replicas=2, tensor_parallel_size=2)


def executor(index: int, run_dir: Path, label: str = "cpu") -> tuple[BlockCopier, PrefillMemory]:
    copier = BlockCopier(memory(), HOST, CPU, label=label, shared=index < 4)
    return copier, PrefillMemory(copier, MODEL, index, run_dir)


def test_members_find_those_of_their_own_number(tmp_path: Path) -> None:
    made = [executor(index, tmp_path)[0] for index in range(4)]
    for index in (4, 5):
        copier, found = executor(index, tmp_path)
        found.look()
        assert sorted(copier.others) == [0, 1]
        for replica, shared in copier.others.items():
            made[2 * replica + index - 4].host.fill_(10 * index + replica)
            assert int(shared.blocks.max()) == 10 * index + replica


def test_prefill_replicas_read_nobodys(tmp_path: Path) -> None:
    made = [executor(index, tmp_path) for index in range(4)]
    for copier, found in made:
        found.look()
        assert not copier.others


def test_a_new_executors_memory_takes_the_place_of_a_dead_ones(tmp_path: Path) -> None:
    first, _ = executor(0, tmp_path)
    copier, found = executor(4, tmp_path)
    found.look()
    before = copier.others[0]
    found.look()
    assert copier.others[0] is before, "mapped once"
    assert first.shared is not None
    number = first.shared.descriptor
    with (tmp_path / "stranger").open("w") as stranger:
        os.dup2(stranger.fileno(), number)  # as of a process that sleeps
        assert living(tmp_path / "executor-0.kv") is None
    os.close(number)
    assert living(tmp_path / "executor-0.kv") is None
    found.look()
    assert not copier.others
    again, _ = executor(0, tmp_path)
    found.look()
    again.host.fill_(3)
    assert int(copier.others[0].blocks.min()) == 3


def test_another_memory_of_the_same_number_is_seen(tmp_path: Path) -> None:
    """An executor that has slept may have it back before anybody looked."""
    first, _ = executor(0, tmp_path)
    copier, found = executor(4, tmp_path)
    found.look()
    before, other = copier.others[0], BlockCopier(memory(), HOST, CPU, label="cpu", shared=True)
    assert first.shared is not None
    assert other.shared is not None
    os.dup2(other.shared.descriptor, first.shared.descriptor)
    found.look()
    assert copier.others[0] is not before
    other.host.fill_(7)
    assert int(copier.others[0].blocks.max()) == 7


def test_ucx_listens_where_the_schedulers_are_reached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unless there is RDMA, which has devices of other names, or the operator has chosen."""
    found: dict[str, str] = {}
    choose_network(HostAddress("127.0.0.1", 7000), found, tmp_path / "none")
    assert found == {"UCX_NET_DEVICES": "lo"}
    found = {"UCX_NET_DEVICES": "bond0"}
    choose_network(HostAddress("127.0.0.1", 7000), found, tmp_path)
    assert found == {"UCX_NET_DEVICES": "bond0"}
    (tmp_path / "mlx5_0").touch()
    found = {}
    choose_network(HostAddress("127.0.0.1", 7000), found, tmp_path)
    assert found == {}
    assert not caplog.records
    choose_network(HostAddress("nowhere.invalid", 7000), found, tmp_path / "none")
    assert (found, [record.message for record in caplog.records]) == ({}, ["no_interface"])


@pytest.mark.parametrize("index", [1, 5])
def test_executors_are_reached_by_nixl_where_schedulers_have_an_address(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever shares its memory publishes it; whoever decodes reads others', of its own number in their groups."""
    made = BlockCopier(memory(), HOST, CPU, label="cpu", shared=index < 4)
    config = Config(model=MODEL)
    reach_hosts(config, index, made)
    assert (made.published, made.remote) == (None, None)
    config = msgspec.structs.replace(config, links=LinksConfig(scheduler_address="tcp://127.0.0.1:1"))
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with monkeypatch.context() as without:
        without.setattr(nixl, "MODULES", ("nixl_none",))
        with pytest.raises(ConfigError, match=r"--prefill-replicas: 2 is not allowed; .* NIXL is not installed"):
            reach_hosts(config, index, made)
    if not nixl.installed():
        pytest.skip(nixl.MISSING)
    reach_hosts(config, index, made)
    assert (made.published is not None, made.remote is not None, made.member) == (index < 4, index >= 4, 1)
    assert (made.address is not None) == (index < 4)


def test_what_cannot_be_mapped_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    executor(0, tmp_path, label="cuda")
    copier, found = executor(4, tmp_path)
    found.look()
    found.look()
    assert not copier.others
    assert [record.message for record in caplog.records].count("prefill_memory_failed") == 1
