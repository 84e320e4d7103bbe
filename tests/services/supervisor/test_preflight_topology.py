"""Where a host's processes meet those of others: what is checked before any starts, and what the log says."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from penstock.engine_core.distributed import nixl
from penstock.protocol.config import ApiConfig, Config, LinksConfig, RunConfig, TokenizerConfig
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig
from penstock.protocol.errors import AddressError, ConfigError
from penstock.protocol.links import Role
from penstock.protocol.parts import parts_of
from penstock.services.links.curve import new_keys, write_keys
from penstock.services.supervisor.preflight import check_nixl, check_topology, elsewhere, executor_config, listening


@pytest.fixture
def keys(tmp_path: Path) -> str:
    file = tmp_path / "link.keys"
    write_keys(file, new_keys())
    return str(file)


def configured(parts: str = "", *, ranks: int = 1, replicas: int = 1, first: int = 0, meeting: str = "",
               **links: str) -> Config:  # fmt: skip
    return Config(
        model=ModelConfig(tensor_parallel_size=ranks, data_parallel_size=replicas),
        api=ApiConfig(api_processes=1),
        tokenizer=TokenizerConfig(tokenizer_processes=2),
        executor=ExecutorConfig(rendezvous=meeting, first_executor=first),
        links=LinksConfig(**links),
        run=RunConfig(parts=parts),
    )


def heard(config: Config) -> list[str]:
    return [f"{option} {where}" for option, where in listening(config, parts_of(config))]


def test_nobody_listens_for_others_on_one_machine() -> None:
    assert heard(configured(ranks=2, replicas=2)) == []
    check_topology(configured(), parts_of(configured()))


def test_binders_listen_on_their_own_host_alone() -> None:
    links = {"scheduler_address": "tcp://h:7000", "tokenizer_address": "tcp://h:7100"}
    given = {"ranks": 2, "replicas": 2, "meeting": "tcp://h:29500", **links}
    assert heard(configured("api,tokenizer,scheduler,executor:0,executor:2-3", **given)) == [
        *(f"--scheduler-address tcp://h:{port}" for port in (7000, 7001, 7002, 7003)),
        *(f"--tokenizer-address tcp://h:{port}" for port in (7100, 7101)),
        *(f"--rendezvous tcp://h:{port}" for port in (29500, 29501)),
    ]
    assert heard(configured("executor:1", **given)) == []
    assert heard(configured("scheduler:1,executor:2", **given)) == [
        "--scheduler-address tcp://h:7002", "--scheduler-address tcp://h:7003", "--rendezvous tcp://h:29501",
    ]  # fmt: skip


@pytest.mark.parametrize("address", ["tcp://h:7000", ""])
def test_blocks_between_hosts_need_nixl_where_executors_are(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(replicas=2, scheduler_address=address)
    check_nixl(config)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, prefill_replicas=1))
    monkeypatch.setattr(nixl, "MODULES", ("nixl_none",))
    if not address:
        check_nixl(config)
        return
    with pytest.raises(ConfigError) as refused:
        check_nixl(config)
    assert str(refused.value) == (
        "--prefill-replicas: 1 is not allowed; with --scheduler-address KV blocks go between hosts by NIXL, and NIXL "
        "is not installed: pip install 'penstock[nixl]'"
    )


def test_an_executor_alone_meets_nobody() -> None:
    assert heard(configured(meeting="tcp://h:29500")) == []


def test_an_address_that_is_taken_is_named_by_its_option(keys: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = configured(scheduler_address=f"tcp://127.0.0.1:{port}", link_keys=keys)
        with pytest.raises(AddressError, match="another process listens there") as refused:
            check_topology(config, parts_of(config))
    assert (refused.value.option, refused.value.value) == ("--scheduler-address", f"tcp://127.0.0.1:{port}")


def test_an_address_of_another_host_is_refused_where_one_would_listen(keys: str) -> None:
    given = {"ranks": 2, "meeting": "tcp://192.0.2.77:29500", "link_keys": keys}
    config = configured("api,tokenizer,scheduler,executor:0", **given)
    with pytest.raises(AddressError, match="must be an address of this machine") as refused:
        check_topology(config, parts_of(config))
    assert refused.value.option == "--rendezvous"
    there = configured("executor:1", **given)
    check_topology(there, parts_of(there))


@pytest.mark.parametrize("given", [{"scheduler_address": "tcp://h:1"}, {"tokenizer_address": "tcp://h:1"}])
def test_keys_are_read_before_anything_starts(given: dict[str, str], tmp_path: Path) -> None:
    config = configured("executor:0", **given, link_keys=str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="--link-keys"):
        check_topology(config, parts_of(config))


def test_a_rendezvous_needs_keys_too(tmp_path: Path) -> None:
    config = configured("executor:1", ranks=2, meeting="tcp://h:1", link_keys=str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="--link-keys"):
        check_topology(config, parts_of(config))


def test_the_launcher_counts_executors_itself() -> None:
    config = configured("executor:2-3", ranks=4, first=1)
    with pytest.raises(ConfigError, match="are counted by --parts") as refused:
        check_topology(config, parts_of(config))
    assert refused.value.option == "--first-executor"
    fine = configured("executor:2-3", ranks=4, first=2)
    check_topology(fine, parts_of(fine))
    none = configured("api,tokenizer,scheduler", ranks=4, first=2)
    check_topology(none, parts_of(none))


def test_each_executors_place_is_its_gpu() -> None:
    config = configured("executor:1,executor:4-5", ranks=6)
    parts = parts_of(config)
    places = [index - executor_config(config, parts, index).executor.first_executor for index in parts[Role.EXECUTOR]]
    assert places == [0, 1, 2]
    assert all(executor_config(config, parts, index).model == config.model for index in parts[Role.EXECUTOR])


def test_the_log_says_what_is_elsewhere_and_where_it_is_looked_for() -> None:
    given = {"ranks": 2, "meeting": "tcp://h:29500", "scheduler_address": "tcp://h:7000"}
    config = configured("executor:1", **given)
    assert elsewhere(config, parts_of(config)) == {
        "elsewhere": "api,tokenizer,scheduler,executor",
        "schedulers": "tcp://h:7000",
        "groups": "tcp://h:29500",
    }
    config = configured("api,tokenizer,scheduler,executor:0", **given)
    assert elsewhere(config, parts_of(config))["elsewhere"] == "executor"
