"""An encoder's steps: whole texts without blocks, types of pairs, heads behind pooling, dummy steps, the self-test."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.engine_core.execution.dummy_runs import encoder_steps
from penstock.engine_core.execution.input_batch import SlotSizes
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.execution.self_test import Probe, vector_trouble
from penstock.engine_core.loading import load
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.messages import Pooling, Sampling
from penstock.protocol.step_columns import chunk_table
from penstock.protocol.steps import SlotStart, StepPlan
from tests.engine_core.models.encoder_parity import SIZES, joined, states, texts

LENGTH = 130
LENGTHS = (9, 1, 30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("bert")
    names = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "id2label": {"0": "a", "1": "b"}}
    (folder / "config.json").write_text(json.dumps({**SIZES, **names}))
    made = build(read_spec(folder), torch.float32, torch.device("cpu"), LENGTH)
    load(made, folder, "dummy")
    return made


def runner(model: Decoder) -> Runner:
    options = RunnerOptions(
        device=torch.device("cpu"), dtype=torch.float32, blocks=0, block_size=16, max_model_len=LENGTH, max_num_seqs=4,
        step_tokens=LENGTH,
    )  # fmt: skip
    return Runner(model, model.spec, options)


def plan(prompts: list[list[int]], poolings: list[Pooling]) -> StepPlan:
    starts = tuple(
        SlotStart(
            slot=slot, token_ids=np.array(prompt, "<i4").tobytes(), prompt_tokens=len(prompt), computed=0, blocks=b"",
            sampling=Sampling(max_tokens=1), seed=0, pooling=pooling,
        )
        for slot, (prompt, pooling) in enumerate(zip(prompts, poolings, strict=True))
    )  # fmt: skip
    chunks = np.array([(slot, 0, len(prompt), 0) for slot, prompt in enumerate(prompts)], "<i4")
    return StepPlan(step=1, epoch=0, starts=starts, chunks=chunks.tobytes())


def vectors(model: Decoder, prompts: list[list[int]], *poolings: Pooling) -> list[NDArray[np.float32]]:
    one = runner(model)
    found = one.collect(one.launch(plan(prompts, list(poolings)))).vectors
    assert [part.row for part in found] == list(range(len(prompts)))
    return [np.frombuffer(part.values, np.float32) for part in found]


@torch.inference_mode()
def test_each_text_is_pooled_in_its_way(model: Decoder) -> None:
    prompts = texts(LENGTHS)
    mean, last, head = vectors(
        model, prompts, Pooling(kind="mean"), Pooling(kind="last"), Pooling(kind="cls", classify=True)
    )
    first, second, third = states(model, prompts)
    torch.testing.assert_close(torch.tensor(mean), first.mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(last), second[-1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(head), model.pooled(third[:1], classify=True)[0], atol=1e-6, rtol=1e-5)
    assert len(head) == 2


@torch.inference_mode()
def test_the_second_text_of_a_pair_has_types_of_its_own(model: Decoder) -> None:
    prompts = texts(LENGTHS)
    pair = Pooling(kind="mean", second=12)
    plain, _, typed = vectors(model, prompts, Pooling(kind="mean"), Pooling(kind="mean"), pair)
    types = [[0] * 9, [0], [0] * 12 + [1] * 18]
    for found, expected in zip((plain, typed), states(model, prompts, types)[::2], strict=True):
        torch.testing.assert_close(torch.tensor(found), expected.mean(0), atol=1e-6, rtol=1e-5)
    assert not np.allclose(typed, states(model, prompts)[2].mean(0).numpy(), atol=1e-3)
    assert len(joined(types)) == sum(LENGTHS)


def test_dummy_steps_are_of_the_largest_size_and_sample_nothing(model: Decoder) -> None:
    sizes = SlotSizes(4, 50, 16, 160)
    for classifies in (False, True):
        first, *pooled = encoder_steps(sizes, 120, classifies=classifies)
        assert chunk_table(first.chunks)[:, 2].tolist() == [50, 50, 20]
        assert [start.pooling and start.pooling.classify for each in pooled for start in each.starts] == (
            [False, True] if classifies else [False]
        )
        assert all((chunk_table(each.chunks)[:, 3] == 0).all() for each in (first, *pooled))
    assert chunk_table(encoder_steps(sizes, 1000, classifies=False)[0].chunks)[:, 2].tolist() == [50] * 4
    one = runner(model)
    for each in encoder_steps(one.sizes, LENGTH, classifies=True):
        one.collect(one.launch(each))


def test_the_self_test_looks_at_a_vector(model: Decoder) -> None:
    probe, one = Probe((5, 6, 7), 3), runner(model)
    assert vector_trouble(one, probe) == ""
    norm: Any = model.norm
    kept = norm.weight.clone()
    for value, words in ((0.0, "all the same"), (float("nan"), "not finite")):
        norm.weight.fill_(value)
        assert words in vector_trouble(one, probe)
    norm.weight.copy_(kept)
    assert vector_trouble(one, probe) == "", "the runner forgets it"
