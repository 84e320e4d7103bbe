"""What a recurrent layer computes and which tensors it has, as data. Imports no torch: planning reads it, too.

A recurrence keeps a state of a fixed size for each sequence in place of keys and values, and the latest inputs of a
short convolution.
"""

from __future__ import annotations

import math
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Self

import msgspec

from penstock.engine_core.models.quantization.weight_format import Formats
from penstock.protocol.steps import STATE_PIECE, keep_window

Shape = tuple[int, ...]
FLOAT = 4  # bytes


class StateShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer keeps of a sequence. Without heads it has a convolution's inputs alone."""

    channels: int  # of the convolution
    width: int
    heads: int = 0
    key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    updates: bool = False  # as of `kernels.states.RecurrentCache`

    def snapshot_bytes(self, item_bytes: int) -> int:
        """Of a state as of one position. item_bytes: of a number in the model's type."""
        return self.heads * self.key_dim * self.value_dim * FLOAT + (self.width - 1) * self.channels * item_bytes

    def slot_bytes(self, item_bytes: int, most_steps: int) -> int:
        """Of a running sequence, whose decoding rows have so many tokens at most."""
        numbers = self.key_heads * self.key_dim + (1 + self.updates) * self.heads * self.value_dim
        entry = numbers * item_bytes + 2 * self.heads * FLOAT if self.heads else 0
        found = ring_entries(most_steps) * entry + self.heads * self.key_dim * self.value_dim * FLOAT
        inputs = self.width - 1 + most_steps + keep_window(most_steps - 1) - 1
        return found + inputs * self.channels * item_bytes


def ring_entries(most_steps: int) -> int:
    """As `kernels.states.ring_length`, which a test holds this to."""
    return -(-(STATE_PIECE + most_steps) // 16) * 16


class RecurrenceMeta(msgspec.StructMeta, ABCMeta):
    """Of structs with abstract methods."""


class RecurrenceSpec(msgspec.Struct, metaclass=RecurrenceMeta, frozen=True, kw_only=True):
    """What every kind has."""

    place: ClassVar[str]  # its tensors' prefix within the layer
    output: ClassVar[str] = "out_proj"  # the last of its products, whose inputs ranks share
    convolution: ClassVar[str] = "conv1d"

    width: int  # of the convolution
    formats: Formats = ()  # of its products that are quantized

    @property
    @abstractmethod
    def mixed(self) -> tuple[int, ...]:
        """Channels of the convolution: of the parts that it is over, one behind the other."""

    @abstractmethod
    def products(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        """Outputs and inputs of its matrices by their names."""

    @abstractmethod
    def others(self) -> Mapping[str, Shape]:
        """Shapes of its other tensors by their names."""

    @abstractmethod
    def state(self) -> StateShape:
        """What it keeps of a sequence."""

    @abstractmethod
    def split(self) -> tuple[str, int]:
        """What ranks divide evenly, in words, and how much of it there is."""

    @abstractmethod
    def share(self, size: int) -> Self:
        """One of so many ranks' part."""

    @abstractmethod
    def cut(self, name: str) -> int:
        """How many of a product's outputs, or of the last one's inputs, stand together in what a rank has."""


class GatedDeltaSpec(RecurrenceSpec, frozen=True, kw_only=True):
    """Gated DeltaNet (Yang et al., 2025): `key_dim` times `value_dim` numbers for each value head, which decay, and
    which every token corrects. The convolution is over queries, keys and values."""

    place: ClassVar[str] = "linear_attn"

    key_heads: int
    value_heads: int  # a multiple of the key heads
    key_dim: int
    value_dim: int
    fused: bool = False  # one tensor has queries, keys, values and gates by key head, another betas and decays

    @property
    def keys(self) -> int:
        """Numbers in all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers in all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> tuple[int, ...]:
        return self.keys, self.keys, self.values

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return sum(self.mixed)

    def products(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        heads = self.value_heads
        if self.fused:
            found = {"in_proj_qkvz": self.channels + self.values, "in_proj_ba": 2 * heads}
        else:
            found = {"in_proj_qkv": self.channels, "in_proj_z": self.values, "in_proj_b": heads, "in_proj_a": heads}
        return {**{name: (outputs, hidden) for name, outputs in found.items()}, self.output: (hidden, self.values)}

    def others(self) -> Mapping[str, Shape]:
        heads = (self.value_heads,)
        conv = (self.channels, 1, self.width)
        return {"conv1d.weight": conv, "A_log": heads, "dt_bias": heads, "norm.weight": (self.value_dim,)}

    def state(self) -> StateShape:
        return StateShape(
            channels=self.channels, width=self.width, heads=self.value_heads, key_heads=self.key_heads,
            key_dim=self.key_dim, value_dim=self.value_dim, updates=True,
        )  # fmt: skip

    def split(self) -> tuple[str, int]:
        return "key heads of linear attention", self.key_heads

    def share(self, size: int) -> Self:
        return msgspec.structs.replace(self, key_heads=self.key_heads // size, value_heads=self.value_heads // size)

    def cut(self, name: str) -> int:
        if name == "in_proj_qkv":
            return math.gcd(self.keys, self.values)
        outputs, inputs = self.products(1)[name]
        return inputs if name == self.output else outputs


class MambaSpec(RecurrenceSpec, frozen=True, kw_only=True):
    """Mamba-2 (Dao and Gu, 2024): `state_dim` times `head_dim` numbers for each head, which decay by time steps. What
    is written to the state and what reads it are those of a group of heads. The convolution is over inputs and both."""

    place: ClassVar[str] = "mamba"

    heads: int  # a multiple of the groups
    head_dim: int
    groups: int
    state_dim: int
    conv_bias: bool = True
    # Of what the gate multiplies: behind it ("gated"), before it ("plain"); empty: none.
    norm: str = "gated"
    scales: tuple[float, ...] = ()  # of a token's gates, inputs, writes, reads and times, before all else; empty: none

    @property
    def inner(self) -> int:
        """Numbers in all inputs of a token."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Numbers that a token writes to the states by, of all groups; as many read them."""
        return self.groups * self.state_dim

    @property
    def mixed(self) -> tuple[int, ...]:
        return self.inner, self.shared, self.shared

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return sum(self.mixed)

    def products(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        return {"in_proj": (self.inner + self.channels + self.heads, hidden), self.output: (hidden, self.inner)}

    def others(self) -> Mapping[str, Shape]:
        heads = (self.heads,)
        found: dict[str, Shape] = {"conv1d.weight": (self.channels, 1, self.width), "A_log": heads, "D": heads}
        if self.conv_bias:
            found["conv1d.bias"] = (self.channels,)
        if self.norm:
            found["norm.weight"] = (self.inner,)
        return found | {"dt_bias": heads}

    def state(self) -> StateShape:
        return StateShape(
            channels=self.channels, width=self.width, heads=self.heads, key_heads=self.groups, key_dim=self.state_dim,
            value_dim=self.head_dim,
        )  # fmt: skip

    def split(self) -> tuple[str, int]:
        return "groups of Mamba heads", self.groups

    def share(self, size: int) -> Self:
        return msgspec.structs.replace(self, heads=self.heads // size, groups=self.groups // size)

    def cut(self, name: str) -> int:
        return self.inner if name == self.output else math.gcd(self.inner, self.shared, self.heads)


class ShortConvolutionSpec(RecurrenceSpec, frozen=True, kw_only=True):
    """A short convolution alone, of one product's third times its first, and its result times the second (LFM2, Liquid
    AI, 2025)."""

    place: ClassVar[str] = "conv"
    convolution: ClassVar[str] = "conv"

    channels: int  # as many as the residual stream has
    bias: bool = False  # of the convolution and of both products

    @property
    def mixed(self) -> tuple[int, ...]:
        return (self.channels,)

    def products(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        return {"in_proj": (3 * self.channels, hidden), self.output: (hidden, self.channels)}

    def others(self) -> Mapping[str, Shape]:
        found: dict[str, Shape] = {"conv.weight": (self.channels, 1, self.width)}
        if self.bias:
            biases: dict[str, Shape] = {"conv.bias": (self.channels,), "in_proj.bias": (3 * self.channels,)}
            found |= {**biases, "out_proj.bias": (self.channels,)}
        return found

    def state(self) -> StateShape:
        return StateShape(channels=self.channels, width=self.width)

    def split(self) -> tuple[str, int]:
        return "channels of a convolution", self.channels

    def share(self, size: int) -> Self:
        return msgspec.structs.replace(self, channels=self.channels // size)

    def cut(self, name: str) -> int:
        return self.channels
