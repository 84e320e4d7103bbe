"""Which type the cache has, what follows for its bytes and pages, and the GPUs that cannot write it."""

from __future__ import annotations

import msgspec
import pytest
import torch

from penstock.engine_core.execution.forward import kv_pages
from penstock.engine_core.models.draft_spec import DraftSpec, HeadSpec
from penstock.engine_core.models.kv_cache import check_kv_cache, kv_label, with_draft_cache, with_kv_cache
from penstock.engine_core.models.memory_estimate import block_bytes, drafting_bytes
from penstock.engine_core.models.sharding import rank_spec
from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol.errors import ConfigError
from tests.engine_core.execution.harness import tiny_spec


def in_fp8(spec: ModelSpec) -> list[bool]:
    return [layer.attention.kv_fp8 for layer in spec.blocks]


def test_every_layer_has_the_type_that_is_asked_for() -> None:
    spec = tiny_spec()
    assert with_kv_cache(spec, "auto") == spec
    found = with_kv_cache(spec, "fp8")
    assert in_fp8(found) == [True] * spec.layers
    assert (kv_label(found), kv_label(spec)) == ("fp8_e4m3", "")
    assert with_kv_cache(found, "auto") == found
    assert with_kv_cache(found, "bfloat16") == spec


def test_pages_and_blocks_are_of_a_byte_a_number() -> None:
    spec = with_kv_cache(tiny_spec(), "fp8")
    assert block_bytes(spec, 16, 4) * 4 == block_bytes(tiny_spec(), 16, 4)
    states = 16 * spec.hidden * 2
    assert drafting_bytes(spec, 16, 2, states=True) == block_bytes(spec, 16, 2) + states
    pages = kv_pages(rank_spec(spec, 1), 3, 16, torch.float32, torch.device("cpu"))
    assert {side.dtype for pair in pages for side in pair} == {torch.float8_e4m3fn}
    assert sum(side.nbytes for pair in pages for side in pair) == 4 * block_bytes(spec, 16, 4)
    assert not any(side.view(torch.uint8).any() for pair in pages for side in pair)


def test_drafts_have_the_same_type() -> None:
    spec = tiny_spec()
    assert with_draft_cache(None, "fp8") is None
    model = with_draft_cache(DraftSpec(layers=spec), "fp8")
    head = with_draft_cache(DraftSpec(layers=spec, head=HeadSpec(version=1, layers=spec)), "fp8")
    assert model is not None
    assert model.head is None
    assert all(in_fp8(model.layers))
    assert head is not None
    assert head.head is not None
    assert all(in_fp8(head.head.layers))
    assert msgspec.structs.asdict(head)["layers"] == head.head.layers


@pytest.mark.parametrize("capability", [80, 86])
def test_a_gpu_without_8_bit_floats_is_refused(capability: int) -> None:
    spec = with_kv_cache(tiny_spec(), "fp8")
    why = rf"--kv-cache-dtype.*fp8.*need compute capability 8\.9, and A100 has {capability / 10}; give bfloat16"
    with pytest.raises(ConfigError, match=why):
        check_kv_cache(spec, "fp8", "A100", capability)
    check_kv_cache(tiny_spec(), "auto", "A100", capability)
    for other in (0, 89, 90):
        check_kv_cache(spec, "fp8", "another", other)
