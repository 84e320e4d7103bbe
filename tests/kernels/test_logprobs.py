"""logprobs.py and logprobs_triton.py against float64 and against each other: ties, ranks, and who is asked about."""

from __future__ import annotations

import pytest
import torch

from kernels.logprobs import MOST, logprobs, token_logprobs
from kernels.logprobs_triton import score_tokens

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
