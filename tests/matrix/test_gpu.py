"""On a GPU in half precision: the embedded model's answers whichever path produced them, and logits of an 8B stack."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from penstock.engine_core.embedded import demo_folder, draft_folder
from penstock.engine_core.execution import product_bench, product_tuning
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import ModelSpec, read_spec
from penstock.kernels.chip import chip_of
from penstock.kernels.linear_plans import plans_of
from penstock.protocol.engine_config import KV_FP8
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import SlotStart, StepPlan
from tests.matrix.engine import Answers, Cell, Engine, Prompt

pytestmark = pytest.mark.gpu

CANARY = Path(__file__).parents[1] / "canary.jsonl"
LONGEST = 100  # tokens of an answer
TYPES = (torch.bfloat16, torch.float16)
BASE = Cell(depth=1, max_model_len=1024)
CELLS = {
    f"{'graphs' if graphs else 'eager'}-{depth}-{'mixed' if budget == 96 else 'pure'}": Cell(
        graphs=graphs, depth=depth, budget=budget, max_model_len=1024
    )
    for graphs, depth, budget in itertools.product((False, True), (1, 2), (96, 8192))
}
LAYERS = 3
PROMPT = 300  # tokens
CHUNK = 128
ANSWER = 8


@cache
def prompts() -> list[Prompt]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    stops = (*json.loads((demo_folder() / "generation_config.json").read_text())["eos_token_id"],)
    sampling = Sampling(temperature=0.0, max_tokens=LONGEST, eos_token_ids=stops)
    found = []
    for asked in map(json.loads, CANARY.read_text().splitlines()):
        ids = tokenizer.apply_chat_template(
            asked["messages"], tools=asked.get("tools"), add_generation_prompt=True, return_dict=True
        )["input_ids"]
        found.append(Prompt(token_ids=tuple(ids), sampling=sampling))
    return found


@cache
def base(dtype: torch.dtype) -> Answers:
    """Eager steps, one at a time, prompts whole."""
    return Engine(BASE, demo_folder(), dtype=dtype, device="cuda").answer(prompts())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_every_path_gives_the_same_tokens(name: str, dtype: torch.dtype) -> None:
    engine = Engine(CELLS[name], demo_folder(), dtype=dtype, device="cuda")
    assert len(prompts()) == 40
    prewarmed = engine.runner.statistics().steps
    assert engine.answer(prompts()) == base(dtype)
    graphs = engine.runner.graphs
    if graphs is not None:
        steps = engine.runner.statistics().steps - prewarmed
        assert min(graphs.forward.replays, graphs.sampling.replays) >= steps - 2


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_a_draft_model_gives_the_same_tokens(name: str, dtype: torch.dtype) -> None:
    cell = msgspec.structs.replace(CELLS[name], own_drafts=4)
    engine = Engine(cell, demo_folder(), dtype=dtype, device="cuda", draft=draft_folder())
    assert engine.answer(prompts()) == base(dtype)
    found = engine.scheduler.statistics()
    assert found.accepted_tokens > 0.8 * found.draft_tokens > 0
    if engine.runner.draft_graphs is not None:
        assert engine.runner.draft_graphs.replays > found.drafts / 64


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_a_cache_in_fp8_gives_the_same_tokens(name: str, dtype: torch.dtype) -> None:
    """Beside a draft model, whose cache is in FP8, too."""
    alone = Engine(msgspec.structs.replace(BASE, kv_cache_dtype=KV_FP8), demo_folder(), dtype=dtype, device="cuda")
    cell = msgspec.structs.replace(CELLS[name], own_drafts=4, kv_cache_dtype=KV_FP8)
    drafted = Engine(cell, demo_folder(), dtype=dtype, device="cuda", draft=draft_folder())
    assert drafted.answer(prompts()) == alone.answer(prompts())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_measured_products_give_the_same_tokens(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the first start on a chip that nobody has measured."""
    expected, device = base(dtype), torch.device("cuda", 0)
    monkeypatch.setattr(product_tuning, "SMALLEST", 0)
    plans_of.cache_clear()
    try:
        plans = plans_of(device)
        assert Engine(BASE, demo_folder(), dtype=dtype, device="cuda").answer(prompts()) == expected
        measure = partial(
            product_bench.measure, device=device, compilers=None, dropped=lambda *why: None, progress=lambda *at: None
        )
        products = product_tuning.untuned(plans)
        assert products
        product_tuning.tune(plans, products, measure, "any")
        assert not product_tuning.untuned(plans)
        assert Engine(BASE, demo_folder(), dtype=dtype, device="cuda").answer(prompts()) == expected
    finally:
        plans_of.cache_clear()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("graphs", [False, True])
def test_unsplit_attention_gives_the_same_tokens(
    graphs: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device of one processor, which has nothing to share keys among."""
    expected = base(dtype)
    monkeypatch.setattr("penstock.kernels.attention_device.chip_of", lambda device: replace(chip_of(device), num_sms=1))
    cell = Cell(graphs=graphs, max_model_len=1024)
    assert Engine(cell, demo_folder(), dtype=dtype, device="cuda").answer(prompts()) == expected


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_alone_or_in_company(dtype: torch.dtype) -> None:
    cell = Cell(graphs=True, max_model_len=1024)
    alone = Engine(cell, demo_folder(), dtype=dtype, device="cuda").answer(prompts(), together=False)
    assert alone == base(dtype)


class Recorder:
    """A model whose logits are kept."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.kept: list[torch.Tensor] = []

    def forward(self, *arguments: Any) -> torch.Tensor:
        return self.model.forward(*arguments)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self.model.logits(hidden)
        self.kept.append(found.float())
        return found


def stack(folder: Path, dtype: torch.dtype) -> Any:
    """Layers of Llama-3.1-8B's shape with random weights, by transformers; their configuration goes to `folder`."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=LAYERS, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0,
        tie_word_embeddings=False, dtype=dtype,
    )  # fmt: skip
    config.save_pretrained(folder)
    torch.manual_seed(5)
    with torch.device("cuda"):
        # Not `.to(dtype)`, which would round the frequencies of its rotary positions too.
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def ours(theirs: Any, folder: Path, dtype: torch.dtype) -> tuple[Decoder, ModelSpec]:
    spec = read_spec(folder)
    model = build(spec, dtype, torch.device("cuda"), 1024)
    weights = theirs.state_dict()
    with torch.inference_mode():
        for name, destination in model.destinations().items():
            assert destination.tensor is not None
            destination.tensor.copy_(weights[name])
    return model, spec


def stepped(recorder: Recorder, spec: ModelSpec, dtype: torch.dtype, ids: Sequence[int]) -> torch.Tensor:
    """Logits at the prompt's end and of each decode step, the prompt in chunks: [1 + ANSWER, vocabulary]."""
    options = RunnerOptions(
        device=torch.device("cuda"), dtype=dtype, blocks=64, block_size=16, max_model_len=1024, max_num_seqs=4
    )
    runner = Runner(recorder, spec, options)
    start = SlotStart(
        slot=2, token_ids=np.array(ids[:PROMPT], "<i4").tobytes(), prompt_tokens=PROMPT, computed=0,
        blocks=(1 + np.random.default_rng(0).permutation(64)[:30]).astype("<i4").tobytes(),
        sampling=Sampling(temperature=0.0, max_tokens=ANSWER), seed=0,
    )  # fmt: skip
    starts: tuple[SlotStart, ...] = (start,)
    for first in range(0, PROMPT, CHUNK):
        count = min(CHUNK, PROMPT - first)
        chunk = np.array([2, first, count, first + count == PROMPT], "<i4").tobytes()
        runner.collect(runner.launch(StepPlan(step=1, epoch=1, starts=starts, chunks=chunk)))
        starts = ()
    on = np.array([2], "<i4").tobytes()
    for place in range(ANSWER):  # what was sampled is overwritten, so that both models read the same tokens
        runner._slots.history.tokens[2, PROMPT + place] = ids[PROMPT + place]
        runner.collect(runner.launch(StepPlan(step=2, epoch=1, decode_on=on if place == 0 else b"")))
    return torch.cat(recorder.kept)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_logits_of_an_8b_stack_are_as_close_to_fp32_as_those_of_transformers(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs = stack(tmp_path, dtype)
    model, spec = ours(theirs, tmp_path, dtype)
    ids = torch.randint(32000, (PROMPT + ANSWER,), generator=torch.Generator().manual_seed(1)).tolist()
    recorder = Recorder(model)
    found = stepped(recorder, spec, dtype, ids)
    with torch.inference_mode():
        line = torch.tensor([ids], device="cuda")
        places = slice(PROMPT - 1, PROMPT + ANSWER)
        given = theirs(line).logits[0, places].float()
        exact = theirs.float()(line).logits[0, places]
    assert found.shape == given.shape == (1 + ANSWER, 32000)
    error, allowed = ((one - exact).norm() / exact.norm() for one in (found, given))
    assert error <= 1.5 * allowed, f"{error:.5f} against {allowed:.5f}"
