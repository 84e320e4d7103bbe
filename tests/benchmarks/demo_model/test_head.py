"""The training of the EAGLE head: what it computes is what the engine loads, and it learns."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from benchmarks.demo_model import folder
from benchmarks.demo_model.head import Head, Lesson, config, dense_mask, fit, hidden_states, learn, shifted, write
from benchmarks.demo_model.network import Network
from penstock.engine_core import loading
from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from tests.engine_core.models.eagle_heads import first_weights, load_head
from tests.engine_core.models.parity import PagedRun
from tests.engine_core.models.test_eagle import Driven


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def teacher() -> Network:
    return folder.read(demo_folder()).requires_grad_(False)


def lesson_of(teacher: Network, rows: int, tokens: int) -> Lesson:
    ids = torch.randint(0, 4000, (rows, tokens), generator=torch.Generator().manual_seed(4))
    documents = (torch.arange(tokens) >= tokens // 2).int().expand(rows, -1).contiguous()
    states = hidden_states(teacher, ids, dense_mask(documents))
    return Lesson(ids, torch.ones(rows, tokens, dtype=torch.bool), documents, states)


def test_the_state_before_a_documents_first_token_is_zero() -> None:
    states = torch.arange(1.0, 7.0).view(1, 6, 1)
    before = shifted(states, torch.tensor([[0, 0, 1, 1, 1, 2]]))
    assert before.flatten().tolist() == [0, 1, 0, 3, 4, 0]


@torch.inference_mode()
def test_what_is_trained_is_what_the_engine_loads(teacher: Network, tmp_path: Path) -> None:
    head = Head(teacher.shape, 1)
    for parameter in head.parameters():
        parameter.copy_(parameter.bfloat16().float())
    write(head, tmp_path)
    model = build(read_spec(demo_folder()), torch.float32, torch.device("cpu"), 64)
    loading.load(model, demo_folder())
    loaded = load_head(tmp_path, model, 64)
    ids = torch.randint(0, 4000, (1, 20), generator=torch.Generator().manual_seed(4))
    mask = dense_mask(torch.zeros(1, 20, dtype=torch.int32))
    before = shifted(hidden_states(teacher, ids, mask), torch.zeros(1, 20, dtype=torch.int32))
    expected = head(teacher.embed_tokens(ids), before, teacher.cos[:20], teacher.sin[:20], mask)
    run = PagedRun(Driven(loaded, before), ids.tolist())  # type: ignore[arg-type]
    run.step([20])
    torch.testing.assert_close(
        run.sequences[0].logits[0], linear(expected[0], teacher.embed_tokens.weight), atol=2e-3, rtol=2e-3
    )


def test_names_are_those_of_published_heads(teacher: Network, tmp_path: Path) -> None:
    from safetensors import safe_open

    write(Head(teacher.shape, 1), tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(first_weights())
    assert json.loads((tmp_path / "config.json").read_text()) == config(teacher.shape)
    assert (tmp_path / "model.safetensors").stat().st_size <= 1.5 * 1024 * 1024


def test_a_head_learns(teacher: Network) -> None:
    given = lesson_of(teacher, 1, 24)
    head = Head(teacher.shape, 1)
    before, found = learn(head, teacher, given, 3)
    assert len(found) == 3
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(15):
        loss, _ = learn(head, teacher, given, 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.8 * float(before.detach())


def test_a_short_training_leaves_a_folder(teacher: Network, tmp_path: Path) -> None:
    arguments = argparse.Namespace(teacher=demo_folder(), out=tmp_path / "head", minutes=1e-4, rows=1, context=128,
                                   again=1, rate=1e-3, seed=1, turns=2)  # fmt: skip
    fit(arguments, teacher, Head(teacher.shape, 1))
    written = {path.name for path in (tmp_path / "head").iterdir()}
    assert written == {"SHA256SUMS", "config.json", "model.safetensors"}
