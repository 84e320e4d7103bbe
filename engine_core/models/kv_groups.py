"""KV groups: layers that need the same keys, all groups with equally many, so that one pool of blocks serves them.

A group of layers that see a window of w tokens holds little more than w tokens of a sequence, however long it grows.
Groups of one size keep a block's bytes the same for every group; a group with fewer layers is padded. Where layers have
pages of two sizes, several small ones stand in a place of the large one. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from penstock.engine_core.kv.block_layout import HOLDS_ALL, BlockLayout, columns_of
from penstock.engine_core.models.layer_spec import PageKind
from penstock.engine_core.models.spec import ModelSpec

Kind = tuple[int, int]  # of layers in a group: their window, and how many of their pages a place holds
MOST_GROUPS = 12  # tables of a slot; every one costs the host a little in each step
GAIN = 0.95  # groups must need no more than this share of what one group would
ALIKE = 1.02  # of two sizes that need about the same, the one with less padding is taken


class KvGroups(msgspec.Struct, frozen=True):
    """How a model's layers are divided."""

    windows: tuple[int, ...]  # of each group; 0: it holds everything
    layers: tuple[int, ...]  # the group of each layer
    pages: int  # places of a block, each for the largest page that a layer has
    filled: float  # places that layers fill, of all groups

    @property
    def padding(self) -> float:
        """Places that no layer fills, of all groups."""
        return len(self.windows) * self.pages - self.filled


class PagePlace(NamedTuple):
    """Where a layer's pages are in the memory of a block."""

    numbers: int  # of a token in the place
    place: int  # which of the block's places of so many numbers
    part: int  # which of the place's `parts` is the layer's
    parts: int


def one_group(layers: int) -> KvGroups:
    """All layers hold everything."""
    return KvGroups((HOLDS_ALL,), (0,) * layers, layers, layers)


def divide(windows: Sequence[int], length: int, block_size: int, parts: Sequence[int] = ()) -> KvGroups:
    """The groups of layers with these windows, for sequences of up to `length` tokens. A window that is as long holds
    everything. Groups that hold everything come first. parts: how many such layers' pages the largest page has room
    for; empty: all are as large.

    One group for all layers where division would gain little.
    """
    parts = parts or [1] * len(windows)
    kinds = [(window if window < length else HOLDS_ALL, part) for window, part in zip(windows, parts, strict=True)]
    counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    single, filled = one_group(len(kinds)), sum(1 / part for part in parts)
    if {window for window, _ in counts} <= {HOLDS_ALL}:
        return single
    most = max(-(-count // part) for (_, part), count in counts.items())
    found = [sized(kinds, counts, pages, filled) for pages in range(1, most + 1)]
    found = [groups for groups in found if len(groups.windows) <= MOST_GROUPS]
    costs = [held_layers(groups, length, block_size) for groups in found]
    least = min(costs)
    if least > GAIN * filled * columns_of(length, block_size):
        return single
    near = [groups for groups, cost in zip(found, costs, strict=True) if cost <= ALIKE * least]
    return min(near, key=lambda groups: (groups.padding, len(groups.windows)))


def sized(kinds: Sequence[Kind], counts: dict[Kind, int], pages: int, filled: float) -> KvGroups:
    """Groups of `pages` places. counts: layers of each kind, in the order of the groups."""
    windows: list[int] = []
    first = {}
    for kind, count in counts.items():
        first[kind] = len(windows)
        windows += [kind[0]] * -(-count // (pages * kind[1]))
    seen = dict.fromkeys(counts, 0)
    layers = []
    for kind in kinds:
        layers.append(first[kind] + seen[kind] // (pages * kind[1]))
        seen[kind] += 1
    return KvGroups(tuple(windows), tuple(layers), pages, filled)


def held_layers(groups: KvGroups, length: int, block_size: int) -> int:
    """What one sequence of `length` tokens holds, in blocks of one place."""
    return groups.pages * BlockLayout(block_size, groups.windows).steady(length)


def with_kv_groups(spec: ModelSpec, length: int, block_size: int, *, drafting: bool = False) -> ModelSpec:
    """The model with its layers in groups, served up to `length` tokens.

    drafting: a draft model or head shares the tables of the first group, so that one must hold everything.
    """
    if spec.encoder or spec.recurrences:
        return spec  # states of recurrent layers are found by the prefixes of one group
    own = [attention for attention in spec.attentions if not attention.kv_shared]
    largest = max(attention.page_numbers for attention in own)
    if any(largest % attention.page_numbers for attention in own):
        return spec  # a page that is not a whole part of the largest has no place
    parts = [largest // attention.page_numbers for attention in own]
    groups = divide([attention.window for attention in own], length, block_size, parts)
    if groups.windows == (HOLDS_ALL,) or (drafting and groups.windows[0] != HOLDS_ALL):
        return spec
    found, layers = iter(groups.layers), []
    latest: dict[PageKind, int] = {}
    for layer in spec.blocks:
        if (attention := layer.attention) is not None:
            kind = attention.page_kind
            if not attention.kv_shared:
                latest[kind] = next(found)
            layer = layer.with_attention(kv_group=latest[kind])
        layers.append(layer)
    return msgspec.structs.replace(spec.with_layers(tuple(layers)), kv_windows=groups.windows)


def page_places(spec: ModelSpec) -> tuple[PagePlace, ...]:
    """Where each layer with attention has its pages, of a model or of a stage or rank of it. Layers of different groups
    share places, since no two groups share a block, and small pages of one group share a place. Layers that share keys
    and values share their pages."""
    largest = max((attention.page_numbers for attention in spec.attentions), default=0)
    seen: dict[tuple[int, int], int] = {}
    latest: dict[PageKind, PagePlace] = {}
    found = []
    for attention in spec.attentions:
        kind, own = attention.page_kind, attention.page_numbers
        if not (attention.kv_shared and kind in latest):
            numbers = largest if len(spec.kv_windows) > 1 and largest % own == 0 else own
            at, parts = seen.get((attention.kv_group, numbers), 0), numbers // own
            seen[attention.kv_group, numbers] = at + 1
            latest[kind] = PagePlace(numbers, at // parts, at % parts, parts)
        found.append(latest[kind])
    return tuple(found)


def place_sizes(spec: ModelSpec) -> tuple[int, ...]:
    """Numbers of a token in each of a block's places."""
    return tuple(numbers for numbers, _ in dict.fromkeys(place[:2] for place in page_places(spec)))


def page_parts(spec: ModelSpec) -> dict[int, int]:
    """By group, as how many blocks its layers see each."""
    return {
        attention.kv_group: place.parts for attention, place in zip(spec.attentions, page_places(spec), strict=True)
    }


def layout_of(spec: ModelSpec, block_size: int, step_tokens: int, stages: int) -> BlockLayout:
    """What the model's sequences hold at most, where a step of `step_tokens` runs in each stage and one more waits."""
    return BlockLayout(block_size, spec.kv_windows, stages + 1, (stages + 1) * step_tokens)


def kv_groups_text(spec: ModelSpec) -> str:
    """The groups in words; empty where all layers are one that holds everything."""
    windows = spec.kv_windows
    if windows == (HOLDS_ALL,):
        return ""
    told_of = [f"{windows.count(window)} of " + (f"the last {window:,} tokens" if window else "all tokens")
               for window in sorted(set(windows))]  # fmt: skip
    parts, sizes = page_parts(spec), place_sizes(spec)
    pages = len(sizes)
    filled = sum(1 / parts[attention.kv_group] for attention in spec.attentions if not attention.kv_shared)
    padding = len(windows) * pages - filled
    told = f", {padding:g} of them padding" if padding else ""
    small = f", whose pages have room for {max(parts.values())} of the smallest" if max(parts.values()) > 1 else ""
    return f"{' and '.join(told_of)}, of {pages} layers each{small}{told}"
