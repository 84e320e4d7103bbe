"""Adapters beside what must not change tokens: ranks, stages, quantized weights, drafts, cached prefixes, preemption.

Tiny random models in fp32, hand-made plans; peft says what is expected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen2MoeConfig

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.loading import load
from penstock.engine_core.loading.adapters import read_adapter
from penstock.engine_core.models.adapter_folder import place_bytes
from penstock.engine_core.models.adapters import AdapterPlaces, linears
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.mlp import SparseMlp
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.sharding import part_spec, stage_spec
from penstock.engine_core.models.spec import read_spec
from penstock.kernels.quantized import GroupedWeight
from penstock.protocol.messages import Pooling, Sampling
from penstock.protocol.steps import StepMasks, StepPlan
from tests.engine_core.execution.harness import GREEDY, Life, block_tables, column, decode, prefill, tokens_of
from tests.engine_core.models.lora_folders import greedy, write_adapter
from tests.engine_core.models.parity import SIZES, theirs, write_checkpoint
from tests.ranks import Ranks

COUNT = 6
PROMPTS = ([5, 9, 31, 77, 8, 12], [5, 9, 31], [90, 4, 4, 17, 33, 2, 60])
PLACES = (1, 0, 2)  # of the prompts
STAGED = (1, 2)


class Folders:
    """A model, two adapters, and what each prompt gets from the one of its place."""

    def __init__(self, folder: Path, config: PreTrainedConfig, first: dict[str, Any], second: dict[str, Any]) -> None:
        self.base = folder / "base"
        write_checkpoint(self.base, config)
        self.adapters = tuple(folder / str(place) for place in (1, 2))
        models = [theirs(self.base), write_adapter(self.base, self.adapters[0], 1, **first)]
        models.append(write_adapter(self.base, self.adapters[1], 2, r=3, **second))
        self.expected = [greedy(models[place], prompt, COUNT) for place, prompt in zip(PLACES, PROMPTS, strict=True)]
        with torch.inference_mode():
            self.logits = [models[place](torch.tensor([PROMPTS[2]])).logits[0] for place in (2, 0)]
        assert self.expected[1] != greedy(models[1], PROMPTS[1], COUNT)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(
        tmp_path_factory.mktemp("adapters"),
        LlamaConfig(**SIZES),
        {},
        {"target_modules": ["k_proj", "down_proj", "lm_head"]},
    )


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Both adapt routed experts, the first one the shared one, too."""
    config = Qwen2MoeConfig(
        **SIZES, moe_intermediate_size=48, shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    )
    shared, routed = r".*(self_attn\.\w+|shared_expert\.\w+)_proj", ["experts.gate_up_proj", "experts.down_proj"]
    first = {"target_modules": shared, "target_parameters": routed}
    second = {"target_modules": ["k_proj", "lm_head"], "target_parameters": routed[1:]}
    return Folders(tmp_path_factory.mktemp("mixture"), config, first, second)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks((2, STAGED), tmp_path_factory.mktemp("members"))
    yield found
    found.close()


def served(base: Path, adapters: Sequence[Path], group: Group = ALONE, *, whole_experts: bool = False) -> Runner:
    """A runner with the adapters in places 1 and 2."""
    spec = read_spec(base)
    model = build(
        spec, torch.float32, torch.device("cpu"), 64, group=group, expert_parallel=whole_experts, adapters=True
    )
    load(model, base)
    return with_adapters(model, spec, adapters)


def with_adapters(model: Decoder, spec: Any, adapters: Sequence[Path]) -> Runner:
    pack(model.destinations())
    options = RunnerOptions(
        device=torch.device("cpu"), dtype=torch.float32, blocks=200, block_size=8, max_model_len=64, max_num_seqs=20,
        step_tokens=512, group=model.placement.group,
        adapters=AdapterPlaces(model, spec, 2, 8, experts=bool(spec.sparse)),
    )  # fmt: skip
    runner = Runner(model, model.spec, options)
    assert runner.adapters is not None
    runner.adapters.loaded = {at: read_adapter(folder, runner.adapters.places) for at, folder in enumerate(adapters)}
    runner.launch(StepPlan(step=0, epoch=0, adapters=column(0, 1, 1, 2)))
    return runner


def lives(answered: Sequence[Sequence[int]] = ((),) * len(PROMPTS)) -> list[Life]:
    """The prompts, with what has been answered so far."""
    tables = block_tables(len(PROMPTS), 4)
    return [
        Life(prompt, slot=slot, blocks=tables[slot], adapter=place, output=list(output))
        for slot, (prompt, place, output) in enumerate(zip(PROMPTS, PLACES, answered, strict=True))
    ]


def forced(group: Group, folders: Folders, *, whole_experts: bool = False) -> tuple[list[int], int]:
    """Each token of each answer behind those before it, in one step; and the memory of the places."""
    with torch.inference_mode():
        runner = served(folders.base, folders.adapters, group, whole_experts=whole_experts)
        slots, tables = range(0, COUNT * len(PROMPTS), COUNT), block_tables(COUNT * len(PROMPTS), 4)
        texts = [
            Life(prompt, slot=slot + known, blocks=tables[slot + known], adapter=place, output=answer[:known])
            for slot, prompt, place, answer in zip(slots, PROMPTS, PLACES, folders.expected, strict=True)
            for known in range(COUNT)
        ]
        rows = [(life.slot, 0, len(life.prompt) + len(life.output), 1) for life in texts]
        starts = tuple(life.start() for life in texts)
        plan = StepPlan(step=0, epoch=0, starts=starts, chunks=column(*(number for row in rows for number in row)))
        found = tokens_of(runner.collect(runner.launch(plan)))
        runner.reset()  # nothing of it stays under way: the next one uses the same groups
    assert runner.adapters is not None
    return found, runner.adapters.places.memory.nbytes


@pytest.mark.parametrize("size", [2, STAGED], ids=["two ranks", "two stages"])
def test_ranks_and_stages(size: int | tuple[int, int], folders: Folders, members: Ranks) -> None:
    """Each holds its share of the adapters, as `penstock plan` says."""
    found = members.run(size, forced, folders)
    assert found[-1][0] == [token for answer in folders.expected for token in answer]
    spec = read_spec(folders.base)
    shares = [part_spec(spec, 2)] * 2 if size == 2 else [stage_spec(spec, 2, stage) for stage in range(2)]
    planned = [place_bytes(share, 8, 4, ends=size == 2 or bool(stage)) for stage, share in enumerate(shares)]
    assert [held for _, held in found] == [2 * place for place in planned]


@pytest.mark.parametrize(
    ("size", "whole_experts"), [(2, False), (2, True), (STAGED, False)], ids=["two ranks", "whole experts", "stages"]
)
def test_experts_of_ranks_and_stages(
    size: int | tuple[int, int], whole_experts: bool, mixture: Folders, members: Ranks
) -> None:
    """Each has the adapters of its experts, or of its share of the width of all."""
    found = members.run(size, partial(forced, whole_experts=whole_experts), mixture)
    assert found[-1][0] == [token for answer in mixture.expected for token in answer]
    spec = read_spec(mixture.base)
    shares = [part_spec(spec, 2)] * 2 if size == 2 else [stage_spec(spec, 2, stage) for stage in range(2)]
    planned = [
        place_bytes(share, 8, 4, ends=size == 2 or bool(stage), experts=True, parallel=1 + whole_experts)
        for stage, share in enumerate(shares)
    ]
    assert [held for _, held in found] == [2 * place for place in planned]


def dequantized(model: Decoder) -> Iterator[Tensor]:
    for block in model.blocks:
        for _, linear in linears(block):
            parts = [operand for operand in linear.operands if isinstance(operand, GroupedWeight)]
            yield torch.cat([part.dequantized(torch.float32) for part in parts])
        if isinstance(block.mlp, SparseMlp) and block.mlp.quantized is not None:
            yield from (weight.dequantized(torch.float32) for weight in block.mlp.quantized.weights)


@pytest.mark.parametrize("kind", ["folders", "mixture"])
def test_quantized_base(kind: str, request: pytest.FixtureRequest) -> None:
    """What adapters say beside weights of 4 bits is what they say beside the same weights, rounded, in floats."""
    folders: Folders = request.getfixturevalue(kind)
    spec, plain = read_spec(folders.base, "int4"), read_spec(folders.base)
    model, other = (build(one, torch.float32, torch.device("cpu"), 64) for one in (spec, plain))
    for one in (model, other):
        load(one, folders.base)
    weights = iter(list(dequantized(model)))
    for block in other.blocks:
        for _, linear in linears(block):
            linear.weight.copy_(next(weights))
        if isinstance(block.mlp, SparseMlp):
            for own in (block.mlp.gate_up, block.mlp.down):
                own.copy_(next(weights))
    found = []
    for one in (model, other):
        runner, texts = with_adapters(one, one.spec, folders.adapters), lives()
        prefill(runner, texts, budget=3)
        decode(runner, texts, COUNT - 1)
        found.append([life.output for life in texts])
    assert found[0] == found[1]
    assert found[0] != folders.expected


@pytest.fixture
def runner(folders: Folders) -> Runner:
    return served(folders.base, folders.adapters)


def test_chunks_preemption_and_cached_prefixes(folders: Folders, runner: Runner) -> None:
    """A preempted row begins again in another slot; one that finds its prefix in blocks begins behind it."""
    texts = lives()
    prefill(runner, texts, budget=3)
    decode(runner, texts, 2)
    again = lives([life.output for life in texts])
    for life, other in zip(again, texts, strict=True):
        life.slot, life.blocks = other.slot + 4, [block + 12 for block in other.blocks]
    prefill(runner, again, budget=100)
    assert [life.output for life in again] == [answer[:4] for answer in folders.expected]
    for life in again:
        life.output += folders.expected[life.slot - 4][4:5]
        life.slot += 4
    starts = tuple(life.start(computed=8) for life in again if len(life.prompt) + len(life.output) > 8)
    rows = [(start.slot, 8, len(start.token_ids) // 4 - 8, 1) for start in starts]
    plan = StepPlan(step=0, epoch=0, starts=starts, chunks=column(*(number for row in rows for number in row)))
    found = tokens_of(runner.collect(runner.launch(plan)))
    assert found == [folders.expected[start.slot - 8][5] for start in starts]
    assert len(found) == 2


def test_drafts_are_verified_by_the_adapter(folders: Folders, runner: Runner) -> None:
    """Right ones count, and the first wrong one ends its row; the base's draft is one that another row takes."""
    texts = lives()
    prefill(runner, texts)
    first, second, third = folders.expected
    wrong = (third[2] + 1) % SIZES["vocab_size"]
    ids = column(*first[1:4], *second[1:2], third[1], wrong)
    plan = StepPlan(step=0, epoch=0, decode_on=column(0, 1, 2), drafts=column(0, 3, 1, 1, 2, 2), draft_ids=ids)
    found = tokens_of(runner.collect(runner.launch(plan)))
    assert found == [*first[1:5], *second[1:3], *third[1:3], -2]


def test_scores_of_a_prompt_are_the_adapters(folders: Folders, runner: Runner) -> None:
    """Log-probabilities of its tokens, and logits of tokens that are asked for; the base's beside them."""
    prompt, tokens = PROMPTS[2], (7, 100, 0)
    scored, asked = Sampling(temperature=0.0, prompt_logprobs=1), Pooling(kind="logits", tokens=tokens)
    tables, places = block_tables(4, 4), (2, 0, 2, 0)
    starts = [
        Life(prompt, slot=slot, blocks=tables[slot], adapter=place, sampling=scored if slot < 2 else GREEDY).start()
        for slot, place in enumerate(places)
    ]
    starts[2:] = [replace(start, pooling=asked) for start in starts[2:]]
    chunks = column(*(number for slot in range(4) for number in (slot, 0, len(prompt), 0)))
    result = runner.collect(runner.launch(StepPlan(step=0, epoch=0, starts=tuple(starts), chunks=chunks)))
    for row, logits in zip(result.prompt_logprobs, folders.logits, strict=True):
        values = np.frombuffer(row.logprobs.values, np.float32).reshape(len(prompt) - 1, -1)
        expected = torch.log_softmax(logits[:-1], -1)[range(len(prompt) - 1), prompt[1:]]
        assert np.allclose(values[:, 0], expected, atol=1e-4)
    for vector, logits in zip(result.vectors, folders.logits, strict=True):
        assert np.allclose(np.frombuffer(vector.values, np.float32), logits[-1, list(tokens)], atol=1e-4)


def test_a_grammar_allows_what_it_allows(folders: Folders, runner: Runner) -> None:
    """The best token of those in a mask is the adapter's."""
    life = Life(PROMPTS[2], blocks=range(1, 5), adapter=2)
    order = folders.logits[0][-1].argsort(descending=True).tolist()
    words = np.zeros(-(-SIZES["vocab_size"] // 32), np.uint32)
    for token in order[5:]:
        words[token // 32] |= np.uint32(1 << token % 32)
    plan = StepPlan(step=0, epoch=0, starts=(life.start(),), chunks=column(0, 0, len(life.prompt), 1), masked=column(0))
    masks = StepMasks(step=0, epoch=0, entries=column(0), slots=column(0), new_slots=column(0), bits=words.tobytes())
    found = tokens_of(runner.collect(runner.finish(runner.begin(plan), masks)))
    assert found == [order[5]]
