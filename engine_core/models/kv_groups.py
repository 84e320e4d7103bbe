"""KV groups: layers that need the same keys, all groups with equally many, so that one pool of blocks serves them.

A group of layers that see a window of w tokens holds little more than w tokens of a sequence, however long it grows.
Groups of one size keep a block's bytes the same for every group; a group with fewer layers is padded. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.engine_core.kv.block_layout import HOLDS_ALL, BlockLayout
from penstock.engine_core.models.layer_spec import AttentionSpec
from penstock.engine_core.models.spec import ModelSpec

MOST_GROUPS = 8  # tables of a slot; every one costs the host a little in each step
GAIN = 0.95  # groups must need no more than this share of what one group would
ALIKE = 1.02  # of two sizes that need about the same, the one with less padding is taken


class KvGroups(msgspec.Struct, frozen=True):
    """How a model's layers are divided."""

    windows: tuple[int, ...]  # of each group; 0: it holds everything
    layers: tuple[int, ...]  # the group of each layer
    pages: int  # layers of a group, padding among them

    @property
    def padding(self) -> int:
        """Layers that are not there, of all groups."""
        return len(self.windows) * self.pages - len(self.layers)


def one_group(layers: int) -> KvGroups:
    """All layers hold everything."""
    return KvGroups((HOLDS_ALL,), (0,) * layers, layers)


def divide(windows: Sequence[int], length: int, block_size: int) -> KvGroups:
    """The groups of layers with these windows, for sequences of up to `length` tokens. A window that is as long holds
    everything. Groups that hold everything come first.

    One group for all layers where division would gain little.
    """
    kinds = [window if window < length else HOLDS_ALL for window in windows]
    counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    single = one_group(len(kinds))
    if set(counts) <= {HOLDS_ALL}:
        return single
    found = [sized(kinds, counts, pages) for pages in range(1, max(counts.values()) + 1)]
    found = [groups for groups in found if len(groups.windows) <= MOST_GROUPS]
    costs = [held_layers(groups, length, block_size) for groups in found]
    least = min(costs)
    if least > GAIN * held_layers(single, length, block_size):
        return single
    near = [groups for groups, cost in zip(found, costs, strict=True) if cost <= ALIKE * least]
    return min(near, key=lambda groups: (groups.padding, len(groups.windows)))


def sized(kinds: Sequence[int], counts: dict[int, int], pages: int) -> KvGroups:
    """Groups of `pages` layers. counts: layers of each kind, in the order of the groups."""
    windows: list[int] = []
    first = {}
    for kind, count in counts.items():
        first[kind] = len(windows)
        windows += [kind] * -(-count // pages)
    seen = dict.fromkeys(counts, 0)
    layers = []
    for kind in kinds:
        layers.append(first[kind] + seen[kind] // pages)
        seen[kind] += 1
    return KvGroups(tuple(windows), tuple(layers), pages)


def held_layers(groups: KvGroups, length: int, block_size: int) -> int:
    """What one sequence of `length` tokens holds, in blocks of one layer."""
    return groups.pages * BlockLayout(block_size, groups.windows).steady(length)


def with_kv_groups(spec: ModelSpec, length: int, block_size: int, *, drafting: bool = False) -> ModelSpec:
    """The model with its layers in groups, served up to `length` tokens.

    drafting: a draft model or head shares the tables of the first group, so that one must hold everything.
    """
    if spec.encoder or spec.recurrences:
        return spec  # states of recurrent layers are found by the prefixes of one group
    if len({attention.page_numbers for attention in spec.attentions}) > 1:
        return spec  # blocks would differ in size
    groups = divide([attention.window for attention in spec.attentions], length, block_size)
    if groups.windows == (HOLDS_ALL,) or (drafting and groups.windows[0] != HOLDS_ALL):
        return spec
    found = iter(groups.layers)
    layers = (layer.with_attention(kv_group=next(found)) if layer.attention else layer for layer in spec.blocks)
    return msgspec.structs.replace(spec.with_layers(tuple(layers)), kv_windows=groups.windows)


def page_places(spec: ModelSpec) -> tuple[int, ...]:
    """For each layer with attention, of a model or of a stage of it, which of a block's pages is its own: layers of
    different groups share pages, since no two groups share a block."""
    seen: dict[int, int] = {}
    found = []
    for attention in spec.attentions:
        found.append(seen.get(attention.kv_group, 0))
        seen[attention.kv_group] = found[-1] + 1
    return tuple(found)


def paged_layers(spec: ModelSpec) -> tuple[AttentionSpec, ...]:
    """For each of a block's pages a layer that has it: as many as the group has that has most layers here."""
    found: dict[int, AttentionSpec] = {}
    for place, attention in zip(page_places(spec), spec.attentions, strict=True):
        found.setdefault(place, attention)
    return tuple(found.values())


def layout_of(spec: ModelSpec, block_size: int, step_tokens: int, stages: int) -> BlockLayout:
    """What the model's sequences hold at most, where a step of `step_tokens` runs in each stage and one more waits."""
    return BlockLayout(block_size, spec.kv_windows, stages + 1, (stages + 1) * step_tokens)


def kv_groups_text(spec: ModelSpec) -> str:
    """The groups in words; empty where all layers are one that holds everything."""
    windows = spec.kv_windows
    if windows == (HOLDS_ALL,):
        return ""
    parts = [f"{windows.count(window)} of " + (f"the last {window:,} tokens" if window else "all tokens")
             for window in sorted(set(windows))]  # fmt: skip
    pages = len(paged_layers(spec))
    padding = len(windows) * pages - len(spec.attentions)
    told = f", {padding} of them padding" if padding else ""
    return f"{' and '.join(parts)}, of {pages} layers each{told}"
