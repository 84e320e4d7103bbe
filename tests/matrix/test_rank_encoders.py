"""An encoder and its classifier shared out over ranks give the vectors and logits that they give whole."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.messages import Pooling, Sampling
from penstock.protocol.steps import SlotStart, StepPlan
from tests.ranks import Ranks

LENGTH = 64
SIZES: dict[str, Any] = {
    "vocab_size": 150, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 66, "id2label": {"0": "a", "1": "b"},
}  # fmt: skip
FILES: dict[str, dict[str, Any]] = {
    "bert": {"architectures": ["BertForSequenceClassification"], "model_type": "bert"},
    "roberta": {"architectures": ["RobertaForSequenceClassification"], "model_type": "roberta", "pad_token_id": 1},
    "gte": {"architectures": ["GteForSequenceClassification"], "model_type": "gte"},
    "nomic": {"architectures": ["NomicBertForSequenceClassification"], "model_type": "nomic_bert"},
    "modernbert": {"architectures": ["ModernBertForSequenceClassification"], "model_type": "modernbert",
                   "local_attention": 8},
}  # fmt: skip
PROMPTS = [[(7 * at + 3 * number) % 140 + 5 for at in range(length)] for number, length in enumerate((9, 1, 40))]


def vectors(group: Group, folder: Path) -> list[list[float]]:
    """Of three texts, the last of which is classified as a pair."""
    spec = read_spec(folder)
    model = build(spec, torch.float32, torch.device("cpu"), LENGTH, group=group)
    for name, place in model.destinations().items():
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        tensor = torch.randn(place.shape, generator=random) * (place.fan_in**-0.5 if place.fan_in else 0.3)
        if place.tensor is not None:
            parts = [tensor.narrow(place.axis, run.start, run.stop - run.start) for run in place.runs]
            part = torch.cat(parts, place.axis) if parts else tensor.narrow(
                place.axis, place.start, place.tensor.shape[place.axis]
            )  # fmt: skip
            place.tensor.copy_(part)
    options = RunnerOptions(
        device=torch.device("cpu"), dtype=torch.float32, blocks=0, block_size=16, max_model_len=LENGTH, max_num_seqs=4,
        group=group, step_tokens=LENGTH,
    )  # fmt: skip
    poolings = (Pooling(kind="mean"), Pooling(kind="cls"), Pooling(kind="mean", classify=True, second=12))
    starts = tuple(
        SlotStart(
            slot=slot, token_ids=np.array(prompt, "<i4").tobytes(), prompt_tokens=len(prompt), computed=0, blocks=b"",
            sampling=Sampling(max_tokens=1), seed=0, pooling=pooling,
        )
        for slot, (prompt, pooling) in enumerate(zip(PROMPTS, poolings, strict=True))
    )  # fmt: skip
    chunks = np.array([(slot, 0, len(prompt), 0) for slot, prompt in enumerate(PROMPTS)], "<i4")
    with torch.inference_mode():
        runner = Runner(model, spec, options)
        found = runner.collect(runner.launch(StepPlan(step=1, epoch=0, starts=starts, chunks=chunks.tobytes())))
    return [np.frombuffer(part.values, "<f4").tolist() for part in found.vectors]


@pytest.mark.parametrize("name", FILES)
def test_ranks_give_the_vectors_of_one(name: str, ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | FILES[name]))
    torch.set_num_threads(1)
    expected = vectors(ALONE, tmp_path)
    assert [len(values) for values in expected] == [32, 32, 2]
    for found in ranks.run(2, vectors, tmp_path):
        for values, own in zip(found, expected, strict=True):
            assert values == pytest.approx(own, abs=1e-5)
