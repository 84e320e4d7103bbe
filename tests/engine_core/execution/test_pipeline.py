"""What stages exchange, between processes of this machine. That tokens stay the same: tests/matrix/test_stages.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from penstock.engine_core import embedded, loading
from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.draft_model import Draft
from penstock.engine_core.execution.dummy_runs import dummy_step
from penstock.engine_core.execution.forward import StageModel, stage_model
from penstock.engine_core.execution.input_batch import decode_rows
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.execution.pipeline import Pipeline
from penstock.engine_core.execution.transfer import Upload
from penstock.engine_core.execution.warmup import shallow_draft
from penstock.engine_core.models import registry
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.draft_spec import DraftSpec, read_draft
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.messages import Pooling, Sampling
from penstock.protocol.steps import NO_MICROBATCH, OWN_DRAFT, SlotStart, StepPlan
from tests.engine_core.models.eagle_heads import listening_head, load_head
from tests.ranks import Ranks, Size

TWO: Size = (1, 2)
FOLDER = embedded.demo_folder()
PROMPT = list(range(40, 60))
LENGTH = 64
DRAFTS = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks((TWO,), tmp_path_factory.mktemp("pipeline"))
    yield found
    found.close()


def model_of(group: Group, draft: DraftSpec | None = None) -> Decoder:
    torch.set_num_threads(1)
    model = registry.build(read_spec(FOLDER), torch.float32, torch.device("cpu"), LENGTH, group=group, draft=draft)
    loading.load(model, FOLDER)
    return model


def draft_of(method: str, folder: Path, spec: DraftSpec, model: Decoder) -> Draft:
    """What this member drafts with: random weights for a head that hears three depths."""
    found = Draft(None, spec.layers, DRAFTS, aux_layers=spec.aux_layers)
    if not model.placement.group.ends:
        return found
    if method == "draft_model":
        drafter = registry.build(spec.layers, torch.float32, torch.device("cpu"), LENGTH)
        loading.load(drafter, folder)
        return replace(found, model=drafter)
    return replace(found, model=load_head(folder, model, LENGTH, "dummy" if spec.aux_layers else "auto", 3, spec.head))


def runner_of(group: Group, method: str = "", folder: Path = FOLDER) -> Runner:
    spec = read_draft(method, folder, read_spec(FOLDER), None) if method else None
    model = model_of(group, spec)
    draft = None if spec is None else draft_of(method, folder, spec, model)
    options = RunnerOptions(
        device=torch.device("cpu"), dtype=torch.float32, blocks=16, block_size=16, max_model_len=LENGTH,
        max_num_seqs=4, group=group, step_tokens=64,
    )  # fmt: skip
    return Runner(model, model.spec, options, draft)


def start(slot: int, *, pooling: Pooling | None = None, **sampling: int) -> SlotStart:
    return SlotStart(
        slot=slot, token_ids=np.array(PROMPT, np.int32).tobytes(), prompt_tokens=len(PROMPT), computed=0,
        blocks=np.array([1 + 4 * slot + place for place in range(4)], np.int32).tobytes(),
        sampling=Sampling(temperature=0.0, **sampling), seed=1, pooling=pooling,
    )  # fmt: skip


def ints(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def prompt(step: int, slot: int, **options: object) -> StepPlan:
    """A plan of chunks alone."""
    pools = options.get("pooling") is not None
    return StepPlan(
        step=step, epoch=1, starts=(start(slot, **options),),  # type: ignore[arg-type]
        chunks=ints(slot, 0, len(PROMPT), int(not pools)), microbatch=NO_MICROBATCH,
    )  # fmt: skip


def said(group: Group, plans: list[StepPlan]) -> list[tuple[list[int], int, int, int]]:
    """Tokens of each step, and how many log-probabilities, of prompts, and vectors there are."""
    runner, found = runner_of(group), []
    for plan in plans:
        result = runner.collect(runner.launch(plan))
        tokens = np.frombuffer(result.token_ids, np.int32).tolist()
        found.append((tokens, len(result.logprobs), len(result.prompt_logprobs), len(result.vectors)))
    runner.reset()
    return found


def test_turns_of_micro_batches_say_what_one_executor_says(ranks: Ranks) -> None:
    """Three rows in two micro-batches; each set stands as it was left when its turn comes again."""
    turns = [
        prompt(1, 0), prompt(2, 1), prompt(3, 2),
        StepPlan(step=4, epoch=1, decode_on=ints(0, 2), microbatch=0),
        StepPlan(step=5, epoch=1, decode_on=ints(1), microbatch=1),
        *(StepPlan(step=step, epoch=1, microbatch=step % 2) for step in range(6, 10)),
        StepPlan(step=10, epoch=1, decode_off=ints(2), microbatch=0),
    ]  # fmt: skip
    first, last = ranks.run(TWO, said, turns)
    assert all(not tokens for tokens, *_ in first), "the first stage samples nothing"
    lengths = [len(tokens) for tokens, *_ in last]
    assert lengths == [1, 1, 1, 2, 1, 2, 1, 2, 1, 1]
    assert last[0][0] == last[1][0] == last[2][0]
    assert last[3][0] == [last[4][0][0]] * 2, "the same prompt, the same tokens"
    whole = said(ALONE, [prompt(1, 0), StepPlan(step=2, epoch=1, decode_on=ints(0)),
                         *(StepPlan(step=step, epoch=1) for step in range(3, 6))])  # fmt: skip
    assert [tokens[0] for tokens, *_ in whole] == [last[at][0][0] for at in (0, 3, 5, 7, 9)]


def test_scores_and_vectors_are_the_last_stages(ranks: Ranks) -> None:
    asked = [prompt(1, 0, logprobs=2, prompt_logprobs=1), prompt(2, 1, pooling=Pooling(kind="mean"))]
    first, last = ranks.run(TWO, said, asked)
    assert [rest for _, *rest in first] == [[0, 0, 0], [0, 0, 0]]
    assert [rest for _, *rest in last] == [[1, 1, 0], [0, 0, 1]]


def watched(pipeline: Pipeline | None, *names: str) -> Counter[str]:
    """How often it does these from now on."""
    found: Counter[str] = Counter()

    def counted(name: str, call: Callable[..., Any], *given: Any) -> Any:
        found[name] += 1
        return call(*given)

    for name in names if pipeline is not None else ():
        setattr(pipeline, name, partial(counted, name, getattr(pipeline, name)))
    return found


def reused(group: Group) -> tuple[list[int], Counter[str]]:
    """A slot goes to another while tokens of the one before are on their way, and the slots are forgotten."""
    runner = runner_of(group)
    found = watched(runner._pipeline, "tell", "_take_tokens")
    plans = [
        prompt(1, 0), StepPlan(step=2, epoch=1, decode_on=ints(0)), StepPlan(step=3, epoch=1),
        StepPlan(step=4, epoch=1, decode_off=ints(0), starts=(start(0),), chunks=ints(0, 0, len(PROMPT), 1)),
    ]  # fmt: skip
    tokens = [np.frombuffer(runner.collect(runner.launch(plan)).token_ids, np.int32).tolist() for plan in plans]
    runner.reset()
    tokens.append(np.frombuffer(runner.collect(runner.launch(prompt(1, 0))).token_ids, np.int32).tolist())
    pipeline = runner._pipeline
    assert pipeline is not None
    pipeline.settle()
    return [row[0] for row in tokens if row], found


def test_tokens_on_their_way_are_taken_before_their_slot_is_given_to_others(ranks: Ranks) -> None:
    (_, first), (tokens, last) = ranks.run(TWO, reused)
    assert tokens[0] == tokens[3] == tokens[4]
    assert first == {"_take_tokens": 5}
    assert last == {"tell": 5}


def drafted(group: Group, method: str, folder: Path) -> tuple[list[tuple[list[int], list[int]]], Tensor, Tensor, int]:
    """Tokens and drafts of each step; what the slot's row says in the end, and how far; drafts sent or taken."""
    runner = runner_of(group, method, folder)
    moved = watched(runner._pipeline, "tell_drafts", "_take_drafts")
    verifying = StepPlan(
        step=0, epoch=1, drafts=ints(0, DRAFTS), draft_ids=ints(*[OWN_DRAFT] * DRAFTS),
        drafting=ints(0, -1 - DRAFTS, 1 + DRAFTS, DRAFTS, 1),
    )  # fmt: skip
    plans = [
        StepPlan(
            step=1, epoch=1, starts=(start(0),), chunks=ints(0, 0, len(PROMPT), 1), microbatch=NO_MICROBATCH,
            drafting=ints(0, 0, len(PROMPT) + 1, DRAFTS, 1),
        ),
        structs.replace(verifying, step=2, decode_on=ints(0)),
        *(structs.replace(verifying, step=step) for step in (3, 4, 5)),
        StepPlan(step=6, epoch=1),
    ]  # fmt: skip
    found = []
    for plan in plans:
        result = runner.collect(runner.launch(plan))
        found.append(
            (np.frombuffer(result.token_ids, np.int32).tolist(), np.frombuffer(result.drafts, np.int32).tolist())
        )
    runner.reset()
    history = runner._slots.history
    return found, history.tokens[0].clone(), history.known.clone(), moved.total()


@pytest.mark.parametrize("method", ["draft_model", "eagle", "listening"])
def test_drafts_of_the_last_stage_are_those_of_a_whole_model(ranks: Ranks, method: str, tmp_path: Path) -> None:
    """And stand in every stage's slots, as what became of them does."""
    folder = {"draft_model": embedded.draft_folder, "eagle": embedded.eagle_folder}.get(method)
    path = listening_head(tmp_path, read_spec(FOLDER)) if folder is None else folder()
    given = "draft_model" if method == "draft_model" else "eagle", path
    steps, row, known, _ = drafted(ALONE, *given)
    (_, *first, taken), (said, *last, sent) = ranks.run(TWO, drafted, *given)
    assert said == steps
    assert all(len(drafts) == DRAFTS for _, drafts in steps[:-1])
    assert sent == taken == len(steps) - 1
    for found in first, last:
        assert torch.equal(found[1][:-1], known[:-1])
        assert torch.equal(found[0][: int(known[0])], row[: int(known[0])])


def prewarmed(group: Group, method: str, folder: Path) -> int:
    """Steps on trial with drafts behind them, over one layer of each kind."""
    spec = read_draft(method, folder, read_spec(FOLDER), None)
    model = model_of(group, spec)
    short = model.shallow()
    few = shallow_draft(draft_of(method, folder, spec, model), short)
    assert len(short.blocks) < len(model.blocks)
    runner = Runner(short, short.spec, replace(runner_of(group).options, blocks=0), few)
    moved = watched(runner._pipeline, "tell_drafts", "_take_drafts")
    for plan in runner.drafted([dummy_step(runner.sizes, [8, 1], Sampling(temperature=1.0)) for _ in range(3)]):
        runner.collect(runner.launch(plan))
    runner.reset()
    return moved.total()


@pytest.mark.parametrize("method", ["draft_model", "listening"])
def test_drafts_on_trial_go_through_all_stages(ranks: Ranks, method: str, tmp_path: Path) -> None:
    """As they do when kernels are compiled for them."""
    if method == "draft_model":
        assert ranks.run(TWO, prewarmed, method, embedded.draft_folder()) == [3, 3]
    else:
        assert ranks.run(TWO, prewarmed, "eagle", listening_head(tmp_path, read_spec(FOLDER))) == [3, 3]


def marked(group: Group) -> list[int]:
    """Drafts of the host that are kept by chance, whatever the model says."""
    model = model_of(group)
    runner = Runner(model, model.spec, replace(runner_of(group).options, synthetic_acceptance=0.5))
    plans = [prompt(1, 0), StepPlan(step=2, epoch=1, decode_on=ints(0), drafts=ints(0, 4), draft_ids=ints(*[5] * 4))]
    plans += [StepPlan(step=step, epoch=1, drafts=ints(0, 4), draft_ids=ints(*[5] * 4)) for step in (3, 4, 5)]
    for plan in plans:
        runner.collect(runner.launch(plan))
    runner.reset()
    history = runner._slots.history
    said: list[int] = history.tokens[0, : int(history.known[0])].tolist()
    return said


def test_every_stage_keeps_the_drafts_that_the_last_one_keeps(ranks: Ranks) -> None:
    whole = marked(ALONE)
    assert ranks.run(TWO, marked) == [whole, whole]


def test_a_whole_model_is_no_stage() -> None:
    assert stage_model(model_of(ALONE), ALONE, 64) is None
    assert runner_of(ALONE)._pipeline is None


def test_a_stages_places_are_as_large_as_its_largest_step() -> None:
    first, last = (StageModel(model_of(Group(stage=stage, stages=2)), 24) for stage in range(2))
    assert first.inbox is None
    assert last.outbox is None
    assert first.outbox is not None
    assert last.inbox is not None
    assert first.outbox.shape == last.inbox.shape == (1, 24, read_spec(FOLDER).hidden)
    listening = [StageModel(model_of(Group(stage=stage, stages=3)), 24, (1, 3, 5)) for stage in range(3)]
    lines = [[0 if box is None else len(box) for box in (stage.inbox, stage.outbox)] for stage in listening]
    assert lines == [[0, 2], [2, 3], [3, 0]], "the residual stream, and what was heard so far"


class Arrived:
    """What was sent is there."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


def test_each_rank_sends_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what goes to another host goes there once."""
    sent: list[Tensor] = []

    def send(group: Group, stream: Tensor) -> Arrived:
        sent.append(stream)
        return Arrived()

    monkeypatch.setattr(Group, "send", send)
    rows = decode_rows(np.arange(3, dtype=np.int32))
    passed = torch.randn(1, 24, read_spec(FOLDER).hidden)
    for rank in range(2):
        group = Group(rank=rank, size=2, stages=2)
        stage, whole = StageModel(model_of(group), 24), runner_of(ALONE)
        assert stage.outbox is not None
        stage.outbox.copy_(passed)
        slots = whole._slots
        upload = Upload(torch.device("cpu"))
        Pipeline(stage, group, 5, slots.parameters.sampling, slots.history, upload).pass_on(rows)
    assert torch.equal(torch.cat(sent, -1), passed[:, :3])


def warmed(group: Group) -> int:
    runner = runner_of(group)
    for count in (1, 8, 30):
        runner.collect(runner.launch(dummy_step(runner.sizes, [count, 1], Sampling(temperature=1.0))))
    runner.reset()
    return runner.statistics().steps


def test_steps_on_trial_go_through_all_stages(ranks: Ranks) -> None:
    assert ranks.run(TWO, warmed) == [3, 3]
