"""How layers are divided into groups, and where their pages are."""

from __future__ import annotations

from itertools import cycle, islice

import pytest
import torch

from penstock.engine_core.execution.forward import kv_pages
from penstock.engine_core.models.kv_groups import divide, held_layers, one_group, page_parts, with_kv_groups
from penstock.engine_core.models.memory_estimate import block_bytes
from penstock.engine_core.models.sharding import rank_spec
from tests.engine_core.models.specs import small_spec


def pattern(layers: int, *windows: int) -> list[int]:
    return list(islice(cycle(windows), layers))


@pytest.mark.parametrize(
    ("windows", "length", "groups", "pages"),
    [
        (pattern(62, *[1024] * 5, 0), 131072, (0, *[1024] * 6), 10),  # Gemma 3 27B
        (pattern(24, 128, 0), 131072, (0, 128), 12),  # gpt-oss 20B
        (pattern(32, 4096), 32768, (4096,), 32),  # Mistral 7B v0.1
        (pattern(32, 4096, 4096, 4096, 0), 65536, (0, 4096, 4096, 4096), 8),  # Olmo 3 7B
        (pattern(32, 4096), 4096, (0,), 32),  # a window as long as what is served
        (pattern(32, 0), 32768, (0,), 32),
        (pattern(42, 4096, 0), 4352, (0,), 42),  # it would gain 3 %
    ],
)
def test_known_models(windows: list[int], length: int, groups: tuple[int, ...], pages: int) -> None:
    found = divide(windows, length, 16)
    assert (found.windows, found.pages) == (groups, pages)
    assert held_layers(found, length, 16) <= held_layers(one_group(len(windows)), length, 16)


@pytest.mark.parametrize(
    ("turn", "count", "sizes", "groups", "pages", "share"),
    [
        (6, 60, (1, 2), (0, *[1024] * 10), 5, 0.10),  # Gemma 4 31B: 16 heads of 256, 4 of 512
        (6, 30, (1, 2), (0, *[1024] * 9), 3, 0.13),  # 26B-A4B: 8 and 2
        (5, 15, (2, 1), (0, 512, 512), 3, 0.35),  # E2B's layers with keys of their own: 1 and 1
    ],
)
def test_small_pages_share_a_place(
    turn: int, count: int, sizes: tuple[int, int], groups: tuple[int, ...], pages: int, share: float
) -> None:
    windows = pattern(count, *[groups[-1]] * (turn - 1), 0)
    parts = [sizes[window == 0] for window in windows]
    found = divide(windows, 131072, 16, parts)
    assert (found.windows, found.pages) == (groups, pages)
    assert [found.windows[group] for group in found.layers] == windows
    for group in range(len(found.windows)):
        own = [part for part, at in zip(parts, found.layers, strict=True) if at == group]
        assert sum(1 / part for part in own) <= pages
    whole = sum(1 / part for part in parts) * 131072 / 16
    assert share - 0.02 < held_layers(found, 131072, 16) / whole < share


def test_every_layer_is_in_a_group_of_its_window_that_has_room() -> None:
    for windows in (pattern(62, *[1024] * 5, 0), pattern(7, 8, 64, 0), pattern(11, 8, 0, 0)):
        found = divide(windows, 1 << 17, 16)
        assert [found.windows[group] for group in found.layers] == windows
        assert max(found.layers.count(group) for group in range(len(found.windows))) <= found.pages
        assert found.padding == len(found.windows) * found.pages - len(windows)


def test_gemma_holds_less_than_a_fourth_at_128k() -> None:
    windows = pattern(62, *[1024] * 5, 0)
    found = divide(windows, 131072, 16)
    assert 4 * held_layers(found, 131072, 16) < held_layers(one_group(62), 131072, 16)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kv_heads", [(4, 2), (2, 4), (4, 1), (6, 4)])
def test_layers_have_pages_of_their_own_but_for_those_that_share(kv_heads: tuple[int, int], size: int) -> None:
    """What a layer writes to its group's block stays there when all others have written to theirs; on a rank, too,
    where pages may be of other sizes."""
    windows = [8, 8, 0, 8, 8, 0, 8, 0]
    spec = small_spec(heads=12, windows=windows)
    layers = [
        layer.with_attention(kv_heads=kv_heads[window == 0], kv_shared=at > 5)
        for at, (layer, window) in enumerate(zip(spec.blocks, windows, strict=True))
    ]
    spec = rank_spec(with_kv_groups(spec.with_layers(tuple(layers)), 1 << 12, 4), size)
    blocks, parts = len(spec.kv_windows), page_parts(spec)
    pages = kv_pages(spec, blocks, 4, torch.float32, torch.device("cpu"))
    places = []
    for at, (attention, (keys, values)) in enumerate(zip(spec.attentions, pages, strict=True)):
        block = (1 + attention.kv_group) * parts[attention.kv_group]
        places.append((keys[block], values[block]))
        if not attention.kv_shared:
            keys[block], values[block] = 2 * at + 1, 2 * at + 2
    for at, (keys, values) in enumerate(places):
        source = {6: 4, 7: 5}.get(at, at)
        assert (keys == 2 * source + 1).all()
        assert (values == 2 * source + 2).all()
    memory = {side.untyped_storage().data_ptr(): side.untyped_storage() for own in pages for side in own}
    held = sum(one.nbytes() for one in memory.values())
    assert 0 <= held - (blocks + 1) * block_bytes(spec, 4, 4) <= 64 * len(memory)
