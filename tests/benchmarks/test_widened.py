"""The embedded model in a larger shape says what it says."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.structured_engine import Ask, Cell, Engine
from benchmarks.widened import EIGHT, Width, head_places, padded, widen
from penstock.engine_core.embedded import demo_folder
from penstock.protocol.messages import Sampling
from tests.engine_core.grammar.vocabulary import END, OTHER_END, ids, tokens

SMALL = Width(
    hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128,
)  # fmt: skip
QUESTIONS = ("Sort these numbers: 5, 3, 9.", "What is 128 + 457?", "Tell me a short story about a fox.")


def test_a_widened_model_says_the_same(tmp_path: Path) -> None:
    """Greedy, fp32: its norms' weights are rounded otherwise, which moves logits by a thousandth."""
    sampling = Sampling(temperature=0.0, max_tokens=40, eos_token_ids=(END, OTHER_END))
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    asks = [Ask(token_ids=tuple(ids(chat.format(text))), sampling=sampling) for text in QUESTIONS]
    folder = widen(tmp_path / "wide", SMALL)
    found = [Engine(place, tokens(), Cell()).answer(asks) for place in (demo_folder(), folder)]
    assert [answer.token_ids for answer in found[0].values()] == [answer.token_ids for answer in found[1].values()]
    config = json.loads((folder / "config.json").read_text())
    assert msgspec.convert(config, Width) == SMALL
    assert config["vocab_size"] == 4096


def test_heads_stand_beside_those_that_they_share_keys_with() -> None:
    old = Width(hidden_size=1, intermediate_size=1, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4,
                head_dim=64)  # fmt: skip
    assert head_places(8, 32, old, EIGHT) == [0, 1, 4, 5, 8, 9, 12, 13]
    assert head_places(4, 8, old, EIGHT) == [0, 1, 2, 3]


def test_padding() -> None:
    assert padded(torch.ones(1, 2), 2, 3).tolist() == [[1, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "head_dim", "num_attention_heads"])
def test_a_smaller_shape_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(AssertionError):
        widen(tmp_path / "small", msgspec.structs.replace(SMALL, **{name: 4}))
