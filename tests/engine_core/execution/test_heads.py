"""EAGLE heads in a runner: no token changes, and what they guess is what they would over whole sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from penstock.engine_core import loading
from penstock.engine_core.execution.draft_model import Draft, draft_block_bytes
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.models import registry
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.eagle import EagleHead
from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol.steps import StepPlan
from tests.engine_core.execution.harness import (
    GREEDY,
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
from tests.engine_core.execution.test_draft_model import MOST, STEPS, Bench, same
from tests.engine_core.execution.test_same_tokens import lives, outputs
from tests.engine_core.models import eagle_heads as heads
from tests.engine_core.models.eagle_heads import load_head
from tests.engine_core.models.parity import PagedRun
from tests.engine_core.models.specs import resized

VERSIONS = ("first", "third")


def spec() -> ModelSpec:
    """As wide as the heads of `eagle_heads`, deep enough for three depths."""
    return resized(tiny_spec(), hidden=heads.HIDDEN, head_dim=heads.DIM, layers=7, windows=(0,) * 7)


@pytest.fixture(scope="module")
def model() -> Decoder:
    found = registry.build(spec(), torch.float32, torch.device("cpu"), LENGTH)
    with torch.inference_mode():
        loading.load(found, Path(), "dummy", seed=3)
    return found


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def weights(version: str) -> heads.Weights:
    return heads.first_weights() if version == "first" else heads.third_weights(VOCABULARY)


@pytest.fixture(scope="module")
def head(model: Decoder, version: str, weights: heads.Weights, tmp_path_factory: pytest.TempPathFactory) -> EagleHead:
    config = heads.head_config(VOCABULARY, version == "third")
    folder = heads.write_head(tmp_path_factory.mktemp(version), config, weights)
    with torch.inference_mode():
        return load_head(folder, model, LENGTH)


def runner_of(model: Decoder, draft: Draft | None = None) -> Runner:
    options = RunnerOptions(
        device=torch.device("cpu"), dtype=torch.float32, blocks=200, block_size=8, max_model_len=LENGTH, max_num_seqs=8
    )
    return Runner(model, spec(), options, draft)


@pytest.fixture(scope="module")
def plain(model: Decoder) -> list[list[int]]:
    found = lives()
    runner = runner_of(model)
    prefill(runner, found)
    decode(runner, found, STEPS + 2 * MOST)
    return outputs(found)


def bench_of(model: Decoder, head: EagleHead, found: list[Life]) -> Bench:
    return Bench(runner_of(model, Draft(head, head.spec.layers, MOST)), found)


@pytest.mark.sweep
@pytest.mark.parametrize("count", [1, MOST])
@pytest.mark.parametrize("budget", [7, 1000])
def test_a_head_changes_no_token(
    model: Decoder, head: EagleHead, plain: list[list[int]], count: int, budget: int
) -> None:
    """Greedy and sampled, with filters, penalties, biases, bad words, minimum lengths and log-probabilities."""
    bench = bench_of(model, head, lives())
    bench.prefill(count, budget)
    while min(len(life.output) for life in bench.lives) < STEPS:
        bench.decode(count, count + 1, count)
    assert same(bench, plain)


@torch.inference_mode()
def target_states(model: Decoder, head: EagleHead, ids: list[int]) -> Tensor:
    """What the head is told of the target, at every position of a sequence, in float64."""
    found: list[Tensor] = []

    class Listening:
        spec, dtype, logits = model.spec, model.dtype, model.logits

        def forward(self, *inputs: object) -> Tensor:
            hidden, aux_states = model.forward_aux(*inputs, head.spec.aux_layers)  # type: ignore[arg-type]
            found.append(head.combine(hidden, aux_states))
            return hidden

    run = PagedRun(model, [ids])
    run.model = Listening()  # type: ignore[assignment]
    run.step([len(ids)])
    return found[0].double()


@torch.inference_mode()
def guesses(model: Decoder, head: EagleHead, weights: heads.Weights, ids: list[int], count: int) -> list[int]:
    """The most likely drafts behind a sequence: the head over all of it, again for each."""
    embedding = model.embedding.weight.double()
    before = torch.cat((torch.zeros(1, heads.HIDDEN).double(), target_states(model, head, ids)[:-1]))
    drafted: list[int] = []
    for _ in range(count):
        embedded = embedding[[*ids, *drafted]]
        if head.spec.vocabulary:
            states = heads.third_states(weights, embedded, before)
            best = int(heads.third_logits(weights, states[-1:])[0].argmax())
            drafted.append(best + int(weights["d2t"][best]))
        else:
            states = heads.first_states(weights, embedded, before)
            assert model.head is not None
            drafted.append(int(linear(states[-1], model.head.operand.to_dense().double()).argmax()))
        before = torch.cat((before, states[-1:]))
    return drafted


@pytest.mark.parametrize("budget", [6, 1000])
def test_its_guesses_are_those_of_whole_sequences(
    model: Decoder, head: EagleHead, weights: heads.Weights, budget: int
) -> None:
    """After a prompt in chunks, after rejected drafts, after accepted ones: it read the model's own states."""
    tables = block_tables(3, 16)
    prompts = [[5, 17, 60], [*range(20, 45)], [9] * 16]
    bench = bench_of(
        model, head, [Life(prompt, GREEDY, slot=at, blocks=tables[at]) for at, prompt in enumerate(prompts)]
    )
    bench.prefill(0, budget)
    for carried in (0, MOST, MOST, 2):
        told = np.frombuffer(bench.decode(carried, carried + 2, MOST, told=True).drafts, "<i4").reshape(3, MOST)
        for life, found in zip(bench.lives, told.tolist(), strict=True):
            assert found == guesses(model, head, weights, [*life.prompt, *life.output], MOST)


def test_states_stand_in_blocks_that_another_request_takes_over(
    model: Decoder, head: EagleHead, weights: heads.Weights
) -> None:
    """As after a hit in the prefix cache: the first blocks are computed by somebody else."""
    tables = block_tables(2, 16)
    prompt = list(range(30, 53))
    bench = bench_of(model, head, [Life(prompt, GREEDY, slot=0, blocks=tables[0])])
    bench.prefill(0)
    shared = [*tables[0][:2], *tables[1][2:]]  # 16 tokens
    other = Life(prompt, GREEDY, slot=1, blocks=shared)
    plan = StepPlan(
        step=bench.step,
        epoch=0,
        starts=(other.start(16),),
        chunks=column(1, 16, 7, 1),
        drafting=column(1, 16, 8, MOST, 1),
    )
    result = bench.launch(plan)
    told = np.frombuffer(result.drafts, "<i4").tolist()
    assert told == guesses(model, head, weights, [*prompt, *tokens_of(result)], MOST)


def test_a_head_that_is_broken_costs_its_drafts_alone(model: Decoder, plain: list[list[int]], tmp_path: Path) -> None:
    folder = heads.write_head(tmp_path, heads.head_config(VOCABULARY), heads.first_weights())
    broken = load_head(folder, model, LENGTH)
    with torch.inference_mode():
        for destination in broken.destinations().values():
            assert destination.tensor is not None
            destination.tensor.fill_(float("nan"))
    bench = bench_of(model, broken, lives())
    bench.prefill(MOST)
    for _ in range(4):
        bench.decode(MOST, MOST + 1, MOST)
    assert same(bench, plain)


def test_a_block_holds_states_beside_keys_and_values(model: Decoder, head: EagleHead) -> None:
    own = 2 * 16 * heads.KV_HEADS * heads.DIM * 2
    assert draft_block_bytes(Draft(head, head.spec.layers, MOST), 16, 2) == own + 16 * heads.HIDDEN * 2
    assert draft_block_bytes(Draft(model, head.spec.layers, MOST), 16, 2) == own
