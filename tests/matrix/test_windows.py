"""KV groups: the same tokens whether blocks behind windows are given back or all of them are held, from pieces of
prompts, with hits, preempted, drafted, over two stages, and after the executor's death.

Tiny random checkpoints in fp32, whose windows are a few blocks long.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, Gemma4TextConfig, GptOssConfig, MistralConfig, PreTrainedConfig

from benchmarks.structured_engine import Ask, Cell, Engine
from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.models.kv_groups import with_kv_groups
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.messages import Sampling
from tests.engine_core.grammar.vocabulary import tokens
from tests.engine_core.models.families.test_gemma4 import CASES as GEMMA4
from tests.engine_core.models.parity import SIZES, VOCAB, write_checkpoint
from tests.matrix.test_families import CASES
from tests.matrix.test_speculation import Outputs
from tests.ranks import Ranks

PLAIN = Cell(depth=1, prefix_caching=False, block_size=4, drafts=False)
FREED = Cell(block_size=4, windows=True, drafts=False)
WINDOW = 12
TURNS = ["sliding_attention", "sliding_attention", "full_attention"]
MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], tuple[int, ...]]] = {
    "mistral": (MistralConfig, {"sliding_window": WINDOW}, (WINDOW,)),
    "gpt_oss": (GptOssConfig, {"sliding_window": WINDOW}, (0, WINDOW)),
    "gemma4_text": (  # two global layers' pages take the place of one of a window's
        Gemma4TextConfig,
        {"sliding_window": WINDOW, "global_head_dim": 16, "num_hidden_layers": 6, "layer_types": TURNS * 2},
        (0, *[WINDOW] * 4),
    ),
    "gemma4_shared": (Gemma4TextConfig, {**GEMMA4["by layer"][1], "sliding_window": WINDOW}, (0, WINDOW)),
    "gemma3_text": (Gemma3TextConfig, {"sliding_window": WINDOW, "num_hidden_layers": 7}, (0, *[WINDOW] * 6)),
}
CELLS = {
    "freed": FREED,
    "cut": Cell(block_size=4, windows=True, drafts=False, budget=7, max_num_seqs=3),
    "drafted": Cell(block_size=4, windows=True, method="ngram", budget=32, max_num_seqs=4),
}


def asks() -> list[Ask]:
    """Prompts longer than the window that begin alike and repeat themselves; two are the same."""
    rng = random.Random(3)
    shared, words = [rng.randrange(3, VOCAB) for _ in range(30)], [rng.randrange(3, VOCAB) for _ in range(5)]
    found = [
        Ask(
            token_ids=(*shared[: 30 - 7 * (number % 3)], *(rng.randrange(3, VOCAB) for _ in range(number)), *words * 2),
            sampling=Sampling(temperature=0.8 * (number % 2), max_tokens=24, ignore_eos=True, seed=number),
        )
        for number in range(5)
    ]
    return [*found, found[0]]


def outputs(engine: Engine) -> Outputs:
    return {key: answer.token_ids for key, answer in engine.answer(asks()).items()}


def checkpoint(name: str, folder: Path) -> tuple[int, ...]:
    """Writes it; returns the windows of its groups."""
    kind, options, windows = MODELS[name]
    family = CASES[name][1] if name in CASES else {}
    write_checkpoint(folder, kind(**{**SIZES, **family, **options}))
    return windows


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks((2, (1, 2)), tmp_path_factory.mktemp("windows"))
    yield found
    found.close()


@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens(name: str, tmp_path: Path) -> None:
    windows = checkpoint(name, tmp_path)
    expected = outputs(Engine(tmp_path, tokens(), PLAIN))
    for cell_name, cell in CELLS.items():
        engine = Engine(tmp_path, tokens(), cell)
        assert set(engine._spec.kv_windows) == set(windows), engine._spec.kv_windows
        assert outputs(engine) == expected, cell_name
        assert engine.scheduled is not None
        assert cell_name != "cut" or engine.scheduled.reused_tokens > 0
    assert with_kv_groups(read_spec(tmp_path), WINDOW, 4).kv_windows == (0,)


def answers(group: Group, folder: Path, cell: Cell) -> Outputs:
    """Of the member that answers; nothing of another."""
    torch.set_num_threads(1)
    found = Engine(folder, tokens(), cell, group=group).answer(asks())
    return {key: answer.token_ids for key, answer in found.items()}


def test_stages_share_tables_though_one_may_lack_a_group(ranks: Ranks, tmp_path: Path) -> None:
    checkpoint("gpt_oss", tmp_path)
    expected = answers(ALONE, tmp_path, PLAIN)
    for size in ((1, 2), 2):
        for found in filter(None, ranks.run(size, answers, tmp_path, CELLS["cut"])):
            assert found == expected, size


@pytest.mark.parametrize("case", ["by layer", "experts"])
def test_ranks_share_tables_though_pages_differ(case: str, ranks: Ranks, tmp_path: Path) -> None:
    kind, options = GEMMA4[case]
    write_checkpoint(tmp_path, kind(**{**SIZES, **options, "sliding_window": WINDOW}))
    expected = answers(ALONE, tmp_path, PLAIN)
    for found in filter(None, ranks.run(2, answers, tmp_path, CELLS["cut"])):
        assert found == expected


def test_preempted_rows_say_the_same(tmp_path: Path) -> None:
    """Short prompts that fit together and long outputs that do not. With 8 two experts' logits are a rounding apart."""
    checkpoint("gpt_oss", tmp_path)
    short = [
        Ask(
            token_ids=(number, 5, 6, 7), sampling=Sampling(temperature=0.0, max_tokens=56, ignore_eos=True, seed=number)
        )
        for number in (3, 4, 5, 6, 7, 9)
    ]
    expected = Engine(tmp_path, tokens(), PLAIN).answer(short)
    few = Cell(block_size=4, windows=True, drafts=False, expected_share=0.0, blocks=34, budget=8, max_num_seqs=8)
    engine = Engine(tmp_path, tokens(), few)
    assert engine.answer(short) == expected
    assert engine.scheduled is not None
    assert engine.scheduled.preemptions > 0
