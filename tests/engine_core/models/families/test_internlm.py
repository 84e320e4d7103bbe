from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import InternLM3Config, PreTrainedConfig

from penstock.engine_core.models.spec import read_spec
from tests.engine_core.models.parity import SIZES, PagedRun, ours, random_prompts, theirs, write_checkpoint

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0}
CASES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "internlm3": (InternLM3Config, {"head_dim": 24, "rope_parameters": DYNAMIC}),
    "internlm3, biases": (InternLM3Config, {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
}


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_a_published_file(case: str, tmp_path: Path) -> None:
    """transformers writes the model as a Llama; its makers' files have a class of their own, and its own keys."""
    kind, options = CASES[case]
    write_checkpoint(tmp_path, kind(**{**SIZES, **options}))
    prompts, path = random_prompts(2), tmp_path / "config.json"
    expected = theirs(tmp_path)(torch.tensor(prompts)).logits
    values = json.loads(path.read_text())
    values |= {"architectures": ["InternLM3ForCausalLM"], "auto_map": {"AutoModel": "modeling.Model"}}
    values |= {"bias": values.pop("mlp_bias", False), "qkv_bias": values.pop("attention_bias", False)}
    path.write_text(json.dumps(values))
    assert read_spec(tmp_path).family == "internlm3"
    run = PagedRun(ours(tmp_path, length=256), prompts)
    run.prefill()
    for sequence, logits in zip(run.sequences, expected, strict=True):
        torch.testing.assert_close(torch.cat(sequence.logits), logits, atol=1e-4, rtol=0)
