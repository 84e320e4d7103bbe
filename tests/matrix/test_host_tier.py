"""KV blocks in the host's memory in the cells of the matrix: the same tokens whether a prefix was computed, stood on
the device, or went to the host's memory and came back. Drafts and grammars, FP8, windows, recurrent states, two ranks
and two stages.

Conversations take turns on a device that has room for about one of them. fp32 on a CPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.structured_engine import Ask, Cell, Engine
from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.embedded import demo_folder, draft_folder, eagle_folder
from penstock.protocol.engine_config import KV_FP8
from penstock.protocol.messages import Sampling
from tests.engine_core.grammar.vocabulary import automaton, tokens
from tests.engine_core.models.mtp_heads import write_headed
from tests.engine_core.models.parity import VOCAB
from tests.matrix import test_windows
from tests.matrix.test_speculation import Outputs
from tests.ranks import Ranks, Size

FOLDERS = {"draft_model": draft_folder, "eagle": eagle_folder}
SMALL = Cell(block_size=4, blocks=56, max_num_seqs=2, budget=64, drafts=False, host_blocks=2000)
CELLS = {
    "overlapped": SMALL,
    "one step at a time": msgspec.structs.replace(SMALL, depth=1, budget=512),
    "pieces": msgspec.structs.replace(SMALL, budget=9),
    "preemption": msgspec.structs.replace(SMALL, blocks=44, max_num_seqs=4, expected_share=0.0),
    "few of the host's": msgspec.structs.replace(SMALL, host_blocks=60),
    "prompt lookup": msgspec.structs.replace(SMALL, drafts=True, method="ngram"),
    "draft model": msgspec.structs.replace(SMALL, drafts=True, method="draft_model"),
    "EAGLE head": msgspec.structs.replace(SMALL, drafts=True, method="eagle"),
}
WORDS = automaton("regex", "([a-z]{2,8}(, | and )){1,3}[a-z]{2,8}")


def asks(vocabulary: int, *, guided: bool = False) -> list[Ask]:
    """Four conversations of one system prompt, each for the second and the third time after all others."""
    rng = random.Random(5)
    system = [rng.randrange(3, vocabulary) for _ in range(20)]
    said = [[*system, *(rng.randrange(3, vocabulary) for _ in range(50 + 9 * number))] for number in range(4)]
    found = []
    for turn in range(3):
        for number, prompt in enumerate(said):
            prompt += [rng.randrange(3, vocabulary) for _ in range(5)]
            sampling = Sampling(temperature=0.8 * (number % 2), max_tokens=8, ignore_eos=True, seed=10 * turn + number)
            bound = WORDS if guided and number == 2 else None
            if bound is not None:
                sampling = msgspec.structs.replace(sampling, ignore_eos=False)
            found.append(Ask(token_ids=tuple(prompt), sampling=sampling, automaton=bound))
    return found


def answers(group: Group, cell: Cell, folder: Path | None = None) -> tuple[Outputs, int]:
    """What is said, and how many blocks were fetched."""
    draft = folder if cell.method == "mtp" else FOLDERS[cell.method]() if cell.method in FOLDERS else None
    engine = Engine(folder or demo_folder(), tokens(), cell, draft=draft, group=group)
    found = engine.answer(asks(VOCAB if folder else 500, guided=folder is None))
    assert not [answer.error for answer in found.values() if answer.error]
    fetched = 0 if engine.scheduled is None else engine.scheduled.host_tier.fetched
    return {key: answer.token_ids for key, answer in found.items()}, fetched


def plainly(cell: Cell) -> Cell:
    return msgspec.structs.replace(
        cell, depth=1, drafts=False, method="none", max_num_seqs=1, prefix_caching=False, host_blocks=0, state_places=0,
        blocks=2048, budget=512,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> Outputs:
    torch.set_num_threads(1)
    return answers(ALONE, plainly(SMALL))[0]


LONG = ("one step at a time", "few of the host's", "prompt lookup", "draft model", "gemma4_text", "mtp")


def named(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in names]


@pytest.mark.parametrize("name", named(CELLS))
def test_the_same_tokens(name: str, plain: Outputs) -> None:
    found, fetched = answers(ALONE, CELLS[name])
    assert found == plain
    assert fetched > (50 if CELLS[name].host_blocks > 1000 else 5)


def test_the_same_tokens_in_fp8() -> None:
    cell = msgspec.structs.replace(SMALL, kv_cache_dtype=KV_FP8)
    found, fetched = answers(ALONE, cell)
    assert found == answers(ALONE, plainly(cell))[0]
    assert fetched > 50


@pytest.mark.parametrize("name", named(["mistral", "gpt_oss", "gemma4_text"]))
def test_the_same_tokens_of_windows(name: str, tmp_path: Path) -> None:
    groups = len(test_windows.checkpoint(name, tmp_path))
    cell = msgspec.structs.replace(SMALL, windows=True, blocks=60 * groups - 28)
    found, fetched = answers(ALONE, cell, tmp_path)
    assert found == answers(ALONE, plainly(cell), tmp_path)[0]
    assert fetched > (20 if groups > 1 else 3), "a hit needs the blocks of its last window alone"


@pytest.mark.parametrize("method", named(["none", "mtp"]))
def test_the_same_tokens_of_recurrent_states(method: str, tmp_path: Path) -> None:
    """Blocks behind which there is a snapshot come back, wherever that is."""
    write_headed(tmp_path, "qwen3_5", guessing=True)
    cell = msgspec.structs.replace(
        SMALL, method=method, drafts=method != "none", blocks=40, state_places=3, state_host_places=20
    )
    found, fetched = answers(ALONE, cell, tmp_path)
    assert found == answers(ALONE, plainly(cell), tmp_path)[0]
    assert fetched > 20


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks((2, (1, 2)), tmp_path_factory.mktemp("tier"))
    yield found
    found.close()


@pytest.mark.parametrize("size", [2, (1, 2)], ids=["2 ranks", "2 stages"])
def test_the_same_tokens_in_a_group(size: Size, groups: Ranks, plain: Outputs) -> None:
    """Each rank or stage keeps its own part of a block."""
    cell = msgspec.structs.replace(CELLS["EAGLE head"], depth=3, piece=20)
    said = [found for found in groups.run(size, answers, cell) if found[0]]
    assert said
    for found, fetched in said:
        assert found == plain
        assert fetched > 50
