from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from penstock.engine_core import embedded, loading
from penstock.engine_core.distributed.group import Group
from penstock.engine_core.models import registry
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.draft_spec import FIRST, DraftSpec, HeadSpec
from penstock.engine_core.models.memory_estimate import weights
from penstock.engine_core.models.sharding import check_ranks, held_bytes, stage_layers, stage_spec
from penstock.engine_core.models.spec import ModelSpec, read_spec
from penstock.protocol.errors import ConfigError
from tests.engine_core.execution.image_scene import VISION, seeing_spec
from tests.engine_core.models.specs import resized

FOLDER = embedded.demo_folder()
SPEC = read_spec(FOLDER)
CPU = torch.device("cpu")


def spec_of(layers: int, vocabulary: int, *, tied: bool) -> ModelSpec:
    return resized(
        SPEC, layers=layers, windows=(0,) * layers, vocab_size=vocabulary, tied=tied, hidden=64, intermediate=128
    )


def stage_weights(spec: ModelSpec, stages: int, stage: int) -> int:
    return held_bytes(stage_spec(spec, stages, stage), 1, begins=stage == 0, ends=stage == stages - 1)


def part(stage: int, stages: int, spec: ModelSpec = SPEC) -> Decoder:
    return registry.build(spec, torch.float32, CPU, 64, group=Group(stage=stage, stages=stages))


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocabulary", [16, 10_000, 1_000_000])
def test_stages_have_all_layers_in_order_and_the_largest_is_as_small_as_can_be(
    stages: int, tied: bool, vocabulary: int
) -> None:
    spec = spec_of(8, vocabulary, tied=tied)
    found = stage_layers(spec, stages)
    assert [layer for layers in found for layer in layers] == list(range(8))
    assert all(found)
    largest = max(stage_weights(spec, stages, stage) for stage in range(stages))
    layer = weights(stage_spec(spec, 8, 3))
    assert largest <= weights(spec) / stages + layer + vocabulary * 64


def test_embeddings_count_as_layers_do() -> None:
    assert [len(layers) for layers in stage_layers(spec_of(80, 16, tied=False), 4)] == [20, 20, 20, 20]
    first, *middle, last = [len(layers) for layers in stage_layers(spec_of(8, 1 << 16, tied=False), 4)]
    assert first == last == 1
    assert sum(middle) == 6


def test_what_drafts_on_the_last_stage_counts_as_its_layers_do() -> None:
    """A draft model of as many weights as two of the layers; and on each of two ranks, which have half of a layer."""
    spec = spec_of(12, 16, tied=False)
    draft = DraftSpec(layers=spec.part((0, 1)))
    assert [len(layers) for layers in stage_layers(spec, 2)] == [6, 6]
    assert [len(layers) for layers in stage_layers(spec, 2, draft)] == [7, 5]
    assert [len(layers) for layers in stage_layers(spec, 2, draft, 2)] == [8, 4]


def test_a_heads_embedding_counts_on_the_last_stage() -> None:
    layers = spec_of(1, 16, tied=False)
    head = DraftSpec(layers=layers, head=HeadSpec(version=FIRST, layers=layers))
    wide, tied = (spec_of(12, 4096, tied=tied) for tied in (False, True))
    (_, without), (_, beside) = stage_layers(wide, 2), stage_layers(wide, 2, head)
    assert len(beside) < len(without)
    for spec in (wide, tied):
        model = registry.build(spec, torch.float32, CPU, 64, group=Group(stage=1, stages=2), draft=head)
        assert model.spec.layers == len(stage_layers(spec, 2, head)[1])
        assert model.embedding is not None
        part = stage_spec(spec, 2, 1, head)
        assert model.weight_bytes == 4 * held_bytes(part, 1, begins=False, ends=True, head=True)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="--pipeline-parallel-size"):
        stage_layers(spec_of(3, 16, tied=True), 4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_stages_tensors_are_as_many_as_reckoned(tied: bool, stages: int) -> None:
    spec = spec_of(6, 500, tied=tied)
    for stage in range(stages):
        assert part(stage, stages, spec).weight_bytes == 4 * stage_weights(spec, stages, stage)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_stages_load_what_the_whole_model_has(load_format: str) -> None:
    whole = part(0, 1)
    loading.load(whole, FOLDER, load_format)
    expected = {name: found.tensor for name, found in whole.destinations().items()}
    seen: set[str] = set()
    for stage in range(3):
        model = part(stage, 3)
        loading.load(model, FOLDER, load_format)
        for name, found in model.destinations().items():
            assert found.tensor is not None
            assert expected[name] is not None
            assert torch.equal(found.tensor, expected[name]), name  # type: ignore[arg-type]
            seen.add(name)
    assert seen == set(expected)


def test_a_tied_embedding_stands_at_both_ends_alone() -> None:
    assert SPEC.tied
    names = ["model.embed_tokens.weight" in part(stage, 3).destinations() for stage in range(3)]
    assert names == [True, False, True]
    norms = ["model.norm.weight" in part(stage, 3).destinations() for stage in range(3)]
    assert norms == [False, False, True]


def test_layers_that_share_stay_in_one_stage() -> None:
    shared = SPEC.with_layers((*SPEC.blocks[:-1], SPEC.blocks[-1].with_attention(kv_shared=True)))
    assert len(stage_layers(shared, 1)) == 1
    with pytest.raises(ConfigError, match="layers of the model share keys and values"):
        stage_layers(shared, 2)


def test_ranks_share_the_key_value_heads_of_each_kind_of_layer() -> None:
    first, *others = SPEC.blocks
    mixed = SPEC.with_layers((first.with_attention(kv_heads=4), *(one.with_attention(kv_heads=3) for one in others)))
    with pytest.raises(ConfigError, match="it must divide the model's 3 key-value heads"):
        check_ranks(mixed, 2)


def test_levels_of_images_stay_in_the_first_stage() -> None:
    """DeepStack adds rows of the encoder cache, which the first stage has."""
    spec = seeing_spec(replace(VISION, levels=(0, 1, 2)), layers=4)
    assert stage_layers(spec, 1) == (range(4),)
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size.*first stage gets \d of 4 layers.*DeepStack"):
        stage_layers(spec, 2)
    assert stage_layers(seeing_spec(layers=4), 2)[0].stop >= 2
