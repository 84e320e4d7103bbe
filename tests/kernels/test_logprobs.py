"""logprobs.py and logprobs_triton.py against float64 and against each other: ties, ranks, and who is asked about."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from penstock.kernels.logprobs import logprobs, token_logprobs
from penstock.kernels.logprobs_triton import score_tokens
from penstock.kernels.records import MOST, Processing, TokenLogprobs
from penstock.kernels.sampling import sample_entries
from penstock.kernels.sampling_triton import choose_tokens
from tests.kernels.sampling_runs import SMALL
from tests.kernels.sampling_scene import Row, Scene, adjusted, entry_rows, random_rows, scene

VOCABULARY = 700


@pytest.mark.parametrize("width", [0, 1, 20])
def test_logprobs_are_of_the_raw_distribution(width: int) -> None:
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(4))
    chosen = torch.tensor([0, 5, 9, 63, int(logits[4].argmax())])
    expected = torch.log_softmax(logits.double(), -1)
    ids, values, ranks = logprobs(logits, chosen, width)
    assert ids.shape == values.shape == (5, 1 + width)
    assert torch.equal(ids[:, 0], chosen)
    assert torch.allclose(values.double(), expected.gather(1, ids), atol=1e-5)
    assert torch.equal(ids[:, 1:], logits.topk(width).indices)
    assert ranks.tolist() == [1 + int((row > row[at]).sum()) for row, at in zip(logits, chosen, strict=True)]
    assert ranks[4] == 1


def test_the_lower_id_comes_first_among_equals() -> None:
    logits = torch.tensor([[0.0, -0.0, -1.0, 3.0, 0.0, 3.0, -2.0]])
    ids, values, ranks = logprobs(logits, torch.tensor([4]), 7)
    assert ids.tolist() == [[4, 3, 5, 0, 1, 4, 2, 6]]
    assert ranks.tolist() == [3]
    assert values[0, 0] == values[0, 3] == values[0, 4]


def test_a_small_vocabulary_has_no_more_than_it_has() -> None:
    ids, _, _ = logprobs(torch.randn(1, 3), torch.tensor([1]), 20)
    assert ids.shape == (1, 4)


def check(logits: torch.Tensor, tokens: list[int], slots: list[int], widths: list[int], device: str) -> None:
    """Both ways against `logprobs`."""
    columns = tuple(torch.tensor(column, dtype=torch.int32) for column in (tokens, slots, widths))
    ways = [
        token_logprobs(logits, *columns),
        score_tokens(logits.to(device), *(column.to(device) for column in columns), span=256, group=8),
    ]
    for found in ways:
        assert found.ids.shape == found.values.shape == (len(tokens), 1 + MOST)
        for row, (token, slot) in enumerate(zip(tokens, slots, strict=True)):
            width = widths[slot]
            if width < 0 or token < 0:
                continue
            ids, values, ranks = logprobs(logits[row : row + 1].float(), torch.tensor([token]), width)
            assert found.ids[row, : 1 + width].tolist() == ids[0].tolist()
            assert torch.allclose(found.values[row, : 1 + width].cpu(), values[0], atol=2e-5)
            assert found.ranks[row] == ranks[0]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_of_slots_that_ask(kind: torch.dtype, device: str) -> None:
    logits = (torch.randn(7, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3).to(kind)
    check(logits, [3, 699, -1, 5, -2, 12, 650], [4, 0, 1, 2, 1, 1, 3], [5, MOST, -1, 0, 1], device)


def test_equals_everywhere(device: str) -> None:
    """Flat, of few levels, and with a run of equals that goes over the groups' and spans' edges."""
    logits = torch.zeros(3, VOCABULARY)
    logits[1] = torch.randint(0, 3, (VOCABULARY,), generator=torch.Generator().manual_seed(1)).float()
    logits[2, 250:262] = 5.0
    check(logits, [600, 0, 255], [0, 0, 0], [MOST], device)


def test_a_shift_of_all_logits_changes_nothing(device: str) -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(2)) - 500.0
    check(logits, [7], [0], [4], device)


def processing_of(found: Scene, changed: torch.Tensor | None) -> Processing:
    return Processing(found.sampling.uses, found.sampling.temperature, found.entries.masks, changed)


def both_ways(rows: Sequence[Row], logits: torch.Tensor, device: str) -> list[tuple[list[int], TokenLogprobs]]:
    """Tokens of the entries of `rows`, drawn and scored by the reference and by the kernels."""
    found = scene(rows, logits.shape[1])
    lines = logits[found.row_of]
    there = found.on(device)
    ways = []
    for on, chosen in (
        (found, sample_entries(lines, found.entries, found.sampling, found.history)),
        (there, choose_tokens(lines.to(device), there.entries, there.sampling, there.history, SMALL)),
    ):
        processing = processing_of(on, chosen.adjusted)
        given = (chosen.tokens, on.entries.slots, on.sampling.logprobs, processing)
        if on is found:
            scores = token_logprobs(lines, *given)
        else:
            scores = score_tokens(lines.to(device), *given, span=256, group=8)
        ways.append((chosen.tokens.tolist(), scores))
    return ways


def expected_logprobs(logits: torch.Tensor, row: Row) -> np.ndarray:
    """Of an entry whose row this is, in float64: steps 1 to 3, or none of them."""
    values = logits.double().numpy()
    if row.processed:
        values = adjusted(values, row) / (row.temperature or 1.0)
    return values - values.max() - np.log(np.exp(values - values.max()).sum())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_the_processed_distribution_is_what_the_entries_are_drawn_from(seed: int, device: str) -> None:
    chance = np.random.default_rng(seed)
    width = VOCABULARY if seed else 37  # fewer allowed tokens than are asked for
    rows = [
        dataclasses.replace(row, processed=bool(chance.random() < 0.7), logprobs=int(chance.choice([-1, 0, 3, MOST])))
        for row in random_rows(chance, 12, width)
    ]
    logits = torch.from_numpy(chance.normal(0, 3, (len(rows), width))).float()
    line_of = scene(rows, width).row_of
    for tokens, found in both_ways(rows, logits, device):
        for entry, (token, row) in enumerate(zip(tokens, entry_rows(rows), strict=True)):
            if token < 0 or row.logprobs < 0:
                continue
            expected = expected_logprobs(logits[line_of[entry]], row)
            ids, values = found.ids[entry].tolist(), found.values[entry].tolist()
            assert ids[0] == token
            assert values[0] == pytest.approx(expected[token], abs=1e-4)
            assert found.ranks[entry].item() == pytest.approx(1 + (expected > expected[token] + 1e-9).sum(), abs=1)
            best = np.argsort(-expected, kind="stable")[: min(row.logprobs, int(np.isfinite(expected).sum()))]
            assert values[1 : 1 + len(best)] == pytest.approx(expected[best].tolist(), abs=1e-4)
            assert len(set(ids[1 : 1 + len(best)])) == len(best)
            assert np.isfinite(expected[ids[1 : 1 + len(best)]]).all()
            assert all(value == -np.inf for value in values[1 + len(best) : 1 + row.logprobs])


@pytest.mark.parametrize("processed", [False, True])
def test_forbidden_tokens_are_listed_by_the_raw_distribution_alone(processed: bool, device: str) -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(9))
    worst = logits[0].topk(3, largest=False).indices.tolist()
    row = Row(temperature=0.0, mask=tuple(worst), logprobs=5, processed=processed)
    for tokens, found in both_ways([row], logits, device):
        assert tokens[0] in worst
        named = found.ids[0, 1:6][found.values[0, 1:6] > -np.inf].tolist()
        if processed:
            assert sorted(named) == sorted(worst)
            assert found.ranks[0] == 1
            assert found.values[0, 1:4].exp().sum().item() == pytest.approx(1.0, abs=1e-5)
        else:
            assert named == logits[0].topk(5).indices.tolist()
            assert found.ranks[0] == VOCABULARY - 2


def test_nothing_asked_of_sampling_leaves_the_raw_values_bit_by_bit(device: str) -> None:
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(5)).bfloat16()
    plain, processed = (Row(temperature=1.0, logprobs=MOST, processed=which) for which in (False, True))
    for _, found in both_ways([plain, processed], logits[:1].expand(2, -1), device):
        assert torch.equal(found.values[0, 1:], found.values[1, 1:])
        assert torch.equal(found.ids[0, 1:], found.ids[1, 1:])


@pytest.mark.gpu
def test_a_graph_reads_what_a_slot_asks_for_when_it_is_replayed() -> None:
    row = Row(temperature=0.5, mask=tuple(range(0, 128256, 3)), logprobs=5)
    logits = (torch.randn(1, 128256, generator=torch.Generator().manual_seed(7)) * 2).bfloat16().cuda()
    found = scene([row], 128256).on("cuda")

    def run() -> TokenLogprobs:
        chosen = choose_tokens(logits, found.entries, found.sampling, found.history)
        processing = processing_of(found, chosen.adjusted)
        return score_tokens(logits, chosen.tokens, found.entries.slots, found.sampling.logprobs, processing)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for processed in (False, True):
        found.sampling.uses.copy_(scene([dataclasses.replace(row, processed=processed)], 128256).sampling.uses)
        graph.replay()
        expected = expected_logprobs(logits[0].float().cpu(), dataclasses.replace(row, processed=processed))
        assert captured.values[0, 0].item() == pytest.approx(expected[captured.ids[0, 0].item()], abs=1e-3)
        best = np.sort(expected)[::-1][:5]
        assert captured.values[0, 1:6].tolist() == pytest.approx(best.tolist(), abs=1e-3)


@pytest.mark.gpu
def test_at_full_size() -> None:
    logits = (torch.randn(32, 151936, generator=torch.Generator().manual_seed(3)) * 2).bfloat16()
    tokens = logits.float().topk(40).indices[:, 39].int()
    slots = torch.arange(32, dtype=torch.int32)
    widths = (slots % 22 - 1).clamp(max=MOST)
    expected = token_logprobs(logits, tokens, slots, widths)
    found = token_logprobs(logits.cuda(), tokens.cuda(), slots.cuda(), widths.cuda())
    for row, width in enumerate(widths.tolist()):
        assert found.ids[row, : 1 + width].tolist() == expected.ids[row, : 1 + width].tolist()
        assert torch.allclose(found.values[row, : 1 + width].cpu(), expected.values[row, : 1 + width], atol=1e-4)
        assert width < 0 or found.ranks[row] == expected.ranks[row]
