"""How layers are divided into groups."""

from __future__ import annotations

from itertools import cycle, islice

import pytest

from penstock.engine_core.models.kv_groups import divide, held_layers, one_group


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
