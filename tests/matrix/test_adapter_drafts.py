"""Adapters in cells of the matrix, with drafts of every kind: whatever shares the steps, each request says what its
adapter says alone, and those without say what a server without adapters does. Greedy and sampled, free and under a
grammar, several choices, few blocks; three adapters in two places. fp32 on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.structured_engine import Cell, Engine
from penstock.engine_core.embedded import demo_folder, draft_folder, eagle_folder
from penstock.engine_core.models.adapter_folder import adaptable, adapter_version
from penstock.engine_core.models.spec import read_spec, stored_name
from penstock.protocol.messages import Adapter
from tests.engine_core.grammar.vocabulary import tokens
from tests.engine_core.models.mtp_heads import write_headed
from tests.matrix.test_speculation import COUNT, TINY, Ask, Outputs, asks, outputs

NAMES = ("", "a", "b", "c")  # of the requests, in turn
PLACES = 2
DRAFTS = {"none": None, "ngram": None, "draft_model": draft_folder(), "eagle": eagle_folder()}
CELLS = {
    "pieces": Cell(depth=1, budget=32, prefix_caching=False, max_num_seqs=16),
    "prefixes": Cell(depth=2, block_size=8, max_num_seqs=16),
    "preemption": TINY[-1],
}
OFTEN = {
    "none": "preemption",
    "ngram": "pieces",
    "draft_model": "prefixes",
    "eagle": "preemption",
}  # not in long runs alone
ALONE = Cell(depth=1, drafts=False, prefix_caching=False, max_num_seqs=1, adapter_places=PLACES)


def write_mild(folder: Path, base: Path, name: str) -> Adapter:
    """A random adapter of queries and of what MLPs read, mild enough that its model often says what the base does."""
    spec, random, tensors = read_spec(base), np.random.default_rng(ord(name)), {}
    for module, (rows, columns) in adaptable(spec).items():
        if module.endswith(("q_proj", "up_proj")):
            for half, shape in (("A", (4, columns)), ("B", (rows, 4))):
                values = random.normal(0, 0.4 if half == "B" else columns**-0.5, shape)
                tensors[f"base_model.model.{stored_name(spec, module)}.lora_{half}.weight"] = values.astype(np.float32)
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return Adapter(name, str(folder), adapter_version(folder))


class Scene:
    """A model with adapters, what is asked of it, and what each request says alone."""

    def __init__(self, folder: Path, base: Path, count: int) -> None:
        self.base = base
        adapters = {name: write_mild(folder / name, base, name) for name in NAMES if name}
        self.asks: list[Ask] = [
            msgspec.structs.replace(ask, adapter=adapters.get(NAMES[number % len(NAMES)]))
            for number, ask in enumerate(asks()[:count])
        ]
        self.expected = self.said(ALONE)[0]

    def said(self, cell: Cell, draft: Path | None = None) -> tuple[Outputs, Engine]:
        cell = msgspec.structs.replace(cell, adapter_places=PLACES)
        engine = Engine(self.base, tokens(), cell, draft=draft)
        return outputs(engine, self.asks), engine


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("adapters"), demo_folder(), COUNT)


def test_each_says_something_of_its_own(scene: Scene, expected: Outputs) -> None:
    """And those without an adapter what the model says on a server without any."""
    changed = {
        NAMES[number % len(NAMES)]
        for (number, choice), said in expected.items()
        if said != scene.expected[number, choice]
    }
    assert changed == {name for name in NAMES if name}


@pytest.mark.parametrize(
    ("method", "cell"),
    [
        pytest.param(method, cell, marks=() if cell == OFTEN[method] else pytest.mark.long)
        for method in DRAFTS
        for cell in CELLS
    ],
)
def test_no_cell_and_no_drafts_change_a_token(method: str, cell: str, scene: Scene) -> None:
    found, engine = scene.said(msgspec.structs.replace(CELLS[cell], method=method), DRAFTS[method])
    assert found == scene.expected
    assert engine.scheduled is not None
    assert engine.scheduled.adapters.copies >= len(NAMES) - 1
    assert (engine.scheduled.preemptions > 0) == (cell == "preemption")
    if method != "none":
        assert engine.scheduled.accepted_tokens > 0.1 * engine.scheduled.draft_tokens > 0


@pytest.mark.parametrize("cell", [pytest.param("prefixes", marks=pytest.mark.long), "preemption"])
def test_nor_do_those_of_a_head_of_multi_token_prediction(cell: str, tmp_path: Path) -> None:
    """A mixture of experts, whose attention and dense MLP are adapted."""
    base = tmp_path / "glm"
    base.mkdir()
    write_headed(base, guessing=True, vocab_size=read_spec(demo_folder()).vocab_size)
    scene = Scene(tmp_path, base, 12)
    found, engine = scene.said(msgspec.structs.replace(CELLS[cell], method="mtp"), base)
    assert found == scene.expected
    assert engine.scheduled is not None
    assert engine.scheduled.accepted_tokens > 0
