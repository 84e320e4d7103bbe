"""An executor that starts with a head, of EAGLE or of its model's own checkpoint: what it says of it, and which head it
refuses."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine_core import folder
from penstock.engine_core.embedded import demo_folder, draft_folder, eagle_folder
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig, SchedulerConfig
from penstock.protocol.errors import ModelError
from penstock.protocol.links import Role
from penstock.services.executor.startup import start
from penstock.services.supervisor import preflight
from tests.engine_core.models.mtp_heads import PLACE, write_headed
from tests.model_folder import linked


def config(**asked: object) -> Config:
    return Config(
        model=ModelConfig(dtype="float32", max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64),
        scheduler=SchedulerConfig(speculative_config=json.dumps({"method": "eagle", **asked})),
        executor=ExecutorConfig(device="cpu", cpu_threads=1),
    )


def test_the_embedded_head_by_its_name() -> None:
    engine = start(config(model=folder.EMBEDDED_EAGLE, num_speculative_tokens=3), 0)
    assert engine.ready.draft_tokens == 3
    spec, hidden = read_spec(demo_folder()), read_spec(demo_folder()).hidden
    own = json.loads((eagle_folder() / "config.json").read_text())
    model = spec.layers * spec.attention.kv_heads * spec.attention.head_dim
    keys = 2 * 16 * 4 * (model + own["num_key_value_heads"] * own["head_dim"])
    assert engine.ready.cache_bytes == (engine.ready.blocks + 1) * (keys + 16 * hidden * 4)


def test_a_head_of_another_model_is_refused_with_the_key(tmp_path: Path) -> None:
    shutil.copytree(eagle_folder(), tmp_path / "wide")
    path = tmp_path / "wide" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": 640, "head_dim": 64}))
    with pytest.raises(ModelError, match="hidden_size is 640; the model that the head drafts for has 320"):
        start(config(model=str(tmp_path / "wide")), 0)


def test_a_model_is_no_head() -> None:
    with pytest.raises(ModelError, match="EAGLE heads are known as"):
        start(config(model=str(draft_folder())), 0)


def test_a_set_acceptance_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = start(config(model=folder.EMBEDDED_EAGLE, synthetic_acceptance=0.8), 0)
    assert engine.runner.options.synthetic_acceptance == 0.8
    assert any(
        "output_is_wrong" in str(record.msg) or "output_is_wrong" in record.getMessage() for record in caplog.records
    )


def test_the_models_own_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its tensors are read for it, and are not told to be left; it says so before the start if they are damaged."""
    weights = write_headed(tmp_path)
    model = ModelConfig(
        model=str(tmp_path), dtype="float32", max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64,
        verify_weights=False, allow_wrong_output=True,
    )  # fmt: skip
    given = config(method="mtp", num_speculative_tokens=3, synthetic_acceptance=0.8)
    alone, asked = (Config(model=model, executor=given.executor), msgspec.structs.replace(given, model=model))
    ready, left = [], []
    for one in (alone, asked):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            engine = start(one, 0)
        ready.append(engine.ready)
        left.append([getattr(record, "fields", {})["tensors"] for record in caplog.records
                     if record.message == "left_unread"])  # fmt: skip
    assert [one.draft_tokens for one in ready] == [0, 3]
    assert engine.runner.options.synthetic_acceptance == 0.8
    grown = sum(tensor.numel() for tensor in weights.values()) * 4
    assert ready[1].weight_bytes - ready[0].weight_bytes == grown
    spec = read_spec(tmp_path)
    layer = 2 * 16 * spec.attention.kv_heads * spec.attention.head_dim * 4
    assert ready[1].cache_bytes == (ready[1].blocks + 1) * (layer * (spec.layers + 1) + 16 * spec.hidden * 4)
    inner = PLACE.removeprefix("model.")
    assert left[0] == [{inner: len(weights) + 2}]
    assert left[1] == [{inner: 2}], "copies of embeddings"


def test_a_damaged_head_is_refused_before_the_start(tmp_path: Path) -> None:
    write_headed(tmp_path / "glm")
    folder = linked(tmp_path / "model", without=("model.safetensors", "config.json"))
    tensors = load_file(tmp_path / "glm" / "model.safetensors") | {f"{PLACE}eh_proj.weight": torch.zeros(3, 3)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((tmp_path / "glm" / "config.json").read_text())
    asked = config(method="mtp")
    found = msgspec.structs.replace(asked, model=ModelConfig(model=str(folder)))
    with pytest.raises(ModelError, match=r"tensor model.layers.2.eh_proj.weight has shape \[3, 3\]"):
        preflight.check_files(found, {Role.EXECUTOR: (0,)}, folder, read_spec(folder))
