"""Rows whose latents are expanded: which they are, how they are grouped, and that tokens are the same with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.engine_core.execution import model_runner
from penstock.engine_core.execution.dummy_runs import LITTLE
from penstock.engine_core.execution.input_batch import mixed_rows
from penstock.engine_core.execution.long_rows import find_long_rows
from penstock.engine_core.execution.model_runner import Runner, RunnerOptions
from penstock.engine_core.execution.transfer import Upload
from penstock.engine_core.loading import load
from penstock.engine_core.models import latent_attention
from penstock.engine_core.models.registry import build
from penstock.kernels.latent_expansion import GROUP_KEYS, LONG
from penstock.kernels.records import DECODING, LongRows
from penstock.protocol.steps import StepPlan
from tests.engine_core.execution.harness import Life, block_tables, column, decode, prefill
from tests.engine_core.models.test_latent_attention import spec_of

CPU = torch.device("cpu")


def found(counts: list[int], starts: list[int], shortest: int) -> LongRows | None:
    query_start = np.array([0, *np.cumsum(counts)], np.int32)
    return find_long_rows(query_start, np.array(starts, np.int32), Upload(CPU), shortest)


def test_rows_are_long_by_their_own_queries() -> None:
    assert found([7, 1], [100, DECODING], 8) is None
    assert found([9], [DECODING], 8) is None, "it has drafts, and the host does not know its keys"
    long = found([1, 8, 7, 70, 2], [DECODING, 0, 30, 60, DECODING], 8)
    assert long is not None
    (group,) = long.groups
    assert group.own.rows.tolist() == [1, 3]
    assert torch.is_tensor(group.own.tokens)
    assert group.own.tokens.tolist() == [*range(1, 9), *range(16, 86)]
    assert group.own.query_start.tolist() == [0, 8, 78]
    assert (group.own.max_query, group.own.max_context) == (70, 130)
    assert group.first_blocks.tolist() == [0, 1]
    assert group.block_rows.tolist() == [0, 1, 1, 1]
    assert group.block_places.tolist() == [0, 0, 64, 128]
    assert long.others is not None
    assert long.others.rows.tolist() == [0, 2, 4]
    assert long.others.query_start.tolist() == [0, 1, 8, 10]
    assert long.others.max_query == 7


def test_neighbours_are_a_slice() -> None:
    long = found([1, 1, 8, 9], [DECODING, DECODING, 0, 5], 8)
    assert long is not None
    assert long.groups[0].own.tokens == slice(2, 19)
    assert long.others is not None
    assert long.others.tokens == slice(0, 2)
    alone = found([8], [3], 8)
    assert alone is not None
    assert alone.others is None


def test_groups_have_few_keys_or_one_row() -> None:
    most = GROUP_KEYS
    long = found([8] * 5, [most - 100, 64, 3 * most, 0, most - 200], 8)
    assert long is not None
    assert [group.own.rows.tolist() for group in long.groups] == [[0], [1], [2], [3, 4]]
    assert all(len(group.block_rows) * 64 <= most for group in long.groups if len(group.own.rows) > 1)


def test_pairs_of_long_rows_are_counted() -> None:
    plan = StepPlan(step=1, epoch=1, chunks=column(7, 1000, LONG, 1, 2, 500, LONG - 1, 1, 6, 0, 200, 1))
    rows = mixed_rows(np.arange(2, dtype=np.int32), plan)
    assert rows.long_pairs == sum(range(1001, 1001 + LONG)) + sum(range(1, 201))


def test_the_chunk_of_the_warmup_is_long() -> None:
    assert LITTLE >= LONG


@torch.inference_mode()
@pytest.mark.parametrize("budget", [256, 150, 30])
def test_tokens_are_those_of_absorbed_queries(budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a prompt's chunks, beside rows that decode; short chunks and decoding rows absorb their queries."""
    spec = spec_of(tmp_path)
    model = build(spec, torch.float32, CPU, 256)
    load(model, tmp_path)
    counts: list[int] = []
    plain = latent_attention.attend_expanded

    def counted(q: torch.Tensor, *rest: object, **more: object) -> None:
        counts.append(len(q))
        plain(q, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(latent_attention, "attend_expanded", counted)
    outputs = []
    for expands in (True, False):
        if not expands:
            monkeypatch.setattr(model_runner, "find_long_rows", lambda *columns: None)
        options = RunnerOptions(device=CPU, dtype=torch.float32, blocks=70, block_size=8, max_model_len=256,
                                max_num_seqs=2)  # fmt: skip
        runner = Runner(model, spec, options)
        chance = np.random.default_rng(5)
        tables = block_tables(2, 32)
        lives = [Life([int(x) for x in chance.integers(3, 160, size)], slot=at, blocks=tables[at])
                 for at, size in enumerate((40, 200))]  # fmt: skip
        prefill(runner, lives[:1], budget)
        decode(runner, lives[:1], 2)
        prefill(runner, lives[1:], budget)
        decode(runner, lives, 8)
        outputs.append([life.output for life in lives])
        if expands:
            assert counts == [min(budget, 200)] * spec.layers * (budget >= LONG)
    assert outputs[0] == outputs[1]
    assert len(counts) == spec.layers * (budget >= LONG)
