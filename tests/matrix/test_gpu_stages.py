"""On GPUs in bf16: the embedded model's answers from two and four stages, eager and in graphs, and from two stages of
two ranks, with its draft on the last stage, too. NCCL; a machine with fewer GPUs runs what it can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.structured_engine import follow, told
from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.embedded import demo_folder, draft_folder
from penstock.engine_core.execution.model_runner import Runner
from penstock.engine_core.execution.step_output import Launched
from penstock.protocol.steps import StepPlan, StepResult
from tests.matrix.engine import Answers, Cell, Engine, Prompt
from tests.matrix.test_gpu import BASE, prompts
from tests.ranks import Ranks, Size, count

pytestmark = pytest.mark.gpu

ALL: tuple[Size, ...] = ((1, 2), (1, 4), (2, 2))
SIZES = tuple(size for size in ALL if count(size) <= torch.cuda.device_count())


class Leader:
    """The answering member's runner: the others are told of each plan before it runs."""

    def __init__(self, runner: Runner, group: Group) -> None:
        self._runner = runner
        self._group = group

    def launch(self, plan: StepPlan) -> Launched:
        told(self._group, plan)
        return self._runner.launch(plan)

    def collect(self, launched: Launched) -> StepResult:
        return self._runner.collect(launched)


@pytest.fixture(scope="module")
def gpu_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    if not SIZES:
        pytest.skip("there is one GPU")
    found = Ranks(SIZES, tmp_path_factory.mktemp("stages"), "cuda")
    yield found
    found.close()


def answers(group: Group, cell: Cell, asked: list[Prompt]) -> Answers:
    device = f"cuda:{group.stage * group.size + group.rank}"
    engine: Any = Engine(cell, demo_folder(), dtype=torch.bfloat16, device=device, draft=draft_folder(), group=group)
    if group.several and not group.answers:
        follow(engine.runner, engine.copier, group)
        return {}
    runner = engine.runner
    if group.several:
        engine.runner = Leader(runner, group)
    found: Answers = engine.answer(asked)
    if group.several:
        told(group, None)
        runner.reset()
    return found


@pytest.mark.parametrize("drafts", [0, 4], ids=["alone", "drafts"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("size", ALL, ids=str)
def test_stages_give_the_canarys_answers(gpu_ranks: Ranks, size: tuple[int, int], graphs: bool, drafts: int) -> None:
    if size not in SIZES:
        pytest.skip(f"there are fewer than {count(size)} GPUs")
    asked = prompts()
    expected = answers(ALONE, BASE, asked)
    cell = msgspec.structs.replace(BASE, graphs=graphs, depth=size[1] + 1, own_drafts=drafts)
    *others, found = [result for result in gpu_ranks.run(size, answers, cell, asked) if result]
    assert not others, "one member answers"
    assert found == expected
