"""From options to a runner: device, type, cache size, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from msgspec import structs

from penstock.engine_core.models.memory_estimate import host_places, snapshot_bytes
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig
from penstock.protocol.errors import ConfigError, ModelError
from penstock.services.executor import startup
from penstock.services.executor.startup import (
    choose_device,
    choose_dtype,
    start,
    step_tokens,
    take_device,
)
from penstock.services.supervisor import process
from tests.engine_core.execution.harness import tiny_spec
from tests.engine_core.execution.test_recurrent_state import hybrid
from tests.services.executor.folder import LENGTH, write_folder

BLOCK_BYTES = 2 * 2 * 16 * 1 * 8 * 4  # keys and values, layers, tokens, heads, dim, float32


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write_folder(tmp_path / "tiny"))


def config(
    folder: str, *, kv_cache_memory: int = 0, max_model_len: int = 0, dtype: str = "float32",
    kv_cache_dtype: str = "auto", kv_host_memory: int = 0,
) -> Config:  # fmt: skip
    return Config(
        model=ModelConfig(
            model=folder, load_format="dummy", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=max_model_len,
            dtype=dtype, kv_cache_dtype=kv_cache_dtype,
        ),
        executor=ExecutorConfig(device="cpu", cpu_threads=1, kv_cache_memory=kv_cache_memory,
                                kv_host_memory=kv_host_memory),
    )  # fmt: skip


def test_a_small_model_takes_no_more_cache_than_its_slots_can_use(folder: str) -> None:
    ready = start(config(folder), 0).ready
    assert ready.blocks == 4 * LENGTH // 16
    assert ready.cache_bytes == (ready.blocks + 1) * BLOCK_BYTES
    assert (ready.block_size, ready.device, ready.dtype) == (16, "cpu", "float32")
    assert ready.weight_bytes > 0
    assert ready.load_seconds > 0


def test_given_bytes_decide(folder: str) -> None:
    assert start(config(folder, kv_cache_memory=10 * BLOCK_BYTES), 0).ready.blocks == 9


def test_half_the_bytes_a_number_twice_the_blocks(folder: str) -> None:
    ready = start(config(folder, kv_cache_memory=10 * BLOCK_BYTES, dtype="float16"), 0).ready
    assert (ready.blocks, ready.dtype) == (19, "float16")


def test_a_byte_a_number_in_fp8(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ready = start(config(folder, kv_cache_memory=10 * BLOCK_BYTES, kv_cache_dtype="fp8"), 0).ready
    assert (ready.blocks, ready.dtype, ready.kv_cache_dtype) == (39, "float32", "fp8_e4m3")
    assert ready.cache_bytes == 10 * BLOCK_BYTES
    assert [record.message for record in caplog.records].count("kv_scales") == 1


def test_weights_that_are_served_otherwise_than_they_say_are_logged(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "type": "int"}}
    path = Path(folder) / "config.json"
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    with caplog.at_level("INFO"):
        start(config(folder), 0)
    assert [record.message for record in caplog.records].count("served_otherwise") == 1
    told = [fields["reason"] for record in caplog.records if "reason" in (fields := getattr(record, "fields", {}))]
    assert told
    assert len(told) == len(set(told)), "each is told once"


def test_a_cache_below_one_request_is_refused_with_the_length_that_fits(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len.*at most 48.*--kv-cache-memory"):
        start(config(folder, kv_cache_memory=4 * BLOCK_BYTES), 0)
    assert start(config(folder, kv_cache_memory=4 * BLOCK_BYTES, max_model_len=48), 0).ready.blocks == 3


def test_a_cache_that_the_host_has_no_memory_for_is_refused_by_its_own_name(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-memory.*the host has [\d.]+ GiB"):
        start(config(folder, kv_cache_memory=1 << 49), 0)

    def full(*_: object) -> NoReturn:
        raise MemoryError("Unable to allocate 172 MiB")

    monkeypatch.setattr(startup, "Runner", full)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory.*Unable to allocate 172 MiB"):
        start(config(folder), 0)


def test_snapshots_in_the_hosts_memory() -> None:
    """As many as the bytes hold, of a rank's share; none of a model without recurrent layers."""
    each = snapshot_bytes(hybrid(), 2)
    name, what = "--state-host-memory", "a snapshot"
    assert [host_places(name, given, each, what, 1 << 40) for given in (0, each, 5 * each - 1)] == [0, 1, 4]
    assert host_places(name, each, snapshot_bytes(tiny_spec(), 2), what) == 0
    with pytest.raises(ConfigError, match=rf"--state-host-memory.*a snapshot takes {each} bytes"):
        host_places(name, each - 1, each, what)
    with pytest.raises(ConfigError, match=r"--state-host-memory.*the host has 0.0 GiB"):
        host_places(name, 1 << 49, each, what, 1000)


def test_blocks_in_the_hosts_memory(folder: str) -> None:
    """As many as the bytes hold, with what copies them; none where that is not asked for."""
    assert start(config(folder), 0).copies is None
    engine = start(config(folder, kv_host_memory=5 * BLOCK_BYTES + 1), 0)
    assert (engine.ready.host_blocks, engine.ready.host_bytes) == (5, 5 * BLOCK_BYTES)
    assert engine.copies is not None
    assert not engine.copies.busy
    with pytest.raises(ConfigError, match=rf"--kv-host-memory.*a KV block takes {BLOCK_BYTES} bytes"):
        start(config(folder, kv_host_memory=BLOCK_BYTES - 1), 0)
    with pytest.raises(ConfigError, match=r"--kv-host-memory.*the host has [\d.]+ GiB"):
        start(config(folder, kv_host_memory=1 << 49), 0)


def test_a_length_beyond_the_model_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="--max-model-len"):
        start(config(folder, max_model_len=LENGTH + 1), 0)


def test_a_cpu_cannot_promise_the_same_bits_in_every_batch(folder: str) -> None:
    wanted = config(folder)
    with pytest.raises(ConfigError, match=r"--batch-invariant.*needs a GPU"):
        start(structs.replace(wanted, model=structs.replace(wanted.model, batch_invariant=True)), 0)


def test_a_folder_without_weights_is_refused(folder: str) -> None:
    with pytest.raises(ModelError):
        start(Config(model=ModelConfig(model=folder), executor=ExecutorConfig(device="cpu")), 0)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto", 0) == torch.device("cpu")
    assert choose_device("cpu", 0) == torch.device("cpu")
    with pytest.raises(ConfigError, match="--device"):
        choose_device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    assert choose_device("cpu", 0) == torch.device("cpu")
    for option in ("auto", "cuda"):
        with pytest.raises(ConfigError, match="executor 2, counted from --first-executor, finds 2 GPUs"):
            choose_device(option, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("cuda", 2) == torch.device("cuda", 0), "a supervisor shows each its own"
    monkeypatch.setenv(process.PARENT, "1")
    with pytest.raises(ConfigError, match="executor 2, counted from --first-executor, finds 1 GPUs"):
        choose_device("auto", 2)


@pytest.mark.parametrize(("index", "first", "gpu"), [(5, 4, 1), (4, 4, 0), (1, 0, 1)])
def test_a_host_has_a_gpu_for_each_of_its_own_executors(
    index: int, first: int, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(startup, "set_fp_fusion", lambda: True)  # which is a variable of the environment
    config = Config(model=ModelConfig(tensor_parallel_size=8), executor=ExecutorConfig(first_executor=first))
    assert take_device(config, index) == torch.device("cuda", gpu) == taken[0]
    with pytest.raises(ConfigError, match=f"this host's executor {7 - first}"):
        take_device(config, 7)


@pytest.mark.parametrize("has", [True, False])
def test_a_triton_without_the_setting_of_fused_sums_is_told(
    has: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(startup, "set_fp_fusion", lambda: has)
    take_device(Config(), 0)
    assert ("fp_fusion_unset" in caplog.messages) is not has


def test_types(folder: str) -> None:
    spec = read_spec(Path(folder))
    gpu = torch.device("cuda")
    assert choose_dtype(Config(), spec, gpu) is torch.bfloat16
    assert choose_dtype(Config(model=ModelConfig(dtype="float16")), spec, gpu) is torch.float16


def test_the_budget_of_a_step_follows_the_device_and_holds_every_row() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert step_tokens(ModelConfig(), cpu) == 512
    assert step_tokens(ModelConfig(), gpu) == 8192
    assert step_tokens(ModelConfig(max_num_seqs=700), cpu) == 700
    assert step_tokens(ModelConfig(max_num_batched_tokens=300), cpu) == 300
