"""Mistakes are found before the first process starts."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.config import ApiConfig, Config
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig
from penstock.protocol.errors import AddressError, ConfigError
from penstock.protocol.parts import parts_of
from penstock.services.executor.device import Gpu
from penstock.services.supervisor import preflight
from penstock.services.supervisor.preflight import (
    check_api,
    check_folder,
    check_kept,
    check_store,
    checked,
    has_template,
    rank_bytes,
    resolved,
)
from tests.model_folder import linked
from tests.services.executor.mooncake import fake_mooncake


def test_the_models_folder_and_name_are_filled_in(tmp_path: Path) -> None:
    linked(tmp_path / "model")
    found = resolved(Config(model=ModelConfig(model=str(tmp_path / "model"))))
    assert (found.model.model, found.model.served_model_name) == (str(tmp_path / "model"), "model")


def test_a_template_is_given_or_the_models(tmp_path: Path) -> None:
    assert has_template(tmp_path, "given.jinja")
    assert not has_template(tmp_path, "")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert has_template(tmp_path, "")


def test_an_address_that_is_not_this_machines_is_refused() -> None:
    with pytest.raises(AddressError, match="must be an address of this machine"):
        check_api(ApiConfig(host="192.0.2.1"))


H200 = Gpu(140 << 30, 90, "H200")


STORE = "mooncake://kv:1?global_segment_size=30&local_buffer_size=2"


def served(*, keep: bool, device: str = "auto", **options: int | str) -> Config:
    return Config(
        model=ModelConfig(model=str(demo_folder()), tensor_parallel_size=2, dtype="float32"),
        executor=ExecutorConfig(keep_weights=keep, device=device, **options),
    )


@pytest.mark.parametrize("models", [1, 2])
def test_weights_that_are_kept_are_counted_for_all_models(models: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus: Future[tuple[Gpu, ...]] = Future()
    gpus.set_result((H200, H200))
    each = 2 * rank_bytes(served(keep=True), read_spec(demo_folder()), on_gpu=True)
    held = 2 * 1000
    for config, needed in (
        (served(keep=True, kv_host_memory=400, state_host_memory=600), models * (each + held)),
        (served(keep=True, kv_store=STORE), models * (each + 2 * 32)),
        (served(keep=True), models * each),
        (served(keep=True, device="cpu"), 2 * models * each),
        (served(keep=False), 0),
    ):
        parts = parts_of(config)
        for room in (needed, needed - 1):
            monkeypatch.setattr(preflight, "available_memory", lambda room=room: room)
            if room == needed or not needed:
                check_kept([(config, parts)] * models, gpus)
                continue
            with pytest.raises(ConfigError, match=r"--keep-weights: .* of the host's memory.* are free; leave it out"):
                check_kept([(config, parts)] * models, gpus)


def test_the_hosts_memory_is_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = served(keep=True, device="cpu")
    room = 2 * rank_bytes(config, read_spec(demo_folder()), on_gpu=False)
    monkeypatch.setattr(preflight, "available_memory", lambda: room + 1)
    checked(msgspec.structs.replace(config, executor=ExecutorConfig(device="cpu")), parts_of(config))
    with pytest.raises(ConfigError, match="--keep-weights"):
        checked(config, parts_of(config))


def test_the_same_bits_on_a_cpu_are_refused_before_anything_starts() -> None:
    config = served(keep=False, device="cpu")
    model = msgspec.structs.replace(config.model, batch_invariant=True)
    with pytest.raises(ConfigError, match="--batch-invariant: True is not allowed; it needs a GPU"):
        checked(msgspec.structs.replace(config, model=model), parts_of(config))


def test_a_folder_of_blocks_is_made(tmp_path: Path) -> None:
    check_folder("")
    check_folder(str(tmp_path / "kv"))
    check_folder(str(tmp_path / "kv"))
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


def test_the_library_of_a_store_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_store("")
    with fake_mooncake(tmp_path) as mooncake:
        check_store(mooncake.url)
        (tmp_path / "mooncake").mkdir()
        (tmp_path / "mooncake" / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(ConfigError, match=r"--kv-store.*libibverbs.so.1: cannot open.*pip install"):
            check_store(mooncake.url)


def test_one_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, why in (("file", "File exists"), ("file/kv", "Not a directory"), ("a/b", "No such file or directory")):
        with pytest.raises(ConfigError, match=f"--kv-disk.*{path}.*none can be made: {why}"):
            check_folder(str(tmp_path / path))
