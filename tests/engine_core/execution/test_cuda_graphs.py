"""Steps that replay, on a CPU with a recording in a graph's place: the tokens of eager steps, whatever is padded. What
graphs give on a GPU is tested in test_gpu.py, test_gpu_drafts.py and in the matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine_core.execution import cuda_graphs as graphs
from penstock.engine_core.execution import draft_graphs
from penstock.engine_core.execution.cuda_graphs import GraphColumns, GraphSizes, graph_sizes, shapes
from penstock.engine_core.execution.draft_model import Draft
from penstock.engine_core.execution.input_batch import decode_rows
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.execution.transfer import Upload
from penstock.kernels.records import AttentionBatch
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import StepMasks, StepPlan
from tests.engine_core.execution.harness import (
    LENGTH,
    VOCABULARY,
    Life,
    block_tables,
    column,
    decode,
    prefill,
    tiny_spec,
    tokens_of,
)
from tests.engine_core.execution.test_draft_model import MOST, Bench, same
from tests.engine_core.execution.test_drafts import Guess, any_number, drafted, half, mask, right
from tests.engine_core.execution.test_same_tokens import lives, outputs

STEPS = 14
SIZES = graph_sizes(2, 1, 12, 128, LENGTH)  # eight rows are padded to twelve


def tensors(output: object) -> list[Tensor]:
    """All in a tensor, a record of them, or nothing."""
    if isinstance(output, Tensor):
        return [output]
    parts = fields(output) if is_dataclass(output) else ()
    return [tensor for part in parts for tensor in tensors(getattr(output, part.name))]


def captured(*graphs: Sized) -> int:
    return sum(map(len, graphs))


class Chain:
    """A network without attention: what comes follows from the last token and its place."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randn(VOCABULARY, 32, generator=generator)
        self.places = torch.randn(LENGTH + 1, 32, generator=generator)
        self.head = torch.randn(32, VOCABULARY, generator=generator)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, cache: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        return self.table[input_ids.long()] + self.places[positions.long()]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head


@dataclass
class Recording:
    """Does what it recorded anew at each replay, into the tensors that it gave the first time."""

    work: Callable[[], object]
    given: list[Tensor]

    def replay(self) -> None:
        for tensor, new in zip(self.given, tensors(self.work()), strict=True):
            tensor.copy_(new)


class Recorder:
    """What `Memory` is on a GPU."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def capture(self, work: Callable[[], Any], *, run: bool) -> tuple[Recording, Any]:
        if run:
            work()
        output = work()
        return Recording(work, tensors(output)), output


def put(upload: Upload, array: NDArray[Any], target: Tensor) -> None:
    assert upload.device.type == "cpu"
    target[: len(array)].copy_(torch.from_numpy(array))


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on a CPU that replay; what one gave is good until the next, so there is one in flight."""
    monkeypatch.setattr(graphs, "Memory", Recorder)
    monkeypatch.setattr(draft_graphs, "Memory", Recorder)
    monkeypatch.setattr(Upload, "put", put)


@pytest.fixture(scope="module")
def model() -> Chain:
    return Chain()


@pytest.fixture(scope="module")
def plain(model: Chain) -> list[list[int]]:
    found = lives()
    runner = made(model)
    prefill(runner, found)
    decode(runner, found, STEPS + 2 * MOST)
    return outputs(found)


def made(model: Chain, sizes: GraphSizes | None = None, draft: Draft | None = None) -> Runner:
    options = RunnerOptions(
        device=torch.device("cpu"), dtype=torch.float32, blocks=200, block_size=8, max_model_len=LENGTH,
        max_num_seqs=12, graphs=sizes,
    )  # fmt: skip
    return Runner(model, tiny_spec(), options, draft)


def replaying(model: Chain, sizes: GraphSizes = SIZES, draft: Draft | None = None) -> Runner:
    runner = made(model, sizes, draft)
    runner.prepare()
    return runner


@pytest.mark.parametrize("budget", [8, 1000])
def test_the_same_tokens_as_without_graphs(model: Chain, plain: list[list[int]], budget: int) -> None:
    """Chunks of 8 replay, prompts in one piece do not: their samplings replay all the same."""
    found = lives()
    runner = replaying(model)
    prefill(runner, found, budget)
    decode(runner, found, STEPS, depth=1)
    assert outputs(found) == [output[: STEPS + 1] for output in plain]
    assert runner.graphs is not None
    graphs = runner.graphs
    assert (len(graphs.forward), len(graphs.sampling)) == (len(SIZES.decode) + len(SIZES.mixed), len(SIZES.entries))
    assert graphs.forward.replays == (STEPS if budget == 1000 else runner.statistics().steps - 1)
    assert graphs.sampling.replays > STEPS


def test_graphs_that_are_captured_as_steps_need_them_change_no_token(model: Chain, plain: list[list[int]]) -> None:
    found = lives()
    runner = made(model, SIZES, Draft(model, tiny_spec(), MOST))
    runner.prepare(largest=True)
    own, drafting = runner.graphs, runner.draft_graphs
    assert own is not None
    assert drafting is not None
    first = captured(own.forward, own.sampling), captured(drafting.first, drafting._turns)
    bench = Bench(runner, found)
    bench.prefill(1, 7)
    while min(len(life.output) for life in found) < STEPS:
        bench.decode(1, 2, 1)
    assert same(bench, plain)
    assert first == (3, 3)
    assert 3 < captured(own.forward, own.sampling) < len(SIZES.decode) + len(SIZES.mixed) + len(SIZES.entries)
    assert captured(drafting.first, drafting._turns) > 3
    assert own.forward.replays > STEPS / 2
    assert drafting.replays >= len(found)


@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("guess", [right, half, any_number])
def test_guesses_change_no_token(model: Chain, plain: list[list[int]], guess: Guess, drafts: int) -> None:
    """Sampled in a graph where every row may have a draft, else behind one as far as they are too many for any."""
    found = lives()
    runner = replaying(model, graph_sizes(2, 1, 12, 128, LENGTH, drafts))
    prefill(runner, found)
    drafted(runner, found, plain, guess, 1, 1)
    assert [output[:STEPS] for output in outputs(found)] == [output[:STEPS] for output in plain]
    assert runner.graphs is not None
    assert runner.graphs.forward.replays == runner.statistics().steps - 1
    if drafts:
        assert runner.graphs.sampling.replays == runner.statistics().steps
    elif guess is right:
        assert runner.graphs.sampling.replays == 1


@pytest.mark.parametrize("count", [1, MOST])
def test_a_draft_model_drafts_the_same(model: Chain, plain: list[list[int]], count: int) -> None:
    bench = Bench(replaying(model, draft=Draft(model, tiny_spec(), MOST)), lives())
    bench.prefill(count, 7)
    while min(len(life.output) for life in bench.lives) < STEPS:
        bench.decode(count, 2, count)
    assert same(bench, plain)
    assert bench.accepted >= 0.8 * bench.entries, "it drafts for itself"
    graphs = bench.runner.draft_graphs
    assert graphs is not None
    assert captured(graphs.first, graphs._turns) == len(shapes(graphs.sizes)) + len(graphs.sizes.entries)
    assert graphs.replays >= count * len(bench.lives)
    assert graphs.first.replays >= len(bench.lives)


def test_masks_are_of_one_step(model: Chain) -> None:
    """The first step brings masks, the second names those that stand, the third has none of the same rows."""
    tables = block_tables(3, LENGTH // 8)
    found = [Life([5, 17, 2, at], Sampling(temperature=1.0), seed=at, slot=at, blocks=tables[at]) for at in range(3)]
    eager = [Life(life.prompt, life.sampling, life.seed, life.slot, life.blocks) for life in found]
    for runner, some in ((replaying(model), found), (made(model), eager)):
        prefill(runner, some)
        for step in range(4):
            masked = column(0, 2) if step < 2 else b""
            plan = StepPlan(step=step, epoch=0, decode_on=column(0, 1, 2) if step == 0 else b"", masked=masked)
            places, bits = (column(6, 7), mask(20, 21) + mask(30)) if step == 0 else (b"", b"")
            masks = StepMasks(step=step, epoch=0, entries=column(0, 2), slots=column(7, 6), new_slots=places, bits=bits)
            launched = runner.finish(runner.begin(plan), masks if step < 2 else None)
            for life, token in zip(some, tokens_of(runner.collect(launched)), strict=True):
                life.output.append(token)
    assert found[0].output[1:3] == [30, 30]
    assert set(found[2].output[1:3]) <= {20, 21}
    assert outputs(found) == outputs(eager)


def test_columns_that_stand_are_not_sent_again() -> None:
    columns = GraphColumns((4, 4), Upload(torch.device("cpu")))
    rows, others = decode_rows(np.array([1, 2], np.int32)), decode_rows(np.array([1, 2], np.int32))
    first, second = columns.clear((3, 2))
    columns.put(rows, (rows.slots, rows.slots), (3, 2), (7, 8))
    assert (first.tolist(), second.tolist()) == ([1, 2, 7], [1, 2])
    assert columns.hold(rows, (3, 2))
    assert not columns.hold(others, (3, 2)), "rows are known by what they are, not by what they hold"
    assert not columns.hold(rows, (2, 3))
    columns.put(None, (others.slots, others.slots), (3, 2), (7, 8))
    assert not columns.hold(rows, (3, 2))
    columns.put(rows, (rows.slots, rows.slots), (3, 2), (7, 8))
    columns.clear((4, 4))
    assert not columns.hold(rows, (3, 2))
    assert first.tolist() == [0, 0, 0]
