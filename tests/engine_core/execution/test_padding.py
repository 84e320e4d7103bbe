"""Draft models whose tables have more or fewer rows than the model's: the same tokens, and drafts that come true."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from penstock.engine_core import loading
from penstock.engine_core.execution.draft_model import LEAST, Draft, PaddedModel, fitted
from penstock.engine_core.models import registry
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.spec import ModelSpec
from tests.engine_core.execution.harness import LENGTH, VOCABULARY, decode, prefill, tiny_model, tiny_runner, tiny_spec
from tests.engine_core.execution.test_draft_model import MOST, Bench, drafting_runner, same
from tests.engine_core.execution.test_same_tokens import lives, outputs

STEPS = 10


def padded(size: int) -> tuple[Decoder, ModelSpec]:
    """The tiny model over tables of another size: equal where both have rows."""
    spec = msgspec.structs.replace(tiny_spec(), vocab_size=size)
    model = registry.build(spec, torch.float32, torch.device("cpu"), LENGTH)
    with torch.inference_mode():
        loading.load(model, Path(), "dummy", seed=3)
        sources = tiny_model(packed=False).destinations()
        for name, destination in model.destinations().items():
            source, target = sources[name].tensor, destination.tensor
            assert source is not None
            assert target is not None
            rows = min(len(source), len(target))
            target[:rows] = source[:rows]
    return model, spec


@pytest.mark.parametrize("size", [VOCABULARY - 1, VOCABULARY + 31])
def test_drafts_of_a_padded_model(size: int) -> None:
    model = tiny_model()
    plain = lives()
    runner = tiny_runner(model, blocks=200)
    prefill(runner, plain)
    decode(runner, plain, STEPS + 2 * MOST)
    bench = Bench(drafting_runner(model, Draft(*padded(size), MOST)), lives())
    bench.prefill(MOST)
    while min(len(life.output) for life in bench.lives) < STEPS:
        bench.decode(MOST, 2, MOST)
    assert same(bench, outputs(plain))
    assert bench.accepted > 0.7 * bench.entries


def test_logits_have_the_size_that_is_wanted() -> None:
    hidden = torch.randn(3, tiny_spec().hidden)
    with torch.inference_mode():
        model = tiny_model()
        plain = model.logits(hidden)
        fewer, more = (PaddedModel(model, VOCABULARY, VOCABULARY + by).logits(hidden) for by in (-7, 5))
    assert torch.equal(fewer, plain[:, :-7])
    assert torch.equal(more[:, :VOCABULARY], plain)
    assert (more[:, VOCABULARY:] == LEAST).all()


def test_a_model_of_the_same_size_is_itself() -> None:
    model = tiny_model()
    assert fitted(model, VOCABULARY, VOCABULARY) is model
