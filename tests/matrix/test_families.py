"""Every family in the cells of the matrix, and in the long run every option of theirs: the same tokens, greedy and
sampled, from pieces of prompts, cached prefixes, drafts by n-gram and a pool that preempts, and from two ranks and two
stages.

Tiny random checkpoints, fp32 over gloo on a CPU; parity with transformers is tests/engine_core/models/families/.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from benchmarks.structured_engine import Ask, Cell, Engine
from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.models.families import families
from penstock.engine_core.models.sharding import shared_evenly
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.messages import Sampling
from tests.engine_core.grammar.vocabulary import tokens
from tests.engine_core.models.parity import SIZES, VOCAB, write_checkpoint
from tests.matrix.test_speculation import Outputs
from tests.ranks import Ranks, Size

FOLDER = Path(__file__).parents[1] / "engine_core" / "models" / "families"
Case = tuple[type[PreTrainedConfig], dict[str, Any]]
# Of files with cases of one family; each has cells of its own elsewhere.
OLDER: dict[str, type[PreTrainedConfig]] = {
    "test_llama": LlamaConfig, "test_mistral": MistralConfig, "test_mixtral": MixtralConfig, "test_qwen": Qwen2Config,
    "test_qwen3": Qwen3Config, "test_qwen3_moe": Qwen3MoeConfig,
}  # fmt: skip
PLAIN = Cell(depth=1, prefix_caching=False, block_size=8)
MIXED = Cell(method="ngram", block_size=8, blocks=34, expected_share=0.0, budget=24, max_num_seqs=8)
GROUPS: tuple[Size, ...] = (2, (1, 2))


def cases() -> tuple[dict[str, Case], dict[str, Case]]:
    """The first case of each family's own test, and the others."""
    first: dict[str, Case] = {}
    others: dict[str, Case] = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        module = importlib.import_module(f"tests.engine_core.models.families.{path.stem}")
        for name, case in getattr(module, "CASES", {}).items():
            if isinstance(case, dict):
                others[f"{path.stem}: {name}"] = (OLDER[path.stem], case)
            elif isinstance(case, tuple) and issubclass(case[0], PreTrainedConfig):  # not an encoder's
                family = case[0].model_type
                if family in first:
                    others[f"{family}: {name}"] = case
                first.setdefault(family, case)
    return first, others


CASES, OTHERS = cases()


def asks() -> list[Ask]:
    """Prompts that repeat themselves and begin alike."""
    rng = random.Random(5)
    shared, words = [rng.randrange(3, VOCAB) for _ in range(20)], [rng.randrange(3, VOCAB) for _ in range(6)]
    return [
        Ask(
            token_ids=(*shared, *(rng.randrange(3, VOCAB) for _ in range(number)), *words * 3),
            sampling=Sampling(temperature=0.8 * (number % 2), max_tokens=14, ignore_eos=True, seed=number),
        )
        for number in range(6)
    ]


def answers(group: Group, folder: Path, cell: Cell) -> Outputs:
    """Of the member that answers; nothing of another."""
    torch.set_num_threads(1)
    found = Engine(folder, tokens(), cell, group=group).answer(asks())
    return {key: answer.token_ids for key, answer in found.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(GROUPS, tmp_path_factory.mktemp("families"))
    yield found
    found.close()


@pytest.mark.parametrize("family", CASES)
def test_the_same_tokens(family: str, ranks: Ranks, tmp_path: Path) -> None:
    check(CASES[family], ranks, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("case", OTHERS)
def test_every_other_option(case: str, ranks: Ranks, tmp_path: Path) -> None:
    check(OTHERS[case], ranks, tmp_path)


def check(case: Case, ranks: Ranks, tmp_path: Path) -> None:
    kind, options = case
    write_checkpoint(tmp_path, kind(**{**SIZES, **options}))
    expected = answers(ALONE, tmp_path, PLAIN)
    assert len({tuple(output) for output in expected.values()}) > 1
    assert answers(ALONE, tmp_path, MIXED) == expected
    whole = read_spec(tmp_path)  # one group of Mamba heads is not split
    for size in (size for size in GROUPS if shared_evenly(whole, size if isinstance(size, int) else size[0])):
        for found in filter(None, ranks.run(size, answers, tmp_path, PLAIN)):
            assert found == expected, size


def test_every_family_has_a_case() -> None:
    """Llama, Mistral and Qwen have cells of their own; see test_rank_families.py. Those that stand beside encoders
    alone are in test_wrappers.py, and encoders of text have no cache that could be shared."""
    older = {kind.model_type for kind in OLDER.values()}
    wrapped = {name for name, family in families().items() if family.architecture in family.wrappers}
    encoders = {name for name, family in families().items() if family.architecture.endswith("ForMaskedLM")}
    named_otherwise = {"phi4mm"}  # its tensors; layers are Phi 3's
    assert set(families()) - older - wrapped - encoders - named_otherwise == set(CASES)
