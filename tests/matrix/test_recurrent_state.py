"""Models with recurrent layers in the cells of the matrix: conversations say the same from snapshots of states as from
position 0, cut anywhere, preempted, drafted, with few places or none, after an executor's death, over ranks and stages.

Tiny random checkpoints, fp32 over gloo on a CPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks import structured_engine
from benchmarks.structured_engine import Ask
from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.scheduling.statistics import SchedulerStatistics
from penstock.kernels.states import PIECE
from penstock.protocol.messages import Finish, Sampling
from penstock.protocol.steps import NO_STATE
from tests.engine_core.grammar.vocabulary import tokens
from tests.engine_core.models.families import test_falcon_h1, test_qwen_next
from tests.engine_core.models.mtp_heads import write_headed
from tests.engine_core.models.parity import SIZES, VOCAB, write_checkpoint
from tests.matrix.engine import Answers, Cell, Engine, Prompt, submission, take
from tests.matrix.test_speculation import Outputs, misremembered, outputs
from tests.ranks import Ranks, Size

FAMILIES = ("qwen3_5", "qwen3_next", "falcon_h1")
CASES = {**test_qwen_next.CASES, **test_falcon_h1.CASES}
COLD = Cell(depth=1, prefix_caching=False, state_places=0)
CELLS = {
    "in one piece": Cell(depth=2),
    "below a piece": Cell(depth=1, budget=63, max_num_seqs=8),
    "a piece": Cell(depth=2, budget=64, max_num_seqs=8, block_size=32),
    "beyond a piece": Cell(depth=2, budget=65, block_size=8, max_num_seqs=8, ngram=3),
    "any cut": Cell(depth=2, budget=17, max_num_seqs=8),
    "drafts": Cell(depth=1, ngram=4),
    "one row": Cell(depth=2, max_num_seqs=1, ngram=3),
    "one place": Cell(depth=2, state_places=1, ngram=3),
    "two places": Cell(depth=1, state_places=2),
    "the host's places": Cell(depth=2, state_places=1, state_host_places=12, ngram=3),
    "two of the host's": Cell(depth=2, state_places=2, state_host_places=2),
    "no place": Cell(depth=2, state_places=0, ngram=2),
    "no prefixes": Cell(depth=2, prefix_caching=False, budget=100),
}
ALONE_COLD = structured_engine.Cell(depth=1, drafts=False, max_num_seqs=1, prefix_caching=False, state_places=0)
GROUPS: tuple[Size, ...] = (2, (1, 2))
TURNS, LONGEST = 3, 30
BRIEF = {  # cells of a suite that is not a long one
    "qwen3_5": (
        "in one piece",
        "beyond a piece",
        "any cut",
        "one row",
        "one place",
        "two places",
        "no place",
        "the host's places",
        "two of the host's",
    ),
    "qwen3_next": ("a piece",),
    "falcon_h1": ("beyond a piece", "any cut", "the host's places"),  # attention and a state in one layer
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family in FAMILIES:
        kind, options = CASES[family]
        found[family] = tmp_path_factory.mktemp(family)
        sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 2, "max_position_embeddings": 1024}
        layers = {"layer_types": ["linear_attention", "full_attention"]} if "layer_types" in options else {}
        write_checkpoint(found[family], kind(**{**sizes, **options, **layers}))
    return found


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders[FAMILIES[0]]


def text(count: int, seed: int) -> tuple[int, ...]:
    """Tokens that repeat themselves now and then, so that prompt lookup proposes something."""
    rng = random.Random(seed)
    words = [rng.randrange(3, VOCAB) for _ in range(7)]
    return tuple(rng.choice(words) if rng.random() < 0.6 else rng.randrange(3, VOCAB) for _ in range(count))


def sampling(number: int) -> Sampling:
    return Sampling(temperature=0.7 * (number % 2), max_tokens=LONGEST, ignore_eos=True, seed=number)


def converse(engine: Engine, said: list[Answers] | None = None) -> list[Answers]:
    """Three conversations behind one system prompt, and one apart, turn by turn; one of them has two choices. said:
    what becomes predictions, some of which are wrong."""
    system = text(140, 1)
    prompts = [(*system, *text(30 + 20 * number, 10 + number)) for number in range(3)] + [text(70, 99)]
    found = []
    for turn in range(TURNS):
        asked = [
            Prompt(
                token_ids=ids, sampling=sampling(number), n=1 + (number == 1),
                prediction=misremembered(said[turn][number, 0]) if said is not None and engine.cell.ngram else (),
            ) for number, ids in enumerate(prompts)
        ]  # fmt: skip
        answers = engine.answer(asked)
        found.append(answers)
        prompts = [(*ids, *answers[number, 0], *text(9 + 4 * number, 20 + turn)) for number, ids in enumerate(prompts)]
    return found


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[Answers]]:
    """What is said without snapshots, one step at a time."""
    return {family: converse(Engine(COLD, folder)) for family, folder in folders.items()}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(name, family, marks=() if name in BRIEF[family] else pytest.mark.long)
        for name in CELLS for family in FAMILIES
    ],
)  # fmt: skip
def test_conversations_say_the_same(
    name: str, family: str, folders: dict[str, Path], expected: dict[str, list[Answers]]
) -> None:
    engine = Engine(CELLS[name], folders[family])
    assert converse(engine, expected[family]) == expected[family]
    counts, hits = engine.scheduler.statistics(), [start for start in engine.begun if start[0]]
    assert counts.snapshots is not None
    assert all(computed % PIECE == 0 and place != NO_STATE for computed, place in hits)
    assert counts.snapshots.hits == len(hits)
    assert (len(hits) > 0) == (engine.cell.state_places > 0)  # two choices share a prompt whatever is cached
    assert counts.snapshots.evicted > 0 or engine.cell.state_places not in (1, 2) or engine.cell.state_host_places > 9
    assert (counts.snapshots.spilled > 0) == (engine.cell.state_host_places > 0)
    assert (counts.snapshots.host_hits > 0) == (engine.cell.state_host_places > 0)
    assert counts.accepted_tokens > 0 or not engine.cell.ngram


def test_where_the_next_turn_begins(folder: Path) -> None:
    """Behind the last piece of the prompt, or of what was written."""
    engine = Engine(Cell(state_places=8), folder)

    def begins(count: int, ids: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        engine.begun.clear()
        ask = Prompt(token_ids=ids, sampling=replace(sampling(0), max_tokens=count))
        said = engine.answer([ask])[0, 0]
        return engine.begun[0][0], (*ids, *said, *text(20, count))

    computed, second = begins(20, text(150, 5))  # 150 and 20 are within the piece from 128
    assert computed == 0
    computed, third = begins(40, second)  # 190 and 40: past 192
    assert computed == 128
    computed, _ = begins(2, third)
    assert computed == 192


@pytest.mark.parametrize("name", ["in one piece", "beyond a piece"])
def test_preemption_changes_nothing(name: str, folder: Path, expected: dict[str, list[Answers]]) -> None:
    blocks = 640 // CELLS[name].block_size
    engine = Engine(replace(CELLS[name], blocks=blocks, expected_share=0.0), folder)
    assert converse(engine, expected[FAMILIES[0]]) == expected[FAMILIES[0]]
    assert engine.scheduler.statistics().preemptions > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("places", [8, 1])
def test_a_new_executor_has_no_states(places: int, folder: Path) -> None:
    """All slots and places are lost while some sequences decode and another's prompt is computed. The new executors
    have room for other snapshots than the old ones."""
    cell = Cell(depth=2, budget=100, max_num_seqs=8, ngram=2)
    asked = [Prompt(token_ids=(*text(140, 1), *text(60, number)), sampling=sampling(number)) for number in range(4)]
    alone = Engine(COLD, folder).answer(asked)
    engine = Engine(cell, folder)
    engine.answer(asked[:1])  # states that the new executors lack
    answers: Answers = {}
    ends: dict[tuple[int, int], Finish] = {}
    for number, prompt in enumerate(asked):
        engine.scheduler.submit(submission(number, prompt), 0, 0.0)
    for _ in range(9):
        plan = engine.scheduler.plan(0.0)
        assert plan is not None
        engine.scheduler.apply(engine.runner.collect(engine.runner.launch(plan)), 0.0)
        for message in engine.scheduler.outputs(0):
            take(message, answers, ends)  # type: ignore[arg-type]
    assert answers
    assert not ends
    engine.scheduler.plan(0.0)  # in flight when the executor dies
    engine.runner = Engine(replace(cell, state_places=places), folder).runner
    engine.scheduler.restart(2, 1.0, cell.blocks, (places, 0))
    engine.begun.clear()
    engine.run(answers, ends)
    assert answers == alone
    assert engine.begun[0] == (0, NO_STATE)
    assert all(place < places for _, place in engine.begun)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(GROUPS, tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()


def forks(group: Group, folder: Path, cell: structured_engine.Cell) -> tuple[Outputs, SchedulerStatistics | None]:
    """What is said to prompts that part behind the second piece."""
    draft = folder if cell.method == "mtp" else None
    engine = structured_engine.Engine(folder, tokens(), cell, draft=draft, group=group)
    asked = [
        Ask(
            token_ids=(*text(140, 1), *text(20 + 30 * number, number)),
            sampling=replace(sampling(number), max_tokens=40),
        )
        for number in range(4)
    ]
    return outputs(engine, asked), engine.scheduled


@pytest.mark.parametrize(("places", "rows"), [((4, 0), 8), ((1, 6), 1)], ids=["on the device", "in the host's memory"])
@pytest.mark.parametrize("size", GROUPS, ids=["2 ranks", "2 stages"])
def test_nor_do_ranks_and_stages(size: Size, places: tuple[int, int], rows: int, folder: Path, ranks: Ranks) -> None:
    said, _ = forks(ALONE, folder, ALONE_COLD)
    cell = structured_engine.Cell(
        depth=3, method="ngram", max_num_seqs=rows, budget=100, piece=50, state_places=places[0],
        state_host_places=places[1],
    )  # fmt: skip
    answered = [found for found in ranks.run(size, forks, folder, cell) if found[0]]
    assert answered
    for found, counts in answered:
        assert found == said
        assert counts is not None
        assert counts.snapshots is not None
        assert counts.snapshots.hits > 0
        assert (counts.snapshots.host_hits > 0) == (places[1] > 0)


def test_nor_does_the_models_own_head(tmp_path: Path) -> None:
    """Drafts that are not kept leave the states as they were."""
    write_headed(tmp_path, "qwen3_5", guessing=True)
    said, _ = forks(ALONE, tmp_path, ALONE_COLD)
    found, counts = forks(ALONE, tmp_path, structured_engine.Cell(method="mtp", budget=100, state_places=4))
    assert found == said
    assert counts is not None
    assert counts.snapshots is not None
    assert counts.snapshots.hits > 0
    assert 0 < counts.accepted_tokens < counts.draft_tokens
