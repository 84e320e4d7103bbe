"""LoRA adapters that cannot be served end the start before a process is started, in one sentence that names them."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models.adapter_folder import place_bytes
from penstock.engine_core.models.sharding import part_spec
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.config import ApiConfig, Config
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.parts import parts_of
from penstock.services.client.model_info import read_model_info
from penstock.services.executor.device import Gpu
from penstock.services.supervisor import preflight
from penstock.services.supervisor.options import sized
from tests.e2e.test_adapters import write_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def config(**changes: Any) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        settings = json.loads((write_adapter(folder, 1) / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(settings | changes))

    return write


def tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        held = load_file(write_adapter(folder, 1) / WEIGHTS)
        change(held)
        save_file(held, folder / WEIGHTS)

    return write


def file(name: str, text: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / name).write_text(text)

    return write


def pickled(folder: Path) -> None:
    (write_adapter(folder, 1) / WEIGHTS).rename(folder / "adapter_model.bin")


FOLDERS: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing", lambda folder: None, "{}: no such folder"),
    ("a file", lambda folder: folder.touch(), "{}: no such folder"),
    ("empty", lambda folder: folder.mkdir(), f"{{}}/{CONFIG}: no such file"),
    ("a model and no adapter", file("config.json", "{}"), f"{{}}/{CONFIG}: no such file"),
    ("no JSON", file(CONFIG, "hello"), f"{{}}/{CONFIG}: a JSON object is expected: "),
    ("another method", file(CONFIG, '{"peft_type": "IA3"}'),
     f"{{}}/{CONFIG}: peft_type is 'IA3'; adapters of type LORA are served"),
    ("pickled", pickled, "{}/adapter_model.bin: it is pickled, which runs code when it is read"),
    ("a rank too high", lambda folder: write_adapter(folder, 1, rank=64),
     f"{{}}/{CONFIG}: r is 64; model.layers.0.self_attn.q_proj has rank 64, and --max-lora-rank is 16"),
    ("of another model", tensors(lambda held: held.update({QUERY: np.zeros((4, 7), np.float32)})),
     f"{{}}/{WEIGHTS}: tensor {QUERY} has shape [4, 7]; the model and the adapter's rank ask for [4, 320]"),
    ("a target that is not served", config(target_modules=["q_proj", "embed_tokens"]),
     f"{{}}/{CONFIG}: target_modules is ['q_proj', 'embed_tokens']; embed_tokens names no matrix of the model's text "
     "layers that is served"),
]  # fmt: skip


def started(modules: str, **options: Any) -> Config:
    """All checks of `penstock serve --enable-lora --lora-modules …`, with the embedded model."""
    model = ModelConfig(enable_lora=True, **options)
    found = Config(model=model, api=ApiConfig(lora_modules=modules), executor=ExecutorConfig())
    found = sized(found, 2)
    return preflight.checked(found, parts_of(found))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "check_api", lambda options: None)
    monkeypatch.setattr(preflight, "find_gpus", tuple)


def test_a_folder_as_peft_saves_it(tmp_path: Path) -> None:
    started(f"sql={write_adapter(tmp_path / 'a', 1)}")


@pytest.mark.parametrize(("name", "build", "expected"), FOLDERS, ids=[name for name, _, _ in FOLDERS])
def test_a_folder_that_cannot_be_served(
    name: str, build: Callable[[Path], object], expected: str, tmp_path: Path
) -> None:
    build(tmp_path / "a")
    with pytest.raises(ModelError) as caught:
        started(f"good={write_adapter(tmp_path / 'good', 1)},sql={tmp_path}/a")
    said = str(caught.value)
    assert said.startswith("the adapter 'sql' cannot be served: " + expected.replace("{}", str(tmp_path / "a"))), name
    assert "\n" not in said


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ("penstock-demo={}", "--lora-modules: 'penstock-demo' is not allowed; the model itself has this name"),
        ("alias={}", "--lora-modules: 'alias' is not allowed; the model itself has this name"),
        ("a={},a={}", "--lora-modules: 'a={}' is not allowed; the name 'a' is given twice"),
    ],
)
def test_names_that_clash(modules: str, expected: str, tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path / "a", 1))
    with pytest.raises(ConfigError) as caught:
        started(modules.replace("{}", folder), served_model_name="penstock-demo,alias")
    assert str(caught.value) == expected.replace("{}", folder)


@pytest.mark.parametrize("gpus", [(Gpu(1 << 30, 90, "H200"),), ()])
def test_places_that_do_not_fit(gpus: tuple[Gpu, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_gpus", lambda: gpus)
    monkeypatch.setattr(preflight, "available_memory", lambda: 9 << 27)
    started("", max_lora_rank=256, max_loras=8)
    with pytest.raises(ConfigError, match=r"--max-loras: 1024 .* places of rank 256 take .*GiB beside .* of weights"):
        started("", max_lora_rank=256, max_loras=1024)


def test_places_of_experts_need_some() -> None:
    with pytest.raises(ConfigError, match="--lora-experts: True is not allowed; the model has no experts"):
        started("", lora_experts=True)


@pytest.mark.parametrize(("ranks", "room"), [(1, 1.0), (2, 1.9)])
def test_places_of_every_executor_lie_beside_its_weights(
    ranks: int, room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """room: for so many executors' places, and for no weights."""
    places = 1000 * place_bytes(part_spec(read_spec(demo_folder()), ranks), 16, 4)
    monkeypatch.setattr(preflight, "available_memory", lambda: int(room * places))
    with pytest.raises(ConfigError, match="--max-loras: 1000"):
        started("", max_loras=1000, tensor_parallel_size=ranks)
    monkeypatch.setattr(preflight, "available_memory", lambda: int((ranks + 1) * places))
    started("", max_loras=1000, tensor_parallel_size=ranks)


@pytest.mark.parametrize(("option", "checking", "beginning"), [("modules", 4000, 2000), ("directory", 0, 0)])
def test_a_thousand_adapters_are_few_reads(
    option: str, checking: int, beginning: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are opened for them: before the start, and by each api process. A version is of both."""
    first = write_adapter(tmp_path / "first", 1)
    for number in range(1000):
        (tmp_path / "all" / f"a{number}").mkdir(parents=True)
        for name in (CONFIG, WEIGHTS):
            os.link(first / name, tmp_path / "all" / f"a{number}" / name)
    modules = ",".join(f"a{number}={tmp_path}/all/a{number}" for number in range(1000))
    api = ApiConfig(lora_modules=modules) if option == "modules" else ApiConfig(lora_dir=str(tmp_path / "all"))
    opened: list[str] = []
    real = io.open
    monkeypatch.setattr(io, "open", lambda file, *rest, **more: opened.append(str(file)) or real(file, *rest, **more))
    config = sized(Config(model=ModelConfig(enable_lora=True), api=api), 2)
    config = preflight.checked(config, parts_of(config))
    assert sum(str(tmp_path) in file for file in opened) <= checking
    opened.clear()
    names = read_model_info(config).adapters
    assert sum(str(tmp_path) in file for file in opened) <= beginning
    assert names is not None
    assert names.find("a999") is not None
    assert opened, "they are counted"
