"""An executor that starts with an EAGLE head, by drafts.py: what it says of it, and which head it refuses."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from penstock.engine_core import folder
from penstock.engine_core.embedded import demo_folder, draft_folder, eagle_folder
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.config import Config, ExecutorConfig, ModelConfig, SchedulerConfig
from penstock.protocol.errors import ModelError
from penstock.services.executor.startup import start


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
